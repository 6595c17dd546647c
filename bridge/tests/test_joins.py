"""Streams that join late and savepoints: the fold comes to the same in whatever order the buffers are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.buffers import Message, buffer_of, fold_all, new_fold
from rollbridge.base.ids import BEGUN_TWICE, TransactionId
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.buffer.replay import OngoingTransaction, OngoingTransactions, decode_ongoing
from rollbridge.buffer.savepoints import SavepointFrame
from rollbridge.buffer.table import State
from rollbridge.stream.names import Partition

HOME, X, Y, Z = "s/home", "s/x", "s/y", "s/z"
T = TransactionId.of(0, 1).bytes


@dataclass
class Owner:
    """An owner of the transaction as it knows it, alive or not."""

    part: int
    streams: dict[str, int]
    earlier: dict[PieceKey, int] = field(default_factory=dict)
    pieces: dict[PieceKey, int] = field(default_factory=dict)
    count: int = 0
    number: int = 0
    has_saved: bool = False

    def manifest(self) -> Manifest:
        """What it would commit."""
        return Manifest({**self.earlier, **self.pieces})


class Writers:
    """Clients that write one transaction, in the order in which brokers take their frames."""

    def __init__(self, *streams: str) -> None:
        self.logs: dict[Partition, list[Message]] = {}
        self.now_ms = 0
        self.next_part = 0
        begin = dict.fromkeys(streams or (HOME,), 0)
        self.owners = [Owner(0, begin)]
        for name in begin:
            self.send(self.owners[0], FrameKind.BEGIN, name, self.begin(self.owners[0]))

    def begin(self, owner: Owner) -> bytes:
        """The value of a BEGIN frame."""
        return BeginFrame("client" if not owner.part else f"heir-{owner.part}", 0, None, 1_000, owner.streams).encode()

    def send(self, owner: Owner, kind: FrameKind, stream: str, value: bytes, **fields: int) -> None:
        """A frame."""
        log = self.logs.setdefault(buffer_of(stream), [])
        header = FrameHeader(kind, T, owner.part, **fields)
        log.append(Message(stream, buffer_of(stream), len(log), self.now_ms, header.pack(), value))
        self.now_ms += 1

    def join(self, owner: Owner, stream: str, epoch: int = 0) -> None:
        """A stream joins, if it is none of the owner's."""
        if stream not in owner.streams:
            known = len(owner.streams)
            owner.streams = {**owner.streams, stream: epoch}
            self.send(owner, FrameKind.BEGIN, stream, self.begin(owner), segment=known)

    def write(self, owner: Owner, stream: str, records: int, part: int | None = None) -> None:
        """A DATA frame."""
        piece = PieceKey(owner.part, list(owner.streams).index(stream), 0)
        header_of = owner if part is None else replace(owner, part=part)
        self.send(header_of, FrameKind.DATA, stream, b"%d|" % records, first_count=owner.count, records=records)
        owner.count += records
        if part is None:
            owner.pieces[piece] = owner.pieces.get(piece, 0) + records

    def save(self, owner: Owner) -> Manifest:
        """A savepoint."""
        owner.number += 1
        found = owner.manifest()
        frame = SavepointFrame(owner.number, not owner.has_saved, found, {"by": b"%d" % owner.part})
        self.send(owner, FrameKind.SAVEPOINT, HOME, frame.encode())
        owner.has_saved = True
        return found

    def roll_back(self, owner: Owner, to: Manifest) -> None:
        """Go on under another part number from what a manifest names."""
        former, owner.part = owner.part, self.claim()
        owner.earlier, owner.pieces, owner.count, owner.has_saved = dict(to.pieces), {}, 0, False
        for name in owner.streams:
            self.send(owner, FrameKind.BEGIN, name, self.begin(owner), first_count=former + 1)
        self.save(owner)

    def claim(self) -> int:
        """A part number."""
        self.next_part += 1
        return self.next_part

    def resume(self, part: int, told: BufferFold) -> Owner | None:
        """Somebody resumes the transaction as a leader told it; nobody if it is not open there."""
        item = told.open.get(T)
        if item is None or item.state is not State.OPEN:
            return None
        known = item.savepoint
        owner = Owner(part, dict(item.begin.streams), item.arrived())
        owner.number = 0 if known is None else known.frame.number
        self.owners.append(owner)
        for name in owner.streams:
            self.send(owner, FrameKind.BEGIN, name, self.begin(owner))
        return owner

    def commit(self, owner: Owner) -> Manifest:
        """Ask for the commit."""
        found = owner.manifest()
        self.send(owner, FrameKind.COMMIT, HOME, found.encode())
        return found

    def read(self, order: Iterable[Partition] | None = None) -> BufferFold:
        """What a leader knows that has read everything; by default one buffer after the other."""
        left = {partition: list(log) for partition, log in self.logs.items()}
        fold = new_fold()
        for partition in order or ():
            if left.get(partition):
                fold.fold(*left[partition].pop(0))
        for log in left.values():
            fold_all(fold, log)
        return fold


