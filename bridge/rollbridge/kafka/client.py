"""One Kafka client for a process: its connections under one identity, and everything that is asked over them.

Threads borrow a :class:`~rollbridge.kafka.metadata.Cluster` from one pool for each request, so connections are as many
as are in use at once, not as many as there are users.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol, Self

from rollbridge.base.deadlines import Closable
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.follower import Follower
from rollbridge.kafka.groups import GroupOffsetStore
from rollbridge.kafka.metadata import Cluster, Clusters, MetadataCache
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.topics import TopicAdmin


class Address(Protocol):
    """Address of a cluster among the settings of a connection."""

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def kafka(self) -> Mapping[str, str]: ...

    @property
    def client_name(self) -> str: ...


class KafkaClient(Closable):
    """Connections to one Kafka cluster under one identity. Thread-safe.

    Attributes:
        borrow: Lends connections to a thread; see :meth:`rollbridge.kafka.metadata.Clusters.borrow`.
        topics: Administration of topics.
        offsets: Offsets of partitions.
        log: Makes a reader of partitions.
        group: Makes what reads and writes the committed offsets of a consumer group.
        follow: Makes a follower of partitions, with connections to their leaders of its own; the caller closes it.
        appender: Makes an appender in native transactions; the caller closes it.

    Args:
        security: ``security.protocol``, ``ssl.*`` and ``sasl.*`` as for confluent-kafka.
        cache: Metadata that is shared with a client of another identity.
        timeout_s: Time-out of each method of ``topics``, and the default of those of ``offsets``, in seconds.

    Raises:
        ConfigError: An address or a setting is wrong; nothing is asked before the first request.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        timeout_s: float = 30.0,
        cache: MetadataCache | None = None,
    ) -> None:
        self.bootstrap_servers: Final = bootstrap_servers
        self._security = dict(security or {})
        self._client_id = client_id
        self._cache = cache or MetadataCache()
        self._others: dict[str, KafkaClient] = {}
        self._connect = partial(
            Cluster, bootstrap_servers, security=self._security, client_id=client_id, cache=self._cache
        )
        self._clusters = Clusters(self._connect)
        self.borrow: Final = self._clusters.borrow
        self.topics: Final = TopicAdmin(self._clusters, timeout_s)
        self.offsets: Final = LogOffsets(self._clusters, timeout_s)
        self.log: Final = partial(LogReader, self._clusters)
        self.group: Final = partial(GroupOffsetStore, self._clusters)
        self.follow: Final = partial(Follower, self._clusters)
        self.appender: Final = partial(TransactionalAppender, self._clusters)

    @classmethod
    def of(cls, settings: Address) -> Self:
        """Return a client for the settings of a connection, under its name."""
        return cls(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)

    def named(self, client_id: str) -> KafkaClient:
        """Return the client of another identity, with connections of its own; it is closed with this one."""
        client = KafkaClient(self.bootstrap_servers, security=self._security, client_id=client_id, cache=self._cache)
        return self._others.setdefault(client_id, client)

    def __repr__(self) -> str:
        return f"<KafkaClient {self._client_id} of {self.bootstrap_servers}>"

    def close(self) -> None:
        """Close the idle connections; the next request opens others."""
        self._clusters.close()
        for other in list(self._others.values()):
            other.close()

    def trim(self) -> None:
        """Close connections that are not used any more; brokers do so after some minutes."""
        for client in (self, *list(self._others.values())):
            client._clusters.trim()

    def cluster_id(self, timeout_s: float) -> str:
        """Return the identity of the cluster.

        Raises:
            KafkaUnavailableError: No broker answered in time, which is a second at least.
            InvalidRequestError: The cluster has no transactions v2.
        """
        try:
            return self.topics.within(max(timeout_s, 1.0)).cluster_id()
        except KafkaUnavailableError as fault:
            raise KafkaUnavailableError(
                f"no Kafka broker answered at {self.bootstrap_servers} within {timeout_s:.3g} s: is it running, and is "
                "the address right?"
            ) from fault

    def cluster(self, *, request_timeout_s: float = 30.0) -> Cluster:
        """Return connections of the caller's own, for one thread at a time; it closes them."""
        return self._connect(request_timeout_s=request_timeout_s)
