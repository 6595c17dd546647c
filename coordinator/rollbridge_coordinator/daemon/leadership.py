"""Leadership: one thread for each group, which waits for the lead, takes over, serves, and hands over.

The ephemeral ``leader`` node says who should act. The controller epoch, which is raised in the same step and checked by
every ZooKeeper write, and Kafka's fencing of transactional ids decide who can act: a leader that was paused cannot
change anything any more (:mod:`rollbridge.lease`).

The thread of a group runs all its procedures. ZooKeeper watches fire on the session's thread; they set an event and do
nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Final, Protocol

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import log_defect
from rollbridge.base.metrics import Sample
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.table import Rejection
from rollbridge.errors import CorruptDataError, FencedError, KafkaUnavailableError, RollbridgeError, UnknownWriteError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendUnknownError
from rollbridge.kafka.records import is_frame, validate_frame
from rollbridge.lease import Lease, LeaseState
from rollbridge.metadata import paths
from rollbridge.metadata.records import ControllerEpoch
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, Partition, show_partition
from rollbridge_coordinator.commit.expiry import measure_logs
from rollbridge_coordinator.commit.outcomes import EXPIRY, coalescing
from rollbridge_coordinator.commit.roll import end_linger
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import invariants
from rollbridge_coordinator.core.frame_reader import Tail
from rollbridge_coordinator.core.interpreter import Hook, Interpreter
from rollbridge_coordinator.core.loop import work
from rollbridge_coordinator.core.metric_samples import leader_samples
from rollbridge_coordinator.core.metrics import BufferSizes, EffectTimes, LeaderView, Survey, Takeovers, Warmth, survey
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError, Suspects, UnknownOutcomes
from rollbridge_coordinator.daemon.health import KafkaProbe, MetricsBoard, MetricsSheet
from rollbridge_coordinator.daemon.succession import (
    DEAF_S,
    SPREAD_MAX_MS,
    UNHEARD_S,
    Candidates,
    Setbacks,
    Times,
    gives_way_in_s,
    hands_over_to,
    stands_in_s,
)
from rollbridge_coordinator.history.standby import Standby
from rollbridge_coordinator.history.takeover import check_again, finish_pending, take_over
from rollbridge_coordinator.page.cache import PageCache, PageSheet

# Readings: what a leader's threads know besides its state, taken once a second for its metrics.
#
# Nothing here sends requests: the tail knows the ends of the buffers at its last fetch, the interpreter durations of
# effects. All open transactions are surveyed, and rarely where there are very many (:class:`.Survey`).


SILENT_S: Final = 2.0
"""Silence of a partition from which on it is reported; brokers without new records answer after half a second."""


class Readings:
    """Readings of one term of a leader; used by its thread only."""

    def __init__(self, group: GroupState, tail: Tail, times: EffectTimes, takeovers: Takeovers) -> None:
        """Begin; the arguments keep changing."""
        self._group = group
        self._tail = tail
        self._times = times
        self._takeovers = takeovers
        self._sizes = BufferSizes()
        self._survey: Survey | None = None

    def samples(self, now_ms: int) -> Iterator[Sample]:
        return leader_samples(self._group, self.view(now_ms))

    def view(self, now_ms: int) -> LeaderView:
        """Return the shell's view, in addition to the leader's state."""
        group, fold = self._group, self._group.fold
        partitions = group.partitions()
        positions = {partition: fold.positions.get(partition, 0) for partition in partitions}
        seen = self._survey
        if seen is None or not seen.at_ms <= now_ms < seen.due_ms:
            seen = self._survey = survey(fold.open.values(), positions, now_ms)
        self._sizes.keep(partitions)
        for partition, position in positions.items():
            self._sizes.note(partition, position, self._tail.read_bytes.get(partition, 0))
        held = {item: self._sizes.behind(item, seen.needed.get(item, offset)) for item, offset in positions.items()}
        return LeaderView(
            now_ms=now_ms,
            survey=seen,
            ends=self._tail.ends(),
            appended_ms=self._tail.appended_ms,
            unheard_ms={
                partition: round(1000 * seconds)
                for partition, seconds in self._tail.unheard_s().items()
                if seconds >= SILENT_S
            },
            held_bytes=held,
            times=self._times,
            takeovers=self._takeovers,
        )


class Clock:
    """Clock of a leader: wall time that neither jumps nor runs back while it leads.

    Leases are counted from the append times that brokers give to frames. If the wall clock of a leader's machine were
    set forward by a day, every lease would seem to have run out. So the wall clock is read once, and monotonic time is
    added to it.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_ms(self) -> int:
        """Return milliseconds since 1970, by monotonic time since the start of the clock."""
        return int((self._offset_s + time.monotonic()) * 1000)

    def wall_ms(self) -> int:
        """Return the machine's present wall clock, ms since 1970."""
        return wall_ms()


