"""The size that the manifest of an open transaction will have, so that what would make it too large is refused at once.

A manifest is the value of a single message, the COMMIT frame, and it names every segment to which a part has written,
every offset and every condition. Were it noticed only at the commit that the message is too large for the buffer's
topic, all that was written before would be lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollbridge.errors import TransactionTooLargeError
from rollbridge.model.conditions import StreamCondition
from rollbridge.model.control import FRAMES_HARMLESS, is_too_scattered
from rollbridge.model.frames import PieceKey
from rollbridge.model.group_offsets import GroupOffsets
from rollbridge.model.identifiers import COUNT_MAX
from rollbridge.model.records import RECORD_BYTES_MAX_DEFAULT

_BLOCK_BYTES: Final = 6
"""What the counts of an array take at most: one in front of its items, and a zero behind them."""
_ARRAYS: Final = 3


def long_bytes(number: int) -> int:
    """How many bytes a number of 0 or more takes in Avro."""
    return max(((number << 1).bit_length() + 6) // 7, 1)


_RECORDS_BYTES: Final = long_bytes(COUNT_MAX)


class ManifestRoom:
    """Counts the bytes of one manifest. Not thread-safe: whoever owns it holds a lock.

    Attributes:
        bytes: How large the manifest can get at most with what was taken so far.
        limit: How large it may get.
    """

    __slots__ = ("bytes", "limit")

    def __init__(self, record_bytes_max: int) -> None:
        """Start with an empty manifest.

        Args:
            record_bytes_max: Largest record of the stream in whose buffer the commit is asked for: the limit of a
                message there is not less than that, and not less than the default.
        """
        self.limit = max(record_bytes_max, RECORD_BYTES_MAX_DEFAULT)
        self.bytes = _ARRAYS * _BLOCK_BYTES

    def has(self, size: int) -> bool:
        """Whether so many bytes more would fit."""
        return self.bytes + size <= self.limit

    def take(self, size: int, transaction: object, what: str) -> None:
        """Count so many bytes more.

        Raises:
            TransactionTooLargeError: they would be too many; nothing was counted.
        """
        if not self.has(size):
            raise TransactionTooLargeError(
                f"the commit of transaction {transaction} would be a message of more than {self.limit} bytes: it names "
                f"each segment that a part has written to, each offset and each condition; {what}",
                limit_bytes=self.limit,
            )
        self.bytes += size


def piece_bytes(key: PieceKey) -> int:
    """What a piece takes in a manifest at most, however many records it will have."""
    return sum(map(long_bytes, key)) + _RECORDS_BYTES


def check_parts(parts: int, segments: Sequence[tuple[int, int]], each: int | None, limit: int) -> None:
    """Refuse so many parts if each of them writes to all segments and they can not be committed together.

    Args:
        parts: How many there are at least.
        segments: Stream, by its place, and number of each segment.
        each: To how many of these a part writes at most, if that is known.
        limit: How large the manifest may get.

    Raises:
        TransactionTooLargeError: their manifest, or the record of their commit, would be too large.
    """
    wanted = len(segments) if each is None else min(each, len(segments))
    pieces = parts * wanted
    size = fewest_bytes(parts, segments, wanted)
    if size <= limit and not is_too_scattered(pieces, pieces):
        return
    raise TransactionTooLargeError(
        f"a commit names each segment that each part has written to: {parts} parts with {wanted} segments each are "
        f"{pieces} names and take at least {size} bytes; {FRAMES_HARMLESS} names and {limit} bytes are possible",
        limit_bytes=limit,
    )


def fewest_bytes(parts: int, segments: Sequence[tuple[int, int]], each: int) -> int:
    """What parts take in a manifest at least that write to so many of the segments each."""
    of_part = sum(sorted(long_bytes(stream) + long_bytes(number) + 1 for stream, number in segments)[:each])
    # Of the numbers from 1 on, those from 64 on take another byte, those from 8,192 on one more, and so on.
    of_numbers = parts + sum(max(parts + 1 - (1 << 7 * more - 1), 0) for more in range(1, 5))
    return parts * of_part + of_numbers * each


def condition_bytes(item: StreamCondition) -> int:
    """What a condition takes in a manifest at most."""
    key = 2 * len(item.condition.key or b"")
    expected = len(str(item.condition.expected))
    return long_bytes(item.stream) + 1 + long_bytes(key) + key + 1 + long_bytes(expected) + expected


def offsets_bytes(item: GroupOffsets) -> int:
    """What the offsets of a consumer group take in a manifest at most."""
    names = (item.group_id, item.member_id, item.instance_id or "", *{topic for topic, _ in item.offsets})
    size = sum(long_bytes(length) + length + _BLOCK_BYTES for length in (len(name.encode()) for name in names))
    return size + sum(long_bytes(partition) + long_bytes(offset) for (_, partition), offset in item.offsets.items())
