"""Sealing what a rolling commit has left open, because Kafka refused to seal it.

By then the commit is visible, so there is no way back: its stream is in an error state, and readers wait at what is not
sealed, until it can be. The history says what that is: an epoch without ends though segments ended with it.
"""

from __future__ import annotations

from rollbridge.model import paths
from rollbridge.model.faults import SUSPENDED, StreamFault
from rollbridge.model.nodes import SetNode
from rollbridge.model.records import epoch_to_json
from rollbridge_coordinator.state.effects import Refused, Seal
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, seal, write
from rollbridge_coordinator.state.streams import StreamState


def unsealed_fault(since_ms: int) -> StreamFault:
    """The error state of a stream of which something is left open."""
    return StreamFault("segments of a rolling commit are not sealed yet", "", "", since_ms)


def seal_left(group: GroupState, stream: StreamState) -> Steps[None]:
    """Seal what is left open of a stream, and publish where it ends.

    Raises:
        Refused: It is refused still.
    """
    for record in stream.history.unsealed():
        closed = {item.id: stream.topic_of(item.id) for item in stream.history.ended_with(record.epoch)}
        ends = yield from seal(list(closed.values()))
        held = sorted(set(closed.values()) - ends.keys())
        if held:
            why = "native transactions of others are open on what is to be sealed"
            raise Refused(Seal(tuple(held)), why, code=SUSPENDED, topic=held[0])
        group.forecast.forget(closed.values())
        history = stream.history.with_sealed_ends(record.epoch, {item: ends[topic] for item, topic in closed.items()})
        complete = history.record(record.epoch)
        if not (yield from write(SetNode(paths.epoch(stream.config.name, record.epoch), epoch_to_json(complete)))):
            raise StaleStateError(f"epoch {record.epoch} of {stream.config.name} is gone")
        stream.history = history
