"""Room that connections share: nobody starves, nobody is forgotten, and what was taken comes back."""

from __future__ import annotations

import asyncio
import random

from rollbridge_gateway.server.connection import SMALL_BYTES, ByteBudget


def test_who_finds_no_room_waits_for_those_before_it() -> None:
    async def play() -> None:
        room, served = ByteBudget(10), []

        async def take(name: str, size: int) -> None:
            await room.take(size)
            served.append(name)

        await room.take(8)
        tasks = [asyncio.create_task(take(name, size)) for name, size in (("large", 10), ("small", 1))]
        await asyncio.sleep(0)
        assert room.is_crowded
        assert served == [], "what would fit does not pass by what came before"
        room.give(8)
        await asyncio.sleep(0)
        assert served == ["large"]
        room.give(10)
        await asyncio.gather(*tasks)
        assert served == ["large", "small"]

    asyncio.run(play())


def test_one_always_has_room_and_small_ones_wait_for_nobody_if_they_ask_for_that() -> None:
    async def play() -> None:
        room = ByteBudget(10)
        await room.take(1_000)
        await room.take(SMALL_BYTES, small_at_once=True)
        assert not room.is_crowded

    asyncio.run(play())


def test_whoever_gives_up_leaves_no_trace() -> None:
    async def play(seed: int) -> None:
        dice, room, inside = random.Random(seed), ByteBudget(100), 0

        async def visit(size: int) -> None:
            nonlocal inside
            await room.take(size)
            inside += size
            try:
                assert inside <= 100 or inside == size
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= size
                room.give(size)

        tasks = [asyncio.create_task(visit(dice.randrange(1, 130))) for _ in range(60)]
        for _ in range(40):
            await asyncio.sleep(0)
            dice.choice(tasks).cancel()
        await asyncio.wait(tasks)
        assert (room.taken, inside, room.is_crowded) == (0, 0, False)
        assert {type(task.exception()) for task in tasks if not task.cancelled()} <= {type(None)}

    for seed in range(200):
        asyncio.run(play(seed))


def test_of_those_who_take_piece_by_piece_one_goes_beyond_the_limit_to_its_end() -> None:
    async def play() -> None:
        room, served = ByteBudget(10), []

        async def take(name: str) -> None:
            await room.take(5, by=name)
            served.append(name)

        await asyncio.gather(take("a"), take("b"))
        await asyncio.wait_for(take("a"), 60)
        await asyncio.wait_for(take("a"), 60)
        tasks = [asyncio.create_task(take("b")), asyncio.create_task(take("c"))]
        await asyncio.sleep(0)
        assert (room.taken, room.is_crowded) == (20, True)
        assert served == ["a", "b", "a", "a"], "one at a time"
        room.give(15, "a")
        await asyncio.gather(*tasks)
        assert served[4:] == ["b", "c"], "the next one may now"
        room.give(10, "b")
        room.give(5, "c")
        assert (room.taken, room.is_crowded) == (0, False)

    asyncio.run(play())


def test_all_who_take_piece_by_piece_come_to_an_end_whoever_gives_up() -> None:
    async def play(seed: int) -> None:
        dice, room, whole = random.Random(seed), ByteBudget(100), []

        async def visit(name: str, pieces: int) -> None:
            taken = 0
            try:
                for _ in range(pieces):
                    await room.take(10, by=name)
                    taken += 10
                    assert room.taken <= 100 + 80, "the limit, and what one takes in all"
                    await asyncio.sleep(0)
                whole.append(name)
            finally:
                room.give(taken, name)

        tasks = [asyncio.create_task(visit(f"{number}", dice.randint(1, 8))) for number in range(60)]
        given_up = set()
        for _ in range(20):
            await asyncio.sleep(0)
            given_up.add(chosen := dice.choice(tasks))
            chosen.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait(tasks)
        assert (room.taken, room.is_crowded) == (0, False)
        assert len(whole) >= len(tasks) - len(given_up)
        assert {type(task.exception()) for task in tasks if not task.cancelled()} <= {type(None)}

    for seed in range(200):
        asyncio.run(play(seed))
