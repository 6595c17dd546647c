"""Sockets, ZooKeeper, and rollbridge's client around the pure modules."""
