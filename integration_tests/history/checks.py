"""What must hold in a history. Pure; each check yields the faults that it finds, and is tested with mutants.

The model is that of docs/guarantees.md and nothing of the code under test decides here, except for the names of
segments and the shape of epochs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from integration_tests.history.events import (
    AT_RANDOM,
    FOREIGN,
    Answer,
    Fault,
    Handed,
    History,
    Kept,
    Kind,
    Listed,
    Passing,
    Row,
    Shrunk,
)
from integration_tests.history.facts import Facts
from integration_tests.history.gateway_checks import GATEWAY_CHECKS
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN
from rollbridge.commitlog.control import EXPIRED, ControlKind
from rollbridge.stream.epochs import check_chain
from rollbridge.stream.reading import KeyLineage

OVERRUN_S: Final = 6.0
"""By how much a call may overrun its time-out here: one second is promised, the rest is for a machine that is busy."""


def find_faults(history: History) -> list[Fault]:
    """Every promise that a history breaks; none if it keeps them all."""
    facts = Facts(history)
    broken = list(chain(facts))
    # Without a whole chain of epochs there is no telling what stands before what.
    return broken or [fault for check in CHECKS for fault in check(facts)]


def lost_and_phantom(facts: Facts) -> Iterator[Fault]:
    """What was acknowledged is there once; what is there was asked for, and not refused."""
    for value, places in facts.places.items():
        if len(places) > 1 and not facts.is_sent_again(value):
            yield Fault(
                "duplicated", f"{value} stands at {[(stream, str(s), row.offset) for stream, s, row in places]}"
            )
        if value not in facts.writer_of:
            yield Fault("phantom", f"{value} was never written")
    for item in facts.history.operations:
        there = [write.value for write in item.writes if write.value in facts.places]
        if item.answer is Answer.OK and item.wish == "commit" and len(there) < len(item.writes):
            yield Fault("lost", f"{item.name}: {len(item.writes) - len(there)} of {len(item.writes)} records are gone")
        if there and (item.wish == "abort" or item.answer is Answer.FAILED):
            yield Fault("aborted record visible", f"{item.name}, {item.wish}, {item.answer}: {there[:3]}")
        if item.kind in (Kind.TRANSACTION, Kind.NATIVE, Kind.GATEWAY) and 0 < len(there) < len(item.writes):
            yield Fault("torn", f"{item.name}: {len(there)} of {len(item.writes)} records are visible")


def told_places(facts: Facts) -> Iterator[Fault]:
    """A record stands where its client was told, with the key that it has, in a segment of that key."""
    for item in facts.history.operations:
        for write in item.writes:
            places = facts.places.get(write.value, ())
            for stream, segment, row in places:
                if (stream, row.key) != (write.stream, write.key):
                    yield Fault("misplaced", f"{write} stands in {stream} under {row.key}")
                    continue
                state = facts.history.streams[stream]
                course = KeyLineage(state.history, state.keys.position(row.key.encode()))
                if course.base(segment) is None:
                    yield Fault("misplaced", f"{write.value} stands in {segment}, where its key cannot be")
            if write.place is not None and places:
                told = DLSN.parse(write.place)
                stands = [f"{segment}:{row.offset}" for _, segment, row in places]
                if f"{told.segment}:{told.offset}" not in stands:
                    yield Fault("wrong place", f"{write.value} was told {told}, it is {', '.join(stands)}")


def commit_order(facts: Facts) -> Iterator[Fault]:
    """Transactions stand in every segment in the order of the commit log, each whole, in the order of its writes."""
    order = {name: position for name, (position, _) in facts.outcomes.items()}
    for stream, state in facts.history.streams.items():
        for segment, rows in state.rows.items():
            last = -1
            local: dict[str, int] = {}
            for row in rows:
                if row.transaction is None:
                    continue
                position = order.get(row.transaction)
                if position is None:
                    yield Fault("no outcome", f"{row.value} of {row.transaction} is visible without an outcome")
                    continue
                if position < last:
                    yield Fault("commit order", f"{row.transaction} stands in {stream} {segment} before an earlier one")
                last = position
                if row.local_sequence <= local.get(row.transaction, -1):
                    yield Fault("local order", f"{row.value} stands in {segment} behind a later one of its transaction")
                local[row.transaction] = row.local_sequence


def outcomes(facts: Facts) -> Iterator[Fault]:
    """There is one outcome of a transaction, it is what its client was told, and it never flips."""
    seen = Counter(str(record.transaction) for _, record in facts.history.log if record.kind is not ControlKind.BEGIN)
    for name, times in seen.items():
        if times > 1:
            yield Fault("outcome flipped", f"{name} has {times} outcomes")
    for item in facts.history.operations:
        if item.kind is not Kind.TRANSACTION:
            continue
        position, record = facts.outcomes.get(item.name, (None, None))
        committed = record is not None and record.kind is ControlKind.COMMIT
        if record is None and item.answer is Answer.OK:
            yield Fault("no outcome", f"{item.name} was answered, but has no outcome")
        if committed and item.wish == "abort":
            yield Fault("outcome flipped", f"{item.name} is committed, its client wanted {item.wish}: {item.answer}")
        if committed and item.answer is Answer.FAILED:
            yield Fault("outcome flipped", f"{item.name} is committed, its client was told that it failed")
        if item.answer is Answer.OK and item.wish == "commit" and not committed:
            yield Fault("outcome flipped", f"{item.name} is not committed, its client was told that it is")
        if item.position is not None and position != item.position:
            yield Fault("outcome flipped", f"{item.name} was told position {item.position}, it has {position}")
        if record is not None and committed and record.records != len(item.writes):
            yield Fault("torn", f"{item.name} has {len(item.writes)} records, its commit says {record.records}")


def real_time_order(facts: Facts) -> Iterator[Fault]:
    """If A was answered before B was asked for, A stands before B on the commit log, unless others had ended B."""
    done = []
    for item in facts.history.operations:
        if item.kind is Kind.TRANSACTION and item.answer is Answer.OK and item.name in facts.outcomes:
            position, record = facts.outcomes[item.name]
            if record.kind is ControlKind.COMMIT or record.reason == AT_RANDOM:
                done.append((item.asked, item.answered, position, item.name))
    done.sort()
    ended = sorted(done, key=lambda entry: entry[1])
    highest, reached = (-1, ""), 0
    for asked, _, position, name in done:
        while reached < len(ended) and ended[reached][1] < asked:
            highest = max(highest, (ended[reached][2], ended[reached][3]))
            reached += 1
        if highest[0] > position:
            yield Fault("real-time order", f"{name} was asked for after the answer of {highest[1]}, but stands before")


def session_order(facts: Facts) -> Iterator[Fault]:
    """Commits of one session stand on the commit log in the order in which it asked for them, answered or not."""
    asked: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for item in facts.history.operations:
        if item.kind is Kind.TRANSACTION and item.wish == "commit":
            asked[item.client].append((item.asked, item.name))
    for client, items in asked.items():
        highest = (-1, "")
        for _, name in sorted(items):
            position, record = facts.outcomes.get(name, (None, None))
            if position is None or record is None or record.kind is not ControlKind.COMMIT:
                continue
            if position < highest[0]:
                yield Fault("session order", f"{client} asked for {name} after {highest[1]}, it stands before that")
            highest = max(highest, (position, name))


def leases(facts: Facts) -> Iterator[Fault]:
    """No transaction expires before its lease has run out, whatever the clock of the leader says."""
    names = {item.name for item in facts.history.operations}
    for name, (_, record) in facts.outcomes.items():
        if record.reason == EXPIRED and name in names:
            yield Fault("expired early", f"{name} was aborted for its lease, which is longer than any history")


def progress(facts: Facts) -> Iterator[Fault]:
    """While something is broken that concerns one client or stream only, commits of others go on."""
    done = sorted(
        item.answered
        for item in facts.history.operations
        if item.kind is Kind.TRANSACTION and item.wish == "commit" and item.answer is Answer.OK
    )
    for window in facts.history.windows:
        if window.bound_s is None:
            continue
        within = [window.began, *(at for at in done if window.began < at < window.ended), window.ended]
        longest = max(after - before for before, after in pairwise(within)) / 1e9
        if longest > window.bound_s:
            yield Fault("stood still", f"no commit for {longest:.1f} s, bound {window.bound_s:g} s: {window.fault}")


def time_outs(facts: Facts) -> Iterator[Fault]:
    """No call takes longer than it was given, but for the time in which its process stood still."""
    pauses = [window for window in facts.history.windows if window.paused is not None]
    for call in facts.history.calls:
        paused = sum(
            max(min(call.ended, pause.ended) - max(call.began, pause.began), 0)
            for pause in pauses
            if pause.paused == call.client
        )
        took = (call.ended - call.began - paused) / 1e9
        if took > call.timeout_s + OVERRUN_S:
            yield Fault("overran", f"{call.client}: {call.name} took {took:.1f} s, was given {call.timeout_s:g} s")


def deaths(facts: Facts) -> Iterator[Fault]:
    """No process ends by itself."""
    return (Fault("died", text) for text in facts.history.deaths)


def set_back(facts: Facts) -> Iterator[Fault]:
    """Nobody leads while ZooKeeper holds less than it did."""
    return (Fault("led outdated", text) for text in facts.history.led_outdated)


def names(facts: Facts) -> Iterator[Fault]:
    """The name of a topic means the same at gateways as at the brokers."""
    return (Fault("name clash", text) for text in facts.history.clashes)


def key_order(facts: Facts) -> Iterator[Fault]:
    """What one client wrote under a key, one after the other, stands in that order along the key's lineage."""
    asked: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for item in sorted(facts.history.operations, key=lambda entry: entry.asked):
        for write in item.writes:
            asked[item.client, write.stream, write.key].append(write.value)
    for (client, stream, key), values in asked.items():
        if len(values) < 2:
            continue
        wanted = [value for value in values if value in facts.places]
        own = set(wanted)
        stands = [row.value for _, _, row in facts.lineage(stream, key) if row.value in own]
        if stands != wanted and len(stands) == len(wanted):
            place = next(place for place, (one, other) in enumerate(zip(stands, wanted, strict=True)) if one != other)
            yield Fault("key order", f"{client}, {stream}, {key}: {stands[place]} stands where {wanted[place]} belongs")


