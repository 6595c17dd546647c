"""Sweeps of transactional ids, carried out in ZooKeeper. See :mod:`rollbridge_gateway.expiry`."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from rollbridge.model import paths
from rollbridge.model.records import DeleteNode, SetNode
from rollbridge.zookeeper.errors import NodeMissingError, NodeVersionMismatchError
from rollbridge.zookeeper.gateways import held_among, remembered_among
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_gateway.entries import Entry
from rollbridge_gateway.expiry import (
    BucketMark,
    Dated,
    FindHeld,
    FindOld,
    FindSessions,
    MarkBucket,
    ReadEntries,
    RemoveEntries,
    SweepEffect,
    sweep,
)

logger = logging.getLogger(__name__)

READ_AT_ONCE: Final = 500
"""Entries that are looked at together, so that a large bucket is not in memory as a whole."""


def forget(session: ZooKeeperSession, bucket: str, expiration_ms: int) -> int:
    """Remove the entries of a bucket that nobody needs; return how many.

    Raises:
        ZooKeeperUnavailableError, UnknownWriteError: some may have been removed; what is left is found again.
    """
    steps, value = sweep(expiration_ms, int(time.time() * 1000)), None
    at = _Bucket(session, bucket)
    try:
        while True:
            value = at.carry_out(steps.send(value))
    except StopIteration as stop:
        return int(stop.value)
    finally:
        steps.close()


class _Bucket:
    """A bucket in ZooKeeper."""

    def __init__(self, session: ZooKeeperSession, bucket: str) -> None:
        self._session = session
        self._entries = f"{paths.GATEWAY_IDS}/{bucket}"

    def carry_out(self, effect: SweepEffect) -> Any:
        match effect:
            case FindOld(before_ms):
                return self._find_old(before_ms)
            case MarkBucket():
                version = self._session.set(self._entries, b"")
                stat = self._session.exists(self._entries)
                return BucketMark(version, 0 if stat is None else stat.modified_ms)
            case ReadEntries(names):
                nodes = self._session.get_many([f"{self._entries}/{name}" for name in names])
                found = zip(names, nodes, strict=True)
                read = {name: self._read(name, node) for name, node in found if node is not None}
                return {name: dated for name, dated in read.items() if dated is not None}
            case FindHeld(names):
                return held_among(self._session, names)
            case FindSessions(names):
                return remembered_among(self._session, Metadata(self._session).groups(), names)
            case RemoveEntries(version, versions):
                mark = SetNode(self._entries, b"", version)
                doomed = [DeleteNode(f"{self._entries}/{name}", of) for name, of in versions.items()]
                try:
                    self._session.multi([mark, *doomed])
                except (NodeMissingError, NodeVersionMismatchError) as fault:
                    logger.debug("a sweep of %s is overtaken: %s", self._entries, fault)
                    return None
                return version + 1
            case _:
                raise AssertionError(f"{effect} is not an effect of a sweep")

    def _find_old(self, before_ms: int) -> list[str]:
        names, found = self._session.children(self._entries), []
        for first in range(0, len(names), READ_AT_ONCE):
            part = names[first : first + READ_AT_ONCE]
            nodes = self._session.get_many([f"{self._entries}/{name}" for name in part])
            found += [
                name
                for name, node in zip(part, nodes, strict=True)
                if node is not None and node.modified_ms <= before_ms
            ]
        return found

    def _read(self, name: str, node: Any) -> Dated | None:
        try:
            return Dated(Entry.decode(node.value), node.version, node.modified_ms)
        except ValueError as fault:
            logger.warning("the entry of %s cannot be read, so it stays: %s", name, fault)
            return None
