"""The daemon: register this coordinator in ZooKeeper and share the transaction groups with the other live ones.

:mod:`rollbridge_coordinator.daemon.succession` decides who leads which group, from what each coordinator publishes in
its ephemeral node. A coordinator that Kafka does not answer is no candidate: it deletes its node until Kafka answers
again.

Threads: the main thread runs :meth:`Daemon.run` and sleeps on one event, which watches (session thread), leaderships
(one thread per group) and :meth:`Daemon.stop` set. Threads of the HTTP server read metrics and health.

:func:`end_on_signals` ends the process cleanly if possible, and within a bound in any case. Signal handlers do nothing.
Handlers run in the main thread, between any two of its instructions: one that sets a :class:`threading.Event` deadlocks
if the main thread was just about to wait for that event and holds its lock, and none runs while the main thread is
inside a library. So the signal is written to a pipe, which the interpreter does at once in any case, and a thread of
its own reads the pipe and ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from ipaddress import ip_address
from typing import Final, NoReturn, Protocol, TypeVar

from rollbridge.base.deadlines import TELL_S, Backoff, Deadline
from rollbridge.base.metrics import Sample
from rollbridge.errors import (
    ZOOKEEPER_UNTRUSTED,
    LocalEnvironmentError,
    RollbridgeError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.lease import Lease, LeaseEvent
from rollbridge.metadata import paths
from rollbridge.metadata.records import INTERNAL_BUFFERS, SAVEPOINTS, Coordinator
from rollbridge.metadata.session import SessionState, WatchedRead, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.metrics import ProcessSamples
from rollbridge.observe.http_service import Endpoint, Probe
from rollbridge.stream.names import GroupName
from rollbridge.version import __version__
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.interpreter import Hook
from rollbridge_coordinator.core.metric_samples import (
    FAMILIES,
    ZOOKEEPER_OPERATIONS,
    coordinator_samples,
    without_texts,
    zookeeper_samples,
)
from rollbridge_coordinator.core.metrics import ProcessHealth, faults
from rollbridge_coordinator.daemon.health import KafkaProbe, MetricsBoard, ReachWatch, RequestTimes
from rollbridge_coordinator.daemon.leadership import Leadership
from rollbridge_coordinator.daemon.liveness import CoordinatorRegistry, Liveness, PeerWatches, local_address, within
from rollbridge_coordinator.daemon.succession import Candidates
from rollbridge_coordinator.page.admission import Rules
from rollbridge_coordinator.page.cache import PageCache
from rollbridge_coordinator.page.server import PageActions, PageServer
from rollbridge_coordinator.page.sources import PageSources, connection_of

# Waiting at the start for servers that do not answer yet.
#
# After a power failure, say, coordinators start before their servers answer. One that ended then would be restarted
# again and again, ever later, and be the last to serve. So it waits, as other daemons of Kafka do, and reports that: in
# the log at once and then each minute, and at ``/healthz``. Permanent errors end it at once: wrong credentials, another
# cluster, a setting.


logger = logging.getLogger(__name__)

T = TypeVar("T")

FOR_EVER: Final = -1.0
ATTEMPT_S: Final = 10.0
"""Longest time of one attempt to reach a server."""
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 5.0
"""Longest pause between two attempts, so that a server that has come back is used soon."""
TOLD_S: Final = 60.0
"""Interval between log lines that report a wait."""


class Arrival:
    """Attempts to reach servers, repeated until they answer, the time is up, or the process is to end.

    Attributes:
        waits_for: The present wait, in half a sentence; empty if none. May be read from any thread.
    """

    def __init__(self, wait_s: float, stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """Wait for at most ``wait_s`` seconds from now, without limit if negative, unless ``stopping`` is set."""
        self._clock = clock
        self._began_s = clock()
        self._wait_s = wait_s
        self._stopping = stopping
        self.waits_for = ""

    def until(self, what: str, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt`` once it succeeds.

        Args:
            what: The servers, and their addresses.
            attempt: Tries to reach them, within :data:`ATTEMPT_S`, and may be repeated.

        Raises:
            UnavailableError, UnknownWriteError: that of the last attempt, once the time is up.
            CancelledError: this process is to end; nothing was written.

        Raises also what ``attempt`` does, if that is another error.
        """
        backoff, told_s = Backoff(PAUSE_FIRST_S, PAUSE_MAX_S), -TOLD_S
        begun_s = self._clock()
        while True:
            try:
                found = attempt()
            except (UnavailableError, UnknownWriteError) as fault:
                now_s = self._clock()
                if fault.code == ZOOKEEPER_UNTRUSTED or 0 <= self._wait_s <= now_s - self._began_s:
                    raise
                self.waits_for = f"waits for {what} since {now_s - begun_s:.0f} s: {fault}"
                if now_s - begun_s - told_s >= TOLD_S:
                    told_s = now_s - begun_s
                    logger.warning("coordinator.waiting: %s (wait_at_start_s bounds this)", self.waits_for)
            else:
                if self.waits_for:
                    logger.warning('coordinator.connected to="%s" waited_s=%.0f', what, self._clock() - begun_s)
                self.waits_for = ""
                return found
            if self._stopping.wait(backoff.grow()):
                raise CancelledError(f"asked to end while it waited for {what}")