def known(fold: BufferFold) -> dict[str, Any]:
    """What a leader tells and decides by."""
    item = fold.open[T]
    return {
        "state": item.state,
        "streams": list(item.begin.streams.items()),
        "client": item.begin.client_name,
        "begun_ms": item.begun_ms,
        "arrived": item.arrived(),
        "savepoint": item.savepoint,
        "complete": item.is_complete(),
        "fault": item.manifest_fault(),
        "bytes": dict(item.bytes_by_stream()) if item.state is State.OPEN else None,
        "merged": sorted((ref.partition, ref.offset) for ref in item.merged_frames()) if item.manifest else None,
        "owner": (item.owners.part, item.owners.session),
    }


def orders_of(writers: Writers) -> st.SearchStrategy[list[Partition]]:
    """Orders in which a leader reads buffers."""
    places = [place for place, log in writers.logs.items() for _ in log]
    return st.permutations(places)


STREAMS = st.sampled_from([HOME, X, Y, Z])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "join", "save", "back", "resume", "late-resume", "other"]),
        st.integers(0, 5),
        STREAMS,
        st.integers(1, 3),
    ),
    max_size=14,
)


def play(steps: Sequence[tuple[str, int, str, int]], *streams: str) -> Writers:
    """Owners write, have streams join, make savepoints and go back to them; former ones do not know that they are."""
    writers = Writers(*streams)
    told: list[tuple[int, BufferFold]] = []
    saved: dict[int, list[Manifest]] = {}
    for step, who, stream, number in steps:
        place = who % len(writers.owners)
        owner = writers.owners[place]
        match step:
            case "write":
                writers.join(owner, stream)
                writers.write(owner, stream, number)
            case "join":
                writers.join(owner, stream, number - 1)
            case "save":
                saved.setdefault(place, []).append(writers.save(owner))
            case "back":
                if saved.get(place):
                    writers.roll_back(owner, saved[place][number % len(saved[place])])
            case "resume":
                writers.resume(writers.claim(), writers.read())
            case "late-resume":  # told now, and sent later
                told.append((writers.claim(), writers.read()))
                if len(told) > 1:
                    writers.resume(*told.pop(0))
            case "other":
                if stream in owner.streams:
                    writers.write(owner, stream, number, part=1_000 + who)
    return writers


@given(STEPS, st.sampled_from([(HOME,), (HOME, X)]), st.booleans(), st.data())
def test_every_order_of_reading_comes_to_the_same(
    steps: list[tuple[str, int, str, int]], streams: tuple[str, ...], ends: bool, data: st.DataObject
) -> None:
    writers = play(steps, *streams)
    if ends:
        for owner in data.draw(st.permutations(writers.owners)):
            writers.commit(owner)
    expected = writers.read()
    # The first buffer, and no other order, has the home stream first.
    assert known(writers.read(data.draw(orders_of(writers)))) == known(expected)


@given(STEPS, st.data())
def test_who_commits_gets_exactly_what_it_names(steps: list[tuple[str, int, str, int]], data: st.DataObject) -> None:
    writers = play(steps)
    before = writers.read()
    item = before.open[T]
    if item.state is not State.OPEN:
        return  # it was resumed by somebody who knew less than had been promised
    [owner] = [owner for owner in writers.owners if owner.part == item.owners.part]
    named = writers.commit(owner)
    fold = writers.read(data.draw(orders_of(writers)))
    item = fold.open[T]
    assert (item.state, item.is_complete(), item.manifest_fault()) == (State.COMMITTING, True, None)
    merged: dict[PieceKey, int] = {}
    for frame in item.merged_frames():
        stream = next(name for name in item.begin.streams if buffer_of(name) == frame.partition)
        assert list(item.begin.streams).index(stream) == frame.piece.stream
        merged[frame.piece] = merged.get(frame.piece, 0) + frame.records
    assert merged == dict(named.pieces)


