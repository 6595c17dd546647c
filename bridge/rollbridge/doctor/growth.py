"""Check of how many topics and epochs streams have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollbridge.doctor.facts import ClusterFacts, Finding, warning
from rollbridge.model.epochs import EpochCause
from rollbridge.monitoring.rules import remedy
from rollbridge.monitoring.transaction_alerts import EPOCHS_MANY, TOPICS_MANY


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
            way_out = remedy("growth", "of topics", stream=name)
        else:
            way_out = remedy("growth", "of epochs", stream=name)
        if 2 * rolled > causes[EpochCause.SCALE]:
            large = sum(any(segment.id.is_prepared for segment in item.segments) for item in history.records)
            way_out += f"; {rolled} rolling commits made two epochs each: "
            if 2 * large > rolled:
                way_out += "most of large transactions, for which merge_beside_bytes of the coordinators can be raised"
            else:
                way_out += "commit open transactions before a scale"
        yield warning("growth", what, way_out)
