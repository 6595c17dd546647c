"""The lineage of a stream's segments: which was active when, over which keys, and what each one continues.

This is what a picture or a table of an epoch history needs, worked out in one pass over the epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.model.epochs import EpochCause, EpochHistory, Segment
from bridge.model.identifiers import SegmentId
from bridge.model.keyspace import KeyRange


@dataclass(frozen=True, slots=True)
class Life:
    """One segment from its first epoch, of those that are kept, to its last, the newest one while it is active."""

    segment: Segment
    first: int
    last: int
    cause: EpochCause
    """Why the epoch was made in which it began."""
    active: bool
    sealed_end: int | None
    """Offset after its last record; None while it is active or being sealed."""


@dataclass(frozen=True, slots=True)
class Link:
    """``after`` continues ``before`` on the keys of ``range``, from epoch ``epoch`` on."""

    before: SegmentId
    after: SegmentId
    epoch: int
    range: KeyRange


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lives in order of their first epoch and their range; links in order of their epoch and range."""

    lives: tuple[Life, ...]
    links: tuple[Link, ...]


def lineage(history: EpochHistory) -> Lineage:
    """The lives of all segments of a history and the links between them.

    That of the last history is kept: whoever follows a stream asks again and again for the same one.
    """
    global _last
    known, found = _last
    if known is not history:
        found = _lineage(history)
        _last = history, found
    return found


_last: tuple[EpochHistory | None, Lineage] = None, Lineage((), ())


def _lineage(history: EpochHistory) -> Lineage:
    newest = history.active.epoch
    lives: dict[SegmentId, Life] = {}
    links: list[Link] = []
    for record in history.records:
        ended, began = history.ended_with(record.epoch), history.began_with(record.epoch)
        for item in ended:
            ends = record.sealed_ends
            life = lives[item.id]
            lives[item.id] = Life(
                item, life.first, record.epoch - 1, life.cause, False, None if ends is None else ends.get(item.id)
            )
        for item in began:
            lives[item.id] = Life(item, record.epoch, newest, record.cause, True, None)
        links.extend(_links(record.epoch, ended, began))
    return Lineage(tuple(lives.values()), tuple(links))


def _links(epoch: int, before: Sequence[Segment], after: Sequence[Segment]) -> list[Link]:
    """What begins with an epoch, joined with what ended; both sorted by range, so one sweep finds every overlap."""
    found: list[Link] = []
    old = new = 0
    while old < len(before) and new < len(after):
        one, other = before[old], after[new]
        low, high = max(one.range.low, other.range.low), min(one.range.high, other.range.high)
        if low < high:
            found.append(Link(one.id, other.id, epoch, KeyRange(low, high)))
        if one.range.high <= other.range.high:
            old += 1
        if other.range.high <= one.range.high:
            new += 1
    return found
