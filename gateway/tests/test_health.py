"""A gateway that cannot send what its clients write is not healthy, although it answers them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rollbridge_gateway.shell.server import SILENCE_S, Server


def faults_of(silence_s: float, *, is_alive: bool = True, is_ready: bool = True) -> list[str]:
    server: Any = SimpleNamespace(
        is_ready=is_ready,
        register=SimpleNamespace(is_alive=lambda: is_alive),
        bridge=SimpleNamespace(sender_silence_s=silence_s),
    )
    return Server.faults(cast("Server", server))


def test_a_gateway_whose_sender_takes_no_turns_is_not_healthy() -> None:
    assert faults_of(0.5) == []
    assert faults_of(SILENCE_S + 5) == [
        "it has not been able to send frames for 35 s; `defect:` in its log says why",
    ]
    assert len(faults_of(SILENCE_S + 5, is_alive=False, is_ready=False)) == 3
