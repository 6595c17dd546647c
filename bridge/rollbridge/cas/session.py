"""Transactional sessions of conditional writers: leased transactional ids, each with a connection to read with.

A transactional id has one user: initialising it fences the previous one. The ids of a stream's conditional writers are
numbered, ``scope.stream.cas.SLOT.INDEX``, and a writer takes the lowest slot that no live one holds, by an ephemeral
ZooKeeper node. The next user of a dead writer's slot ends its open transaction. A writer that was only paused is
fenced, has written nothing, and takes another slot.

The numbers belong to the stream and not to a client's name, because unnamed clients are named after their process: ids
made from those would be new at every start, brokers would keep them for days, and they would fence no other process.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rollbridge.base.deadlines import Deadline, answers_within
from rollbridge.errors import FencedError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendUnknownError
from rollbridge.kafka.fetch import LogReader
from rollbridge.lease import Lease
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import StreamName

logger = logging.getLogger(__name__)

IDS_PER_SLOT: Final = 3
"""Transactional ids per slot, used in turn so that a transaction never waits for the markers of the one before."""


def transactional_ids(stream: StreamName, slot: int) -> list[str]:
    """Return the ids of a slot; they begin like the stream's topics, so one prefixed ACL covers both."""
    return [f"{stream.scope}.{stream.stream}.cas.{slot}.{index}" for index in range(IDS_PER_SLOT)]


def take_slot(session: ZooKeeperSession, stream: StreamName, owner: str) -> Lease:
    """Take the lowest free slot of a stream, until the end of the ZooKeeper session; the lease's name is its number.

    Args:
        session: ZooKeeper session whose end releases the slot.
        stream: The stream.
        owner: Name of the client, for inspection of the node.

    Raises:
        ZooKeeperUnavailableError: no answer in time.
    """
    parent = paths.cas_slots(stream)
    mark = f"{owner} {uuid.uuid4().hex}".encode()
    while True:
        taken = set(session.children(parent))
        number = next(number for number in range(len(taken) + 1) if str(number) not in taken)
        lease = Lease(session, f"{parent}/{number}")
        if lease.take(mark) is None:
            logger.info("slot.taken client=%s stream=%s slot=%d", owner, stream, number)
            return lease


_REQUEST_TIMEOUT_MS: Final = 10_000


@dataclass(slots=True)
class TransactionalSession:
    """Transactional producer and reader under one transactional id of a lease; used by one thread at a time."""

    slot: Lease
    appender: TransactionalAppender
    reader: LogReader

    def prepare(self) -> bool:
        """Initialise the transactional id, or end what is open under it, unless it is ready.

        Returns False if another writer has the id by now.

        Raises:
            KafkaUnavailableError: no answer in time.
        """
        self.rollback()
        try:
            if self.appender.state is not AppenderState.READY:
                self.appender.init()
        except FencedError:
            return False
        return True

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Bound all that is done in this context by a deadline."""
        with self.appender.within(deadline), self.reader.within(deadline):
            yield

    def rollback(self) -> None:
        """Abort what is open, at the latest when this session is next used; it is never committed in any case."""
        if self.appender.state not in (AppenderState.IN_TRANSACTION, AppenderState.MUST_ABORT):
            return
        try:
            self.appender.abort()
        except AppendUnknownError as fault:
            logger.info("abort.deferred transactional_id=%s reason=%s", self.appender.transactional_id, fault)
        except FencedError:
            logger.info("transactional_id.fenced transactional_id=%s", self.appender.transactional_id)

    def close(self) -> None:
        """Disconnect."""
        try:
            self.appender.close()
        except RollbridgeError as fault:
            logger.info("initialization.failed transactional_id=%s reason=%s", self.appender.transactional_id, fault)
        self.reader.close()


class SessionPool:
    """Sessions of one lease, each used by one thread at a time, least recently used first.

    One whose last transaction may still be open comes before all others: that holds up everybody, its own writer
    included, until it is prepared again.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        stream: StreamName,
        take: Callable[[], Lease],
        *,
        transaction_timeout_ms: int,
        retry_timeout_ms: int,
    ) -> None:
        """Start empty; ``take`` leases a slot, and is called again whenever the present one was lost."""
        self._kafka = kafka
        self._stream = stream
        self._take = take
        self._transaction_timeout_ms = transaction_timeout_ms
        self._retry_timeout_ms = retry_timeout_ms
        self._changed = threading.Condition()
        self._slot: Lease | None = None
        self._idle: deque[TransactionalSession] = deque()

    @contextmanager
    def session(self, deadline: Deadline) -> Iterator[TransactionalSession]:
        """Yield a session that is ready; under a fresh slot if the one before was lost.

        All that is done with it is bounded by the deadline.

        Raises:
            KafkaUnavailableError, ZooKeeperUnavailableError: no answer in time; nothing was written.
            NotAuthorizedError, ConfigError: the broker refuses the transactional id.
        """
        while True:
            session, is_ready = self._acquire(deadline), False
            try:
                with session.within(deadline):
                    if is_ready := session.prepare():
                        yield session
                        return
            finally:
                self._give_back(session, first=is_ready and session.appender.state is not AppenderState.READY)

    def close(self) -> None:
        """Disconnect all sessions and release the slot. None may be in use."""
        with self._changed:
            sessions, slot, self._slot = list(self._idle), self._slot, None
            self._idle.clear()
        for session in sessions:
            session.close()
        if slot is not None and slot.is_kept:
            slot.give_up()

    def _acquire(self, deadline: Deadline) -> TransactionalSession:
        with self._changed:
            while True:
                if self._slot is None or not self._slot.is_kept:
                    self._renew(deadline)
                elif self._idle:
                    return self._idle.popleft()
                elif not self._changed.wait(deadline.left()) and deadline.passed():
                    raise KafkaUnavailableError(
                        f"other conditional writes to {self._stream} have had no answer for {deadline.timeout_s:g} s; "
                        "nothing was written"
                    )

    def _give_back(self, session: TransactionalSession, *, first: bool) -> None:
        with self._changed:
            self._changed.notify()
            if session.slot is self._slot and session.appender.state is AppenderState.FENCED:
                logger.warning(
                    'slot.lost stream=%s slot=%s reason="taken by another writer, as after a long pause"',
                    self._stream,
                    session.slot.name,
                )
                self._slot = None
            if session.slot is self._slot:
                self._idle.insert(0 if first else len(self._idle), session)
                return
        session.close()

    def _renew(self, deadline: Deadline) -> None:
        """Take a fresh slot and make sessions for its ids; those of the old slot in use are closed when given back.

        The lock is held meanwhile, so no other thread gets a session before all ids are initialised.
        """
        while self._idle:
            self._idle.popleft().close()
        with answers_within(min(self._retry_timeout_ms / 1000, deadline.left())):
            slot = self._slot = self._take()
        self._idle.extend(self._make(slot, name) for name in transactional_ids(self._stream, int(slot.name)))
        self._changed.notify_all()
        # All of them now: what a dead writer left open under any of these ids would hold up everybody.
        for session in self._idle:
            with session.within(deadline):
                if not session.prepare():
                    self._slot = None

    def _make(self, slot: Lease, transactional_id: str) -> TransactionalSession:
        timeout_ms = self._retry_timeout_ms
        appender = self._kafka.appender(
            transactional_id,
            transaction_timeout_ms=self._transaction_timeout_ms,
            request_timeout_ms=min(_REQUEST_TIMEOUT_MS, timeout_ms),
            retry_timeout_ms=timeout_ms,
        )
        return TransactionalSession(slot, appender, self._kafka.log(retry_timeout_s=timeout_ms / 1000))
