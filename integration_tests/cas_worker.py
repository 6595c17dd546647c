"""A client that writes conditionally at random and records what it asked for and what it was told, line by line.

Run as a process of its own (``python -m integration_tests.cas_worker JSON``), so that it can be killed and paused. Each
line is written before the operation begins and after it has ended, so a killed worker leaves an operation without an
answer.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollbridge
from integration_tests.histories import ANY, EMPTY, FOREVER, Answer, Look, Operation, Write
from rollbridge import ANY as ANY_SN
from rollbridge import EMPTY as EMPTY_SN
from rollbridge import SN
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    OutcomeUnknownError,
    TransactionAbortedError,
    UnavailableError,
)

Line = dict[str, Any]
Note = Callable[[Line], None]


@dataclass(frozen=True)
class Task:
    """What a worker does: ``operations`` operations on ``keys`` of ``stream``, named after ``name``.

    With ``in_transactions`` each write is a rolling transaction with a condition.
    """

    bootstrap_servers: str
    zookeeper: str
    zookeeper_root: str
    stream: str
    keys: tuple[str, ...]
    name: str
    operations: int
    seed: int
    out: str
    in_transactions: bool = False


def write_in_transaction(
    client: rollbridge.Bridge, stream: str, key: bytes, value: bytes, expected: SN, scope: str
) -> SN:
    """A transaction of one record; gives its SN."""
    transaction = client.begin(stream)
    transaction.expect(stream, key=key, sn=expected, scope=scope)
    written = transaction.write(stream, key=key, value=value)
    transaction.commit()
    dlsn = written.result()
    base = client.admin.history(stream).graph.sequence_bases[dlsn.segment]
    return SN(dlsn, None, base + dlsn.offset)


def work(client: rollbridge.Bridge, writer: CasWriter, task: Task, note: Note) -> None:
    """Carry out the operations and note them."""

    def write(key: bytes, value: bytes, expected: SN, scope: str) -> SN:
        if task.in_transactions:
            return write_in_transaction(client, task.stream, key, value, expected, scope)
        return writer.write(key, value, expected=expected, scope=scope)

    choice = random.Random(task.seed)
    known = EMPTY_SN
    known_of: dict[str, SN] = {}
    for number in range(task.operations):
        key = choice.choice(task.keys)
        by_key = choice.random() < 0.5
        identity = f"{task.name}-{number}"
        if choice.random() < 0.25:
            note({"id": identity, "look": key if by_key else None, "asked": time.monotonic_ns()})
            seen = writer.tail(key.encode(), scope="key" if by_key else "segment")
            note({"id": identity, "seen": _place(seen), "answered": time.monotonic_ns()})
            if by_key:
                known_of[key] = seen
            else:
                known = seen
            continue
        expected = known_of.get(key, EMPTY_SN) if by_key else known
        if choice.random() < 0.05:
            expected = choice.choice([ANY_SN, EMPTY_SN])
        note(
            {
                "id": identity,
                "key": key,
                "by_key": by_key,
                "expected": _place(expected),
                "asked": time.monotonic_ns(),
            }
        )
        try:
            sn = write(key.encode(), identity.encode(), expected, "key" if by_key else "segment")
        except CasWriteError as refusal:
            note(_answer(identity, Answer.REFUSED, actual=_place(refusal.actual)))
            sn = refusal.actual
        except CasOutcomeUnknownError as unknown:
            note(_answer(identity, Answer.UNKNOWN, token=str(unknown.token)))
            continue
        except OutcomeUnknownError as unknown:
            note(_answer(identity, Answer.UNKNOWN, why=str(unknown)))
            continue
        except (UnavailableError, TransactionAbortedError) as fault:
            note(_answer(identity, Answer.FAILED, why=str(fault)))
            continue
        else:
            note(_answer(identity, Answer.OK, position=_place(sn)))
            known = sn
        if by_key:
            known_of[key] = sn
        else:
            known = sn


def read_notes(lines: Iterable[Line]) -> Iterator[Operation]:
    """The operations that a worker has noted; one without an answer is unknown, a look without one is nothing."""
    asked: dict[str, Line] = {}
    answered: dict[str, Line] = {}
    for line in lines:
        (asked if "asked" in line else answered)[line["id"]] = line
    for identity, question in asked.items():
        answer = answered.get(identity)
        if "look" in question:
            if answer is not None:
                yield Look(question["look"], answer["seen"], question["asked"], answer["answered"])
            continue
        kind = Answer.UNKNOWN if answer is None else Answer(answer["answer"])
        yield Write(
            identity,
            question["key"],
            question["by_key"],
            question["expected"],
            question["asked"],
            FOREVER if answer is None or kind is Answer.UNKNOWN else answer["answered"],
            kind,
            None if answer is None else answer.get("position"),
            None if answer is None else answer.get("actual"),
        )


def _answer(identity: str, answer: Answer, **more: object) -> Line:
    return {"id": identity, "answer": answer.value, "answered": time.monotonic_ns(), **more}


def _place(sn: SN) -> int:
    if sn == EMPTY_SN:
        return EMPTY
    return ANY if sn.sequence_id is None else sn.sequence_id


def main(raw: str) -> None:
    """Do what the JSON says."""
    fields = json.loads(raw)
    task = Task(**{**fields, "keys": tuple(fields["keys"])})
    with Path(task.out).open("w", buffering=1) as out:

        def note(line: Line) -> None:
            out.write(json.dumps(line) + "\n")

        with (
            rollbridge.connect(
                task.bootstrap_servers,
                zookeeper=task.zookeeper,
                zookeeper_root=task.zookeeper_root,
                client_name=task.name,
                options=rollbridge.ClientOptions(session_timeout_s=2.0),
            ) as client,
            client.cas_writer(task.stream, timeout=60, transaction_timeout=2) as writer,
        ):
            work(client, writer, task, note)


if __name__ == "__main__":
    main(sys.argv[1])
