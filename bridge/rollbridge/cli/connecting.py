"""From the global options to a connection."""

from __future__ import annotations

from rollbridge.cli.context import CliContext
from rollbridge.client.options import ClientOptions
from rollbridge.connection import Bridge, connect


def connected(context: CliContext, options: ClientOptions | None = None) -> Bridge:
    """A connection to the cluster that the command line means; close it.

    Raises:
        ConfigError, KafkaUnavailable, ZooKeeperUnavailable, WrongClusterError: see :func:`rollbridge.connect`.
    """
    settings = context.settings()
    return connect(
        settings.bootstrap_servers,
        zookeeper=settings.zookeeper,
        zookeeper_root=settings.zookeeper_root,
        client_name=settings.client_name,
        kafka=settings.kafka,
        zookeeper_security=settings.zookeeper_security,
        options=options,
    )
