"""The daemon: register this coordinator in ZooKeeper and share the transaction groups with the other live ones.

:mod:`rollbridge_coordinator.state.succession` decides who leads which group, from what each coordinator publishes in
its ephemeral node. A coordinator that Kafka does not answer is no candidate: it deletes its node until Kafka answers
again.

Threads: the main thread runs :meth:`Daemon.run` and sleeps on one event, which watches (session thread), leaderships
(one thread per group) and :meth:`Daemon.stop` set. Metrics and health are asked for from threads of the HTTP server.

:func:`end_on_signals` ends the process cleanly if possible, and within a bound in any case. Nothing is done in a
signal handler. Handlers run in the main thread, between any two of its instructions: one that sets a
:class:`threading.Event` deadlocks if the main thread was just about to wait for that event and holds its lock, and none
runs at all while the main thread is inside a library. So the signal is written to a pipe, which the interpreter does at
once wherever its threads are, and a thread of its own reads the pipe and ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from ipaddress import ip_address
from typing import Final, NoReturn

from rollbridge.calls import Deadline
from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model import paths
from rollbridge.model.metrics import Sample
from rollbridge.model.names import GroupName
from rollbridge.model.records import INTERNAL_BUFFERS, SAVEPOINTS, Coordinator
from rollbridge.serving.endpoint import Endpoint, Probe, ProcessSamples
from rollbridge.version import __version__
from rollbridge.zookeeper.errors import NodeExistsError
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import SessionState, ZooKeeperSession
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.shell.arrival import ATTEMPT_S, Arrival, StoppedWaitingError
from rollbridge_coordinator.shell.interpreter import Hook
from rollbridge_coordinator.shell.leadership import Leadership
from rollbridge_coordinator.shell.page import PageServer
from rollbridge_coordinator.shell.page_actions import PageActions
from rollbridge_coordinator.shell.page_board import PageBoard
from rollbridge_coordinator.shell.page_sources import PageSources, connection_of
from rollbridge_coordinator.shell.presence import CoordinatorRoll, Presence, Vigils, local_address, within
from rollbridge_coordinator.shell.vitals import MetricsBoard, Pulse, ReachWatch, RequestTimes
from rollbridge_coordinator.state.admission import Rules
from rollbridge_coordinator.state.families import (
    FAMILIES,
    ZOOKEEPER_OPERATIONS,
    coordinator_samples,
    without_texts,
    zookeeper_samples,
)
from rollbridge_coordinator.state.metrics import Vitals, faults
from rollbridge_coordinator.state.succession import Candidates

logger = logging.getLogger(__name__)

END_S: Final = 10.0
"""Longest wait, at a stop, for the work in progress; the next leader finishes the rest."""
GROUPS_BYTES_MAX: Final = 500_000
"""Bound for the list of ready groups in a coordinator's node; a ZooKeeper node holds 1 MiB."""
PROBE_S: Final = 1.0
"""Interval between probes of a Kafka that does not answer."""


