"""Entries of transactional ids that nobody uses are removed, as brokers forget such ids: a sweep over one bucket.

An entry goes if it was not written for the time that ids are kept, by ZooKeeper's clock and by the gateway's, if no
gateway holds its id, and if no group has a session of its client name on record. The record of a session stays for as
long as anything of its client is open or remembered (:mod:`rollbridge.model.sessions`), so nothing that a producer may
still be told is lost. What its producer gets that comes back later all the same is what it gets from a broker:
INVALID_PRODUCER_ID_MAPPING, and another producer id when it starts anew.

Several gateways may sweep the same bucket, and a gateway may stand still between any two steps, while others use the
id, remove its entry and write another one. What makes that right:

* Whoever becomes the holder of an id writes its entry in the same step, whatever clocks say. So an entry has another
  version then than the one that was found old.
* The order of looking: the entry, who holds the id, the sessions. A gateway that holds it when that is looked at is
  seen. What one that held it before has begun is seen as well: its session was on record before.
* Entries are removed together with a change of their bucket, in the version that this sweep has given to it. So of two
  sweeps one removes nothing, and a node that was removed and made anew, whose versions begin again, is not taken for
  the old one.

Source: Kafka's ``transactional.id.expiration.ms``, and ``TransactionStateManager.removeExpiredTransactionalIds``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rollbridge.model.paths import GATEWAY_BUCKETS
from rollbridge_gateway.entries import Entry

AT_ONCE: Final = 100
"""Most entries that are removed in one step."""
DAY_MS: Final = 24 * 3_600_000
FRESH_SHARE: Final = 7
SWEEPS: Final = 24
SWEEP_S_MIN: Final = 1.0
SWEEP_S_MAX: Final = 3_600.0
"""As brokers' ``transaction.remove.expired.transaction.cleanup.interval.ms``."""
ALL_BUCKETS: Final = tuple(f"{number:02x}" for number in range(GATEWAY_BUCKETS))


class Disuse(NamedTuple):
    """How long an unused id is kept, and what follows from that.

    Attributes:
        expiration_ms: For how long; 0 for ever.
        fresh_ms: Age of an entry from which on the use of its id shows in it. So long an unused id stays with its
            gateway, too.
        sweep_s: Time for which all buckets are swept once.
    """

    expiration_ms: int
    fresh_ms: int
    sweep_s: float

    @classmethod
    def of(cls, days: float) -> Disuse:
        """Return what follows from so many days; 0 for ever."""
        expiration_ms = int(days * DAY_MS)
        sweep_s = min(max(expiration_ms / 1000 / SWEEPS, SWEEP_S_MIN), SWEEP_S_MAX)
        return cls(expiration_ms, expiration_ms // FRESH_SHARE if days else DAY_MS, sweep_s)

    @property
    def is_limited(self) -> bool:
        """Whether ids are forgotten at all."""
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
    """What a sweep has made of its bucket: the version that the bucket has now, and ZooKeeper's time."""

    version: int
    now_ms: int


class SweepEffect:
    """Something to be carried out. Its result is given in its docstring; None if it has none."""


@dataclass(frozen=True, slots=True)
class FindOld(SweepEffect):
    """Find the client names in the bucket whose nodes were last written before this time, by their own dates.

    Returns them.
    """

    before_ms: int


@dataclass(frozen=True, slots=True)
class MarkBucket(SweepEffect):
    """Give the bucket another version. Returns its :class:`BucketMark`."""


@dataclass(frozen=True, slots=True)
class ReadEntries(SweepEffect):
    """Read entries. Returns those that are there and can be read, a :class:`Dated` by client name."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class FindHeld(SweepEffect):
    """Find which ids some gateway holds. Returns their client names."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class FindSessions(SweepEffect):
    """Find which client names have a session on record in any group. Returns them."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class RemoveEntries(SweepEffect):
    """Remove entries and change the bucket: all of it if all of them, and the bucket, have these versions, or nothing.

    Returns the bucket's new version; None if nothing was removed.
    """

    bucket_version: int
    versions: Mapping[str, int]


LOOKS: Final = (FindHeld, FindSessions)
"""In this order: see the head of this module."""

Sweep = Generator[SweepEffect, Any, int]


def is_due(dated: Dated, expiration_ms: int, zookeeper_ms: int, own_ms: int) -> bool:
    """Return whether an entry is old enough by both clocks.

    Args:
        dated: The entry.
        expiration_ms: For how long it is kept.
        zookeeper_ms: Time by ZooKeeper's clock.
        own_ms: Time by the gateway's, like those that have written the entry.
    """
    return min(zookeeper_ms - dated.written_ms, own_ms - dated.entry.written_ms) >= expiration_ms


def sweep(expiration_ms: int, own_ms: int) -> Sweep:
    """Remove the entries of a bucket that nobody needs; return how many.

    Args:
        expiration_ms: For how long entries are kept that nobody uses.
        own_ms: Time by the gateway's clock. It may pass meanwhile, which only keeps more.
    """
    old: Sequence[str] = yield FindOld(own_ms - expiration_ms)
    if not old:
        return 0
    version, zookeeper_ms = yield MarkBucket()
    removed = 0
    for at in range(0, len(old), AT_ONCE):
        # From here on what is read counts: it is not older than the bucket's version.
        found: Mapping[str, Dated] = yield ReadEntries(old[at : at + AT_ONCE])
        due = {name: item for name, item in found.items() if is_due(item, expiration_ms, zookeeper_ms, own_ms)}
        for look in LOOKS:
            needed = (yield look(list(due))) if due else ()
            due = {name: item for name, item in due.items() if name not in needed}
        if due:
            version = yield RemoveEntries(version, {name: item.version for name, item in due.items()})
            if version is None:
                break  # another sweep, or somebody who uses one of them; the next one finds the others again
            removed += len(due)
    return removed
