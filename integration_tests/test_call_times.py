"""No call with a time-out takes much longer than that, whatever the servers do.

What is promised is a second more. Here a broker or a ZooKeeper is stopped, which is the worst it can do to whoever
waits: it takes connections and answers nothing.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, Final

import pytest
from confluent_kafka import KafkaException, TopicPartition

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.grown_streams import KEYS, write
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import RollbridgeError

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.5
SLOW_MACHINE_S: Final = 15.0
"""What is promised is a second beyond the time-out; a machine that is busy with other tests gets more."""
CLOSE_S: Final = 10.0
"""What a consumer's close may take, which has no time-out of its own."""

ELSEWHERE: Final = {
    # What they are given is kept for later calls, or is about something else than waiting.
    "Admin.__init__": "its methods' default",
    "Bridge.begin": "a lease",
    "Bridge.transaction": "a lease",
    "Client.begin": "a lease",
    "Client.transaction": "a lease",
    "Bridge.reader": "how long nothing may come while reading; not of a call",
    "Bridge.transactions": "how long nothing may come while reading; not of a call",
    "Reader.__init__": "as Bridge.reader",
    "TransactionReader.__init__": "as Bridge.transactions",
    "Bridge.cas_writer": "of its writes",
    "CasWriter.__init__": "of its writes",
    "Bridge.synchronizer": "of its writes",
    "Synchronizer.__init__": "of its writes",
    "ClientOptions.__init__": "settings; connect_timeout_s is that of `connect`",
    "WriterOptions.__init__": "settings; block_s is that of `StreamWriter.write`",
}
SAME: Final = {
    # Who carries them out.
    "ResumedTransaction.abort": "Transaction.abort",
    "ResumedTransaction.commit": "Transaction.commit",
    "ResumedTransaction.extend": "Transaction.extend",
    "ResumedTransaction.flush": "Transaction.flush",
    "ResumedTransaction.rollback_to": "Transaction.rollback_to",
    "ResumedTransaction.savepoint": "Transaction.savepoint",
    "SavepointFuture.exception": "SavepointFuture.result",
    "Bridge.new_session": "Client.new_session",
    "Client.arrived": "Bridge.arrived",
    "Client.commit_arrived": "Bridge.commit_arrived",
    "Client.extend": "Bridge.extend",
    "Client.outcome": "Bridge.outcome",
    "Client.resume": "Bridge.resume",
    "Client.story": "Bridge.story",
    "Client.unfinished": "Bridge.unfinished",
    "CommitFuture.exception": "CommitFuture.result",
    "AbortFuture.exception": "CommitFuture.result",
    "AbortFuture.result": "CommitFuture.result",
    "WriteFuture.exception": "WriteFuture.result",
    "PlainFuture.exception": "PlainFuture.result",
    "CasFuture.exception": "CasFuture.result",
    "CasFuture.results": "CasFuture.result",
    "Part.finish": "Part.flush",
    "Admin.adopt_topic": "Admin.create_stream",
    "Admin.rebuild_snapshots": "Admin.clear_snapshots",
    "Admin.release_topic": "Admin.delete_stream",
    "Admin.update_group": "Admin.update_stream",
    "Admin.groups": "Admin.group",
    "SharedClient.committed": "SharedClient.cooperative",
}
CALLS: Final = frozenset(
    {
        "Admin.abort_transaction",
        "Admin.clear_snapshots",
        "Admin.create_stream",
        "Admin.delete_stream",
        "Admin.group",
        "Admin.scale",
        "Admin.truncate",
        "Admin.update_stream",
        "Admin.waits",
        "Bridge.arrived",
        "Bridge.commit_arrived",
        "Bridge.extend",
        "Bridge.join",
        "Bridge.outcome",
        "Bridge.resume",
        "Bridge.story",
        "Bridge.unfinished",
        "CasFuture.result",
        "Client.new_session",
        "CommitFuture.result",
        "Consumer.cluster_id",
        "Consumer.committed",
        "Consumer.consume",
        "Consumer.get_watermark_offsets",
        "Consumer.list_topics",
        "Consumer.offsets_for_times",
        "Consumer.poll",
        "Part.flush",
        "PlainFuture.result",
        "Reader.consume",
        "Reader.poll",
        "SharedClient.abort",
        "SharedClient.commit",
        "SharedClient.cooperative",
        "SavepointFuture.result",
        "StreamWriter.close",
        "StreamWriter.flush",
        "Transaction.abort",
        "Transaction.commit",
        "Transaction.extend",
        "Transaction.flush",
        "Transaction.rollback_to",
        "Transaction.savepoint",
        "WriteFuture.result",
    }
)
"""All of them are played below; some in several situations, and with them calls whose time-out is a setting."""


