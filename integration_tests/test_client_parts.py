"""A transaction that several processes write: what the commit names is there, and nothing else."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.patience import eventually
from rollbridge.base.attribution import unpack_record_header
from rollbridge.base.ids import TransactionId, split_local_sequence
from rollbridge.errors import (
    InvalidRequestError,
    TransactionClosedError,
    TransactionCommittedError,
    TransactionNotFoundError,
)

WORKER = """
import pickle, sys
import rollbridge

servers, zookeeper, root, transaction, stream, first, last = sys.argv[1:]
with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root) as b:
    part = b.join(transaction, timeout=120)
    for number in range(int(first), int(last)):
        part.write(stream, key=b"key-%d" % (number % 10), value=b"%d" % number)
    sys.stdout.buffer.write(pickle.dumps(part.finish()))
"""


def start_worker(site: Site, transaction: TransactionId, stream: str, first: int, last: int) -> subprocess.Popen[bytes]:
    cluster = site.cluster
    arguments = [
        cluster.bootstrap_servers,
        cluster.zookeeper,
        site.root,
        str(transaction),
        stream,
        str(first),
        str(last),
    ]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE)


def handle_of(worker: subprocess.Popen[bytes]) -> rollbridge.PartHandle:
    out, _ = worker.communicate(timeout=180)
    assert worker.returncode == 0
    handle = pickle.loads(out)
    assert isinstance(handle, rollbridge.PartHandle)
    return handle


def test_processes_write_parts_and_the_commit_takes_those_it_names(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    transaction = client.begin(orders)
    own = [transaction.write(orders, key=b"own", value=b"own-%d" % number) for number in range(5)]
    workers = [start_worker(site, transaction.id, orders, 100 * place, 100 * place + 100) for place in range(2)]
    retried = start_worker(site, transaction.id, orders, 100, 200)
    handles = [handle_of(worker) for worker in workers]
    zombie = handle_of(retried)
    assert len({handle.part for handle in [*handles, zombie]}) == 3
    assert [handle.records for handle in handles] == [100, 100]
    result = transaction.commit(parts=handles)
    assert result.records == 205

    messages = site.committed(orders)
    values = [message.value() or b"" for message in messages]
    assert sorted(values) == sorted([b"own-%d" % number for number in range(5)] + [b"%d" % n for n in range(200)])
    parts = set()
    for message in messages:
        headers = message.headers()
        assert isinstance(headers, list)
        raw = headers[-1][1]
        assert isinstance(raw, bytes)
        owner, local = unpack_record_header(raw)
        assert owner == transaction.id
        parts.add(split_local_sequence(local)[0])
    assert parts == {0, *(handle.part for handle in handles)}
    places = sorted(future.result(0) for future in own)
    assert result.first is not None
    assert result.last is not None
    assert result.first <= places[0] <= places[-1] <= result.last


def test_a_part_in_the_same_process_resolves_its_futures(client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders)
    part = client.join(transaction.id)
    left_out = client.join(str(transaction.id))
    assert {part.number, left_out.number} == {1, 2}
    futures = [part.write(orders, key=b"k", value=b"%d" % number) for number in range(3)]
    lost = left_out.write(orders, key=b"k", value=b"lost")
    left_out.finish()
    handle = part.finish()
    with pytest.raises(TransactionClosedError, match="finished"):
        part.write(orders, value=b"late")
    result = transaction.commit(parts=[handle])
    assert result.records == 3
    offsets = [future.result(120).offset for future in futures]
    assert offsets == sorted(offsets)
    assert [split_local_sequence(future.result().local_sequence) for future in futures] == [(1, 0), (1, 1), (1, 2)]
    with pytest.raises(TransactionCommittedError):
        lost.result(120)


def test_a_part_learns_of_the_end_of_its_transaction(client: rollbridge.Bridge, site: Site, orders: str) -> None:
    transaction = client.begin(orders)
    with site.connect("worker") as worker:
        part = worker.join(transaction.id)
        future = part.write(orders, key=b"k", value=b"v")
        transaction.abort("no more")
        assert "no more" in str(future.exception(120))
        with pytest.raises(TransactionClosedError, match="no more"):
            part.write(orders, key=b"k", value=b"v")
        with pytest.raises(TransactionClosedError, match="no more"):
            part.finish()

        def can_not_be_joined() -> bool:
            try:
                worker.join(transaction.id, timeout=5)
            except TransactionNotFoundError:
                return True
            return False  # the leader tells the outcome first and forgets the transaction's record then

        eventually(can_not_be_joined, "the record of an ended transaction is removed")


def test_a_part_follows_the_epoch_of_its_transaction(client: rollbridge.Bridge, site: Site, orders: str) -> None:
    transaction = client.begin(orders)
    transaction.write(orders, key=b"k", value=b"owner")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    with site.connect("worker") as worker:
        part = worker.join(transaction.id)
        for number in range(50):
            part.write(orders, key=b"k-%d" % number, value=b"part")
        handle = part.finish()
    assert {piece.segment for piece in handle.pieces} == {0, 1}, "the segments of the epoch that it began in"
    assert transaction.commit(parts=[handle]).records == 51
    assert len(site.committed(orders)) == 51


def test_an_unknown_transaction_can_not_be_joined(client: rollbridge.Bridge, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "rollbridge.client.connection"),
        pytest.raises(TransactionNotFoundError, match="it has ended, or it never began"),
    ):
        client.join(TransactionId.of(0, 1 << 80), timeout=5)
    assert "retry.waiting action='find open transaction" in caplog.text
    with pytest.raises(InvalidRequestError):
        client.join("no id")
