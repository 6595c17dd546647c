"""``make house ARGS=--trips``: what six pieces of work take, in calls, modules and returns to a module already left.

Servers are processes of their own; client, coordinator and gateway run in this one, where one tracer sees them all.
Each piece is done several times, and the one with the fewest calls counts: chores that come between are no part of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from confluent_kafka import Producer

import rollbridge
from bridge.tests.imports import PACKAGES
from integration_tests.coordinators import until
from integration_tests.gateways import port_with_room
from integration_tests.tracer import Step, Tracer, Trip, trip_of, within
from rollbridge.config import load_settings
from rollbridge_coordinator.config import load_coordinator_settings
from rollbridge_coordinator.daemon.main import Daemon
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_gateway import __main__ as gateway
from rollbridge_gateway.settings import GatewaySettings

TIMES: Final = 10
"""How often each piece of work is done."""
ROOT: Final = "/house"
STREAM: Final = "house/orders"
WRITE: Final = "RecordWriter.write"
COMMIT: Final = "Transaction.commit_async"
ROUND: Final = "work"
MERGE: Final = "merge_direct"
OUTCOME: Final = "OutcomeTail._settle"
PRODUCE: Final = "RequestHandler.dispatch"
"""Functions that do a piece of work from its beginning to its end, or begin it, by their names in their classes."""
LEADER: Final = "leader-"
PATH: Final = ("MainThread", "rollbridge-delivery", "rollbridge-outcomes", LEADER)
"""Threads that a transaction comes through, by how their names begin."""

Threads = Mapping[str, Sequence[Step]]


def measure_trips() -> dict[str, Trip]:
    """Start servers, do the work and return what each piece takes. Call this from the main thread."""
    tracer = Tracer([name for names in PACKAGES.values() for name in names])
    rounds: list[dict[str, Trip]] = []
    with ProcessCluster() as cluster, tracer.installed():
        addresses = {
            "bootstrap_servers": cluster.bootstrap_servers,
            "zookeeper": cluster.zookeeper,
            "zookeeper_root": ROOT,
        }
        with _coordinator(addresses), _connected(cluster) as client:
            client.admin.create_stream(STREAM)
            rounds += [_commit(tracer, client) for _ in range(TIMES)]
            with client.cas_writer(STREAM) as writer:
                for _ in range(TIMES):
                    with tracer.recording() as threads:
                        writer.write(b"key", b"value", expected=rollbridge.ANY)
                    rounds.append({"CasWriter.write()": trip_of(threads["MainThread"])})
            rounds += _produce(tracer, addresses)
    found: dict[str, list[Trip]] = {}
    for done in rounds:
        for name, trip in done.items():
            found.setdefault(name, []).append(trip)
    return {name: min(trips, key=lambda trip: (trip.calls, len(trip.modules))) for name, trips in found.items()}


def _connected(cluster: ProcessCluster) -> rollbridge.Bridge:
    return rollbridge.connect(
        cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=ROOT, client_name="house"
    )


@contextmanager
def _coordinator(addresses: Mapping[str, str]) -> Iterator[None]:
    daemon = Daemon(load_coordinator_settings({**addresses, "name": "house"}, {}))
    thread = threading.Thread(target=daemon.run, name="coordinator")
    thread.start()
    try:
        yield
    finally:
        daemon.stop()
        thread.join()


def _commit(tracer: Tracer, client: rollbridge.Bridge) -> dict[str, Trip]:
    """Commit two records; the second one's way is traced, until its future is answered and the leader has settled."""
    transaction = client.begin(STREAM)
    transaction.write(STREAM, b"key", b"first")
    with tracer.recording() as threads:
        transaction.write(STREAM, b"key", b"next")
        future = transaction.commit_async()
        until(lambda: _calls(threads, MERGE) and _calls(threads, OUTCOME))
        here = len(threads["MainThread"])
        future.result(60.0)
    result = threads["MainThread"][here:]
    merge, outcome = _calls(threads, MERGE)[-1], _calls(threads, OUTCOME)[-1]
    modules = trip_of(merge).modules.union(
        *(trip_of(_without_rounds(steps)).modules for name, steps in threads.items() if name.startswith(PATH))
    )
    return {
        "txn.write(), each next record": trip_of(_calls(threads, WRITE)[0]),
        "commit_async()": trip_of(_calls(threads, COMMIT)[0]),
        "the leader merges one transaction": trip_of(merge),
        "outcome read -> CommitResult": trip_of([*outcome, *result]),
        "write() to the answered future": Trip(0, modules, 0),
    }


def _calls(threads: Threads, function: str) -> list[Sequence[Step]]:
    return [call for steps in list(threads.values()) for call in within(list(steps), function)]


def _without_rounds(steps: Sequence[Step]) -> Sequence[Step]:
    """Leave out the leader's rounds, whose chores no transaction comes through."""
    inside = {id(step) for call in within(steps, ROUND) for step in call}
    return [step for step in steps if id(step) not in inside]


def _produce(tracer: Tracer, addresses: Mapping[str, str]) -> list[dict[str, Trip]]:
    """Run a gateway in this thread, as it has to be, while another one produces through it."""
    port = port_with_room()
    found: list[dict[str, Trip]] = []

    def produce() -> None:
        producer = Producer(
            {"bootstrap.servers": f"127.0.0.1:{port}", "transactional.id": "guest", "linger.ms": 100, "log_level": 0}
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        for _ in range(TIMES):
            with tracer.recording() as threads:
                for number in range(10):
                    producer.produce(STREAM.replace("/", "."), b"%d" % number, b"key", partition=0)
                producer.flush(60)
            loop = threads["MainThread"]
            begin = next(at for at, step in enumerate(loop) if step.function == PRODUCE)
            found.append({"Produce of ten records through the gateway": trip_of(loop[begin:])})
        producer.commit_transaction(60)

    def work() -> None:
        try:
            produce()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=work, name="producer")
    settings = GatewaySettings(connection=load_settings(addresses), listen=f"127.0.0.1:{port}")
    gateway.run(settings, lambda _: client.start())
    client.join()
    return found


def print_trips() -> None:
    """Measure, and print a line for each piece of work."""
    print(f"\n{'trip':<45}{'calls':>7}{'modules':>9}{'returns':>9}")
    for name, trip in measure_trips().items():
        figures = (trip.calls, len(trip.modules), trip.returns)
        print(
            f"{name:<45}"
            + "".join(f"{figure or '':>{width}}" for figure, width in zip(figures, (7, 9, 9), strict=True))
        )
