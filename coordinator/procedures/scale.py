"""Scale: some active segments are sealed and replaced by new ones; open transactions are not waited for.

The order of the effects: ``scaling`` fixes what will be done and takes the request; the new topics are created; the
old segments are sealed; the epoch record, with their ends, is published together with the answer. Writers that are
refused in between look for the successors until these are published, so no write to a new segment can come before
one to the old.

Source: PDP-24, "Update scale workflow to not wait on transaction completion".
"""

from __future__ import annotations

from dataclasses import replace

from bridge.model import paths
from bridge.model.epochs import EpochRecord
from bridge.model.keyspace import ranges_of
from bridge.model.nodes import CreateNode, DeleteNode
from bridge.model.records import epoch_to_json
from bridge.model.requests import Answer, Request, refusing
from bridge.model.under_way import Scaling
from coordinator.effects import CreateTopics, Refused
from coordinator.errors import StaleStateError
from coordinator.group import GroupState, StreamState
from coordinator.steps import Steps, create_topics, seal, write
from coordinator.topics import segment_topic_spec


def scale(group: GroupState, stream: StreamState, name: str, request: Request, now_ms: int) -> Steps[None]:
    """Carry out a request to scale; it is planned, and refused, before anything is written.

    Raises:
        InvalidRangesError: see :meth:`EpochHistory.plan_scale`.
    """
    ranges = ranges_of(request.ranges)
    record = stream.history.plan_scale(request.seal, ranges, now_ms)
    scaling = Scaling(
        stream.config.name, name, record.epoch, request.seal, tuple(ranges), now_ms, group.controller_epoch
    )
    taken = yield from write(
        DeleteNode(f"{paths.requests(group.name)}/{name}"), CreateNode(paths.scaling(group.name), scaling.to_json())
    )
    if taken:
        yield from finish_scale(group, scaling)


def finish_scale(group: GroupState, scaling: Scaling) -> Steps[None]:
    """Carry out the rest of a scale, whatever of it has been done."""
    stream = group.streams[str(scaling.stream)]
    if stream.history.active.epoch >= scaling.epoch:
        raise StaleStateError(f"epoch {scaling.epoch} of {scaling.stream} exists, but its scale is not finished")
    record: EpochRecord = stream.history.plan_scale(scaling.seal, scaling.ranges, scaling.created_ms)
    history = stream.history.with_records(record)
    closed = [item.id for item in history.ended_with(record.epoch)]
    topics = [scaling.stream.segment_topic(item) for item in closed]
    try:
        yield from create_topics(
            [segment_topic_spec(stream.config, item.id) for item in history.began_with(record.epoch)]
        )
        ends = yield from seal(topics)
    except Refused as refused:
        yield from _give_up(group, scaling, refused)
        return
    group.forecast.forget(topics)
    record = replace(record, sealed_ends={item: ends[scaling.stream.segment_topic(item)] for item in closed})
    answer = Answer(ok=True, answered_ms=scaling.created_ms, epoch=record.epoch)
    published = yield from write(
        CreateNode(paths.epoch(scaling.stream, record.epoch), epoch_to_json(record)),
        DeleteNode(paths.scaling(group.name)),
        CreateNode(f"{paths.answers(group.name)}/{scaling.request}", answer.to_json()),
    )
    if not published:
        raise StaleStateError(f"the scale of {scaling.stream} to epoch {record.epoch} was finished by someone else")
    stream.history = stream.history.with_records(record)
    group.counts["scales"] += 1


def _give_up(group: GroupState, scaling: Scaling, refused: Refused) -> Steps[None]:
    """Answer that Kafka refuses a scale; topics that were made for it are used by the next one."""
    state = "nothing was changed"
    if not isinstance(refused.effect, CreateTopics):
        state = "its segments may be closed to writers already; ask again once Kafka allows it"
    why = f"Kafka refuses to scale stream {scaling.stream}: {refused.reason}; {state}"
    if not (
        yield from write(
            DeleteNode(paths.scaling(group.name)),
            CreateNode(
                f"{paths.answers(group.name)}/{scaling.request}",
                refusing(refused.code, why, scaling.created_ms).to_json(),
            ),
        )
    ):
        raise StaleStateError(f"the scale of {scaling.stream} was finished by someone else")
    group.counts["requests_refused"] += 1
