"""Every error of rollbridge's has a code of Kafka's, in every API and version that may tell of it."""

from __future__ import annotations

import itertools

import pytest
from kio.schema.errors import ErrorCode

from rollbridge import errors as ours
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge_gateway.producer.procedures import (
    NothingWrittenError,
    RefusedError,
)
from rollbridge_gateway.producer.table import OF_STEP, KafkaFault, Step
from rollbridge_gateway.protocol.errors import code_of, code_of_error, fault_of
from rollbridge_gateway.protocol.versions import TABLE, Api

TRANSACTIONAL = (
    Api.PRODUCE,
    Api.INIT_PRODUCER_ID,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.ADD_OFFSETS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
    Api.END_TXN,
)
VERSIONS = [(api, version) for api in TRANSACTIONAL for version in range(TABLE[api].high + 1)]


def classes(root: type[BaseException]) -> list[type[BaseException]]:
    """A class with all below it."""
    found = {root.__qualname__: root}
    for item in root.__subclasses__():
        found |= {one.__qualname__: one for one in classes(item)}
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("kind", classes(ours.RollbridgeError))
def test_every_error_is_foreseen(kind: type[BaseException]) -> None:
    foreseen = {ours.RollbridgeError, ours.LocalEnvironmentError}
    fault = fault_of(kind.__new__(kind))
    known = kind in foreseen or not kind.__module__.startswith("rollbridge.errors")
    assert known or fault is not KafkaFault.UNFORESEEN


@pytest.mark.parametrize(("fault", "where"), list(itertools.product(KafkaFault, VERSIONS)))
def test_every_fault_has_a_code_in_every_version(fault: KafkaFault, where: tuple[int, int]) -> None:
    code = code_of(fault, *where)
    assert (code is ErrorCode.none) == (fault is KafkaFault.NONE)
    if code is ErrorCode.transaction_abortable:
        assert where[1] >= {Api.PRODUCE: 11, Api.INIT_PRODUCER_ID: 5}.get(Api(where[0]), 4)


@pytest.mark.parametrize(
    ("error", "api", "version", "code"),
    [
        (RefusedError(Step.STALE, ""), Api.END_TXN, 1, "invalid_producer_epoch"),
        (RefusedError(Step.STALE, ""), Api.END_TXN, 2, "producer_fenced"),
        (RefusedError(Step.STALE, ""), Api.PRODUCE, 12, "invalid_producer_epoch"),
        (RefusedError(Step.STALE, ""), Api.INIT_PRODUCER_ID, 3, "invalid_producer_epoch"),
        (RefusedError(Step.STALE, ""), Api.INIT_PRODUCER_ID, 4, "producer_fenced"),
        (RefusedError(Step.INVALID, ""), Api.END_TXN, 5, "invalid_txn_state"),
        (RefusedError(Step.WAIT, ""), Api.END_TXN, 5, "concurrent_transactions"),
        (RefusedError(Step.WAIT, ""), Api.PRODUCE, 11, "not_leader_or_follower"),
        (RefusedError(Step.WAIT, ""), Api.TXN_OFFSET_COMMIT, 3, "coordinator_load_in_progress"),
        (RefusedError(Step.ABORTABLE, ""), Api.PRODUCE, 10, "invalid_txn_state"),
        (RefusedError(Step.ABORTABLE, ""), Api.PRODUCE, 11, "transaction_abortable"),
        (RefusedError(Step.ABORTABLE, ""), Api.ADD_PARTITIONS_TO_TXN, 3, "invalid_producer_id_mapping"),
        (RefusedError(Step.ABORTABLE, ""), Api.END_TXN, 4, "invalid_producer_id_mapping"),
        (RefusedError(Step.ABORTABLE, ""), Api.END_TXN, 5, "transaction_abortable"),
        (ours.TransactionTooLargeError("", limit_bytes=1), Api.END_TXN, 5, "transaction_abortable"),
        (ours.InvalidRequestError(""), Api.END_TXN, 5, "transaction_abortable"),
        (ours.StreamNotFoundError(""), Api.END_TXN, 5, "transaction_abortable"),
        (ours.InvalidRequestError(""), Api.ADD_OFFSETS_TO_TXN, 4, "invalid_request"),
        (RefusedError(KafkaFault.UNKNOWN_PRODUCER), Api.END_TXN, 5, "invalid_producer_id_mapping"),
        (RefusedError(KafkaFault.NOWHERE), Api.ADD_OFFSETS_TO_TXN, 0, "concurrent_transactions"),
        (RefusedError(KafkaFault.NOWHERE), Api.TXN_OFFSET_COMMIT, 5, "coordinator_load_in_progress"),
        (NothingWrittenError("", KafkaFault.GAP), Api.PRODUCE, 12, "out_of_order_sequence_number"),
        (NothingWrittenError(""), Api.PRODUCE, 12, "invalid_record"),
        (ours.ClientFencedError(""), Api.PRODUCE, 12, "not_leader_or_follower"),
        (ours.ClientFencedError(""), Api.INIT_PRODUCER_ID, 4, "coordinator_not_available"),
        (ours.OutcomeUnknownError("", transaction=""), Api.END_TXN, 5, "concurrent_transactions"),
        (ours.KafkaUnavailableError(""), Api.PRODUCE, 12, "not_leader_or_follower"),
        (ours.ZooKeeperUnavailableError(""), Api.END_TXN, 1, "coordinator_not_available"),
        (NodeConflictError("", path="", code="node-exists"), Api.ADD_PARTITIONS_TO_TXN, 0, "coordinator_not_available"),
        (NodeConflictError("", path="", code="node-version-mismatch"), Api.END_TXN, 1, "coordinator_not_available"),
        (NodeMissingError("", path=""), Api.PRODUCE, 12, "not_leader_or_follower"),
        (ours.BackpressureError(""), Api.PRODUCE, 12, "request_timed_out"),
        (ours.StreamNotFoundError(""), Api.PRODUCE, 12, "unknown_topic_or_partition"),
        (ours.InvalidRequestError("", code="invalid-timeout"), Api.INIT_PRODUCER_ID, 4, "invalid_transaction_timeout"),
        (ours.CorruptDataError(""), Api.PRODUCE, 9, "corrupt_message"),
        (ours.TransactionAbortedError("", transaction=""), Api.PRODUCE, 12, "transaction_abortable"),
        (ours.TransactionClosedError("", transaction=""), Api.PRODUCE, 12, "invalid_txn_state"),
        (ours.InvalidRequestError("", code="group-mismatch"), Api.PRODUCE, 9, "invalid_txn_state"),
        (KeyError("a mistake"), Api.PRODUCE, 9, "unknown_server_error"),
    ],
)
def test_the_table(error: BaseException, api: Api, version: int, code: str) -> None:
    assert code_of_error(error, api, version).name == code


def test_a_refused_batch_is_told_of_by_its_cause() -> None:
    refused = NothingWrittenError("too large")
    refused.__cause__ = ours.RecordTooLargeError("", size_bytes=2, limit_bytes=1)
    assert code_of_error(refused, Api.PRODUCE, 12) is ErrorCode.message_too_large


def test_every_step_that_is_a_refusal_has_a_fault() -> None:
    assert set(OF_STEP) == {Step.WAIT, Step.INVALID, Step.ABORTABLE, Step.STALE}
