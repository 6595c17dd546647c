"""Frames of a transaction against what its COMMIT frame names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, Manifest, PieceKey
from rollbridge.buffer.state import BufferedTransaction, FrameRef, HeldFrames

PIECES = [PieceKey(part, 0, segment) for part in (0, 1) for segment in (0, 1)]
pieces = st.sampled_from(PIECES)


def frame(piece: PieceKey, records: int, first_count: int = 0) -> FrameRef:
    return FrameRef(("buffer", 0), 0, piece, first_count, records, 100, None, 0)


def transaction(named: dict[PieceKey, int]) -> BufferedTransaction:
    made = BufferedTransaction(TransactionId.of(0, 1).bytes, BeginFrame("c", 0, None, 1_000, {"s/a": 0}), 0)
    made.begun_in.add("s/a")
    made.manifest = Manifest(named)
    return made


def arrive(item: BufferedTransaction, piece: PieceKey, records: int) -> None:
    item.frames.append(frame(piece, records))
    item.last_count[piece] = item.last_count.get(piece, -1) + records


@given(st.dictionaries(pieces, st.integers(1, 6)), st.lists(st.tuples(pieces, st.integers(1, 3)), max_size=8))
def test_it_is_complete_once_each_piece_has_as_many_records_whenever_one_looks(
    named: dict[PieceKey, int], frames: list[tuple[PieceKey, int]]
) -> None:
    item = transaction(named)
    arrived: Counter[PieceKey] = Counter()
    for piece, records in frames:
        complete = all(arrived[one] >= count for one, count in named.items())
        assert item.is_complete() == complete
        if complete:
            fits = all(count in _sums(one, frames[: len(item.frames)]) for one, count in named.items())
            assert (item.manifest_fault() is None) == fits
        arrive(item, piece, records)
        arrived[piece] += records


def _sums(piece: PieceKey, frames: list[tuple[PieceKey, int]]) -> set[int]:
    """How many records its first frames hold together."""
    total, found = 0, {0}
    for one, records in frames:
        if one == piece:
            total += records
            found.add(total)
    return found


def test_a_large_transaction_that_waits_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    counts = HeldFrames.counts

    def counted(frames: HeldFrames) -> Iterator[tuple[PieceKey, int]]:
        looks.append(len(frames))
        return counts(frames)

    monkeypatch.setattr(HeldFrames, "counts", counted)
    item = transaction({PIECES[0]: 20})
    for _ in range(10):
        arrive(item, PIECES[0], 1)
    for _ in range(5):
        assert not item.is_complete()
    arrive(item, PIECES[0], 10)
    for _ in range(5):
        assert item.is_complete()
        assert item.manifest_fault() is None
    assert looks == [10, 11]
    item.manifest = Manifest({PIECES[0]: 21})
    assert not item.is_complete()
