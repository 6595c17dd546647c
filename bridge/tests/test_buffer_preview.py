"""Previews: frames of open transactions, and only of these, whatever way the news of their end comes."""

from __future__ import annotations

from bridge.tests.buffers import STREAMS, begin_frame, check_batch
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind, encode_abort, pack_bundle
from rollbridge.buffer.preview import ENDED_MAX, PreviewFold

STREAM = STREAMS[0]
BUFFER = (f"{STREAM}-buffer", 0)
T = TransactionId.of(0, 7).bytes

Frame = tuple[bytes, bytes]


def begin(*streams: str, transaction: bytes = T) -> Frame:
    return FrameHeader(FrameKind.BEGIN, transaction).pack(), begin_frame(*streams).encode()


def data(first: int, records: int = 1, transaction: bytes = T) -> Frame:
    return FrameHeader(FrameKind.DATA, transaction, 0, 0, first, records).pack(), b"%d|%d" % (records, first)


def abort(transaction: bytes = T) -> Frame:
    return FrameHeader(FrameKind.ABORT, transaction).pack(), encode_abort("no")


class Tail:
    """Feeds a fold; gives the batches that it shows."""

    def __init__(self, *ended: bytes) -> None:
        self.fold = PreviewFold(check_batch, ended)
        self.offset = 0

    def __call__(self, *frames: tuple[bytes | None, bytes | None]) -> list[bytes]:
        shown = []
        for key, value in frames:
            shown += [batch for _, _, batch in self.fold.fold(STREAM, BUFFER, self.offset, 5, key, value)]
            self.offset += 1
        return shown


def test_frames_of_an_open_transaction_are_shown_once_whether_bundled_or_not() -> None:
    tail = Tail()
    assert tail(begin(), data(0)) == [b"1|0"]
    assert tail(data(0), data(1)) == [b"1|1"]
    assert tail(pack_bundle([data(2), data(3), data(3)])) == [b"1|2", b"1|3"]
    assert len(tail.fold.open) == 1


def test_what_has_no_begin_is_foreign_or_corrupt_is_not_shown() -> None:
    assert Tail()(data(0), (None, b"x"), (b"key", None), (data(0)[0], b"9|wrong")) == []
    assert Tail()(begin(STREAMS[1]), data(0)) == []
    tail = Tail()
    assert tail(begin(), (data(0, 2)[0], b"1|other")) == []
    assert tail(data(2)) == [], "a transaction with a corrupt frame cannot be committed any more"


def test_after_an_abort_nothing_is_shown() -> None:
    tail = Tail()
    assert tail(begin(), data(0), abort(), data(1)) == [b"1|0"]
    assert not tail.fold.open
    tail = Tail()
    assert tail(pack_bundle([begin(), data(0), abort()])) == []


def test_an_outcome_ends_a_transaction_before_between_and_after_its_frames() -> None:
    assert Tail(T)(begin(), data(0)) == []
    tail = Tail()
    assert tail(begin(), data(0)) == [b"1|0"]
    tail.fold.end(T, 9)
    assert tail(data(1), begin(), data(2)) == []
    assert not tail.fold.open
    tail = Tail()
    tail.fold.end(T, 9)
    assert tail(begin(), data(0)) == []


def test_outcomes_are_not_kept_for_ever() -> None:
    tail = Tail()
    tail.fold.end(T, 9)
    for counter in range(ENDED_MAX):
        tail.fold.end(TransactionId.of(1, counter).bytes, 9)
    assert tail(begin(), data(0)) == [b"1|0"]
