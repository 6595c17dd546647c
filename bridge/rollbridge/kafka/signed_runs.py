"""Whose the records of a batch are, without looking at each of them.

Most batches of transactions are one run: their first record says whose all are (:mod:`rollbridge.model.attribution`).
So only that one is parsed, and one search through the bytes tells that no other record carries such a header. Where
there are several, the records in between are stepped over by their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.batches import HEADER_BYTES, BatchHeader, RawBatch, uncompressed
from rollbridge.model.attribution import RECORD_HEADER, Attribution, unpack_run
from rollbridge.model.avro import decode_long, encode_long
from rollbridge.model.sn import OPERATION_HEADER
from rollbridge.model.verification import SignedRun

_NAME: Final = RECORD_HEADER.encode()
_MARK: Final = encode_long(len(_NAME)) + _NAME
"""How a record's header of ours begins."""
_CONDITIONAL_MARK: Final = encode_long(len(OPERATION_HEADER)) + OPERATION_HEADER.encode()


@dataclass(slots=True)
class SignedBatch:
    """Records of a batch: those that say whose they are, in order, and how many others there are."""

    pieces: list[SignedRun] = field(default_factory=list)
    plain: int = 0
    conditional: int = 0


def signed_batch(header: BatchHeader, batch: RawBatch) -> SignedBatch:
    """Return whose the records of a complete batch are.

    Raises:
        CorruptDataError: it does not decompress, or a record that has to be looked at does not parse.
    """
    data = bytes(memoryview(uncompressed(header, batch))[HEADER_BYTES:])
    marks = data.count(_MARK)
    if not marks:
        conditional = min(data.count(_CONDITIONAL_MARK), header.record_count)
        return SignedBatch(plain=header.record_count - conditional, conditional=conditional)
    try:
        if marks == 1:
            offset, run, _, _ = _record(data, 0)
            if run is not None and run.records == header.record_count:
                return SignedBatch([_piece(header.base_offset + offset, run, run.records)])
        return _by_each(header, data)
    except (IndexError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {fault}") from fault


def _by_each(header: BatchHeader, data: bytes) -> SignedBatch:
    """Look at each record for a header; runs end where another one begins, and with the batch."""
    found = SignedBatch()
    current: Attribution | None = None
    begin, taken, previous = 0, 0, -1

    def close() -> None:
        if current is not None and taken:
            found.pieces.append(_piece(begin, current, taken))

    for offset, run, is_conditional, is_signed in _records(header, data):
        if run is not None:
            close()
            begin, current, taken = offset, run, 1
        elif is_signed:  # a header that is none of ours begins no run, and ends one
            close()
            current, taken = None, 0
            found.plain += 1
        elif current is not None and offset - begin < current.records and offset == previous + 1:
            taken += 1
        else:
            found.conditional += is_conditional
            found.plain += not is_conditional
        previous = offset
    close()
    return found


def _records(header: BatchHeader, data: bytes) -> Iterator[tuple[int, Attribution | None, bool, bool]]:
    place = 0
    for _ in range(header.record_count):
        length, begin = decode_long(data, place)
        end = begin + length
        if length <= 0 or end > len(data):
            raise CorruptDataError(f"a record of {length} bytes, where {len(data) - begin} are left")
        delta, run, conditional, signed = _record(data, place, end)
        yield header.base_offset + delta, run, conditional, signed
        place = end


def _record(data: bytes, place: int, end: int | None = None) -> tuple[int, Attribution | None, bool, bool]:
    """Return the offset delta of the record at a place, the run that it begins, and which headers it has.

    Returns:
        Delta, run or None, whether a conditional writer has written it, whether it has a header of our name.
    """
    _, begin = decode_long(data, place)
    if end is not None and data.find(_NAME, begin, end) < 0:
        _, place = decode_long(data, begin + 1)
        delta, _ = decode_long(data, place)
        return delta, None, False, False
    _, place = decode_long(data, begin + 1)  # behind the attributes
    delta, place = decode_long(data, place)
    for _ in range(2):  # key and value
        size, place = decode_long(data, place)
        place += max(size, 0)
    count, place = decode_long(data, place)
    run, is_conditional, is_signed = None, False, False
    for _ in range(count):
        size, place = decode_long(data, place)
        name = data[place : place + size]
        place += size
        size, place = decode_long(data, place)
        if name == _NAME and size >= 0 and not is_signed:
            is_signed = True
            try:
                run = unpack_run(data[place : place + size])
            except InvalidRequestError:
                run = None
        is_conditional = is_conditional or name == OPERATION_HEADER.encode()
        place += max(size, 0)
    return delta, run, is_conditional, is_signed


def _piece(base: int, run: Attribution, records: int) -> SignedRun:
    if records == run.records:
        last = run.first + (sum(run.steps) if run.steps else records - 1)
    else:
        last = run.sequences()[records - 1]
    return SignedRun(base, records, run.transaction, run.first, last)
