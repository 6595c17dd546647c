"""Queues of segments: the table, races one by one, and a simulation against brokers that seal, lose and refuse."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from rollbridge.base.ids import SegmentId
from rollbridge.kafka.queues import SEQUENCE_MAX, Lane, QueuedBatch, following
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.writer.segments import TRANSITIONS, SegmentEvent, SegmentPhase, SegmentQueue, StreamQueues

Row = tuple[float, int]
"""Position of a key, and a number that grows with each record of it."""


class Box(QueuedBatch):
    """A batch of the simulation."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        super().__init__()
        self.rows = list(rows)
        self.count = len(self.rows)


def split(box: Box, heirs: Sequence[SegmentQueue[Box]]) -> Iterable[tuple[Box, SegmentQueue[Box]]]:
    rows: dict[SegmentQueue[Box], list[Row]] = {heir: [] for heir in heirs}
    for row in box.rows:
        rows[next(heir for heir in heirs if row[0] in heir.segment.range)].append(row)
    return [(Box(mine), heir) for heir, mine in rows.items() if mine]


def target_of(segment: SegmentId) -> tuple[str, int]:
    return str(segment), 0


def queues_of(history: EpochHistory) -> StreamQueues[Box]:
    return StreamQueues(history, target_of, lambda _: Lane(), split)


def scaled(history: EpochHistory, seal: Sequence[int], ranges: Sequence[tuple[float, float]], end: int) -> EpochHistory:
    record = history.plan_scale(seal, [KeyRange(*item) for item in ranges], 0)
    longer = history.with_records(record)
    return longer.with_sealed_ends(record.epoch, {item.id: end for item in longer.ended_with(record.epoch)})


def start(count: int = 1) -> EpochHistory:
    return EpochHistory.create(even_ranges(count), 0)


def put(stream_queues: StreamQueues[Box], *boxes: Box, queue: int = 0) -> SegmentQueue[Box]:
    stream_queues.active[queue].pending.extend(boxes)
    return stream_queues.active[queue]


def drain_all(queue: SegmentQueue[Box]) -> list[list[Row]]:
    """Write everything, and give it in the order in which it was sent."""
    sent = []
    while queue.may_send():
        box = queue.take()
        sent.append(box.rows)
        queue.acknowledge(box, 0)
    return sent


@pytest.mark.parametrize(
    ("sequence", "count", "next_one"),
    [
        (0, 1, 1),
        (SEQUENCE_MAX - 1, 1, SEQUENCE_MAX),
        (SEQUENCE_MAX, 1, 0),
        (SEQUENCE_MAX - 1, 3, 1),
        (SEQUENCE_MAX - 2, 5, 2),
        (5, SEQUENCE_MAX, 4),
    ],
)
def test_sequences_wrap_to_zero(sequence: int, count: int, next_one: int) -> None:
    assert SEQUENCE_MAX == 2_147_483_647
    assert following(sequence, count) == next_one


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(SegmentPhase, SegmentEvent)))
def test_every_pair_of_phase_and_event_is_in_the_table(phase: SegmentPhase, event: SegmentEvent) -> None:
    after = TRANSITIONS[phase, event]
    if event is SegmentEvent.END or phase is SegmentPhase.ENDED:
        assert after is SegmentPhase.ENDED, "what has ended stays so"
    elif event is SegmentEvent.REFUSAL:
        assert after is SegmentPhase.REFUSED
    else:
        assert after is SegmentPhase.OPEN


def test_only_an_open_queue_sends() -> None:
    stream_queues = queues_of(start())
    queue = put(stream_queues, Box([(0.1, 1)]), Box([(0.1, 2)]))
    queue.refuse(queue.take())
    assert queue.phase is SegmentPhase.REFUSED
    assert not queue.may_send()
    queue.retry()
    assert drain_all(queue) == [[(0.1, 1)], [(0.1, 2)]]


def test_a_batch_that_stays_whole_is_handed_over_as_it_is() -> None:
    history = start(2)
    stream_queues = queues_of(history)
    box = Box([(0.1, 1)])
    put(stream_queues, box)
    stream_queues.adopt(scaled(history, [0, 1], [(0.0, 1.0)], 0))
    assert list(stream_queues.active[0].inherited) == [box]


