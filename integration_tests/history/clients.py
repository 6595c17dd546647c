"""Clients of a history: writers, readers and others, each a process of its own that can be killed and paused.

``python -m integration_tests.history.clients JSON`` runs one until it is asked to end (SIGTERM), has done enough, or
its standard input ends, because whoever has started it is gone.

Each thing is noted when it is asked for, as unknown, and again when it is answered, so a killed client leaves an
operation without an answer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import rollbridge
from integration_tests.history import guests, listing, natives, odd, passers, shrinking
from integration_tests.history.events import AT_RANDOM, Begun, Kind, Write, read_begun
from integration_tests.history.groups import hand_out, hand_out_updates, name_offsets, transform
from integration_tests.history.notebook import CALL_S, Notebook
from integration_tests.history.tasks import Task
from integration_tests.patience import once_available
from rollbridge import ANY, EMPTY, SN
from rollbridge.errors import RollbridgeError, UnavailableError
from rollbridge.kafka import connection

POLL_S = 0.5
SHARED_KEYS = ("register-0", "register-1")
"""Keys that all clients write conditionally."""
OPEN_MAX = 3
LARGE = 60
"""Records of one transaction in thirty."""
IDLE_S = 1.0
"""For so long connections of every second client may be idle, in place of nine minutes."""
PIPELINED = 12
"""Commits of one client that are asked for without waiting for an answer, at most."""


class Writer:
    """Does things at random, one after the other; some transactions stay open meanwhile."""

    def __init__(self, client: rollbridge.Bridge, task: Task, book: Notebook) -> None:
        self._client = client
        self._task = task
        self._book = book
        self._random = random.Random(task.seed)
        self._count = 0
        self._open: list[tuple[rollbridge.Transaction, list[Write]]] = []
        self._plain = {stream: client.writer(stream) for stream in task.streams}
        # Conditions hold in a stream that is scaled and in one over a topic that exists.
        self._conditional = {
            stream: client.cas_writer(stream, timeout=20) for stream in (task.streams[0], task.streams[-1])
        }

    def step(self) -> None:
        """Do one thing; whatever becomes of it is noted."""
        chance = self._random.random()
        self._count += 1
        try:
            if chance < 0.35:
                self._write_plainly()
            elif chance < 0.45:
                self._write_conditionally()
            elif chance < 0.55:
                self._begin_long()
            elif chance < 0.65 and self._open:
                self._end(*self._open.pop(self._random.randrange(len(self._open))))
            elif chance < 0.72:
                self._commit_conditionally()
            elif chance < 0.76:
                self._commit_many()
            else:
                self._end(*self._fill(self._begin(), self._key()))
        except (RollbridgeError, TimeoutError):
            # Whatever could not even be asked for left nothing; what was asked for is noted.
            time.sleep(0.05)

    def finish(self) -> None:
        """Ask for the end of everything."""
        while self._open:
            self._end(*self._open.pop())
        for writer in self._conditional.values():
            writer.close()

    def _key(self) -> str:
        """One of this client's own keys; others after an unclear answer, because what it was about may still come."""
        return f"{self._task.name}-{self._book.unclear}-{self._random.randint(0, 3)}"

    def _value(self, number: int = 0) -> str:
        return f"{self._task.name}:{self._count}:{number}"

    def _begin(self) -> rollbridge.Transaction:
        streams = self._task.streams
        return self._client.begin(*self._random.sample(streams, self._random.randint(1, len(streams))))

    def _fill(self, transaction: rollbridge.Transaction, key: str) -> tuple[rollbridge.Transaction, list[Write]]:
        writes = []
        for number in range(LARGE if self._random.random() < 1 / 30 else self._random.randint(1, 6)):
            stream = self._random.choice(transaction.streams)
            write = Write(stream, key, self._value(number))
            transaction.write(stream, key=key.encode(), value=write.value.encode())
            writes.append(write)
        return transaction, writes

    def _begin_long(self) -> None:
        """A transaction that stays open while others come and go; its key is its own, and an heir may commit it."""
        if len(self._open) < OPEN_MAX:
            transaction, writes = self._fill(self._begin(), f"{self._task.name}-long-{self._count}")
            self._open.append((transaction, writes))
            transaction.flush(CALL_S)
            self._book.note(Begun(str(transaction.id), tuple(writes)).to_line())

    def _end(self, transaction: rollbridge.Transaction, writes: list[Write]) -> None:
        wish = "abort" if self._random.random() < 0.15 else "commit"
        with self._book.noted(Kind.TRANSACTION, str(transaction.id), writes, wish) as done:
            if wish == "abort":
                transaction.abort(AT_RANDOM, timeout=CALL_S)
            else:
                done(position=transaction.commit(timeout=CALL_S).position)

    def _commit_many(self) -> None:
        """Ask for many commits, one after the other, and wait for their answers only then."""
        key = f"{self._task.name}-many-{self._count}"
        asked = []
        for number in range(self._random.randint(2, PIPELINED)):
            transaction = self._begin()
            write = Write(self._random.choice(transaction.streams), key, self._value(number))
            transaction.write(write.stream, key=key.encode(), value=write.value.encode())
            asked.append((transaction, write))
        waiting = []
        for transaction, write in asked:
            noted = self._book.asked(Kind.TRANSACTION, str(transaction.id), [write])
            waiting.append((noted, transaction.commit_async()))
        for noted, future in waiting:
            with self._book.answered(noted) as done:
                done(position=future.result(CALL_S).position)

    def inherit(self, begun: Mapping[str, tuple[Write, ...]]) -> None:
        """End what a killed client of this name has left: commit what it had flushed and one record, abort the rest."""
        for left in self._client.unfinished():
            name = str(left.transaction)
            transaction = self._client.resume(left.transaction)
            if name not in begun:
                transaction.abort("its client had not said what is in it", timeout=CALL_S)
                continue
            self._count += 1
            last = begun[name][-1]
            write = Write(last.stream, last.key, self._value())
            transaction.write(write.stream, key=write.key.encode(), value=write.value.encode())
            with self._book.noted(Kind.TRANSACTION, name, [*begun[name], write]) as done:
                done(position=transaction.commit(timeout=CALL_S).position)

    def _write_plainly(self) -> None:
        stream = self._random.choice(self._task.streams)
        write = Write(stream, self._key(), self._value())
        with self._book.noted(Kind.PLAIN, write.value, [write]) as done:
            sn = self._plain[stream].write(write.key.encode(), write.value.encode()).result(CALL_S)
            done(writes=(replace(write, place=str(sn.dlsn)),))

    def _write_conditionally(self) -> None:
        key = self._random.choice(SHARED_KEYS)
        stream = self._random.choice(list(self._conditional))
        sn = self._conditional[stream].tail(key.encode(), scope="key")
        write = Write(stream, key, self._value())
        with self._book.noted(Kind.CONDITIONAL, write.value, [write], expected=_number(sn)) as done:
            found = self._conditional[stream].write(key.encode(), write.value.encode(), expected=sn, scope="key")
            done(writes=(replace(write, place=str(found.dlsn)),))

    def _commit_conditionally(self) -> None:
        key = self._random.choice(SHARED_KEYS)
        stream = self._random.choice(list(self._conditional))
        sn = self._conditional[stream].tail(key.encode(), scope="key")
        transaction = self._client.begin(stream)
        transaction.expect(stream, key=key.encode(), sn=sn, scope="key")
        write = Write(stream, key, self._value())
        written = transaction.write(stream, key=key.encode(), value=write.value.encode())
        with self._book.noted(Kind.TRANSACTION, str(transaction.id), [write], expected=_number(sn)) as done:
            position = transaction.commit(timeout=CALL_S).position
            done(position=position, writes=(replace(write, place=str(written.result(1))),))


