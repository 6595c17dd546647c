"""The peer: native Kafka transactions through confluent-kafka, as its users write them."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from benchmarks.site import Pair

_numbers = itertools.count()
_BATCH: Final = 10_000

DEFAULTS: Final[Mapping[str, Any]] = {}
LARGE_BATCHES: Final[Mapping[str, Any]] = {
    "linger.ms": 20,
    "batch.size": 512 * 1024,
    "queue.buffering.max.messages": 1_000_000,
}
NO_LINGER: Final[Mapping[str, Any]] = {"linger.ms": 0}


class NativeProducer:
    """A transactional producer with its id taken."""

    def __init__(self, bootstrap_servers: str, settings: Mapping[str, Any]) -> None:
        self._refused: KafkaError | None = None
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "transactional.id": f"benchmark-{os.getpid()}-{next(_numbers)}",
                "transaction.timeout.ms": 600_000,
                # Only failures, which costs nothing measurable, and never none: a refused record would go unnoticed.
                "delivery.report.only.error": True,
                "on_delivery": self._delivered,
                **settings,
            }
        )
        self._producer.init_transactions(60)
        self.begin = self._producer.begin_transaction
        self.produce = self._producer.produce

    def write(self, topic: str, pairs: Iterable[Pair]) -> None:
        """``produce()`` for each record; where the queue is full, wait as the manual says."""
        produce, poll = self._producer.produce, self._producer.poll
        for key, value in pairs:
            while True:
                try:
                    produce(topic, value, key)
                    break
                except BufferError:
                    poll(0.01)

    def write_batches(self, topic: str, pairs: Iterable[Pair]) -> None:
        """``produce_batch()``, which cannot carry headers, with dictionaries made on the way as it wants them."""
        source = iter(pairs)
        while chunk := [{"key": key, "value": value} for key, value in islice(source, _BATCH)]:
            while chunk:
                # Those that found no room come back with an ``_error``.
                self._producer.produce_batch(topic, chunk)
                chunk = [left for left in chunk if left.pop("_error", None) is not None]
                if chunk:
                    self._producer.poll(0.01)

    def flush(self) -> None:
        """Wait until everything is acknowledged."""
        if self._producer.flush(300) or self._refused is not None:
            raise AssertionError(f"records were not delivered: {self._refused}")

    def commit(self) -> None:
        """Commit, patiently."""
        self._producer.commit_transaction(120)
        if self._refused is not None:
            raise KafkaException(self._refused)

    def close(self) -> None:
        """Give up the producer."""
        self._producer.close()

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._refused = error


def commits_per_second(
    bootstrap_servers: str,
    topic: str,
    pairs: list[Pair],
    settings: Mapping[str, Any],
    *,
    processes: int,
    threads: int,
    seconds: float,
) -> float:
    """How many transactions per second ``processes * threads`` producers commit together, each one after another."""
    if processes == 1:
        barrier = threading.Barrier(threads)
        counts = _commit_in_threads(bootstrap_servers, topic, pairs, settings, threads, seconds, barrier)
        return sum(count / took for count, took in counts)
    context = mp.get_context("spawn")
    shared = context.Barrier(processes * threads)
    results: mp.queues.Queue[list[tuple[int, float]]] = context.Queue()
    children = [
        context.Process(
            target=_child, args=(bootstrap_servers, topic, pairs, dict(settings), threads, seconds, shared, results)
        )
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    counts = [item for _ in children for item in results.get(timeout=seconds + 120)]
    for child in children:
        child.join()
    return sum(count / took for count, took in counts)


def _child(
    bootstrap_servers: str,
    topic: str,
    pairs: list[Pair],
    settings: Mapping[str, Any],
    threads: int,
    seconds: float,
    barrier: Barrier,
    results: mp.queues.Queue[list[tuple[int, float]]],
) -> None:
    results.put(_commit_in_threads(bootstrap_servers, topic, pairs, settings, threads, seconds, barrier))


def _commit_in_threads(
    bootstrap_servers: str,
    topic: str,
    pairs: list[Pair],
    settings: Mapping[str, Any],
    threads: int,
    seconds: float,
    barrier: Barrier | threading.Barrier,
) -> list[tuple[int, float]]:
    counts: list[tuple[int, float]] = []
    faults: list[BaseException] = []

    def loop() -> None:
        try:
            with producer_of(bootstrap_servers, settings) as producer:
                commit_once(producer, topic, pairs)
                barrier.wait(120)
                start = time.perf_counter()
                count = 0
                while time.perf_counter() - start < seconds:
                    commit_once(producer, topic, pairs)
                    count += 1
                counts.append((count, time.perf_counter() - start))
        except BaseException as fault:
            faults.append(fault)
            barrier.abort()

    workers = [threading.Thread(target=loop) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    return counts


def commit_once(producer: NativeProducer, topic: str, pairs: Iterable[Pair]) -> None:
    """One whole transaction."""
    producer.begin()
    producer.write(topic, pairs)
    producer.commit()


@contextmanager
def producer_of(bootstrap_servers: str, settings: Mapping[str, Any]) -> Iterator[NativeProducer]:
    """A producer for a block."""
    producer = NativeProducer(bootstrap_servers, settings)
    try:
        yield producer
    finally:
        producer.close()
