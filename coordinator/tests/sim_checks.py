"""Checks of a simulated history: nothing lost, doubled, torn, aborted or out of order."""

from __future__ import annotations

from collections import Counter

from coordinator.tests.sim_actors import REMEMBERED, Client
from coordinator.tests.sim_clocks import lease_faults
from coordinator.tests.sim_conditions import condition_faults, refusal_faults
from coordinator.tests.sim_expiry import whole_history_of
from coordinator.tests.sim_pipelines import PipeliningClient, may_be_forsaken, order_faults
from coordinator.tests.sim_refusals import Refusals, is_poisoned, refused_rightly
from coordinator.tests.sim_sessions import RestartingClient, answer_faults
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Record, World
from rollbridge.base.ids import BEGUN_TWICE, NOT_GIVEN_OUT, PREPARED_FIRST, SegmentId, TransactionId
from rollbridge.commitlog.control import FENCED, ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import decode_terminated
from rollbridge.metadata.journal import split
from rollbridge.stream.epochs import check_chain
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import GroupName, StreamName

POSITIONS = KeySpace()


def faults(
    world: World,
    group: GroupName,
    streams: list[StreamName],
    clients: list[Client],
    refusals: Refusals | None = None,
) -> list[str]:
    """Every promise that the history breaks, as a sentence."""
    found: list[str] = []
    log = [(offset, record) for offset, record in world.topics[group.commit_log_topic].visible()]
    outcomes = _outcomes(log, found)
    order = {transaction: place for place, transaction in enumerate(outcomes)}
    placed: Counter[tuple[str, str]] = Counter()
    for stream in streams:
        history, kept = whole_history_of(world, stream), history_of(world, stream)
        found.extend(
            [
                *check_chain(history.records, history.first, history.born),
                *check_chain(kept.records, kept.first, kept.born),
            ]
        )
        closed = [item.id for item in kept.active.segments if world.topics[stream.segment_topic(item.id)].sealed]
        found.extend(f"active segment {item} of {stream} is closed, and nothing continues it" for item in closed)
        by_key: dict[str, list[str]] = {}
        for segment in history.segments():
            rows = world.log(stream.segment_topic(segment)).visible()
            held = history.segments()[segment].range
            found.extend(
                f"{row.value} stands in {segment} of {stream}, which holds {held}"
                for _, row in rows
                if row.key.startswith("c") and row.origin is None and POSITIONS.position(row.key.encode()) not in held
            )
            _check_segment(stream, segment, rows, order, outcomes, found)
            end = history.sealed_end(segment)
            if end is not None:
                if any(offset >= end and row.value not in world.late for offset, row in rows):
                    found.append(f"sealed segment {segment} of {stream} grew beyond {end}")
                rows = [(offset, row) for offset, row in rows if offset < end]  # nobody reads further
            for _, row in rows:
                placed[str(stream), row.value] += 1
                by_key.setdefault(row.key, []).append(row.value)
        for key, values in by_key.items():
            numbers = [int(value.split("=")[1]) for value in values]
            if numbers != sorted(numbers):
                found.append(f"records of key {key} in {stream} are out of order: {numbers}")
    _check_clients(world, clients, refusals, outcomes, placed, found)
    _check_leases(world, group, clients, outcomes, found)
    _check_memory(world, group, log, found)
    ended = {str(record.transaction): (record.kind is ControlKind.COMMIT, offset) for offset, record in log}
    for client in clients:
        if isinstance(client, RestartingClient):
            found.extend(answer_faults(client, ended))
        if isinstance(client, PipeliningClient):
            found.extend(order_faults(client, outcomes))
    return found


def _check_leases(
    world: World, group: GroupName, clients: list[Client], outcomes: dict[str, ControlRecord], found: list[str]
) -> None:
    decided = {
        str(entry.item.transaction): entry.appended_ms
        for entry in world.topics[group.commit_log_topic].entries
        if entry.item is not None and entry.item.kind is not ControlKind.BEGIN
    }
    for attempt in (attempt for client in clients for attempt in client.attempts):
        if str(attempt.id) in outcomes:
            found.extend(lease_faults(world, attempt, outcomes[str(attempt.id)], decided[str(attempt.id)]))


def _is_lost(world: World, transaction: TransactionId) -> bool:
    """Whether ZooKeeper has forgotten that it gave the id out, and nothing could tell."""
    counter = int.from_bytes(transaction.bytes[4:], "big")
    return any(counter in block for block in world.lost_blocks)


def _check_memory(world: World, group: GroupName, log: list[tuple[int, ControlRecord]], found: list[str]) -> None:
    """What is remembered is what the commit log says of each client's latest transactions, position included."""
    ended: dict[str, list[tuple[str, bool, int, int]]] = {}
    for offset, record in log:
        if record.kind is not ControlKind.BEGIN:
            outcome = (str(record.transaction), record.kind is ControlKind.COMMIT, offset, record.records)
            ended.setdefault(record.client_name, []).append(outcome)
    remembered = {
        key.decode(): [
            (str(item.transaction), item.committed, item.position, item.records) for item in decode_terminated(value)[0]
        ]
        for key, value in split(world.latest(group.terminated_topic))[0].items()
    }
    for client in ended.keys() | remembered.keys():
        expected = ended.get(client, [])[-REMEMBERED:]
        if remembered.get(client) != expected:
            found.append(f"of client {client} is remembered {remembered.get(client)}, but the log says {expected}")


