"""Life of a session on record: when its client looks at it again, and when leaders may remove it.

A record is only needed while somebody might still act in an older session of its client. Most names are used once: a
Flink job makes one for each checkpoint and subtask. So the record of a session in which nothing is open, and of whose
client nothing is remembered, goes a day after it was last written. What takes its place is one number for the whole
group, the *floor*, in the value of the records' parent: no session with an epoch up to the floor counts, unless it is
on record. It is raised before any record goes, so that

- a session that begins later has an epoch above the floor, and so above that of each session whose record is gone;
- a leader, this one or a later one, refuses what a session without a record begins, without having heard of it.

A client that has begun nothing for long may still live. It looks at its record before it begins again, twelve hours at
most after it last did, and so keeps it for another day, or finds it gone and registers anew.

Releases before 0.3.0 do neither: their records do not say so, and stay for a year after they were registered, since who
has one may use it all that time. What they begin for a client without a record has the minutes since 1970 as its epoch;
the floor stays a day behind those.
"""

from __future__ import annotations

import re
from typing import Final

from rollbridge.model.ids import parse_number
from rollbridge.model.records import MINUTE_MS, ClientSession

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
RENEW_MS: Final = 12 * HOUR_MS
"""Age from which on a client looks at its record before it begins anything."""
KEPT_MS: Final = DAY_MS
"""Least age of a record that is removed: the client may look late, and clocks may be wrong by a time zone."""
KEPT_OF_OTHERS_MS: Final = 365 * DAY_MS
"""The same, since it was registered, of a client that does not look at it, and of one that names a joint transaction:
without the record, that could be written twice."""
EPOCH_MAX: Final = (1 << 31) - 1


_PLAIN: Final = re.compile(
    rb'\{"version": 1, "client_name": "([A-Za-z0-9._:@-]+)", "epoch": (\d{1,9}), "registered_ms": (\d{1,15}), '
    rb'"shared": null(, "renews": true)?\}'
)
"""The record of a session that was never shared, as we write it."""


def read_session(raw: bytes) -> ClientSession:
    """Return the session in a record, as :meth:`ClientSession.from_json` does; most take a tenth of the time here.

    Raises:
        NewerFormatError, CorruptDataError: as that.
    """
    plain = _PLAIN.fullmatch(raw)
    if plain is None:
        return ClientSession.from_json(raw)
    name, epoch, registered_ms, renews = plain.groups()
    return ClientSession(name.decode(), int(epoch), int(registered_ms), None, renews is not None)


def floor_of(raw: bytes) -> int:
    """Return the floor in the value of the records' parent; 0 if nothing was removed yet, or it cannot be read.

    Who begins a session goes by the minutes then, which floors are behind; a leader sets it right.
    """
    return parse_number(raw, EPOCH_MAX) or 0


def is_damaged(raw: bytes) -> bool:
    """Return True if the value of the records' parent is no floor."""
    return bool(raw) and parse_number(raw, EPOCH_MAX) is None


def highest_floor(now_ms: int, kept_ms: int = KEPT_MS) -> int:
    """Return the highest floor that there may be at this time, by the lowest clock."""
    return max((now_ms - kept_ms) // MINUTE_MS, 0)


def may_go(session: ClientSession, written_ms: int, now_ms: int, kept_ms: int = KEPT_MS) -> bool:
    """Return True if a record may be removed, provided that nothing of its client is open or remembered.

    Args:
        session: The record.
        written_ms: When it was last written, by ZooKeeper's clock, ms since 1970.
        now_ms: By the lowest clock.
        kept_ms: Least age of a record whose client looks at it.
    """
    if session.has_series:
        return False
    if not session.renews or session.shared is not None:
        return session.registered_ms + KEPT_OF_OTHERS_MS < now_ms
    return max(written_ms, session.registered_ms) + kept_ms < now_ms and session.epoch <= highest_floor(now_ms, kept_ms)
