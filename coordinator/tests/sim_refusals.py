"""Refusals in the simulation: Kafka refuses one frame, one topic or one round for good, and nobody else may suffer.

Source: the class of faults in which an effect that fails definitely is treated like one whose outcome is unknown.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from coordinator.tests.sim_actors import Attempt
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import World
from rollbridge.base.effects import AnyEffect
from rollbridge.commitlog.control import ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.changes import SUSPENDED, StreamFault
from rollbridge.metadata.records import CreateNode, NodeOperation, SetNode
from rollbridge.stream.late import LateRecord
from rollbridge.stream.names import Partition, StreamName, is_segment_topic, parse_segment_topic
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import LEADERLESS

REFUSAL_DEFECTS = ("deaf-refusal", "broad-refusal", "blames-all", "blind-reopening")
"""A refusal for good ends the term, as if nobody knew; one of a frame is held against its stream, one of a stream
against others; what was closed before a refusal stays without successors."""
POISONED = 0.02
"""How many frames hold what no broker takes."""
DENIED = "TOPIC_AUTHORIZATION_FAILED"
DENIED_MS = 1_500
"""How long a topic takes nothing."""
CLOSED = "MESSAGE_TOO_LARGE"
FULL = "POLICY_VIOLATION"
FULL_MS = 1_500
"""How long no topic of a stream can be made."""
AWAY_MS = 1_500
"""How long a topic has no leader."""
COPIES_DENIED = 0.1
"""How many copies of late records are refused; they are rare beside everything else."""
UNANSWERED = 0.3
"""How many offsets of large transactions get no answer, after which nothing is left of the round."""
LOG_DENIED_MS = 150
"""How long the commit log takes nothing, for which everybody has to wait."""
TERMS_MAX = 25
"""In so many terms the same frame may be refused: leaders can die before they have said what became of it."""


class Refusals:
    """What brokers refuse at present, and whether they are asked for the same again and again.

    Attributes:
        denied: The streams of which a topic has ever been refused.
    """

    def __init__(self, world: World, streams: Sequence[StreamName], seed: int) -> None:
        self.world = world
        self.streams = streams
        self.rng = random.Random(f"refusals{seed}")
        self.copies = random.Random(f"copies{seed}")
        self.offsets = random.Random(f"offsets{seed}")
        self.unanswered = UNANSWERED
        self.denied: set[str] = set()
        self.topic = ""
        self.until_ms = 0
        self.away_until_ms = 0
        self.guilty: set[str] = set()
        """Streams of which something was refused."""
        self.full = ""
        """The stream of which no topic can be made."""
        self.full_until_ms = 0
        self.log_until_ms = 0
        self.is_over = False
        self.forgets_changes = False
        """Whether ZooKeeper may forget changes that have closed segments."""
        self.rounds = 0
        """Rounds that were refused as a whole."""
        self.counts: Counter[str] = Counter()
        """What was refused to leaders, by effect."""
        self.frames: defaultdict[bytes, set[int]] = defaultdict(set)
        """By frame, the terms in which it was refused."""

    def step(self) -> None:
        """Begin, now and then, to refuse something for a while."""
        if self.is_over:
            return
        if self.world.clock_ms > self.until_ms:
            self.topic = ""
            if self.rng.random() < 0.002:
                stream = self.rng.choice(self.streams)
                segment = self.rng.choice(history_of(self.world, stream).active.segments).id
                self.topic, self.until_ms = stream.segment_topic(segment), self.world.clock_ms + DENIED_MS
                self.denied.add(str(stream))
        if self.world.clock_ms > self.away_until_ms:
            self.world.away = ""
            if self.rng.random() < 0.001:
                stream = self.rng.choice(self.streams)
                segment = self.rng.choice(history_of(self.world, stream).active.segments).id
                self.world.away, self.away_until_ms = stream.segment_topic(segment), self.world.clock_ms + AWAY_MS
                self.denied.add(str(stream))
        if self.world.clock_ms > self.full_until_ms:
            self.full = ""
            if self.rng.random() < 0.002:
                self.full, self.full_until_ms = str(self.rng.choice(self.streams)), self.world.clock_ms + FULL_MS
                self.denied.add(self.full)
        if self.rng.random() < 0.0003:
            self.log_until_ms = self.world.clock_ms + LOG_DENIED_MS

    def end(self) -> None:
        """Nothing is refused any more but what no broker takes."""
        self.topic = self.full = self.world.away = ""
        self.log_until_ms = 0
        self.unanswered = 0.0
        self.rng = random.Random(0)
        self.is_over = True

    def __call__(self, effect: AnyEffect, leader: int) -> fx.EffectRefusedError | None:
        """What the answer to an effect is, if it is refused."""
        if leader != self.world.identity:
            return None  # it is fenced before anybody looks at what it wants
        refused = self._answer(effect, leader)
        if refused is not None:
            self.counts[f"{type(effect).__name__} {refused.code}"] += 1
            if refused.topic is not None and is_segment_topic(refused.topic):
                self.guilty.add(str(parse_segment_topic(refused.topic)[0]))
        return refused

    def check_faults(self, operations: Sequence[NodeOperation]) -> None:
        """No stream is put into an error state of which nothing was refused, unless its change is half done."""
        for name in self.streams:
            for item in operations:
                if (
                    isinstance(item, CreateNode | SetNode)
                    and item.path == paths.stream_fault(name)
                    and StreamFault.from_json(item.value).code != SUSPENDED
                    and str(name) not in self.guilty
                    and not history_of(self.world, name).unsealed()
                ):
                    self.world.broken.append(f"{name} is in an error state: {StreamFault.from_json(item.value).reason}")

    def _answer(self, effect: AnyEffect, leader: int) -> fx.EffectRefusedError | None:
        match effect:
            case fx.AppendControl(topic) | fx.AppendTogether(_, _, topic) if self.world.clock_ms < self.log_until_ms:
                return fx.EffectRefusedError(effect, "no permission", code=DENIED, topic=topic)
            case fx.MergeFrames(items) | fx.AppendTogether(items):
                return self._merge(effect, items, leader)
            case fx.AppendMessages(fx.Messages(topic)) if topic == self.topic:
                return self._deny(effect)
            case fx.AppendLate(_, copies):
                return self._copy(effect, copies)
            case fx.Seal(places) if self.topic in (topics := [topic for topic, _ in places]):
                if self.rng.random() < 0.5:
                    self.world.close(topics)  # it was taken to close them, but not to find out where they end
                    self.counts["closed in vain"] += 1
                return self._deny(effect)
            case fx.CreateTopics(topics) if any(self._is_full(spec.name) for spec in topics):
                topic = next(spec.name for spec in topics if self._is_full(spec.name))
                return fx.EffectRefusedError(effect, f"{self.full} has too many topics", code=FULL, topic=topic)
            case fx.Look(queries) if any(self._is_away(item.places.stream) for item in queries):
                return fx.EffectRefusedError(effect, "nobody leads it", code=LEADERLESS, topic=self.world.away)
            case fx.EndOffsets(places) if self.world.away in {topic for topic, _ in places}:
                return fx.EffectRefusedError(effect, "nobody leads it", code=LEADERLESS, topic=self.world.away)
            case fx.Seal(places) if self.world.away in (topics := [topic for topic, _ in places]):
                self.world.close(topics)
                return fx.EffectRefusedError(effect, "its leader is away", code="seal-timeout", topic=self.world.away)
            case fx.SendOffsets() if self.world.holds_records(leader) and self.offsets.random() < self.unanswered:
                self.rounds += 1
                return fx.EffectRefusedError(effect, "the group took no offsets", code="REQUEST_TIMED_OUT")
            case fx.CommitRound() if self._merges() and self.rng.random() < 0.04:
                self.rounds += 1
                return fx.EffectRefusedError(effect, "it has taken too long", code="INVALID_TXN_STATE")
        return None

    def _merges(self) -> bool:
        """Whether the round that is to be committed holds transactions."""
        may_fail = not self.is_over and not self.world.is_early
        return may_fail and self.world.acting.startswith(("merge_direct/", "roll/"))

    def _copy(
        self, effect: fx.AppendLate, copies: Sequence[tuple[Partition, LateRecord]]
    ) -> fx.EffectRefusedError | None:
        topics = {topic for (topic, _), _ in copies}
        if self.topic in topics:
            return self._deny(effect)
        if topics and not self.is_over and self.copies.random() < COPIES_DENIED:
            topic = min(topics)
            self.denied.add(str(parse_segment_topic(topic)[0]))
            return fx.EffectRefusedError(effect, "no permission", code=DENIED, topic=topic)
        return None

    def _merge(self, effect: AnyEffect, items: fx.Items, leader: int) -> fx.EffectRefusedError | None:
        if any(topic == self.topic for (topic, _), _ in items):
            return self._deny(effect)
        if any(topic == self.world.away for (topic, _), _ in items):
            return fx.EffectRefusedError(effect, "nobody leads it", code=LEADERLESS, topic=self.world.away)
        for place, ((topic, _), frame) in enumerate(items):
            batch = self.world.batch_of(frame)
            if self.world.topics[topic].sealed:  # in vain: what began with it is on nobody's record
                self.denied.add(str(parse_segment_topic(topic)[0]))
                places = [other for other, item in enumerate(items) if item[0][0] == topic]
                return fx.EffectRefusedError(effect, "it is closed", code=CLOSED, topic=topic, places=places)
            if batch not in self.world.poison:
                continue
            self.frames[batch].add(leader)
            assert len(self.frames[batch]) <= TERMS_MAX, (
                f"a frame that is refused for good is tried for ever: {batch!r}"
            )
            joined = [other for other, item in enumerate(items) if item[0][0] == topic]
            places = [place] if self.rng.random() < 0.3 else joined
            return fx.EffectRefusedError(effect, "it is not valid", code="INVALID_RECORD", topic=topic, places=places)
        return None

    def _is_away(self, stream: StreamName) -> bool:
        return bool(self.world.away) and parse_segment_topic(self.world.away)[0] == stream

    def _is_full(self, topic: str) -> bool:
        return (
            bool(self.full) and topic.startswith(f"{self.full.replace('/', '.')}.") and topic not in self.world.topics
        )

    def _deny(self, effect: AnyEffect) -> fx.EffectRefusedError:
        return fx.EffectRefusedError(effect, "no permission", code=DENIED, topic=self.topic)


def refused_rightly(attempt: Attempt, outcome: ControlRecord, refusals: Refusals) -> bool:
    """Whether the commit of a transaction may have ended like that because something was refused."""
    reason = outcome.reason
    if reason.startswith("refused by Kafka: INVALID_RECORD"):
        return is_poisoned(attempt)
    if reason.startswith(("its merge was refused ", "a rolling commit of ")):
        return refusals.rounds > 0
    denied = refusals.denied.intersection(attempt.begin.streams)
    if reason.startswith("expired while "):  # the stream that is named is the one at fault, and not a frame
        return "INVALID_RECORD" not in reason and any(
            reason.startswith(f"expired while stream {name} was in an error state") for name in denied
        )
    if reason.startswith(f"refused by Kafka: {CLOSED}: it is closed"):
        # Nobody has it on record that it was closed, and epochs are published before conditions are looked at.
        return refusals.forgets_changes and bool(attempt.conditions) and bool(denied)
    told = ("its rolling commit is refused", "its conditions cannot be checked")
    return bool(denied) and (DENIED in reason or LEADERLESS in reason or reason.startswith(told))


def is_poisoned(attempt: Attempt) -> bool:
    """Whether what a transaction would commit holds what no broker takes."""
    return any(item in attempt.poisoned for item in attempt.records)
