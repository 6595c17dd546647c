"""Errors of the coordinator that never reach a client."""

from __future__ import annotations


class StaleStateError(Exception):
    """ZooKeeper or Kafka do not hold what this leader last wrote: it must forget its state and take over anew."""


class DeposedError(Exception):
    """A newer leader exists: this term is over."""
