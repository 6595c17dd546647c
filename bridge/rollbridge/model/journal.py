"""The journal of a group: what its leader has last written to ZooKeeper, once more, in Kafka.

ZooKeeper may be restored from a backup; Kafka then knows of what ZooKeeper has forgotten. So a leader keeps a copy of
the nodes that say what there is: the group's streams with their epochs and what was removed of them, its controller
epoch, and how far the counters of transactions were, and how often they had been written. The copy follows ZooKeeper
and is never ahead of it, so whatever it knows and ZooKeeper does not has been lost there. Values of the counters are
not compared: who may write them may set them back, see :mod:`rollbridge.model.counters`.

It stands in the compacted topic of terminated transactions, beside the client names: the key of a record is a zero byte
and the path of the node. In place of a stream that was deleted stands the name of the node that keeps the numbers which
it has used (:mod:`rollbridge.model.lives`), or nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from rollbridge.model import paths
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.late import NOTED_MAX, LateNotes
from rollbridge.model.lives import former_among, parse_former
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import ControllerEpoch, Group, StreamConfig, StreamState, Truncation

_MARK: Final = b"\0"
DELETED: Final = b""
"""Stands for a stream that was deleted, and of which no numbers are known."""

Journal = Mapping[str, bytes]
"""Values of nodes by their paths."""


def key_of(path: str) -> bytes:
    """The key of a node's record."""
    return _MARK + path.encode()


def is_deleted(value: bytes) -> bool:
    """Whether this stands for a stream that was deleted; others have a configuration, which is JSON."""
    return not value.startswith(b"{")


def split(records: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], dict[str, bytes]]:
    """The records of client names, and the journal, of what stands in the topic."""
    clients = {key: value for key, value in records.items() if not key.startswith(_MARK)}
    journal = {key[1:].decode("utf-8", "replace"): value for key, value in records.items() if key.startswith(_MARK)}
    return clients, journal


def streams_of(journal: Journal) -> dict[StreamName, bytes]:
    """The values of all streams that it knows, deleted ones included."""
    found = {}
    for path, value in journal.items():
        parts = path.split("/")
        if len(parts) == 5 and parts[1] == "scopes" and parts[3] == "streams":
            found[StreamName(parts[2], parts[4])] = value
    return found


def epochs_of(journal: Journal, stream: StreamName) -> dict[int, bytes]:
    """The values of a stream's epochs, by their numbers, in order."""
    prefix = f"{paths.epochs(stream)}/"
    found = {int(path.removeprefix(prefix)): value for path, value in journal.items() if path.startswith(prefix)}
    return dict(sorted(found.items()))


def lost(
    journal: Journal,
    nodes: Mapping[str, bytes | None],
    formers: Collection[str],
    name: GroupName,
    next_epoch: int,
) -> list[str]:
    """What the journal knows and ZooKeeper does not, as sentences; empty unless ZooKeeper was set back.

    Args:
        journal: Of the group.
        nodes: The nodes of the group's streams as ZooKeeper has them, and its own.
        formers: The nodes of the scope's deleted streams there.
        name: The group.
        next_epoch: The controller epoch of a new leader, or the one after that of who leads.
    """
    found = []
    raised = journal.get(paths.controller(name))
    if raised is not None and (epoch := ControllerEpoch.from_json(raised).epoch) >= next_epoch:
        found.append(f"the group was led with controller epoch {epoch}, ZooKeeper gives out {next_epoch}")
    number, known = (highest_number(item.get(paths.group(name))) for item in (journal, nodes))
    if number > known:
        found.append(f"transactions of the group had ids of number {number}, ZooKeeper knows {known}")
    for stream, value in streams_of(journal).items():
        there = nodes.get(paths.stream(stream))
        if is_deleted(value):
            found += _lost_deletion(stream, value, None if there is None else StreamConfig.from_json(there), formers)
            continue
        if there is None:
            found.append(f"ZooKeeper does not know stream {stream}")
            continue
        if _age(value) > _age(there):
            found.append(f"the settings of stream {stream} were changed, or it was created again")
        prefix = f"{paths.epochs(stream)}/"
        last = max((int(path.removeprefix(prefix)) for path in nodes if path.startswith(prefix)), default=-1)
        newest = max(epochs_of(journal, stream), default=-1)
        if newest > last:
            found.append(f"stream {stream} has epoch {newest}, ZooKeeper knows {last} at most")
        gone = _removed(journal.get(paths.truncation(stream)))
        here = Truncation.from_json(raw) if (raw := nodes.get(paths.truncation(stream))) else Truncation()
        missing = [item for item in gone if here.keeps(item.epoch) and item not in here.removed]
        if missing:
            found.append(f"{len(missing)} segments of stream {stream} were removed, such as {min(missing)}")
        noted, notes = _late(journal.get(paths.late(stream))), _late(nodes.get(paths.late(stream)))
        kept = {item: to for item, to in noted.items() if here.keeps(item.epoch) and item not in here.removed}
        full = min(notes) if len(notes) >= NOTED_MAX else SegmentId.from_int(0)  # of more, the oldest are not kept
        if any(notes.get(item, 0) < to for item, to in kept.items() if item >= full):
            found.append(f"late records of stream {stream} were forwarded, of which ZooKeeper knows nothing")
    return found


def highest_number(group: bytes | None) -> int:
    """The highest number that a group ever had, as its node says; 0 if it has none."""
    if not group:
        return 0
    record = Group.from_json(group)
    return max([record.number, *record.former_numbers])


def _age(config: bytes) -> tuple[int, int]:
    """Which of two configurations of a stream is the newer one."""
    known = StreamConfig.from_json(config)
    return known.first_epoch, known.revision


def _lost_deletion(
    stream: StreamName, value: bytes, there: StreamConfig | None, formers: Collection[str]
) -> Iterator[str]:
    """What is lost of a deletion: that the stream is gone, or which numbers it has used."""
    _, former = parse_former(value.decode("utf-8", "replace"))
    if there is not None and there.state is StreamState.ACTIVE and there.first_epoch < former.epoch:
        yield f"stream {stream} was deleted, ZooKeeper has it"
    elif former_among(formers, stream).epoch < former.epoch:
        yield f"ZooKeeper does not know which numbers deleted stream {stream} has used"


def _late(raw: bytes | None) -> dict[SegmentId, int]:
    """Up to where records behind the ends of segments have been settled."""
    notes = LateNotes() if raw is None else LateNotes.from_json(raw)
    return {segment: item.looked_to for segment, item in notes.segments.items()}


def _removed(raw: bytes | None) -> frozenset[SegmentId]:
    return frozenset() if raw is None else Truncation.from_json(raw).removed
