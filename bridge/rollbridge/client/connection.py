"""Connection: begins transactions, joins those of others, and gives access to the admin requests.

One :class:`Bridge` is safe to use from several threads and runs many transactions at once, under its own client name
and as many others as are asked for. It holds one producer, one follower of the commit logs in use, one ZooKeeper
session, and three threads: deliveries, outcomes, housekeeping.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakMethod, WeakSet, finalize

from rollbridge.base.arguments import checked, checked_call, renamed
from rollbridge.base.deadlines import Deadline, Patience, Timeout, answers_within, as_seconds
from rollbridge.base.forks import check, hold, is_gone
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import log_defect
from rollbridge.base.metrics import ClientMetrics, PlainCounts
from rollbridge.buffer.frames import BeginFrame
from rollbridge.buffer.table import State
from rollbridge.cas.dispatch import StreamAppenders
from rollbridge.cas.router import SegmentRouter
from rollbridge.cas.shared_state import Codec, Machine, S, U
from rollbridge.cas.synchronizer import Synchronizer
from rollbridge.cas.writer import CasWriter
from rollbridge.client.admin import Admin, sample_topic
from rollbridge.client.client import BaseClient, Client, FenceMonitor
from rollbridge.client.cooperative import SharedClient
from rollbridge.client.futures import FrameLimits
from rollbridge.client.identity import GroupCounters, own_name
from rollbridge.client.outcomes import OutcomeClient, OutcomeTail
from rollbridge.client.recovery import ClientContext
from rollbridge.client.sender import FrameSender
from rollbridge.client.sessions import ClientSessions, CommitNumbers, CommitsInFlight
from rollbridge.client.transaction import Part
from rollbridge.client.writing import BeginPlan, TransactionContext, Writing
from rollbridge.config import ClientOptions, ConnectionSettings, WriterOptions, load_settings
from rollbridge.consumer.adopted import TopicGuard
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.reader import IsolationLevel, Reader
from rollbridge.consumer.records import Origin
from rollbridge.consumer.transactions import LogStart, TransactionReader
from rollbridge.errors import (
    BackpressureError,
    InvalidRequestError,
    NotFoundError,
    RollbridgeError,
    TransactionClosedError,
    TransactionNotFoundError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.catalog import Catalog
from rollbridge.metadata.records import TransactionRecord
from rollbridge.metadata.session import SessionState, ZooKeeperSession
from rollbridge.metadata.store import NOBODY, Metadata
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import DEFAULT_GROUP, GroupName, SegmentPlaces, StreamName, check_client_name
from rollbridge.stream.positions import StartLike
from rollbridge.writer.sender import PlainSender
from rollbridge.writer.writer import StreamWriter

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 10.0
_UNNAMED: Final = "rollbridge"
"""Client name of settings that give none; :func:`connect` replaces it by one of the process's own."""
_CLOSE_S: Final = 30.0
_LOOK_S: Final = 1.0
"""Seconds after which a wait explains who is missing."""
_JOINED_S: Final = 0.5
_HOUSEKEEPING_S: Final = 0.5
_SHARED_MAX: Final = 100
"""Maximum number of shared clients remembered by a connection; the least recently used is dropped first."""