def conditions(facts: Facts) -> Iterator[Fault]:
    """Before a conditional write stands what it expected, so of several that expect the same one at most has won."""
    winners: Counter[tuple[str, str, int]] = Counter()
    for item in facts.history.operations:
        if item.expected is None or not facts.is_written(item):
            continue
        write = item.writes[0]
        winners[write.stream, write.key, item.expected] += 1
        before = -1
        for sequence_id, _, row in facts.lineage(write.stream, write.key):
            if row.value == write.value:
                if before != item.expected:
                    yield Fault("condition", f"{write.value} expected {item.expected}, before it stands {before}")
                break
            if row.key == write.key:
                before = sequence_id
    for (stream, key, expected), times in winners.items():
        if times > 1:
            yield Fault("two winners", f"{times} writes of {key} in {stream} have won with {expected} expected")


def chain(facts: Facts) -> Iterator[Fault]:
    """Epochs form a chain, and the ends of all segments but the active ones are known."""
    for stream, state in facts.history.streams.items():
        for text in check_chain(state.history.records, state.history.first, state.history.born):
            yield Fault("epoch chain", f"{stream}: {text}")
        for segment in state.history.segments():
            if state.history.sealed_end(segment) is None and segment not in state.history.active.segment_ids:
                yield Fault("epoch chain", f"{stream}: the end of {segment} is not known")


