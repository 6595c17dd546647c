"""What leaders say of transactions, as far as it can be told without them."""

from __future__ import annotations

import pytest

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.table import KnownTransaction, State
from rollbridge.client.outcomes import of_client
from rollbridge.errors import OutcomeExpiredError


def test_an_id_says_nothing_of_the_transaction_of_another_client() -> None:
    known = KnownTransaction(id=TransactionId.of(0, 7), state=State.COMMITTED, client_name="old")
    assert of_client(known, "old") is known
    assert of_client(known, "") is known, "whoever gives no client asks about the id"
    with pytest.raises(OutcomeExpiredError, match="is one of client 'old'; nothing is known of one of 'new'"):
        of_client(known, "new")
