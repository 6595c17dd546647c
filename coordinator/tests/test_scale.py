"""The chore that scales streams by their load, in a simulated world: what it waits for, says, and does not do twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from coordinator.tests.makers import GROUP
from coordinator.tests.sim_actors import SCALING
from coordinator.tests.sim_term import LedWorld
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Record
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, encode_abort
from rollbridge.metadata import paths
from rollbridge.metadata.changes import EpochTransition
from rollbridge.metadata.requests import AdminAnswer, RequestKind
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochCause, EpochHistory
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import StreamName
from rollbridge.stream.scaling import FIXED, ScalingPolicy, ScalingWaits
from rollbridge_coordinator.core import effects as fx

ORDERS, OTHER = StreamName("sales", "orders"), StreamName("sales", "other")
POLICY = ScalingPolicy(events_per_second=50, max_segments=8)
KEYS = KeySpace()


class Loaded(LedWorld):
    """A leader with two streams, one of which has a scaling policy; both may be written to at a rate."""

    step_ms = 5

    def __init__(self, policy: ScalingPolicy = POLICY) -> None:
        super().__init__(GROUP)
        self.world.clock_ms = self.clock_ms
        self.rates: dict[StreamName, float] = {}
        self.keys = 500
        self.written, self.owed = 0, 0.0
        self.seen: list[type[AnyEffect]] = []
        for name, chosen in ((ORDERS, policy), (OTHER, None)):
            self.answer(RequestKind.CREATE_STREAM, name, scaling=chosen)

    def update(self, policy: ScalingPolicy | None) -> AdminAnswer:
        return self.answer(RequestKind.UPDATE_STREAM, ORDERS, scaling=policy)

    def befall(self) -> None:
        """Somebody writes."""
        for name, rate in self.rates.items():
            self.owed += rate * self.step_ms / 1000
            while self.owed >= 1:
                self.owed -= 1
                self.written += 1
                key = f"k-{self.rng.randrange(self.keys)}"
                segment = self.history(name).active.segment_at(KEYS.position(key.encode()))
                self.world.produce(name.segment_topic(segment.id), Record(key, f"{key}={self.written}"))
        if self.leader.effect is not None:
            self.seen.append(type(self.leader.effect))

    def until(self, condition: Callable[[], object], steps: int = 20_000) -> None:
        super().until(condition, steps)

    def go(self, ms: int) -> None:
        end_ms = self.clock_ms + ms
        while self.clock_ms < end_ms:
            self.step()

    def history(self, name: StreamName = ORDERS) -> EpochHistory:
        return history_of(self.world, name)

    @property
    def segments(self) -> int:
        return len(self.history().active.segments)

    def wait(self) -> str:
        """What ZooKeeper says that the stream waits for."""
        raw = self.world.nodes.get(paths.scaling_waits(GROUP))
        waits = () if raw is None else ScalingWaits.from_json(raw).waits
        return next((item.reason for item in waits if item.stream == ORDERS), "")

    def begin(self) -> TransactionId:
        self.counter += 1
        epoch = int(self.history().active.reference_epoch)
        identifier = TransactionId.of(epoch, self.counter)
        begin = BeginFrame(f"c{self.counter}", 0, None, 10_000_000, {str(ORDERS): epoch})
        self._send(FrameHeader(FrameKind.BEGIN, identifier.bytes), begin.encode())
        return identifier

    def abort(self, identifier: TransactionId) -> None:
        self._send(FrameHeader(FrameKind.ABORT, identifier.bytes), encode_abort("over"))

    def _send(self, header: FrameHeader, value: bytes) -> None:
        assert self.world.produce(ORDERS.buffer_topic(), (header.pack(), value)) is not None


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    found = Loaded()
    found.go(1_000)  # the first cool-down
    yield found
    assert not found.terms_ended
    assert not found.history(OTHER).active.epoch, "it has no policy"


def test_load_splits_a_stream_and_silence_merges_it_and_the_epochs_say_why(loaded: Loaded) -> None:
    loaded.rates = {ORDERS: 200.0, OTHER: 200.0}
    loaded.until(lambda: loaded.segments > 2)
    split = loaded.history().active
    assert split.cause is EpochCause.SCALE
    assert "segment 0: " in split.reason
    assert "above" in split.reason
    assert "recent keys" in split.reason
    loaded.rates = {}
    loaded.until(lambda: loaded.segments == 1)
    assert "below half the target of 50" in loaded.history().active.reason
    assert not loaded.wait()
    assert loaded.leader.group is not None
    assert loaded.leader.group.counts["scales_by_load"] == loaded.leader.group.counts["scales"] >= 2


def test_a_policy_by_bytes_measures_sizes() -> None:
    loaded = Loaded(ScalingPolicy(bytes_per_second=5_000, max_segments=8))
    loaded.go(1_000)
    loaded.rates = {ORDERS: 200.0}  # of 100 bytes each
    loaded.until(lambda: loaded.segments > 1)
    assert "bytes/s" in loaded.history().active.reason
    assert fx.LogEnds not in loaded.seen


def test_a_stream_without_a_policy_is_not_even_measured(loaded: Loaded) -> None:
    assert loaded.update(FIXED).ok
    loaded.seen.clear()
    loaded.rates = {ORDERS: 500.0}
    loaded.go(5_000)
    assert loaded.segments == 1
    assert fx.LogEnds not in loaded.seen
    assert config(loaded).scaling is None


def config(loaded: Loaded) -> StreamConfig:
    return StreamConfig.from_json(loaded.world.nodes[paths.stream(ORDERS)])


def test_what_says_nothing_of_scaling_leaves_the_policy_and_nonsense_is_refused(loaded: Loaded) -> None:
    assert loaded.update(None).ok
    assert config(loaded).scaling == POLICY
    answer = loaded.update(ScalingPolicy(events_per_second=5, bytes_per_second=5, min_segments=9, max_segments=3))
    assert not answer.ok
    assert "give one of events_per_second and bytes_per_second; min_segments, 9, is above" in answer.message
    assert config(loaded).scaling == POLICY
    more = StreamName("sales", "more")
    answer = loaded.answer(RequestKind.CREATE_STREAM, more, segments=9, scaling=replace(POLICY, max_segments=8))
    assert not answer.ok
    assert "more than max_segments, 8" in answer.message


def test_a_stream_grows_to_its_fewest_segments(loaded: Loaded) -> None:
    assert loaded.update(replace(POLICY, min_segments=3)).ok
    loaded.until(lambda: loaded.segments == 3)
    assert "fewer than min_segments, 3" in loaded.history().active.reason


def test_many_old_transactions_keep_a_stream_waiting_and_it_says_so(loaded: Loaded) -> None:
    old = [loaded.begin() for _ in range(SCALING.scaling_open_max + 1)]
    loaded.go(SCALING.scaling_open_ms + 500)
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "above" in loaded.wait()
    assert f"{len(old)} transactions are open for more than 1 s" in loaded.wait()
    written = loaded.world.nodes.versions[paths.scaling_waits(GROUP)]
    loaded.go(2_000)
    assert loaded.segments == 1
    assert loaded.world.nodes.versions[paths.scaling_waits(GROUP)] == written, "it is said once"
    loaded.abort(old[0])
    loaded.until(lambda: loaded.segments > 1)
    loaded.until(lambda: not loaded.wait())


def test_native_transactions_of_others_that_last_are_waited_for(loaded: Loaded) -> None:
    loaded.world.begin_foreign(ORDERS.segment_topic(loaded.history().active.segments[0].id), -1)
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "native transactions of others" in loaded.wait()
    loaded.go(1_000)
    assert loaded.segments == 1
    assert not loaded.world.topics[ORDERS.segment_topic(loaded.history().active.segments[0].id)].sealed
    loaded.world.end_foreign(-1)
    loaded.until(lambda: loaded.segments > 1)


def test_clocks_that_differ_keep_it_waiting(loaded: Loaded) -> None:
    assert loaded.leader.group is not None
    loaded.leader.group.times.high_ms = 3_600_000
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "clocks differ" in loaded.wait()
    assert loaded.segments == 1
    loaded.leader.group.times.high_ms = 0
    loaded.until(lambda: loaded.segments > 1)


def test_one_hot_key_is_looked_at_once_in_a_cool_down(loaded: Loaded) -> None:
    loaded.keys = 1
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "one key makes 100% of its load" in loaded.wait()
    loaded.seen.clear()
    loaded.go(10 * SCALING.scaling_cooldown_ms)
    assert loaded.segments == 1
    looks = sum(before is not fx.SampleKeys is kind for before, kind in zip(loaded.seen, loaded.seen[1:], strict=False))
    assert 1 <= looks <= 11


def test_what_is_refused_is_left_alone_for_a_while(loaded: Loaded) -> None:
    def refuse(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if isinstance(effect, fx.CreateTopics) and "segment" in effect.topics[0].name:
            tries.append(loaded.clock_ms)
            return fx.EffectRefusedError(effect, "no more topics", code="POLICY_VIOLATION")
        return None

    tries: list[int] = []
    loaded.world.refuses = refuse
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "no more topics" in loaded.wait()
    assert "nothing was changed" in loaded.wait()
    loaded.until(lambda: len(tries) == 3)
    assert tries[1] - tries[0] >= 1_000
    assert tries[2] - tries[1] >= 2_000
    loaded.until(lambda: paths.scaling(GROUP) not in loaded.world.nodes, 10)
    loaded.world.refuses = lambda *_: None
    loaded.until(lambda: loaded.segments > 1)
    loaded.until(lambda: not loaded.wait())


def test_a_new_leader_finishes_a_scale_by_load_with_its_reason(loaded: Loaded) -> None:
    loaded.rates = {ORDERS: 200.0}
    node = paths.scaling(GROUP)
    loaded.until(lambda: node in loaded.world.nodes)
    begun = EpochTransition.from_json(loaded.world.nodes[node])
    assert begun.reason
    loaded.take_over()
    loaded.until(lambda: loaded.history().active.epoch == 1)
    assert loaded.history().active.reason == begun.reason


def test_a_new_leader_does_not_scale_before_it_knows_the_load(loaded: Loaded) -> None:
    loaded.rates = {ORDERS: 200.0}
    for _ in range(10):
        loaded.take_over()
        loaded.until(lambda: loaded.leader.pending_done)
        loaded.go(SCALING.scaling_window_ms - 50)
    assert loaded.segments == 1
    loaded.until(lambda: loaded.segments > 1)


def test_what_a_former_leader_said_of_waits_is_put_right(loaded: Loaded) -> None:
    loaded.keys = 1
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    loaded.rates = {}
    loaded.take_over()
    loaded.until(lambda: not loaded.wait())
    loaded.world.nodes[paths.scaling_waits(GROUP)] = b"damaged"
    loaded.take_over()
    loaded.until(lambda: loaded.world.nodes[paths.scaling_waits(GROUP)] != b"damaged")
    assert not loaded.wait()


def test_a_scale_by_request_comes_first(loaded: Loaded) -> None:
    """It waits for a native transaction of somebody else; meanwhile nothing takes its segments away."""
    loaded.world.begin_foreign(ORDERS.segment_topic(loaded.history().active.segments[0].id), -1)
    asked = loaded.ask(RequestKind.SCALE_STREAM, ORDERS, seal=(0,), ranges=((0.0, 0.5), (0.5, 1.0)))
    assert loaded.leader.group is not None
    loaded.until(lambda: loaded.leader.group is not None and loaded.leader.group.waits.held)
    loaded.rates = {ORDERS: 200.0}
    loaded.until(loaded.wait)
    assert "a scale by request or a rolling commit is to come first" in loaded.wait()
    loaded.world.end_foreign(-1)
    assert loaded.answered(asked).ok
    assert not loaded.history().record(1).reason


def test_what_brokers_do_not_tell_for_a_while_is_no_load(loaded: Loaded) -> None:
    """Neither silence while they are away nor a burst when they are back."""
    loaded.rates = {ORDERS: 35.0}
    loaded.go(3_000)
    loaded.world.away = ORDERS.segment_topic(loaded.history().active.segments[0].id)
    loaded.go(300)
    loaded.world.away = ""
    loaded.go(6_000)
    assert loaded.segments == 1
    assert not loaded.wait()