@pytest.mark.parametrize(
    ("written", "gap", "unknown"),
    [
        ({}, None, []),
        ({}, (8, 9), [0, 1, 2]),
        ({0: 8}, (5, 8), []),
        ({0: 8}, (9, 11), [1, 2]),
        ({1: 9}, (5, 9), [0]),
        ({1: 9}, (5, 8), [0]),
        ({1: 9}, (10, 12), [2]),
        ({2: 10}, (5, 9), [0, 1]),
        ({0: 8, 2: 10}, (9, 10), [1]),
        ({0: 8, 2: 10}, (5, 8), []),
        ({0: 5, 1: 6, 2: 7}, (8, 9), []),
    ],
)
def test_what_may_have_stood_where_a_log_was_truncated_is_unknown(
    written: dict[int, int], gap: tuple[int, int] | None, unknown: list[int]
) -> None:
    history = start()
    stream_queues = queues_of(history)
    queue = put(stream_queues, *(Box([(0.1, number)]) for number in range(3)))
    queue.place(5, 1)
    queue.acknowledge(queue.take(), 4)  # so that others may go without waiting for it
    queue.pending.append(Box([(0.1, 3)]))
    sent = [queue.take() for _ in range(3)]
    for box in sent:
        queue.give_back(box, doubtful=True)
    stream_queues.adopt(scaled(history, [0], [(0.0, 1.0)], 12))
    offsets = {sent[place].sequence: offset for place, offset in written.items()}
    found, lost = stream_queues.resolve(queue, offsets, gap)
    assert found == [(sent[place], offset) for place, offset in written.items()]
    assert lost == [sent[place] for place in unknown]
    rest = [[(0.1, place + 1)] for place in range(3) if place not in written and place not in unknown]
    assert drain_all(stream_queues.active[0]) == rest, "the others were not written"


def test_a_log_that_is_shorter_than_it_was_is_known_so_far_only() -> None:
    stream_queues = queues_of(start())
    queue = put(stream_queues, *(Box([(0.1, number)]) for number in range(3)))
    assert not queue.placed
    queue.place(10, 3)
    assert (queue.last_offset, queue.epoch, queue.placed) == (9, 3, True)
    queue.acknowledge(queue.take(), 10)
    queue.acknowledge(queue.take(), 5)
    assert queue.last_offset == 5, "what is doubtful from now on stands behind this"
    queue.restart()
    assert (queue.last_offset, queue.epoch, queue.placed) == (-1, -1, False), "with a new id it is asked for anew"


def test_a_course_that_is_closed_sends_and_hands_over_nothing() -> None:
    history = start()
    stream_queues = queues_of(history)
    queue = put(stream_queues, Box([(0.1, 1)]), Box([(0.1, 2)]))
    under_way = queue.take()
    stream_queues.close()
    queue.give_back(under_way, doubtful=True)
    assert not queue.may_send()
    stream_queues.adopt(scaled(history, [0], [(0.0, 1.0)], 1))
    assert not stream_queues.drain()
    assert stream_queues.unresolved() == []
    assert not stream_queues.active[0].may_send()


def test_a_doubtful_batch_goes_alone() -> None:
    """A broker recognises the last five batches only: it must not be pushed out by those behind it."""
    stream_queues = queues_of(start())
    queue = put(stream_queues, *(Box([(0.1, number)]) for number in range(4)))
    queue.acknowledge(queue.take(), 0)
    lost = queue.take()
    queue.give_back(lost, doubtful=True)
    assert queue.take() is lost
    assert not queue.may_send()
    queue.acknowledge(lost, 1)
    assert queue.may_send()


def test_what_is_given_up_leaves_no_gap_in_the_numbers() -> None:
    stream_queues = queues_of(start())
    queue = put(stream_queues, *(Box([(0.1, number)]) for number in range(4)))
    sent = [queue.take() for _ in range(3)]
    queue.acknowledge(sent[0], 0)
    queue.drop(sent[1])
    assert not queue.may_send()
    queue.misplace(sent[2])
    again = queue.take()
    assert (again, again.sequence) == (sent[2], 1)
    assert queue.take().sequence == 2


def test_a_new_producer_id_begins_at_zero() -> None:
    stream_queues = queues_of(start())
    queue = put(stream_queues, Box([(0.1, 1)]), Box([(0.1, 2)]))
    queue.acknowledge(queue.take(), 0)
    queue.restart()
    assert queue.take().sequence == 0


def test_after_the_largest_sequence_number_comes_zero() -> None:
    stream_queues = queues_of(start())
    queue = put(stream_queues, Box([(0.1, 1)] * 4), Box([(0.1, 2)]))
    queue.lane.next = queue.lane.acked = SEQUENCE_MAX - 1
    first = queue.take()
    queue.acknowledge(first, 3)
    assert (first.sequence, queue.take().sequence) == (SEQUENCE_MAX - 1, 2)


class Request(NamedTuple):
    """A batch on its way to the broker."""

    queue: SegmentQueue[Box]
    box: Box
    sequence: int
    epoch: int


