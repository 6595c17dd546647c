"""Gateway processes for tests that kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from integration_tests.hasty_gateway import CONSTANTS
from integration_tests.patience import end, eventually
from integration_tests.pauses import pause
from rollbridge_devcluster.services import gateway_command
from rollbridge_devcluster.state import free_port
from rollbridge_gateway.server.cluster import Gateway, chosen

SESSION_TIMEOUT_S = 10.0
"""A slow machine does not lose it by itself; who takes over from a gateway that was killed waits for half of it."""


class Servers:
    """Where Kafka and ZooKeeper are, and the root path of a site."""

    def __init__(self, bootstrap_servers: str, zookeeper: str, root: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.zookeeper = zookeeper
        self.root = root


BROKERS: Final = 3
"""Most brokers of a cluster that a gateway of tests listens for: each has a port behind its first one."""


def port_with_room() -> int:
    """A port that nobody has now, with as many free ones behind it as there may be brokers.

    It is not one of those for outgoing connections: while the gateway is dead its clients try to reach its ports, and
    one of them would get that very port for its own.
    """
    return free_port(count=BROKERS + 1)


def client_of(wanted: Sequence[str], others: Sequence[str], prefix: str = "client-") -> str:
    """A fresh client id that belongs to one of the wanted gateways while others of the same cluster run."""
    gateways = [Gateway(name, "", 0, ()) for name in (*wanted, *others)]
    while True:
        found = f"{prefix}{uuid.uuid4().hex}"
        if chosen(found, gateways).name in wanted:
            return found


class GatewayProcess:
    """A gateway in a process of its own, which keeps its address over its deaths."""

    def __init__(
        self,
        servers: Servers,
        name: str,
        logs: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port_with_room()
        self.log = logs / f"{name}.log"
        self._environment = {**os.environ, **(environment or {})}
        self._command = gateway_command(
            servers.bootstrap_servers,
            servers.zookeeper,
            f"--listen=127.0.0.1:{self.port}",
            f"--session-timeout={SESSION_TIMEOUT_S}",
            f"--name={name}",
            *arguments,
            root=servers.root,
        )
        if CONSTANTS.keys() & self._environment.keys():
            self._command[1:3] = [str(Path(__file__).with_name("hasty_gateway.py"))]
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    @property
    def address(self) -> str:
        """Where its clients begin."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process, which was started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, without waiting."""
        self._starts += 1
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environment)

    def await_ready(self) -> None:
        """Wait until it serves."""

        def is_ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            return self.log.read_text(errors="replace").count("listens at") >= self._starts

        eventually(is_ready, f"gateway {self.name} serves")

    @property
    def command(self) -> list[str]:
        """The command line that starts it."""
        return list(self._command)

    @property
    def runs(self) -> bool:
        """Whether its process is there, be it paused."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        assert self._process is not None
        end(self._process, self.log)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """Have it stand still; SIGCONT wakes it up."""
        assert self._process is not None
        pause(self._process)

    def revive(self) -> None:
        """Kill it, start it again at the same address, and wait until it serves."""
        self.kill()
        self.start()
        self.await_ready()

    def __enter__(self) -> Self:
        self.start()
        self.await_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.runs:
            self.stop()
