"""Kafka's error codes for rollbridge's errors, by API and version.

The code decides what the client does: it asks again, aborts and continues, or gives up. So the same error has different
codes: one for Produce, whose clients know no coordinator, and one below the version from which TRANSACTION_ABORTABLE is
understood.

Each class of :mod:`rollbridge.errors` has a row, its own or that of a class above it, and each code that says something
else; the root's row is for unforeseen errors. An error may name its ``fault`` itself.

Source: Kafka's ``Errors`` and the clients' treatment of them (``Sender``, ``TransactionManager``, librdkafka's
``rdkafka_txnmgr.c``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from rollbridge import errors as ours
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge_gateway.producer.procedures import NothingWrittenError, RefusedError
from rollbridge_gateway.producer.table import KafkaFault
from rollbridge_gateway.protocol.versions import Api

OF_ERROR: Final[Mapping[type[BaseException], KafkaFault]] = {
    ours.RollbridgeError: KafkaFault.UNFORESEEN,
    ours.InvalidRequestError: KafkaFault.INVALID_REQUEST,
    ours.RecordTooLargeError: KafkaFault.TOO_LARGE,
    ours.TransactionTooLargeError: KafkaFault.ABORTABLE,
    ours.NotAuthorizedError: KafkaFault.DENIED,
    ours.AuthenticationError: KafkaFault.DENIED,
    ours.NotFoundError: KafkaFault.NO_TOPIC,
    ours.TransactionAbortedError: KafkaFault.ABORTABLE,
    ours.TransactionNotFoundError: KafkaFault.UNKNOWN_PRODUCER,
    ours.OutcomeExpiredError: KafkaFault.UNKNOWN_PRODUCER,
    ours.TransactionPreserverClosedError: KafkaFault.UNKNOWN_PRODUCER,
    ours.ConflictError: KafkaFault.INVALID_STATE,
    ours.StreamRecreatedError: KafkaFault.ABORTABLE,
    ours.IncompleteError: KafkaFault.ABORTABLE,
    ours.OutcomeUnknownError: KafkaFault.BUSY,
    ours.UnknownWriteError: KafkaFault.AWAY,
    ours.UnavailableError: KafkaFault.AWAY,
    ours.BackpressureError: KafkaFault.SLOW,
    ours.FencedError: KafkaFault.FENCED,
    # Another gateway has taken the id over. Whether the producer's pair is over as well, the entry on record tells.
    ours.ClientFencedError: KafkaFault.AWAY,
    # Of the gateway's own nodes: another thread, session or gateway was faster. It says nothing of a producer's state.
    NodeConflictError: KafkaFault.AWAY,
    NodeMissingError: KafkaFault.AWAY,
    ours.CorruptDataError: KafkaFault.CORRUPT,
    TimeoutError: KafkaFault.BUSY,
}
OF_CODE: Final[Mapping[str, KafkaFault]] = {
    "group-mismatch": KafkaFault.ABORTABLE,
    "invalid-timeout": KafkaFault.TIMEOUT,
    "offset-metadata-too-large": KafkaFault.METADATA_TOO_LARGE,
    "zookeeper-outdated": KafkaFault.AWAY,
}
"""Those of codes that say another thing than their class."""

_OF_BATCH: Final[Mapping[KafkaFault, KafkaFault]] = {
    # Brokers say that a batch is corrupt where its checksum is wrong alone; then clients send it again.
    KafkaFault.CORRUPT: KafkaFault.INVALID_RECORD,
    KafkaFault.INVALID_REQUEST: KafkaFault.INVALID_RECORD,
}

_E = ErrorCode
_CODES: Final[Mapping[KafkaFault, ErrorCode]] = {
    KafkaFault.NONE: _E.none,
    KafkaFault.UNFORESEEN: _E.unknown_server_error,
    KafkaFault.AWAY: _E.coordinator_not_available,
    KafkaFault.BUSY: _E.concurrent_transactions,
    KafkaFault.SLOW: _E.request_timed_out,
    KafkaFault.FENCED: _E.producer_fenced,
    KafkaFault.STALE_EPOCH: _E.invalid_producer_epoch,
    KafkaFault.UNKNOWN_PRODUCER: _E.invalid_producer_id_mapping,
    KafkaFault.INVALID_STATE: _E.invalid_txn_state,
    # The next best below TRANSACTION_ABORTABLE: librdkafka, franz-go and Java from 2.5 on abort and continue.
    KafkaFault.ABORTABLE: _E.invalid_producer_id_mapping,
    KafkaFault.NO_TOPIC: _E.unknown_topic_or_partition,
    KafkaFault.NOT_ADOPTED: _E.invalid_topic_exception,
    KafkaFault.TOO_LARGE: _E.message_too_large,
    KafkaFault.METADATA_TOO_LARGE: _E.offset_metadata_too_large,
    KafkaFault.TIMEOUT: _E.invalid_transaction_timeout,
    KafkaFault.TIMESTAMP: _E.invalid_timestamp,
    KafkaFault.CORRUPT: _E.corrupt_message,
    KafkaFault.INVALID_RECORD: _E.invalid_record,
    KafkaFault.GAP: _E.out_of_order_sequence_number,
    KafkaFault.INVALID_REQUEST: _E.invalid_request,
    KafkaFault.DENIED: _E.transactional_id_authorization_failed,
    KafkaFault.NOWHERE: _E.concurrent_transactions,
}
_OF_OFFSETS: Final[Mapping[KafkaFault, ErrorCode]] = {
    # What consumer group coordinators say, which is what clients of TxnOffsetCommit know how to ask again for.
    KafkaFault.BUSY: _E.coordinator_load_in_progress,
    KafkaFault.NOWHERE: _E.coordinator_load_in_progress,
}
_OF_PRODUCE: Final[Mapping[KafkaFault, ErrorCode]] = {
    # Its clients know leaders, not coordinators. Of those that say "ask again" they keep the batches in order.
    KafkaFault.AWAY: _E.not_leader_or_follower,
    KafkaFault.BUSY: _E.concurrent_transactions,
    KafkaFault.FENCED: _E.invalid_producer_epoch,
    KafkaFault.ABORTABLE: _E.invalid_txn_state,
    KafkaFault.UNKNOWN_PRODUCER: _E.invalid_producer_id_mapping,
    KafkaFault.DENIED: _E.topic_authorization_failed,
}
_OF_TRANSACTION: Final = frozenset(
    {
        KafkaFault.NO_TOPIC,
        KafkaFault.NOT_ADOPTED,
        KafkaFault.TOO_LARGE,
        KafkaFault.METADATA_TOO_LARGE,
        KafkaFault.TIMEOUT,
        KafkaFault.TIMESTAMP,
        KafkaFault.CORRUPT,
        KafkaFault.INVALID_RECORD,
        KafkaFault.GAP,
        KafkaFault.INVALID_REQUEST,
    }
)
"""The cause of a refused end is in its transaction: it can be aborted, and the next one begins."""
_FENCED_SINCE: Final[Mapping[int, int]] = {
    Api.INIT_PRODUCER_ID: 4,
    Api.ADD_PARTITIONS_TO_TXN: 2,
    Api.ADD_OFFSETS_TO_TXN: 2,
    Api.END_TXN: 2,
    Api.TXN_OFFSET_COMMIT: 1 << 15,
}
"""Versions from which PRODUCER_FENCED is told, as by a broker; before, it is INVALID_PRODUCER_EPOCH."""
_ABORTABLE_SINCE: Final[Mapping[int, int]] = {
    Api.PRODUCE: 11,
    Api.INIT_PRODUCER_ID: 5,
    Api.ADD_PARTITIONS_TO_TXN: 4,
    Api.ADD_OFFSETS_TO_TXN: 4,
    Api.TXN_OFFSET_COMMIT: 4,
    Api.END_TXN: 5,
}
"""Versions from which TRANSACTION_ABORTABLE is known. franz-go continues after one at EndTxn 5, and not at EndTxn 4."""
_CONCURRENT_IN_PRODUCE_SINCE: Final = 12
"""Version of Produce from which CONCURRENT_TRANSACTIONS is known."""


def fault_of(error: BaseException) -> KafkaFault:
    """Return the fault of an error, by its class or the nearest one above it."""
    if isinstance(error, NothingWrittenError) and error.__cause__ is not None:
        return _OF_BATCH.get(fault := fault_of(error.__cause__), fault)
    if isinstance(error, RefusedError | NothingWrittenError):
        return error.fault
    if isinstance(error, ours.RollbridgeError):
        said = vars(error).get("fault", OF_CODE.get(error.code))
        if isinstance(said, KafkaFault):
            return said
    for kind in type(error).__mro__:
        found = OF_ERROR.get(kind)
        if found is not None:
            return found
    return KafkaFault.UNFORESEEN


def code_of(fault: KafkaFault, api: int, version: int) -> ErrorCode:
    """Return Kafka's code of a fault in the answer to a request."""
    if api == Api.END_TXN and fault in _OF_TRANSACTION:
        fault = KafkaFault.ABORTABLE
    if fault is KafkaFault.ABORTABLE and version >= _ABORTABLE_SINCE.get(api, 1 << 15):
        return _E.transaction_abortable
    if api == Api.PRODUCE:
        if fault is KafkaFault.BUSY and version < _CONCURRENT_IN_PRODUCE_SINCE:
            return _E.not_leader_or_follower
        return _OF_PRODUCE.get(fault, _CODES[fault])
    if api == Api.TXN_OFFSET_COMMIT and fault in _OF_OFFSETS:
        return _OF_OFFSETS[fault]
    if fault is KafkaFault.FENCED and version < _FENCED_SINCE.get(api, 0):
        return _E.invalid_producer_epoch
    return _CODES[fault]


def code_of_error(error: BaseException, api: int, version: int) -> ErrorCode:
    """Return Kafka's code of an error in the answer to a request."""
    return code_of(fault_of(error), api, version)
