"""Streams that join late: the list of streams in force, and the frames of each stream that count.

A transaction begins with a list of streams, which each of its BEGIN frames names, and frames name a stream by its index
in the list. A stream joins when the present owner sends a BEGIN frame to its buffer that names the list with the stream
appended; ``segment`` in the header tells this frame from a BEGIN frame that resumes the transaction. So the list only
grows, and indexes keep their meaning, as long as the owner stays the same.

A new owner names the list that the leader knew. A stream that a former owner let join meanwhile is not on it, and does
not count any more, unless the new owner lets it join again; then its own records count there, and no earlier ones. The
result must not depend on the order in which the buffers are read. Since the BEGIN frames in the home stream's buffer
tell the owner:

- a frame of an owner before the present one does not change the list;
- frames in buffers of unlisted streams are kept apart: such streams are *strays*, with indexes that no manifest names.
  A later owner may name them, because it let a stream join, or because it got its list before the present owner;
- if the first BEGIN frame met lets a stream join a resumed transaction, the first owner's list is unknown, and this
  frame's is a *guess*.

Pure; the fold calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from rollbridge.base.ids import OWNER_PART
from rollbridge.buffer.frames import BeginFrame
from rollbridge.buffer.state import BufferedTransaction, StreamLists
from rollbridge.buffer.table import State

Streams = Mapping[str, int]


def extends(longer: Streams, shorter: Streams) -> bool:
    """Return whether a list of streams begins with another one, reference epochs included."""
    return len(longer) >= len(shorter) and list(islice(longer.items(), len(shorter))) == list(shorter.items())


def is_same(one: Streams, other: Streams) -> bool:
    """Return whether two lists are the same, in the same order."""
    return one is other or (len(one) == len(other) and extends(one, other))


def learn(item: BufferedTransaction, part: int, begin: BeginFrame, *, is_join: bool = True) -> bool:
    """Take the list of a BEGIN frame of a part, from any buffer of the transaction.

    Returns whether anything has changed. A frame with which no stream joins repeats the one in the home buffer, so of a
    later owner it need not be kept.
    """
    lists = item.lists
    named = begin.streams
    if lists is not None and lists.is_guessed and part == OWNER_PART:
        lists.is_guessed = False
        item.owners.adopt(begin)
        return _put_in_force(item, begin)
    if part == item.lister:
        if len(named) > len(item.begin.streams) and extends(named, item.begin.streams):
            return _put_in_force(item, replace(item.begin, streams=named))
        return False
    if item.state is not State.OPEN or begin.home != item.begin.home:
        return False
    if part < item.lister:
        return _keep(item, named)
    if not is_join and is_same(named, item.begin.streams):
        return False
    if lists is not None and part in lists.barred:
        return False
    lists = _lists_of(item)
    known = lists.later.get(part)
    if known is not None and not (len(named) > len(known) and extends(named, known)):
        return False
    lists.later[part] = named
    _keep(item, named)
    return True


def guess(item: BufferedTransaction, part: int) -> None:
    """Record that what was met first, a BEGIN frame or a record, names the list of a part that resumed it."""
    lists = _lists_of(item)
    lists.is_guessed = True
    lists.later[part] = item.begin.streams


def note_join(item: BufferedTransaction, part: int, stream: str) -> None:
    """Record that a stream joined the transaction of a part, whose BEGIN frame is in the stream's buffer."""
    joins = _lists_of(item).joins
    known = joins.get(stream, ())
    if part not in known:
        joins[stream] = (*known, part)


def bar(item: BufferedTransaction, part: int) -> bool:
    """Record that a part does not come to own the transaction: its BEGIN frame in the home buffer came too late."""
    lists = _lists_of(item)
    lists.barred.add(part)
    return lists.later.pop(part, None) is not None


def hand_over(item: BufferedTransaction, part: int, begin: BeginFrame) -> bool:
    """Put the list of a part in force that has come to own the transaction, by its BEGIN frame in the home buffer."""
    lists = item.lists
    known = [begin.streams]
    if part == item.lister:
        known.append(item.begin.streams)
    if lists is not None:
        lists.is_guessed = False
        if part in lists.later:
            known.append(lists.later[part])
    item.lister = part
    named = begin.streams
    for other in known:
        if len(other) > len(named) and extends(other, named):
            named = other
    if is_same(named, item.begin.streams) and (lists is None or not lists.later):
        return False
    return _put_in_force(item, replace(item.begin, streams=named))


def told_less(item: BufferedTransaction, begin: BeginFrame) -> bool:
    """Return whether the last savepoint names a stream that the new owner does not know."""
    held = item.savepoint
    return held is not None and held.frame.manifest.names_beyond(len(begin.streams))


def _lists_of(item: BufferedTransaction) -> StreamLists:
    if item.lists is None:
        item.lists = StreamLists()
    return item.lists


def _keep(item: BufferedTransaction, streams: Streams) -> bool:
    """Keep what arrives in the buffers of streams that are not on the list; return whether any of them is new."""
    fresh = [
        name
        for name in streams
        if name not in item.begin.places and (item.lists is None or name not in item.lists.strays)
    ]
    for name in fresh:
        lists = _lists_of(item)
        lists.strays[name] = streams[name], lists.next_place
        lists.next_place += 1
    return bool(fresh)


def _put_in_force(item: BufferedTransaction, begin: BeginFrame) -> bool:
    """Continue with the streams of ``begin``; all others become strays."""
    lists = _lists_of(item)
    before = dict(item.begin.streams)
    places = {**item.begin.places, **{name: place for name, (_, place) in lists.strays.items()}}
    lists.later = {part: named for part, named in lists.later.items() if part > item.lister}
    lists.strays = {name: stray for name, stray in lists.strays.items() if name not in begin.places}
    item.begin = begin
    for named in (before, *lists.later.values()):
        _keep(item, named)
    moved = {place: after for name, place in places.items() if (after := _place_of(item, name)) != place}
    if moved:
        item.frames.move(moved)
        if item.beside is not None:
            item.beside = {moved.get(place, place): size for place, size in item.beside.items()}
        item.last_count = {
            piece._replace(stream=moved.get(piece.stream, piece.stream)): count
            for piece, count in item.last_count.items()
        }
    return True


def _place_of(item: BufferedTransaction, stream: str) -> int:
    place = item.place_of(stream)
    assert place is not None  # it is on the list, or a stray
    return place
