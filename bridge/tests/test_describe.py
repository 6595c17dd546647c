"""The answer to DescribeTransactions, of which kio's own schema cannot read what stands there between transactions."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
from kio.schema.describe_transactions.v0.response import TopicData
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId, TopicName, TransactionalId
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32, i32Timedelta, i64

from rollbridge.kafka.describe import DescribeTransactionsResponse, TransactionState


@pytest.mark.parametrize(("state", "began_ms", "topics"), [("Empty", -1, ()), ("Ongoing", 1_700_000_000_000, ("t",))])
def test_an_answer_is_read_with_and_without_an_open_transaction(
    state: str, began_ms: int, topics: tuple[str, ...]
) -> None:
    answer = DescribeTransactionsResponse(
        throttle_time=i32Timedelta.parse(timedelta(0)),
        transaction_states=(
            TransactionState(
                error_code=ErrorCode.none,
                transactional_id=TransactionalId("one"),
                transaction_state=state,
                transaction_timeout=i32Timedelta.parse(timedelta(minutes=1)),
                transaction_start_time=i64(began_ms),
                producer_id=ProducerId(7),
                producer_epoch=i16(3),
                topics=tuple(TopicData(topic=TopicName(name), partitions=(i32(0),)) for name in topics),
            ),
        ),
    )
    raw = io.BytesIO()
    entity_writer(DescribeTransactionsResponse)(raw, answer)
    found, _ = entity_reader(DescribeTransactionsResponse)(raw.getvalue(), 0)
    assert found == answer
