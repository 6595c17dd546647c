"""From the global options to a connection."""

from __future__ import annotations

import bridge
from bridge.cli.context import CliContext


def connected(context: CliContext, options: bridge.ClientOptions | None = None) -> bridge.Bridge:
    """A connection to the cluster that the command line means; close it.

    Raises:
        ConfigError, KafkaUnavailable, ZooKeeperUnavailable, WrongClusterError: see :func:`bridge.connect`.
    """
    settings = context.settings()
    return bridge.connect(
        settings.bootstrap_servers,
        zookeeper=settings.zookeeper,
        zookeeper_root=settings.zookeeper_root,
        client_name=settings.client_name,
        kafka=settings.kafka,
        zookeeper_security=settings.zookeeper_security,
        options=options,
    )
