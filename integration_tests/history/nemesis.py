"""Faults, by name: what breaks, for how long, and how it heals."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import bridge
from bridge.errors import RollbridgeError
from integration_tests.backends.interface import AnyCluster
from integration_tests.history.workers import Workers

SESSION_S: Final = 2.0
"""ZooKeeper session of the coordinators; whoever is paused for longer has been replaced."""


class Nemesis:
    """Breaks one thing at a time. What is broken stays so for the length of a ``with`` block."""

    def __init__(self, cluster: AnyCluster, workers: Workers, streams: tuple[str, ...], choice: random.Random) -> None:
        self._cluster = cluster
        self._workers = workers
        self._streams = streams
        self._choice = choice
        self.coordinators: list[str] = []
        self.faults: Final[Mapping[str, Callable[[], Iterator[None]]]] = {
            "quiet": self._quiet,
            "kill a coordinator": self._kill_coordinator,
            "pause a coordinator": self._pause_coordinator,
            "kill the broker": lambda: self._kill("kafka"),
            "bounce the broker": lambda: self._bounce("kafka"),
            "pause the broker": lambda: self._pause("kafka"),
            "kill ZooKeeper": lambda: self._kill("zookeeper"),
            "pause ZooKeeper": lambda: self._pause("zookeeper"),
            "kill a client": self._kill_client,
            "pause a client": self._pause_client,
            "scale": self._scale,
        }

    def broken(self, name: str) -> AbstractContextManager[None]:
        """Break it for the length of a block."""
        return contextmanager(self.faults[name])()

    def start_coordinators(self) -> None:
        """Two, of which one leads and the other stands by."""
        env = {"ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": str(SESSION_S)}
        self.coordinators += [self._cluster.start_coordinator(env=env).name for _ in range(2)]

    def _quiet(self) -> Iterator[None]:
        yield

    def _kill(self, part: str) -> Iterator[None]:
        self._cluster.kill(part)
        yield
        self._cluster.restart(part)

    def _bounce(self, part: str) -> Iterator[None]:
        yield
        self._cluster.restart(part)

    def _pause(self, part: str) -> Iterator[None]:
        with self._cluster.paused(part):
            yield

    def _kill_coordinator(self) -> Iterator[None]:
        yield from self._kill(self._choice.choice(self.coordinators))

    def _pause_coordinator(self) -> Iterator[None]:
        yield from self._pause(self._choice.choice(self.coordinators))

    def _kill_client(self) -> Iterator[None]:
        process = self._choice.choice(self._workers.writers())
        process.kill()
        process.wait(10)
        self._workers.start("writer", self._streams)
        yield

    def _pause_client(self) -> Iterator[None]:
        process = self._choice.choice(self._workers.writers())
        os.kill(process.pid, signal.SIGSTOP)
        yield
        os.kill(process.pid, signal.SIGCONT)

    def _scale(self) -> Iterator[None]:
        stream = self._choice.choice(self._streams)
        done = threading.Thread(target=self._rescale, args=(stream,))
        done.start()
        yield
        done.join()

    def _rescale(self, stream: str) -> None:
        """Split a segment or join two; without an answer it may still come."""
        try:
            with bridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper) as client:
                active = sorted(client.admin.history(stream).active.segments, key=lambda item: item.range.low)
                place = self._choice.randrange(len(active))
                low, high = active[place].range.low, active[place].range.high
                if len(active) < 4:
                    middle = (low + high) / 2
                    client.admin.scale(stream, seal=[active[place].id.number], ranges=[(low, middle), (middle, high)])
                else:
                    first, second = active[max(place - 1, 0)], active[max(place, 1)]
                    numbers = [first.id.number, second.id.number]
                    client.admin.scale(stream, seal=numbers, ranges=[(first.range.low, second.range.high)])
        except RollbridgeError:
            return
