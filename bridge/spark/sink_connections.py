"""Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch.

A process keeps one for each session that it has worked for lately. A newer session of the same client puts an end to
the older one's: that has been fenced.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from bridge.client.options import ClientOptions
from bridge.config import ConnectionSettings
from bridge.connection import Bridge

KEPT_MAX: Final = 4

_Key = tuple[object, ...]
_kept: Final[OrderedDict[_Key, tuple[str, Bridge]]] = OrderedDict()


def connection(settings: ConnectionSettings, options: ClientOptions, session: str) -> Bridge:
    """The connection of this process to a cluster, as part of a session of a client.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answered in time.
        WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
    """
    key = (
        settings.bootstrap_servers,
        settings.zookeeper,
        settings.zookeeper_root,
        settings.client_name,
        tuple(sorted(settings.kafka.items())),
        options,
    )
    known = _kept.pop(key, None)
    if known is not None and known[0] != session:
        known[1].close()
        known = None
    _kept[key] = known or (session, Bridge(settings, options, session))
    while len(_kept) > KEPT_MAX:
        _kept.popitem(last=False)[1][1].close()
    return _kept[key][1]
