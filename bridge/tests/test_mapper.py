"""The mapper between dataclasses and schemas: golden records go through the model, and faults name their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollbridge_schemas
from rollbridge.base.mapper import REASON_CHARACTERS_MAX, NodeRecord
from rollbridge.errors import CorruptDataError
from rollbridge.metadata.changes import CommittingTransactions, EpochTransition, Merging, StreamFault
from rollbridge.metadata.client_sessions import ClientSession
from rollbridge.metadata.records import (
    ClusterIdentity,
    ControllerEpoch,
    Coordinator,
    Group,
    LogMarks,
    RetentionMarks,
    TransactionRecord,
    Truncation,
)
from rollbridge.metadata.requests import AdminAnswer, AdminRequest
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochRecord
from rollbridge.stream.late import LateNotes
from rollbridge.stream.scaling import ScalingWaits

GOLDEN = Path(rollbridge_schemas.__file__).parents[1] / "tests" / "golden"
CLASSES: tuple[type[NodeRecord], ...] = (
    *(
        AdminAnswer,
        ClientSession,
        ClusterIdentity,
        CommittingTransactions,
        ControllerEpoch,
        Coordinator,
        EpochRecord,
        Group,
        LogMarks,
        LateNotes,
        Merging,
    ),
    *(
        AdminRequest,
        RetentionMarks,
        EpochTransition,
        ScalingWaits,
        StreamConfig,
        StreamFault,
        TransactionRecord,
        Truncation,
    ),
)


def golden(cls: type[NodeRecord]) -> bytes:
    return (GOLDEN / f"{cls.SCHEMA}.json").read_bytes().rstrip(b"\n")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.SCHEMA)
def test_a_golden_record_goes_through_the_model_unchanged(cls: type[NodeRecord]) -> None:
    record = cls.from_json(golden(cls))
    assert type(record) is cls
    assert record.to_json() == golden(cls)


def test_every_record_of_a_node_is_among_them() -> None:
    assert {cls.SCHEMA for cls in CLASSES} == {cls.SCHEMA for cls in NodeRecord.__subclasses__()}


def with_values(cls: type[NodeRecord], *path: str | int, value: object) -> bytes:
    datum: Any = json.loads(golden(cls))
    inner = datum
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(datum).encode()


@pytest.mark.parametrize(
    ("cls", "path", "value", "place"),
    [
        (Group, ["name"], "x", r"schema group that can be read: group\.name: 'x' is not a group name"),
        (StreamConfig, ["group"], "a.b", r"stream\.group: 'a.b' is not a name for a group"),
        (ClientSession, ["shared", "work", "transaction"], "x", r"client_session\.shared\.work\.transaction: 'x' is"),
        (ClientSession, ["shared", "work", "state"], "x", r"client_session\.shared\.work\.state: 'x' is not a valid"),
        (
            ClientSession,
            ["shared", "work", "content", "digest"],
            "x",
            r"shared\.work\.content\.digest: invalid literal",
        ),
        (EpochRecord, ["segments", 0, "segment"], -1, r"epoch\.segments\.segment: segment number"),
        (EpochRecord, ["segments", 0, "low"], 2.0, r"epoch\.segments: \[2.0"),
        (Truncation, ["foundation", "first_epoch"], 0, r"truncation\.foundation: the foundation"),
        (Truncation, ["foundation", "lows"], [0.0, float("nan"), 0.5], "truncation"),
        (LateNotes, ["forwarding", "targets", 0, "segment"], -1, r"late\.forwarding\.targets: segment number"),
        (RetentionMarks, ["marks", 0, "cut"], ["1"], r"retention\.marks\.cut: "),
    ],
)
def test_a_fault_names_the_record_and_the_field(
    cls: type[NodeRecord], path: list[str | int], value: object, place: str
) -> None:
    with pytest.raises(CorruptDataError, match=place):
        cls.from_json(with_values(cls, *path, value=value))


def test_what_a_fault_quotes_is_bounded() -> None:
    with pytest.raises(CorruptDataError) as caught:
        Group.from_json(with_values(Group, "name", value="x" * 1_000_000))
    assert len(str(caught.value)) < REASON_CHARACTERS_MAX + 100
