"""What must hold of transactions that producers wrote through gateways. Pure; each check has mutants that it must find.

That what is committed is there once and whole, and nothing else is there, is checked as for native transactions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from integration_tests.history.events import Answer, Fault, Kind, Operation
from integration_tests.history.facts import Facts
from rollbridge.commitlog.control import ControlKind


def ours(facts: Facts) -> Iterator[Fault]:
    """What a producer takes for its transaction is one of ours, and nothing else is in that."""
    whose: dict[str, str] = {}
    for item in _written(facts):
        names = _transactions(facts, item)
        if len(names) != 1:
            yield Fault("torn", f"{item.name} stands in transactions {names}")
        for name in names:
            if name is None:
                yield Fault("no outcome", f"{item.name} stands outside of transactions")
                continue
            if name in whose:
                yield Fault("joined", f"{item.name} and {whose[name]} are one transaction, {name}")
            whose[name] = item.name
            _, record = facts.outcomes.get(name, (None, None))
            if record is None or record.kind is not ControlKind.COMMIT:
                yield Fault("no outcome", f"{item.name} is visible, transaction {name} has {record}")
            elif record.records != len(item.writes):
                yield Fault("torn", f"{item.name} has {len(item.writes)} records, its commit says {record.records}")


def written_order(facts: Facts) -> Iterator[Fault]:
    """Records of a transaction stand in each partition of a topic in the order in which they were sent."""
    for item in _written(facts):
        sent = {write.value: number for number, write in enumerate(item.writes)}
        last: dict[tuple[str, str], int] = {}
        for stream, state in facts.history.streams.items():
            for segment, rows in state.rows.items():
                for row in rows:
                    if row.value not in sent:
                        continue
                    # On a topic with partitions, the producer's holds; elsewhere the key's.
                    course = (stream, str(segment) if state.keys.partitions else row.key)
                    if sent[row.value] < last.get(course, -1):
                        yield Fault("local order", f"{row.value} stands in {segment} behind a later one of its sender")
                    last[course] = sent[row.value]


def producer_order(facts: Facts) -> Iterator[Fault]:
    """Commits of a transactional id stand on the commit log in the order in which they were asked for, by whomever."""
    asked: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for item in _written(facts):
        for name in _transactions(facts, item):
            if name is not None:
                asked[item.producer].append((item.asked, name, item.name))
    for producer, items in asked.items():
        placed = [(facts.outcomes[name][0], said) for _, name, said in sorted(items) if name in facts.outcomes]
        for (before, one), (after, other) in pairwise(placed):
            if after < before:
                yield Fault("session order", f"{producer} asked for {other} after {one}, it stands before that")


def fenced(facts: Facts) -> Iterator[Fault]:
    """A producer whose id another one has taken is not heard any more."""
    for item in facts.history.operations:
        if item.fenced and (item.answer is Answer.OK or facts.is_written(item)):
            yield Fault("fenced", f"{item.name} was asked for by a producer that was fenced: {item.answer}")


def refusals(facts: Facts) -> Iterator[Fault]:
    """A producer whose id nobody else has is refused nothing."""
    for item in facts.history.refusals:
        yield Fault("refused", f"{item.client}, {item.what}: {item.code}")


def offsets(facts: Facts) -> Iterator[Fault]:
    """The offset of a producer's consumer group is that of its last transaction that is committed and had one."""
    last: dict[str, tuple[int, int]] = {}
    for item in _written(facts):
        if item.offset is not None:
            last[item.producer] = max(last.get(item.producer, (0, 0)), (item.asked, item.offset))
    for producer, committed in facts.history.offsets.items():
        wanted = last[producer][1] if producer in last else None
        if committed != wanted:
            yield Fault("offsets", f"{producer} has committed {committed}, its last transaction says {wanted}")


def waits(facts: Facts) -> Iterator[Fault]:
    """While nothing is broken that others need, readers go on, whatever is open."""
    for reading in facts.history.readings:
        for window in facts.history.windows if reading.times else ():
            if window.bound_s is None or reading.stream not in facts.history.busy:
                continue
            within = [window.began, *(at for at in reading.times if window.began < at < window.ended), window.ended]
            longest = max(after - before for before, after in pairwise(within)) / 1e9
            if longest > window.bound_s:
                text = f"{reading.reader} of {reading.stream} was handed nothing for {longest:.1f} s: {window.fault}"
                yield Fault("reader waits", text)


def _written(facts: Facts) -> Sequence[Operation]:
    return [item for item in facts.history.operations if item.kind is Kind.GATEWAY and facts.is_written(item)]


def _transactions(facts: Facts, item: Operation) -> set[str | None]:
    return {row.transaction for write in item.writes for _, _, row in facts.places.get(write.value, ())}


GATEWAY_CHECKS = (ours, written_order, producer_order, fenced, refusals, offsets, waits)
