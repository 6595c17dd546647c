"""Clocks in the simulation: leaders with clocks that are days apart delete nothing young, and end no lease early."""

from __future__ import annotations

from collections.abc import Iterable

from bridge.model.control import EXPIRED, ControlRecord
from bridge.model.identifiers import SegmentId
from bridge.model.names import StreamName
from coordinator.tests.sim_actors import LEASE_MS, Attempt
from coordinator.tests.sim_world import World

RETENTION_MS = 2_500


def check_age(world: World, stream: StreamName, segment: SegmentId, before: int | None = None) -> None:
    """Raise AssertionError if a retention of :data:`RETENTION_MS` deletes a record that is younger."""
    if not world.acting.startswith("retain_streams/"):
        return  # somebody has asked for it
    for offset, entry in enumerate(world.log(stream.segment_topic(segment)).entries[:before]):
        age_ms = world.clock_ms - entry.appended_ms
        assert entry.item is None or age_ms >= RETENTION_MS, f"offset {offset} of {segment} goes {age_ms} ms old"


def lease_faults(attempt: Attempt, outcome: ControlRecord, decided_ms: int) -> Iterable[str]:
    """What is wrong with the end of a transaction, whose outcome was written at a time by the brokers' clock."""
    if outcome.reason != EXPIRED:
        return
    if decided_ms < attempt.begun_ms + LEASE_MS:
        yield f"{attempt.id} has expired {decided_ms - attempt.begun_ms} ms after it began, with {LEASE_MS} ms"
    if attempt.ended == "commit" and attempt.asked_ms <= attempt.begun_ms + LEASE_MS:
        yield f"{attempt.id} has expired although its commit was asked for in time"