@dataclass
class Log:
    """A segment as its broker has it."""

    rows: list[Row] = field(default_factory=list)
    bases: dict[tuple[int, int], int] = field(default_factory=dict)
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))
    expected: int | None = None
    epoch: int = 0
    sealed: bool = False

    def append(self, request: Request) -> tuple[str, int]:
        """What the broker answers, and the base offset."""
        box, sequence = request.box, request.sequence
        if self.sealed:
            return "sealed", -1  # it looks at the size first, and only then at the sequence number
        if request.epoch < self.epoch:
            return "fenced", -1
        if request.epoch > self.epoch:
            if sequence:
                return "misplaced", -1
            self.epoch, self.expected = request.epoch, 0
            self.recent.clear()
        for known, count, base in self.recent:
            if (known, count) == (sequence, box.count):
                return "written", base
        if self.expected is not None and sequence != self.expected:
            return "misplaced", -1
        base = len(self.rows)
        self.rows += box.rows
        self.bases[request.epoch, sequence] = base
        self.recent.append((sequence, box.count, base))
        self.expected = following(sequence, box.count)
        return "written", base


class World:
    """A writer, its stream, and the broker.

    With ``lives``, the stream is over a topic that is released and adopted again, and its segments are not sealed.
    """

    def __init__(self, seed: int, defect: str = "", *, lives: bool = False) -> None:
        self.rng = random.Random(seed)
        self.defect = defect
        self.has_lives = lives
        self.history = start(2)
        self.pending: EpochHistory | None = None
        self.logs: dict[str, Log] = {target_of(item)[0]: Log() for item in self.history.segments()}
        self.lanes: dict[tuple[str, int], Lane[Box]] = {}
        self.stream_queues = self.new_course()
        self.former: list[StreamQueues[Box]] = []
        """Of lives of the stream that are over."""
        self.pipe: deque[Request] = deque()
        self.old_pipes: list[deque[Request]] = []
        """Of connections that were given up: the broker may still read from them what was sent."""
        self.epoch = 0
        self.expired = False
        self.answers: deque[tuple[SegmentQueue[Box], Box, str, int]] = deque()
        self.keys = [self.rng.random() for _ in range(8)]
        self.counts = dict.fromkeys(self.keys, 0)
        self.acked: list[Row] = []
        self.dropped: set[Row] = set()
        self.unknown: set[Row] = set()

    def new_course(self) -> StreamQueues[Box]:
        if self.defect == "anew":
            self.lanes = {}
        return StreamQueues(self.history, target_of, lambda target: self.lanes.setdefault(target, Lane()), split)

    def queues(self) -> list[SegmentQueue[Box]]:
        """All queues that may have sent something that is not answered."""
        return [queue for stream_queues in (*self.former, self.stream_queues) for queue in stream_queues.queues()]

    def step(self) -> None:
        """Something happens."""
        chance = self.rng.random()
        if chance < 0.25:
            self.write()
        elif chance < 0.5:
            self.send()
        elif chance < 0.7:
            self.process()
        elif chance < 0.92:
            self.answer()
        elif chance < 0.94:
            self.lose()
        elif chance < 0.945:
            self.give_up()
        elif chance < 0.955:
            self.process_late()
        elif chance < 0.97 and self.has_lives:
            self.release()
        elif chance < 0.97:
            self.seal()
        elif chance < 0.99:
            self.publish()
        else:
            for queue in self.stream_queues.queues():
                queue.retry()

    def write(self) -> None:
        """A batch for one queue of the active epoch."""
        queue = self.rng.choice(self.stream_queues.active)
        rows = []
        for key in self.keys:
            if key in queue.segment.range and self.rng.random() < 0.6:
                self.counts[key] += 1
                rows.append((key, self.counts[key]))
        if rows:
            queue.pending.append(Box(rows))

    def send(self) -> None:
        if self.expired and not self.renew():
            return
        queues = [queue for queue in self.stream_queues.queues() if queue.may_send() and len(queue.in_flight) < 5]
        if queues:
            queue = self.rng.choice(queues)
            box = queue.take()
            self.pipe.append(Request(queue, box, box.sequence, self.epoch))

    def renew(self) -> bool:
        """Take the next epoch, if nothing is in flight; what may be written already fails."""
        queues = self.queues()
        if any(queue.in_flight for queue in queues):
            return False
        for queue in queues:
            for box in tuple(queue.held()):
                if box.doubtful:
                    self.forsake(queue, box)
        self.epoch += 1
        self.expired = False
        for queue in queues:
            queue.restart()
        self.lanes = {queue.target: queue.lane for queue in queues}
        self.settle()
        return True

    def give_up(self) -> None:
        """The time of a batch is over of which nobody knows whether it was written."""
        for queue in self.stream_queues.queues():
            late = next((box for box in queue.held() if box.doubtful and box not in queue.in_flight), None)
            if late is not None:
                self.forsake(queue, late)
                self.settle()
                return

    def forsake(self, queue: SegmentQueue[Box], box: Box) -> None:
        base = queue.lane.acked
        queue.drop(box)
        self.unknown.update(box.rows)
        if self.defect == "reuse":
            queue.lane.acked = base
            queue.lane.has_gap = False

    def process_late(self) -> None:
        """The broker goes on with a connection that was given up."""
        if self.old_pipes:
            pipe = self.rng.choice(self.old_pipes)
            request = pipe.popleft()
            self.logs[request.queue.topic].append(request)
            self.old_pipes = [item for item in self.old_pipes if item]

    def process(self) -> None:
        """The broker takes the next request from the connection."""
        if self.pipe:
            request = self.pipe.popleft()
            queue, box, *_ = request
            if self.rng.random() < 0.04:
                self.answers.append((queue, box, self.rng.choice(["retry", "refused"]), -1))
            else:
                self.answers.append((queue, box, *self.logs[queue.topic].append(request)))

    def answer(self) -> None:
        if not self.answers:
            return
        queue, box, verdict, base = self.answers.popleft()
        if verdict == "written":
            queue.acknowledge(box, base + box.count - 1)
            self.note(queue, box, base)
        elif verdict == "sealed":
            queue.refuse(box)
            if self.defect == "guess":
                box.doubtful = False
        elif verdict == "misplaced":
            was_doubtful = box.doubtful
            needs_epoch = queue.misplace(box)
            self.expired |= needs_epoch and not (self.defect == "renumber" and was_doubtful)
        elif verdict == "retry":
            queue.give_back(box, doubtful=False)
        elif box.doubtful:
            queue.give_back(box, doubtful=True)
        else:
            queue.drop(box)
            self.dropped.update(box.rows)
        self.withdraw(queue)
        self.settle()

    def lose(self) -> None:
        """The connection breaks: some requests are processed, others later or never, and no answer arrives."""
        for _ in range(self.rng.randint(0, len(self.pipe))):
            request = self.pipe.popleft()
            self.logs[request.queue.topic].append(request)
        if self.pipe and self.rng.random() < 0.5:
            self.old_pipes.append(deque(self.pipe))
        self.pipe.clear()
        self.answers.clear()
        for queue in self.queues():
            for box in tuple(queue.in_flight):
                queue.give_back(box, doubtful=True)
            self.withdraw(queue)
        self.settle()

    def release(self) -> None:
        """The stream's life is over, and another one begins in the same topic; what is in flight is answered later."""
        for box in self.stream_queues.close():
            self.end(box)
        self.former.append(self.stream_queues)
        self.stream_queues = self.new_course()

    def withdraw(self, queue: SegmentQueue[Box]) -> None:
        """Give up what came back to a queue of a life that is over."""
        for box in queue.stream_queues.withdraw(queue) if queue.stream_queues.closed else ():
            self.end(box)

    def end(self, box: Box) -> None:
        """A batch is not sent any more."""
        (self.unknown if box.doubtful else self.dropped).update(box.rows)

    def seal(self) -> None:
        """A scale begins: the broker refuses from now on, the history follows later."""
        if self.pending is not None:
            return
        active = self.history.active.segments
        place = self.rng.randrange(len(active))
        chosen = active[place]
        if self.rng.random() < 0.5 and place + 1 < len(active):
            sealed = [chosen, active[place + 1]]
            ranges = [KeyRange(chosen.range.low, active[place + 1].range.high)]
        else:
            sealed = [chosen]
            middle = (chosen.range.low + chosen.range.high) / 2
            ranges = [KeyRange(chosen.range.low, middle), KeyRange(middle, chosen.range.high)]
        record = self.history.plan_scale([item.id.number for item in sealed], ranges, 0)
        longer = self.history.with_records(record)
        for item in sealed:
            self.logs[target_of(item.id)[0]].sealed = True
        ends = {item.id: len(self.logs[target_of(item.id)[0]].rows) for item in sealed}
        self.pending = longer.with_sealed_ends(record.epoch, ends)
        for item in longer.began_with(record.epoch):
            self.logs[target_of(item.id)[0]] = Log()

    def publish(self) -> None:
        if self.pending is not None:
            self.history, self.pending = self.pending, None
        if self.rng.random() < 0.7:  # the writer may hear of two epochs at once
            self.stream_queues.adopt(self.history)
            self.settle()

    def settle(self) -> None:
        """What the engine does after each change."""
        self.stream_queues.drain()
        for queue in self.stream_queues.unresolved():
            assert queue.sealed_end is not None
            found = {
                sequence: base
                for (epoch, sequence), base in self.logs[queue.topic].bases.items()
                if epoch == self.epoch and queue.last_offset < base < queue.sealed_end
            }
            for box, base in self.stream_queues.resolve(queue, found)[0]:
                self.note(queue, box, base)

    def note(self, queue: SegmentQueue[Box], box: Box, base: int) -> None:
        """A future resolves: its offset must be where the record stands."""
        assert self.logs[queue.topic].rows[base : base + box.count] == box.rows
        self.acked += box.rows

    def finish(self) -> None:
        for _ in range(20_000):
            for happening in (self.publish, self.send, self.process, self.answer):
                happening()
            for queue in self.stream_queues.queues():
                queue.retry()
            if not any(queue.waiting or queue.in_flight for queue in self.queues()) and not self.pending:
                return
        raise AssertionError("the writer does not come to rest")

    def faults(self) -> list[str]:
        found = []
        by_key: dict[float, list[int]] = {key: [] for key in self.keys}
        for segment in sorted(self.history.segments(), key=lambda item: item.epoch):
            for key, number in self.logs[target_of(segment)[0]].rows:
                by_key[key].append(number)
        for key, numbers in by_key.items():
            wanted = {n for n in range(1, self.counts[key] + 1) if (key, n) not in self.dropped}
            unknown = {n for n in range(1, self.counts[key] + 1) if (key, n) in self.unknown}
            if numbers != sorted(set(numbers)):
                found.append(f"key {key}: {numbers} are doubled or out of order")
            if wanted - unknown - set(numbers) or set(numbers) - wanted:
                found.append(f"key {key}: {numbers} instead of {wanted} but for {unknown}")
        written = {(key, n) for key in self.keys for n in by_key[key]}
        if len(self.acked) != len(set(self.acked)) or set(self.acked) != written - self.unknown:
            found.append("what was acknowledged is not what was written")
        return found


