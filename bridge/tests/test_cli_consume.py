"""What ``rollbridge consume`` prints if its output takes a part or nothing."""

from __future__ import annotations

import io
import sys
from typing import Any, Self, cast

import pytest

from rollbridge.cli import consume
from rollbridge.cli.common import CliContext


class Narrow(io.RawIOBase):
    """Output without a buffer, which takes a few bytes at a time, and so many in all."""

    def __init__(self, most: int) -> None:
        self.taken = b""
        self._most = most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)[: min(7, self._most - len(self.taken))]
        if not part:
            raise OSError("no space left")
        self.taken += part
        return len(part)


class Five:
    """Reader of two batches of five records."""

    def __init__(self) -> None:
        self.read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def position(self) -> str:
        return f"at {self.read}"

    def is_finished(self) -> bool:
        return self.read == 10

    def consume(self, *_: Any) -> list[int]:
        self.read += 5
        return list(range(self.read - 5, self.read))


class Told:
    """Context that keeps what it is told."""

    json = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)


def printed(monkeypatch: pytest.MonkeyPatch, out: Narrow | None, told: Told) -> None:
    stdout = None if out is None else io.TextIOWrapper(cast(Any, out), write_through=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    consume._records(
        cast(CliContext, told),
        cast(Any, Five()),
        "s/t",
        line=lambda record: b"record %d\n" % cast(int, record),
        show=consume._Printer(None),
        wanted=None,
    )


def test_output_that_takes_a_part_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    out, told = Narrow(1_000), Told()
    printed(monkeypatch, out, told)
    assert out.taken == b"".join(b"record %d\n" % number for number in range(10))
    assert told.lines == ["10 records of s/t; position at 10"]


def test_output_that_was_closed_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    printed(monkeypatch, None, told)
    assert told.lines == ["10 records of s/t; position at 10"]


def test_the_position_is_behind_what_was_printed_if_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    out, told = Narrow(60), Told()
    with pytest.raises(OSError, match="no space left"):
        printed(monkeypatch, out, told)
    assert told.lines == ["5 records of s/t; position at 5"]
