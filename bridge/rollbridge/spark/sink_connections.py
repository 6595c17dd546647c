"""The connection with which the tasks of a process write."""

from __future__ import annotations

from typing import Final

from rollbridge.client.options import ClientOptions
from rollbridge.config import ConnectionSettings
from rollbridge.connection import Bridge
from rollbridge.spark.kept import Kept

_kept: Final[Kept[Bridge]] = Kept()


def connection(settings: ConnectionSettings, options: ClientOptions) -> Bridge:
    """The connection of this process to a cluster.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answered in time.
        WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
    """
    return _kept.get((settings.identity(), options), lambda: Bridge(settings, options))
