"""A gateway's listeners, and what all of its connections share."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, ParamSpec, TypeVar

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.logs import limited, log_defect
from rollbridge.base.metrics import Sample
from rollbridge.client.connection import Bridge
from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.metadata.gateways import GatewayRecord, LackingRight
from rollbridge.observe.http_service import network_of
from rollbridge.version import __version__
from rollbridge_gateway.producer.expiration import ALL_BUCKETS, IdExpiration
from rollbridge_gateway.producer.ids import Register
from rollbridge_gateway.producer.procedures import Incoming
from rollbridge_gateway.producer.writes import LeaderThreads, Producers
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.protocol.wire import LENGTH_BYTES, Head, MalformedError
from rollbridge_gateway.server import metrics
from rollbridge_gateway.server.cluster import Departure, Departures, Gateway, View, chosen
from rollbridge_gateway.server.connection import ByteBudget, ClientConnection, serve
from rollbridge_gateway.server.context import Homes, Listers
from rollbridge_gateway.server.framing import FIRST_S, Closing, MessageStream, Pace
from rollbridge_gateway.server.handlers import RequestHandler
from rollbridge_gateway.server.metrics import Counts
from rollbridge_gateway.server.relay import BrokerGoneError, Brokers, BrokerWatch
from rollbridge_gateway.server.topics import REFRESH_S, Topics
from rollbridge_gateway.settings import GatewaySettings, split_address

# TLS handshakes that fail: the client is told why, by an alert, and so is the log.
#
# asyncio and uvloop close a connection whose handshake fails at once, and what OpenSSL has for the client with it. Here
# the failure looks as if more had to come, so the loop sends what there is; the client's end, or the time for
# handshakes, closes the connection.


_tls_logger = limited(logging.getLogger(__name__))


def telling(failed: Callable[[], None]) -> type[ssl.SSLObject]:
    """Return the class of a context's connections (``SSLContext.sslobject_class``) that tell why a handshake fails.

    Args:
        failed: Called after each handshake that has failed.
    """

    class Telling(ssl.SSLObject):
        _fault: ssl.SSLError | None = None

        def do_handshake(self) -> None:
            if self._fault is not None:
                raise self._fault
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise
            except ssl.SSLError as fault:
                self._fault = fault
                reason = getattr(fault, "verify_message", None) or fault.reason or fault
                _tls_logger.warning(
                    "tls.refused reason=%r: a client's handshake has failed; it was told so", str(reason)
                )
                failed()
                raise ssl.SSLWantReadError from fault

    return Telling


logger = logging.getLogger(__name__)
_full = limited(logging.getLogger(f"{__name__}.full"))
_unlisted = limited(logging.getLogger(f"{__name__}.unlisted"))

P = ParamSpec("P")
T = TypeVar("T")

SILENCE_S: Final = 30.0
"""Time without a turn of its sender after which a gateway is not healthy."""
LOOK_S: Final = 5.0
"""Interval between looks at brokers and gateways; a change of gateways is heard of at once."""
MEASURE_S: Final = 0.25
"""Between two looks at how late the event loop comes to what is due."""
RIGHTS_S: Final = 60.0
"""Between two looks at this gateway's own rights."""
RIGHTS_MAX: Final = 1_000
"""Topics of which it looks at its rights."""
ASKED_MAX: Final = 100_000
"""Client ids of which it is remembered what they have asked Metadata about."""
HOMES_MAX: Final = 100
"""Most topics among which a place is searched that a client may write to."""
WATCHES: Final = 4
"""Checks of connections within the time for a first request."""
WRITERS: Final = 8
"""Threads that write what may take long: large or compressed batches, or for which there is no room at once."""
_BACKLOG: Final = 512


