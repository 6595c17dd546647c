"""Streams that join late: whose list of streams of a transaction is in force, and what of each stream counts.

A transaction begins with a list of streams, which each of its BEGIN frames names, and frames name a stream by its place
in the list. A stream joins when the present owner sends a BEGIN frame to its buffer that names the list with the stream
behind it; what the header of this frame says of ``segment`` tells it from a BEGIN frame of somebody who resumes the
transaction. So the list only grows, and places keep their meaning, as long as nobody else comes to own it.

Who resumes a transaction names the list that the leader knew. A stream which a former owner had join meanwhile is not
on it, and does not count any more, unless the new owner has it join again; then its own records count there, and no
earlier ones. All of that must come out the same in whatever order the buffers are read. Since the BEGIN frames in the
home stream's buffer tell who owns the transaction:

- a frame of an owner before the present one changes nothing;
- what somebody names whose BEGIN frame in the home stream's buffer has not been met is kept apart: such streams are
  *strays*, with places that no manifest names, until it is known whether that part comes to own the transaction;
- if the first frame that is met is one with which a stream joins somebody who resumed the transaction, the list of the
  one who began it is not known yet, and that frame's is a *guess*.

Pure; the fold calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from rollbridge.model.frames import BeginFrame
from rollbridge.model.ids import OWNER_PART
from rollbridge.model.names import Partition, parse_buffer_topic
from rollbridge.model.pieces import CACHED_PRICE, BufferedTransaction, HeldFrames, StreamLists
from rollbridge.model.transaction import State

Streams = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Learned:
    """What has become of a transaction.

    Attributes:
        is_changed: Whether its streams have changed, or whose they are.
        cached_bytes: Memory of cached frames that were dropped, of streams that are none of it any more.
    """

    is_changed: bool = False
    cached_bytes: int = 0


NOTHING = Learned()


def extends(longer: Streams, shorter: Streams) -> bool:
    """Tell whether a list of streams begins with another one, reference epochs included."""
    return len(longer) >= len(shorter) and list(islice(longer.items(), len(shorter))) == list(shorter.items())


def is_same(one: Streams, other: Streams) -> bool:
    """Tell whether two lists are the same, in the same order."""
    return one is other or (len(one) == len(other) and extends(one, other))


def learn(item: BufferedTransaction, part: int, begin: BeginFrame, *, is_join: bool = True) -> Learned:
    """Take the list of a BEGIN frame of a part, which may stand in any buffer of the transaction.

    One with which nothing joins says what that in the home buffer says, so of a later owner it need not be kept.
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
        return NOTHING
    if part < item.lister or item.state is not State.OPEN or begin.home != item.begin.home:
        return NOTHING
    if not is_join and is_same(named, item.begin.streams):
        return NOTHING
    if lists is not None and part in lists.barred:
        return NOTHING
    lists = _lists_of(item)
    known = lists.later.get(part)
    if known is not None and not (len(named) > len(known) and extends(named, known)):
        return NOTHING
    lists.later[part] = named
    for name, epoch in named.items():
        if name not in item.begin.places and name not in lists.strays:
            lists.strays[name] = epoch, lists.next_place
            lists.next_place += 1
    return Learned(is_changed=True)


def guess(item: BufferedTransaction, part: int) -> None:
    """Note that the first BEGIN frame that was met is one with which a stream joined a part that resumed it."""
    lists = _lists_of(item)
    lists.is_guessed = True
    lists.later[part] = item.begin.streams


def note_join(item: BufferedTransaction, part: int, stream: str) -> None:
    """Note that a stream joined the transaction of a part, whose BEGIN frame stands in the stream's buffer."""
    joins = _lists_of(item).joins
    known = joins.get(stream, ())
    if part not in known:
        joins[stream] = (*known, part)


def bar(item: BufferedTransaction, part: int) -> Learned:
    """Note that a part does not come to own the transaction: its BEGIN frame in the home buffer came too late."""
    lists = _lists_of(item)
    lists.barred.add(part)
    return NOTHING if lists.later.pop(part, None) is None else _put_in_force(item, item.begin)


def hand_over(item: BufferedTransaction, part: int, begin: BeginFrame) -> Learned:
    """Put the list of a part in force that has come to own the transaction, by its BEGIN frame in the home buffer."""
    lists = item.lists
    known = [begin.streams]
    if part == item.lister:
        known.append(item.begin.streams)
    if lists is not None and part in lists.later:
        known.append(lists.later[part])
    item.lister = part
    named = begin.streams
    for other in known:
        if len(other) > len(named) and extends(other, named):
            named = other
    if is_same(named, item.begin.streams) and (lists is None or not lists.later):
        return NOTHING
    return _put_in_force(item, replace(item.begin, streams=named))


def told_less(item: BufferedTransaction, begin: BeginFrame) -> bool:
    """Tell whether the last savepoint names a stream of which whoever resumes the transaction was not told."""
    held = item.savepoint
    return held is not None and held.frame.manifest.names_beyond(len(begin.streams))


def _lists_of(item: BufferedTransaction) -> StreamLists:
    if item.lists is None:
        item.lists = StreamLists()
    return item.lists


def _put_in_force(item: BufferedTransaction, begin: BeginFrame) -> Learned:
    """Go on with the streams of ``begin``, and those that only later owners name; all others are forgotten."""
    lists = _lists_of(item)
    before = {**item.begin.places, **{name: place for name, (_, place) in lists.strays.items()}}
    lists.later = {part: named for part, named in lists.later.items() if part > item.lister}
    strays: dict[str, tuple[int, int]] = {}
    for named in lists.later.values():
        for name, epoch in named.items():
            if name in begin.places or name in strays:
                continue
            known = lists.strays.get(name)
            if known is None:
                known = epoch, lists.next_place
                lists.next_place += 1
            strays[name] = known
    after = {**begin.places, **{name: place for name, (_, place) in strays.items()}}
    item.begin, lists.strays = begin, strays
    doomed = before.keys() - after.keys()
    cached = _forget(item, doomed, {before[name] for name in doomed}) if doomed else 0
    moved = {place: after[name] for name, place in before.items() if after.get(name, place) != place}
    if moved:
        item.frames.move(moved)
        item.last_count = {
            piece._replace(stream=moved.get(piece.stream, piece.stream)): count
            for piece, count in item.last_count.items()
        }
    return Learned(is_changed=True, cached_bytes=cached)


def _forget(item: BufferedTransaction, streams: set[str], places: set[int]) -> int:
    """Forget what arrived in buffers of streams that are none of the transaction; return the memory of cached frames.

    From where on these buffers are kept does not depend on it any more: what stands there never counts.
    """
    lists = _lists_of(item)
    item.begun_in -= streams
    for name in streams:
        lists.joins.pop(name, None)
    for partition in [place for place in item.first_offsets if _stream_of(place) in streams]:
        del item.first_offsets[partition]
    cached = 0
    kept = HeldFrames()
    for frame in item.frames:
        if frame.piece.stream in places:
            item.bytes -= frame.size
            if frame.batch is not None:
                cached += frame.size + CACHED_PRICE
        else:
            kept.append(frame)
    if len(kept) < len(item.frames):
        item.frames = kept
        item.last_count = {piece: count for piece, count in item.last_count.items() if piece.stream not in places}
    item.cached_bytes -= cached
    return cached


def _stream_of(partition: Partition) -> str:
    return str(parse_buffer_topic(partition[0])[0])
