"""``make demo-cas``: two processes race for the same account of a ledger, with compare-and-set and without.

Both read the balance, add one, and write the sum. Without a condition an update that came in between is overwritten;
with one it is refused, and tried again on the balance that is there. Everything runs on an ephemeral Kafka, ZooKeeper
and coordinator, which are gone at the end.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
from dataclasses import dataclass
from typing import Final

import click

import rollbridge
from rollbridge.errors import CasWriteError, RollbridgeError
from rollbridge_devcluster.ephemeral import ProcessCluster

ACCOUNT: Final = b"acct-7"
DEPOSITS: Final = 200
PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Place:
    """Where the ledger is."""

    bootstrap_servers: str
    zookeeper: str
    stream: str
    zookeeper_root: str | None = None

    def connect(self, name: str) -> rollbridge.Bridge:
        """A client."""
        return rollbridge.connect(
            self.bootstrap_servers, zookeeper=self.zookeeper, zookeeper_root=self.zookeeper_root, client_name=name
        )


@dataclass(frozen=True)
class Account:
    """The last entry that a teller knows of."""

    balance: int = 0
    sn: rollbridge.SN = rollbridge.EMPTY


class Ledger:
    """The account as the log has it, read on and on."""

    def __init__(self, reader: rollbridge.Reader) -> None:
        self._reader = reader
        self.account = Account()

    def read_to(self, wanted: rollbridge.SN) -> Account:
        """The account once the entry at ``wanted`` has been read."""
        while self.account.sn.dlsn != wanted.dlsn:
            if not self.read_some(PATIENCE_S):
                raise TimeoutError(f"the entry {wanted} cannot be read")
        return self.account

    def read_some(self, timeout_s: float = 0.0) -> bool:
        """Take the next entry, if one comes in time."""
        record = self._reader.poll(timeout_s)
        if record is None:
            return False
        if record.key == ACCOUNT and record.sn is not None:
            self.account = Account(int((record.value or b"0").split()[0]), record.sn)
        return True


@dataclass(frozen=True)
class Report:
    """What a teller did."""

    name: str
    deposits: int
    refused: int


def deposit_conditionally(place: Place, name: str, deposits: int) -> Report:
    """Add one, so many times; each sum is written only if the balance that it was made from is still the last."""
    refused = 0
    with (
        place.connect(name) as b,
        b.cas_writer(place.stream) as writer,
        b.reader(place.stream) as reader,
    ):
        ledger = Ledger(reader)
        account = Account()
        for _ in range(deposits):
            while True:
                entry = b"%d %s" % (account.balance + 1, name.encode())
                try:
                    sn = writer.write(ACCOUNT, entry, expected=account.sn, scope="key")
                except CasWriteError as late:
                    refused += 1
                    account = ledger.read_to(late.actual)
                else:
                    account = Account(account.balance + 1, sn)
                    break
    return Report(name, deposits, refused)


def deposit_blindly(place: Place, name: str, deposits: int) -> Report:
    """The same without a condition: read the newest balance there is, add one, write."""
    with (
        place.connect(name) as b,
        b.writer(place.stream) as writer,
        b.reader(place.stream) as reader,
    ):
        ledger = Ledger(reader)
        for _ in range(deposits):
            while ledger.read_some():
                pass
            entry = b"%d %s" % (ledger.account.balance + 1, name.encode())
            written = writer.write(ACCOUNT, entry).result(PATIENCE_S)
            ledger.read_to(written)
    return Report(name, deposits, 0)


def balances(place: Place) -> list[int]:
    """Every balance of the account, in the order of the log."""
    with place.connect("auditor") as b, b.reader(place.stream, follow=False) as reader:
        return [int((record.value or b"0").split()[0]) for record in reader if record.key == ACCOUNT]


def race(place: Place, deposits: int, *, conditional: bool) -> list[Report]:
    """Two processes at once."""
    context = mp.get_context("spawn")
    teller = deposit_conditionally if conditional else deposit_blindly
    with context.Pool(2) as pool:
        return pool.starmap(teller, [(place, "anna", deposits), (place, "bert", deposits)])


def tell(cluster: ProcessCluster, deposits: int) -> bool:
    """Race twice and compare; whether nothing was lost with conditions."""
    whole = True
    for stream, conditional in (("ledger/blind", False), ("ledger/accounts", True)):
        place = Place(cluster.bootstrap_servers, cluster.zookeeper, stream)
        with place.connect("clerk") as b:
            b.admin.create_stream(stream)
        reports = race(place, deposits, conditional=conditional)
        found = balances(place)
        made = sum(report.deposits for report in reports)
        click.echo(f"\n{'with compare-and-set' if conditional else 'without a condition'}: {stream}")
        for report in reports:
            refused = f", {report.refused} times refused with 525 and tried again" if conditional else ""
            click.echo(f"  {report.name}: {report.deposits} deposits of 1{refused}")
        click.echo(f"  balance at the end: {found[-1]} of {made}; {made - found[-1]} deposits lost")
        if conditional:
            whole = found == list(range(1, made + 1))
    click.echo(f"\n{'nothing was lost' if whole else 'SOMETHING WAS LOST'} where writes were conditional")
    return whole


@click.command()
@click.option("--deposits", default=DEPOSITS, show_default=True, type=click.IntRange(1), help="Of each process.")
def main(deposits: int) -> None:
    """Two processes race for one account of a ledger, with compare-and-set and without."""
    try:
        with ProcessCluster() as cluster:
            cluster.start_coordinator()
            click.echo(f"two processes, {deposits} deposits of 1 each, one account")
            whole = tell(cluster, deposits)
    except RollbridgeError as fault:
        click.echo(f"demo-cas: {fault}", err=True)
        sys.exit(fault.exit_code)
    if not whole:
        sys.exit(1)


if __name__ == "__main__":
    main()
