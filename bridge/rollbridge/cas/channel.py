"""What the conditional writers of one connection and stream share: a slot with its ids, and one dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rollbridge.cas.dispatch import Dispatcher
from rollbridge.cas.engine import EnginePool
from rollbridge.cas.lookup import StreamLogs
from rollbridge.cas.shape import Shape
from rollbridge.cas.slots import take_slot
from rollbridge.config import ConnectionSettings
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster
from rollbridge.model.names import StreamName
from rollbridge.zookeeper.catalog import Catalog
from rollbridge.zookeeper.session import ZooKeeperSession

_ANSWER_TIMEOUT_S: Final = 20.0


class Channel:
    """Made by :class:`Channels`."""

    def __init__(
        self,
        settings: ConnectionSettings,
        catalog: Catalog,
        session: ZooKeeperSession,
        stream: StreamName,
        *,
        timeout_s: float,
        transaction_timeout_s: float,
    ) -> None:
        answer_timeout_s = min(timeout_s, _ANSWER_TIMEOUT_S)
        self.shape: Final = Shape(catalog, session, stream)
        self._pool = EnginePool(
            settings,
            stream,
            lambda: take_slot(session, stream, settings.client_name),
            transaction_timeout_ms=int(transaction_timeout_s * 1000),
            retry_timeout_ms=int(answer_timeout_s * 1000),
        )
        self.dispatcher: Final = Dispatcher(
            self._pool,
            self.shape,
            transaction_timeout_s=transaction_timeout_s,
            answer_timeout_s=answer_timeout_s,
            name=str(stream),
        )
        # Looking at the log for a caller must not wait for a round of ours, nor a round for it.
        self._reader = LogReader(
            Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        )
        self._logs = StreamLogs(stream)
        self._reading = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[tuple[StreamLogs, LogReader]]:
        """What is known of the log apart from rounds, and how to read on; for one thread at a time."""
        with self._reading:
            yield self._logs, self._reader

    def close(self) -> None:
        """Carry out what waits, give the transactional ids back, and disconnect."""
        try:
            self.dispatcher.close()
            self._pool.close()
        finally:
            with self._reading:
                self._reader.close()


_Key = tuple[StreamName, float, float]


class Channels:
    """The channels of one connection, by stream and time-outs. Safe to use from several threads."""

    def __init__(self, settings: ConnectionSettings, catalog: Catalog, session: ZooKeeperSession) -> None:
        self._settings = settings
        self._catalog = catalog
        self._session = session
        self._lock = threading.Lock()
        self._open: dict[_Key, tuple[Channel, int]] = {}

    @contextmanager
    def channel(self, stream: StreamName, *, timeout_s: float, transaction_timeout_s: float) -> Iterator[Channel]:
        """The channel of a stream, which is closed when nobody uses it any more."""
        key = (stream, timeout_s, transaction_timeout_s)
        with self._lock:
            found, users = self._open.get(key, (None, 0))
            if found is None:
                found = Channel(
                    self._settings,
                    self._catalog,
                    self._session,
                    stream,
                    timeout_s=timeout_s,
                    transaction_timeout_s=transaction_timeout_s,
                )
            self._open[key] = (found, users + 1)
        try:
            yield found
        finally:
            with self._lock:
                _, users = self._open[key]
                if users > 1:
                    self._open[key] = (found, users - 1)
                else:
                    del self._open[key]
            if users == 1:
                found.close()
