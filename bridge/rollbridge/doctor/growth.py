"""Check of how many topics and epochs streams have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from rollbridge.doctor.facts import ClusterFacts, Finding, warning
from rollbridge.model.epochs import EpochCause

TOPICS_MANY: Final = 1_000
"""Topics of segments of one stream: a broker takes a few thousand partitions, and each of these has its replicas."""
EPOCHS_MANY: Final = 2_000
"""Epochs of one stream: clients read all of them when they begin."""


def growth(facts: ClusterFacts) -> Iterator[Finding]:
    """Expect streams to have no more topics and epochs than brokers and clients carry easily."""
    for stream in facts.streams:
        history = stream.history
        if history is None:
            continue
        topics = sum(not stream.config.places.is_adopted(item) for item in history.stored())
        epochs = len(history.records)
        if topics < TOPICS_MANY and epochs < EPOCHS_MANY:
            continue
        causes = Counter(item.cause for item in history.records)
        rolled = causes[EpochCause.ROLLING_TRANSACTIONS]
        name = stream.config.name
        what = f"stream {name} has {topics} topics of segments and {epochs} epochs"
        if topics >= TOPICS_MANY:
            remedy = (
                "topics go with their records: set a retention (rollbridge stream update "
                f"{name} --retention-time 7d), or rollbridge stream truncate {name}"
            )
        else:
            remedy = (
                "epochs are dropped by themselves once all that they hold is truncated: "
                f"see rollbridge stream history {name}"
            )
        if 2 * rolled > causes[EpochCause.SCALE]:
            large = sum(any(segment.id.is_prepared for segment in item.segments) for item in history.records)
            remedy += f"; {rolled} rolling commits made two epochs each: "
            if 2 * large > rolled:
                remedy += "most of large transactions, for which merge_beside_bytes of the coordinators can be raised"
            else:
                remedy += "commit open transactions before a scale"
        yield warning("growth", what, remedy)
