"""``make demo-cas``: two processes race for the same account of a ledger, with compare-and-set and without.

Both read the balance, add one, and write the sum. Without a condition an update that came in between is overwritten;
with one it is refused, and tried again on the balance that is there. Everything runs on an ephemeral Kafka, ZooKeeper
and coordinator, which are gone at the end.
"""

from __future__ import annotations

import multiprocessing
from typing import Final, NamedTuple

import click

import rollbridge
from rollbridge.errors import CasWriteError
from rollbridge_devcluster.ephemeral import ProcessCluster
from spark_examples.demo.common import play

ACCOUNT: Final = b"acct-7"
PATIENCE_S: Final = 60.0


class Place(NamedTuple):
    """The ledger's stream, and where it is."""

    bootstrap_servers: str
    zookeeper: str
    stream: str
    zookeeper_root: str | None = None

    def connect(self, name: str) -> rollbridge.Bridge:
        """Open a client."""
        return rollbridge.connect(
            self.bootstrap_servers, zookeeper=self.zookeeper, zookeeper_root=self.zookeeper_root, client_name=name
        )


class Ledger:
    """The account as the log has it, read on and on."""

    def __init__(self, reader: rollbridge.Reader) -> None:
        self._reader = reader
        self.balance = 0
        self.sn = rollbridge.EMPTY

    def read_to(self, wanted: rollbridge.SN) -> None:
        """Read up to an entry."""
        while self.sn.dlsn != wanted.dlsn:
            if not self.read_some(PATIENCE_S):
                raise TimeoutError(f"the entry {wanted} cannot be read")

    def read_some(self, timeout_s: float = 0.0) -> bool:
        """Take the next entry, if one comes in time."""
        record = self._reader.poll(timeout_s)
        if record is not None and record.key == ACCOUNT and record.sn is not None:
            self.balance, self.sn = balance_of(record), record.sn
        return record is not None


def balance_of(record: rollbridge.Record) -> int:
    """Return the balance of an entry."""
    return int((record.value or b"0").split()[0])


def deposit_conditionally(place: Place, name: str, deposits: int) -> int:
    """Add one, so many times, each sum only if its balance is still the last; return how many were refused."""
    refused = 0
    with place.connect(name) as b, b.cas_writer(place.stream) as writer, b.reader(place.stream) as reader:
        ledger = Ledger(reader)
        for _ in range(deposits):
            while True:
                entry = b"%d %s" % (ledger.balance + 1, name.encode())
                try:
                    ledger.read_to(writer.write(ACCOUNT, entry, expected=ledger.sn, scope="key"))
                    break
                except CasWriteError as late:
                    refused += 1
                    ledger.read_to(late.actual)
    return refused


def deposit_blindly(place: Place, name: str, deposits: int) -> int:
    """Do the same without a condition: read the newest balance there is, add one, write."""
    with place.connect(name) as b, b.writer(place.stream) as writer, b.reader(place.stream) as reader:
        ledger = Ledger(reader)
        for _ in range(deposits):
            while ledger.read_some():
                pass
            entry = b"%d %s" % (ledger.balance + 1, name.encode())
            ledger.read_to(writer.write(ACCOUNT, entry).result(PATIENCE_S))
    return 0


def balances(place: Place) -> list[int]:
    """Return every balance of the account, in the order of the log."""
    with place.connect("auditor") as b, b.reader(place.stream, follow=False) as reader:
        return [balance_of(record) for record in reader if record.key == ACCOUNT]


def race(place: Place, deposits: int, *, conditional: bool) -> list[int]:
    """Let two processes deposit at once; return how many writes of each were refused."""
    teller = deposit_conditionally if conditional else deposit_blindly
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.starmap(teller, [(place, "anna", deposits), (place, "bert", deposits)])


def tell(deposits: int) -> bool:
    """Race twice and compare; return whether nothing was lost with conditions."""
    with ProcessCluster() as cluster:
        cluster.start_coordinator()
        click.echo(f"two processes, {deposits} deposits of 1 each, one account")
        whole = False
        for stream, conditional in (("ledger/blind", False), ("ledger/accounts", True)):
            place = Place(cluster.bootstrap_servers, cluster.zookeeper, stream)
            with place.connect("clerk") as b:
                b.admin.create_stream(stream)
            refusals = race(place, deposits, conditional=conditional)
            found = balances(place)
            click.echo(f"\n{'with compare-and-set' if conditional else 'without a condition'}: {stream}")
            for name, refused in zip(("anna", "bert"), refusals, strict=True):
                again = f", {refused} times refused with 525 and tried again" if conditional else ""
                click.echo(f"  {name}: {deposits} deposits of 1{again}")
            lost = 2 * deposits - found[-1]
            click.echo(f"  balance at the end: {found[-1]} of {2 * deposits}; {lost} deposits lost")
            whole = found == list(range(1, 2 * deposits + 1))
    click.echo(f"\n{'nothing was lost' if whole else 'SOMETHING WAS LOST'} where writes were conditional")
    return whole


@click.command()
@click.option("--deposits", default=200, show_default=True, type=click.IntRange(1), help="Of each process.")
def main(deposits: int) -> None:
    """Two processes race for one account of a ledger, with compare-and-set and without."""
    play(lambda: tell(deposits))


if __name__ == "__main__":
    main()
