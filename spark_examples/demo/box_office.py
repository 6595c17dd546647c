"""A replicated state machine: several processes sell the seats of one hall, and no seat is sold twice.

``make example NAME=box_office`` after ``make up``. One seller is killed and another one started, the stream is
scaled, and the log is cut off at snapshots, all while they sell. Whoever starts reads the last snapshot and what came
after it, not everything that was ever sold.

Source: DistributedLog CAS proposal, "bootstrapping a state machine".
"""

from __future__ import annotations

import click

from rollbridge import Bridge, Codec, Synchronizer
from spark_examples.demo.common import (
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

SNAPSHOT_AFTER_BYTES = 500

Sold = dict[str, str]
"""Who has sold each seat."""
Sale = list[str]
"""A seat, and who sells it."""


def open_hall(b: Bridge, stream: str, applied: list[Sale]) -> Synchronizer[Sold, Sale]:
    """Open the hall as one process sees it; notes the sales that it has read or made."""

    def sell(sold: Sold, sale: Sale) -> Sold:
        applied.append(sale)
        seat, seller = sale
        if seat in sold:
            raise ValueError(f"seat {seat} is sold twice, by {sold[seat]} and {seller}")
        return {**sold, seat: seller}

    json, patience = Codec.json, TRANSACTION_TIMEOUT_S
    return b.synchronizer(stream, b"hall-1", {}, sell, states=json(), updates=json(), transaction_timeout=patience)


def sell_all(stream: str, seller: str, seats: int) -> None:
    """Sell while there are seats, and leave a snapshot now and then."""
    with connect(seller) as b:
        hall = open_hall(b, stream, [])
        while hall.update(lambda sold: [[str(len(sold) + 1), seller]] if len(sold) < seats else None):
            if hall.bytes_since_snapshot > SNAPSHOT_AFTER_BYTES:
                hall.compact(truncate=True)  # nothing else lives in this stream


def show(seats: int) -> bool:
    """Sell a hall; return whether everybody agrees about it at the end."""
    with connect("manager") as b:
        stream = new_stream(b, "box-office")
        hall = open_hall(b, stream, [])
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
        applied: list[Sale] = []
        late = open_hall(b, stream, applied)
        click.echo(f"  a newcomer reads a snapshot and {len(applied)} sales after it")
        return all(
            [
                check("every seat is sold, once", sorted(map(int, sold)) == list(range(1, seats + 1))),
                check("a newcomer comes to the same state", late.state == sold),
                check("without reading every sale", len(applied) < seats),
            ]
        )


@click.command()
@click.option("--seats", default=300, show_default=True, type=click.IntRange(60))
def main(seats: int) -> None:
    """Several processes sell the seats of one hall, and no seat is sold twice."""
    play(lambda: show(seats))


if __name__ == "__main__":
    main()
