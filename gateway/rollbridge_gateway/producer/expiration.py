"""Expiration of unused transactional ids, as in brokers: a sweep over one bucket removes their entries.

An entry goes if it was not written for the time that ids are kept, by ZooKeeper's clock and by the gateway's, if no
gateway holds its id, and if no group has a session of its client name on record. The record of a session stays for as
long as anything of its client is open or remembered (:mod:`rollbridge.metadata.client_sessions`), so no answer that a
producer may still ask for is lost. A producer that comes back later gets what it gets from a broker:
INVALID_PRODUCER_ID_MAPPING, and another producer id when it starts again.

Several gateways may sweep the same bucket, and a gateway may stall between any two steps, while others use the id,
remove its entry and write another one. This is correct because of three rules:

* The new holder of an id writes its entry in the same step, whatever clocks say. So an entry has another version then
  than the one that was found old.
* The order of reads: the entry, the holder of the id, the sessions. A gateway that holds it at the second read is seen.
  What an earlier holder has begun is seen as well: its session was on record before.
* Entries are removed together with a change of their bucket, in the version that this sweep has given to it. So of two
  sweeps one removes nothing, and a node that was removed and created again, whose versions begin again, is not taken
  for the old one.

Source: Kafka's ``transactional.id.expiration.ms``, and ``TransactionStateManager.removeExpiredTransactionalIds``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.effects import AnyEffect, Effect, Steps, run
from rollbridge.metadata import paths
from rollbridge.metadata.errors import NODE_NOT_EMPTY, NodeConflictError, NodeMissingError
from rollbridge.metadata.gateway_store import held_among, remembered_among
from rollbridge.metadata.paths import GATEWAY_BUCKETS
from rollbridge.metadata.records import DeleteNode, SetNode
from rollbridge.metadata.session import Znode, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge_gateway.producer.table import Entry

AT_ONCE: Final = 100
"""Most entries that are removed in one step."""
DAY_MS: Final = 24 * 3_600_000
FRESH_SHARE: Final = 7
SWEEPS: Final = 24
SWEEP_S_MIN: Final = 1.0
SWEEP_S_MAX: Final = 3_600.0
"""As brokers' ``transaction.remove.expired.transaction.cleanup.interval.ms``."""
ALL_BUCKETS: Final = tuple(f"{number:02x}" for number in range(GATEWAY_BUCKETS))


class IdExpiration(NamedTuple):
    """Time for which an unused id is kept, and what follows from that.

    Attributes:
        expiration_ms: That time; 0 for ever.
        fresh_ms: Age of an entry from which on the use of its id shows in it. So long an unused id stays with its
            gateway, too.
        sweep_s: Time for which all buckets are swept once.
    """

    expiration_ms: int
    fresh_ms: int
    sweep_s: float

    @classmethod
    def of(cls, days: float) -> IdExpiration:
        """Return what follows from so many days; 0 for ever."""
        expiration_ms = int(days * DAY_MS)
        sweep_s = min(max(expiration_ms / 1000 / SWEEPS, SWEEP_S_MIN), SWEEP_S_MAX)
        return cls(expiration_ms, expiration_ms // FRESH_SHARE if days else DAY_MS, sweep_s)

    @property
    def is_limited(self) -> bool:
        """True if ids are forgotten at all."""
        return self.expiration_ms > 0


class Dated(NamedTuple):
    """An entry as it was read.

    Attributes:
        entry: What it says.
        version: Version of its node.
        written_ms: When the node was written, by ZooKeeper's clock.
    """

    entry: Entry
    version: int
    written_ms: int


class BucketMark(NamedTuple):
    """Version of the bucket after a sweep's mark, and ZooKeeper's time."""

    version: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class FindOld(Effect[Sequence[str]]):
    """Find the client names in the bucket whose nodes were last written before this time, by their own dates.

    Returns them.
    """

    before_ms: int


@dataclass(frozen=True, slots=True)
class MarkBucket(Effect[BucketMark]):
    """Give the bucket another version. Returns its :class:`BucketMark`."""


@dataclass(frozen=True, slots=True)
class ReadEntries(Effect[Mapping[str, Dated]]):
    """Read entries. Returns those that are there and can be read, a :class:`Dated` by client name."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class FindHeld(Effect[Sequence[str]]):
    """Find which ids some gateway holds. Returns their client names."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class FindSessions(Effect[Sequence[str]]):
    """Find which client names have a session on record in any group. Returns them."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class RemoveEntries(Effect[int | None]):
    """Remove entries and change the bucket: all of it if all of them, and the bucket, have these versions, or nothing.

    Returns the bucket's new version; None if nothing was removed.
    """

    bucket_version: int
    versions: Mapping[str, int]


LOOKS: Final = (FindHeld, FindSessions)
"""In this order: see the head of this module."""


def is_due(dated: Dated, expiration_ms: int, zookeeper_ms: int, own_ms: int) -> bool:
    """Return whether an entry is older than ``expiration_ms`` by both clocks.

    ``own_ms`` is by the gateway's clock, like the clocks that have written the entry.
    """
    return min(zookeeper_ms - dated.written_ms, own_ms - dated.entry.written_ms) >= expiration_ms


def sweep(expiration_ms: int, own_ms: int) -> Steps[int]:
    """Remove the unused entries of a bucket; return how many.

    Args:
        expiration_ms: Time for which unused entries are kept.
        own_ms: Time by the gateway's clock. It may pass meanwhile, which only keeps more.
    """
    old = yield from FindOld(own_ms - expiration_ms)
    if not old:
        return 0
    version, zookeeper_ms = yield from MarkBucket()
    removed = 0
    for at in range(0, len(old), AT_ONCE):
        # From here on what is read counts: it is not older than the bucket's version.
        found = yield from ReadEntries(old[at : at + AT_ONCE])
        due = {name: item for name, item in found.items() if is_due(item, expiration_ms, zookeeper_ms, own_ms)}
        for look in LOOKS:
            needed = (yield from look(list(due))) if due else ()
            due = {name: item for name, item in due.items() if name not in needed}
        if due:
            left = yield from RemoveEntries(version, {name: item.version for name, item in due.items()})
            if left is None:
                break  # another sweep, or a user of one of them; the next one finds the others again
            version = left
            removed += len(due)
    return removed


# Sweeps of transactional ids, carried out in ZooKeeper.


logger = logging.getLogger(__name__)

READ_AT_ONCE: Final = 500
"""Entries that are read together, so that a large bucket is not in memory as a whole."""


def forget(session: ZooKeeperSession, bucket: str, expiration_ms: int) -> int:
    """Remove the unused entries of a bucket; return how many.

    Raises:
        ZooKeeperUnavailableError, UnknownWriteError: some may have been removed; what is left is found again.
    """
    return run(sweep(expiration_ms, wall_ms()), _Bucket(session, bucket).carry_out)


class _Bucket:
    """A bucket in ZooKeeper."""

    def __init__(self, session: ZooKeeperSession, bucket: str) -> None:
        self._session = session
        self._entries = f"{paths.GATEWAY_IDS}/{bucket}"

    def carry_out(self, effect: AnyEffect) -> Any:
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
                except (NodeMissingError, NodeConflictError) as fault:
                    if fault.code == NODE_NOT_EMPTY:
                        raise
                    logger.debug("expiration.overtaken bucket=%s: %s", self._entries, fault)
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

    def _read(self, name: str, node: Znode) -> Dated | None:
        try:
            return Dated(Entry.decode(node.value), node.version, node.modified_ms)
        except ValueError as fault:
            logger.warning("expiration.entry_unread client=%s: keeping it: %s", name, fault)
            return None
