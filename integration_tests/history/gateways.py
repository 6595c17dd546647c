"""Gateways of a history: processes whose clients, ZooKeeper and broker are reached by ways that can be cut.

A gateway listens at 127.0.0.1, and says that it is at another address of this machine, with the same ports: there links
pass connections on to it. So no container is needed to cut off its clients.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from integration_tests.backends import faults
from integration_tests.backends.interface import AnyCluster
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.links import Link
from rollbridge.doctor.probes import ZOOKEEPER_ROOT

SESSION_S: Final = 4.0
"""ZooKeeper session of a gateway; who stands still for longer has been replaced."""
COUNT: Final = 3
CLIENTS_HOST: Final = "127.0.0.2"
"""Where clients find the gateways."""
PORTS: Final = 2
"""Of a gateway: for bootstrap, and for the only broker."""


class Gateways:
    """Some gateways, and what can be done to them. Use it in a ``with`` block, on a cluster of one broker."""

    def __init__(self, cluster: AnyCluster, folder: Path, choice: random.Random) -> None:
        self._cluster, self._folder, self._choice = cluster, folder, choice
        self._ending = ExitStack()
        self._all: list[GatewayProcess] = []
        self._zookeepers: list[Link] = []
        self._clients: list[Sequence[Link]] = []
        self._brokers: list[Link] = []
        self._died: list[str] = []

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            broker = starting.enter_context(faults.linked(self._cluster))
            for number in range(COUNT):
                zookeeper = starting.enter_context(Link(self._cluster.zookeeper))
                # One of them has a way of its own to the broker; the others go straight there.
                kafka = self._cluster.bootstrap_servers if number else broker.address
                servers = Servers(kafka, zookeeper.address, ZOOKEEPER_ROOT)
                arguments = [f"--session-timeout={SESSION_S}", f"--advertise={CLIENTS_HOST}"]
                gateway = GatewayProcess(servers, f"gateway-{number}", self._folder, arguments)
                ports = range(gateway.port, gateway.port + PORTS)
                links = [Link(f"127.0.0.1:{port}", (CLIENTS_HOST, port)) for port in ports]
                for link in links:
                    starting.enter_context(link)
                starting.enter_context(gateway)
                self._all.append(gateway)
                self._zookeepers.append(zookeeper)
                self._clients.append(links)
            self._brokers.append(broker)
            self._ending = starting.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for gateway in self._all:
            if gateway.runs:
                gateway.signal(signal.SIGCONT)
        self._ending.close()

    @property
    def addresses(self) -> str:
        """Where clients begin."""
        return ",".join(f"{CLIENTS_HOST}:{gateway.port}" for gateway in self._all)

    @property
    def faults(self) -> Mapping[str, Callable[[], Iterator[None]]]:
        """Faults by name; each is broken up to its ``yield``, and whole when it has ended."""
        return {
            "kill a gateway": self._kill,
            "kill all gateways": self._kill_all,
            "restart a gateway": self._restart,
            "stop a gateway": self._stop,
            "pause a gateway": self._pause,
            "pause a gateway again and again": self._pause_often,
            "pause all gateways but one": self._pause_others,
            "hang up on a gateway's clients": self._hang_up,
            "cut a gateway's clients off": self._cut_clients,
            "cut a gateway off from ZooKeeper": self._cut_zookeeper,
            "cut a gateway off from the broker": self._cut_broker,
            "slow ways to a gateway": self._slow_down,
        }

    def deaths(self) -> Iterator[str]:
        """Gateways that have ended by themselves, a sentence each."""
        for gateway in self._all:
            if not gateway.runs:
                said = gateway.log.read_text(errors="replace")
                yield f"{gateway.name} has ended by itself, and said: {said[-2000:]}"

    def _one(self) -> int:
        return self._choice.randrange(len(self._all))

    def _dead(self, numbers: Sequence[int], end: Callable[[GatewayProcess], None]) -> Iterator[None]:
        gateways = [self._all[number] for number in numbers]
        for gateway in gateways:
            end(gateway)
        yield
        for gateway in gateways:
            gateway.start()
        for gateway in gateways:
            gateway.await_ready()

    def _kill(self) -> Iterator[None]:
        return self._dead([self._one()], GatewayProcess.kill)

    def _kill_all(self) -> Iterator[None]:
        return self._dead(range(len(self._all)), GatewayProcess.kill)

    def _stop(self) -> Iterator[None]:
        return self._dead([self._one()], GatewayProcess.stop)

    def _restart(self) -> Iterator[None]:
        """Killed, and there again at once: before anybody has noticed."""
        gateway = self._all[self._one()]
        gateway.revive()
        yield
        gateway.revive()

    def _pause(self) -> Iterator[None]:
        return self._standing_still([self._one()])

    def _pause_others(self) -> Iterator[None]:
        spared = self._one()
        return self._standing_still([number for number in range(len(self._all)) if number != spared])

    def _standing_still(self, numbers: Sequence[int]) -> Iterator[None]:
        for number in numbers:
            self._all[number].pause()
        yield
        for number in numbers:
            self._all[number].signal(signal.SIGCONT)

    def _pause_often(self) -> Iterator[None]:
        """Each in turn, for about as long as its session lives."""
        over = threading.Event()
        turns = [(self._one(), self._choice.uniform(0.5, 1.5) * SESSION_S) for _ in range(1_000)]

        def pause() -> None:
            for number, seconds in turns:
                if over.wait(0.3):
                    return
                self._all[number].pause()
                over.wait(seconds)
                self._all[number].signal(signal.SIGCONT)

        return self._beside(pause, over)

    def _hang_up(self) -> Iterator[None]:
        """All connections of a gateway's clients are reset, again and again."""
        over, links = threading.Event(), self._clients[self._one()]
        waits = [self._choice.uniform(0.05, 1.0) for _ in range(10_000)]

        def reset() -> None:
            for seconds in waits:
                if over.wait(seconds):
                    return
                for link in links:
                    link.reset()

        return self._beside(reset, over)

    def _beside(self, work: Callable[[], None], over: threading.Event) -> Iterator[None]:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _cut_clients(self) -> Iterator[None]:
        return self._cut(self._clients[self._one()])

    def _cut_zookeeper(self) -> Iterator[None]:
        return self._cut([self._zookeepers[self._one()]])

    def _cut_broker(self) -> Iterator[None]:
        return self._cut(self._brokers)

    def _cut(self, links: Sequence[Link]) -> Iterator[None]:
        for link in links:
            link.cut()
        yield
        for link in links:
            link.heal()

    def _slow_down(self) -> Iterator[None]:
        """A gateway's ways to ZooKeeper and to its clients take their time."""
        number = self._one()
        links = [self._zookeepers[number], *self._clients[number]]
        for link in links:
            link.slow_down(delay_s=0.2)
        yield
        for link in links:
            link.slow_down()