def run(seed: int, defect: str = "", *, lives: bool = False) -> list[str]:
    world = World(seed, defect, lives=lives)
    for _ in range(400):
        world.step()
    world.finish()
    return world.faults()


@pytest.mark.parametrize("lives", [False, True], ids=["scaled", "lives"])
@pytest.mark.parametrize("block", range(8))
def test_no_record_is_lost_doubled_or_out_of_order(block: int, lives: bool) -> None:
    for seed in range(block * 50, block * 50 + 50):
        broken = run(seed, lives=lives)
        assert not broken, f"seed {seed}: {broken[:3]}"


def goes_wrong(seed: int, defect: str = "", *, lives: bool = False) -> bool:
    try:
        return bool(run(seed, defect, lives=lives))
    except AssertionError:
        return True


def test_the_checks_notice_a_writer_that_guesses() -> None:
    """One that takes a refusal by a sealed segment for "not written" doubles what was written before the seal."""
    assert any(run(seed, "guess") for seed in range(200))


def test_the_checks_notice_a_successor_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamQueues, "is_blocked", lambda *_: False)
    assert any(goes_wrong(seed) for seed in range(200))


@pytest.mark.parametrize("defect", ["reuse", "renumber"])
def test_the_checks_notice_numbers_that_are_given_again(defect: str) -> None:
    """The number of what may come late goes to another batch: it was given up, or was sent with another number."""
    assert any(goes_wrong(seed, defect) for seed in range(2_000))


def test_the_checks_notice_a_life_that_begins_to_count_anew() -> None:
    """A batch of the new life is taken for one of the old, and acknowledged with its offset."""
    assert any(goes_wrong(seed, "anew", lives=True) for seed in range(50))


def test_the_checks_notice_a_life_that_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came back of the old life is given up while batches of the new one are behind it."""
    monkeypatch.setattr(Lane, "is_free_for", lambda *_: True)
    assert any(goes_wrong(seed, lives=True) for seed in range(2_000))


def test_numbers_do_not_keep_the_queues_of_lives_that_are_over() -> None:
    lane: Lane[Box] = Lane()
    queue = put(StreamQueues(start(), target_of, lambda _: lane, split), Box([(0.1, 1)]), Box([(0.1, 2)]))
    queue.acknowledge(queue.take(), 0)
    last = queue.take()
    held = [lane.holder]
    last.doubtful = True
    queue.drop(last)
    assert [*held, lane.holder] == [queue, None]
    assert (lane.next, lane.acked) == (2, 2)