END_S: Final = 10.0
"""Longest wait, at a stop, for the work in progress; the next leader finishes the rest."""
GROUPS_BYTES_MAX: Final = 500_000
"""Bound for the list of ready groups in a coordinator's node; a ZooKeeper node holds 1 MiB."""
PROBE_S: Final = 1.0
"""Interval between probes of a Kafka that does not answer."""


NAMESAKE_LOOKS: Final = 30
"""Looks, two each second, after which it is told that a name is taken: a former session has ended by then."""


class Daemon:
    """A coordinator process: its registration, its leaderships, its metrics and health."""

    def __init__(self, settings: CoordinatorSettings, hook: Hook | None = None) -> None:
        """Prepare; ``hook`` is called before and after each effect of a leader."""
        self._settings = settings
        self._hook = hook
        self._requests = RequestTimes(ZOOKEEPER_OPERATIONS)
        self._session = ZooKeeperSession.of(
            settings.connection,
            name=settings.name,
            session_timeout_s=settings.session_timeout_s,
            observe=self._requests.note,
        )
        self._kafka = KafkaClient(settings.connection.bootstrap_servers, security=settings.connection.kafka)
        self._metadata = Metadata(self._session)
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._roll = CoordinatorRegistry(self._session, self._changed.set)
        self._leaderships: dict[GroupName, Leadership] = {}
        self._kafka_probe = KafkaProbe(settings, self._kafka)
        self._board = MetricsBoard() if settings.metrics_endpoint else None
        self._page_board = PageCache() if settings.page_endpoint else None
        self._page_url = ""
        self._watch = ReachWatch(self._kafka, self._is_leading, self._changed.set)
        self._peer_watches = PeerWatches(self._session, settings.name)
        self._liveness: Liveness | None = None
        self._place = Lease(self._session, paths.coordinator(settings.name), changed=self._changed.set)
        self._published = b""
        self._elsewhere = 0
        self._groups = WatchedRead(self._metadata.groups, self._changed.set)
        self._answered = True
        self._arrival = Arrival(settings.wait_at_start_s, self._stopping)
        self.is_fit = True
        """True while Kafka is known to answer; False while that is in doubt."""
        self.is_serving = False
        """True once there may be groups to hand over, so that a stop has to be orderly."""

    def run(self) -> bool:
        """Serve until :meth:`stop`, then give up all leaderships and close the session.

        Returns:
            True if all threads have ended. The others wait for servers that do not answer.

        Raises:
            InvalidRequestError: the ZooKeeper path belongs to another Kafka cluster.
            KafkaUnavailableError, ZooKeeperUnavailableError: no server answered within the time to wait.
            LocalEnvironmentError: a configured address cannot be used, for metrics or the page.
        """
        with self._endpoint(), ExitStack() as shown:
            try:
                self._arrive()
                shown.enter_context(self._shown())  # until all has been handed over: others watch it
                self._serve()
            except CancelledError as ended:
                logger.info("coordinator.stopped: %s", ended)
            finally:
                led = sum(leadership.is_leading for leadership in self._leaderships.values())
                logger.info("coordinator.stopping coordinator=%s groups_led=%d", self._settings.name, led)
                for leadership in self._leaderships.values():
                    leadership.stop()
                deadline = Deadline(END_S)
                for leadership in self._leaderships.values():
                    leadership.join(deadline.left())
                self._peer_watches.stop()
                self._session.close()
                self._kafka.close()
        is_ended = not any(leadership.is_alive() for leadership in self._leaderships.values())
        logger.info("coordinator.stopped coordinator=%s handed_over=%s", self._settings.name, is_ended)
        return is_ended

    def _arrive(self) -> None:
        """Reach ZooKeeper and Kafka, without a limit of its own, and check that they belong together."""
        servers, reach = self._settings.connection, self._arrival.until

        def connect() -> None:
            if not self._session.await_start(ATTEMPT_S):
                raise self._session.unanswered(ATTEMPT_S)

        def lay_out() -> None:
            self._metadata.claim_cluster(cluster)
            self._metadata.lay_out()

        reach(f"ZooKeeper at {servers.zookeeper}", connect)
        cluster = reach(f"Kafka at {servers.bootstrap_servers}", self._kafka.topics.within(ATTEMPT_S).cluster_id)
        reach(f"ZooKeeper at {servers.zookeeper}", lay_out)

    def _serve(self) -> None:
        self._session.on_state(self._state_changed)
        self._changed.set()
        self.is_serving = True
        servers = self._settings.connection.bootstrap_servers
        logger.info("coordinator.ready coordinator=%s kafka=%s", self._settings.name, servers)
        told: dict[GroupName, float] = {}
        while not self._stopping.is_set():
            has_changed = self._changed.wait(PROBE_S)
            tell_waits(self._leaderships, told)
            if has_changed:
                self._changed.clear()
            if (has_changed or not self.is_fit) and not self._stopping.is_set():
                self._look_for_kafka()
                self._refresh()

    def stop(self) -> None:
        """End :meth:`run` and hand the groups over at once; may be called from any thread."""
        self._stopping.set()
        self._changed.set()

    def doubt(self) -> None:
        """Lead no group until Kafka is known to answer, after a failure that its connection may have caused."""
        self.is_fit = False
        self._changed.set()

    @property
    def candidates(self) -> Candidates:
        """Coordinators known to be alive; may be read from any thread."""
        return self._roll.candidates

    def readiness_changed(self) -> None:
        """Publish again which groups are ready to be led here; may be called from any thread."""
        self._changed.set()

    def faults(self) -> list[str]:
        """Return the reasons that keep this coordinator from leading; may be called from any thread."""
        if self._arrival.waits_for:
            return [self._arrival.waits_for]
        process_health = ProcessHealth(
            connected=self._session.is_connected,
            registered=self._place.is_held,
            answered=self.is_fit and self._watch.is_answered,
            unreachable=self._watch.unreachable,
            ended=[str(group) for group, leadership in self._leaderships.copy().items() if not leadership.is_alive()],
        )
        return list(faults(process_health))

    def samples(self) -> Iterator[Sample]:
        """Return all own metrics as of the last second; may be called from any thread."""
        leaderships = list(self._leaderships.copy().values())
        yield from coordinator_samples(
            self._settings.name,
            version("rollbridge"),
            healthy=not self.faults(),
            groups=len(leaderships),
            led=sum(leadership.is_leading for leadership in leaderships),
            given_up=sum(leadership.given_up for leadership in leaderships),
        )
        yield from zookeeper_samples(
            connected=self._session.is_connected,
            interruptions=self._session.interruptions,
            requests=self._requests.durations(),
        )
        if self._board is not None:
            samples = self._board.samples()
            yield from samples if self._settings.metrics_texts else without_texts(samples)

    @contextmanager
    def _endpoint(self) -> Iterator[None]:
        """Serve metrics, health and the live page inside the block, as far as addresses are configured."""
        metrics, page = self._settings.metrics_endpoint, self._settings.page_endpoint
        with ExitStack() as serving:
            if metrics is not None:
                serving.enter_context(Endpoint(*metrics, ProcessSamples(self.samples, FAMILIES), self.faults))
            if self._settings.probe_socket:
                serving.enter_context(Probe(self._settings.probe_socket, self.faults))
            if page is not None and self._page_board is not None:
                self._page_url = serving.enter_context(self._served_page(self._page_board, *page))
            serving.enter_context(self._watch)
            yield

    @contextmanager
    def _served_page(self, board: PageCache, host: str, port: int) -> Iterator[str]:
        """Serve the live page inside the block; yield its URL for others, empty if there is none."""
        settings = self._settings
        rules = Rules.of(host, socket.gethostname(), settings.page_url, settings.page_token)
        sources = PageSources(settings, self._kafka, board, self._session, self._known_coordinators, self.faults)
        with closing(sources), PageServer(host, port, rules, sources, PageActions(connection_of(settings))) as server:
            yield settings.page_url or page_url(host, server.port, local_address(settings.connection.zookeeper))

    def _known_coordinators(self) -> dict[str, Coordinator]:
        return {name: record for name, (_, record) in self._roll.records.items()}

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Keep this process visible to the other coordinators inside the block, if they can reach it."""
        given = self._settings.peer_endpoint
        address = given or (local_address(self._settings.connection.zookeeper), 0)
        if not self._settings.is_shown or address[0] is None:
            yield
            return
        try:
            liveness = Liveness(self._settings.name, address[0], address[1])
        except LocalEnvironmentError as fault:
            if given is not None:
                raise
            logger.warning('liveness.off reason="%s"', fault)
            yield
            return
        with liveness:
            self._liveness = liveness
            yield

    def _is_leading(self) -> bool:
        return any(leadership.is_leading for leadership in self._leaderships.copy().values())

    def _look_for_kafka(self) -> None:
        if self.is_fit:
            return
        self.is_fit = self._kafka_probe.is_there()
        if self.is_fit != self._answered:
            self._answered = self.is_fit
            logger.warning("kafka.%s", "reachable" if self.is_fit else "unreachable: this coordinator leads no group")

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._changed.set()

    def _refresh(self) -> None:
        """Read the live coordinators and the groups. The watches set here wake the main thread."""
        try:
            self._register()
            self._roll.read()
            self._peer_watches.keep(self._roll.records)
            for group in self._groups.get():
                if group not in self._leaderships:
                    leadership = Leadership(
                        self._settings,
                        self._kafka,
                        group,
                        self._session,
                        self,
                        self,
                        self._board,
                        self._hook,
                        self._page_board,
                    )
                    leadership.start()
                    self._leaderships[group] = leadership
            for leadership in self._leaderships.values():
                leadership.poke()
        except RollbridgeError as fault:
            logger.warning('groups.read-failed reason="%s"', fault)
            self._stopping.wait(1.0)
            self._changed.set()

    def _register(self) -> None:
        place = self._place
        place.look()
        is_removed = place.tenure.cause is LeaseEvent.GONE
        if not self.is_fit or not place.is_held:
            place.give_up()
        if not self.is_fit:
            return
        if is_removed and self._liveness is not None:
            logger.warning(
                "liveness.off coordinator=%s: peers declared it dead; off until restart", self._settings.name
            )
            self._liveness = None
        record = self._record()
        if place.is_held and record == self._published:
            return
        if place.renew(record) if place.is_held else place.take(record) is None:
            self._published, self._elsewhere = record, 0
            return
        # Left by an earlier session of ours, or a namesake's: it goes when that session ends.
        self._elsewhere += 1
        if self._elsewhere == NAMESAKE_LOOKS:
            logger.warning(
                "coordinator.registered-elsewhere coordinator=%s: another process is registered under this name, so "
                "this one leads nothing until that ends; give each coordinator a name of its own",
                self._settings.name,
            )
        self._stopping.wait(0.5)
        self._changed.set()

    def _record(self) -> bytes:
        snapshots = self._settings.leader.snapshots
        return Coordinator(
            snapshots.transaction_buffer_snapshot_max_transaction_count,
            snapshots.transaction_buffer_snapshot_min_time_in_millis,
            address="" if self._liveness is None else self._liveness.address,
            life="" if self._liveness is None else self._liveness.life,
            ready=within(GROUPS_BYTES_MAX, (group for group, item in self._leaderships.items() if item.is_ready)),
            lease_ms_max=self._settings.limits.lease_ms_max,
            release=__version__,
            page=self._page_url,
            knows=(SAVEPOINTS, INTERNAL_BUFFERS),
            unreachable=self._watch.unreachable,
        ).to_json()


def page_url(host: str, port: int, local: str | None) -> str:
    """Return the URL of a page that is bound to a host; empty if only this machine reaches it.

    Args:
        host: Address or name.
        local: Address of this machine from which it reaches the others, if known.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return "" if host == "localhost" else f"http://{host}:{port}/"
    if address.is_loopback or (address.is_unspecified and local is None):
        return ""
    reached = str(local) if address.is_unspecified else host
    return f"http://[{reached}]:{port}/" if ":" in reached else f"http://{reached}:{port}/"


