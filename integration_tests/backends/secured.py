"""A secured cluster as processes of this machine, or in containers; its coordinators are run in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from integration_tests import coordinators
from integration_tests.backends.choice import Backend
from integration_tests.backends.containers import ContainerCluster
from integration_tests.links import Link
from integration_tests.secured import (
    AUTHORITY,
    CERTIFICATES,
    SERVER,
    Secured,
    broker_settings,
    in_files,
    zookeeper_settings,
)
from rollbridge_devcluster.containers import ContainerNode, KafkaContainer, ZooKeeperContainer
from rollbridge_devcluster.engine import host
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, free_port

_HERE: Final = "127.0.0.1"
"""The address for which the certificates are."""
_TALKATIVE: Final = "--log-level=DEBUG"


@contextmanager
def secured_cluster(backend: Backend, directory: Path) -> Iterator[Secured]:
    """A secured cluster, and logs of it in a directory."""
    with _processes(directory) if backend is Backend.LOCAL else _containers(directory) as cluster:
        yield cluster


# -- processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Processes:
    """Runs coordinators as processes; ``logs`` are theirs, ``servers`` those of the servers."""

    logs: Path
    servers: Path

    @contextmanager
    def coordinator_as(self, cluster: Secured, user: str) -> Iterator[Callable[[], str]]:
        """Its secrets are in its environment."""
        environment = cluster.environment(user)
        with coordinators.coordinator(cluster, cluster.root, user, self.logs, arguments=[_TALKATIVE], **environment):
            yield lambda: (self.logs / f"{user}.log").read_text(errors="replace")

    def visible(self) -> Mapping[str, str]:
        """Logs, and the command lines of all processes of this machine."""
        return {**_logs(self.logs), **_logs(self.servers), "command lines": "\n".join(_command_lines())}


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:
            continue


def _logs(directory: Path) -> dict[str, str]:
    return {f"log of {log.stem}": log.read_text(errors="replace") for log in directory.glob("*.log")}


@contextmanager
def _processes(directory: Path) -> Iterator[Secured]:
    ports: list[int] = []
    for _ in range(5):
        ports.append(free_port(ports))
    kafka, controller, outer, plain, secure = ports
    inner, address = f"{_HERE}:{kafka}", f"{_HERE}:{outer}"
    kafka_settings = {
        "controller.quorum.voters": f"1@{_HERE}:{controller}",
        "listeners": f"PLAINTEXT://{inner},CONTROLLER://{_HERE}:{controller},SCRAM://{address}",
        "advertised.listeners": f"PLAINTEXT://{inner},SCRAM://{address}",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SCRAM:SASL_SSL",
        **broker_settings(str(CERTIFICATES), ["SCRAM"]),
    }
    with ProcessCluster(
        home=directory / "home",
        kafka_port=kafka,
        zookeeper_port=plain,
        kafka_settings=kafka_settings,
        zookeeper_settings={**zookeeper_settings(str(CERTIFICATES), secure), "secureClientPortAddress": _HERE},
    ) as servers:
        yield Secured(_Processes(directory, servers.logs), inner, address, f"{_HERE}:{secure}")


# -- containers -----------------------------------------------------------------------------------------------

_CERTIFICATES: Final = "/tmp/certificates"
_SECRETS: Final = "/run/secrets"
_SCRAM: Final = 9094
"""Port of a broker that is published."""
_SCRAM_INSIDE: Final = 19094
"""Port of a broker for the other containers."""
_SECURE: Final = 2281


class _Near:
    """Where a published port is at the address for which the certificates are: through a link if it is elsewhere."""

    def __init__(self) -> None:
        self._links = ExitStack()
        self._link: Link | None = None

    def of(self, port: int) -> str:
        """Where to connect to; the port may be another one each time."""
        published = f"{host()}:{port}"
        if host() == _HERE:
            return published
        if self._link is None:
            self._link = self._links.enter_context(Link(published))
        self._link.lead_to(published)
        return self._link.address

    def close(self) -> None:
        """End the link, if there is one."""
        self._links.close()


class _SecuredBroker(KafkaContainer):
    """Has two listeners more, which say that they are at the two addresses at which it is reached."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.near: Final = _Near()
        self.listeners |= {"SCRAM": _SCRAM, "SCRAMINSIDE": _SCRAM_INSIDE}
        self.protocols = {"SCRAM": "SASL_SSL", "SCRAMINSIDE": "SASL_SSL"}
        self.publish(_SCRAM)
        _give_certificates(self, SERVER, AUTHORITY)

    @property
    def secured_address(self) -> str:
        """For clients on this machine."""
        return self.near.of(self.published[_SCRAM])

    @property
    def secured_inside(self) -> str:
        """For the other containers."""
        return f"{self.part}:{_SCRAM_INSIDE}"

    def configure(self) -> None:
        self.advertised |= {"SCRAM": self.secured_address, "SCRAMINSIDE": self.secured_inside}
        super().configure()


