"""Clocks in the simulation: leaders with clocks that are days apart delete nothing young, and end no lease early."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from coordinator.tests.sim_actors import Attempt
from coordinator.tests.sim_world import World
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.frames import FrameKind, decode_extend, unpack_header
from rollbridge.commitlog.control import EXPIRED, ControlRecord
from rollbridge.stream.names import StreamName

RETENTION_MS = 2_500


def check_age(world: World, stream: StreamName, segment: SegmentId, before: int | None = None) -> None:
    """Raise AssertionError if a retention of :data:`RETENTION_MS` deletes a record that is younger."""
    if not world.acting.startswith("retain_streams/"):
        return  # somebody has asked for it
    for offset, entry in enumerate(world.log(stream.segment_topic(segment)).entries[:before]):
        age_ms = world.clock_ms - entry.appended_ms
        assert entry.item is None or age_ms >= RETENTION_MS, f"offset {offset} of {segment} goes {age_ms} ms old"


def lease_faults(world: World, attempt: Attempt, outcome: ControlRecord, decided_ms: int) -> Iterable[str]:
    """What is wrong with the end of a transaction, whose outcome was written at a time by the brokers' clock."""
    if not outcome.reason.startswith(EXPIRED):
        return
    deadline_ms = deadline_of(world, attempt)
    if decided_ms < deadline_ms:
        yield f"{attempt.id} has expired {deadline_ms - decided_ms} ms before its lease has ended"
    if outcome.reason != EXPIRED:
        return  # while its stream could take nothing, which is for others to check
    # What a connection that died had not delivered was never asked for, whatever its client believes.
    if attempt.ended == "commit" and attempt.asked_ms <= deadline_ms and _commit_ms(world, attempt) <= deadline_ms:
        yield f"{attempt.id} has expired although its commit was asked for in time"


def deadline_of(world: World, attempt: Attempt) -> int:
    """When the lease of a transaction ends: as its EXTEND frames say that were appended in time."""
    deadline_ms = attempt.begun_ms + attempt.begin.lease_ms
    for name, log in world.topics.items():
        if ".transaction-buffer" in name:
            for entry in log.entries:
                header = None if entry.item is None else unpack_header(entry.item[0])
                if (
                    header is not None
                    and header.kind is FrameKind.EXTEND
                    and header.transaction == attempt.id.bytes
                    and entry.appended_ms <= deadline_ms
                ):
                    deadline_ms = max(deadline_ms, entry.appended_ms + decode_extend(entry.item[1]))
    return deadline_ms


def _commit_ms(world: World, attempt: Attempt) -> float:
    """When the COMMIT frame of a transaction was appended to a buffer; infinity if it never was."""
    for name, log in world.topics.items():
        if ".transaction-buffer" in name:
            for entry in log.entries:
                header = None if entry.item is None else unpack_header(entry.item[0])
                if header is not None and header.kind is FrameKind.COMMIT and header.transaction == attempt.id.bytes:
                    return entry.appended_ms
    return inf
