"""Cluster around a gateway: brokers, live gateways, streams; read again every few seconds."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, ParamSpec, Protocol, TypeVar

from rollbridge.client.connection import Bridge
from rollbridge_gateway.producer.ids import Register
from rollbridge_gateway.producer.procedures import Incoming
from rollbridge_gateway.producer.writes import Producers
from rollbridge_gateway.server.cluster import Departure, View
from rollbridge_gateway.server.framing import Closing
from rollbridge_gateway.server.relay import Brokers
from rollbridge_gateway.server.topics import Topics

# Threads for what lists transactions: few, since a listing may read much, and not those of what producers do.


P = ParamSpec("P")
T = TypeVar("T")

LISTINGS_MAX: Final = 4
"""Listings under way."""


class Listers:
    """Belongs to the event loop that made it."""

    def __init__(self, most: int = LISTINGS_MAX) -> None:
        """Start with nothing under way; ``most`` may be."""
        self._threads = ThreadPoolExecutor(most, "lister")
        self._places = asyncio.Semaphore(most)

    async def run(self, has_left: Callable[[], bool], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do some work on one of the threads, first come, first served, unless the client leaves while it waits.

        A client that has closed its side of the connection may still read: it is answered if it need not wait.

        Raises:
            ConnectionAbortedError: it has left; nothing was done.
        """
        waits = self._places.locked()
        async with self._places:
            if waits and has_left():
                raise ConnectionAbortedError("the client has left before its listing was begun")
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# What connections use of the gateway that they belong to.


class Homes(NamedTuple):
    """Topics with one of whose streams a transaction may begin that has offsets first.

    Attributes:
        topics: The topics.
        are_sure: True if the group of their streams is that of whatever the producer will write to.
    """

    topics: Sequence[str]
    are_sure: bool


class Services(Protocol):
    """A gateway, as its connections see it.

    Attributes:
        brokers: The brokers, as they were last seen.
        upstream_tls: How connections to brokers are encrypted; None if they are not.
        needs_login: True if brokers want clients to authenticate themselves.
        rights_s: Seconds for which a connection's rights are remembered.
        partitions: Virtual partitions of a stream with key ranges.
    """

    bridge: Bridge
    register: Register
    topics: Topics
    producers: Producers
    listers: Listers
    brokers: Brokers
    broker_hosts: frozenset[str]
    upstream_tls: ssl.SSLContext | None
    needs_login: bool
    rights_s: float
    partitions: int

    @property
    def lease_max_ms(self) -> int:
        """Longest ``transaction.timeout.ms``."""

    async def blocking(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do what waits, on a thread."""

    def view(self) -> View:
        """Return what clients are told of the cluster."""

    def is_chosen(self, client_id: str | None) -> bool:
        """Return whether this is the gateway that a client belongs to."""

    def departures(self) -> Sequence[Departure]:
        """Return what gateways have gone lately."""

    def now_s(self) -> float:
        """Return the time by the clock of departures."""

    def address_of(self, broker: int | None) -> tuple[str, int]:
        """Return the address of a broker, or of any."""

    async def fresh_topics(self, age_s: float = ...) -> None:
        """Have the list of streams as of a few seconds ago."""

    def homes(self, client_id: str | None) -> Homes:
        """Return topics with one of whose streams a transaction may begin that has offsets first."""

    def note_asked(self, client_id: str | None, topics: Iterable[str]) -> None:
        """Note that a client has asked about topics by their names."""

    def count_refusal(self, api: int, code: str) -> None:
        """Count an error that was told to a producer, by its request and Kafka's code."""

    def count_closed(self, why: Closing) -> None:
        """Count a connection that is closed here for what its client did not do."""

    def count_written(self, batches: Sequence[Incoming], faults: Sequence[Exception | None]) -> None:
        """Count batches that were taken."""
