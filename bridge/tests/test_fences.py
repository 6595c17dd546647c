"""Whose word counts: sessions of a client, owners of a transaction; what a later leader spares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey, encode_abort
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import FENCED, owner_of, resumed_reason

ORDERS, PAYMENTS = "sales/orders", "sales/payments"
TXN = TransactionId.of(0, 7).bytes


class Buffers:
    """Two buffers that are fed by hand, and their fold."""

    def __init__(self) -> None:
        self.fold = BufferFold(BufferLimits(), lambda *_: None)
        self._offsets = {ORDERS: itertools.count(), PAYMENTS: itertools.count()}

    def feed(self, stream: str, kind: FrameKind, value: bytes, *, part: int = 0, first: int = 0) -> None:
        header = FrameHeader(kind, TXN, part, 0, first, int(kind is FrameKind.DATA))
        self.fold.fold(stream, (stream, 0), next(self._offsets[stream]), 1_000, header.pack(), value)

    def begin(self, client: str, epoch: int, *streams: str, part: int = 0) -> None:
        value = BeginFrame(client, epoch, None, 60_000, {ORDERS: 0, PAYMENTS: 0}).encode()
        for stream in streams or (ORDERS, PAYMENTS):
            self.feed(stream, FrameKind.BEGIN, value, part=part)

    def data(self, stream: str, first: int, part: int = 0) -> None:
        self.feed(stream, FrameKind.DATA, b"batch", part=part, first=first)

    def commit(self, part: int = 0, pieces: Mapping[PieceKey, int] | None = None) -> None:
        self.feed(ORDERS, FrameKind.COMMIT, Manifest(pieces or {}).encode(), part=part)

    def abort(self, part: int = 0) -> None:
        self.feed(ORDERS, FrameKind.ABORT, encode_abort("no"), part=part)

    @property
    def transaction(self) -> BufferedTransaction:
        return self.fold.open[TXN]


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize(
    ("epoch", "newest", "heard"), [(0, 0, True), (5, 5, True), (5, 4, True), (5, 6, False), (0, 1, True)]
)
def test_an_end_counts_unless_a_newer_session_of_its_client_is_known(
    end: str, epoch: int, newest: int, heard: bool
) -> None:
    buffers = Buffers()
    buffers.begin("c", epoch)
    buffers.fold.fences.raise_to("c", newest)
    buffers.fold.fences.raise_to("somebody else", 100)
    getattr(buffers, end)()
    assert (buffers.transaction.state is not State.OPEN) == heard
    assert buffers.fold.rejected["fenced"] == int(not heard)


def test_what_an_older_session_begins_is_refused_and_known_from_what_a_newer_one_begins() -> None:
    buffers = Buffers()
    buffers.fold.fences.raise_to("c", 6)
    buffers.begin("c", 5)
    assert (buffers.transaction.state, buffers.transaction.reason) == (State.ABORTING, FENCED)
    other = Buffers()
    other.begin("c", 7)
    assert other.fold.fences.epoch_of("c") == 7


def test_a_leader_that_reads_again_refuses_no_begin_but_hears_no_older_session() -> None:
    buffers = Buffers()
    buffers.fold.fences.raise_to("c", 6)
    buffers.fold.fences.replaying = True
    buffers.begin("c", 5)
    buffers.commit()
    assert buffers.transaction.state is State.OPEN
    buffers.fold.fences.caught_up()
    assert buffers.fold.fences.refuses(("c", 5))


@pytest.mark.parametrize(("decided", "by"), [(0, 0), (8, 8)])
def test_a_commit_that_was_decided_counts_whoever_else_had_asked(decided: int, by: int) -> None:
    buffers = Buffers()
    buffers.fold.fences.raise_to("c", 9)
    buffers.fold.fences.replaying = True
    buffers.fold.fences.decided_before = {TXN: decided}
    buffers.begin("c", 5)
    buffers.commit(0, {PieceKey(0, 0, 0): 1})
    buffers.begin("c", 6, part=8)
    buffers.commit(8, {PieceKey(8, 0, 0): 2})
    assert buffers.transaction.state is State.COMMITTING
    assert buffers.transaction.manifest == Manifest({PieceKey(by, 0, 0): 1 + by // 8})


def test_the_latest_owner_ends_it_and_writes_it() -> None:
    buffers = Buffers()
    buffers.begin("c", 0)
    buffers.data(ORDERS, 0)
    buffers.begin("heir", 3, part=8)
    buffers.data(ORDERS, 1)  # of the former owner
    buffers.data(ORDERS, 0, part=8)
    buffers.data(ORDERS, 0, part=7)  # of another process, as a part that the commit may name
    buffers.commit()
    buffers.abort()
    assert buffers.transaction.state is State.OPEN
    assert [frame.piece.part for frame in buffers.transaction.frames] == [0, 8, 7]
    assert buffers.transaction.owners.parts == (0, 8)
    assert buffers.transaction.owners.session == ("heir", 3)
    assert buffers.transaction.begin.client_name == "c"
    buffers.commit(8, {PieceKey(0, 0, 0): 1, PieceKey(8, 0, 0): 1})
    assert (buffers.transaction.state, buffers.transaction.reason) == (State.COMMITTING, resumed_reason(8))


def test_an_earlier_owner_that_comes_late_is_none() -> None:
    buffers = Buffers()
    buffers.begin("c", 0)
    buffers.begin("second", 0, part=9)
    buffers.begin("first", 0, part=8)
    assert buffers.transaction.owners.part == 9
    buffers.commit(8)
    assert buffers.transaction.state is State.OPEN


def test_between_two_buffers_there_is_no_order_so_each_says_who_may_write_there() -> None:
    buffers = Buffers()
    buffers.begin("c", 0)
    buffers.begin("heir", 0, ORDERS, part=8)
    buffers.data(PAYMENTS, 0)  # written before, and read after
    assert len(buffers.transaction.frames) == 1
    buffers.begin("heir", 0, PAYMENTS, part=8)
    buffers.data(PAYMENTS, 1)
    assert len(buffers.transaction.frames) == 1
    assert buffers.fold.rejected["fenced"] == 1


def test_the_sessions_of_resumed_transactions_are_those_of_their_owners() -> None:
    buffers = Buffers()
    buffers.begin("c", 5)
    buffers.begin("heir", 3, part=8)
    buffers.fold.fences.raise_to("c", 6)
    buffers.commit(8)
    assert buffers.transaction.state is State.COMMITTING
    other = Buffers()
    other.begin("c", 5)
    other.begin("heir", 3, part=8)
    other.fold.fences.raise_to("heir", 4)
    other.commit(8)
    assert other.transaction.state is State.OPEN


def test_a_resumption_of_what_is_not_open_opens_nothing() -> None:
    buffers = Buffers()
    buffers.begin("heir", 3, part=8)
    assert not buffers.fold.open
    assert buffers.fold.rejected["foreign"] == 2


def test_the_reason_of_a_commit_names_its_owner() -> None:
    assert [owner_of(resumed_reason(part)) for part in (0, 1, 8_388_607)] == [0, 1, 8_388_607]
    assert (resumed_reason(0), owner_of("client")) == ("", 0)
    assert [owner_of(text) for text in ("9" * 5_000, "\xb2", "-1", "resumed by part")] == [0, 0, 0, 0]


def test_a_resumed_transaction_begins_where_its_dead_owner_had_not_begun_it() -> None:
    buffers = Buffers()
    buffers.begin("c", 1, ORDERS)  # the owner died before the other buffer had its BEGIN frame
    buffers.begin("c", 2, ORDERS, PAYMENTS, part=8)
    buffers.commit(part=8)
    assert buffers.transaction.state is State.COMMITTING
    assert buffers.transaction.is_complete(), "nothing of it is missing: it is empty"