def _outcomes(log: list[tuple[int, ControlRecord]], found: list[str]) -> dict[str, ControlRecord]:
    outcomes: dict[str, ControlRecord] = {}
    for _, record in log:
        if record.kind is ControlKind.BEGIN:
            continue
        if str(record.transaction) in outcomes:
            found.append(f"transaction {record.transaction} has two outcomes")
        outcomes[str(record.transaction)] = record
    return outcomes


def _check_segment(
    stream: StreamName,
    segment: SegmentId,
    rows: list[tuple[int, Record]],
    order: dict[str, int],
    outcomes: dict[str, ControlRecord],
    found: list[str],
) -> None:
    last = -1
    runs: dict[str, list[int]] = {}
    for offset, row in rows:
        if row.transaction is None:
            continue
        outcome = outcomes.get(row.transaction)
        if outcome is None or outcome.kind is not ControlKind.COMMIT:
            found.append(f"{row.value} of {row.transaction} is visible without a commit")
            continue
        if order[row.transaction] < last:
            found.append(f"{row.transaction} stands in {segment} of {stream} against the commit order")
        last = order[row.transaction]
        runs.setdefault(row.transaction, []).append(row.sequence)
        listed = outcome.placement.get(str(stream), {}).get(segment, [])
        if not any(run.base_offset <= offset < run.base_offset + run.count for run in listed):
            found.append(f"offset {offset} of {segment} is not listed in the commit record of {row.transaction}")
        if outcome.written_number(str(stream), segment) >= PREPARED_FIRST:
            found.append(f"the commit record of {row.transaction} does not say what {segment} of {stream} stands for")
    for transaction, sequences in runs.items():
        if sequences != sorted(set(sequences)):
            found.append(f"local sequences of {transaction} in {segment} of {stream}: {sequences}")


def _is_truncated(world: World, value: str) -> bool:
    """Whether a record that had been inside was deleted on request or by retention, where it stands."""
    topic, offset = world.late.get(value, ("", 0))
    return topic in world.removed or (topic in world.topics and offset < world.topics[topic].start)


def _check_clients(
    world: World,
    clients: list[Client],
    refusals: Refusals | None,
    outcomes: dict[str, ControlRecord],
    placed: Counter[tuple[str, str]],
    found: list[str],
) -> None:
    expected: Counter[tuple[str, str]] = Counter()
    for client in clients:
        for stream, record in client.plain:
            expected[str(stream), record.value] += 1
        for attempt in client.attempts:
            outcome = outcomes.get(str(attempt.id))
            if outcome is None:
                found.append(f"transaction {attempt.id} ended with {attempt.ended!r} but has no outcome")
                continue
            committed = outcome.kind is ControlKind.COMMIT
            if outcome.reason == FENCED and attempt.ended != "fenced":
                found.append(f"{attempt.id}, {attempt.ended!r}, has ended as {outcome.kind} {outcome.reason!r}")
            if committed and attempt.ended != "commit":
                found.append(f"transaction {attempt.id} is committed but its client asked for {attempt.ended!r}")
            if outcome.reason == "offsets refused" and not attempt.offsets:
                found.append(f"{attempt.id} was refused for the offsets of another transaction")
            if outcome.refused is not None:
                found.extend(refusal_faults(str(attempt.id), attempt.conditions, outcome.refused))
            elif (
                not committed
                and attempt.ended == "commit"
                and outcome.reason not in ("expired", "offsets refused")
                and not (outcome.reason in (NOT_GIVEN_OUT, BEGUN_TWICE) and _is_lost(world, attempt.id))
                and not may_be_forsaken(client, attempt, outcome)
                and not (refusals is not None and refused_rightly(attempt, outcome, refusals))
                and not (attempt.aborted_by_admin and outcome.reason.startswith("admin"))
            ):
                found.append(f"the commit of {attempt.id} was refused: {outcome.reason}")
            if attempt.outcome is not None and attempt.outcome != outcome:
                found.append(f"the outcome of {attempt.id} has flipped")
            if [world.group_offsets.count(item) for item in attempt.offsets] != [int(committed)] * len(attempt.offsets):
                found.append(f"the offsets of {attempt.id} do not go with its outcome, {outcome.kind}")
            if committed:
                if is_poisoned(attempt):
                    found.append(f"{attempt.id} is committed with what no broker takes")
                for wanted in attempt.conditions:
                    name = StreamName.parse(list(attempt.begin.streams)[wanted.stream])
                    found.extend(condition_faults(world, name, whole_history_of(world, name), str(attempt.id), wanted))
                for stream, record in attempt.records:
                    expected[str(stream), record.value] += 1
                if outcome.records != len(attempt.records):
                    found.append(f"{attempt.id} has {len(attempt.records)} records, its commit says {outcome.records}")
    for item, count in expected.items():
        if not placed[item] and _is_truncated(world, item[1]):
            continue
        if placed[item] != count:
            found.append(f"{item} is visible {placed[item]} times instead of {count}")
    found.extend(
        f"{item} is visible but was never acknowledged or committed" for item in placed if item not in expected
    )
