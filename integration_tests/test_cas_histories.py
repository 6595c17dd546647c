"""Conditional writes are linearizable: recorded histories of many writers, under kills, pauses and scales.

And the check is worth something: three ways to get the protocol wrong are found by it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

import rollbridge
from integration_tests.cas_worker import Line, Task, read_notes, work
from integration_tests.clients import Site, until
from integration_tests.histories import ANY, Answer, Operation, Stored, Write, find_fault
from integration_tests.patience import PATIENCE_S
from integration_tests.pauses import pause
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import SegmentId
from rollbridge.cas import machine
from rollbridge.cas.machine import MOVES, ConditionalAppend, RoundState
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import CasWriteError, InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch import Stretch
from rollbridge.kafka.records import BatchBuilder
from rollbridge.kafka.segment_tail import Read, SegmentTail
from rollbridge.metadata.paths import cas_slots
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.conditions import Accepted, Verdict
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import StreamName, parse_segment_topic

KEYS = tuple(key for key in (f"key-{number}" for number in range(400)) if KeySpace().position(key.encode()) < 0.05)[:4]
"""Keys that stay in one segment through the scales below, so that there is one log to be linearizable."""


@pytest.fixture
def register(client: rollbridge.Bridge, scope: str) -> str:
    """A stream whose first segment holds the keys."""
    name = f"{scope}/register"
    client.admin.create_stream(name, segments=1)
    return name


def task(
    site: Site, stream: str, name: str, operations: int, seed: int, out: str = "", in_transactions: bool = False
) -> Task:
    return Task(
        site.cluster.bootstrap_servers,
        site.cluster.zookeeper,
        site.root,
        stream,
        KEYS,
        name,
        operations,
        seed,
        out,
        in_transactions,
    )


def stored(site: Site, client: rollbridge.Bridge, stream: str) -> list[Stored]:
    """The final log of the keys, by a plain reader."""
    bases = client.admin.history(stream).graph.sequence_bases
    found = []
    for message in site.committed(stream):
        key, value, topic, offset = message.key(), message.value(), message.topic(), message.offset()
        assert isinstance(key, bytes)
        assert isinstance(value, bytes)
        assert topic is not None
        assert offset is not None
        segment = parse_segment_topic(topic)[1]
        found.append(Stored(bases[segment] + offset, key.decode(), value.decode()))
    assert [record.position for record in found] == sorted(record.position for record in found)
    return found


def scale_keys_segment(client: rollbridge.Bridge, stream: str, low_part: float) -> None:
    """Replace the segment that holds the keys, and the one beside it, by two others."""
    active = client.admin.history(stream).active.segments
    numbers = [item.id.number for item in active]
    client.admin.scale(stream, seal=numbers, ranges=[(0.0, low_part), (low_part, 1.0)])


# Many writers, nothing goes wrong but the others --------------------------------------------------------------------


@pytest.mark.parametrize("connections", [6, 1, 2])
def test_many_writers_and_transactions_of_one_segment_are_linearizable(
    site: Site, client: rollbridge.Bridge, register: str, connections: int
) -> None:
    operations = in_threads(site, register, writers=4, each=60, connections=connections, with_transactions=2)
    fault = find_fault(operations, stored(site, client, register))
    assert fault is None, fault
    writes = [item for item in operations if isinstance(item, Write)]
    assert {Answer.OK, Answer.REFUSED} <= {item.answer for item in writes}


def in_threads(
    site: Site, stream: str, writers: int, each: int, connections: int = 6, with_transactions: int = 0
) -> list[Operation]:
    """Writers of one process, and some that use conditional transactions.

    Those that share a connection wait for each other before they append.
    """
    everybody = writers + with_transactions

    def one(number: int) -> list[Operation]:
        notes: list[Line] = []
        own = opened[number % connections]
        with own.cas_writer(stream, timeout=60) as writer:
            what = task(site, stream, f"w{number}", each, number, in_transactions=number >= writers)
            work(own, writer, what, notes.append)
        return list(read_notes(notes))

    with ExitStack() as stack, ThreadPoolExecutor(everybody) as pool:
        opened = [stack.enter_context(site.connect(f"client-{number}")) for number in range(connections)]
        return [item for found in pool.map(one, range(everybody)) for item in found]


# Processes that are killed and paused, while the stream is scaled ---------------------------------------------------


class Workers:
    """Writer processes, some of which are killed, paused and replaced; each third uses conditional transactions."""

    def __init__(self, site: Site, stream: str, folder: Path) -> None:
        self._site = site
        self._stream = stream
        self._folder = folder
        self._started = 0
        self._names: dict[int, str] = {}
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, operations: int) -> None:
        """One more."""
        number = self._started
        self._started += 1
        notes = str(self._folder / f"notes-{number}.jsonl")
        what = task(self._site, self._stream, f"p{number}", operations, number, notes, in_transactions=number % 3 == 2)
        command = [sys.executable, "-m", "integration_tests.cas_worker", json.dumps(asdict(what))]
        with (self._folder / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self.running.append(process)
        self._names[process.pid] = what.name

    def name_of(self, process: subprocess.Popen[bytes]) -> str:
        """The client name of a writer."""
        return self._names[process.pid]

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Those that have not finished, the paused ones among them."""
        return [item for item in self.running if item.poll() is None]

    def await_more(self, lines: int, paused: subprocess.Popen[bytes] | None = None) -> None:
        """Return once so many more lines were noted, or everybody has finished who is not paused."""
        goal = self._notes() + lines
        until(lambda: self._notes() >= goal or set(self.alive()) <= {paused}, 120)

    def _notes(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self._folder.glob("notes-*.jsonl"))

    def operations(self) -> Iterator[Operation]:
        """What all of them noted; a line that was cut by a kill is none."""
        for path in sorted(self._folder.glob("notes-*.jsonl")):
            lines = path.read_text().split("\n")
            yield from read_notes(json.loads(line) for line in lines[:-1])

    def close(self) -> None:
        """Nobody is left."""
        for process in self.running:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.wait(PATIENCE_S)