class Server:
    """One gateway inside an event loop."""

    def __init__(
        self, settings: GatewaySettings, bridge: Bridge, register_of: Callable[[Callable[[str], None]], Register]
    ):
        """Prepare; :meth:`run` listens. ``register_of`` is given what to tell of ids that others want."""
        self.settings = settings
        self.bridge = bridge
        self.counts = Counts()
        self._watch = BrokerWatch(settings.connection)
        self.topics = Topics(bridge, lambda names: self._watch.look(self.brokers, names))
        self.upstream_tls = self._watch.tls_context()
        self.needs_login = self._watch.security.uses_sasl
        self.rights_s = settings.rights_s
        self.partitions = settings.partitions
        self.brokers = Brokers({}, {})
        self.broker_hosts: frozenset[str] = frozenset()
        self._writers = ThreadPoolExecutor(WRITERS, "writer")
        self._workers = ThreadPoolExecutor(settings.workers, "worker")
        self._leaders = LeaderThreads(settings.workers, lambda stream: self.topics.known.group_of.get(stream, ""))
        self._lease = ThreadPoolExecutor(1, "lease")  # alone: all workers may be waiting for ZooKeeper
        self.listers = Listers()
        self.register = register_of(lambda name: self.producers.wanted(name))
        self._rest = IdExpiration.of(settings.expiration_days)
        self.producers = Producers(
            bridge, self.register, self._writers, self._leaders, self._workers, settings.ids_max, self._rest.fresh_ms
        )
        self.coming = ByteBudget(settings.under_way_bytes_max // 2)
        self.room = ByteBudget(settings.under_way_bytes_max)
        self.answers = ByteBudget(settings.under_way_bytes_max)
        self._ending: set[asyncio.Task[None]] = set()
        self._lines: dict[ClientConnection, RequestHandler] = {}
        self._listeners: dict[int | None, asyncio.Server] = {}
        self._ports: dict[int, int] = {}
        self._gateways: Sequence[Gateway] = ()
        self._loop = asyncio.get_running_loop()
        self._departures = Departures()
        self._asked: dict[str | None, str] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._of_network: Counter[str] = Counter()
        self._per_ip_max = settings.per_ip_max
        self._ended: list[str] = []
        self._changed = asyncio.Event()
        self._next_broker = itertools.count()
        self._since_ms = wall_ms()
        until = settings.certificate_until()
        self._certificate_until_ms = 0 if until is None else int(until.timestamp() * 1000)
        self._lacking: tuple[LackingRight, ...] = ()
        self._next_rights_s = 0.0
        self.port = 0
        self.is_ready = False

    @property
    def lease_max_ms(self) -> int:
        """Longest ``transaction.timeout.ms``."""
        return int(self.bridge.options.lease_max.total_seconds() * 1000)

    async def blocking(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do what waits, on a thread."""
        return await self._loop.run_in_executor(self._workers, partial(work, *args, **options))

    # What connections ask

    def view(self) -> View:
        """Return what clients are told of the cluster."""
        virtual = dict.fromkeys(self.topics.known.virtual, self.partitions)
        return View(self._gateways or (self.me(),), virtual, frozenset(self.topics.known.logs.values()))

    def is_chosen(self, client_id: str | None) -> bool:
        """Return whether this is the gateway that a client is told to come to."""
        return chosen(client_id or "", self._gateways or (self.me(),)).name == self.settings.name

    def departures(self) -> Sequence[Departure]:
        """Return what gateways have gone lately."""
        return self._departures.recent(self.now_s())

    def now_s(self) -> float:
        """Return the time by the clock of departures."""
        return self._loop.time()

    def me(self) -> Gateway:
        """Return this gateway, as others are told of it."""
        host = self.settings.advertise or split_address(self.settings.listen)[0]
        return Gateway(self.settings.name, host, self.port, tuple(sorted(self._ports.items())))

    def address_of(self, broker: int | None) -> tuple[str, int]:
        """Return the address of a broker; of any one in turn for None, or if there is none of that id any more."""
        addresses = self.brokers.addresses
        if broker is not None and broker in addresses:
            return addresses[broker]
        return list(addresses.values())[next(self._next_broker) % len(addresses)]

    async def fresh_topics(self, age_s: float = REFRESH_S) -> None:
        """Have the list of streams as of a few seconds ago; an older one if ZooKeeper does not answer."""
        if not self.topics.is_fresh(age_s):
            try:
                await self.blocking(self.topics.read, age_s)
            except RollbridgeError as fault:
                _unlisted.warning("streams.unlisted: %s", fault)

    def homes(self, client_id: str | None) -> Homes:
        """Return topics with one of whose streams a transaction may begin that has offsets first.

        The first one is that about which the client has asked, as producers do before they write. It is a guess, since
        many may have the same client id, such as their library's. If there is but one group, any will do.
        """
        asked, known = self._asked.get(client_id), self.topics.known
        first = [asked] if asked is not None and asked in known.streams else []
        return Homes([*first, *itertools.islice(known.streams, HOMES_MAX)], are_sure=len(known.groups) == 1)

    def note_asked(self, client_id: str | None, topics: Iterable[str]) -> None:
        """Note that a client has asked about topics by their names; the last one counts."""
        wanted = [topic for topic in topics if topic in self.topics.known.streams]
        if not wanted:
            return
        self._asked.pop(client_id, None)
        self._asked[client_id] = wanted[0]
        while len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]

    def count_refusal(self, api: int, code: str) -> None:
        """Count an error that was told to a producer, by its request and Kafka's code."""
        self.counts.errors[_name_of(api), code.upper()] += 1

    def count_written(self, batches: Sequence[Incoming], faults: Sequence[Exception | None]) -> None:
        """Count batches that were taken."""
        for item, fault in zip(batches, faults, strict=True):
            if fault is None:
                self.counts.records += item.records
                self.counts.bytes += len(item.batch.batch)

    def record(self) -> GatewayRecord:
        """Return what this gateway says of itself in ZooKeeper."""
        me = self.me()
        return GatewayRecord(
            name=me.name,
            host=me.host,
            port=me.port,
            ports=me.ports,
            release=__version__,
            cluster_id=self.brokers.cluster_id,
            metrics=self.settings.metrics,
            encrypted=bool(self.settings.certificate),
            certificate_until_ms=self._certificate_until_ms,
            since_ms=self._since_ms,
            lacking=self._lacking,
            faults=tuple(self.faults()) if self.is_ready else (),
        )

    # Life

    async def run(self, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serve until ``stopping`` is set.

        Raises:
            LocalEnvironmentError: the address cannot be listened at.
            KafkaUnavailableError, ZooKeeperUnavailableError: no server answers at the start.
        """
        await self._look(first=True)
        await self._listen(None)
        for broker in sorted(self.brokers.addresses):
            await self._listen(broker)
        await self.blocking(self.topics.read)
        await self.blocking(self.topics.look)
        await self._look_at_rights()
        await self.blocking(self.register.turn)
        await self.blocking(self.register.announce, self.record())
        await self._read_gateways()
        tasks = [
            asyncio.create_task(self._keep_looking(), name="looking"),
            asyncio.create_task(self._keep_confirming(), name="confirming"),
            asyncio.create_task(self._keep_measuring(), name="measuring"),
            asyncio.create_task(self._keep_watching(), name="watching"),
            asyncio.create_task(self._keep_forgetting(), name="forgetting"),
        ]
        for task in tasks:
            task.add_done_callback(self._tell_of_end)
        try:
            self.is_ready = True
            ready()
            await stopping.wait()
        finally:
            self.is_ready = False
            for task in tasks:
                task.cancel()
            await self._stop()

    def _tell_of_end(self, task: asyncio.Task[None]) -> None:
        """Report the end of a task that should run for ever; the gateway continues without it, and is not healthy."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            log_defect(logger, "task.ended task=%s", task.get_name(), fault=fault)
            self._ended.append(task.get_name())

    async def _stop(self) -> None:
        try:
            await self.blocking(self.register.withdraw)
        except RollbridgeError as fault:
            logger.info("gateway.withdraw_failed: %s", fault)
        for listener in self._listeners.values():
            listener.close()
        for client in list(self._clients):
            client.cancel()
        if self._clients:
            await asyncio.wait(self._clients, timeout=5)
        await self.producers.close()
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._leaders.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._lease.shutdown(wait=False, cancel_futures=True)
        self.listers.close()

    async def _listen(self, broker: int | None) -> None:
        host, first = split_address(self.settings.listen)
        wanted = 0 if first == 0 else first if broker is None else first + 1 + len(self._ports)
        tls = self.settings.tls_context()
        if tls is not None:
            tls.sslobject_class = telling(self._failed_handshake)
        try:
            # Without TLS: asyncio does not count connections within a handshake.
            listener = await self._loop.create_server(
                lambda: MessageStream(partial(self._accept_soon, broker, tls)), host, wanted, backlog=_BACKLOG
            )
        except OSError as fault:
            raise LocalEnvironmentError(f"address {host}:{wanted} cannot be listened at: {fault}") from fault
        self._listeners[broker] = listener
        port = int(listener.sockets[0].getsockname()[1])
        if broker is None:
            self.port = port
        else:
            self._ports[broker] = port
        where = "bootstrap" if broker is None else f"broker {broker}"
        logger.info("gateway.listening port_of=%s at=%s:%d", where, host, port)

    def _failed_handshake(self) -> None:
        self.counts.malformed += 1

    def _accept_soon(self, broker: int | None, tls: ssl.SSLContext | None, stream: MessageStream) -> None:
        host, *_ = stream.transport.get_extra_info("peername") or ("gone",)
        network = network_of(str(host))
        if self.counts.connections >= self.settings.connections_max or self._of_network[network] >= self._per_ip_max:
            self.counts.refused_connections += 1
            _full.warning(
                "connections.refused connections=%d limit=%d network=%s of_network=%d network_limit=%d",
                self.counts.connections,
                self.settings.connections_max,
                network,
                self._of_network[network],
                self._per_ip_max,
            )
            stream.close()
            return
        self.counts.connections += 1
        self._of_network[network] += 1
        task = self._loop.create_task(self._accept(broker, tls, stream), name="client")
        self._clients.add(task)
        task.add_done_callback(partial(self._left, stream, network))

    def _left(self, stream: MessageStream, network: str, task: asyncio.Task[None]) -> None:
        stream.close()
        self.counts.connections -= 1
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]
        self._clients.discard(task)

    async def _accept(self, broker: int | None, tls: ssl.SSLContext | None, stream: MessageStream) -> None:
        line = ClientConnection(stream, Pace(time.monotonic()), self.answers)
        try:
            connection = RequestHandler(self, broker, line)
            self._lines[line] = connection
            if tls is not None:
                await stream.encrypt(tls, FIRST_S)
            await serve(stream, connection, line, self.coming, self.room, self)
        except asyncio.CancelledError:
            stream.close()
        except OSError as fault:
            logger.debug("tls.failed: %s", fault)
            stream.transport.abort()
        finally:
            self._lines.pop(line, None)

    # What connections tell

    def answered(self, head: Head, seconds: float) -> None:
        """Count a request that was answered."""
        self.counts.note(_name_of(head.key), seconds)

    def received(self, size: int) -> None:
        self.counts.received += size + LENGTH_BYTES

    def sent(self, size: int) -> None:
        self.counts.sent += size + LENGTH_BYTES

    def closed(self, fault: MalformedError | BrokerGoneError) -> None:
        """Count a connection that was closed for its client's fault, or its broker's."""
        if isinstance(fault, MalformedError):
            self.counts.malformed += 1
        else:
            self.counts.relay_errors += 1

    def count_closed(self, why: Closing) -> None:
        """Count a connection that is closed here for what its client did not do."""
        self.counts.closed[why.value] += 1

    async def _keep_watching(self) -> None:
        """Close the connections whose clients keep others waiting."""
        while True:
            await asyncio.sleep(FIRST_S / WATCHES)
            now_s = time.monotonic()
            requests_wait = self.room.is_crowded or self.coming.is_crowded
            if requests_wait:
                _full.warning(
                    "requests.wait under_way_bytes=%d limit=%d coming_bytes=%d limit=%d: no room for further requests "
                    "(--under-way-bytes-max); clients that do not complete theirs are closed",
                    self.room.taken,
                    self.room.limit,
                    self.coming.taken,
                    self.coming.limit,
                )
            for line, connection in list(self._lines.items()):
                is_stranger = not connection.login.is_accepted and not connection.login.again
                why = line.look(now_s, is_stranger=is_stranger, requests_wait=requests_wait)
                if why is not None and not line.is_aborted:
                    logger.debug("connection.closed reason=%s", why.value)
                    self.count_closed(why)
                    line.abort()
                    ending = asyncio.create_task(connection.close(), name="ending")  # what a broker owes is not awaited
                    self._ending.add(ending)
                    ending.add_done_callback(self._ending.discard)

    async def _keep_forgetting(self) -> None:
        """Sweep this gateway's share of the buckets, one after the other, and let go of what is not used."""
        rest = self._rest
        while rest.is_limited:
            gateways, me = self._gateways or (self.me(),), self.settings.name
            mine = [bucket for bucket in ALL_BUCKETS if chosen(bucket, gateways).name == me]
            for bucket in random.sample(mine, len(mine)):
                await asyncio.sleep(rest.sweep_s / len(mine))
                try:
                    self.counts.forgotten += await self.blocking(self.register.forget, bucket, rest.expiration_ms)
                except RollbridgeError as fault:
                    logger.warning("expiration.failed: retrying: %s", fault)
            if not mine:
                await asyncio.sleep(rest.sweep_s)
            await self.producers.let_go_unused(rest.fresh_ms / 1000)

    # Looking around

    async def _look(self, *, first: bool = False) -> None:
        try:
            self.brokers = await self.blocking(self._watch.ask, None if first else self.brokers)
            self.broker_hosts = frozenset(host for host, _ in self.brokers.addresses.values())
        except RollbridgeError as fault:
            if first:
                raise
            logger.warning("brokers.unreachable: %s", fault)

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self._look_around()
            except (RollbridgeError, OSError) as fault:
                logger.warning("cluster.refresh_failed: retrying: %s", fault)
                await asyncio.sleep(1)
            except Exception:
                log_defect(logger, "cluster.refresh_failed: retrying")
                await asyncio.sleep(1)

    async def _look_around(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
        except TimeoutError:
            await self._look()
        self._changed.clear()
        for broker in sorted(set(self.brokers.addresses) - set(self._ports)):
            await self._listen(broker)
        await self._look_at_rights()
        await self.blocking(self.register.announce, self.record())
        await self._read_gateways()
        await self.fresh_topics()
        await self.blocking(self.topics.look)

    async def _read_gateways(self) -> None:
        found = await self.blocking(self.register.gateways, self._gateways_changed)
        self._departures.changed(self._gateways, found, self.now_s())
        self._gateways = tuple(found)

    def _gateways_changed(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: ZooKeeper tells of a change after the gateway has stopped
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _keep_confirming(self) -> None:
        while True:
            try:
                await self._loop.run_in_executor(self._lease, self.register.turn)
            except RollbridgeError as fault:
                logger.warning("lease.renew_failed: %s", fault)
            except Exception:
                log_defect(logger, "lease.renew_failed")
            await asyncio.sleep(self.register.turn_s)

    async def _keep_measuring(self) -> None:
        while True:
            due_s = self._loop.time() + MEASURE_S
            await asyncio.sleep(MEASURE_S)
            self.counts.loop_lag.note(max(self._loop.time() - due_s, 0.0))

    async def _look_at_rights(self) -> None:
        """Check at intervals whether this gateway lacks rights, which its clients would be the first to notice."""
        if self._loop.time() < self._next_rights_s:
            return
        self._next_rights_s = self._loop.time() + RIGHTS_S
        needs = self.topics.needs()[:RIGHTS_MAX]
        try:
            found = await self.blocking(self._watch.lacking, self.brokers, needs)
        except RollbridgeError as fault:
            logger.warning("rights.unknown: %s", fault)
            return
        for item in sorted(set(found) - set(self._lacking)):
            logger.warning("rights.missing right=%s topic=%s stream=%s: see `rollbridge access kafka-acls`", *item)
        self._lacking = tuple(found)

    def faults(self) -> list[str]:
        """Return what keeps this gateway from serving."""
        found = [] if self.is_ready else ["it is starting, or ends"]
        if not self.register.is_alive():
            found.append("its lease in ZooKeeper has run out")
        if self.register.namesake:
            found.append(f"the gateway at {self.register.namesake} has its name; give each one a name of its own")
        silence_s = self.bridge.sender_silence_s
        if silence_s > SILENCE_S:
            found.append(f"it has not been able to send frames for {silence_s:.0f} s; `defect:` in its log says why")
        found += [f"its task {name} has ended; `defect:` in its log says why" for name in self._ended]
        return found

    def samples(self) -> Iterator[Sample]:
        """Yield all metrics."""
        register, producers, settings = self.register, self.producers, self.settings
        yield from self.counts.samples()
        yield Sample(metrics.INFO, (settings.name, __version__), 1)
        yield from metrics.present(
            {
                metrics.HEALTHY: int(not self.faults()),
                metrics.LEASE_AGE: register.life_s,
                metrics.LEASE_SILENCE: register.unwritten_s,
                metrics.LEASES_LOST: register.lives_lost,
                metrics.GATEWAYS: len(self._gateways),
                metrics.BROKERS: len(self._ports),
                metrics.LACKING: len(self._lacking),
                metrics.CERTIFICATE_UNTIL: self._certificate_until_ms / 1000 or None,
                metrics.CONNECTIONS_LIMIT: settings.connections_max,
                metrics.IDS_LIMIT: settings.ids_max,
                metrics.UNDER_WAY_LIMIT: settings.under_way_bytes_max,
                metrics.UNDER_WAY: self.room.taken,
                metrics.IDS: len(producers),
                metrics.OPEN: producers.open,
                metrics.HANDED_OVER: register.handovers,
                metrics.TAKEN_OVER: producers.takeovers,
                metrics.SAVEPOINTS: producers.savepoints.copy(),
                metrics.SAVEPOINT_FAILURES: producers.savepoint_failures,
                metrics.ENDED: producers.ends,
            }
        )


def _name_of(api: int) -> str:
    try:
        return Api(api).name
    except ValueError:
        return "OTHER"
