"""Coordinators and gateways as processes of this machine, and the node of each part of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import psutil

from rollbridge.doctor import probes
from rollbridge.errors import LocalEnvironmentError
from rollbridge.version import what_brings
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.nodes import KafkaProcess, ProcessNode, ZooKeeperProcess
from rollbridge_devcluster.state import COORDINATOR_PREFIX, GATEWAY, ClusterState, Home

COORDINATOR_PROGRAM: Final = ("-m", "rollbridge_coordinator")
"""Arguments of Python for a coordinator."""
_GATEWAY_PACKAGES: Final = ("rollbridge_gateway", "prometheus_client")


class CoordinatorProcess(ProcessNode):
    """One coordinator, without data of its own."""

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        part: str,
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = COORDINATOR_PROGRAM,
    ) -> None:
        super().__init__(home, state, part)
        self._environment = environment or {}
        self._program = program

    def command(self) -> list[str]:
        kafka = self._environment.get("ROLLBRIDGE_BOOTSTRAP_SERVERS", self.state.bootstrap_servers)
        where = ["--bootstrap-servers", kafka, "--zookeeper", self.state.zookeeper]
        return [sys.executable, *self._program, *where, "--zookeeper-root", probes.ZOOKEEPER_ROOT]

    def answers(self) -> bool:
        """Return True if it has registered, by its process id unless its environment names it."""
        found = self._found()
        registered = probes.registered_coordinators(self.state.zookeeper) or ()
        try:
            named = "" if found is None else found.environ().get("ROLLBRIDGE_COORDINATOR_NAME")
        except psutil.Error:
            return False
        return found is not None and any(
            name == named if named else name.endswith(f"-{found.pid}") for name, _ in registered
        )


class GatewayProcess(ProcessNode):
    """The gateway, without data of its own."""

    def command(self) -> list[str]:
        state = self.state
        return gateway_command(state.bootstrap_servers, state.zookeeper, f"--listen={state.gateway}")

    def answers(self) -> bool:
        """Return True if it serves the cluster to clients: another one may listen on its port."""
        return self.runs() and probes.kafka_cluster_id(self.state.gateway) == self.state.kafka_cluster_id


def gateway_command(
    bootstrap_servers: str, zookeeper: str, *options: str, root: str = probes.ZOOKEEPER_ROOT
) -> list[str]:
    """Return the command that runs a gateway with this Python."""
    where = (f"--bootstrap-servers={bootstrap_servers}", f"--zookeeper={zookeeper}", f"--zookeeper-root={root}")
    return [sys.executable, "-m", "rollbridge_gateway", *where, *options]


def require_gateway() -> None:
    """Promise that a gateway can be started with this Python.

    Raises:
        LocalEnvironmentError: a package is missing.
    """
    for package in _GATEWAY_PACKAGES:
        if find_spec(package) is None:
            raise LocalEnvironmentError(
                f"{package} is not installed, which a gateway needs; nothing was started; "
                f"{what_brings('gateway')}, and --no-gateway does without"
            )


def service_parts(state: ClusterState) -> list[str]:
    """Return the coordinators and the gateway of a cluster, in order of dependency."""
    coordinators = [f"{COORDINATOR_PREFIX}{number + 1}" for number in range(state.coordinators)]
    return [*coordinators, *([GATEWAY] if state.has_gateway else ())]


def services_of(running: Iterable[str]) -> list[str]:
    """Return the coordinators and the gateway among some parts, in the same order."""
    return sorted(part for part in running if part == GATEWAY or part.startswith(COORDINATOR_PREFIX))


def process_node(home: Home, state: ClusterState, part: str, cache: JarCache, **coordinator: Any) -> ProcessNode:
    """Return the node of a part, running or not."""
    match part:
        case "kafka":
            return KafkaProcess(home, state, cache)
        case "zookeeper":
            return ZooKeeperProcess(home, state, cache)
        case "gateway":
            return GatewayProcess(home, state, part)
        case _:
            return CoordinatorProcess(home, state, part, **coordinator)