def sealed(facts: Facts) -> Iterator[Fault]:
    """Sealed segments do not grow, not even by records that nobody commits."""
    for stream, state in facts.history.streams.items():
        for segment, rows in state.rows.items():
            end = state.history.sealed_end(segment)
            if end is not None and (state.ends[segment] > end or (rows and rows[-1].offset >= end)):
                yield Fault("sealed segment grew", f"{segment} of {stream}: {end}, now {state.ends[segment]}")


def readings(facts: Facts) -> Iterator[Fault]:
    """A reader sees each record of a segment once, none left out, and a successor after all that it continues."""
    for reading in facts.history.readings:
        state = facts.history.streams[reading.stream]
        seen: dict[SegmentId, list[tuple[int, str]]] = defaultdict(list)
        for segment, offset, value in reading.rows:
            if segment not in seen:
                for before in state.history.graph.predecessors(segment):
                    if len(seen.get(before, ())) < len(state.rows.get(before, ())):
                        yield Fault("early successor", f"{reading.reader}: {segment} was begun before {before} ended")
            seen[segment].append((offset, value))
        for segment, rows in seen.items():
            expected = [(row.offset, row.value) for row in state.rows.get(segment, ())][: len(rows)]
            if rows != expected:
                fault = next(
                    (
                        f"{got} instead of {wanted}"
                        for got, wanted in zip(rows, expected, strict=False)
                        if got != wanted
                    ),
                    f"{len(rows)} records, {len(expected)} exist",
                )
                yield Fault("skip or rewind", f"{reading.reader} in {segment} of {reading.stream}: {fault}")


