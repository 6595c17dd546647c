"""Room that connections share: nobody starves, nobody is forgotten, and what was taken comes back."""

from __future__ import annotations

import asyncio
import random

from rollbridge_gateway.shell.rooms import SMALL_BYTES, Room


def test_who_finds_no_room_waits_for_those_before_it() -> None:
    async def play() -> None:
        room, served = Room(10), []

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
        room = Room(10)
        await room.take(1_000)
        await room.take(SMALL_BYTES, small_at_once=True)
        assert not room.is_crowded

    asyncio.run(play())


def test_whoever_gives_up_leaves_no_trace() -> None:
    async def play(seed: int) -> None:
        dice, room, inside = random.Random(seed), Room(100), 0

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
