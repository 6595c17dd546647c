"""The standby: follow a group that another coordinator leads, so that a takeover reads only the newest records.

A standby reads Kafka and ZooKeeper and changes nothing. It keeps a
:class:`rollbridge_coordinator.history.takeover.WarmTail`. A takeover without one, because the standby has not begun or
was overtaken by truncation, reads everything from the snapshots on.

The standby's thread owns the tail until it sets ``_still``; then :meth:`Standby.take` gives the tail to the leader's
thread. ``is_warm`` may be read from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from rollbridge.base.logs import log_defect
from rollbridge.buffer.replay import BufferPlace, log_start
from rollbridge.buffer.snapshot_topic import SnapshotReader
from rollbridge.errors import KafkaUnavailableError, RollbridgeError, ZooKeeperUnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.names import GroupName, Partition
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.frame_reader import LogTail, Tail
from rollbridge_coordinator.core.interpreter import look_of
from rollbridge_coordinator.core.metric_samples import standby_samples
from rollbridge_coordinator.daemon.health import MetricsBoard, MetricsSheet
from rollbridge_coordinator.daemon.succession import UNHEARD_S
from rollbridge_coordinator.history.takeover import MakeFold, WarmTail
from rollbridge_coordinator.streams.unled import buffer_fault

logger = logging.getLogger(__name__)

POLL_S: Final = 0.05
"""Longest wait for frames, and so the longest delay of a takeover by a standby."""
LOOK_S: Final = 20.0
"""Interval between checks of the snapshots; a created or deleted stream causes one at once."""
PAUSE_S: Final = 1.0
GIVEN_UP_S: Final = 60.0
"""Pause after a group had too many transactions to follow."""
WARM_MESSAGES: Final = 2_000
"""Messages left to read at which a standby becomes warm; reading them takes some hundredths of a second."""
COLD_MESSAGES: Final = 20 * WARM_MESSAGES
"""Messages left to read above which a warm standby becomes cold; the gap keeps bursts of frames from doing that."""
HAND_OVER_S: Final = 2.0
"""Longest wait of a new leader for a standby to stop reading; after it, the leader reads everything itself."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Start of a takeover: positions from which to read the buffers and the commit log."""

    places: Mapping[Partition, BufferPlace]
    start: int


