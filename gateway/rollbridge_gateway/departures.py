"""Gateways that are gone, and how clients come to forget their addresses.

A client knows brokers by their ids, which are the same at each gateway. librdkafka keeps with an id what belongs to the
address that it had. Of a broker whose address has changed it waits out the pause before the next attempt to connect,
which has grown to ten seconds while the dead gateway refused it. And a group's coordinator is reached at the address
that its broker had, for ever, as long as it is told that it is this broker. So it is told once what a cluster says of
itself that is electing leaders: that there are none, or that there is no coordinator. It forgets what it knew of them
and asks again, a moment later. Other clients do that anyway.

* Metadata without brokers is for those whose gateway is gone, on connections from before, if they ask about topics by
  name: producers and consumers do, and ask again for a leader. Who asks for brokers alone, as admins do before they ask
  all of them, would take the answer for the truth.
* That there is no coordinator is for those that ask for a group's on a connection from before, whatever gateway they
  belong to: a client may have had its coordinator at the gateway that is gone, and be connected to another one as well.
  Those whose only connections were to the one that is gone have come back within half a minute, and count likewise.

Coordinators of transactions have the ids of gateways, and need none of this; see :mod:`rollbridge_gateway.cluster`.

Source: librdkafka's ``rd_kafka_broker_update``, ``rd_kafka_cgrp_coord_update`` and
``rd_kafka_metadata_decommission_unavailable_brokers``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from rollbridge_gateway.cluster import Gateway, chosen

KNOWN_S: Final = 300.0
"""Seconds for which a departure is known; clients have long noticed by then, and asked for their coordinators."""
MISSED_S: Final = 30.0
"""Seconds in which who needs a leader, or another gateway, asks for it: brokers are hidden for so long."""


class Departure(NamedTuple):
    """A change of gateways after which some are gone.

    Attributes:
        number: It is higher than those of earlier ones.
        at_s: When it was noticed.
        former: The gateways before.
        gone: Addresses of them at which there is none any more.
    """

    number: int
    at_s: float
    former: tuple[Gateway, ...]
    gone: frozenset[tuple[str, int]]

    def has_left(self, client_id: str | None) -> bool:
        """Return whether the gateway that a client belonged to is gone."""
        return bool(self.gone) and _place(chosen(client_id or "", self.former)) in self.gone


class Departures:
    """The departures of the last minutes, as one gateway has noticed them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: deque[Departure] = deque()
        self._count = 0

    def changed(self, former: Sequence[Gateway], present: Sequence[Gateway], now_s: float) -> None:
        """Note which gateways are live now, and which were before; at the start there were none."""
        live = frozenset(map(_place, present))
        self._known = deque(item._replace(gone=item.gone - live) for item in self.recent(now_s))
        gone = frozenset(map(_place, former)) - live
        if gone:
            self._count += 1
            self._known.append(Departure(self._count, now_s, tuple(former), gone))

    def recent(self, now_s: float) -> Sequence[Departure]:
        """Return those that are known, oldest first."""
        while self._known and self._known[0].at_s < now_s - KNOWN_S:
            self._known.popleft()
        return self._known


class ToldDepartures:
    """What one connection has told its client of departures."""

    def __init__(self, began_s: float) -> None:
        """Begin with none.

        Args:
            began_s: When the client has connected.
        """
        self._began_s = began_s
        self._brokers = self._coordinator = 0

    def hides_brokers(self, recent: Sequence[Departure], client_id: str | None, now_s: float) -> bool:
        """Return whether to tell that there are no brokers; asked once for each answer."""
        since_s = max(self._began_s, now_s - MISSED_S)
        fresh = [item for item in recent if item.number > self._brokers and item.at_s > since_s]
        if recent:
            self._brokers = recent[-1].number
        return any(item.has_left(client_id) for item in fresh)

    def hides_coordinator(self, recent: Sequence[Departure]) -> bool:
        """Return whether to tell that there is no coordinator of a group; asked once for each answer."""
        told = self._coordinator
        if recent:
            self._coordinator = recent[-1].number
        return any(item.number > told and item.gone and self._began_s < item.at_s + MISSED_S for item in recent)


def _place(gateway: Gateway) -> tuple[str, int]:
    """Return what clients know of it: one that was started again has another name by default, and they are there."""
    return gateway.host, gateway.port