class _SecuredZooKeeper(ZooKeeperContainer):
    """Has a port for TLS more."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.near: Final = _Near()
        self.publish(_SECURE)
        more = [f"{key}={value}" for key, value in zookeeper_settings(_CERTIFICATES, _SECURE).items()]
        self.environment["ZOO_CFG_EXTRA"] = " ".join([self.environment["ZOO_CFG_EXTRA"], *more])
        _give_certificates(self, SERVER, AUTHORITY)

    @property
    def secured_address(self) -> str:
        """For clients on this machine."""
        return self.near.of(self.published[_SECURE])

    @property
    def secured_inside(self) -> str:
        """For the other containers."""
        return f"{self.part}:{_SECURE}"


class _SecuredContainers(ContainerCluster):
    """One broker and one ZooKeeper; ``logs`` are those of coordinators that have ended."""

    broker_class = _SecuredBroker
    zookeeper_class = _SecuredZooKeeper

    def __init__(self, logs: Path) -> None:
        super().__init__(kafka_settings=broker_settings(_CERTIFICATES, ["SCRAM", "SCRAMINSIDE"]))
        self._logs = logs

    def stop(self) -> None:
        for node in self._nodes.values():
            if isinstance(node, _SecuredBroker | _SecuredZooKeeper):
                node.near.close()
        super().stop()

    def secured(self) -> Secured:
        """Where everything is, for clients on this machine."""
        broker, zookeeper = self._secured_nodes()
        return Secured(self, broker.address, broker.secured_address, zookeeper.secured_address)

    def _secured_nodes(self) -> tuple[_SecuredBroker, _SecuredZooKeeper]:
        broker, zookeeper = self.node(KAFKA), self.node(ZOOKEEPER)
        assert isinstance(broker, _SecuredBroker)
        assert isinstance(zookeeper, _SecuredZooKeeper)
        return broker, zookeeper

    @contextmanager
    def coordinator_as(self, cluster: Secured, user: str) -> Iterator[Callable[[], str]]:
        """It finds the servers by the names of their containers; its secrets are in files."""
        broker, zookeeper = self._secured_nodes()
        inside = replace(cluster, bootstrap_servers=broker.secured_inside, zookeeper=zookeeper.secured_inside)
        environment, secrets = in_files(inside.environment(user, f"{_CERTIFICATES}/{AUTHORITY}"), _SECRETS)
        node = self.new_coordinator(user, user, cluster.root, environment)
        node.command = ["coordinator", _TALKATIVE]
        _give_certificates(node, AUTHORITY)
        for path, secret in secrets.items():
            node.files[path] = secret.encode()
        with self.in_background(node, self._logs):
            yield node.said

    def visible(self) -> Mapping[str, str]:
        """Logs, and what the engine says of the containers and of the processes in them."""
        seen = _logs(self._logs)
        for part, node in self._nodes.items():
            seen[f"log of {part}"] = node.said()
            node.container.reload()
            seen[f"description of {part}"] = json.dumps(node.container.attrs)
            seen[f"processes of {part}"] = json.dumps(node.container.top())
        return seen


def _give_certificates(node: ContainerNode, *names: str) -> None:
    for name in names:
        node.files[f"{_CERTIFICATES}/{name}"] = (CERTIFICATES / name).read_bytes()


@contextmanager
def _containers(directory: Path) -> Iterator[Secured]:
    with _SecuredContainers(directory) as servers:
        yield servers.secured()
