"""What becomes of an end that a gateway asks for, as its client tells."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

from rollbridge.base.ids import TransactionId
from rollbridge.client.futures import Completion
from rollbridge.client.writing import OwnerWriting
from rollbridge.commitlog.control import EXPIRED, ControlKind, ControlRecord
from rollbridge.errors import OutcomeUnknownError
from rollbridge_gateway.producer import transactions
from rollbridge_gateway.producer.procedures import LostTransactionError
from rollbridge_gateway.producer.transactions import TransactionClient

ID = TransactionId.of(0, 7)


class Late:
    """A transaction whose commit is not answered in time, and whose outcome is known right after that."""

    def __init__(self) -> None:
        self._writing, self.completion = self, Completion(ID.bytes, "gateway")

    def commit(self, timeout: float) -> None:
        raise OutcomeUnknownError("not answered in time", transaction=str(ID))


def of(txn: Late) -> TransactionClient:
    client: Any = object()
    rolling = TransactionClient(client)
    rolling._txn = txn  # type: ignore[assignment]
    return rolling


def finish(txn: Late) -> None:
    of(txn).finish(commit=True, reason="", timeout_s=0)


@pytest.mark.parametrize("kind", [ControlKind.COMMIT, ControlKind.ABORT, None])
def test_an_end_that_is_decided_right_after_its_time_is_asked_for_again(kind: ControlKind | None) -> None:
    txn = Late()
    if kind is not None:
        txn.completion.settle(ControlRecord(ID, kind, "gateway", 0, 0, 1, reason="").encode_value(), 5)
    with pytest.raises(OutcomeUnknownError):
        finish(txn)


def test_an_end_of_which_nobody_will_ever_tell_is_lost() -> None:
    txn = Late()
    txn.completion.give_up("the commit log was emptied")
    with pytest.raises(LostTransactionError):
        finish(txn)


@pytest.mark.parametrize("kind", [ControlKind.COMMIT, ControlKind.ABORT])
def test_a_transaction_that_has_ended_is_not_open_whoever_has_ended_it(kind: ControlKind) -> None:
    """Its producer may have died, and its lease run out: nobody asks for its end, and the id is let go of."""
    txn = Late()
    rolling = of(txn)
    assert rolling.is_open
    txn.completion.settle(ControlRecord(ID, kind, "gateway", 0, 0, 1, reason=EXPIRED).encode_value(), 5)
    assert not rolling.is_open


def test_one_of_which_nobody_will_ever_tell_is_kept_until_its_producer_has_heard_of_that() -> None:
    """The label of an id with transactions v1 leads to the transaction before it."""
    txn = Late()
    rolling = of(txn)
    txn.completion.give_up("the commit log was emptied")
    assert rolling.is_open
    with pytest.raises(LostTransactionError):
        rolling.finish(commit=True, reason="", timeout_s=0)
    assert not rolling.is_open


def test_of_what_is_inside_a_transaction_the_gateway_uses_these_names() -> None:
    tree = ast.parse(inspect.getsource(transactions))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"writing|writing_of\(.+\)", ast.unparse(node.value))
    }
    assert used == {
        "can_write_now",
        "completion",
        "part_stream",
        "placed",
        "put_batch",
        "records",
        "send_offsets",
        "writer",
    }
    assert used <= set(dir(OwnerWriting))
