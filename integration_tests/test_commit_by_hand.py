"""A transaction whose owner was killed is committed from a terminal, with exactly what had arrived of it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tty
from collections.abc import Iterator

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.pauses import pause
from rollbridge.base.ids import TransactionId
from rollbridge.errors import (
    ClientFencedError,
    ConflictError,
    TransactionCommittedError,
    TransactionNotFoundError,
)

WRITER = """
import sys, rollbridge
servers, zookeeper, root, first, second = sys.argv[1:]
b = rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root, client_name="nightly-job")
txn = b.begin(first, second, label="night 7")
for number in range(40):
    txn.write(first, key=b"k%d" % number, value=b"first-%d" % number)
    if number % 4 == 0:
        txn.write(second, key=b"k%d" % number, value=b"second-%d" % number)
txn.flush()
txn.write(first, key=b"k", value=b"never sent")
print(txn.id, flush=True)
sys.stdin.readline()
try:
    txn.write(first, key=b"k", value=b"too late")
    txn.flush()
    txn.commit()
except rollbridge.errors.RollbridgeError as fault:
    print(fault.code, flush=True)
sys.stdin.readline()
"""


class Writer:
    """A process with an open transaction of 40 and 10 records in two streams."""

    def __init__(self, site: Site, first: str, second: str) -> None:
        where = (site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *where, first, second],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.transaction = self.line()

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Have it try to go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=120)


@pytest.fixture
def writer(site: Site, orders: str, ledger: str) -> Iterator[Writer]:
    """A writer that has flushed what it wrote, but for one record."""
    found = Writer(site, orders, ledger)
    yield found
    if found.process.poll() is None:
        found.kill()


def values_of(site: Site, stream: str) -> list[str]:
    """All committed values of a stream, sorted."""
    return sorted((message.value() or b"").decode() for message in site.committed(stream))


FIRST = sorted(f"first-{number}" for number in range(40))
SECOND = sorted(f"second-{number}" for number in range(0, 40, 4))


def test_what_a_killed_writer_had_sent_is_committed_by_hand_exactly_and_once(
    site: Site, client: rollbridge.Bridge, cli: Cli, writer: Writer, orders: str, ledger: str
) -> None:
    writer.kill()
    found = client.arrived(writer.transaction)
    assert (found.records, dict(found.streams), found.obstacle) == (50, {orders: 40, ledger: 10}, "")
    assert found.bytes > 500
    assert (found.client_name, found.label) == ("nightly-job", "night 7")
    wrong = cli("txn", "commit", writer.transaction, "--yes", "--records", "51")
    assert (wrong.code, "holds 50 records by now, and 51" in wrong.err) == (5, True), wrong
    unasked = cli("txn", "commit", writer.transaction)
    assert (unasked.code, "--yes" in unasked.err) == (2, True), unasked
    assert client.outcome(writer.transaction).state == "open", "neither has changed anything"
    said = cli.json("txn", "commit", writer.transaction, "--yes", "--records", "50")
    assert (said["committed"], said["records"]) == (True, 50)
    again = cli("txn", "commit", writer.transaction, "--yes")
    assert (again.code, "was committed before, with 50 records" in again.out) == (0, True), again
    assert cli.json("txn", "commit", writer.transaction, "--yes") == said
    assert values_of(site, orders) == FIRST
    assert values_of(site, ledger) == SECOND
    with site.connect("nightly-job") as late:
        assert late.unfinished() == []
        assert late.resume(writer.transaction).commit().position == said["position"]


def test_an_owner_that_comes_back_is_kept_out(
    site: Site, client: rollbridge.Bridge, writer: Writer, orders: str, ledger: str
) -> None:
    pause(writer.process)
    assert client.commit_arrived(writer.transaction).records == 50
    writer.process.send_signal(signal.SIGCONT)
    writer.go_on()
    # It meets the commit in the log, or is refused before it does.
    assert writer.line() in (ClientFencedError.code, TransactionCommittedError.code)
    assert values_of(site, orders) == FIRST
    assert values_of(site, ledger) == SECOND


def test_a_terminal_is_asked_and_may_say_no(site: Site, client: rollbridge.Bridge, writer: Writer, orders: str) -> None:
    writer.kill()
    for answer, code, state in (b"n\n", 130, "open"), (b"y\n", 0, "committed"):
        master, slave = pty.openpty()
        tty.setraw(slave)  # without an echo, which nobody would read here
        try:
            os.write(master, answer)
            ran = subprocess.run(
                [sys.executable, "-m", "rollbridge", "txn", "commit", writer.transaction],
                env={
                    **os.environ,
                    "ROLLBRIDGE_BOOTSTRAP_SERVERS": site.cluster.bootstrap_servers,
                    "ROLLBRIDGE_ZOOKEEPER": site.cluster.zookeeper,
                    "ROLLBRIDGE_ZOOKEEPER_ROOT": site.root,
                },
                stdin=slave,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            os.close(master)
            os.close(slave)
        assert ran.returncode == code, ran
        for told in ("nightly-job", "night 7", "records  50", orders):
            assert told in ran.stderr
        assert client.outcome(writer.transaction).state == state


def test_what_only_its_owner_can_commit_is_refused(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    with site.connect("parent") as parent, client.transaction(ledger) as other:
        txn = parent.begin(ledger)
        txn.write(ledger, key=b"a", value=b"own")
        txn.flush()
        part = client.join(txn.id)
        part.write(ledger, key=b"b", value=b"a part's")
        handle = part.finish()
        with pytest.raises(ConflictError, match="1 records of it were written by other processes"):
            client.commit_arrived(txn.id)
        assert txn.commit(parts=[handle]).records == 2, "its owner goes on as if nothing had happened"
        shared = parent.share("series", "one")
        cooperative = shared.cooperative(ledger, series="job", number=0)
        cooperative.part().finish()
        with pytest.raises(ConflictError, match="cooperative transactions"):
            client.commit_arrived(cooperative.id)
        assert shared.commit(cooperative.ticket, []).records == 0
        other.write(ledger, key=b"c", value=b"other")


def test_ended_and_unknown_transactions_are_told_apart(client: rollbridge.Bridge, ledger: str) -> None:
    gone = client.begin(ledger)
    gone.abort("no use")
    with raises_code("already-aborted", match="no use"):
        client.commit_arrived(gone.id)
    with pytest.raises(TransactionNotFoundError):
        client.commit_arrived(TransactionId.of(0, 1 << 90))


def test_more_records_than_were_confirmed_are_not_committed(client: rollbridge.Bridge, ledger: str) -> None:
    txn = client.begin(ledger)
    txn.write(ledger, key=b"a", value=b"one")
    txn.flush()
    seen = client.arrived(txn.id).records
    txn.write(ledger, key=b"b", value=b"two")
    txn.flush()
    with pytest.raises(ConflictError, match="its owner is at work; nothing was changed"):
        client.commit_arrived(txn.id, records=seen)
    assert txn.commit().records == 2
