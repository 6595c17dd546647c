"""The daemon: one gateway process, from its connections to its orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from rollbridge.client.runtime import ClientOptions
from rollbridge.connection import Bridge, connect
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_gateway.settings import GatewaySettings, split_address
from rollbridge_gateway.shell.endpoint import endpoint
from rollbridge_gateway.shell.register import Register
from rollbridge_gateway.shell.server import Server

logger = logging.getLogger(__name__)

START_S: Final = 30.0
"""Longest wait for ZooKeeper at the start."""


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
    session = ZooKeeperSession(
        settings.connection.zookeeper,
        root=settings.connection.zookeeper_root,
        session_timeout_s=settings.session_timeout_s,
        name=settings.name,
        security=settings.connection.zookeeper_security,
    )
    session.start(START_S)
    try:
        with connected(settings) as bridge:
            asyncio.run(_serve(settings, bridge, session, ready))
    finally:
        session.close()


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
    settings: GatewaySettings, bridge: Bridge, session: ZooKeeperSession, ready: Callable[[str], None]
) -> None:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = Server(settings, bridge, lambda lost: Register(session, settings.name, settings.session_timeout_s, lost))
    async with AsyncExitStack() as serving:
        if settings.metrics:
            host, port = split_address(settings.metrics)
            await serving.enter_async_context(endpoint(host, port, server.samples, server.faults))

        def tell() -> None:
            me = server.me()
            ready(f"gateway {me.name} listens at {me.host}:{me.port}")

        await server.run(stopping, tell)
    logger.info("gateway %s ends", settings.name)
