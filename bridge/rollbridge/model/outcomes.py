"""Terminated transactions: what a group remembers of each client's latest ones, as it stands in the compacted topic.

The Kafka key is the client name, the value the whole list, so that compaction keeps one record for each name. Beside
the list stands the *horizon*: the counter below which transactions of the client may have been forgotten. Whoever asks
for one that is not in the list is told with certainty that there is no outcome of it, if its counter is not below.

Source: PIP-255, ``TransactionMetadataPreserver``, ``Map<ClientName, List<TxnMeta>>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import rollbridge_schemas
from rollbridge.model.avro import encode_long, encode_string
from rollbridge.model.errors import CorruptDataError, InvalidRequestError
from rollbridge.model.ids import COUNTER_MAX, TransactionId
from rollbridge.model.versions import FRONT, content_of

RETAIN_DEFAULT: Final = -1
"""Retention of a transaction that names none: the group's."""
GONE: Final = ""
"""Stands in the topic in place of a client name for what is remembered of names that are gone; no name is empty."""

_HALF: Final = 48
_LOW: Final = (1 << _HALF) - 1
_NO, _YES = b"\0", b"\1"
_NULL, _PRESENT = encode_long(0), encode_long(1)
_END: Final = encode_long(0)
_EMPTY: Final = encode_string("")


class Terminated(NamedTuple):
    """A terminated transaction.

    Attributes:
        transaction: Its id.
        committed: Whether it was committed; otherwise it was aborted.
        position: Offset of its record on the commit log; -1 before that is known.
        records: How many records became visible.
        decided_ms: Clock of the leader, ms since 1970.
        retain_ms: How long it is remembered; RETAIN_DEFAULT is the group's setting.
        label: Given by the user.
        reason: Why it was aborted; empty otherwise.
    """

    transaction: TransactionId
    committed: bool
    position: int
    records: int
    decided_ms: int
    retain_ms: int = RETAIN_DEFAULT
    label: str | None = None
    reason: str = ""

    def forgotten_at_ms(self, default_ms: int) -> int:
        """Return when it may be forgotten, ms since 1970."""
        return self.decided_ms + (default_ms if self.retain_ms == RETAIN_DEFAULT else self.retain_ms)

    def encode(self) -> bytes:
        """Encode the list's item in Avro, by hand: a leader writes one for every transaction."""
        counter = self.transaction.counter
        return b"".join(
            (
                _high(self.transaction.epoch, counter >> _HALF),
                encode_long(counter & _LOW),
                _YES if self.committed else _NO,
                encode_long(self.position),
                encode_long(self.records),
                _moments(self.decided_ms, self.retain_ms),
                _NULL if self.label is None else _PRESENT + encode_string(self.label),
                encode_string(self.reason) if self.reason else _EMPTY,
            )
        )


@lru_cache(maxsize=1024)
def _high(epoch: int, counter_high: int) -> bytes:
    """Encode the epoch, and the half of the counter that transactions of a group have in common for long."""
    return encode_long(epoch) + encode_long(counter_high)


@lru_cache(maxsize=1024)
def _moments(decided_ms: int, retain_ms: int) -> bytes:
    """Encode the times, which those of one round have in common."""
    return encode_long(decided_ms) + encode_long(retain_ms)


def encode_terminated(items: Sequence[bytes], forgotten_below: int) -> bytes:
    """Return the value of a client's record.

    Args:
        items: What :meth:`Terminated.encode` gives, oldest first.
        forgotten_below: The horizon.
    """
    head = FRONT + encode_long(forgotten_below >> _HALF) + encode_long(forgotten_below & _LOW)
    return b"".join((head, encode_long(len(items)), *items, _END)) if items else head + _END


def decode_terminated(value: bytes) -> tuple[tuple[Terminated, ...], int]:
    """Return a client's terminated transactions, oldest first, and its horizon.

    Raises:
        NewerFormatError: it is of a version that is not known here.
        CorruptDataError: not such a value.
    """
    content = content_of("a record of terminated transactions", value)
    try:
        datum = rollbridge_schemas.codec("terminated_transactions").decode(content)
        found = tuple(
            Terminated(
                transaction=TransactionId.of(
                    item["reference_epoch"], _joined(item["counter_high"], item["counter_low"])
                ),
                committed=item["committed"],
                position=item["position"],
                records=item["records"],
                decided_ms=item["decided_ms"],
                retain_ms=item["retain_ms"],
                label=item["label"],
                reason=item["reason"],
            )
            for item in datum["transactions"]
        )
        return found, _joined(datum["forgotten_high"], datum["forgotten_low"])
    except (rollbridge_schemas.SchemaError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a record of terminated transactions cannot be read: {fault}") from fault


def _joined(high: int, low: int) -> int:
    if not (0 <= high <= _LOW and 0 <= low <= _LOW):
        raise InvalidRequestError(f"{high} and {low} are not halves of a counter of {COUNTER_MAX.bit_length()} bits")
    return high << _HALF | low