def slot_owners(site: Site, stream: str) -> set[str]:
    """Client names of those who hold slots."""
    parent = cas_slots(StreamName.parse(stream))
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        nodes = session.get_many([f"{parent}/{name}" for name in session.children(parent)])
    return {node.value.decode().split()[0] for node in nodes if node is not None}


def await_slot_lost(site: Site, stream: str, name: str) -> None:
    """Return once a client's ZooKeeper session has ended."""
    until(lambda: name not in slot_owners(site, stream), 120)


@pytest.fixture
def workers(site: Site, register: str, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(site, register, tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_killed_and_paused_writers_across_scales_are_linearizable(
    site: Site, client: rollbridge.Bridge, register: str, workers: Workers
) -> None:
    choice = random.Random(7)
    for _ in range(4):
        workers.start(150)
    for turn, low_part in enumerate((0.5, 0.25, 0.75)):
        workers.await_more(60)
        while len(workers.alive()) < 3:  # some may have finished already
            workers.start(100)
        victim = choice.choice(workers.alive())
        paused = choice.choice([item for item in workers.alive() if item is not victim])
        pause(paused)
        victim.kill()
        victim.wait(PATIENCE_S)
        workers.start(100)
        with client.transaction(register) as rolled:
            rolled.write(register, key=b"elsewhere-%d" % turn, value=b"")
            rolled.abort()
        scale_keys_segment(client, register, low_part)
        # Longer than the ZooKeeper session, and with it the native time-out: its slot goes to somebody else.
        await_slot_lost(site, register, workers.name_of(paused))
        workers.await_more(30, paused)
        os.kill(paused.pid, signal.SIGCONT)
    for process in workers.running:
        assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL)
    operations = list(workers.operations())
    fault = find_fault(operations, stored(site, client, register))
    assert fault is None, fault
    answers = [item.answer for item in operations if isinstance(item, Write)]
    assert answers.count(Answer.OK) > 100
    assert answers.count(Answer.REFUSED) > 20


# Ways to get it wrong -----------------------------------------------------------------------------------------------


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide on what is decided already, instead of waiting for all earlier offsets."""

    def part(self: SegmentTail, offset: int, to: int, epoch: int = NO_EPOCH) -> Steps[Stretch]:
        found = yield from Read(self.place, offset, offset, epoch)
        return found._replace(end=to, records=[record for record in found.records if record.offset < to])

    monkeypatch.setattr(SegmentTail, "part", part)


def check_before_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look whether the condition holds, then append without looking again."""

    def begin(round_: ConditionalAppend, _: machine.Began) -> AnyEffect | None:
        return ConditionalAppend._begin(round_, machine.Began(looks=True))

    def decide(round_: ConditionalAppend, event: machine.Appended) -> AnyEffect | None:
        round_.state, round_._offset = RoundState.DECIDING, event.offset
        return round_.handle(machine.Stable([Accepted(sns) for sns in _sns_at(round_, event.offset)]))

    monkeypatch.setitem(MOVES, (RoundState.NEW, machine.Began), begin)
    monkeypatch.setitem(MOVES, (RoundState.APPENDING, machine.Appended), decide)


def trust_the_end_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it that nothing is between when the record came right after the expected one and its marker."""
    original = ConditionalAppend._verdicts

    def verdicts(self: ConditionalAppend, offset: int) -> Steps[list[Verdict | InvalidRequestError]]:
        found = yield from original(self, offset)  # all earlier transactions are waited for
        dlsn = self.entries[0].condition.expected.dlsn
        if dlsn is not None and dlsn.segment == self.tail.segment and 0 < offset - dlsn.offset <= 2:
            return [Accepted(sns) for sns in _sns_at(self, offset)]
        return found

    monkeypatch.setattr(ConditionalAppend, "_verdicts", verdicts)
    monkeypatch.setattr(ConditionalAppend, "_is_refuted", lambda _: False)


def _sns_at(round_: ConditionalAppend, offset: int) -> list[tuple[rollbridge.SN, ...]]:
    tail = round_.tail
    return [
        (rollbridge.SN(rollbridge.DLSN.of(tail.segment, offset + place), None, tail.base + offset + place),)
        for place, _ in enumerate(round_.requests)
    ]


@pytest.mark.parametrize("mutant", [without_waiting, check_before_append])
def test_the_check_finds_writers_that_look_too_early(
    site: Site,
    client: rollbridge.Bridge,
    scope: str,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    for turn in range(10):
        stream = f"{scope}/register-{turn}"
        client.admin.create_stream(stream, segments=1)
        operations = in_threads(site, stream, writers=6, each=20)
        if find_fault(operations, stored(site, client, stream)) is not None:
            return
    pytest.fail("nothing was found wrong with a protocol that is")


def test_offsets_alone_decide_nothing(site: Site, client: rollbridge.Bridge, register: str) -> None:
    """The offset after the expected record and one more need not be its marker, but can be another writer's record."""
    operations = contend_behind_an_open_transaction(site, client, register)
    fault = find_fault(operations, stored(site, client, register))
    assert fault is None, fault
    assert [item.answer for item in operations if isinstance(item, Write)].count(Answer.OK) == 2


def test_the_check_finds_writers_that_trust_offsets(
    site: Site, client: rollbridge.Bridge, register: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_the_end_offset(monkeypatch)
    operations = contend_behind_an_open_transaction(site, client, register)
    assert find_fault(operations, stored(site, client, register)) is not None


def contend_behind_an_open_transaction(site: Site, client: rollbridge.Bridge, stream: str) -> list[Operation]:
    """Two writers expect a record whose transaction is still open when they append; then it is committed."""
    topic = StreamName.parse(stream).segment_topic(SegmentId.of(0, 0))
    key = KEYS[0].encode()
    reader = KafkaClient(site.cluster.bootstrap_servers).log()
    builder = BatchBuilder(1 << 10)
    builder.append(0, key, b"first")
    with (
        client.cas_writer(stream) as one,
        site.connect("other") as another,  # writers of one connection would wait for each other before they append
        another.cas_writer(stream) as other,
        KafkaClient(site.cluster.bootstrap_servers).appender(f"{stream}-by-hand") as appender,
        ThreadPoolExecutor(2) as pool,
    ):
        appender.init()
        asked = time.monotonic_ns()
        offset = appender.append([(topic, builder.build())])[0]

        def contend(writer: CasWriter, name: str) -> Write:
            began = time.monotonic_ns()
            try:
                sn = writer.write(key, name.encode(), expected=rollbridge.DLSN(0, 0, offset))
            except CasWriteError as refusal:
                ended, actual = time.monotonic_ns(), refusal.actual.sequence_id
                return Write(name, KEYS[0], False, offset, began, ended, Answer.REFUSED, None, actual)
            return Write(name, KEYS[0], False, offset, began, time.monotonic_ns(), Answer.OK, sn.sequence_id)

        contenders = [pool.submit(contend, one, "one"), pool.submit(contend, other, "other")]
        until(lambda: reader.fetch(topic, offset).high_watermark >= offset + 3)
        appender.commit()
        answered = time.monotonic_ns()
        first = Write("first", KEYS[0], False, ANY, asked, answered, Answer.OK, offset)
        found: list[Operation] = [first, *(contender.result(60) for contender in contenders)]
    reader.close()
    return found
