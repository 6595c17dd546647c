"""Engines: each a transactional id and a connection to read with; a writer has a few and uses them in turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rollbridge.calls.within import answers_within
from rollbridge.cas.slots import Slot, transactional_ids
from rollbridge.config import ConnectionSettings
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.errors import AppendUnknownError, ProducerFencedError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.states import State
from rollbridge.model.names import StreamName

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_MS: Final = 10_000


@dataclass(slots=True)
class Engine:
    """One transactional id; used by one thread at a time."""

    appender: TransactionalAppender
    reader: LogReader

    def prepare(self) -> None:
        """Take the id, or come back to it, unless it is ready.

        Raises:
            ProducerFencedError: somebody else has it by now.
            KafkaUnavailable: no answer in time.
        """
        self.rollback()
        if self.appender.state in (State.NEW, State.UNKNOWN):
            self.appender.init()

    def rollback(self) -> None:
        """Abort what is open, at the latest when this engine is used next; it is never committed in any case."""
        if self.appender.state not in (State.IN_TRANSACTION, State.MUST_ABORT):
            return
        try:
            self.appender.abort()
        except AppendUnknownError as fault:
            logger.info("an abort is left to the next use of the transactional id: %s", fault)
        except ProducerFencedError:
            logger.info("transactional id %s was taken over; it ended there", self.appender.transactional_id)

    def close(self) -> None:
        """Disconnect."""
        try:
            self.appender.close()
        except RollbridgeError as fault:
            logger.info("transactional id %s: %s", self.appender.transactional_id, fault)
        self.reader.close()


class EnginePool:
    """The engines of one slot, each used by one thread at a time, the longest unused first.

    One whose last transaction may still be open comes before all others.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        stream: StreamName,
        take: Callable[[], Slot],
        *,
        transaction_timeout_ms: int,
        retry_timeout_ms: int,
    ) -> None:
        """``take`` takes a slot; it is called again when the one at hand was lost."""
        self._settings = settings
        self._stream = stream
        self._take = take
        self._transaction_timeout_ms = transaction_timeout_ms
        self._retry_timeout_ms = retry_timeout_ms
        self._changed = threading.Condition()
        self._slot: Slot | None = None
        self._generation = 0
        self._idle: deque[tuple[int, Engine]] = deque()

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine that is ready; with a slot of its own if the one before was lost.

        Raises:
            KafkaUnavailable, ZooKeeperUnavailable: no answer in time; nothing was written.
            NotAuthorizedError, ConfigError: the broker will not have it.
        """
        while True:
            generation, engine = self._acquire()
            prepared = False
            try:
                try:
                    engine.prepare()
                except ProducerFencedError:
                    self.lose(generation)
                    continue
                prepared = True
                yield engine
                return
            except ProducerFencedError:
                self.lose(generation)
                raise
            finally:
                # What it may have left open keeps everybody waiting, its own writer too, until it is prepared again.
                self._give_back(generation, engine, first=prepared and engine.appender.state is State.UNKNOWN)

    def lose(self, generation: int) -> None:
        """Take another slot next time: somebody else has this one by now."""
        with self._changed:
            if generation == self._generation and self._slot is not None:
                logger.warning(
                    "slot %d of %s was taken by another writer, as after a long pause; taking another",
                    self._slot.number,
                    self._stream,
                )
                self._slot = None

    def close(self) -> None:
        """Disconnect all and give the slot back. Nobody may be using an engine."""
        with self._changed:
            engines = [engine for _, engine in self._idle]
            self._idle.clear()
            slot, self._slot = self._slot, None
        for engine in engines:
            engine.close()
        if slot is not None:
            slot.release()

    def _acquire(self) -> tuple[int, Engine]:
        with self._changed:
            while True:
                if self._slot is None or not self._slot.is_held:
                    try:
                        self._renew()
                    except ProducerFencedError:
                        self._slot = None
                        continue
                if self._idle:
                    return self._idle.popleft()
                self._changed.wait()

    def _give_back(self, generation: int, engine: Engine, *, first: bool) -> None:
        with self._changed:
            if generation == self._generation and self._slot is not None:
                if first:
                    self._idle.appendleft((generation, engine))
                else:
                    self._idle.append((generation, engine))
                self._changed.notify()
                return
        engine.close()

    def _renew(self) -> None:
        """A slot that is ours alone, and engines for its ids; those in use with the old one are closed when done."""
        for _, engine in self._idle:
            engine.close()
        self._idle.clear()
        with answers_within(self._retry_timeout_ms / 1000):
            self._slot = self._take()
        self._generation += 1
        for identifier in transactional_ids(self._stream, self._slot.number):
            self._idle.append((self._generation, self._make(identifier)))
        self._changed.notify_all()
        for _, engine in self._idle:
            # All of them now: what a dead writer left open with any of these ids would keep everybody waiting.
            engine.prepare()

    def _make(self, transactional_id: str) -> Engine:
        settings = self._settings
        return Engine(
            TransactionalAppender(
                settings.bootstrap_servers,
                transactional_id,
                transaction_timeout_ms=self._transaction_timeout_ms,
                security=settings.kafka,
                client_id=settings.client_name,
                request_timeout_ms=min(_REQUEST_TIMEOUT_MS, self._retry_timeout_ms),
                retry_timeout_ms=self._retry_timeout_ms,
            ),
            LogReader(
                Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name),
                retry_timeout_s=self._retry_timeout_ms / 1000,
            ),
        )