class Standby(threading.Thread):
    """Thread that follows one group until its tail is taken."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        kafka: KafkaClient,
        group: GroupName,
        session: ZooKeeperSession,
        make_fold: MakeFold,
        board: MetricsBoard | None = None,
        on_warmth: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; :meth:`start` begins. ``on_warmth`` is called when :attr:`is_warm` has changed."""
        super().__init__(name=f"standby-{group}", daemon=True)
        self._settings = settings
        self._group = group
        self._metadata = Metadata(session)
        self._make_fold = make_fold
        self._kafka = kafka
        self._metrics = MetricsSheet(board, str(group), is_standby=True)
        self._stopping = threading.Event()
        self._still = threading.Event()
        self._changed = threading.Event()
        self._tail: WarmTail | None = None
        self._on_warmth = on_warmth
        self.is_warm = False
        """True if a takeover would have little to read."""
        self._streams: Mapping[Partition, str] = {}

    def end(self) -> None:
        """Tell the thread to stop, without waiting."""
        self._stopping.set()

    def take(self) -> WarmTail | None:
        """Stop following and return the tail, which the standby no longer uses; None if there is none in time."""
        self.end()
        return self._tail if self._still.wait(HAND_OVER_S) else None

    def run(self) -> None:
        """Follow until the tail is taken, restarting after any failure."""
        while not self._stopping.is_set():
            pause_s = PAUSE_S
            try:
                if self._tail is not None or self._begin():
                    pause_s = self._follow()
            except (KafkaUnavailableError, ZooKeeperUnavailableError) as fault:
                logger.info('standby.waiting group=%s reason="%s"', self._group, fault)
            except RollbridgeError as fault:
                logger.info('standby.restarted group=%s reason="%s"', self._group, fault)
                self._tail = None
            except Exception:
                log_defect(logger, "standby.failed group=%s", self._group)
                self._tail = None
            self._report(None)
            self._set_warm(False)
            self._stopping.wait(pause_s)
        self._still.set()
        self._metrics.remove()

    def _begin(self) -> bool:
        """Make an empty tail; return False if there is nothing to follow yet."""
        look = self._look()
        if look is None:
            return False
        terminated: dict[bytes, int] = {}
        self._streams = {partition: place.stream for partition, place in look.places.items()}
        self._tail = WarmTail(self._make_fold(terminated), terminated, look.places, look.start)
        return True

    def _follow(self) -> float:
        """Read on until the tail is taken or dropped; return the pause that follows, in seconds."""
        tail = self._tail
        assert tail is not None
        log = LogTail(self._kafka, self._group.commit_log_topic, tail.log_end)
        with closing(log), closing(Tail(self._kafka)) as buffers:
            buffers.assign(tail.fold.positions)
            look_at = time.monotonic() + LOOK_S
            while not self._stopping.is_set():
                self._read(tail, buffers, log)
                ends = buffers.ends()
                lag = sum(max(end - tail.fold.positions[item], 0) for item, end in ends.items())
                self._report(lag)
                log_end = log.end()
                if max([log.unheard_s(), *buffers.unheard_s().values()]) > UNHEARD_S:
                    self._set_warm(False)  # there may be any number of messages to read
                elif log_end is not None and len(ends) == len(tail.fold.positions):
                    self._judge(lag + max(log_end - tail.log_end, 0))
                if tail.is_full or len(tail) > self._settings.standby_transactions_max:
                    logger.warning(
                        "standby.stopped group=%s txns_max=%d bytes_max=%d: transactions since the last snapshots "
                        "exceed these limits; one may be open for long",
                        self._group,
                        self._settings.standby_transactions_max,
                        self._settings.limits.held_bytes_max,
                    )
                    self._tail = None
                    return GIVEN_UP_S
                if self._changed.is_set() or time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_S
                    look = self._look()
                    if look is None or not tail.trim(look.places, look.start):
                        self._tail = None
                        return 0.0
            self._still.set()  # before the consumers are closed, which takes long
        return 0.0

    def _read(self, tail: WarmTail, buffers: Tail, log: LogTail) -> None:
        for message in buffers.poll(POLL_S):
            if tail.is_full:
                return
            tail.fold.fold(self._streams[message.partition], *message)
        tail.epochs.update(buffers.epochs)
        said = log.poll(0.0)
        if said is not None:
            tail.follow(said)

    def _look(self) -> _Look | None:
        """Return the positions to follow; None if no leader has ever created the group's topics."""
        known = self._metadata.group(self._group)
        if known is None or not known.commit_log_topic_id:
            return None
        self._changed.clear()
        self._metadata.session.children(paths.streams(self._group.scope), self._changed.set)
        configs = self._readable()
        log = self._group.commit_log_topic
        log_end = self._kafka.offsets.end([log])[log]  # before those of the buffers
        reader = SnapshotReader(self._kafka, self._group.scope)
        found = [item for config in configs for item in reader.of(config)]
        starts = self._kafka.offsets.first([*(item.partition for item in found), (log, 0)])
        places = {
            item.partition: BufferPlace(
                item.stream.buffer_topic_id,
                str(item.stream.name),
                item.snapshot,
                item.ongoing,
                starts[item.partition],
                item.buffer_end,
            )
            for item in found
        }
        start = log_start(places, log_end, self._settings.leader.outcomes_again)
        return _Look(places, max(start, starts[log, 0]))  # what was truncated is in the record of ended transactions

    def _readable(self) -> list[StreamConfig]:
        """Return the streams that a takeover would lead: those whose settings and buffers can be read."""
        found = [
            config
            for config in self._metadata.streams(self._group.scope)
            if config.group == self._group and config.state is StreamState.ACTIVE and not config.was_moved
        ]
        looks = self._kafka.topics.look_at_each(config.buffer_topic for config in found)
        return [config for config in found if buffer_fault(config, look_of(looks.get(config.buffer_topic)), 0) is None]

    def _judge(self, left: int) -> None:
        self._set_warm(left <= (COLD_MESSAGES if self.is_warm else WARM_MESSAGES))

    def _set_warm(self, is_warm: bool) -> None:
        if is_warm != self.is_warm:
            self.is_warm = is_warm
            self._on_warmth()

    def _report(self, lag: int | None) -> None:
        held = 0 if self._tail is None else len(self._tail)
        self._metrics.put(lambda: standby_samples(str(self._group), lag, held))
