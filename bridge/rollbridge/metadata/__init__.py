"""Metadata in ZooKeeper: records, paths and requests (pure); session, store, catalog and ACLs."""
