"""KIP-939 at a gateway, request by request, as no client speaks it yet: what was prepared is kept for a successor."""

from __future__ import annotations

from datetime import timedelta

import pytest
from confluent_kafka import Producer
from kio.schema.end_txn.v5.request import EndTxnRequest
from kio.schema.end_txn.v5.response import EndTxnResponse
from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v6.request import InitProducerIdRequest
from kio.schema.init_producer_id.v6.response import InitProducerIdResponse
from kio.schema.types import ProducerId, TransactionalId
from kio.static.primitive import i16, i32Timedelta

from integration_tests.clients import Site, read_committed
from integration_tests.gateways import GatewayProcess
from rollbridge.kafka.connection import Connection


def started(connection: Connection, name: str, *, keep: bool) -> InitProducerIdResponse:
    request = InitProducerIdRequest(
        transactional_id=TransactionalId(name),
        transaction_timeout=i32Timedelta.parse(timedelta(minutes=10)),
        enable2_pc=True,
        keep_prepared_txn=keep,
    )
    answer = connection.call(request, InitProducerIdResponse)
    assert answer.error_code is ErrorCode.none
    return answer


def ended(connection: Connection, name: str, by: InitProducerIdResponse, *, commit: bool) -> ErrorCode:
    request = EndTxnRequest(
        transactional_id=TransactionalId(name),
        producer_id=by.producer_id,
        producer_epoch=by.producer_epoch,
        committed=commit,
    )
    return connection.call(request, EndTxnResponse).error_code


def prepared(gateway: GatewayProcess, topic: str) -> Producer:
    """A producer that has flushed ten records, and will not end their transaction."""
    producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": topic, "linger.ms": 5})
    producer.init_transactions(120)
    producer.begin_transaction()
    for number in range(10):
        producer.produce(topic, f"{number}")
    assert producer.flush(120) == 0
    return producer


@pytest.mark.parametrize("commit", [True, False])
def test_what_was_prepared_is_kept_and_ended_by_the_next_producer(
    site: Site, gateway: GatewayProcess, topic: str, commit: bool
) -> None:
    old = prepared(gateway, topic)
    connection = Connection("127.0.0.1", gateway.port)
    try:
        fresh = started(connection, topic, keep=True)
        assert fresh.ongoing_txn_producer_id not in (-1, fresh.producer_id)
        assert fresh.ongoing_txn_producer_epoch >= 0
        assert read_committed(site.cluster.bootstrap_servers, [topic]) == []
        assert ended(connection, topic, fresh, commit=commit) is ErrorCode.none
        assert ended(connection, topic, fresh, commit=commit) is ErrorCode.none, "asked for again"
        found = read_committed(site.cluster.bootstrap_servers, [topic])
        assert [message.value() for message in found] == ([b"%d" % number for number in range(10)] if commit else [])
        again = started(connection, topic, keep=True)
        assert (again.ongoing_txn_producer_id, again.ongoing_txn_producer_epoch) == (ProducerId(-1), i16(-1))
    finally:
        connection.close()
    del old


def test_without_being_asked_to_nothing_is_kept(site: Site, gateway: GatewayProcess, topic: str) -> None:
    old = prepared(gateway, topic)
    connection = Connection("127.0.0.1", gateway.port)
    try:
        fresh = started(connection, topic, keep=False)
        assert fresh.ongoing_txn_producer_id == -1
        assert ended(connection, topic, fresh, commit=True) is ErrorCode.invalid_txn_state
        assert read_committed(site.cluster.bootstrap_servers, [topic]) == []
    finally:
        connection.close()
    del old
