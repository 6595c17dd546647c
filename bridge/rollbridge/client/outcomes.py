"""Outcomes: one thread tails the commit logs of the groups in use and settles the transactions that wait for them.

Records of foreign transactions are recognised by their key and never decoded. Nothing is missed: a log is read from
where it ended before the first transaction of its group began here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from confluent_kafka import Message, TopicPartition

from rollbridge.calls.forks import hold, refusal
from rollbridge.calls.within import patience_s
from rollbridge.client.futures import Completion
from rollbridge.errors import KafkaUnavailable, NotFoundError
from rollbridge.kafka.clients import assign_more, consumer_config, open_consumer
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.quiet import limited
from rollbridge.kafka.standstill import Lookout, Partition, places_of, positions_of
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model.control import ControlKind, peek_kind
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.names import GroupName

logger = limited(logging.getLogger(__name__))

_POLL_S: Final = 0.1
_BATCH: Final = 5_000
_RETRY_S: Final = 0.1


class OutcomeTail:
    """Knows who waits for which transaction. Safe to use from several threads.

    Attributes:
        waiting: Transactions that began here, or are written here, and whose end is not known.
    """

    def __init__(
        self, bootstrap_servers: str, *, security: Mapping[str, str] | None = None, client_id: str = "rollbridge"
    ) -> None:
        self.waiting: dict[bytes, Completion] = {}
        self._settings = {
            **consumer_config(
                bootstrap_servers, isolation=Isolation.READ_COMMITTED, security=security, client_id=client_id
            ),
            "fetch.queue.backoff.ms": 5,
            "queued.min.messages": 100_000,
            "error_cb": lambda error: logger.info("the consumer of the commit log reports: %s", error),
        }
        self._consumer = open_consumer(self._settings, "start a consumer", logger)
        self._starts: dict[Partition, int] = {}
        self._lookout = Lookout(
            bootstrap_servers,
            Isolation.READ_COMMITTED,
            slack=1,  # the marker of the last outcome
            security=security,
            client_id=client_id,
        )
        self._admin = TopicAdmin(bootstrap_servers, security=security, client_id=client_id)
        # A consumer lets one thread in at a time, and one that polls again and again keeps all others out, so the
        # polling thread itself begins to read what others ask for. Each partition has its offset already.
        self._wanted: deque[TopicPartition] = deque()
        self._followed: set[GroupName] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        hold(self, "_consumer", "_lock", then=_leave_all)

    def completion(self, transaction: TransactionId, epoch: int = 0) -> Completion:
        """How a transaction ends, for whoever writes a part of it here, in a session of this epoch."""
        return self.waiting.setdefault(transaction.bytes, Completion(transaction.bytes, epoch=epoch))

    def follow(self, group: GroupName, timeout_s: float) -> None:
        """Tail the commit log of a group from its present end on.

        Raises:
            KafkaUnavailable: the log could not be found in time.
        """
        if group in self._followed:
            return
        with self._lock:
            if group in self._followed:
                return
            self._wanted.append(TopicPartition(group.commit_log_topic, 0, self._end_of(group, patience_s(timeout_s))))
            self._followed.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tail, name="rollbridge-outcomes", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop; whoever still waits is told that the outcome will not be learned here."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._consumer.close()
        for completion in list(self.waiting.values()):
            completion.give_up("this client was closed; ask with another one")
        self.waiting.clear()

    def _end_of(self, group: GroupName, timeout_s: float) -> int:
        """Asked for through an admin client, because the consumer belongs to the polling thread."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._admin.end_offsets([group.commit_log_topic])[group.commit_log_topic]
            except (NotFoundError, KafkaUnavailable) as fault:
                if time.monotonic() >= deadline:
                    raise KafkaUnavailable(
                        f"the commit log {group.commit_log_topic} could not be read within {timeout_s:g} s: "
                        f"{fault}; nothing was written"
                    ) from fault
                time.sleep(_RETRY_S)

    def _tail(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read_some()
            except Exception:  # everybody who waits for an outcome depends on this thread
                logger.exception("reading the commit logs failed and is tried again")
                self._stopping.wait(_RETRY_S)

    def _read_some(self) -> None:
        while self._wanted:
            assign_more(self._consumer, [self._wanted[0]])
            place = self._wanted.popleft()
            self._starts[place.topic, place.partition] = place.offset
        stuck = self._lookout.stuck(self._positions)
        if stuck:
            logger.info("no outcomes come from %s although there are some; reading anew", sorted(stuck))
            self._renew()
        first = self._consumer.poll(_POLL_S)
        if first is not None:
            # consume(n, t) waits until there are n messages or t has passed; with 0 it takes what is there.
            self._settle([first, *self._consumer.consume(_BATCH, 0)])

    def _positions(self) -> dict[Partition, int]:
        return positions_of(self._consumer.position([TopicPartition(*item) for item in self._starts]), self._starts)

    def _renew(self) -> None:
        """Go on with another consumer where this one is."""
        before, self._starts = self._consumer, self._positions()
        self._consumer = open_consumer(self._settings, "start a consumer", logger)
        assign_more(self._consumer, places_of(self._starts))
        before.close()

    def _settle(self, messages: list[Message]) -> None:
        waiting = self.waiting
        for message in messages:
            key = message.key()
            if key is None:
                logger.warning("reading the commit log: %s", message.error())
                continue
            completion = waiting.get(key)
            if completion is None:
                continue
            value, offset = message.value(), message.offset()
            if value is not None and offset is not None and peek_kind(value) is not ControlKind.BEGIN:
                if completion.is_of_another(value):
                    logger.warning("transaction %s of another client has ended: not ours", completion.transaction)
                    continue
                del waiting[key]
                completion.settle(value, offset)


def _leave_all(tail: OutcomeTail) -> None:
    for completion in list(tail.waiting.values()):
        completion.leave(str(refusal()))
