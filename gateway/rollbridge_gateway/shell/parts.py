"""What connections use of the gateway that they belong to."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from rollbridge.connection import Bridge
from rollbridge_gateway.cluster import View
from rollbridge_gateway.departures import Departure
from rollbridge_gateway.pace import Closing
from rollbridge_gateway.procedures import Incoming
from rollbridge_gateway.shell.listers import Listers
from rollbridge_gateway.shell.producing import Producers
from rollbridge_gateway.shell.register import Register
from rollbridge_gateway.shell.topics import Topics
from rollbridge_gateway.shell.world import Brokers

P = ParamSpec("P")
T = TypeVar("T")


class Homes(NamedTuple):
    """Topics with one of whose streams a transaction may begin that has offsets first.

    Attributes:
        topics: The topics.
        are_sure: Whether the group of their streams is that of whatever the producer will write to.
    """

    topics: Sequence[str]
    are_sure: bool


class Services(Protocol):
    """A gateway, as its connections see it.

    Attributes:
        bridge: Connection whose clients the transactional ids are.
        register: Who holds which id.
        topics: Streams by their topics.
        producers: Transactional ids that are served here.
        listers: Threads for what lists transactions.
        brokers: The brokers, as they were last seen.
        broker_hosts: Their hosts.
        upstream_tls: How connections to brokers are encrypted; None if they are not.
        needs_login: Whether brokers want clients to authenticate themselves.
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
