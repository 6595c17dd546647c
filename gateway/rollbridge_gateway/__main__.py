"""The daemon: one gateway process, from its connections to its orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import click
import uvloop

from rollbridge.base.logs import is_json, log_defect, set_up_service_log
from rollbridge.base.metrics import Sample
from rollbridge.base.options import unknown_variables
from rollbridge.base.text import printable
from rollbridge.client.connection import Bridge, connect
from rollbridge.config import CONFIG_VARIABLE, ClientOptions, load_settings
from rollbridge.errors import ConfigError, RollbridgeError, UnavailableError
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metrics import ProcessSamples
from rollbridge.observe.http_service import Endpoint, Probe
from rollbridge_gateway.producer.ids import Register
from rollbridge_gateway.producer.writes import END_S
from rollbridge_gateway.server.metrics import FAMILIES
from rollbridge_gateway.server.server import Server
from rollbridge_gateway.settings import GatewaySettings, split_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S: Final = 30.0
"""Longest wait for ZooKeeper at the start."""
_GARBAGE: Final = (20_000, 10, 10)
"""Objects made, and collections, between two collections of garbage: a request makes a hundred, and leaves no cycle."""
ANSWER_S: Final = 2.0
"""Longest wait for the event loop to say what it has counted; a request for health waits a second longer."""


def run(settings: GatewaySettings, ready: Callable[[str], None] = lambda line: None) -> None:
    """Serve until SIGTERM or SIGINT. Call this from the main thread; ``ready`` gets a line once it serves.

    Raises:
        LocalEnvironmentError: an address cannot be used.
        KafkaUnavailableError, ZooKeeperUnavailableError: no server answers at the start.
        ConfigError, InvalidRequestError: the settings are wrong.
    """
    settings.tls_context()  # what is wrong with its files is told before anything is opened
    settings.check_certificate(datetime.now(UTC))
    session, lease = (
        ZooKeeperSession.of(settings.connection, name=name, session_timeout_s=settings.session_timeout_s)
        for name in (settings.name, f"{settings.name}-lease")
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
    options = ClientOptions(
        commit_timeout_s=END_S,
        admin_timeout_s=END_S,
        open_transactions_max=2 * settings.ids_max,
    )
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
    logger.info("gateway.stopping gateway=%s", settings.name)


def _tell_unhandled(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log a fault that no task or transport of ours has handled."""
    fault = context.get("exception")
    if isinstance(fault, OSError):  # such as a client's host that is away
        logger.info("loop.fault event=%r: %s", context["message"], fault)
    else:
        log_defect(logger, "loop.fault event=%r", context["message"], fault=fault or RuntimeError(context["message"]))


class WatchedLoop(Protocol):
    """Source of metrics and health, in the event loop that it belongs to."""

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


# ``python -m rollbridge_gateway``: run a gateway until SIGTERM or SIGINT.


PREFIX: Final = "ROLLBRIDGE_GATEWAY"
"""Prefix of variables: each option may be given as one, such as ``ROLLBRIDGE_GATEWAY_LISTEN``."""


@click.command(name="gateway", context_settings={"auto_envvar_prefix": PREFIX})
@click.option("--bootstrap-servers", default=None, help="Kafka brokers, host:port,...")
@click.option("--zookeeper", default=None, help="ZooKeeper servers, host:port,...")
@click.option("--zookeeper-root", default=None, help="Root path in ZooKeeper (default: /rollbridge).")
@click.option("--listen", help="Address of the first port; brokers get the ports behind it (default: 127.0.0.1:9192).")
@click.option("--advertise", metavar="HOST", help="Host that clients are told (default: that of --listen).")
@click.option("--name", help="Name among the gateways (default: host and process id).")
@click.option("--partitions", type=int, help="Virtual partitions of a stream with key ranges (default: 8).")
@click.option("--session-timeout", "session_timeout_s", type=float, help="ZooKeeper session time-out (default: 4 s).")
@click.option("--connections-max", type=int, help="Most connections of clients (default: 2,000).")
@click.option("--connections-per-ip-max", type=int, help="Most of one address (default: half of all).")
@click.option("--ids-max", type=int, help="Most transactional ids served at once (default: 50,000).")
@click.option("--under-way-bytes-max", type=int, help="Bytes of all requests under way, and of answers not taken yet.")
@click.option("--workers", type=int, help="Threads for each group's leader, and for ZooKeeper (default: 64).")
@click.option("--certificate", metavar="FILE", help="Certificate, if clients' connections are to be encrypted.")
@click.option("--key", metavar="FILE", help="Its private key, unless it is in the same file.")
@click.option("--client-ca", metavar="FILE", help="Authorities of clients' certificates, which are demanded then.")
@click.option("--rights-seconds", "rights_s", type=float, help="Time for which rights are remembered (default: 60 s).")
@click.option(
    "--expiration-days", type=float, help="Age at which unused transactional ids expire (default: 7 days; 0: never)."
)
@click.option(
    "--metrics",
    envvar=f"{PREFIX}_METRICS_ADDRESS",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus, and health.",
)
@click.option("--probe-socket", metavar="FILE", help="Answer probes of this machine at this Unix socket.")
@click.option("--log-level", default="INFO", show_default=True, help="DEBUG, INFO, WARNING or ERROR.")
@click.option("--log-format", default=None, help="text or json (default: text).")
@click.option("--log-file", default=None, help="Log to this file, which may be moved meanwhile.")
def main(
    bootstrap_servers: str | None,
    zookeeper: str | None,
    zookeeper_root: str | None,
    log_level: str,
    log_format: str | None,
    log_file: str | None,
    **given: str | int | float | None,
) -> None:
    """Run a gateway: transactional Kafka producers write rolling transactions through it."""
    try:
        set_up_service_log(logger, log_level, {"format": log_format, "file": log_file})
        flags = {
            "bootstrap_servers": bootstrap_servers,
            "zookeeper": zookeeper,
            "zookeeper_root": zookeeper_root,
        }
        known = {str(option.envvar or f"{PREFIX}_{option.name}".upper()) for option in main.params}
        ConfigError.raise_for(unknown_variables(os.environ, f"{PREFIX}_", known))
        file = os.environ.get(CONFIG_VARIABLE)
        connection = load_settings(flags, config_file=Path(file) if file else None)
        wanted = {key: value for key, value in given.items() if value is not None}
        run(GatewaySettings(connection=connection, **wanted), click.echo)  # type: ignore[arg-type]
    except RollbridgeError as fault:
        logger.error("gateway.stopped: %s", fault)
        if not is_json():
            click.echo(printable(f"rollbridge gateway: {fault}"), err=True)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
