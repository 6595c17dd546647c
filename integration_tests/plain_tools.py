"""What the tests of plain writes share: threads that write, and what must be found of it afterwards."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from confluent_kafka import Message

import rollbridge
from integration_tests.clients import until
from rollbridge.base.sn import DLSN
from rollbridge.writer import PlainFuture

KEYS = [b"key-%02d" % number for number in range(24)]


def read_in_order(client: rollbridge.Bridge, stream: str) -> list[tuple[DLSN, Message]]:
    """Everything of a stream in the order of its epochs, with the places."""
    with client.reader(stream, follow=False) as reader:
        return [(cast("DLSN", record.dlsn), cast("Message", record.raw)) for record in reader]


def values_by_key(found: list[tuple[DLSN, Message]]) -> dict[bytes, list[bytes]]:
    grouped: dict[bytes, list[bytes]] = defaultdict(list)
    for _, message in found:
        grouped[cast("bytes", message.key())].append(cast("bytes", message.value()))
    return grouped


def halves(low: float, high: float) -> list[tuple[float, float]]:
    middle = (low + high) / 2
    return [(low, middle), (middle, high)]


def split_first(client: rollbridge.Bridge, stream: str) -> None:
    """Scale up: the first active segment is replaced by two."""
    segment = client.admin.history(stream).active.segments[0]
    client.admin.scale(stream, seal=[segment.id.number], ranges=halves(segment.range.low, segment.range.high))


def join_all(client: rollbridge.Bridge, stream: str) -> None:
    """Scale down to one segment."""
    active = client.admin.history(stream).active.segments
    client.admin.scale(stream, seal=[item.id.number for item in active], ranges=[(0.0, 1.0)])


class Load:
    """Threads that write, each under keys of its own, until told to stop; what was acknowledged, by key.

    They stop by themselves at errors of the kinds ``ends_with``.
    """

    def __init__(
        self,
        write: Callable[[bytes, bytes], PlainFuture],
        threads: int,
        *ends_with: type[Exception],
    ) -> None:
        self._write = write
        self._ends_with = ends_with
        self._stopping = threading.Event()
        self.written: dict[bytes, list[tuple[bytes, PlainFuture]]] = defaultdict(list)
        self._threads = [threading.Thread(target=self._run, args=(number, threads)) for number in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, threads: int) -> None:
        with suppress(*self._ends_with):
            self._write_on(number, threads)

    def _write_on(self, number: int, threads: int) -> None:
        keys = KEYS[number::threads]
        count = 0
        while not self._stopping.is_set():
            for key in keys:
                value = b"%s=%d" % (key, count)
                self.written[key].append((value, self._write(key, value)))
            count += 1
            if not count % 50:
                self.written[keys[0]][-1][1].result(60)  # not far ahead of the brokers

    @property
    def count(self) -> int:
        return sum(len(items) for items in list(self.written.values()))

    def grow(self, by: int = 2_000) -> None:
        """Return when more has been written."""
        goal = self.count + by
        until(lambda: self.count >= goal)


def check(load: Load, found: list[tuple[DLSN, Message]], others: frozenset[bytes] = frozenset()) -> None:
    """Every record once, in order for its key, where its future says, with a sequence id that grows."""
    by_key = values_by_key([(place, item) for place, item in found if item.key() not in others])
    assert by_key == {key: [value for value, _ in items] for key, items in load.written.items()}
    places = {cast("bytes", message.value()): place for place, message in found}
    for items in load.written.values():
        numbers = [future.result(60) for _, future in items]
        assert [item.dlsn for item in numbers] == [places[value] for value, _ in items]
        sequence_ids = [item.sequence_id for item in numbers]
        assert None not in sequence_ids
        assert sequence_ids == sorted(set(cast("list[int]", sequence_ids)))
