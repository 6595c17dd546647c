"""Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from bridge.client.options import ClientOptions
from bridge.config import ConnectionSettings
from bridge.connection import Bridge

KEPT_MAX: Final = 4
"""Connections of a process, to different clusters or in different ways; the one used last goes last."""

_kept: Final[OrderedDict[tuple[object, ...], Bridge]] = OrderedDict()


def connection(settings: ConnectionSettings, options: ClientOptions) -> Bridge:
    """The connection of this process to a cluster.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answered in time.
        WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
    """
    key = (
        settings.bootstrap_servers,
        settings.zookeeper,
        settings.zookeeper_root,
        tuple(sorted(settings.kafka.items())),
        options,
    )
    found = _kept.pop(key, None) or Bridge(settings, options)
    _kept[key] = found
    while len(_kept) > KEPT_MAX:
        _kept.popitem(last=False)[1].close()
    return found
