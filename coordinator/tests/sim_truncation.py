"""Truncation in the simulation: requests for it, a group that is waited for, and what may not be deleted."""

from __future__ import annotations

import random
from dataclasses import replace

from coordinator.tests.sim_expiry import epoch_of, whole_history_of
from coordinator.tests.sim_world import World
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.frames import unpack_header
from rollbridge.metadata import paths
from rollbridge.metadata.records import Truncation
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention, StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import GroupName, StreamName, parse_segment_topic
from rollbridge.stream.reading import Reset, SegmentStanding, decide

GROUP = "auditor"


def history_of(world: World, stream: StreamName) -> EpochHistory:
    """A stream's epochs as ZooKeeper has them."""
    names = world.children(paths.epochs(stream))
    raw = world.nodes.get(paths.truncation(stream))
    truncation = Truncation() if raw is None else Truncation.from_json(raw)
    history = truncation.history_of(epoch_of(world.nodes[f"{paths.epochs(stream)}/{name}"]) for name in names)
    assert history is not None, f"all epochs of {stream} are gone"
    return history


def retention_request(stream: StreamName, ms: int, size: int) -> AdminRequest:
    """Keep records so long, or so many bytes; and wait for the auditor."""
    return AdminRequest(
        kind=RequestKind.UPDATE_STREAM, stream=str(stream), retention=Retention(ms, size, (GROUP,)), created_ms=0
    )


def truncate_request(world: World, stream: StreamName, rng: random.Random, clock_ms: int) -> AdminRequest:
    """Truncate somewhere, perhaps where that is not possible."""
    history = whole_history_of(world, stream)
    segment = rng.choice(list(history.segments()))
    end = len(world.log(stream.segment_topic(segment)).entries) + rng.choice((0, 0, 0, 1))
    cut = {segment: rng.randint(0, end)}
    return AdminRequest(kind=RequestKind.TRUNCATE_STREAM, stream=str(stream), cut=cut, created_ms=clock_ms)


def audit(world: World, stream: StreamName, rng: random.Random) -> None:
    """The auditor reads on, as far as it may, and commits."""
    commits = world.commits.setdefault(GROUP, {})
    history = history_of(world, stream)
    for segment, verdict in decide(history, _committed(world, stream), Reset.EARLIEST).items():
        topic = stream.segment_topic(segment)
        if verdict.standing is SegmentStanding.READ and topic in world.topics and rng.random() < 0.7:
            end, stable = history.sealed_end(segment), world.topics[topic].stable_end()
            most = stable if end is None else min(end, stable)
            commits[topic] = max(verdict.offset, rng.randint(verdict.offset, most), commits.get(topic, 0))


def check_deletion(world: World, topic: str, before: int) -> None:
    """Raise AssertionError if these records may not be deleted."""
    stream, segment = parse_segment_topic(topic)
    history = whole_history_of(world, stream)
    for item in history.graph.predecessors(segment):
        assert item in history.removed, f"{topic} is truncated although {item} before it is not gone"
    raw = world.past.get(paths.stream(stream))
    if raw is None or GROUP not in StreamConfig.from_json(raw).retention.groups:
        return  # nobody has been told yet that the stream waits for it; a request is dropped by a repair
    unmarked = replace(history, removed=frozenset())
    verdict = decide(unmarked, _committed(world, stream), Reset.EARLIEST)[segment]
    assert verdict.standing is SegmentStanding.DONE or verdict.offset >= before, (
        f"{GROUP} has not read {topic} to {before}"
    )


def check_buffer(world: World, group: GroupName, topic: str, before: int) -> None:
    """Raise AssertionError if a transaction has frames there and no outcome."""
    terminated = world.summary(group.commit_log_topic).terminated
    log = world.topics[topic]
    for entry in log.entries[log.start : before]:
        header = unpack_header(entry.item[0])
        assert header is not None
        assert header.transaction in terminated, f"{topic} is truncated to {before}, above frames that are needed"


def _committed(world: World, stream: StreamName) -> dict[SegmentId, int]:
    places = ((parse_segment_topic(topic), offset) for topic, offset in world.commits.get(GROUP, {}).items())
    return {segment: offset for (name, segment), offset in places if name == stream}
