"""What all runs have in common: servers, clients, probes that commit, windows of trouble, and a report."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import rollbridge
from integration_tests.adapter_tools import await_settled
from integration_tests.backends.interface import AnyCluster
from integration_tests.histories import FOREVER
from integration_tests.history.events import Answer, Kind, Operation, StreamState, Window, Write
from integration_tests.history.final import stream_states
from integration_tests.history.nemesis import Nemesis
from integration_tests.history.report import Report
from integration_tests.history.workers import Workers
from integration_tests.patience import eventually
from rollbridge.errors import RollbridgeError
from rollbridge.stream.names import GroupName, Partition

STREAMS: Final = ("history/orders", "history/payments")
"""Scaled while somebody writes to them."""
ADOPTED: Final = "history/adopted"
"""Adopts a topic that exists; never scaled."""
OWNED: Final = "history/owned"
"""Adopts a topic whose owner adds partitions, makes it anew, and takes it back."""
ALL: Final = (*STREAMS, ADOPTED)
"""What writers write."""
GROUP: Final = GroupName("history")
WINDOWS: Final = 12
"""So many random faults a run has; an even number."""
BEGIN_S: Final = 600.0
"""Within this time some fifty processes begin that start at once, and no promise is about that."""
HEAL_S: Final = 120.0
"""Within this time after a fault a new client must commit again, and the others must go on. Several brokers that could
not reach each other may need half a minute for a single commit, after ``replica.lag.time.max.ms``."""
KAFKA_SETTINGS: Final = {"broker.session.timeout.ms": "9000", "connections.max.idle.ms": "5000"}
"""Kafka's default, so that who is paused is not taken for dead. A broker that is alone and taken for dead names no
broker when it goes on, and librdkafka forgets it then: now and then for good (docs/logs-and-tracing.md). What is idle
is closed within seconds in place of minutes, also while its broker hangs or restarts."""


class Trial(ABC):
    """A run, whoever its clients are."""

    def __init__(
        self, cluster: AnyCluster, workers: Workers, choice: random.Random, nemesis: Nemesis, report: Report
    ) -> None:
        self._cluster, self._workers, self._choice, self._nemesis = cluster, workers, choice, nemesis
        self._windows: list[Window] = []
        self._probes: list[Operation] = []
        self._began = time.monotonic()
        self.report = report

    def stop_coordinators(self) -> None:
        """The servers may go on for others."""
        self._nemesis.stop_coordinators()

    def _heal(self, window: Window) -> None:
        """See that it heals: a new client commits, and the others go on."""
        self._windows.append(window)
        healed = time.monotonic()
        eventually(self._commits, f"a commit after: {window.fault}", HEAL_S)
        took = time.monotonic() - healed
        self.report.faults[window.fault] += 1
        self.report.recovery_s[window.fault] = max(took, self.report.recovery_s.get(window.fault, 0.0))
        self._await_progress(f"clients go on after: {window.fault}")

    @abstractmethod
    def _await_progress(self, what: str, timeout_s: float = HEAL_S) -> None:
        """Wait until clients have noted some things more."""

    def _settled_states(self, streams: Sequence[str]) -> dict[str, StreamState]:
        """The streams, once what dead clients had asked for is decided too."""
        servers, zookeeper = self._cluster.bootstrap_servers, self._cluster.zookeeper
        # One transaction for each buffer: what was asked for before it is decided before it.
        for stream in ALL:
            eventually(self._commits, f"a commit at the end, through {stream}", HEAL_S)
        states = stream_states(servers, zookeeper, streams).values()
        places: list[Partition] = [place for state in states for place in state.places.values()]
        await_settled(servers, [*places, (GROUP.commit_log_topic, 0)], timeout_s=HEAL_S)
        return stream_states(servers, zookeeper, streams)

    def _connect(self) -> rollbridge.Bridge:
        options = rollbridge.ClientOptions(commit_timeout_s=20, admin_timeout_s=HEAL_S)
        return rollbridge.connect(self._cluster.bootstrap_servers, zookeeper=self._cluster.zookeeper, options=options)

    def _commits(self) -> bool:
        """Whether a new client can commit now; its commits are asked for in the buffers of all streams in turn."""
        number = len(self._probes)
        turn = number % len(ALL)
        streams = (*ALL[turn:], *ALL[:turn])
        writes = tuple(Write(stream, "probe", f"probe:{number}:{place}") for place, stream in enumerate(streams))
        try:
            with self._connect() as client:
                transaction = client.begin(*streams)
                for write in writes:
                    transaction.write(write.stream, key=write.key.encode(), value=write.value.encode())
                name, asked = str(transaction.id), time.monotonic_ns()
                self._probes.append(
                    Operation(
                        f"probe-{number}", Kind.TRANSACTION, name, "commit", writes, asked, FOREVER, Answer.UNKNOWN
                    )
                )
                transaction.commit()
        except RollbridgeError:
            return False
        return True
