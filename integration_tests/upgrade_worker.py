"""A client that does what it is told, line by line: a process of its own, of whatever release is on its path.

Only what every release since 0.2.0 has is used. Each line on standard input is a command in JSON, ``[name,
arguments]``; each answer is a line, ``{"ok": ...}``, or ``{"error": code, "says": ...}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import rollbridge
from rollbridge.errors import RollbridgeError

PATIENCE_S = 120.0


class Worker:
    """One connection, and what it holds open."""

    def __init__(self, b: rollbridge.Bridge) -> None:
        self._b = b
        self._open: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self._sns: dict[str, rollbridge.SN] = {}

    def release(self) -> list[str]:
        return [rollbridge.__version__, str(rollbridge.__file__)]

    def create(self, stream: str, segments: int) -> None:
        self._b.admin.create_stream(stream, segments=segments)

    def adopt(self, topic: str, stream: str) -> None:
        self._b.admin.adopt_topic(topic, stream=stream, partitioner="murmur2", check=False)

    def begin(self, name: str, *streams: str) -> str:
        self._open[name] = self._b.begin(*streams, label=name)
        return str(self._open[name].id)

    def resume(self, name: str, transaction: str) -> str:
        self._open[name] = self._b.resume(transaction)
        return str(self._open[name].id)

    def write(self, name: str, stream: str, first: int, count: int) -> None:
        """Values say whose they are; the records of one are of seven keys."""
        transaction = self._open[name]
        for number in range(first, first + count):
            transaction.write(stream, key=b"key-%d" % (number % 7), value=b"%s %d" % (name.encode(), number))
        transaction.flush()

    def expect(self, name: str, stream: str, key: str, token: str) -> None:
        self._open[name].expect(stream, key=key.encode(), sn=self._sns[token], scope="key")

    def commit(self, name: str) -> None:
        self._open.pop(name).commit(timeout=PATIENCE_S)

    def abort(self, name: str) -> None:
        self._open.pop(name).abort(timeout=PATIENCE_S)

    def outcome(self, transaction: str) -> str:
        return str(self._b.outcome(transaction, timeout=PATIENCE_S).state)

    def plain(self, stream: str, name: str, count: int) -> None:
        with self._b.writer(stream) as writer:
            write = writer.write
            futures = [write(b"key-%d" % (number % 7), b"%s %d" % (name.encode(), number)) for number in range(count)]
            for future in futures:
                future.result(PATIENCE_S)

    def cas(self, stream: str, key: str, value: str, after: str) -> str:
        """Write if the last record of the key is the one that a token stands for; gives a token of this one."""
        if stream not in self._writers:
            self._writers[stream] = self._b.cas_writer(stream, timeout=60)
        expected = rollbridge.SN.parse(after)
        sn = self._writers[stream].write(key.encode(), value.encode(), expected=expected, scope="key")
        self._sns[str(sn)] = sn
        return str(sn)

    def know(self, token: str) -> None:
        self._sns[token] = rollbridge.SN.parse(token)

    def scale(self, stream: str, segments: int) -> None:
        self._b.admin.scale(stream, seal=self._active(stream), ranges=_even(segments))

    def _active(self, stream: str) -> list[int]:
        return [int(segment.id.number) for segment in self._b.admin.history(stream).active.segments]

    def read(self, stream: str) -> list[list[Any]]:
        with self._b.reader(stream, follow=False) as reader:
            return [_shown(record) for record in reader]

    def transactions(self, scope: str) -> list[list[Any]]:
        found = []
        with self._b.transactions(scope, follow=False) as reader:
            for transaction in reader:
                values = sorted((record.value or b"").decode() for record in transaction.records())
                found.append([str(transaction.id), transaction.label, values])
        return found


def _even(segments: int) -> list[tuple[float, float]]:
    return [(number / segments, (number + 1) / segments) for number in range(segments)]


def _shown(record: rollbridge.Record) -> list[Any]:
    transaction = None if record.transaction_id is None else str(record.transaction_id)
    return [
        (record.key or b"").decode(),
        (record.value or b"").decode(),
        transaction,
        record.local_sequence,
        str(record.dlsn),
        str(record.sn),
    ]


def main(servers: str, zookeeper: str, root: str, name: str) -> None:
    """Obey until the input ends."""
    with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root, client_name=name) as b:
        worker = Worker(b)
        for line in sys.stdin:
            command, arguments = json.loads(line)
            try:
                answer = {"ok": getattr(worker, command)(*arguments)}
            except RollbridgeError as fault:
                answer = {"error": fault.code, "says": str(fault)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
