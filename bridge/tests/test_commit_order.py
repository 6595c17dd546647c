"""The order of one connection's commits: what the fold of several buffers makes of the numbers in their frames."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, encode_abort, unpack_header
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.commit_order import BEHIND_MAX, CONNECTION_MAX, CommitLines, CommitOrder, order_of
from rollbridge.commitlog.control import FENCED, FORSAKEN, OVERTAKEN

STREAM = "s/a"
LEASE_MS = 1_000


@dataclass
class Connection:
    """Asks for commits, of which the frames go to any partition; what is folded is up to the test."""

    number: int = 1
    epoch: int = 0
    client: str = "client"
    fold: BufferFold = field(default_factory=lambda: BufferFold(BufferLimits(), lambda *_: None))
    logs: dict[int, list[tuple[bytes, bytes]]] = field(default_factory=dict)

    def begin(self, counter: int, partition: int) -> bytes:
        identifier = TransactionId.of(0, counter).bytes
        value = BeginFrame(self.client, self.epoch, None, LEASE_MS, {STREAM: 0}).encode()
        self._send(partition, FrameHeader(FrameKind.BEGIN, identifier, client_epoch=self.epoch), value)
        return identifier

    def commit(self, number: int, partition: int, behind: int, *, counter: int | None = None) -> bytes:
        identifier = self.begin(number if counter is None else counter, partition)
        self.ask(FrameKind.COMMIT, identifier, number, partition, behind)
        return identifier

    def ask(self, kind: FrameKind, identifier: bytes, number: int, partition: int, behind: int) -> None:
        segment, count, records = CommitOrder(self.number, self.epoch, number, behind).fields()
        value = Manifest({}).encode() if kind is FrameKind.COMMIT else encode_abort("taken back")
        self._send(partition, FrameHeader(kind, identifier, 0, segment, count, records, self.epoch), value)

    def read(self, partition: int, messages: int = 1_000) -> None:
        """Fold what a partition holds next."""
        start = self.fold.positions.get(("buffer", partition), 0)
        for offset, (key, value) in enumerate(self.logs.get(partition, [])[start : start + messages], start):
            self.fold.fold(STREAM, ("buffer", partition), offset, 0, key, value)

    def decided(self) -> list[int]:
        return [TransactionId.from_bytes(item).counter for item in self.fold.decided]

    def state(self, identifier: bytes) -> State:
        return self.fold.open[identifier].state

    def _send(self, partition: int, header: FrameHeader, value: bytes) -> None:
        self.logs.setdefault(partition, []).append((header.pack(), value))


@given(
    st.builds(
        CommitOrder,
        st.integers(0, CONNECTION_MAX),
        st.integers(0, 2**32 - 1),
        st.integers(1, 2**40 - 1),
        st.integers(0, BEHIND_MAX),
    )
)
def test_a_frame_says_the_order_that_it_was_given(order: CommitOrder) -> None:
    segment, count, records = order.fields()
    header = FrameHeader(FrameKind.COMMIT, TransactionId.of(0, 7).bytes, 0, segment, count, records, order.epoch)
    found = unpack_header(header.pack())
    assert found == header
    assert found.order == order._replace(behind=min(order.behind, order.number - 1))


def test_an_end_of_an_earlier_version_has_no_order() -> None:
    assert order_of(0, 0, 0, 17) is None


@given(
    places=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    learned=st.lists(st.integers(0, 30), min_size=30, max_size=30),
    reads=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=60),
)
def test_commits_are_decided_in_the_order_in_which_they_were_asked_for_however_partitions_are_read(
    places: list[int], learned: list[int], reads: list[tuple[int, int]]
) -> None:
    connection = Connection()
    settled: list[int] = []

    def read(partition: int, messages: int) -> None:
        connection.read(partition, messages)
        for identifier in list(connection.fold.decided):
            settled.append(TransactionId.from_bytes(identifier).counter)
            connection.fold.settle(identifier)

    steps = iter(reads)
    known = 0
    for number, partition in enumerate(places, 1):
        # What the connection has learned so far never is more than what has an outcome.
        known = max(known, min(learned[number - 1], len(settled)))
        connection.commit(number, partition, number - 1 - known)
        read(*next(steps, (0, 0)))
    for partition in range(4):
        read(partition, 1_000)
    assert settled == list(range(1, len(places) + 1))
    assert not connection.fold.lines


def test_a_commit_waits_for_its_own_connection_only() -> None:
    one = Connection()
    one.commit(1, 0, 0)
    held = one.commit(2, 1, 1)
    other = Connection(number=2, fold=one.fold)
    theirs = other.commit(1, 2, 0, counter=50)
    one.read(1)
    other.read(2)
    assert one.state(held) is State.COMMITTING
    assert list(one.fold.decided) == [theirs]
    one.read(0)
    assert one.decided() == [50, 1, 2]


def test_a_commit_that_is_taken_back_lets_later_ones_go() -> None:
    connection = Connection()
    lost = connection.begin(1, 0)
    connection.ask(FrameKind.ABORT, lost, 1, 0, 0)
    connection.commit(2, 1, 1)
    connection.read(1)
    assert not connection.decided()
    connection.read(0)
    assert connection.decided() == [1, 2]
    assert connection.state(lost) is State.ABORTING


def test_asking_again_with_less_to_wait_for_lets_a_commit_go() -> None:
    connection = Connection()
    held = connection.commit(4, 1, 3)
    connection.read(1)
    assert not connection.decided()
    connection.ask(FrameKind.COMMIT, held, 4, 1, 0)
    connection.read(1)
    assert connection.decided() == [4]


def test_what_a_later_frame_no_longer_waits_for_goes_before_it() -> None:
    connection = Connection()
    connection.commit(2, 1, 1)
    connection.commit(3, 2, 0)
    connection.read(1)
    connection.read(2)
    assert connection.decided() == [2, 3]


def test_a_commit_that_was_given_up_is_refused_when_it_comes_after_all() -> None:
    connection = Connection()
    late = connection.commit(1, 0, 0)
    connection.commit(2, 1, 0)
    connection.read(1)
    connection.read(0)
    assert connection.state(late) is State.ABORTING
    assert connection.fold.open[late].reason == OVERTAKEN


def test_what_is_read_again_in_another_order_is_not_told_as_refused_once_its_outcome_is_known() -> None:
    """A takeover, or a standby, reads partitions in any order; what has an outcome had it by the order of before."""
    connection = Connection()
    committed = connection.commit(1, 0, 0)
    overtaken = connection.commit(2, 0, 0)
    connection.commit(3, 1, 0)
    connection.read(1)
    connection.read(0)
    assert connection.state(committed) is connection.state(overtaken) is State.ABORTING
    connection.fold.conclude(committed)
    told = list(connection.fold.chronicle.take())
    assert [note.transaction for note in told] == [overtaken]
    connection.fold.discard(overtaken)
    assert not list(connection.fold.chronicle.take())


def test_a_commit_that_waits_in_vain_is_refused_after_its_lease() -> None:
    connection = Connection()
    held = connection.commit(2, 1, 1)
    connection.read(1)
    assert connection.fold.forsake(LEASE_MS, 5_000) == 0
    assert connection.fold.forsake(5_000, 5_000) == 0
    assert connection.fold.forsake(5_001, 5_000) == 1
    assert connection.state(held) is State.ABORTING
    assert connection.fold.open[held].reason == FORSAKEN
    late = connection.commit(1, 0, 0)
    connection.commit(3, 2, 2)
    connection.read(2)
    connection.read(0)
    assert connection.state(late) is State.COMMITTING, "nothing has overtaken it"
    assert connection.decided() == [2, 1, 3]


def test_what_a_fenced_session_has_held_is_refused_and_what_it_still_sends_releases_nothing() -> None:
    connection = Connection(epoch=5)
    connection.commit(1, 0, 0)
    held = connection.commit(2, 1, 1)
    connection.read(1)
    connection.read(0, messages=1)
    connection.fold.fences.raise_to("client", 6)
    connection.read(0)
    assert not connection.decided()
    connection.fold.forsake(0, 5_000)
    assert connection.fold.open[held].reason == FENCED


def test_a_new_leader_learns_from_the_commit_log_what_it_does_not_read_again() -> None:
    connection = Connection()
    connection.commit(8, 1, 3)
    connection.commit(9, 2, 4)
    connection.read(2)
    connection.read(1)
    assert not connection.decided()
    connection.fold.learn_order({(1, 0): 7})
    assert connection.decided() == [8, 9]


def test_a_rolling_commit_of_an_earlier_leader_may_settle_what_is_held() -> None:
    connection = Connection()
    rolled = connection.commit(8, 1, 3)
    connection.commit(9, 2, 3)
    connection.read(1)
    connection.read(2)
    connection.fold.settle(rolled)
    assert connection.decided() == [9]


@pytest.mark.parametrize("end", ["refuse", "discard"])
def test_a_commit_that_ends_otherwise_is_not_held_any_more(end: str) -> None:
    connection = Connection()
    held = connection.commit(2, 1, 1)
    connection.read(1)
    assert [item.id for item in connection.fold.lines.held()] == [held]
    if end == "refuse":
        connection.fold.refuse(held, "for some reason", 0)
    else:
        connection.fold.discard(held)
    assert not connection.fold.lines


def test_quiet_connections_are_forgotten_but_not_those_that_wait() -> None:
    lines: CommitLines[BufferedTransaction] = CommitLines(lines_max=2)
    waiting = Connection()
    waiting.fold.lines = lines
    waiting.commit(2, 0, 1)
    waiting.read(0)
    for number in range(2, 6):
        lines.of(CommitOrder(number, 0, 1, 0))
    waiting.commit(1, 1, 0)
    waiting.read(1)
    assert waiting.decided() == [1, 2]
