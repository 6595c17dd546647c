"""Conditions in the simulation: what clients expect, and whether what was committed could rely on it."""

from __future__ import annotations

import random
from collections.abc import Iterator

from coordinator.tests.sim_world import Record, World
from rollbridge.base.sn import DLSN, EMPTY, SN
from rollbridge.errors import UnavailableError
from rollbridge.stream.conditions import Condition, RefusedCondition, Scope, StreamCondition
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import StreamName
from rollbridge.stream.reading import KeyLineage


def rows_of(world: World, stream: StreamName, history: EpochHistory, position: float) -> Iterator[tuple[SN, Record]]:
    """The visible records in the lineage of a key, oldest first, with their SNs."""
    for stage in reversed(KeyLineage(history, position).stages):
        for offset, record in world.log(stream.segment_topic(stage.segment)).visible():
            if stage.end is not None and offset >= stage.end:
                break  # nobody reads further
            yield SN(DLSN.of(stage.segment, offset), None, stage.base + offset), record


def expectation(
    world: World, place: int, stream: StreamName, history: EpochHistory, keys: list[str], rng: random.Random
) -> StreamCondition | None:
    """What a client may expect of a stream now: mostly what stands there, now and then what stood there before."""
    key = rng.choice(keys)
    scope = rng.choice(list(Scope))
    try:
        rows = list(rows_of(world, stream, history, KeySpace().position(key.encode())))
    except UnavailableError:
        return None  # a rolling commit is under way
    found = [sn for sn, record in rows if scope is Scope.SEGMENT or record.key == key]
    if found and rng.random() < 0.1:
        found.pop()
    return StreamCondition(place, Condition(found[-1] if found else EMPTY, scope, key.encode()))


def condition_faults(
    world: World, stream: StreamName, history: EpochHistory, transaction: str, item: StreamCondition
) -> Iterator[str]:
    """Why a committed transaction could not rely on a condition, as far as its own records show where it stands."""
    condition = item.condition
    rows = list(rows_of(world, stream, history, KeySpace().position(condition.key)))
    own = [place for place, (_, record) in enumerate(rows) if record.transaction == transaction]
    if not own:
        return
    key = None if condition.key is None or condition.scope is Scope.SEGMENT else condition.key.decode()
    before = [sn for sn, record in rows[: own[0]] if key in (None, record.key)]
    last = before[-1] if before else EMPTY
    if last != condition.expected:
        yield f"{transaction} is committed, but before it stands {last}, not {condition.expected}"
    between = [record for _, record in rows[own[0] : own[-1]] if record.transaction != transaction]
    if any(key in (None, record.key) for record in between):
        yield f"{transaction} is committed with a condition, but others stand between its records"


def refusal_faults(
    transaction: str, conditions: tuple[StreamCondition, ...], refused: RefusedCondition
) -> Iterator[str]:
    """Why a transaction should not have been refused."""
    asked = [(item.condition.key, item.condition.expected) for item in conditions]
    if (refused.key, refused.expected) not in asked:
        yield f"{transaction} was refused for a condition that it does not have: {refused}"
    if refused.expected == refused.actual:
        yield f"{transaction} was refused although its condition holds: {refused}"
