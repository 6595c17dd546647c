"""What of a group's streams its journal does not have yet. Pure; see :mod:`rollbridge.model.journal`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollbridge.model import paths
from rollbridge.model.epochs import EpochRecord
from rollbridge.model.faults import StreamFault
from rollbridge.model.journal import DELETED, is_deleted, streams_of
from rollbridge.model.names import StreamName
from rollbridge.model.records import StreamState as Lifecycle
from rollbridge.model.records import Truncation, epoch_to_json

if TYPE_CHECKING:
    from rollbridge_coordinator.state.streams import StreamState


@dataclass(slots=True)
class JournalState:
    """The journal as it stands in Kafka, and what of a leader's state is known to stand there.

    States and records are never changed but replaced, so each is compared by identity: looking costs next to nothing.
    """

    nodes: dict[str, bytes] = field(default_factory=dict)
    _seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _epochs: dict[str, EpochRecord] = field(default_factory=dict)

    def changes(self, streams: Mapping[str, StreamState], faults: Mapping[str, StreamFault]) -> dict[str, bytes | None]:
        """What is to be written so that it says what these streams are; None is a node that is gone."""
        found: dict[str, bytes | None] = {}
        for name, stream in streams.items():
            fault = faults.get(name)
            state = _state_of(stream, fault)
            known = self._seen.get(name)
            if stream.config.state is Lifecycle.ACTIVE and (
                known is None or any(one is not other for one, other in zip(known, state, strict=True))
            ):
                found |= self._of(stream, fault)
        alive = {item.config.name for item in streams.values() if item.config.state is Lifecycle.ACTIVE}
        if len(alive) < len(self._seen) or not self._seen:
            for gone in streams_of(self.nodes).keys() - alive:
                found |= dict.fromkeys(self._below(gone), None)
                if not is_deleted(self.nodes[paths.stream(gone)]):
                    found[paths.stream(gone)] = DELETED
        return found

    def adopt(
        self, changes: Mapping[str, bytes | None], streams: Mapping[str, StreamState], faults: Mapping[str, StreamFault]
    ) -> None:
        """The changes are durable."""
        for path, value in changes.items():
            if value is None:
                self.nodes.pop(path, None)
                self._epochs.pop(path, None)
            else:
                self.nodes[path] = value
        active = {name: item for name, item in streams.items() if item.config.state is Lifecycle.ACTIVE}
        self._seen = {name: _state_of(item, faults.get(name)) for name, item in active.items()}
        for item in active.values():
            self._epochs |= {paths.epoch(item.config.name, record.epoch): record for record in item.history.records}

    def _of(self, stream: StreamState, fault: StreamFault | None) -> dict[str, bytes | None]:
        name, history = stream.config.name, stream.history
        wanted: dict[str, bytes | None] = {paths.stream(name): stream.config.to_json()}
        kept = {paths.epoch(name, record.epoch): record for record in history.records}
        for path, record in kept.items():
            if self._epochs.get(path) is not record:
                wanted[path] = epoch_to_json(record)
        if history.removed or history.foundation is not None:
            wanted[paths.truncation(name)] = Truncation(history.removed, stream.removing, history.foundation).to_json()
        if stream.late.segments:
            wanted[paths.late(name)] = stream.late.to_json()
        if fault is not None:
            wanted[paths.stream_fault(name)] = fault.to_json()
        old = [path for path in self._below(name) if path not in wanted and path not in kept]
        fresh = {path: value for path, value in wanted.items() if self.nodes.get(path) != value}
        return fresh | dict.fromkeys(old, None)

    def _below(self, name: StreamName) -> list[str]:
        return [path for path in self.nodes if path.startswith(f"{paths.stream(name)}/")]


def _state_of(stream: StreamState, fault: StreamFault | None) -> tuple[object, ...]:
    """All that the journal says of a stream, as values that are replaced and never changed."""
    return stream.config, stream.history, stream.removing, stream.late, fault
