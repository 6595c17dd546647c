"""Records in ZooKeeper: round trips through plain JSON, and what corrupt nodes raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import group_names, histories, partitions, stream_names, times_ms, transaction_ids
from rollbridge.errors import CorruptDataError
from rollbridge.metadata.changes import CommittingTransactions, EpochTransition, Roll
from rollbridge.metadata.records import ClusterIdentity, ControllerEpoch, Coordinator, Group, TransactionRecord
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.epochs import EpochHistory, EpochRecord

int32 = st.integers(0, (1 << 31) - 1)
text = st.text(max_size=10)

clusters = st.builds(ClusterIdentity, text, times_ms, int32)
stream_configs = stream_names.flatmap(
    lambda name: st.builds(
        StreamConfig,
        name=st.just(name),
        group=group_names.map(lambda group: type(group)(name.scope, group.group)),
        buffer_partitions=int32,
        replication_factor=st.integers(-1, 9),
        record_bytes_max=int32,
        created_ms=times_ms,
        buffer_topic_id=text,
        state=st.sampled_from(StreamState),
    )
)
controller_epochs = st.builds(ControllerEpoch, int32, text, times_ms)
coordinators = st.builds(Coordinator, times_ms, times_ms, st.lists(group_names, max_size=3).map(tuple), text, text)
groups = st.builds(Group, group_names, times_ms, text)
transactions = st.builds(
    TransactionRecord,
    id=transaction_ids,
    group=group_names,
    state=st.sampled_from(["open", "committing", "aborting"]),
    client_name=text,
    client_epoch=int32,
    label=st.none() | text,
    begun_ms=times_ms,
    lease_ms=times_ms,
    streams=st.dictionaries(stream_names.map(str), int32, max_size=4),
    controller_epoch=int32,
)
committings = st.builds(
    CommittingTransactions,
    st.lists(transaction_ids, max_size=4).map(tuple),
    st.lists(st.builds(Roll, stream_names.map(str), int32, int32, int32, int32), max_size=3).map(tuple),
    times_ms,
    int32,
)
scalings = st.builds(
    EpochTransition,
    stream_names,
    text,
    int32,
    st.lists(int32, max_size=4).map(tuple),
    partitions().map(tuple),
    times_ms,
    int32,
)
requests = st.builds(
    AdminRequest,
    kind=st.sampled_from(RequestKind),
    stream=text,
    transaction=text,
    segments=int32,
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3).map(tuple),
    seal=st.lists(int32, max_size=3).map(tuple),
    group=text,
    buffer_partitions=int32,
    replication_factor=st.integers(-1, 9),
    record_bytes_max=int32,
    reason=text,
    client_name=text,
    created_ms=times_ms,
)
answers = st.builds(AdminAnswer, st.booleans(), times_ms, text, text, st.integers(-1, 9))

Read = Callable[[bytes], Any]
KINDS: dict[str, tuple[st.SearchStrategy[Any], Read]] = {
    "cluster": (clusters, ClusterIdentity.from_json),
    "stream": (stream_configs, StreamConfig.from_json),
    "controller_epoch": (controller_epochs, ControllerEpoch.from_json),
    "coordinator": (coordinators, Coordinator.from_json),
    "group": (groups, Group.from_json),
    "transaction": (transactions, TransactionRecord.from_json),
    "committing": (committings, CommittingTransactions.from_json),
    "scaling": (scalings, EpochTransition.from_json),
    "request": (requests, AdminRequest.from_json),
    "answer": (answers, AdminAnswer.from_json),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_records_round_trip(kind: str, data: st.DataObject) -> None:
    strategy, read = KINDS[kind]
    record = data.draw(strategy)
    assert read(record.to_json()) == record


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_fields_of_a_newer_version_are_dropped_at_every_depth(kind: str, data: st.DataObject) -> None:
    strategy, read = KINDS[kind]
    record = data.draw(strategy)

    def newer(value: Any) -> Any:
        match value:
            case dict():
                return {**{key: newer(item) for key, item in value.items()}, "field_of_2030": [{"x": 1}]}
            case list():
                return [newer(item) for item in value]
            case _:
                return value

    assert read(json.dumps(newer(json.loads(record.to_json()))).encode()) == record


@given(histories())
def test_epoch_records_round_trip(history: EpochHistory) -> None:
    again = EpochHistory(tuple(EpochRecord.from_json(record.to_json()) for record in history.records))
    assert again == history
    assert [record.cause for record in again.records] == [record.cause for record in history.records]


ALL_READS: dict[str, Read] = {**{kind: read for kind, (_, read) in KINDS.items()}, "epoch": EpochRecord.from_json}


@pytest.mark.parametrize("kind", ALL_READS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"null",
        b"[]",
        b"1",
        b"{",
        b"\xff\xfe",
        b'"x"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"epoch": "x"}',
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_record_is_corrupt(kind: str, raw: bytes) -> None:
    with pytest.raises(CorruptDataError, match=f"does not hold a record of schema {kind}"):
        ALL_READS[kind](raw)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_record_with_one_value_exchanged_is_read_or_corrupt(kind: str, data: st.DataObject) -> None:
    strategy, read = KINDS[kind]
    datum = json.loads(data.draw(strategy).to_json())
    field = data.draw(st.sampled_from(sorted(datum)))
    datum[field] = data.draw(st.none() | st.booleans() | st.integers() | text | st.floats() | st.just([]) | st.just({}))
    try:
        read(json.dumps(datum).encode())
    except CorruptDataError:
        return


EPOCH = {
    "epoch": 1,
    "reference_epoch": 1,
    "cause": "scale",
    "created_ms": 5,
    "segments": [{"segment": 1 << 32, "low": 0, "high": 1}],
    "sealed_ends": None,
}


def test_an_epoch_record_as_a_zookeeper_shell_shows_it() -> None:
    record = EpochRecord.from_json(json.dumps(EPOCH).encode())
    assert str(record.segments[0].id) == "0.#epoch.1"
    assert record.sealed_ends is None
    assert json.loads(record.to_json()) == {"version": 1, **EPOCH}


@pytest.mark.parametrize(
    "change",
    [
        {"cause": "whim"},
        {"epoch": 1 << 31},
        {"epoch": True},
        {"segments": []},
        {"segments": [{"segment": 0, "low": 0, "high": 0.5}]},
        {"segments": [{"segment": -1, "low": 0, "high": 1}]},
        {"segments": [{"segment": 0, "low": 0}]},
        {"segments": [{"segment": 0, "low": float("nan"), "high": 1}]},
        {"segments": [{"segment": 0, "low": 0, "high": 0.5}, {"segment": 1 << 32, "low": 0.5, "high": 1}]},
        {"sealed_ends": [{"segment": 1 << 63, "end_offset": 1}]},
        {"sealed_ends": {"0": 1}},
    ],
)
def test_an_epoch_record_that_the_model_refuses_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        EpochRecord.from_json(json.dumps({**EPOCH, **change}).encode())


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("stream", {"name": "no-slash"}),
        ("stream", {"name": "a/__"}),
        ("stream", {"group": "a.b"}),
        ("stream", {"state": "SLEEPING"}),
        ("group", {"name": "a/b/c"}),
        ("transaction", {"id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8"}),
        ("transaction", {"group": ""}),
        ("committing", {"transactions": ["x"]}),
        ("committing", {"rolls": [{"stream": "s/a"}]}),
        ("scaling", {"stream": ""}),
        ("scaling", {"ranges": [{"low": 1, "high": 0}]}),
        ("request", {"kind": "make-coffee"}),
    ],
)
def test_values_that_the_model_refuses_are_corrupt(kind: str, change: dict[str, Any]) -> None:
    read = ALL_READS[kind]
    datum = json.loads(SAMPLES[kind])
    read(json.dumps(datum).encode())
    with pytest.raises(CorruptDataError):
        read(json.dumps({**datum, **change}).encode())


SAMPLES = {
    "stream": b'{"name": "a/b", "group": "g", "buffer_partitions": 1, "replication_factor": 1, "record_bytes_max": 1, '
    b'"created_ms": 0, "buffer_topic_id": ""}',
    "group": b'{"name": "a/b", "created_ms": 0}',
    "transaction": b'{"id": "00010000-0000-0000-0000-00000000002a", "group": "a/b", "state": "open", '
    b'"client_name": "c", "begun_ms": 0, "lease_ms": 1, "streams": [], "controller_epoch": 1}',
    "committing": b'{"transactions": [], "rolls": [], "created_ms": 0, "controller_epoch": 1}',
    "scaling": b'{"stream": "a/b", "request": "r", "epoch": 1, "seal": [], "ranges": [], "created_ms": 0, '
    b'"controller_epoch": 1}',
    "request": b'{"kind": "create-stream", "stream": "a/b", "created_ms": 0}',
}
"""What an older version, without the fields that have defaults, would have written."""


def test_missing_fields_take_their_defaults() -> None:
    stream = StreamConfig.from_json(SAMPLES["stream"])
    assert stream.state is StreamState.ACTIVE
    assert Group.from_json(SAMPLES["group"]).commit_log_topic_id == ""
    transaction = TransactionRecord.from_json(SAMPLES["transaction"])
    assert (transaction.label, transaction.client_epoch) == (None, 0)
    request = AdminRequest.from_json(SAMPLES["request"])
    assert (request.group, request.buffer_partitions, request.replication_factor) == ("default", 1, -1)
    assert (request.segments, request.ranges, request.seal, request.reason) == (0, (), (), "")