@given(STEPS, st.data())
def test_a_successor_is_told_what_the_present_owner_would_commit(
    steps: list[tuple[str, int, str, int]], data: st.DataObject
) -> None:
    """Where nobody else was at work since: what it would commit is what a leader says that has arrived."""
    writers = play(steps)
    writers.resume(writers.claim(), writers.read())
    item = writers.read().open[T]
    if item.state is not State.OPEN:
        return
    owner, point = writers.owners[-1], None
    for stream, number in data.draw(st.lists(st.tuples(STREAMS, st.integers(1, 3)), max_size=4)):
        writers.join(owner, stream)
        writers.write(owner, stream, number)
        point = writers.save(owner)
    if point is not None and data.draw(st.booleans()):
        writers.write(owner, HOME, 1)
        writers.roll_back(owner, point)
    item = writers.read(data.draw(orders_of(writers))).open[T]
    assert item.arrived() == dict(owner.manifest().pieces)
    assert list(item.begin.streams) == list(owner.streams)


@given(STEPS, st.data())
def test_records_of_ongoing_transactions_spare_the_reading_and_change_nothing(
    steps: list[tuple[str, int, str, int]], data: st.DataObject
) -> None:
    writers = play(steps)
    order = data.draw(orders_of(writers))
    # The records of the buffers may be of different times.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=1, max_size=3)))
    folds = []
    for cut in cuts:
        first = new_fold()
        left = {partition: list(log) for partition, log in writers.logs.items()}
        for partition in order[:cut]:
            first.fold(*left[partition].pop(0))
        folds.append(first)
    again = new_fold()
    for partition in data.draw(st.permutations(sorted(writers.logs))):
        first = data.draw(st.sampled_from(folds))
        item = first.open.get(T)
        if item is None or item.state is not State.OPEN or not item.is_settled_whose():
            continue
        if partition not in item.first_offsets:
            continue
        stream = next(name for name in item.begin.streams if buffer_of(name) == partition)
        record = OngoingTransactions(
            partition=partition,
            topic_id="id",
            generation=1,
            controller_epoch=1,
            position=first.positions[partition],
            replay_position=first.positions[partition],
            commit_log_position=0,
            transactions=(OngoingTransaction.of(item, stream, partition),),
        )
        [read] = decode_ongoing(record.encode()).transactions
        again.positions[partition] = first.positions[partition]
        again.restore(stream, partition, read)
    for log in writers.logs.values():
        fold_all(again, [message for message in log if message.offset >= again.positions.get(message.partition, 0)])
    assert known(again) == known(writers.read())


@given(STEPS, st.data())
def test_every_order_arrives_at_the_same_price(steps: list[tuple[str, int, str, int]], data: st.DataObject) -> None:
    writers = play(steps)
    item = writers.read(data.draw(orders_of(writers))).open[T]
    if item.state is State.OPEN:
        assert item.held_bytes == item.price()


def every_order(writers: Writers) -> set[tuple[Partition, ...]]:
    """Each order in which a leader may read the buffers."""
    return set(permutations(place for place, log in writers.logs.items() for _ in log))


def test_a_join_of_a_former_owner_counts_for_whoever_was_told_of_it() -> None:
    """It may be read when somebody has the transaction who knew less, and before somebody has it who knew of it."""
    writers = Writers(HOME)
    [first] = writers.owners
    knew_less = writers.read()
    writers.join(first, X)
    writers.write(first, X, 2)
    told = writers.read()
    writers.resume(1, knew_less)
    second = writers.resume(2, told)
    assert second is not None
    writers.commit(second)
    expected = known(writers.read())
    assert (expected["complete"], expected["streams"]) == (True, [(HOME, 0), (X, 0)])
    assert len(expected["merged"]) == 1
    for order in every_order(writers):
        assert known(writers.read(order)) == expected


def test_a_join_of_a_former_owner_leaves_no_doubt_whose_the_streams_are() -> None:
    """So that what is open is put on record, and takeovers stay short."""
    writers = Writers(HOME)
    [first] = writers.owners
    writers.join(first, X)
    told = writers.read()
    second = writers.resume(1, told)
    assert second is not None
    for order in every_order(writers):
        item = writers.read(order).open[T]
        assert item.is_settled_whose()
        assert item.begin.streams == {HOME: 0, X: 0}