logger = logging.getLogger(__name__)

PAUSE_MAX_S = 5.0
LISTEN_S = 1.0
"""Interval at which a leader checks that it hears of all buffers."""
UNFIT_S = 1.0
"""Interval at which a daemon without Kafka checks if it may lead again."""
NOTABLE = (
    "scales",
    "rolling_commits",
    "late_records",
    "late_records_refused",
    "transactions_expired",
    "transactions_refused",
    "requests_refused",
    "offsets_refused",
    "commits_forsaken",
    "sessions_forgotten",
)
"""Counters of a group whose changes are logged."""


def check_batch(batch: bytes, records: int) -> str | None:
    """Return the fault of a client's record batch; None if it can be forwarded."""
    if is_frame(batch, records):
        return None
    try:
        validate_frame(batch, records)
    except CorruptDataError as fault:
        return str(fault)
    return None


class Health(Protocol):
    """The daemon's view of its connection to Kafka."""

    @property
    def is_fit(self) -> bool:
        """True if this coordinator may lead: Kafka is known to answer."""

    def doubt(self) -> None:
        """Note a failure that the connection to Kafka may have caused."""


class Peers(Protocol):
    """The daemon's view of the other coordinators."""

    @property
    def candidates(self) -> Candidates:
        """Coordinators known to be alive."""

    def readiness_changed(self) -> None:
        """Note that a group's readiness to be led here has changed."""


