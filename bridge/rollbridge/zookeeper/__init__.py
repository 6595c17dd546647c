"""Adapter to ZooKeeper: a typed session, and typed reads and writes of what stands there."""