@checked_call
def connect(
    bootstrap_servers: str | None = None,
    *,
    zookeeper: str | None = None,
    zookeeper_root: str | None = None,
    client_name: str | None = None,
    kafka: Mapping[str, str] | None = None,
    zookeeper_security: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
    options: ClientOptions | None = None,
) -> Bridge:
    """Connect to a cluster. Settings not given come from the environment, a file, or the embedded cluster.

    Args:
        bootstrap_servers: Kafka brokers, ``host:port,...``.
        zookeeper: ZooKeeper servers, ``host:port,...``.
        zookeeper_root: Path of all nodes; ``/rollbridge`` by default.
        client_name: Name of this client in transactions and logs; host and process id by default. Of the clients that
            begin transactions under a given name, the latest fences the others.
        kafka: Security settings under librdkafka's names, such as ``security.protocol``.
        zookeeper_security: The same for ZooKeeper, see :mod:`rollbridge.base.security`.
        config_file: TOML file with the same settings, see :mod:`rollbridge.config`.
        options: Sizes, delays and limits.

    Raises:
        ConfigError: a setting is wrong or missing; all are named.
        KafkaUnavailableError, ZooKeeperUnavailableError: no answer in time.
        InvalidRequestError: the ZooKeeper path belongs to another Kafka cluster.
        InvalidRequestError: the brokers are older than Kafka 4.0, or transactions v2 are not switched on.
    """
    settings = load_settings(
        {
            "bootstrap_servers": bootstrap_servers,
            "zookeeper": zookeeper,
            "zookeeper_root": zookeeper_root,
            "client_name": client_name,
        },
        config_file=None if config_file is None else Path(config_file),
    )
    if kafka or zookeeper_security:
        settings = replace(
            settings,
            kafka={**settings.kafka, **(kafka or {})},
            zookeeper_security={**settings.zookeeper_security, **(zookeeper_security or {})},
        )
    if client_name is None and settings.client_name == _UNNAMED:
        settings = replace(settings, client_name=own_name())
    return Bridge(settings, options)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Threads and connections of a :class:`Bridge`."""

    session: ZooKeeperSession
    kafka: KafkaClient
    outcomes: OutcomeTail
    sender: FrameSender
    housekeeper: Housekeeper
    engines: dict[WriterOptions, PlainSender]

    def close(self) -> None:
        """Send what is queued, and disconnect."""
        with ExitStack() as stack:  # callbacks run in reverse order, each even if others raise
            stack.callback(self.session.close)
            stack.callback(self.kafka.close)
            stack.callback(self.outcomes.close)
            stack.callback(self._close_sender)
            stack.callback(self.housekeeper.close)
            stack.callback(self._close_engines)

    def dropped(self, process: int) -> None:
        """Close the parts of a dropped connection, on a thread of its own: any thread may collect garbage."""
        if process == os.getpid():
            logger.warning("connection.dropped client=%s: it was not closed; closing it now", self.session.name)
            threading.Thread(target=self.close, name="rollbridge-close", daemon=True).start()

    def _close_engines(self) -> None:
        unwritten = sum(engine.close(_CLOSE_S) for engine in list(self.engines.values()))
        if unwritten:
            logger.warning("connection.closed unacknowledged_records=%d", unwritten)

    def _close_sender(self) -> None:
        left = self.sender.close(_CLOSE_S)
        if left:
            logger.warning("connection.closed unacknowledged_frames=%d", left)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of a bound method that does nothing once its object is gone."""
    reference = WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _dropping(counters: GroupCounters) -> Callable[[SessionState], None]:
    """Return a listener that gives up reserved counters when a new session begins."""

    def changed(state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            counters.drop()

    return changed


@checked(leave=("key", "start"))
class Bridge(BaseClient):
    """Connection to a cluster, and the client of its own name. Use it in a ``with`` block, or close it."""

    def __init__(self, settings: ConnectionSettings, options: ClientOptions | None = None) -> None:
        """Connect; applications call :func:`connect`."""
        self.settings: Final = settings
        self.options: Final = options or ClientOptions()
        self._closed = False
        self._kafka = KafkaClient.of(settings)
        deadline = Deadline(self.options.connect_timeout_s)
        self._session = ZooKeeperSession.of(settings, session_timeout_s=self.options.session_timeout_s)
        self._session.start(self.options.connect_timeout_s)
        try:
            metadata = Metadata(self._session)
            with answers_within(deadline.left()):
                metadata.check_cluster(self._kafka.cluster_id(deadline.left()))
                self._open(metadata)
        except BaseException:
            self._session.close()
            self._kafka.close()
            raise

    def _open(self, metadata: Metadata) -> None:
        settings, options = self.settings, self.options
        self._metadata = metadata
        kafka = self._kafka
        self._topics = TopicGuard(metadata, kafka.topics)
        self._housekeeper = Housekeeper(min(_HOUSEKEEPING_S, options.linger_s / 2))
        self._catalog = Catalog(metadata, self._housekeeper.poke)
        self._counters = GroupCounters(metadata.reserve_counters, self._housekeeper.poke)
        self._session.on_state(_dropping(self._counters))
        self._outcomes = OutcomeTail(kafka, changed=self._housekeeper.poke)
        self._sender = FrameSender(kafka, buffer_bytes=options.buffer_bytes, block_s=options.backpressure_timeout_s)
        limits = FrameLimits(
            frame_bytes=options.frame_bytes,
            transaction_bytes=options.transaction_bytes_max,
            record_bytes=options.buffer_bytes // 2,
            compression=int(options.codec),
        )
        in_flight = CommitsInFlight()
        runtime = TransactionContext(
            self._sender,
            self._catalog,
            self._outcomes,
            limits,
            options.commit_timeout_s,
            CommitNumbers(self._counters.next, in_flight),
            options.lease_max,
            OutcomeClient(metadata, settings.client_name),
            connection=self,
        )
        self._cas_channels = StreamAppenders(kafka, settings.client_name, self._catalog, self._session)
        self._cas_writers: list[CasWriter | Synchronizer[Any, Any]] = []
        self._readers: WeakSet[Reader | TransactionReader] = WeakSet()
        name = settings.client_name
        sessions = ClientSessions(
            metadata, name, named=name not in (_UNNAMED, own_name()), changed=self._housekeeper.poke
        )
        self._use(name, ClientContext(options, metadata, self._counters, runtime, in_flight), sessions, runtime)
        self._clients: dict[str, Client] = {}
        self._fence_monitor = FenceMonitor(metadata)
        self._shared: dict[tuple[str, str], SharedClient] = {}
        self._shared_lock = threading.Lock()
        self._engines: dict[WriterOptions, PlainSender] = {}
        self._engines_lock = threading.Lock()
        self.admin = Admin(
            metadata,
            forget=self._catalog.forget,
            offsets=kafka.offsets,
            sample=partial(sample_topic, kafka),
            client_name=settings.client_name,
            timeout_s=options.admin_timeout_s,
            check_open=self._check_open,
        )
        self._stuck: set[bytes] = set()
        hold(self, "_session", "_sender", "_outcomes", "_counters", "_planner", "_cas_channels", "_engines", "_clients")
        # Threads hold none of what leads to this object, so that it can be dropped.
        self._housekeeper.start(
            *map(
                _weakly,
                (
                    self._catalog.refresh,
                    self._look_at_streams,
                    self._counters.refill,
                    self._send_lingering,
                    in_flight.look,
                    self._look_at_sessions,
                    self._look_at_missed,
                    self._look_at_shared,
                    self._look_at_clients,
                    kafka.trim,
                ),
            )
        )
        parts = _Parts(self._session, kafka, self._outcomes, self._sender, self._housekeeper, self._engines)
        self._dropped = finalize(self, parts.dropped, os.getpid())
        self._dropped.atexit = False
        self._parts = parts

    @property
    def client_name(self) -> str:
        """Name under which this client begins transactions."""
        return self.settings.client_name

    @property
    def metrics(self) -> ClientMetrics:
        """Return the counters of this connection as plain numbers; :mod:`rollbridge.metrics` is for Prometheus."""
        plain = PlainCounts()
        for engine in list(self._engines.values()):
            with engine.lock:
                plain.add(engine.counts, engine.retries, engine.bytes)
        under_way = sum(item.counts is not None for item in list(self._outcomes.waiting.values()))
        sender = self._sender
        with sender.lock:
            return self._runtime.counts.read(under_way, sender.counts, sender.retries, sender.bytes, plain)

    @property
    def sender_silence_s(self) -> float:
        """Seconds since frames could last be sent; beyond half a minute something is wrong with this process."""
        return self._sender.silence_s

    def nonblocking_thread(self, thread: int) -> None:
        """Make writes and savepoints on a thread, such as that of an event loop, never wait.

        They raise BackpressureError instead, with nothing written. Calls with a round trip, such as a begin or a
        commit, wait on any thread. A connection has at most one such thread.

        Args:
            thread: Its identifier, of ``threading.get_ident()``.
        """
        self._sender.prompt(thread)

    def client(self, client_name: str) -> Client:
        """Return a client of another name, which begins and ends transactions on this connection.

        It has no thread and no connections of its own, so there may be as many as there are names to serve, such as the
        transactional ids of a gateway. The same one is returned for a name until it is closed.

        Args:
            client_name: Name under which it begins transactions. Of all sessions of a name, wherever, the latest fences
                the others.

        Raises:
            InvalidNameError: not a valid client name.
            InvalidRequestError: the name is this connection's own.
            BackpressureError: there are ``open_transactions_max`` of them; close some.
        """
        self._check_open()
        found = self._clients.get(client_name)
        if found is not None:
            return found
        check_client_name(client_name)
        if client_name == self.client_name:
            raise InvalidRequestError(
                f"{client_name} is the name of this connection itself: begin transactions with it"
            )
        with self._shared_lock:
            if len(self._clients) >= self.options.open_transactions_max and client_name not in self._clients:
                raise BackpressureError(
                    f"this connection serves {self.options.open_transactions_max} client names, as many as "
                    "open_transactions_max allows: close some of them; nothing was written"
                )
            found = self._clients.get(client_name)
            if found is None:
                found = Client(client_name, self._client_context, self._check_open, self._release)
                self._clients[client_name] = found
        return found

    def _release(self, client: Client) -> None:
        """Forget a closed client, and release the waiters for its outcomes."""
        if is_gone(self._session):
            return
        with self._shared_lock:
            if self._clients.get(client.client_name) is client:
                del self._clients[client.client_name]
        waiting = self._outcomes.waiting
        for key, completion in list(waiting.items()):
            if completion.held_by == client.client_name:
                waiting.pop(key, None)
                completion.give_up("its client was closed; ask with another one")

    def join(self, transaction: TransactionId | str, timeout: Timeout = JOIN_TIMEOUT_S) -> Part:
        """Write part of a transaction that another process, or this one, has begun.

        Args:
            transaction: Id of the transaction.
            timeout: How long to wait until the leader has recorded it, which takes up to a second after its begin.

        Raises:
            TransactionNotFoundError: not recorded as open: unknown, too young, or ended. One whose outcome has just
                been reported may be found for a moment more; what is written to it then is part of nothing.
            TransactionClosedError: its end was asked for.
        """
        self._check_open()
        identifier = TransactionId.of_any(transaction)
        with answers_within(as_seconds(timeout, JOIN_TIMEOUT_S)):
            return self._join(identifier, Deadline(as_seconds(timeout, JOIN_TIMEOUT_S)))

    def _join(self, identifier: TransactionId, deadline: Deadline) -> Part:
        record = self._find(identifier, deadline)
        self._outcomes.follow(record.group, min(self.options.connect_timeout_s, max(deadline.left(), _JOINED_S)))
        begin = BeginFrame(record.client_name, record.client_epoch, record.label, record.lease_ms, record.streams)
        plan = BeginPlan.of(record.group, begin, self._catalog)
        completion = self._outcomes.completion(identifier, record.client_epoch)
        part = self._metadata.claim_part(record.group, identifier)
        return Part(Writing(self._runtime, plan, completion, part))

    def share(self, client_name: str, session: str) -> SharedClient:
        """Use a client name together with other processes, to write transactions with them.

        Args:
            client_name: Name that owns the transactions; not the name of a connection, which belongs to one process.
            session: Name of the session, the same in all these processes. They do not fence each other; but once a
                session of another name has begun, this one is over in all processes, and stays so.

        Raises:
            InvalidNameError: not a valid client name.
        """
        self._check_open()
        check_client_name(client_name)
        with self._shared_lock:
            found = self._shared.pop((client_name, session), None)
            if found is None:
                sessions = self._client_context.sessions(client_name, self._housekeeper.poke, session)
                found = SharedClient(client_name, self._client_context, sessions)
            self._shared[client_name, session] = found
            while len(self._shared) > _SHARED_MAX:
                del self._shared[next(iter(self._shared))]
        return found

    def reader(
        self,
        stream: str,
        *,
        start: StartLike = "earliest",
        isolation: IsolationLevel = "read_committed",
        follow: bool = True,
        stalled_s: float = 30.0,
    ) -> Reader:
        """Read all segments of a stream, each key's records in the order in which they were written.

        Args:
            stream: ``scope/stream``, or an adopted topic.
            start: ``"earliest"``, ``"latest"``, a time (``datetime`` or ms since 1970), a DLSN or SN, several of them
                in segments that do not continue each other, or a saved position; or the text of any of these. The
                record at a DLSN is the first one returned; the predecessors of its segment are left out.
            isolation: ``"read_uncommitted"`` also previews the records of open transactions, marked by
                ``record.committed == False``; after the commit they are returned once more. Aborted transactions are
                left out as far as the abort is known when a record is read.
            follow: Continue for ever with new records and epochs, as a Kafka consumer does; otherwise end at the
                present end of the stream.
            stalled_s: Seconds without anything readable before the reader gives up, unless it follows.

        Raises:
            InvalidRequestError, TruncatedError: reading cannot begin at ``start``.
            StreamRecreatedError: the adopted topic was deleted and created again.
            StreamNotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError.
        """
        self._check_open()
        if isolation not in ("read_committed", "read_uncommitted"):
            raise InvalidRequestError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
        stream = self._catalog.name_of(stream)
        name = StreamName.parse(stream)
        preview: PreviewTail | None = None
        if isolation == "read_uncommitted":
            config = self._catalog.view(stream).config
            preview = PreviewTail(self._kafka, config)
        looked = False

        def load(changed: Callable[[], None] | None) -> EpochHistory:
            nonlocal looked
            history = self.admin.history(stream, changed)
            self._topics.check(name, history, changed, look=not looked)
            looked = True
            return history

        try:
            reader = Reader(
                self._kafka,
                self._places_of(name),
                load,
                start=start,
                isolation=isolation,
                follow=follow,
                stalled_s=stalled_s,
                preview=preview,
            )
            self._readers.add(reader)
            return reader
        except BaseException:
            if preview is not None:
                preview.close()
            raise

    def transactions(
        self,
        scope: str,
        *,
        group: str = DEFAULT_GROUP,
        start: LogStart = "earliest",
        follow: bool = True,
        stalled_s: float = 30.0,
    ) -> TransactionReader:
        """Read the committed transactions of a scope's group in the order of their commits, with their records.

        Args:
            scope: The scope, such as ``sales``.
            group: Transaction group within the scope.
            start: ``"earliest"``, ``"latest"``, a saved position or its text, or a time of commit (``datetime`` or ms
                since 1970).
            follow: Continue for ever with later commits, as a Kafka consumer does; otherwise end at the present end of
                the commit log.
            stalled_s: Seconds without anything readable before the reader gives up.

        Raises:
            InvalidNameError, InvalidRequestError, TruncatedError: reading cannot begin at ``start``.
            NotFoundError: there is no such group.
            KafkaUnavailableError, ZooKeeperUnavailableError.
            StreamRecreatedError: from ``records()`` of a transaction: an adopted topic was deleted and created again.
        """
        self._check_open()
        name = GroupName(scope, group)
        if name not in self._metadata.groups():
            raise NotFoundError(f"there is no transaction group {name}: no stream was ever created in it")
        reader = TransactionReader(
            self._kafka,
            name,
            Origin(self._history_of),
            self._places_of,
            self._topics.check_offsets,
            start=start,
            follow=follow,
            stalled_s=stalled_s,
        )
        self._readers.add(reader)
        return reader

    def cas_writer(
        self,
        stream: str,
        *,
        monotonic_ids: bool = False,
        timeout: float | timedelta = 30.0,
        transaction_timeout: float | timedelta = 5.0,
        rising_ids: bool | None = None,
    ) -> CasWriter:
        """Open a conditional writer of a stream; closing the connection closes it, too.

        Writers of one connection to one stream, with the same time-outs, share their rounds, and win in turn.

        Args:
            stream: ``scope/stream``, or an adopted topic.
            monotonic_ids: Refuse a record whose ``transaction_id`` is lower than the last one in the log of its key's
                segment and predecessors, whoever wrote that, as DistributedLog does. The first such write of a segment
                searches back through the log for it; what was truncated does not count.
            timeout: Seconds after which a write that could not be tried gives up.
            transaction_timeout: Seconds after which the brokers abort what this writer leaves open if it dies in the
                middle of a write; until then readers and conditional writers of that segment wait.
            rising_ids: The former name of ``monotonic_ids``.

        Raises:
            InvalidNameError, StreamNotFoundError, InvalidRequestError, ZooKeeperUnavailableError.
        """
        self._check_open()
        writer = CasWriter(
            self._cas_channels,
            StreamName.parse(self._catalog.name_of(stream)),
            timeout=timeout,
            transaction_timeout=transaction_timeout,
            monotonic_ids=renamed("rising_ids", "monotonic_ids", rising_ids, monotonic_ids),
            counts=self._runtime.counts,
            owner=self,
        )
        self._cas_writers = [*(item for item in self._cas_writers if not item.closed), writer]
        return writer

    def synchronizer(
        self,
        stream: str,
        key: bytes,
        initial: S,
        apply: Callable[[S, U], S],
        *,
        states: Codec[S] | None = None,
        updates: Codec[U] | None = None,
        timeout: float | timedelta = 30.0,
        transaction_timeout: float | timedelta = 5.0,
    ) -> Synchronizer[S, U]:
        """Open a state that several processes share, from its newest snapshot and the log; see :class:`Synchronizer`.

        Args:
            stream: ``scope/stream``, or an adopted topic.
            key: Names the state; only synchronizers write under it. Other keys may live in the stream.
            initial: Initial state if nothing has been written; the first writer fixes it for all.
            apply: Makes a state and an update a new state. It must return the same in all processes, for ever, and
                change neither of its arguments.
            states, updates: How they become bytes; without, they are bytes. ``Codec.json()`` is one.
            timeout, transaction_timeout: As for :meth:`cas_writer`.

        Raises:
            InvalidNameError, StreamNotFoundError, InvalidRequestError, ZooKeeperUnavailableError.
            TruncatedError, CorruptDataError, UnavailableError: see :meth:`Synchronizer.fetch`.
        """
        self._check_open()
        synchronizer = Synchronizer(
            self._kafka,
            self._cas_channels,
            SegmentRouter(self._catalog, self._session, StreamName.parse(self._catalog.name_of(stream))),
            key,
            Machine(initial, apply, states, updates),
            partial(self.admin.truncate, stream),
            timeout=timeout,
            transaction_timeout=transaction_timeout,
            owner=self,
        )
        self._cas_writers = [*(item for item in self._cas_writers if not item.closed), synchronizer]
        return synchronizer

    def writer(
        self,
        stream: str,
        *,
        monotonic_ids: bool = False,
        options: WriterOptions | None = None,
        rising_ids: bool | None = None,
    ) -> StreamWriter:
        """Open a writer of plain records: no transactions; scaling is transparent.

        Args:
            stream: ``scope/stream``, or an adopted topic.
            monotonic_ids: Refuse a record whose ``transaction_id`` is lower than the highest before, as DistributedLog
                does.
            options: Sizes, delays and limits; those of this connection by default.
            rising_ids: The former name of ``monotonic_ids``.

        Raises:
            InvalidNameError, StreamNotFoundError: nothing was written.
            KafkaUnavailableError, ZooKeeperUnavailableError: the stream could not be looked up.
        """
        self._check_open()
        stream = self._catalog.name_of(stream)
        wanted = options or WriterOptions(
            batch_bytes=self.options.frame_bytes,
            compression=self.options.compression,
            buffer_bytes=self.options.buffer_bytes,
            block_s=self.options.backpressure_timeout_s,
        )
        with self._engines_lock:
            engine = self._engines.get(wanted)
            if engine is None:
                engine = self._engines[wanted] = PlainSender(self._kafka, wanted, self._catalog)
        monotonic_ids = renamed("rising_ids", "monotonic_ids", rising_ids, monotonic_ids)
        return StreamWriter(engine, engine.channel(stream), monotonic_ids=monotonic_ids, owner=self)

    def close(self) -> None:
        """Send what is queued, for at most 30 s, and disconnect. Open transactions stay open until their lease ends.

        Readers of this connection hand out what they have fetched, and raise InvalidRequestError then.
        """
        if self._closed or is_gone(self._session):
            return
        self._closed = True
        self._dropped.detach()
        for reader in list(self._readers):
            reader.stop()
        with ExitStack() as stack:  # callbacks run in reverse order, each even if others raise
            stack.callback(self._parts.close)
            stack.callback(self._tell_of_open)
            for cas_writer in reversed(self._cas_writers):
                stack.callback(cas_writer.close)

    def _tell_of_open(self) -> None:
        for completion in list(self._outcomes.waiting.values()):
            if not completion.closed:
                logger.warning("transaction.left_open txn=%s", completion.transaction)

    def __repr__(self) -> str:
        return f"<Bridge {self.client_name} to {self.settings.bootstrap_servers}>"

    def _look_at_shared(self) -> None:
        for client in list(self._shared.values()):
            client.look()

    def _look_at_clients(self) -> None:
        """Let those of the other clients that wait for something learn of newer sessions."""
        clients = self._clients
        if clients:
            self._fence_monitor.look(clients, list(self._outcomes.waiting.values()))

    def _check_open(self) -> None:
        check(self._session)
        if self._closed:
            raise InvalidRequestError("this connection is closed; connect again; nothing was written")

    def _history_of(self, stream: StreamName) -> EpochHistory | None:
        """Return the cached epochs of a stream; None if the stream is gone."""
        try:
            return self._catalog.view(str(stream)).history
        except NotFoundError:
            return None

    def _places_of(self, stream: StreamName) -> SegmentPlaces:
        """Return where the segments of a stream lie; those of one that is gone lay in topics of their own."""
        config = self._metadata.stream(stream)
        return SegmentPlaces(stream) if config is None else config.places

    def _find(self, identifier: TransactionId, deadline: Deadline) -> TransactionRecord:
        """Wait for the record of an open transaction and return it."""
        patience = Patience(logger)
        while True:
            changed = threading.Event()
            record = self._metadata.find_transaction(identifier, changed.set)
            if record is not None:
                break
            while not changed.wait(min(deadline.left(), _LOOK_S)):
                why = "it has ended, or it never began" if self._metadata.coordinators() else NOBODY
                if deadline.passed():
                    raise TransactionNotFoundError(
                        f"no open transaction {identifier} is recorded after {deadline.timeout_s:g} s: {why}; nothing "
                        "was written"
                    )
                patience.tell(f"find open transaction {identifier}", why)
        if record.state != State.OPEN.value:
            raise TransactionClosedError(
                f"transaction {identifier} is {record.state}; nothing can be written to it any more",
                transaction=str(identifier),
            )
        return record

    def _send_lingering(self) -> None:
        """Send the records of idle open transactions. Called on the housekeeping thread."""
        before = time.monotonic() - self.options.linger_s
        waiting = dict(self._outcomes.waiting)
        self._stuck &= waiting.keys()
        for key, completion in waiting.items():
            try:
                for writer in completion.writers:
                    writer.cut_older(before)
            except RollbridgeError as fault:
                # This concerns that transaction alone, as when its stream was deleted and created again; its next write
                # or its commit reports it.
                if key not in self._stuck:
                    logger.warning("transaction.send_failed txn=%s: %s", TransactionId.from_bytes(key), fault)
                self._stuck.add(key)

    def _look_at_streams(self) -> None:
        """Let plain writers follow what the catalog has learned; the fault of one does not affect the others."""
        for engine in list(self._engines.values()):
            try:
                engine.look()
            except RollbridgeError as fault:
                logger.warning("writer.refresh_failed: %s", fault)


class Housekeeper:
    """Thread that runs chores every ``interval_s`` seconds, and soon after :meth:`poke`.

    Chores are what must not be done on the way of a record. They run one after the other on one thread, so a slow
    one delays the others.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._chores: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbridge-housekeeping", daemon=True)

    def start(self, *chores: Callable[[], None]) -> None:
        """Start the thread; a chore that raises is logged and tried again next time."""
        self._chores.extend(chores)
        self._thread.start()

    def poke(self) -> None:
        """Run the chores soon. May be called from anywhere."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the chore that is running, if that ends soon."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            for chore in self._chores:
                if self._stopping.is_set():
                    return
                try:
                    chore()
                except RollbridgeError as fault:  # such as a node that holds garbage
                    logger.warning("housekeeping.failed: retrying: %s", fault)
                except Exception:
                    log_defect(logger, "housekeeping.failed: retrying")