def groups(facts: Facts) -> Iterator[Fault]:
    """Each consumer group is handed each record, and those of a key for the first time in their order."""
    if facts.history.handed is None:
        return
    of_group: dict[str, list[Handed]] = defaultdict(list)
    for item in sorted(facts.history.handed, key=lambda entry: entry.at):
        of_group[item.group].append(item)
    for name, items in sorted(of_group.items()):
        first: dict[tuple[str, str], int] = {}
        for place, item in enumerate(items):
            first.setdefault((item.stream, item.value), place)
        for stream, state in facts.history.streams.items():
            keys = {row.key for rows in state.rows.values() for row in rows}
            for key in sorted(keys):
                rows = [row.value for _, _, row in facts.lineage(stream, key) if row.key == key]
                missed = [value for value in rows if (stream, value) not in first]
                if missed:
                    text = f"{name}, {stream}, {key}: {missed[:3]} of {len(rows)} were never handed out"
                    yield Fault("group missed", text)
                order = [first[stream, value] for value in rows if (stream, value) in first]
                if order != sorted(order):
                    yield Fault("group order", f"{name}, {stream}, {key}: handed out in another order")


def copies(facts: Facts) -> Iterator[Fault]:
    """Consume, transform, produce: each record is copied once."""
    if facts.history.copied is None:
        return
    stream, values = facts.history.copied
    counts = Counter(values)
    there = [row.value for rows in facts.history.streams[stream].rows.values() for row in rows]
    for value in there:
        if counts[value] != 1:
            yield Fault("copies", f"{value} of {stream} has {counts[value]} copies")
    for value in counts.keys() - set(there):
        yield Fault("copies", f"{value} is a copy of nothing")


def lives(facts: Facts) -> Iterator[Fault]:
    """What was told to stand in a segment of the last life of a stream does, and nothing else is there.

    Over an adopted topic, so does what was told in other lives of the stream, if the topic is the same.
    """
    for item in facts.history.passing:
        yield from _lived(item)


def _lived(passing: Passing) -> Iterator[Fault]:
    state, stream = passing.state, passing.stream
    rows = {row.value: (segment, row.offset) for segment, found in state.rows.items() for row in found}
    if sum(map(len, state.rows.values())) != len(rows):
        yield Fault("lives", f"a record stands twice in the last life of {stream}")
    writer_of = {write.value: item for item in passing.operations for write in item.writes}
    for value in rows:
        item = writer_of.get(value)
        if item is None or item.answer is Answer.FAILED:
            yield Fault("lives", f"{value} stands in {stream}, and its writer was told: {item and item.answer}")
    segments = set(state.history.segments())
    latest: dict[tuple[str, str, SegmentId], tuple[int, str]] = {}
    for item in sorted(passing.operations, key=lambda entry: entry.asked):
        is_kept = passing.since is not None and item.asked > passing.since
        for write in item.writes:
            if item.answer is not Answer.OK or write.stream != stream:
                continue
            found = rows.get(write.value)
            if item.wish == "abort":
                if found is not None:
                    yield Fault("lives", f"{write.value} of {stream} was aborted, and is at {found}")
                continue
            told = None if write.place is None else DLSN.parse(write.place)
            if told is not None and (told.segment in segments or is_kept):
                # Segments of an adopted topic have the numbers of its partitions, in whatever life.
                stands = found and (found[0].number if is_kept else found[0], found[1])
                if stands != (told.segment.number if is_kept else told.segment, told.offset):
                    yield Fault("lives", f"{write.value} of {stream} was told {told}, it is at {found}")
            elif is_kept and found is None:
                yield Fault("lives", f"{write.value} of {stream} is gone, in the topic that it was written to")
            if is_kept and found is not None:
                course = item.client, write.key, found[0]
                offset, before = latest.get(course, (-1, ""))
                if found[1] < offset:
                    yield Fault("lives", f"{write.value} of {stream} stands before {before}, an earlier one")
                latest[course] = found[1], write.value