class Daemon:
    """A coordinator process: its registration, its leaderships, its metrics and health."""

    def __init__(self, settings: CoordinatorSettings, hook: Hook | None = None) -> None:
        """Prepare; ``hook`` is called before and after each effect of a leader."""
        self._settings = settings
        self._hook = hook
        self._requests = RequestTimes(ZOOKEEPER_OPERATIONS)
        self._session = ZooKeeperSession(
            settings.zookeeper,
            root=settings.zookeeper_root,
            session_timeout_s=settings.session_timeout_s,
            name=settings.name,
            security=settings.zookeeper_security,
            observe=self._requests.note,
        )
        self._metadata = Metadata(self._session)
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._roll = CoordinatorRoll(self._session, self._changed.set)
        self._leaderships: dict[GroupName, Leadership] = {}
        self._pulse = Pulse(settings)
        self._board = MetricsBoard() if settings.metrics_endpoint else None
        self._page_board = PageBoard() if settings.page_endpoint else None
        self._page_url = ""
        self._watch = ReachWatch(settings, self._is_leading, self._changed.set)
        self._vigils = Vigils(self._session, settings.name)
        self._presence: Presence | None = None
        self._registered_in: int | None = None
        self._published = b""
        self._groups: list[GroupName] = []
        self._are_groups_read = False
        self._answered = True
        self._arrival = Arrival(settings.wait_at_start_s, self._stopping)
        self.is_fit = True
        """True while Kafka is known to answer; False while that is in doubt."""
        self.is_serving = False
        """True once there may be something to hand over, so that a stop has to be orderly."""

    def run(self) -> bool:
        """Serve until :meth:`stop`, then give up all leaderships and close the session.

        Returns:
            True if all threads have ended. The others wait for servers that do not answer.

        Raises:
            WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
            KafkaUnavailableError, ZooKeeperUnavailableError: no server answered for as long as it was to wait for them.
            LocalEnvironmentError: a configured address cannot be used, for metrics or the page.
        """
        with self._endpoint(), ExitStack() as shown:
            try:
                self._arrive()
                shown.enter_context(self._shown())  # until all has been handed over: others watch it
                self._serve()
            except StoppedWaitingError as ended:
                logger.info("%s", ended)
            finally:
                for leadership in self._leaderships.values():
                    leadership.stop()
                deadline = Deadline(END_S)
                for leadership in self._leaderships.values():
                    leadership.join(deadline.left())
                self._vigils.stop()
                self._session.close()
        return not any(leadership.is_alive() for leadership in self._leaderships.values())

    def _arrive(self) -> None:
        """Reach ZooKeeper and Kafka, however long that takes, and see that they belong together."""
        settings, reach = self._settings, self._arrival.until

        def connect() -> None:
            if not self._session.await_start(ATTEMPT_S):
                raise self._session.unanswered(ATTEMPT_S)

        def lay_out() -> None:
            self._metadata.claim_cluster(cluster)
            self._metadata.lay_out()

        reach(f"ZooKeeper at {settings.zookeeper}", connect)
        admin = TopicAdmin(settings.bootstrap_servers, security=settings.security, timeout_s=ATTEMPT_S)
        try:
            cluster = reach(f"Kafka at {settings.bootstrap_servers}", admin.cluster_id)
        finally:
            admin.close()
        reach(f"ZooKeeper at {settings.zookeeper}", lay_out)

    def _serve(self) -> None:
        self._session.on_state(self._state_changed)
        self._changed.set()
        self.is_serving = True
        logger.info("coordinator %s serves %s", self._settings.name, self._settings.bootstrap_servers)
        while not self._stopping.is_set():
            self._changed.wait(None if self.is_fit else PROBE_S)
            self._changed.clear()
            if not self._stopping.is_set():
                self._look_for_kafka()
                self._refresh()

    def stop(self) -> None:
        """End :meth:`run` and hand the groups over at once; may be called from any thread."""
        self._stopping.set()
        self._changed.set()

    def doubt(self) -> None:
        """Lead nothing until Kafka is known to answer, after a failure that its connection may have caused."""
        self.is_fit = False
        self._changed.set()

    @property
    def candidates(self) -> Candidates:
        """Coordinators known to be alive; may be read from any thread."""
        return self._roll.candidates

    def readiness_changed(self) -> None:
        """Publish anew which groups are ready to be led here; may be called from any thread."""
        self._changed.set()

    def faults(self) -> list[str]:
        """Return what keeps this coordinator from leading, for the health endpoint; may be called from any thread."""
        if self._arrival.waits_for:
            return [self._arrival.waits_for]
        session = self._session.session_id
        vitals = Vitals(
            connected=self._session.is_connected,
            registered=session is not None and session == self._registered_in,
            answered=self.is_fit and self._watch.is_answered,
            unreachable=self._watch.unreachable,
            ended=[str(group) for group, leadership in self._leaderships.copy().items() if not leadership.is_alive()],
        )
        return list(faults(vitals))

    def samples(self) -> Iterator[Sample]:
        """Return all metrics of ours as of the last second; may be called from any thread."""
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
        """Serve metrics and health, and the live page, inside the block, as far as addresses are configured."""
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
    def _served_page(self, board: PageBoard, host: str, port: int) -> Iterator[str]:
        """Serve the live page inside the block; yield where others reach it, empty if nowhere."""
        settings = self._settings
        rules = Rules.of(host, socket.gethostname(), settings.page_url, settings.page_token)
        sources = PageSources(settings, board, self._session, self._known_coordinators, self.faults)
        with closing(sources), PageServer(host, port, rules, sources, PageActions(connection_of(settings))) as server:
            yield settings.page_url or page_url(host, server.port, local_address(settings.zookeeper))

    def _known_coordinators(self) -> dict[str, Coordinator]:
        return {name: record for name, (_, record) in self._roll.records.items()}

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Keep this process visible to the other coordinators inside the block, if they can reach it."""
        given = self._settings.peer_endpoint
        address = given or (local_address(self._settings.zookeeper), 0)
        if not self._settings.is_shown or address[0] is None:
            yield
            return
        try:
            presence = Presence(self._settings.name, address[0], address[1])
        except LocalEnvironmentError as fault:
            if given is not None:
                raise
            logger.warning("others cannot see whether this coordinator lives: %s", fault)
            yield
            return
        with presence:
            self._presence = presence
            yield

    def _is_leading(self) -> bool:
        return any(leadership.is_leading for leadership in self._leaderships.copy().values())

    def _look_for_kafka(self) -> None:
        if self.is_fit:
            return
        self.is_fit = self._pulse.is_there()
        if self.is_fit != self._answered:
            self._answered = self.is_fit
            logger.warning(
                "Kafka %s", "answers: this coordinator may lead" if self.is_fit else "is gone: it leads nothing"
            )

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._changed.set()

    def _refresh(self) -> None:
        """Read who is alive and which groups exist. The watches set here bring the main thread back."""
        try:
            self._register()
            self._roll.read()
            self._vigils.keep(self._roll.records)
            for group in self._read_groups():
                if group not in self._leaderships:
                    leadership = Leadership(
                        self._settings, group, self._session, self, self, self._board, self._hook, self._page_board
                    )
                    leadership.start()
                    self._leaderships[group] = leadership
            for leadership in self._leaderships.values():
                leadership.poke()
        except RollbridgeError as fault:
            logger.warning("could not look up groups, trying again: %s", fault)
            self._stopping.wait(1.0)
            self._changed.set()

    def _read_groups(self) -> list[GroupName]:
        """Return all groups; ZooKeeper is asked only after one was created or removed."""
        if not self._are_groups_read:
            self._are_groups_read = True
            try:
                self._groups = self._metadata.groups(self._groups_changed)
            except BaseException:
                self._are_groups_read = False
                raise
        return self._groups

    def _groups_changed(self) -> None:
        self._are_groups_read = False
        self._changed.set()

    def _register(self) -> None:
        path = paths.coordinator(self._settings.name)
        present = self._session.exists(path)
        if not self.is_fit:
            self._registered_in = None
            if present is not None and present.owner_session_id == self._session.session_id:
                self._session.delete(path)
            return
        session = self._session.session_id
        if present is not None and present.owner_session_id != session:
            # Left by an earlier session of ours, or a namesake's: it goes when that session ends.
            logger.info("coordinator %s is still registered by another session", self._settings.name)
            self._stopping.wait(0.5)
            self._changed.set()
            return
        if present is None and session == self._registered_in and self._presence is not None:
            logger.warning("other coordinators took this one for dead; they shall not judge by a connection any more")
            self._presence = None
        record = self._record()
        if present is None:
            try:
                self._session.create(path, record, ephemeral=True)
            except NodeExistsError:
                self._changed.set()
                return
        elif record != self._published:
            self._session.set(path, record)
        self._published = record
        self._registered_in = session

    def _record(self) -> bytes:
        snapshots = self._settings.leader.snapshots
        return Coordinator(
            snapshots.transaction_buffer_snapshot_max_transaction_count,
            snapshots.transaction_buffer_snapshot_min_time_in_millis,
            address="" if self._presence is None else self._presence.address,
            life="" if self._presence is None else self._presence.life,
            ready=within(GROUPS_BYTES_MAX, (group for group, item in self._leaderships.items() if item.is_ready)),
            lease_ms_max=self._settings.limits.lease_ms_max,
            release=__version__,
            page=self._page_url,
            knows=(SAVEPOINTS, INTERNAL_BUFFERS),
            unreachable=self._watch.unreachable,
        ).to_json()


def page_url(host: str, port: int, local: str | None) -> str:
    """Return where others reach a page that is bound to a host; empty if only this machine does.

    Args:
        host: Address or name.
        port: Port that is listened on.
        local: Address of this machine from which it reaches the others, if that is known.
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
"""Longest time from a signal to the end of the process, whatever server it waits for."""
FLUSH_S: Final = 1.0
"""Longest time to write the last log line; the pipe may have no reader."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def end_on_signals(stop: Callable[[], None], is_serving: Callable[[], bool]) -> None:
    """End the process on SIGTERM or SIGINT from now on. Call this from the main thread.

    Args:
        stop: Makes the main thread end the process cleanly, soon; called from another thread.
        is_serving: Tells if there may be something to hand over; if not, the process ends at once.
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
        leave("asked to end before it served anything")
    stop()
    threading.Event().wait(END_AT_LATEST_S)  # the main thread ends the process meanwhile
    leave(f"a server has kept this coordinator from ending for {END_AT_LATEST_S:g} s; it ends all the same")


def leave(why: str = "") -> NoReturn:
    """End at once, as in a crash, but with exit code 0; the next leader finishes what is in progress."""

    def say() -> None:
        if why:
            logger.warning("%s", why)
        logging.shutdown()

    last_words = threading.Thread(target=say, daemon=True)
    last_words.start()
    last_words.join(FLUSH_S)
    os._exit(0)