def with_time_outs() -> set[str]:
    """Public calls that take a time-out, ``Class.method``."""
    found = set()
    for name in rollbridge.__all__:
        item = getattr(rollbridge, name)
        if not inspect.isclass(item):
            continue
        for method, function in inspect.getmembers(item, callable):
            if method.startswith("_") and method != "__init__":
                continue
            with suppress(ValueError, TypeError):
                if any("timeout" in given or given.endswith("_s") for given in inspect.signature(function).parameters):
                    found.add(f"{name}.{method}")
    return found


def test_no_call_with_a_time_out_is_forgotten() -> None:
    assert with_time_outs() == CALLS | ELSEWHERE.keys() | SAME.keys()
    assert set(SAME.values()) <= CALLS


class Lanes:
    """Calls, in lanes: those of one lane share objects and follow each other, lanes run side by side."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[tuple[str, Callable[[], object]]]] = {}
        self._most_s: dict[str, float] = {}
        self.took: dict[str, float] = {}

    def add(self, lane: str, name: str, call: Callable[[], object], most_s: float = TIMEOUT_S) -> None:
        """Have a call made; ``name`` may say in brackets in which situation, ``most_s`` is its time-out."""
        self._most_s[name] = most_s
        self._lanes.setdefault(lane, []).append((name, call))

    @property
    def names(self) -> set[str]:
        """Of the calls, without situations."""
        return {name.partition(" (")[0] for calls in self._lanes.values() for name, _ in calls}

    def late(self) -> dict[str, float]:
        """The calls that took longer than they may, and for how long, in seconds."""
        return {
            name: round(seconds, 1)
            for name, seconds in self.took.items()
            if seconds > self._most_s[name] + SLOW_MACHINE_S
        }

    def run(self) -> None:
        """Make all calls. Those that do not return are left alone, and count as for ever."""
        threads = [threading.Thread(target=self._run, args=(calls,), daemon=True) for calls in self._lanes.values()]
        self.took = {name: PATIENCE_S for calls in self._lanes.values() for name, _ in calls}
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, calls: list[tuple[str, Callable[[], object]]]) -> None:
        for name, call in calls:
            began = time.monotonic()
            with suppress(RollbridgeError, KafkaException, TimeoutError, RuntimeError):
                call()
            self.took[name] = time.monotonic() - began


class Readers:
    """Everything that reads one stream: opened, and at its end, before servers are stopped."""

    def __init__(self, site: Site, client: rollbridge.Bridge, stream: str, group: str, stack: ExitStack) -> None:
        self._config: dict[str, Any] = {
            "bootstrap.servers": site.cluster.bootstrap_servers,
            "zookeeper": site.cluster.zookeeper,
            "zookeeper.root": site.root,
            "auto.offset.reset": "earliest",
            # Nothing is committed before it has to be.
            "auto.commit.interval.ms": 3_600_000,
        }
        self.reader = stack.enter_context(client.reader(stream))
        self.peeking = stack.enter_context(client.reader(stream, isolation="read_uncommitted"))
        self.member = self._member(f"{group}-member", stream)
        self.leaving = self._member(f"{group}-leaving", stream)
        self.closing = self._member(f"{group}-closing", stream)
        stack.callback(self.member.close)
        stack.callback(self.leaving.close)
        found: Counter[str] = Counter()

        def is_drained() -> bool:
            for name, consumer in (("member", self.member), ("leaving", self.leaving), ("closing", self.closing)):
                found[name] += sum(message.error() is None for message in consumer.consume(100, 0.1))
            found["reader"] += len(self.reader.consume(100, 0.1))
            found["peeking"] += len(self.peeking.consume(100, 0.1))
            return min(found[name] for name in ("member", "leaving", "closing", "reader", "peeking")) >= len(KEYS) + 1

        until(is_drained)

    def _member(self, group: str, stream: str) -> rollbridge.Consumer:
        consumer = rollbridge.Consumer({**self._config, "group.id": group})
        consumer.subscribe([stream])
        return consumer


@pytest.mark.parametrize("part", ["kafka", "zookeeper"])
def test_no_call_with_a_time_out_takes_much_longer_while_a_server_is_stopped(
    own_cluster: AnyCluster, own_site: Site, part: str, unique_name: Callable[[str], str]
) -> None:
    scope, group = unique_name("scope"), unique_name("group")
    stream = f"{scope}/orders"
    options = rollbridge.ClientOptions(connect_timeout_s=TIMEOUT_S)
    lanes = Lanes()
    with ExitStack() as stack:
        client = stack.enter_context(own_site.connect())
        client.admin.create_stream(stream, segments=2)
        write(client, stream, b"before")
        _writing(lanes, own_site, client, stream, stack)
        _reading(lanes, Readers(own_site, client, stream, group, stack), stream)
        identifier = _transactions(lanes, client, stream)
        _asking(lanes, client, stream, identifier)
        _sharing(lanes, own_site, stream, group, stack)
        lanes.add("connect", "connect", lambda: own_site.connect(options=options).close())
        assert lanes.names >= CALLS, CALLS - lanes.names
        with own_cluster.paused(part):
            lanes.run()
        # Everybody goes on.
        until(lambda: client.outcome(identifier, timeout=120).state != "open")
    for name, seconds in lanes.took.items():
        logger.info("%s took %.1f s while %s was stopped", name, seconds, part)
    assert not lanes.late()


def _reading(lanes: Lanes, readers: Readers, stream: str) -> None:
    member, leaving, closing = readers.member, readers.leaving, readers.closing
    place = TopicPartition(member.assignment()[0].topic, 0)
    lanes.add("reader", "Reader.poll", lambda: readers.reader.poll(TIMEOUT_S))
    lanes.add("reader", "Reader.consume", lambda: readers.reader.consume(10, TIMEOUT_S))
    lanes.add("reader", "Reader.close", readers.reader.close)
    lanes.add("peeking", "Reader.poll (previews)", lambda: readers.peeking.poll(TIMEOUT_S))
    lanes.add("peeking", "Reader.close (previews)", readers.peeking.close)
    lanes.add("member", "Consumer.poll", lambda: member.poll(TIMEOUT_S))
    lanes.add("member", "Consumer.consume", lambda: member.consume(10, TIMEOUT_S))
    lanes.add("member", "Consumer.committed", lambda: member.committed([place], TIMEOUT_S))
    lanes.add("member", "Consumer.get_watermark_offsets", lambda: member.get_watermark_offsets(place, TIMEOUT_S))
    lanes.add("member", "Consumer.offsets_for_times", lambda: member.offsets_for_times([place], TIMEOUT_S))
    lanes.add("member", "Consumer.list_topics", lambda: member.list_topics(timeout=TIMEOUT_S))
    lanes.add("member", "Consumer.cluster_id", lambda: member.cluster_id(TIMEOUT_S))

    def leave() -> None:
        # Its segments are revoked while it polls, and what it was given has not been committed.
        leaving.unsubscribe()
        leaving.poll(TIMEOUT_S)

    lanes.add("leaving", "Consumer.poll (a revocation)", leave)
    lanes.add("closing", "Consumer.close", closing.close, CLOSE_S)


def _writing(lanes: Lanes, site: Site, client: rollbridge.Bridge, stream: str, stack: ExitStack) -> None:
    warm = client.writer(stream)
    warm.write(b"k", b"v").result(PATIENCE_S)
    # Opened, but nothing was ever sent: it has no connection to the leader yet.
    other = stack.enter_context(site.connect())
    fresh = other.writer(stream, options=rollbridge.WriterOptions(block_s=TIMEOUT_S))

    def flush() -> None:
        warm.write(b"k", b"v")
        warm.flush(TIMEOUT_S)

    lanes.add("warm", "StreamWriter.flush", flush)
    lanes.add("warm", "PlainFuture.result", lambda: warm.write(b"k", b"v").result(TIMEOUT_S))
    lanes.add("warm", "StreamWriter.close", lambda: warm.close(TIMEOUT_S))
    lanes.add("fresh", "StreamWriter.write (the first)", lambda: fresh.write(b"k", b"v"))
    lanes.add("fresh", "StreamWriter.flush (the first)", lambda: fresh.flush(TIMEOUT_S))
    lanes.add("fresh", "StreamWriter.write (another)", lambda: fresh.write(b"k", b"v"))
    lanes.add("fresh", "StreamWriter.close (the first)", lambda: fresh.close(TIMEOUT_S))
    cas = client.cas_writer(stream, timeout=TIMEOUT_S)
    lanes.add("cas", "CasWriter.write", lambda: cas.write(b"k", b"v", expected=rollbridge.EMPTY))
    lanes.add(
        "cas", "CasFuture.result", lambda: cas.write_async(b"k", b"v", expected=rollbridge.EMPTY).result(TIMEOUT_S)
    )


def _transactions(lanes: Lanes, client: rollbridge.Bridge, stream: str) -> rollbridge.TransactionId:
    first, other, third, fourth = (client.begin(stream) for _ in range(4))
    for transaction in (first, other, third, fourth):
        transaction.write(stream, key=b"k", value=b"v")
        transaction.flush()
    part = client.join(first.id)
    point = fourth.savepoint()

    def flush() -> None:
        first.write(stream, key=b"k", value=b"v")
        first.flush(timeout=TIMEOUT_S)

    def flush_part() -> None:
        part.write(stream, key=b"k", value=b"v")
        part.flush(timeout=TIMEOUT_S)

    lanes.add("first", "WriteFuture.result", lambda: first.write(stream, key=b"k", value=b"v").result(TIMEOUT_S))
    lanes.add("first", "Transaction.flush", flush)
    lanes.add("first", "Transaction.extend", lambda: first.extend(timedelta(days=1), timeout=TIMEOUT_S))
    lanes.add("first", "Transaction.commit", lambda: first.commit(timeout=TIMEOUT_S))
    lanes.add("first", "CommitFuture.result", lambda: first.commit_async().result(TIMEOUT_S))
    lanes.add("other", "Transaction.abort", lambda: other.abort(timeout=TIMEOUT_S))
    lanes.add("saving", "Transaction.savepoint", lambda: fourth.savepoint(timeout=TIMEOUT_S))
    lanes.add("saving", "SavepointFuture.result", lambda: fourth.savepoint_async().result(TIMEOUT_S))
    lanes.add("saving", "Transaction.rollback_to", lambda: fourth.rollback_to(point, timeout=TIMEOUT_S))
    lanes.add("part", "Part.flush", flush_part)
    lanes.add("resume", "Bridge.resume", lambda: client.resume(third.id, timeout=TIMEOUT_S))
    return first.id


def _asking(lanes: Lanes, client: rollbridge.Bridge, stream: str, identifier: rollbridge.TransactionId) -> None:
    admin, times = client.admin, TIMEOUT_S
    lanes.add("outcome", "Bridge.outcome", lambda: client.outcome(identifier, timeout=times))
    lanes.add("outcome", "Bridge.extend", lambda: client.extend(identifier, timedelta(days=1), timeout=times))
    lanes.add("outcome", "Bridge.story", lambda: client.story(identifier, timeout=times))
    lanes.add("arrived", "Bridge.arrived", lambda: client.arrived(identifier, timeout=times))
    lanes.add("arrived", "Bridge.commit_arrived", lambda: client.commit_arrived(identifier, timeout=times))
    name, group = client.client("another-name"), stream.partition("/")[0]
    lanes.add("name", "Client.new_session", lambda: name.new_session(group, timeout=times))
    lanes.add("outcome", "Bridge.unfinished", lambda: client.unfinished(timeout=times))
    lanes.add("outcome", "Bridge.join", lambda: client.join(identifier, timeout=times))
    lanes.add("scale", "Admin.scale", lambda: admin.scale(stream, seal=[0], ranges=[(0.0, 0.5)], timeout_s=times))
    lanes.add("scale", "Admin.create_stream", lambda: admin.create_stream(f"{stream}-2", timeout_s=times))
    lanes.add("scale", "Admin.truncate", lambda: admin.truncate(stream, "earliest", timeout_s=times))
    lanes.add("scale", "Admin.delete_stream", lambda: admin.delete_stream(f"{stream}-3", timeout_s=times))
    lanes.add(
        "update",
        "Admin.update_stream",
        lambda: admin.update_stream(stream, retention_time=timedelta(days=1), timeout_s=times),
    )
    lanes.add("update", "Admin.group", lambda: admin.group(stream.partition("/")[0], timeout_s=times))
    lanes.add("update", "Admin.clear_snapshots", lambda: admin.clear_snapshots(stream, timeout_s=times))
    lanes.add("update", "Admin.waits", lambda: admin.waits(stream, timeout_s=times))
    lanes.add("update", "Admin.abort_transaction", lambda: admin.abort_transaction(identifier, timeout_s=times))


def _sharing(lanes: Lanes, site: Site, stream: str, group: str, stack: ExitStack) -> None:
    clients = [stack.enter_context(site.connect()) for _ in range(3)]
    fresh, committing, aborting = (
        client.share(f"{group}-{number}", "session") for number, client in enumerate(clients)
    )
    joints = []
    for client in (committing, aborting):
        cooperative = client.cooperative(stream, series="q", number=0)
        part = cooperative.part()
        part.write(stream, key=b"k", value=b"v")
        joints.append((cooperative.ticket, part.finish()))
    (ticket, handle), (other, _) = joints
    lanes.add(
        "fresh share",
        "SharedClient.cooperative",
        lambda: fresh.cooperative(stream, series="q", number=0, timeout=TIMEOUT_S),
    )
    lanes.add("share", "SharedClient.commit", lambda: committing.commit(ticket, [handle], TIMEOUT_S))
    lanes.add("unshare", "SharedClient.abort", lambda: aborting.abort(other, timeout=TIMEOUT_S))