# Termination by signals


END_AT_LATEST_S: Final = 20.0
"""Longest time from a signal to the end of the process, even if a server does not answer."""
FLUSH_S: Final = 1.0
"""Longest time to write the last log line; the pipe may have no reader."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def end_on_signals(stop: Callable[[], None], is_serving: Callable[[], bool]) -> None:
    """End the process on SIGTERM or SIGINT from now on. Call this from the main thread.

    Args:
        stop: Makes the main thread end the process cleanly, soon; called from another thread.
        is_serving: Tells if there may be groups to hand over; if not, the process ends at once.
    """
    asked, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(asked, stop, is_serving), name="ending", daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def _wait(asked: int, stop: Callable[[], None], is_serving: Callable[[], bool]) -> None:
    """Wait for a signal, then make the process end within :data:`END_AT_LATEST_S`."""
    while not set(os.read(asked, 64)) & set(SIGNALS):
        """Skip the numbers of other signals with a Python handler: they reach the pipe as well."""
    if not is_serving():
        leave("asked to stop before it served a group")
    stop()
    threading.Event().wait(END_AT_LATEST_S)  # the main thread ends the process meanwhile
    leave(f"a server has delayed the stop of this coordinator for {END_AT_LATEST_S:g} s; it stops now")


class WaitingLeader(Protocol):
    """Leader or standby of a group."""

    def waiting(self) -> tuple[str, float] | None:
        """Return the effect under way, and for how many seconds."""


def tell_waits(leaderships: Mapping[GroupName, WaitingLeader], told: dict[GroupName, float]) -> None:
    """Log the groups whose leader waits for one effect: after 2 s, and each time that it has taken twice as long.

    Args:
        told: For each group, the seconds from which on it is due again.
    """
    for group, leadership in leaderships.items():
        effect, waited_s = leadership.waiting() or ("", 0.0)
        if waited_s < TELL_S:
            told.pop(group, None)
        elif waited_s >= told.get(group, TELL_S):
            told[group] = 2 * waited_s
            logger.info("leader.waiting group=%s effect=%s waited_s=%.0f", group, effect, waited_s)


def leave(why: str = "") -> NoReturn:
    """End at once, as in a crash, but with exit code 0; the next leader finishes what is in progress."""

    def say() -> None:
        if why:
            logger.warning("coordinator.stopped: %s", why)
        logging.shutdown()

    last_words = threading.Thread(target=say, daemon=True)
    last_words.start()
    last_words.join(FLUSH_S)
    os._exit(0)