class Leadership(threading.Thread):
    """Thread that leads one group whenever it is this daemon's turn."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        kafka: KafkaClient,
        group: GroupName,
        session: ZooKeeperSession,
        peers: Peers,
        health: Health,
        board: MetricsBoard | None = None,
        hook: Hook | None = None,
        page: PageCache | None = None,
    ) -> None:
        """Prepare; :meth:`start` begins.

        Args:
            board: Board for the metrics, if they are served.
            hook: Called at each moment of each effect.
            page: Board of the live page, if it is served.
        """
        super().__init__(name=f"leader-{group}", daemon=True)
        self._settings = settings
        self._kafka = kafka
        self._group = group
        self._session = session
        self._peers = peers
        self._health = health
        self._board = board
        self._hook = hook
        self._metrics = MetricsSheet(board, str(group))
        self._page = PageSheet(page, str(group))
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._standby: Standby | None = None
        self._lead = Lease(
            session, paths.leader(group), paths.controller(group), makes_parents=False, changed=self._changed.set
        )
        self._name = settings.name.encode()
        self._is_rival = False
        self._unknown_outcomes = UnknownOutcomes()
        self._suspects = Suspects()
        self._takeovers = Takeovers()
        self._setbacks = Setbacks()
        self._term_began = 0.0
        self.is_leading = False
        """True after the takeover, until the lead is given up."""
        self._times = EffectTimes()
        """Of the present term."""

    @property
    def is_ready(self) -> bool:
        """True if a takeover from the present leader, another coordinator, would be short and likely to succeed."""
        if self._rest_left_s():
            return False
        if not self._settings.standby_transactions_max:
            return self._is_rival  # without standbys no takeover gets shorter than this one
        standby = self._standby
        return standby is not None and standby.is_warm

    def waiting(self) -> tuple[str, float] | None:
        """Return the effect under way, and for how many seconds; None if there is none. For any thread."""
        present = self._times.present
        return None if present is None else (present[0], perf_counter() - present[1])

    @property
    def given_up(self) -> int:
        return self._setbacks.count

    def run(self) -> None:
        """Wait for the lead and serve, repeatedly, until stopped."""
        pause = 0.1
        while not self._stopping.is_set():
            has_won = False
            try:
                if (clock := self._win()) is not None:
                    self._term_began, has_won = time.monotonic(), True
                    self._serve(clock)
                    pause = 0.1
            except FencedError as fault:
                logger.warning('lead.lost group=%s reason="%s"', self._group, fault)
            except (StaleStateError, RollbridgeError) as fault:
                logger.warning('lead.%s group=%s reason="%s"', "given-up" if has_won else "not-won", self._group, fault)
                if has_won:
                    self._note_setback()
                self._health.doubt()
            except Exception:
                self._note_setback()
                log_defect(logger, "lead.failed group=%s", self._group)
            finally:
                self._yield_lead()
            self._stopping.wait(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
        standby = self._end_standby()
        if standby is not None:
            standby.take()

    def stop(self) -> None:
        """End the thread after the work in progress, and give up the lead; may be called from any thread."""
        self._stopping.set()
        self._changed.set()

    def poke(self) -> None:
        """Have the thread check again who should lead; may be called from any thread."""
        self._changed.set()

    def _note_setback(self) -> None:
        self._setbacks.note(self._term_began, time.monotonic())

    def _rest_left_s(self) -> float:
        return self._setbacks.left_s(time.monotonic())

    def _win(self) -> Clock | None:
        """Wait until this daemon leads; return a clock for its term, None if stopped first."""
        vacant_since: float | None = None
        while not self._stopping.is_set():
            self._changed.clear()
            if not self._health.is_fit:
                vacant_since = None
                self._changed.wait(UNFIT_S)
                continue
            if (found := self._lead.look()) is not None:
                vacant_since = None
                if self._lead.is_own(found):  # of a term of ours: ZooKeeper did not answer when it was given up
                    self._lead.give_up()
                    self._changed.wait(UNFIT_S)
                    continue
                self._begin_standby()
                rest_s = self._rest_left_s()
                if not self._changed.wait(rest_s or None):
                    self._peers.readiness_changed()  # the rest is over
                continue
            vacant_since = vacant_since or time.monotonic()
            vacant_s = time.monotonic() - vacant_since
            candidates, me = self._peers.candidates, self._settings.name
            rests = self._rest_left_s() > 0.0
            left = stands_in_s(self._group, me, candidates, vacant_s, self._settings.patience_s, rests=rests)
            if left > 0:
                self._changed.wait(left)
                continue
            clock = Clock()
            if self._lead.take(self._name, partial(self._next_epoch, clock)) is None:
                return clock
        return None

    def _next_epoch(self, clock: Clock, known: bytes | None) -> bytes:
        try:
            epoch = ControllerEpoch.from_json(known).epoch + 1 if known else 1
        except CorruptDataError as fault:
            raise StaleStateError(
                f"{paths.controller(self._group)} cannot be read: {fault}; put it right, as from a backup of ZooKeeper"
            ) from fault
        return ControllerEpoch(epoch, self._settings.name, clock.now_ms()).to_json()

    def _begin_standby(self) -> None:
        if not self._is_rival:
            self._is_rival = True
            self._peers.readiness_changed()
        if self._standby is None and self._settings.standby_transactions_max:
            limits = replace(self._settings.limits, cache_bytes_max=self._settings.standby_cache_bytes_max)
            self._standby = Standby(
                self._settings,
                self._kafka,
                self._group,
                self._session,
                lambda terminated: BufferFold(limits, check_batch, terminated),
                self._board,
                self._peers.readiness_changed,
            )
            self._standby.start()

    def _end_standby(self) -> Standby | None:
        """Tell the standby to end, without waiting, and return it; :meth:`Standby.take` waits."""
        standby, self._standby = self._standby, None
        self._is_rival = False
        self._peers.readiness_changed()
        if standby is not None:
            standby.end()
        return standby

    def _serve(self, clock: Clock) -> None:
        started = time.monotonic()
        standby = self._end_standby()
        since_ms = clock.now_ms()
        token, times = self._lead.tenure.token, Times()
        assert token is not None
        raised = ControllerEpoch.from_json(token.value)
        epoch = raised.epoch
        times.witness(raised.since_ms, token.modified_ms, since_ms)
        interpreter = Interpreter(
            self._settings, self._kafka, self._group, self._session, self._lead, clock.now_ms, self._hook
        )
        self._times = interpreter.times
        tail = Tail(self._kafka)
        try:
            warm = None if standby is None else standby.take()
            group, ends = interpreter.run(
                take_over(
                    self._group,
                    epoch,
                    lambda terminated: BufferFold(self._settings.limits, check_batch, terminated),
                    self._settings.leader,
                    replication_factor=self._settings.replication_factor,
                    tail=warm,
                    unreadable=self._suspects.left_out(started),
                    times=times,
                )
            )
            group.metrics.since_ms = since_ms
            group.waits.unknown_outcomes = self._unknown_outcomes
            if times.differ:
                self._warn_of_clocks(times)
            unread = sum(ends.values()) - sum(group.fold.positions.get(partition, 0) for partition in ends)
            self._fold_until(tail, group, ends, clock)
            self._unknown_outcomes.keep(group.fold.open)
            interpreter.run(finish_pending(group))
            group.fold.chronicle.is_live = True  # frames dropped from now on are new, not replayed
            group.serves_since_ms = clock.now_ms()
            self._tell(group)
            self._say_serving()
            took_s = time.monotonic() - started
            self._takeovers.note(Warmth.WARM if group.counts["takeovers_warm"] else Warmth.COLD, took_s)
            logger.info(
                "lead.won group=%s controller_epoch=%d streams=%d open_txns=%d took_s=%.2f messages_read=%d standby=%s",
                self._group,
                epoch,
                len(group.streams),
                len(group.fold.open),
                took_s,
                unread,
                "warm" if group.counts["takeovers_warm"] else "cold",
            )
            self.is_leading = True
            self._loop(interpreter, tail, group, KafkaProbe(self._settings, self._kafka), took_s, clock)
            interpreter.run(end_linger(group))
        except (AppendUnknownError, KafkaUnavailableError):
            self._unknown_outcomes.note_unknown()
            raise
        finally:
            self._unknown_outcomes.end()
            # Let others begin first: closing takes long if the servers do not answer.
            interpreter.times.present = None
            self._yield_lead()
            tail.close()
            interpreter.close()

    def _say_serving(self) -> None:
        """Mark the takeover as over: the leader node has version 0 until then, see ``Metadata.lead``."""
        try:
            if not self._lead.renew(self._name):
                raise FencedError("the leader node was removed meanwhile")
        except UnknownWriteError as fault:
            logger.info('takeover.progress-kept group=%s reason="%s"', self._group, fault)

    def _loop(
        self,
        interpreter: Interpreter,
        tail: Tail,
        group: GroupState,
        kafka_probe: KafkaProbe,
        took_s: float,
        clock: Clock,
    ) -> None:
        since = time.monotonic()
        give_way_at = float("inf")
        requested = threading.Event()
        requested.set()

        def request() -> None:
            requested.set()
            tail.interrupt()

        reported: Counter[str] = Counter()
        readings = Readings(group, tail, interpreter.times, self._takeovers)
        deaf, listens_at = 0, 0.0
        while not self._stopping.is_set():
            if not self._session.is_connected:
                # The leader is unknown. Decide nothing and read nothing: new frames stay in the buffers.
                self._stopping.wait(self._settings.poll_s)
                continue
            was_away = not self._lead.is_held
            self._lead.look()
            if (tenure := self._lead.tenure).state is LeaseState.LOST:
                raise FencedError(f"the lead is lost: {tenure.cause.value}")
            if not self._lead.is_held:
                continue
            if was_away:
                interpreter.run(check_again(group))
            if self._changed.is_set() or time.monotonic() >= give_way_at:
                self._changed.clear()
                left = self._gives_way_in_s(time.monotonic() - since, took_s)
                if left == 0.0:
                    return
                give_way_at = float("inf") if left is None else time.monotonic() + left
            tail.assign({partition: group.fold.positions.get(partition, 0) for partition in group.partitions()})
            asked = requested.is_set()
            if asked:
                requested.clear()
                self._session.children(paths.requests(self._group), request)
            pause_ms = 0 if asked else group.pause_ms(clock.now_ms(), round(self._settings.poll_s * 1000))
            self._fold(tail, group, pause_ms / 1000, clock)
            if time.monotonic() >= listens_at:
                listens_at = time.monotonic() + LISTEN_S
                # Counted, not timed: a leader that waited for a broker has not listened meanwhile.
                unheard = {item: silent_s for item, silent_s in tail.unheard_s().items() if silent_s > UNHEARD_S}
                deaf = deaf + 1 if unheard else 0
                if deaf * LISTEN_S >= DEAF_S - UNHEARD_S:
                    self._hand_over(unheard)
            self._tell(group)
            self._look_at_clocks(group, clock)
            if interpreter.run(work(group, clock.now_ms(), requests=asked)):
                requested.set()
            if group.settings.validate:
                invariants.check(group)
            self._tell(group)
            interpreter.times.present = type(kafka_probe).__name__, perf_counter()
            kafka_probe.beat()
            interpreter.times.present = None
            self._report(group, reported)
            if self._metrics.is_wanted:
                interpreter.run(measure_logs(group, clock.now_ms()))
                self._metrics.put(lambda: readings.samples(clock.now_ms()))
            self._page.write(group, readings.view, clock.now_ms())

    def _fold_until(self, tail: Tail, group: GroupState, ends: dict[Partition, int], clock: Clock) -> None:
        """Fold the buffers up to ``ends``, their ends when this leader took over."""
        starts = {partition: group.fold.positions.get(partition, 0) for partition in group.partitions()}
        tail.assign(starts, group.buffer_epochs)
        while not group.is_folded(ends):
            if self._stopping.is_set():
                raise StaleStateError("stopped during the takeover")
            try:
                self._fold(tail, group, 1.0, clock)
            except CorruptDataError as fault:
                if tail.failed is not None:
                    self._suspects.note(tail.failed[0], str(fault), time.monotonic())
                raise
            silent = {
                partition: unheard_s
                for partition, unheard_s in tail.unheard_s().items()
                if unheard_s > UNHEARD_S and group.fold.positions.get(partition, 0) < ends[partition]
            }
            for topic in {topic for topic, _ in silent}:
                self._suspects.note(topic, f"nothing was heard of it for {UNHEARD_S:.0f} s", time.monotonic())
            if silent:
                raise StaleStateError(f"nothing is heard of {', '.join(map(show_partition, sorted(silent)))}")
        self._suspects.all_read()

    def _fold(self, tail: Tail, group: GroupState, timeout_s: float, clock: Clock) -> None:
        streams = group.partitions()
        fold = group.fold.fold
        foreign, newer = (group.fold.rejected[reason] for reason in (Rejection.FOREIGN, Rejection.NEWER))
        known = group.fold.stranger
        arrived = tail.poll(timeout_s)
        first = next(arrived, None)
        if first is None:
            return
        group.fold.now_ms = clock.now_ms()
        for message in chain((first,), arrived):
            stream = streams.get(message.partition)
            if stream is not None:
                fold(stream, *message)
        if newer == 0 and group.fold.rejected[Rejection.NEWER]:
            logger.warning(
                "frames.newer group=%s: frames have a version unknown to this release and their transactions are "
                "refused; upgrade all coordinators before the clients (logged once)",
                self._group,
            )
        if known is None and (stranger := group.fold.stranger) is not None:
            logger.warning(
                "frames.foreign group=%s key=%r value=%r offset=%d partition=%s: the messages are no frames; "
                "they are skipped and counted (logged once)",
                self._group,
                stranger.key,
                stranger.value,
                stranger.offset,
                show_partition(stranger.partition),
            )
        elif foreign == 0 and group.fold.rejected[Rejection.FOREIGN]:
            logger.warning("frames.foreign group=%s: frames of other streams are skipped (logged once)", self._group)

    def _tell(self, group: GroupState) -> None:
        """Log each change of a transaction's state: unusual ones at INFO, the others at DEBUG."""
        chronicle = group.fold.chronicle
        chronicle.is_tracing = logger.isEnabledFor(logging.DEBUG)
        for note in chronicle.take():
            level = logging.INFO if note.is_unusual else logging.DEBUG
            txn, epoch = TransactionId.from_bytes(note.transaction), group.controller_epoch
            logger.log(
                level, "txn.state group=%s txn=%s controller_epoch=%d: %s", self._group, txn, epoch, note.change()
            )
        if chronicle.lost:
            logger.info("txn.state-omitted group=%s changes=%d", self._group, chronicle.lost)
            chronicle.lost = 0

    def _report(self, group: GroupState, reported: Counter[str]) -> None:
        """Log unusual events; ordinary commits are only counted."""
        for text in group.snapshots.warnings:
            logger.warning("snapshots.warning group=%s: %s", self._group, text)
        group.snapshots.warnings.clear()
        for text in group.waits.faults.news:
            logger.warning("streams.warning group=%s: %s", self._group, text)
        group.waits.faults.news.clear()
        for name in NOTABLE:
            if group.counts[name] != reported[name]:
                logger.info(
                    "count.changed group=%s count=%s added=%d term_total=%d",
                    self._group,
                    name,
                    group.counts[name] - reported[name],
                    group.counts[name],
                )
                reported[name] = group.counts[name]
        expired_ms = group.housekeeping.done_ms.get(EXPIRY, 0)
        if group.outcome_store is not None and expired_ms != reported["expired_ms"]:
            reported["expired_ms"] = expired_ms
            logger.info(
                "outcomes.written group=%s preserver_coalescing_ratio=%.2f outcomes=%d records=%d expired=%d "
                "clients=%d",
                self._group,
                coalescing(group),
                group.counts["preserver_appended"],
                group.counts["preserver_flushed"],
                group.counts["preserver_expired"],
                len(group.outcome_store),
            )

    def _gives_way_in_s(self, served_s: float, took_s: float) -> float | None:
        """Return :func:`rollbridge_coordinator.daemon.succession.gives_way_in_s`; log it when that is 0."""
        candidates = self._peers.candidates
        left = gives_way_in_s(self._group, self._settings.name, candidates, served_s, took_s)
        if left == 0.0:
            logger.info(
                "lead.handed-over group=%s heir=%s served_s=%.1f",
                self._group,
                candidates.first_choice(self._group),
                served_s,
            )
        return left

    def _hand_over(self, unheard: Mapping[Partition, float]) -> None:
        """Give up the lead if another coordinator hears of all buffers.

        Raises:
            StaleStateError: there is one.
        """
        heir = hands_over_to(self._group, self._settings.name, self._peers.candidates)
        if heir is not None:
            raise StaleStateError(
                f"nothing has been heard of {', '.join(map(show_partition, sorted(unheard)))} for "
                f"{max(unheard.values()):.0f} s, while coordinator {heir} follows all buffers"
            )

    def _look_at_clocks(self, group: GroupState, clock: Clock) -> None:
        """Compare the clocks of brokers and machine with the leader's; log a difference once in a term."""
        times, knew, now_ms = group.times, group.times.differ, clock.now_ms()
        group.fold.chronicle.at_ms = now_ms  # time of the events that follow, until frames are folded again
        times.witness_append(group.fold.appended_ms, now_ms)
        times.witness_wall(clock.wall_ms(), now_ms)
        if times.differ and not knew:
            self._warn_of_clocks(times)

    def _warn_of_clocks(self, times: Times) -> None:
        logger.warning(
            "clocks.differ group=%s spread_s=%.0f spread_max_s=%.0f behind_s=%.0f ahead_s=%.0f: nothing is "
            "deleted by age and leases may end late; correct the clocks, then restart the leader",
            self._group,
            times.spread_ms / 1000,
            SPREAD_MAX_MS / 1000,
            -times.earliest(0) / 1000,
            times.latest(0) / 1000,
        )

    def _yield_lead(self) -> None:
        """Remove the leader node if this daemon's session holds it."""
        self.is_leading = False
        self._metrics.remove()
        self._page.remove()
        self._lead.give_up()
