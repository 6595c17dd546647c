"""Refusals in the simulation: Kafka refuses one frame, one topic or one round for good, and nobody else may suffer.

Source: the class of faults in which an effect that fails definitely is treated like one whose outcome is unknown.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from bridge.model.buffered import FrameRef
from bridge.model.control import ControlRecord
from bridge.model.names import StreamName
from coordinator import effects as fx
from coordinator.tests.sim_actors import Attempt
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import World

REFUSAL_DEFECTS = ("deaf-refusal", "broad-refusal")
"""A refusal for good ends the term, as if nobody knew; one of a frame is held against its stream."""
POISONED = 0.02
"""How many frames hold what no broker takes."""
DENIED = "TOPIC_AUTHORIZATION_FAILED"
DENIED_MS = 1_500
"""How long a topic takes nothing."""
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
        self.denied: set[str] = set()
        self.topic = ""
        self.until_ms = 0
        self.rounds = 0
        """Rounds that were refused as a whole."""
        self.frames: defaultdict[bytes, set[int]] = defaultdict(set)
        """By frame, the terms in which it was refused."""

    def step(self) -> None:
        """A topic takes nothing for a while, now and then."""
        if self.world.clock_ms > self.until_ms:
            self.topic = ""
            if self.rng.random() < 0.002:
                stream = self.rng.choice(self.streams)
                segment = self.rng.choice(history_of(self.world, stream).active.segments).id
                self.topic, self.until_ms = stream.segment_topic(segment), self.world.clock_ms + DENIED_MS
                self.denied.add(str(stream))

    def end(self) -> None:
        """Nothing is refused any more but what no broker takes."""
        self.topic = ""
        self.rng = random.Random(0)
        self.until_ms = 1 << 60

    def __call__(self, effect: fx.Effect, leader: int) -> fx.Refused | None:
        """What the answer to an effect is, if it is refused."""
        if leader != self.world.identity:
            return None  # it is fenced before anybody looks at what it wants
        match effect:
            case fx.MergeFrames(items) | fx.AppendTogether(items):
                return self._merge(effect, items, leader)
            case fx.AppendMessages(fx.Messages(topic)) if topic == self.topic:
                return self._deny(effect)
            case fx.CommitRound() if self._merges() and self.rng.random() < 0.04:
                self.rounds += 1
                return fx.Refused(effect, "it has taken too long", code="INVALID_TXN_STATE")
        return None

    def _merges(self) -> bool:
        """Whether the round that is to be committed holds transactions."""
        may_fail = self.until_ms < 1 << 60 and not self.world.is_early
        return may_fail and self.world.acting.startswith(("merge_direct/", "roll/"))

    def _merge(self, effect: fx.Effect, items: Sequence[tuple[str, FrameRef]], leader: int) -> fx.Refused | None:
        if any(topic == self.topic for topic, _ in items):
            return self._deny(effect)
        for place, (topic, frame) in enumerate(items):
            batch = self.world.batch_of(frame)
            if batch not in self.world.poison:
                continue
            self.frames[batch].add(leader)
            assert len(self.frames[batch]) <= TERMS_MAX, (
                f"a frame that is refused for good is tried for ever: {batch!r}"
            )
            joined = [other for other, item in enumerate(items) if item[0] == topic]
            places = [place] if self.rng.random() < 0.3 else joined
            return fx.Refused(effect, "it is not valid", code="INVALID_RECORD", topic=topic, places=places)
        return None

    def _deny(self, effect: fx.Effect) -> fx.Refused:
        return fx.Refused(effect, "no permission", code=DENIED, topic=self.topic)


def refused_rightly(attempt: Attempt, outcome: ControlRecord, refusals: Refusals) -> bool:
    """Whether the commit of a transaction may have ended like that because something was refused."""
    reason = outcome.reason
    if reason.startswith("refused by Kafka: INVALID_RECORD"):
        return is_poisoned(attempt)
    if reason.startswith("its merge was refused "):
        return refusals.rounds > 0
    return DENIED in reason and any(name in refusals.denied for name in attempt.begin.streams)


def is_poisoned(attempt: Attempt) -> bool:
    """Whether what a transaction would commit holds what no broker takes."""
    return any(item in attempt.poisoned for item in attempt.records)
