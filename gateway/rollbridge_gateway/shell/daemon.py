"""The daemon: one gateway process, from its connections to its orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

import uvloop

from rollbridge.client.runtime import ClientOptions
from rollbridge.connection import Bridge, connect
from rollbridge.defects import log_defect
from rollbridge.errors import UnavailableError
from rollbridge.model.metrics import Sample
from rollbridge.serving.endpoint import Endpoint, Probe, ProcessSamples
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_gateway.families import FAMILIES
from rollbridge_gateway.settings import GatewaySettings, split_address
from rollbridge_gateway.shell.register import Register
from rollbridge_gateway.shell.server import Server

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S: Final = 30.0
"""Longest wait for ZooKeeper at the start."""
_GARBAGE: Final = (20_000, 10, 10)
"""Objects made, and collections, between two collections of garbage: a request makes a hundred, and leaves no cycle."""
ANSWER_S: Final = 2.0
"""Longest wait for the event loop to say what it has counted; who asks for health waits a second longer."""


def run(settings: GatewaySettings, ready: Callable[[str], None] = lambda line: None) -> None:
    """Serve until SIGTERM or SIGINT. Call this from the main thread.

    Args:
        settings: Settings.
        ready: Told in a line where the gateway is, once it serves.

    Raises:
        LocalEnvironmentError: an address cannot be used.
        KafkaUnavailableError, ZooKeeperUnavailableError: no server answers at the start.
        ConfigError, WrongClusterError: the settings are wrong.
    """
    settings.tls_context()  # what is wrong with its files is told before anything is opened
    settings.check_certificate(datetime.now(UTC))
    session, lease = (
        ZooKeeperSession(
            settings.connection.zookeeper,
            root=settings.connection.zookeeper_root,
            session_timeout_s=settings.session_timeout_s,
            name=name,
            security=settings.connection.zookeeper_security,
        )
        for name in (settings.name, f"{settings.name}, lease")
    )
    gc.freeze()  # what was imported stays
    gc.set_threshold(*_GARBAGE)
    with ExitStack() as closing:
        for item in (session, lease):
            closing.callback(item.close)
            item.start(START_S)
        bridge = closing.enter_context(connected(settings))
        runner = closing.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

        def register(lost: Callable[[str], None]) -> Register:
            return Register(session, lease, settings.name, settings.session_timeout_s, lost)

        runner.run(_serve(settings, bridge, register, ready))


def connected(settings: GatewaySettings) -> Bridge:
    """Return the connection whose clients the transactional ids are."""
    connection = settings.connection
    # Producers wait for a savepoint behind each request, so nothing is gained by holding frames back.
    options = ClientOptions(client_names_max=settings.ids_max + 1, open_transactions_max=2 * settings.ids_max)
    return connect(
        connection.bootstrap_servers,
        zookeeper=connection.zookeeper,
        zookeeper_root=connection.zookeeper_root,
        client_name=settings.name,
        kafka=connection.kafka,
        zookeeper_security=connection.zookeeper_security,
        options=options,
    )


async def _serve(
    settings: GatewaySettings,
    bridge: Bridge,
    register: Callable[[Callable[[str], None]], Register],
    ready: Callable[[str], None],
) -> None:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.set_exception_handler(_tell_unhandled)
    server = Server(settings, bridge, register)
    with ExitStack() as serving:
        asked = FromLoop(loop, server)
        if settings.metrics:
            metrics = ProcessSamples(asked.samples, FAMILIES)
            serving.enter_context(Endpoint(*split_address(settings.metrics), metrics, asked.faults, asked.silence))
        if settings.probe_socket:
            serving.enter_context(Probe(settings.probe_socket, asked.faults, asked.silence))

        def tell() -> None:
            me = server.me()
            ready(f"gateway {me.name} listens at {me.host}:{me.port}")

        await server.run(stopping, tell)
    logger.info("gateway %s ends", settings.name)


def _tell_unhandled(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log what no task or transport of ours has dealt with."""
    fault = context.get("exception")
    if isinstance(fault, OSError):  # such as a client's host that is away
        logger.info("%s: %s", context["message"], fault)
    else:
        log_defect(logger, "%s", context["message"], fault=fault or RuntimeError(context["message"]))


class WatchedLoop(Protocol):
    """What is asked for metrics and health, in the event loop that it belongs to."""

    def samples(self) -> Iterable[Sample]:
        """Return all metrics."""

    def faults(self) -> list[str]:
        """Return what keeps it from serving."""


class FromLoop:
    """Metrics and health of what belongs to an event loop, for threads: the loop itself is asked for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watched: WatchedLoop, answer_s: float = ANSWER_S) -> None:
        """Prepare; answers take ``answer_s`` seconds at most."""
        self._loop = loop
        self._watched = watched
        self._answer_s = answer_s

    def samples(self) -> list[Sample]:
        """Return all metrics.

        Raises:
            UnavailableError: the loop does not answer.
        """
        return self._ask(lambda: list(self._watched.samples()))

    def faults(self) -> list[str]:
        """Return what keeps the gateway from serving; a loop that does not answer is such a thing."""
        try:
            return self._ask(self._watched.faults)
        except UnavailableError as fault:
            return [str(fault)]

    def silence(self) -> list[str]:
        """Return that the loop does not answer, if so: nothing but a restart mends that."""
        try:
            return self._ask(list)
        except UnavailableError as fault:
            return [str(fault)]

    def _ask(self, what: Callable[[], T]) -> T:
        async def answer() -> T:
            return what()

        asked = answer()
        try:
            coming = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it is closed
            asked.close()
            raise UnavailableError("the gateway has ended") from None
        try:
            return coming.result(self._answer_s)
        except TimeoutError:
            coming.cancel()
            raise UnavailableError(f"its event loop has not answered for {self._answer_s:g} s") from None
