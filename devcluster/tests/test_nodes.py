"""How long a server may take to answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollbridge_devcluster import nodes
from rollbridge_devcluster.nodes import Node


def starting(lines: int) -> Any:
    """A server that logs so many more lines as it starts, and answers after the last one."""
    said: list[str] = []

    def say(_: int) -> str:
        said.append(f"line {min(len(said), lines)}")
        return said[-1]

    def failure(what: str) -> RuntimeError:
        return RuntimeError(what)

    return SimpleNamespace(answers=lambda: len(said) > lines, runs=lambda: True, said=say, failure=failure)


def test_a_server_that_goes_on_to_read_its_logs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "START_S", 0.05)
    Node.await_answer(starting(5))


def test_a_server_that_says_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "START_S", 0.05)
    silent = starting(5)
    silent.said = lambda _: "reads its logs"
    with pytest.raises(RuntimeError, match="does not answer after 0 s"):
        Node.await_answer(silent)
