"""A real Kafka broker, a real ZooKeeper and coordinators as local processes: for trying out, and for tests.

``rollbridge up`` keeps one such cluster in the user's data directory; tests use ``EmbeddedCluster``, which leaves
nothing behind.

Clients and coordinators need only :mod:`bridge.embedded.state` of this package, to find such a cluster; what starts
servers is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.embedded.ephemeral import CRASH_VARIABLE, CoordinatorHandle, EmbeddedCluster

__all__ = ["CRASH_VARIABLE", "CoordinatorHandle", "EmbeddedCluster"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bridge.embedded import ephemeral

    return getattr(ephemeral, name)
