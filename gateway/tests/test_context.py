"""Listings: few at a time, in order, and none for clients that have left."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from rollbridge_gateway.server.context import Listers


def test_few_are_under_way_and_who_has_left_meanwhile_is_dropped() -> None:
    done: list[int] = []

    async def play() -> None:
        listers, go, begun = Listers(2), threading.Event(), threading.Semaphore(0)
        left: set[int] = set()

        def work(number: int) -> None:
            begun.release()
            assert go.wait(60)
            done.append(number)

        tasks = [asyncio.create_task(listers.run(lambda n=n: n in left, work, n)) for n in range(6)]  # type: ignore[misc]
        with ThreadPoolExecutor(1) as others:
            for _ in range(2):
                assert await asyncio.get_running_loop().run_in_executor(others, begun.acquire, True, 60)
        assert not begun.acquire(blocking=False), "a third one has begun"
        left.update((1, 3, 5))
        go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [number for number, item in enumerate(found) if isinstance(item, ConnectionAbortedError)] == [3, 5]
        await listers.run(lambda: True, work, 7)
        listers.close()

    asyncio.run(play())
    assert sorted(done) == [0, 1, 2, 4, 7], "who does not have to wait is answered"