def shrunk(facts: Facts) -> Iterator[Fault]:
    """Where records were lost: what is left was asked for, once; what was to be kept is there; no update is lost."""
    for item in facts.history.shrunk:
        yield from _left_overs(item)
        yield from _lost_updates(item)
        yield from _skipped(item)


def _left_overs(item: Shrunk) -> Iterator[Fault]:
    found: dict[str, tuple[SegmentId, Row]] = {}
    for segment, rows in item.state.rows.items():
        for row in rows:
            if row.value in found and not row.value.startswith(FOREIGN):
                yield Fault("doubled", f"{row.value} stands twice in {item.stream}")
            found[row.value] = segment, row
    writer_of = {write.value: (operation, write) for operation in item.operations for write in operation.writes}
    for value, (segment, row) in found.items():
        if value.startswith(FOREIGN):
            continue
        operation, write = writer_of.get(value, (None, None))
        if operation is None or write is None:
            yield Fault("invented", f"{value} of {item.stream} was never written")
        elif operation.answer is Answer.FAILED or operation.wish == "abort":
            yield Fault("invented", f"{value} of {item.stream}: {operation.wish}, {operation.answer}")
        elif write.key != row.key or (write.place and _place(write.place) != (segment, row.offset)):
            yield Fault("misplaced", f"{value} of {item.stream} was told {write.place}, it is {segment}:{row.offset}")
    if item.starts is None:
        return
    for value, (operation, write) in writer_of.items():
        if operation.answer is Answer.OK and operation.wish == "commit" and write.place and value not in found:
            segment, offset = _place(write.place)
            if segment in item.starts and offset >= item.starts[segment]:
                yield Fault(
                    "truncated too much", f"{value} of {item.stream} stood at {write.place}, and was to be kept"
                )


def _lost_updates(item: Shrunk) -> Iterator[Fault]:
    """Nothing of its key that is known of stands between a conditional write and what it expected.

    What a stranger has put into a segment that does not hold the key is beside it: who looks for a key looks where its
    records are.
    """
    bases = item.state.history.graph.sequence_bases
    known = item.state.history.segments()
    stands: dict[str, dict[int, str]] = defaultdict(dict)
    for segment, rows in item.state.rows.items():
        for row in rows:
            if segment in known and item.state.keys.position(row.key.encode()) in known[segment].range:
                stands[row.key][bases[segment] + row.offset] = row.value
    for operation in item.operations if item.starts is not None else ():  # what was truncated is known all the same
        for write in operation.writes:
            if operation.answer is Answer.OK and operation.wish == "commit" and write.place is not None:
                segment, offset = _place(write.place)
                if segment in bases:
                    stands[write.key][bases[segment] + offset] = write.value
    places = {value: place for found in stands.values() for place, value in found.items()}
    for operation in item.operations:
        write = operation.writes[0]
        if operation.expected is None or write.value not in places:
            continue
        own = places[write.value]
        between = [value for place, value in stands[write.key].items() if operation.expected < place < own]
        if between or operation.expected >= own:
            text = (
                f"{write.value} of {item.stream} expected {operation.expected}, stands at {own}, behind {between[:3]}"
            )
            yield Fault("lost update", text)


def _skipped(item: Shrunk) -> Iterator[Fault]:
    """A reader that goes on from one record of a segment to another leaves none out in between."""
    known: dict[SegmentId, dict[int, str]] = defaultdict(dict)
    for operation in item.operations:
        for write in operation.writes:
            if operation.answer is Answer.OK and operation.wish == "commit" and write.place is not None:
                segment, offset = _place(write.place)
                known[segment][offset] = write.value
    for reading in item.readings:
        seen: dict[SegmentId, list[tuple[int, str]]] = defaultdict(list)
        for segment, offset, value in reading.rows:
            seen[segment].append((offset, value))
        for segment, rows in seen.items():
            for offset, value in rows:
                if value.startswith(FOREIGN) or known[segment].get(offset, value) == value:
                    continue
                yield Fault(
                    "skipped", f"{reading.reader}: {value} at {segment}:{offset}, where another one was written"
                )
            offsets = [offset for offset, _ in rows]
            if offsets != sorted(set(offsets)):
                yield Fault("skipped", f"{reading.reader}: rewinds in {segment} of {item.stream}")
            read, between = set(offsets), range(min(offsets), max(offsets))
            left_out = [value for offset, value in known[segment].items() if offset in between and offset not in read]
            if left_out:
                yield Fault("skipped", f"{reading.reader}: {left_out[:3]} in {segment} of {item.stream}")


