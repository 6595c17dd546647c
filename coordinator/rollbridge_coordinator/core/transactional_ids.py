"""Transactional ids of a leader: which one the next round uses, which are locked, and when a commit is safe.

A decided native transaction locks its id until each of its partitions has taken a marker. A partition without a leader,
or with too few in-sync replicas, takes none for as long as that lasts. So a locked id is left out, and rounds use the
others.

A leader that takes over cannot fence a locked id, for Kafka refuses InitProducerId. It leads all the same, since two
rules keep an earlier leader that was paused from committing with that id once it is unlocked:

1. A leader commits a native transaction only if it has appended to the commit log within :data:`ADVANCE_MAX` offsets of
   its own last append there, or has checked the fence in ZooKeeper since the transaction began.
2. A leader that takes over raises the fence, then appends :data:`FENCE_RECORDS` to the commit log, then asks for
   the locked ids once more, then waits until all that the group's topics held before this question has its markers,
   and only then reads them.

What the earlier leader began before that last question is decided, or aborted by it. What it begins afterwards lands
beyond the records, so it has to check the fence, which refuses it. ``coordinator/tests/test_transactional_ids.py``
tries all interleavings.

Source: KIP-890; Kafka's TransactionCoordinator.handleInitProducerId, which answers CONCURRENT_TRANSACTIONS for
PrepareCommit and PrepareAbort.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from rollbridge.base.deadlines import Deadline
from rollbridge.base.logs import limited
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender

IDENTITIES: Final = 3
"""Transactional ids used in turn, so that a round never waits for the markers of the one before."""
LOCKED_MS: Final = 2_000
"""Time for which an id may be locked before it is left out; markers take milliseconds."""
LOOK_S: Final = 1.0
"""Interval at which locked ids are asked for, and the longest wait for an answer."""
UNANSWERED_S: Final = 10.0
"""The same interval after a look without an answer."""

ADVANCE_MAX: Final = 8
"""Offsets by which the commit log may have advanced between two appends of one leader: its own markers, which may be
written late, one for each id.
"""
FENCE_RECORDS: Final = ((b"rollbridge", None),) * (2 * ADVANCE_MAX)
"""Records of the second rule; always aborted."""

logger = limited(logging.getLogger(__name__))


class Rotation:
    """Appenders of one term that rounds use in turn. Not thread-safe.

    Args:
        borrow: Function that returns an idle appender of another use, None if there is none.
    """

    def __init__(
        self, appenders: Sequence[TransactionalAppender], borrow: Callable[[], TransactionalAppender | None]
    ) -> None:
        self._appenders = appenders
        self._borrow = borrow
        self._place = 0
        self._look_at: dict[TransactionalAppender, float] = {}

    @property
    def is_any_locked(self) -> bool:
        """True while an id is left out: some partition takes no markers."""
        return bool(self._look_at)

    def lock(self, appender: TransactionalAppender, reason: object) -> None:
        """Leave an appender out until its id is unlocked."""
        if appender not in self._look_at:
            logger.warning('transactional-id.locked transactional_id=%s reason="%s"', appender.transactional_id, reason)
        self._look_at[appender] = time.monotonic() + LOOK_S

    def advance(self) -> tuple[TransactionalAppender, bool]:
        """Return the appender of the next round, and True if it is borrowed.

        If all ids are locked, and none can be borrowed, one of them, which waits.
        """
        self._look()
        for _ in self._appenders:
            self._place = (self._place + 1) % len(self._appenders)
            if self._appenders[self._place] not in self._look_at:
                return self._appenders[self._place], False
        borrowed = self._borrow()
        return (self._appenders[self._place], False) if borrowed is None else (borrowed, True)

    def _look(self) -> None:
        """Take back the ids that are not locked any more; one that was not fenced yet is taken over."""
        for appender, at in list(self._look_at.items()):
            if time.monotonic() < at:
                continue
            pause_s = LOOK_S
            try:
                with appender.within(Deadline(LOOK_S)):
                    if not appender.is_locked():
                        take(appender)
                        del self._look_at[appender]
                        logger.info("transactional-id.unlocked transactional_id=%s", appender.transactional_id)
                        continue
            except RollbridgeError as fault:
                logger.info('transactional-id.locked transactional_id=%s reason="%s"', appender.transactional_id, fault)
                pause_s = UNANSWERED_S  # a broker that hangs costs each look its whole time
            self._look_at[appender] = time.monotonic() + pause_s


def take(appender: TransactionalAppender) -> None:
    """Initialise an appender that could not be so far, or whose outcome is unknown."""
    if appender.state in (AppenderState.NEW, AppenderState.UNKNOWN):
        appender.init()


class CommitGuard:
    """First rule of the module, for one term: which commits need a look at the fence.

    Attributes:
        is_safe: True if the round that is open may be committed as it is.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._unchecked: int | None = None
        self.is_safe = False

    def begin(self) -> None:
        """Begin another round."""
        self._unchecked, self.is_safe = None, False

    def appended(self, offsets: Sequence[int]) -> None:
        """Note the offsets of control records that the round has in the commit log."""
        if self._unchecked is None and self._last is not None and offsets[0] - self._last <= ADVANCE_MAX:
            self._last, self.is_safe = offsets[-1], True
        else:
            self._unchecked, self.is_safe = offsets[-1], False

    def checked(self) -> None:
        """Note that the fence, checked now, holds."""
        if self._unchecked is not None:
            self._last = self._unchecked
        self._unchecked, self.is_safe = None, True
