"""A replicated state machine: several processes sell the seats of one hall, and no seat is sold twice.

``make example NAME=box_office`` after ``make up``. One seller is killed and another one started, the stream is
scaled, and the log is cut off at snapshots, all while they sell. Whoever starts reads the last snapshot and what came
after it, not everything that was ever sold.

Source: DistributedLog CAS proposal, "bootstrapping a state machine".
"""

from __future__ import annotations

import click

import rollbridge
from rollbridge import Bridge, Codec, Synchronizer
from spark_examples.demo.competing import (
    TRANSACTION_TIMEOUT_S,
    check,
    connect,
    finish,
    kill,
    new_stream,
    play,
    start,
    until,
)

KEY = b"hall-1"
SNAPSHOT_AFTER_BYTES = 500

Sold = dict[str, str]
"""Who has sold each seat."""
Sale = list[str]
"""A seat, and who sells it."""


def sell(sold: Sold, sale: Sale) -> Sold:
    """What a sale does to the hall; a seat that is sold already stops everybody."""
    seat, seller = sale
    if seat in sold:
        raise ValueError(f"seat {seat} is sold twice, by {sold[seat]} and {seller}")
    return {**sold, seat: seller}


class BoxOffice:
    """The hall as one process sees it; ``applied`` counts the sales that it has read or made."""

    def __init__(self, b: Bridge, stream: str) -> None:
        self.applied = 0
        self.hall: Synchronizer[Sold, Sale] = b.synchronizer(
            stream,
            KEY,
            {},
            self._apply,
            states=Codec.json(),
            updates=Codec.json(),
            transaction_timeout=TRANSACTION_TIMEOUT_S,
        )

    def _apply(self, sold: Sold, sale: Sale) -> Sold:
        self.applied += 1
        return sell(sold, sale)

    def sell_next(self, seller: str, seats: int) -> rollbridge.SN | None:
        """Sell the next free seat, if there is one."""
        return self.hall.update(lambda sold: [[str(len(sold) + 1), seller]] if len(sold) < seats else None)


def sell_all(stream: str, seller: str, seats: int) -> None:
    """What a seller does: sell while there are seats, and leave a snapshot now and then."""
    with connect(seller) as b:
        office = BoxOffice(b, stream)
        while office.sell_next(seller, seats):
            if office.hall.bytes_since_snapshot > SNAPSHOT_AFTER_BYTES:
                office.hall.compact(truncate=True)  # nothing else lives in this stream


def show(seats: int) -> bool:
    """Sell a hall; whether everybody agrees about it at the end."""
    with connect("manager") as b:
        stream = new_stream(b, "box-office")
        hall = BoxOffice(b, stream).hall
        click.echo(f"anna, bert and carl sell {seats} seats from {stream}")
        sellers = [start(sell_all, stream, name, seats) for name in ("anna", "bert", "carl")]
        until(lambda: "bert" in hall.fetch().values() or len(hall.state) == seats, "bert sells", sellers)
        kill(sellers[1])
        sellers.append(start(sell_all, stream, "dora", seats))
        click.echo(f"  bert is killed after {len(hall.state)} sales, and dora takes over")
        b.admin.scale(stream, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        click.echo("  the segment in which the sales stood is sealed, two others follow")
        finish(sellers)
        sold = hall.fetch()
        for name in ("anna", "bert", "carl", "dora"):
            click.echo(f"  {name} sold {list(sold.values()).count(name)}")
    with connect("newcomer") as b:
        late = BoxOffice(b, stream)
        click.echo(f"  a newcomer reads a snapshot and {late.applied} sales after it")
        return all(
            [
                check("every seat is sold, once", sorted(map(int, sold)) == list(range(1, seats + 1))),
                check("a newcomer comes to the same state", late.hall.state == sold),
                check("without reading every sale", late.applied < seats),
            ]
        )


@click.command()
@click.option("--seats", default=300, show_default=True, type=click.IntRange(60))
def main(seats: int) -> None:
    """Several processes sell the seats of one hall, and no seat is sold twice."""
    play(lambda: show(seats))


if __name__ == "__main__":
    main()
