"""Scale: some active segments are sealed and replaced by new ones; open transactions are not waited for.

The order of the effects: ``scaling`` fixes what will be done and takes the request; the new topics are created; the
old segments are sealed; the epoch record, with their ends, is published together with the answer. Writers that are
refused in between look for the successors until these are published, so no write to a new segment can come before
one to the old.

Source: PDP-24, "Update scale workflow to not wait on transaction completion".
"""

from __future__ import annotations

import logging
from dataclasses import replace

from bridge.errors import StreamBusy
from bridge.model import paths
from bridge.model.epochs import EpochRecord
from bridge.model.keyspace import ranges_of
from bridge.model.nodes import CreateNode, DeleteNode
from bridge.model.records import check_segments, epoch_to_json
from bridge.model.requests import Answer, Request, refusing
from bridge.model.under_way import Scaling
from coordinator.effects import CreateTopics, Refused
from coordinator.errors import StaleStateError
from coordinator.group import GroupState, HeldScale, StreamState
from coordinator.procedures.foreign import LOOK_AGAIN_MS, name_some
from coordinator.steps import Steps, create_topics, end_foreign, look_for_foreign, seal, write
from coordinator.topics import segment_topic_spec

logger = logging.getLogger(__name__)


def scale(group: GroupState, stream: StreamState, name: str, request: Request, now_ms: int) -> Steps[None]:
    """Carry out a request to scale; it is planned, and refused, before anything is written.

    Raises:
        InvalidRangesError: see :meth:`EpochHistory.plan_scale`.
        InvalidRequestError: the stream would have too many segments.
        StreamBusy: native transactions of others have been open for too long on what is to be sealed.
    """
    ranges = ranges_of(request.ranges)
    record = stream.history.plan_scale(request.seal, ranges, now_ms)
    check_segments(stream.config.name, len(record.segments), len(stream.history.active.segments))
    closed = stream.history.with_records(record).ended_with(record.epoch)
    if (yield from _is_held(group, [stream.topic_of(item.id) for item in closed], name, request, now_ms)):
        return
    scaling = Scaling(
        stream.config.name, name, record.epoch, request.seal, tuple(ranges), now_ms, group.controller_epoch
    )
    taken = yield from write(
        DeleteNode(f"{paths.requests(group.name)}/{name}"), CreateNode(paths.scaling(group.name), scaling.to_json())
    )
    if taken:
        yield from finish_scale(group, scaling)


def _is_held(group: GroupState, topics: list[str], name: str, request: Request, now_ms: int) -> Steps[bool]:
    """Whether native transactions of others keep a scale waiting; nothing has been closed, so nobody else waits.

    One that is open at two looks is waited for. Others are of the kind that conditional writers make, which end within
    milliseconds; there may always be one of these.
    """
    found = frozenset((yield from look_for_foreign(topics)))
    before = group.held.get(name)
    lasting = found if before is None else found & before.seen
    if not lasting:
        group.held.pop(name, None)
        return False
    since_ms = now_ms if before is None else before.since_ms
    named = name_some(lasting)
    if before is not None and request.abort_foreign:
        failed = yield from end_foreign(sorted(lasting, key=str))
        if failed is not None:
            group.held.pop(name, None)
            raise StreamBusy(
                "native transactions of others are open on what is to be sealed, and could not all be aborted: "
                f"{failed}; the stream was not changed"
            )
        group.counts["foreign_aborted"] += len(lasting)
    elif now_ms - since_ms >= group.settings.scale_wait_ms:
        group.held.pop(name, None)
        raise StreamBusy(
            f"stream {request.stream} cannot be scaled while native transactions of others are open on what is to be "
            f"sealed; {len(lasting)} did not end within {group.settings.scale_wait_ms / 1000:g} s: {named}. End them, "
            "or have them aborted (--abort-foreign, abort_foreign=True); nothing was changed"
        )
    elif before is None:
        logger.info("the scale of %s waits for native transactions of others: %s", request.stream, named)
    group.held[name] = HeldScale(since_ms, now_ms + LOOK_AGAIN_MS, found)
    return True


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
    """Answer that a scale is refused; topics that were made for it are used by the next one."""
    state = "nothing was changed"
    if not isinstance(refused.effect, CreateTopics):
        state = f"its segments may be closed to writers already; ask again once {refused.by} allows it"
    why = f"{refused.by} refuses to scale stream {scaling.stream}: {refused.reason}; {state}"
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
