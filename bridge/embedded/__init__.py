"""A real Kafka broker, a real ZooKeeper and coordinators as local processes: for trying out, and for tests.

``rollbridge up`` keeps one such cluster in the user's data directory; tests use ``EmbeddedCluster``, which leaves
nothing behind.
"""

from bridge.embedded.ephemeral import CRASH_VARIABLE, CoordinatorHandle, EmbeddedCluster

__all__ = ["CRASH_VARIABLE", "CoordinatorHandle", "EmbeddedCluster"]