def test_a_commit_that_names_a_stream_of_which_nothing_was_read_is_incomplete() -> None:
    writers = Writers(HOME)
    [owner] = writers.owners
    writers.join(owner, X)
    writers.write(owner, X, 2)
    writers.commit(owner)
    fold = fold_all(new_fold(), writers.logs[buffer_of(HOME)])
    item = fold.open[T]
    assert (item.state, item.is_complete(), item.names_beyond()) == (State.COMMITTING, False, True)
    fold_all(fold, writers.logs[buffer_of(X)])
    assert (item.is_complete(), item.names_beyond()) == (True, False)
    assert fold.extended == {T}, "its record in ZooKeeper is written anew"


def test_a_condition_on_a_stream_of_which_nothing_was_read_is_waited_for() -> None:
    from rollbridge.base.sn import EMPTY
    from rollbridge.stream.conditions import Condition, Scope, StreamCondition

    writers = Writers(HOME)
    [owner] = writers.owners
    writers.join(owner, X)
    manifest = Manifest({}, (), (StreamCondition(1, Condition(EMPTY, Scope.SEGMENT, b"k")),))
    writers.send(owner, FrameKind.COMMIT, HOME, manifest.encode())
    fold = fold_all(new_fold(), writers.logs[buffer_of(HOME)])
    assert not fold.open[T].is_complete()
    fold_all(fold, writers.logs[buffer_of(X)])
    assert fold.open[T].is_complete()


@pytest.mark.parametrize("streams", [{HOME: 1, X: 0}, {X: 0, HOME: 0}, {HOME: 0, Y: 0, X: 0}])
def test_a_list_that_does_not_go_on_from_the_known_one_lets_nothing_join(streams: dict[str, int]) -> None:
    writers = Writers(HOME, Y) if Y in streams else Writers(HOME)
    owner = writers.owners[0]
    if Y in streams:
        writers.owners[0].streams = {HOME: 0, Y: 1}
        streams = {**streams, Y: 2}
    writers.send(replace(owner, streams=streams), FrameKind.BEGIN, X, writers.begin(replace(owner, streams=streams)))
    fold = fold_all(new_fold(), [*writers.logs[buffer_of(HOME)], *writers.logs[buffer_of(X)]])
    assert X not in fold.open[T].begin.streams
    assert fold.rejected["foreign"] == 1


def test_a_stream_that_joins_for_another_session_ends_the_transaction() -> None:
    writers = Writers(HOME)
    begin = BeginFrame("another", 0, None, 1_000, {HOME: 0, X: 0})
    writers.send(writers.owners[0], FrameKind.BEGIN, X, begin.encode(), segment=1)
    item = writers.read().open[T]
    assert (item.state, item.reason) == (State.ABORTING, BEGUN_TWICE)


def test_a_savepoint_of_which_a_new_owner_was_told_too_little_ends_the_transaction() -> None:
    writers = Writers(HOME)
    [owner] = writers.owners
    told = writers.read()
    writers.join(owner, X)
    writers.write(owner, X, 1)
    writers.save(owner)
    writers.resume(writers.claim(), told)
    item = writers.read().open[T]
    assert (item.state, "does not know of a stream" in item.reason) == (State.ABORTING, True)


def test_the_lease_counts_from_the_begin_whichever_buffer_is_read_first() -> None:
    writers = Writers(HOME)
    writers.now_ms = 900
    writers.join(writers.owners[0], X)
    fold = fold_all(new_fold(), writers.logs[buffer_of(X)])
    assert fold.open[T].deadline_ms == 1_900
    fold_all(fold, writers.logs[buffer_of(HOME)])
    assert fold.open[T].deadline_ms == 1_000
    assert [item.id for item in fold.ages.overdue(1_500)] == [T]
    assert [item.id for item in fold.ages.overdue(5_000)] == [T], "once"


def test_what_only_a_later_owner_names_keeps_its_streams_from_being_deleted() -> None:
    writers = Writers(HOME)
    heir = writers.resume(writers.claim(), writers.read())
    assert heir is not None
    writers.join(heir, X, 3)
    writers.write(heir, X, 1)
    home = writers.logs[buffer_of(HOME)]
    fold = fold_all(new_fold(), [home[0], *writers.logs[buffer_of(X)]])
    item = fold.open[T]
    assert list(item.begin.streams) == [HOME]
    assert item.all_streams() == {HOME: 0, X: 3}
    assert fold.references() == {HOME: 0, X: 3}
    fold_all(fold, home[1:])
    assert item.begin.streams == {HOME: 0, X: 3}
    assert item.is_settled_whose()
