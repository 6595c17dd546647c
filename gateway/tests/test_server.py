"""A gateway that cannot send what its clients write is not healthy, although it answers them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollbridge_gateway.server.server import SILENCE_S, Server


def gateway(silence_s: float, *, is_alive: bool = True, is_ready: bool = True, namesake: str = "") -> Any:
    return SimpleNamespace(
        is_ready=is_ready,
        register=SimpleNamespace(is_alive=lambda: is_alive, namesake=namesake),
        bridge=SimpleNamespace(sender_silence_s=silence_s),
        _ended=[],
    )


def faults_of(silence_s: float, *, is_alive: bool = True, is_ready: bool = True) -> list[str]:
    return Server.faults(gateway(silence_s, is_alive=is_alive, is_ready=is_ready))


def test_a_gateway_whose_sender_takes_no_turns_is_not_healthy() -> None:
    assert faults_of(0.5) == []
    assert faults_of(SILENCE_S + 5) == [
        "it has not been able to send frames for 35 s; `defect:` in its log says why",
    ]
    assert len(faults_of(SILENCE_S + 5, is_alive=False, is_ready=False)) == 3


def test_a_gateway_whose_name_is_taken_is_not_healthy() -> None:
    assert Server.faults(gateway(0.5, namesake="host:1")) == [
        "the gateway at host:1 has its name; give each one a name of its own"
    ]


@pytest.mark.logs_defects
def test_one_that_has_lost_a_task_for_good_is_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    server = gateway(0)

    async def watch() -> None:
        raise ValueError("nobody foresaw it")

    async def lose() -> None:
        tasks = [asyncio.create_task(watch(), name="watching"), asyncio.create_task(asyncio.sleep(60), name="looking")]
        for task in tasks:
            task.add_done_callback(lambda task: Server._tell_of_end(server, task))
        await asyncio.wait(tasks[:1])
        tasks[1].cancel()
        await asyncio.wait(tasks)

    asyncio.run(lose())
    assert Server.faults(server) == ["its task watching has ended; `defect:` in its log says why"]
    assert "defect: task.ended task=watching" in caplog.text


@pytest.mark.logs_defects
def test_a_look_around_that_meets_a_defect_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    pause = asyncio.sleep
    monkeypatch.setattr("rollbridge_gateway.server.server.asyncio.sleep", lambda seconds: pause(0))

    async def look() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise asyncio.CancelledError
        raise ZeroDivisionError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Server._keep_looking(SimpleNamespace(_look_around=look)))  # type: ignore[arg-type]
    assert looks == [0, 1, 2]
