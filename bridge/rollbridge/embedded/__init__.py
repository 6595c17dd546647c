"""A real Kafka broker, a real ZooKeeper and coordinators as local processes: for trying out, and for tests.

``rollbridge up`` keeps one such cluster in the user's data directory; tests use
:class:`~rollbridge.embedded.ephemeral.EmbeddedCluster`, which leaves nothing behind. Clients and coordinators need
nothing of this package.
"""
