"""A process that forks while it writes and reads; what parent and child meet is printed as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException

import rollbridge
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName

RECORDS = 300
_PATIENCE_S = 60


def main(stream: str, servers: dict[str, str]) -> None:
    """Fork with one of everything open."""

    def connect() -> rollbridge.Bridge:
        return rollbridge.connect(
            servers["bootstrap.servers"], zookeeper=servers["zookeeper"], zookeeper_root=servers["zookeeper.root"]
        )

    b = connect()
    consumer = rollbridge.Consumer({**servers, "group.id": "forking", "auto.offset.reset": "earliest"})
    consumer.subscribe([stream])
    writer, conditional = b.writer(stream), b.cas_writer(stream)
    shared: rollbridge.Synchronizer[bytes, bytes] = b.synchronizer(
        stream, b"state", b"", lambda state, update: state + update
    )
    reader, transactions = b.reader(stream), b.transactions(stream.partition("/")[0])
    named = b.client("of-a-forking-process")
    open_one = b.begin(stream)
    future = open_one.write(stream, key=b"k", value=b"of the open one")
    log = KafkaClient(servers["bootstrap.servers"]).log()
    topic = StreamName.parse(stream).segment_topic(rollbridge.SegmentId.of(0, 0))
    log.end(topic)  # a connection that nobody holds
    waiting = writer.write(b"k", b"before the fork")
    ways: dict[str, Callable[[], Any]] = {
        "begin": lambda: b.begin(stream),
        "begin under another name": lambda: named.begin(stream),
        "another name": lambda: b.client("another"),
        "new session": lambda: named.new_session(),
        "write": lambda: open_one.write(stream, key=b"k", value=b"of the child"),
        "write_all": lambda: open_one.write_all(stream, [(b"k", b"of the child")]),
        "flush": open_one.flush,
        "commit": open_one.commit,
        "abort": lambda: open_one.abort("of the child"),
        "outcome": lambda: b.outcome(open_one.id),
        "future": future.result,
        "plain": lambda: writer.write(b"k", b"of the child"),
        "plain flush": writer.flush,
        "plain future": waiting.result,
        "another writer": lambda: b.writer(stream),
        "conditional": lambda: conditional.write(b"k", b"of the child", expected=rollbridge.ANY),
        "tail": lambda: conditional.tail(b"k"),
        "update": lambda: shared.update(lambda state: [b"x"]),
        "fetch": shared.fetch,
        "poll": lambda: consumer.poll(1.0),
        "commit of a consumer": lambda: consumer.commit(asynchronous=False),
        "read": lambda: reader.poll(1.0),
        "read transactions": lambda: next(iter(transactions)),
        "admin": lambda: b.admin.scale(stream, seal=[0], ranges=[(0.0, 1.0)]),
        "describe": lambda: b.admin.describe(stream),
        "a request of ours": lambda: log.end(topic),
    }
    child = os.fork()
    faulthandler.dump_traceback_later(_PATIENCE_S if child else _PATIENCE_S / 2, exit=True)
    if child == 0:
        if waiting.done():
            del ways["plain future"]  # it was answered before the fork, and that answer holds here as well
        met = {}
        for name, way in ways.items():
            try:
                met[name] = f"no error: {way()!r}"
            except (RollbridgeError, KafkaException) as fault:
                met[name] = str(fault)
        for item in (open_one, named, writer, conditional, shared, consumer, reader, transactions, b):
            if hasattr(item, "close"):
                item.close()
        with connect() as own, own.transaction(stream) as txn:
            txn.write(stream, key=b"k", value=b"of a connection of the child")
        print(json.dumps({"met": met, "child": str(txn.id)}), flush=True)
        sys.exit(0)  # as an application would: everything is finalized
    written = [writer.write(b"k%d" % number, b"%d" % number) for number in range(RECORDS)]
    places = [str(item.result(120).dlsn) for item in written]
    status = os.waitpid(child, 0)[1]
    open_one.commit(timeout=120)
    later = b.begin(stream)
    later.write(stream, key=b"k", value=b"later")
    later.commit(timeout=120)
    conditional.write(b"k", b"by a condition", expected=rollbridge.ANY)
    shared.update(lambda state: [b"u"])
    found: list[bytes] = []
    while b"later" not in found:
        record = reader.poll(1.0)
        if record is not None:
            found.append(record.value or b"")
    log.end(topic)
    handed = 0
    while handed < RECORDS:
        handed += len(consumer.consume(100, 1.0))
    print(json.dumps({"status": status, "places": places, "ids": [str(open_one.id), str(later.id)]}), flush=True)
    with suppress(RollbridgeError):
        shared.close()
    for thing in (consumer, reader, transactions, b):
        thing.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
