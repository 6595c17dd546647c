"""Invariants of a leader's state between two steps of its work. Pure.

Simulations check them after each step; a coordinator with the option ``validate`` does, too.

Source: ``validate_state`` in ``dask/distributed: worker_state_machine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollbridge.buffer.table import State
from rollbridge.stream.epochs import check_chain
from rollbridge_coordinator.core.state import GroupState


class BrokenInvariantError(Exception):
    """A leader's state contradicts itself: it must not be used any more."""


def check(group: GroupState) -> None:
    """Check all invariants.

    Raises:
        BrokenInvariantError: some do not hold; each is named.
    """
    if found := "; ".join(violations(group)):
        raise BrokenInvariantError(found)


def violations(group: GroupState) -> Iterator[str]:
    """Yield what contradicts itself in a state, each as a sentence."""
    yield from _streams(group)
    yield from _transactions(group)
    yield from _work(group)


def _streams(group: GroupState) -> Iterator[str]:
    led = group.streams
    suspended = {name for item in group.waits.pending_changes.values() for name in item.work.streams}
    lingering = group.waits.lingering
    open_ended = suspended | set(() if lingering is None else lingering.committing.streams)
    for name in (led.keys() & group.unled.keys()) | (led.keys() & group.doomed.keys()):
        yield f"stream {name} is led, and is not"
    for name, stream in led.items():
        history = stream.history
        yield from (f"stream {name}: {fault}" for fault in check_chain(history.records, history.first, history.born))
        if history.unsealed() and name not in open_ended and group.waits.faults.get(name) is None:
            yield f"stream {name} has segments without an end, and nothing will seal them"
    for name in suspended & led.keys():
        if group.waits.faults.get(name) is None:
            yield f"stream {name} is changed, and takes transactions meanwhile"
    for partition in group.partitions():
        if partition not in group.snapshots.partitions:
            yield f"nothing is known of the snapshots of {partition}"


def _transactions(group: GroupState) -> Iterator[str]:
    fold = group.fold
    held = {item.id for item in fold.lines.held()}  # until earlier ones of their connections have been read
    for identifier, item in fold.open.items():
        is_decided = item.state in (State.COMMITTING, State.ABORTING)
        if not is_decided and item.state is not State.OPEN:
            yield f"transaction {item.transaction_id} is open, and {item.state}"
        if is_decided != (identifier in fold.decided or identifier in held):
            yield f"transaction {item.transaction_id} is {item.state}, and decided: {not is_decided}"
        for partition, offset in item.first_offsets.items():
            if partition in fold.positions and offset >= fold.positions[partition]:
                yield f"transaction {item.transaction_id} begins at {offset} of {partition}, which was not read yet"
    for identifier in fold.decided.keys() - fold.open.keys():
        yield f"transaction {identifier.hex()} is decided, and not open"
    for what, total, sum_ in (
        ("held", fold.held_bytes, sum(item.held_bytes for item in fold.open.values())),
        ("cached", fold.cached_bytes, sum(item.cached_bytes for item in fold.open.values())),
    ):
        if total != sum_:
            yield f"{total} bytes are {what}, and open transactions have {sum_}"
    for identifier in group.records.recorded.intersection(group.records.finished):
        yield f"the record of transaction {identifier.hex()} is kept, and to be removed"


def _work(group: GroupState) -> Iterator[str]:
    if group.draft is not None:
        yield "outcomes of a round are kept for its commit, and no round is under way"
    most = group.settings.merges_beside_max
    if len(group.large.preparations) > most:
        yield f"{len(group.large.preparations)} merges in the background are more than {most}"
    for identifier, names in group.waits.answers.items():
        if names and identifier not in group.fold.open:
            yield f"requests wait for the end of transaction {identifier.hex()}, which is over"