def _number(sn: SN) -> int | None:
    """What is expected, as operations have it; None where nothing is, as at the end of a stream that was truncated."""
    if sn == ANY:
        return None
    return -1 if sn == EMPTY or sn.sequence_id is None else sn.sequence_id


def write(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write until asked to end; connect anew when that is what it takes."""
    options = rollbridge.ClientOptions(connect_timeout_s=60)
    with connected(task, options) as client:
        writer = once_available(lambda: Writer(client, task, book))
        if task.heir_of is not None:
            _inherit(writer, task, stopping)
        while not stopping.is_set():
            writer.step()
        writer.finish()


def _inherit(writer: Writer, task: Task, stopping: threading.Event) -> None:
    """End what was left, whatever is broken meanwhile."""
    assert task.heir_of is not None
    with Path(task.heir_of[1]).open() as left:
        begun = read_begun(json.loads(line) for line in left if line.endswith("\n"))
    while not stopping.is_set():
        try:
            writer.inherit(begun)
        except (RollbridgeError, TimeoutError):
            time.sleep(0.2)
        else:
            return


def read(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Read one stream from its beginning, and go on at the position when a reader gives up."""
    position: Any = "earliest"
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        while not stopping.is_set():
            try:
                with client.reader(task.streams[0], start=position) as reader:
                    while not stopping.is_set():
                        with book.timed("poll of a reader", POLL_S):
                            record = reader.poll(POLL_S)
                        if record is not None:
                            value = (record.value or b"").decode()
                            place = {"segment": int(record.segment), "offset": record.offset}
                            book.note({**place, "value": value, "at": time.monotonic_ns()})
                            position = reader.position
            except UnavailableError:
                continue


def connected(task: Task, options: rollbridge.ClientOptions) -> rollbridge.Bridge:
    """A connection, once the servers answer."""
    return once_available(
        lambda: rollbridge.connect(
            task.bootstrap_servers, zookeeper=task.zookeeper, client_name=task.client_name, options=options
        )
    )


def visit(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Write to a stream that comes and goes."""
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        guests.visit(client, task, book, stopping)


def follow(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Read a stream that is truncated."""
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        shrinking.follow(client, task, book, stopping)


def keep(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Share a state that is compacted."""
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        shrinking.keep(client, task, book, stopping)


def list_transactions(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Read whole transactions."""
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        listing.list_transactions(client, task, book, stopping)


def behave_oddly(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Fork, share objects, and exit in callbacks."""
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        odd.behave_oddly(client, task, Path(task.out), stopping)


def beat(task: Task, book: Notebook, stopping: threading.Event) -> None:
    """Commit a small transaction, again and again, in a stream where nothing is ever broken."""
    stream = task.streams[0]
    count = 0
    with connected(task, rollbridge.ClientOptions(connect_timeout_s=60)) as client:
        while not stopping.wait(0.1):
            count += 1
            write = Write(stream, f"{task.name}-{book.unclear}", f"{task.name}:{count}")
            with suppress(RollbridgeError):
                transaction = client.begin(stream)
                transaction.write(stream, key=write.key.encode(), value=write.value.encode())
                with book.noted(Kind.TRANSACTION, str(transaction.id), [write]) as done:
                    done(position=transaction.commit(timeout=CALL_S).position)


ROLES: Final = {
    "pulse": beat,
    "writer": write,
    "reader": read,
    "member": hand_out,
    "transformer": transform,
    "guest": visit,
    "namer": name_offsets,
    "trimmed": write,
    "loser": write,
    "follower": follow,
    "keeper": keep,
    "awaited": hand_out_updates,
    "lister": list_transactions,
    "odd": behave_oddly,
    "native": natives.produce,
    "idempotent": natives.produce_idempotently,
    "transactional": natives.produce_in_transactions,
    "java": natives.produce_with_java,
    "through": natives.produce_idempotently,
    "rolling": natives.produce_in_transactions,
    "passer": passers.pass_with_librdkafka,
    "javan": passers.pass_with_java,
}


def main(raw: str) -> None:
    """Do what the JSON says."""
    task = Task.from_json(raw)
    stopping = threading.Event()
    threading.excepthook = _end_with_thread
    if task.seed % 2:  # of the others, and of coordinators, brokers close what is idle
        vars(connection)["_IDLE_MAX_S"] = IDLE_S
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Path(task.out).open("a", buffering=1) as out:  # children append to it as well
        ROLES[task.role](task, Notebook(task.name, out), stopping)
    natives.leave(0)


def _end_with_thread(what: threading.ExceptHookArgs) -> None:
    """No thread ends by an exception, ``SystemExit`` included: neither one of ours nor one of the library."""
    name = what.thread.name if what.thread is not None else "?"
    print(f"thread {name} has ended", file=sys.stderr)
    traceback.print_exception(what.exc_type, what.exc_value, what.exc_traceback)
    sys.stderr.flush()
    os._exit(70)


def _end_with_parent() -> None:
    while os.read(0, 1):  # and not sys.stdin, whose lock a thread may not hold when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
