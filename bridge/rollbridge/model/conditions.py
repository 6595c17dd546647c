"""Conditions of a transaction: what must hold where it is merged, and which one did not.

They are carried by the COMMIT frame and decided by the leader; :mod:`rollbridge.model.cas` says what holds.

Source: DistributedLog CAS proposal, applied to a transaction as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from rollbridge.model.cas import Condition, Scope
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.keyspace import position_of
from rollbridge.model.sn import SN

CONDITIONS_MAX: Final = 1_000
"""Most conditions of a transaction; its leader looks at the log for each."""
KEY_BYTES_MAX: Final = 128 * 1024
"""Most bytes of the keys of a transaction's conditions, together; its manifest stays below a megabyte with them."""


@dataclass(frozen=True, slots=True)
class StreamCondition:
    """A condition of a transaction.

    Attributes:
        stream: Place of the stream in the BEGIN frame.
        condition: What is expected of the course of its key.
    """

    stream: int
    condition: Condition

    @property
    def position(self) -> float:
        """Where its key is in the key space; a stream of one segment needs no key."""
        return position_of(self.condition.key)

    def as_datum(self) -> dict[str, Any]:
        """As the schema ``commit_frame`` has it."""
        return {
            "stream": self.stream,
            "key": _hex(self.condition.key),
            "scope": self.condition.scope.value,
            "expected": str(self.condition.expected),
        }

    @classmethod
    def from_datum(cls, datum: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`as_datum`.

        Raises:
            InvalidRequestError: no such condition.
        """
        return cls(
            datum["stream"],
            Condition(SN.parse(datum["expected"]), Scope(datum["scope"]), _unhex(datum["key"])),
        )


@dataclass(frozen=True, slots=True)
class RefusedCondition:
    """A condition that did not hold where the transaction would have been merged.

    Attributes:
        stream: scope/stream.
        key: Its key.
        expected: What it expected.
        actual: What stands there; ANY if that was truncated away.
    """

    stream: str
    key: bytes | None
    expected: SN
    actual: SN

    def as_datum(self) -> dict[str, Any]:
        """As the schema ``control_record`` has it."""
        return {
            "stream": self.stream,
            "key": _hex(self.key),
            "expected": str(self.expected),
            "actual": str(self.actual),
        }

    @classmethod
    def from_datum(cls, datum: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`as_datum`.

        Raises:
            InvalidRequestError: no such refusal.
        """
        return cls(datum["stream"], _unhex(datum["key"]), SN.parse(datum["expected"]), SN.parse(datum["actual"]))

    def __str__(self) -> str:
        key = "" if self.key is None else f" with key {self.key!r:.200}"
        return f"525: {self.stream}{key}: expected {self.expected}, the log has {self.actual}"


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _unhex(text: str | None) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError as fault:
        raise InvalidRequestError(f"a key is not hexadecimal: {fault}") from fault
