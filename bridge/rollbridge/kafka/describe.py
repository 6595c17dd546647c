"""Decode and encode the broker's response to DescribeTransactions v0. Pure.

kio's own schema declares the start time as a point in time, and cannot read the -1 sent while no transaction is open.

Source: Kafka's DescribeTransactionsResponse.json.
"""

# No `from __future__ import annotations`: kio reads the field types at run time.
from dataclasses import dataclass, field

from kio.schema.describe_transactions.v0 import response
from kio.static.primitive import i64


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionState(response.TransactionState):
    """One transactional id as its coordinator sees it; its start time is in ms since 1970."""

    transaction_start_time: i64 = field(metadata={"kafka_type": "int64"})  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTransactionsResponse(response.DescribeTransactionsResponse):
    """States of the transactional ids that were asked about."""

    transaction_states: tuple[TransactionState, ...]
