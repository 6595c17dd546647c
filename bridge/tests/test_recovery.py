"""What somebody else than its owner may commit of a transaction."""

from __future__ import annotations

import pytest

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.table import Arrived, KnownTransaction, State
from rollbridge.client.recovery import arrived_of, check_commit
from rollbridge.errors import ConflictError
from rollbridge.metadata.client_sessions import ClientSession, CooperativeWork
from rollbridge.stream.names import GroupName

GROUP = GroupName("sales")
ID, ANOTHER = TransactionId.of(0, 7), TransactionId.of(0, 8)
OPEN = KnownTransaction(
    id=ID,
    state=State.OPEN,
    client_name="loader",
    records=5,
    decided_ms=1_000,
    lease_ms=500,
    streams={"sales/orders": 0, "sales/ledger": 0},
    pieces={PieceKey(0, 0, 0): 2, PieceKey(4, 0, 0): 1, PieceKey(0, 0, 1): 2},
)


def session_with(transaction: TransactionId) -> ClientSession:
    work = CooperativeWork(
        series="job", number=3, transaction=transaction, epoch=1, streams={"sales/orders": 0}, lease_ms=1
    )
    return ClientSession("loader", 1, 0).with_work(work, 0)


def test_records_are_counted_by_stream_whoever_of_its_owners_wrote_them() -> None:
    found = arrived_of((GROUP, OPEN), Arrived(100, 0), None)
    assert found.streams == {"sales/orders": 5, "sales/ledger": 0}
    assert (found.bytes, found.lease_ends_ms, found.obstacle) == (100, 1_500, "")
    check_commit(found, 5)
    check_commit(found, None)
    with pytest.raises(ConflictError, match="holds 5 records by now, and 4"):
        check_commit(found, 4)


@pytest.mark.parametrize(
    ("arrived", "session", "why"),
    [
        (Arrived(100, 3), None, "3 records of it were written by other processes"),
        (Arrived(100, 0), session_with(ID), "number 3 of the cooperative transactions 'job'"),
    ],
)
def test_what_only_its_owner_knows_is_refused(arrived: Arrived, session: ClientSession | None, why: str) -> None:
    with pytest.raises(ConflictError, match=why):
        check_commit(arrived_of((GROUP, OPEN), arrived, session), None)


def test_a_joint_transaction_of_the_same_client_stands_in_nobodys_way() -> None:
    check_commit(arrived_of((GROUP, OPEN), Arrived(100, 0), session_with(ANOTHER)), None)


def test_one_that_has_ended_is_left_to_its_outcome() -> None:
    ended = KnownTransaction(id=ID, state=State.ABORTED, client_name="loader", position=4, reason="expired")
    found = arrived_of((GROUP, ended), None, session_with(ID))
    assert (found.obstacle, found.lease_ends_ms, found.streams) == ("", 0, {})
    check_commit(found, 99)
