"""Outcomes: one thread tails the commit logs of the groups in use and settles the transactions that wait for them.

Records of foreign transactions are recognised by their key and never decoded; where nobody waits, none is looked at.
Nothing is missed: a log is read from where it ended before the first transaction of its group began here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Final

from rollbridge.calls.forks import hold, refusal
from rollbridge.calls.within import patience_s
from rollbridge.client.futures import Completion
from rollbridge.errors import CorruptDataError, KafkaUnavailable, NotFoundError
from rollbridge.kafka.fetch_plan import Fetched, Trouble
from rollbridge.kafka.follower import Follower
from rollbridge.kafka.log_offsets import LogOffsets
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.quiet import limited
from rollbridge.model.control import ControlKind, peek_kind
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.names import GroupName

logger = limited(logging.getLogger(__name__))

_POLL_S: Final = 60.0
_RETRY_S: Final = 0.1
_END_S: Final = 2.0


class OutcomeTail:
    """Knows who waits for which transaction. Safe to use from several threads.

    Attributes:
        waiting: Transactions that began here, or are written here, and whose end is not known.
    """

    def __init__(
        self, bootstrap_servers: str, *, security: Mapping[str, str] | None = None, client_id: str = "rollbridge"
    ) -> None:
        self.waiting: dict[bytes, Completion] = {}
        self._follower = Follower(
            bootstrap_servers,
            Isolation.READ_COMMITTED,
            name="rollbridge-outcomes-errand",
            security=security,
            client_id=client_id,
            check_epochs=True,
        )
        self._offsets = LogOffsets(bootstrap_servers, security=security, client_id=client_id)
        self._followed: set[GroupName] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        hold(self, "_follower", "_offsets", "_lock", then=_leave_all)

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
            self._follower.follow((group.commit_log_topic, 0), self._end_of(group, patience_s(timeout_s)))
            self._followed.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tail, name="rollbridge-outcomes", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop; whoever still waits is told that the outcome will not be learned here."""
        self._follower.stop()
        if self._thread is None:
            self._follower.close()
        else:
            self._thread.join(_END_S)  # it waits for no broker, unless one has stopped within an answer
        self._offsets.close()
        for completion in list(self.waiting.values()):
            completion.give_up("this client was closed; ask with another one")
        self.waiting.clear()

    def _end_of(self, group: GroupName, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        topic = group.commit_log_topic
        while True:
            try:
                return self._offsets.end([topic], Isolation.READ_UNCOMMITTED)[topic]
            except (NotFoundError, KafkaUnavailable) as fault:
                if time.monotonic() >= deadline:
                    raise KafkaUnavailable(
                        f"the commit log {topic} could not be read within {timeout_s:g} s: {fault}; nothing was written"
                    ) from fault
                time.sleep(_RETRY_S)

    def _tail(self) -> None:
        with closing(self._follower) as follower:
            while not follower.stopped:
                try:
                    for found in follower.poll(_POLL_S):
                        if isinstance(found, Fetched):
                            self._settle(found)
                        else:
                            self._judge(found)
                except Exception:  # everybody who waits for an outcome depends on this thread
                    logger.exception("reading the commit logs failed and is tried again")
                    time.sleep(_RETRY_S)

    def _settle(self, fetched: Fetched) -> None:
        waiting = self.waiting
        if not waiting:
            return  # whoever begins a transaction waits before its outcome can be there
        try:
            for offset, _, key, value, _ in fetched.records():
                completion = waiting.get(key or b"")
                if completion is None or value is None or peek_kind(value) is ControlKind.BEGIN:
                    continue
                if completion.is_of_another(value):
                    logger.warning("transaction %s of another client has ended: not ours", completion.transaction)
                    continue
                waiting.pop(completion.key, None)  # a newer session may have taken it meanwhile
                completion.settle(value, offset)
        except CorruptDataError as fault:
            logger.warning(
                "outcomes in %s before offset %d are passed over: %s", fetched.partition[0], fetched.end, fault
            )

    def _judge(self, trouble: Trouble) -> None:
        """Go on where there is something; what else is wrong is asked about again until it is not."""
        (topic, _), offset, fault, resume = trouble
        if resume is None:
            logger.warning("no outcomes come from %s: %s", topic, fault)
            return
        logger.warning(
            "outcomes may have been missed, and whoever waits for one asks again with its id: %s; %s is read on from "
            "offset %d instead of %d",
            fault,
            topic,
            resume,
            offset,
        )
        self._follower.follow(trouble.partition, resume)


def _leave_all(tail: OutcomeTail) -> None:
    for completion in list(tail.waiting.values()):
        completion.leave(str(refusal()))