def kept(facts: Facts) -> Iterator[Fault]:
    """A state that is compacted holds each update that was told once, and in the order of each client's.

    A group for which its stream waits is handed each of them, whatever is truncated.
    """
    for item in facts.history.kept:
        yield from _kept(item)


def _kept(item: Kept) -> Iterator[Fault]:
    counts = Counter(item.state)
    order = {value: place for place, value in enumerate(item.state)}
    asked = {write.value: operation for operation in item.operations for write in operation.writes}
    for value, times in counts.items():
        if times > 1 or value not in asked or asked[value].answer is Answer.FAILED:
            yield Fault("state", f"{value} is in the state {times} times: {asked.get(value)}")
    last: dict[str, int] = {}
    for value, operation in sorted(asked.items(), key=lambda entry: entry[1].asked):
        if operation.answer is not Answer.OK:
            continue
        if item.read is not None and value not in item.read:
            yield Fault("group missed", f"{value} of a state was never handed to the group that its stream waits for")
        if value not in counts:
            if not item.loses_end:
                yield Fault("state", f"{value} was told to be in the state")
            continue
        if order[value] < last.get(operation.client, -1):
            yield Fault("state", f"{value} is in the state before an earlier one of {operation.client}")
        last[operation.client] = order[value]


def listed(facts: Facts) -> Iterator[Fault]:
    """Who reads whole transactions is given each once, in the order of the commit log, with exactly its records.

    Those of a segment come in their order there.
    """
    wanted = [
        (position, str(record.transaction))
        for position, record in facts.history.log
        if record.kind is ControlKind.COMMIT
    ]
    end = facts.history.log[-1][0] if facts.history.log else -1
    runs: dict[str, dict[tuple[str, SegmentId], list[str]]] = defaultdict(lambda: defaultdict(list))
    for stream, state in facts.history.streams.items():
        for segment, rows in state.rows.items():
            for row in rows:
                if row.transaction is not None:
                    runs[row.transaction][stream, segment].append(row.value)
    by_reader: dict[str, list[Listed]] = defaultdict(list)
    for item in facts.history.listed:
        by_reader[item.reader].append(item)
    known = {item.name for item in facts.history.operations if item.kind is Kind.TRANSACTION}
    for reader, items in by_reader.items():
        seen = [(item.at, item.transaction) for item in items if item.at <= end]
        if seen != wanted:
            place = next(
                (place for place, (one, other) in enumerate(zip(seen, wanted, strict=False)) if one != other),
                min(len(seen), len(wanted)),
            )
            yield Fault(
                "listing",
                f"{reader} was given {seen[place : place + 2]} as number {place}, where the commit log has "
                f"{wanted[place : place + 2]}: {len(seen)} in all, {len(wanted)} are committed",
            )
        for item in items:
            # Of transactions of other streams it is not known what they wrote.
            if item.values is None or item.transaction not in known:
                continue
            there = runs[item.transaction]
            if Counter(item.values) != Counter(value for run in there.values() for value in run):
                yield Fault("listing", f"{reader}: {item.transaction} with {item.values}, it has {dict(there)}")
            elif any([value for value in item.values if value in set(run)] != run for run in there.values()):
                yield Fault("listing", f"{reader}: {item.transaction} with {item.values}, not as in {dict(there)}")


def _place(text: str) -> tuple[SegmentId, int]:
    told = DLSN.parse(text)
    return told.segment, told.offset


CHECKS = (
    lost_and_phantom,
    told_places,
    commit_order,
    outcomes,
    real_time_order,
    session_order,
    key_order,
    conditions,
    sealed,
    readings,
    leases,
    progress,
    time_outs,
    deaths,
    set_back,
    names,
    groups,
    copies,
    lives,
    shrunk,
    kept,
    listed,
    *GATEWAY_CHECKS,
)
