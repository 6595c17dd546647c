"""Background merges: large transactions are appended here, each by a thread and a transactional id of its own.

The leader's thread starts and ends preparations, and polls their progress; it never waits for one. A preparation that
has appended everything keeps its transactional id, whose native transaction stays open, until the leader takes it up or
gives it up. So there are at most as many as there are ids, and others wait.

Broker, disk and this process are shared with all commits. So while others commit, all preparations together work for
about half of the time (:func:`rest_s`).

Threads: a preparation belongs to one thread from its start until its ``ended`` is set; afterwards its appender belongs
to the leader's thread. They share the few attributes of :class:`_Preparation`, each written once, and the time of the
last round, which the leader's thread writes; preparations count each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from rollbridge.base.effects import AnyEffect
from rollbridge.base.logs import log_defect
from rollbridge.errors import FencedError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import ID_LOCKED, AppendUnknownError
from rollbridge.kafka.topics import TopicSpec
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.frame_reader import FRAMES_S, FrameFeed, FrameReader
from rollbridge_coordinator.core.transactional_ids import take

logger = logging.getLogger(__name__)

Explain = Callable[[AnyEffect, Exception, FrameFeed | None], fx.EffectRefusedError | None]
"""Function that returns the refusal of an effect for an error; None if its outcome is unknown."""

TAKE_UP_S: Final = 15.0
TAKE_UP_SHARE: Final = 1 / 4

OTHERS_S: Final = 0.5
"""Time after a round during which others count as committing."""
REST_MAX_S: Final = 0.5
TOO_SLOW: Final = "merge-too-slow"
"""Code of the refusal of a merge that takes as long as its native transaction may."""
HURRY: Final = 1 / 3
"""Share of the time-out of its native transaction after which a preparation no longer rests."""


def rest_s(worked_s: float, present: int, since_round_s: float, since_begin_s: float, timeout_s: float) -> float:
    """Return the rest of a preparation after a batch, in seconds.

    Args:
        since_round_s: Time since the leader has committed for others.
    """
    if since_round_s > OTHERS_S or since_begin_s > HURRY * timeout_s:
        return 0.0
    return min(worked_s * present, REST_MAX_S)


def is_late(since_begin_s: float, timeout_s: float) -> bool:
    """Return True if a preparation is too late to be taken up: its native transaction is about to time out.

    Taking it up takes time, above all to seal active segments. A transaction that has timed out by then costs its roll
    the duplicates that are already published.
    """
    return since_begin_s > timeout_s - min(TAKE_UP_S, TAKE_UP_SHARE * timeout_s)


class _Preparation:
    """One preparation."""

    def __init__(self, effect: fx.Prepare) -> None:
        self.effect = effect
        self.given_up = threading.Event()
        self.ended = threading.Event()
        self.appender: TransactionalAppender | None = None
        self.began_s = 0.0
        self.offsets: Sequence[int] | None = None
        self.refused: fx.EffectRefusedError | None = None
        self.lost = ""
        self.fenced: FencedError | None = None


class MergePool:
    """Preparations of one term of one leader."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        kafka: KafkaClient,
        appenders: Sequence[TransactionalAppender],
        explain: Explain,
    ) -> None:
        """Prepare the pool; threads are started on demand.

        Args:
            appenders: Appenders, initialised before the first preparation but for locked ones; closed with the pool.
            explain: Tells refusals from unknown outcomes.
        """
        self._settings = settings
        self._kafka = kafka
        self._appenders = appenders
        self._explain = explain
        self._idle: SimpleQueue[TransactionalAppender | None] = SimpleQueue()
        for appender in appenders:
            self._idle.put(appender)
        self._present: dict[str, _Preparation] = {}
        self._threads: list[threading.Thread] = []
        self._round_s = -OTHERS_S  # written by the leader's thread alone

    def note_round(self) -> None:
        """Note that a round was committed: preparations yield to those that follow."""
        self._round_s = time.monotonic()

    def start(self, effect: fx.Prepare) -> None:
        """Start a preparation in a thread of its own; it waits for an idle transactional id first."""
        item = self._present[effect.key] = _Preparation(effect)
        thread = threading.Thread(target=self._run, args=(item,), name=f"merge-{len(self._threads)}", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def look(self) -> Mapping[str, fx.PreparationProgress]:
        """Return the progress of all preparations, and drop those that were given up and have ended.

        Raises:
            FencedError: a newer leader has the transactional ids.
        """
        found: dict[str, fx.PreparationProgress] = {}
        for key, item in list(self._present.items()):
            if not item.ended.is_set():
                found[key] = fx.PreparationProgress()
                continue
            if item.fenced is not None:
                raise item.fenced
            if item.given_up.is_set():
                self._release(key)
                continue
            if item.offsets is not None and is_late(time.monotonic() - item.began_s, self._settings.merge_timeout_s):
                item.lost = "its native transaction was about to time out"
            is_there = not item.lost and item.refused is None
            found[key] = fx.PreparationProgress(item.offsets if is_there else None, item.refused, item.lost)
        return found

    def take_up(self, key: str) -> TransactionalAppender:
        """Hand over the appender of a preparation that has appended everything; :meth:`give_back` returns it.

        Raises:
            KeyError: there is no such preparation.
        """
        item = self._present.pop(key)
        if item.appender is None or item.offsets is None:
            raise KeyError(key)
        return item.appender

    def borrow(self) -> TransactionalAppender | None:
        """Hand over an idle appender, None if there is none; :meth:`give_back` returns it."""
        with suppress(Empty):
            return self._idle.get_nowait()
        return None

    def give_back(self, appender: TransactionalAppender) -> None:
        """Take back an appender whose native transaction has ended."""
        self._idle.put(appender)

    def give_up(self, key: str) -> None:
        """End a preparation; nothing of it will be visible. Does not wait, :meth:`look` reports its end."""
        item = self._present.get(key)
        if item is not None:
            item.given_up.set()

    def close(self) -> None:
        """End all preparations, and close the appenders. Open transactions are aborted."""
        for item in self._present.values():
            item.given_up.set()
        for _ in self._threads:
            self._idle.put(None)
        for thread in self._threads:
            thread.join()
        for appender in self._appenders:
            appender.close()

    def _release(self, key: str) -> None:
        """Drop a preparation that has ended; its appender is idle again, with nothing open."""
        appender = self._present.pop(key).appender
        if appender is None:
            return
        try:
            take(appender)
            appender.abort()
        except AppendUnknownError:
            appender.init()
        except KafkaUnavailableError as fault:
            if fault.code != ID_LOCKED:
                raise
            logger.info('transactional-id.locked transactional_id=%s reason="%s"', appender.transactional_id, fault)
        self._idle.put(appender)

    def _run(self, item: _Preparation) -> None:
        appender = self._idle.get()
        log = self._kafka.log(retry_timeout_s=FRAMES_S)
        feed = FrameFeed(item.effect.items, FrameReader(log).read, stamped=item.effect.stamped)
        try:
            if appender is None:
                return  # the workshop closes
            item.appender = appender
            if item.given_up.is_set():
                return
            self._kafka.topics.create_topics(map(spec_of, item.effect.topics))
            take(appender)
            item.began_s = time.monotonic()
            item.offsets = feed.offsets(appender.append(self._paced(item, feed.batches())))
            took_s, timeout_s = time.monotonic() - item.began_s, self._settings.merge_timeout_s
            if is_late(took_s, timeout_s):  # so would be the next one
                why = f"it took {took_s:.1f} s, and a native transaction is open for {timeout_s:g} s at most"
                item.refused = fx.EffectRefusedError(item.effect, why, code=TOO_SLOW)
        except CancelledError:
            pass  # it was given up
        except FencedError as fault:
            item.fenced = fault
        except Exception as fault:
            item.refused = self._explain(item.effect, fault, feed)
            if item.refused is None:
                item.lost = str(fault)
                if not isinstance(fault, RollbridgeError):
                    log_defect(logger, "merge.background-failed")
        finally:
            item.ended.set()

    def _paced(self, item: _Preparation, batches: Iterator[tuple[str, int, bytes]]) -> Iterator[tuple[str, int, bytes]]:
        timeout_s = self._settings.merge_timeout_s
        began_s = time.monotonic()
        for batch in batches:
            if item.given_up.is_set():
                raise CancelledError
            yield batch
            now_s = time.monotonic()
            at_work = sum(not other.ended.is_set() for other in list(self._present.values()))
            item.given_up.wait(rest_s(now_s - began_s, at_work, now_s - self._round_s, now_s - item.began_s, timeout_s))
            began_s = time.monotonic()


def spec_of(topic: fx.TopicCreation) -> TopicSpec:
    """Return a topic in the adapter's form."""
    return TopicSpec(
        name=topic.name, partitions=topic.partitions, replication_factor=topic.replication_factor, config=topic.config
    )
