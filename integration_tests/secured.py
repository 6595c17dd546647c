"""A cluster that trusts nobody: Kafka with SCRAM over TLS and ACLs, ZooKeeper with TLS, digests, certificates and ACLs.

What servers and clients are told comes first, and does not depend on how the servers are run: as processes of this
machine, or in containers, with coordinators in the same way. The listeners without security are for the test itself,
which is Kafka's super user there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

import rollbridge
from integration_tests import coordinators
from integration_tests.backends.choice import Backend
from integration_tests.backends.container_nodes import ContainerNode, KafkaContainer, ZooKeeperContainer
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.engine import host
from integration_tests.links import Link
from integration_tests.patience import eventually
from rollbridge.config import ConnectionSettings
from rollbridge.metadata.access import Resource, Right
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, free_port

CERTIFICATES: Final = Path(__file__).parent / "certificates"
AUTHORITY: Final = "ca.pem"
SERVER: Final = "server.pem"
CA: Final = str(CERTIFICATES / AUTHORITY)
CERTIFICATE: Final = {
    "ssl.certificate.location": str(CERTIFICATES / "client.pem"),
    "ssl.key.location": str(CERTIFICATES / "client.key"),
    "ssl.key.password": "only-a-test",
}
CERTIFICATE_IDENTITY: Final = "x509:CN=client"
_RESOURCES: Final = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
    Resource.CLUSTER: ResourceType.BROKER,
}


def password(user: str) -> str:
    """A user's password, with a mark by which a secret is found where it should not be."""
    return f"Hush-{user}-7f3a91"


def broker_settings(certificates: str, listeners: Iterable[str]) -> dict[str, str]:
    """A broker's settings, given the directory of its certificates and the names of its listeners with SCRAM."""
    scram: dict[str, str] = {}
    for name in listeners:
        prefix = f"listener.name.{name.lower()}"
        scram[f"{prefix}.sasl.enabled.mechanisms"] = "SCRAM-SHA-256"
        scram[f"{prefix}.scram-sha-256.sasl.jaas.config"] = (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        )
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": f"{certificates}/{SERVER}",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": f"{certificates}/{AUTHORITY}",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        **scram,
    }


def zookeeper_settings(certificates: str, port: int) -> dict[str, str]:
    """ZooKeeper's settings for a port with TLS, at which clients may have certificates."""
    return {
        "secureClientPort": str(port),
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "authProvider.x509": "org.apache.zookeeper.server.auth.X509AuthenticationProvider",
        "ssl.keyStore.location": f"{certificates}/{SERVER}",
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": f"{certificates}/{AUTHORITY}",
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "want",
    }


def kafka_security(user: str, ca: str = CA) -> dict[str, str]:
    """How a user gets into Kafka."""
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": ca,
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": password(user),
    }


def zookeeper_security(user: str, ca: str = CA) -> dict[str, str]:
    """How a user gets into ZooKeeper."""
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": ca,
        "digest.username": user,
        "digest.password": password(user),
    }


def in_files(environment: Mapping[str, str], directory: str) -> tuple[dict[str, str], dict[str, str]]:
    """The same variables with passwords in files, and what these hold by their paths."""
    variables: dict[str, str] = {}
    files: dict[str, str] = {}
    for name, value in environment.items():
        if name.endswith("_PASSWORD"):
            path = f"{directory}/{name.lower()}"
            variables[f"{name}_FILE"], files[path] = path, f"{value}\n"
        else:
            variables[name] = value
    return variables, files


class Runner(Protocol):
    """How a secured cluster is run."""

    def coordinator_as(self, cluster: Secured, user: str) -> AbstractContextManager[Callable[[], str]]:
        """A coordinator with a principal of its own, which tells everything; gives what it has told so far."""

    def visible(self) -> Mapping[str, str]:
        """What those may see who have no secrets: by what it is, logs, lists of processes and the like."""


@dataclass(frozen=True, slots=True)
class Secured:
    """Where a secured cluster is, and who gets in.

    Attributes:
        runner: How it is run.
        inner: Kafka's address for the test.
        bootstrap_servers, zookeeper: The addresses for everybody else.
        root: ZooKeeper path of the one rollbridge here.
    """

    runner: Runner
    inner: str
    bootstrap_servers: str
    zookeeper: str
    root: str = "/rollbridge"

    def settings(self, user: str, ca: str = CA) -> ConnectionSettings:
        """What a user is told; ``ca`` is where it finds the certificate of the authority."""
        return ConnectionSettings(
            bootstrap_servers=self.bootstrap_servers,
            zookeeper=self.zookeeper,
            zookeeper_root=self.root,
            client_name=user,
            kafka=kafka_security(user, ca),
            zookeeper_security=zookeeper_security(user, ca),
        )

    def environment(self, user: str, ca: str = CA) -> dict[str, str]:
        """The same as environment variables."""
        settings = self.settings(user, ca)
        tables = {"KAFKA": settings.kafka, "ZOOKEEPER_SECURITY": settings.zookeeper_security}
        return {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": self.zookeeper,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": self.root,
            **{
                f"ROLLBRIDGE_{table}_{key.upper().replace('.', '_')}": value
                for table, values in tables.items()
                for key, value in values.items()
            },
        }

    def connect(self, user: str) -> rollbridge.Bridge:
        """A client of a user."""
        return rollbridge.Bridge(self.settings(user))

    def coordinator(self, user: str) -> AbstractContextManager[Callable[[], str]]:
        """A coordinator as a user, whose name it has; gives what it has told so far."""
        return self.runner.coordinator_as(self, user)

    def add_users(self, *users: str) -> None:
        """Make users of Kafka; they have no rights. ZooKeeper's digests need no making."""
        admin = AdminClient({"bootstrap.servers": self.inner})
        kind = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        for user in users:
            change = UserScramCredentialUpsertion(user, kind, password(user).encode())
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(120)
            eventually(partial(_is_user, admin, user), f"the broker knows {user}")

    @contextmanager
    def denied(self, user: str, right: Right) -> Iterator[None]:
        """Meanwhile a user has not got a right, whatever else gives it."""
        bindings = list(_bindings(user, right, AclPermissionType.DENY))
        self._grant(bindings)
        try:
            yield
        finally:
            admin = AdminClient({"bootstrap.servers": self.inner})
            for future in admin.delete_acls([_filter(item) for item in bindings]).values():
                assert future.result(120)
            eventually(lambda: not any(_holds(admin, item) for item in bindings), "the broker has dropped them")

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        """Give a user rights."""
        self._grant(dict.fromkeys(item for right in rights for item in _bindings(user, right)))

    def _grant(self, bindings: Iterable[AclBinding]) -> None:
        """Make rules and wait until the broker goes by them: the controller answers before brokers have heard."""
        admin, wanted = AdminClient({"bootstrap.servers": self.inner}), list(bindings)
        for future in admin.create_acls(wanted).values():
            future.result(120)
        eventually(lambda: all(_holds(admin, item) for item in wanted), "the broker goes by them")


def _is_user(admin: AdminClient, user: str) -> bool:
    try:
        known = admin.describe_user_scram_credentials([user])
        assert isinstance(known, dict)
        known[user].result(120)
    except KafkaException:
        return False
    return True


def _holds(admin: AdminClient, item: AclBinding) -> bool:
    return item in admin.describe_acls(_filter(item)).result(120)


def _filter(item: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        item.restype,
        item.name,
        item.resource_pattern_type,
        item.principal,
        item.host,
        item.operation,
        item.permission_type,
    )


def _bindings(user: str, right: Right, permission: AclPermissionType = AclPermissionType.ALLOW) -> Iterator[AclBinding]:
    pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
    for operation in right.operations:
        yield AclBinding(
            _RESOURCES[right.resource],
            right.name,
            pattern,
            f"User:{user}",
            "*",
            AclOperation[_CAPITALS[operation]],
            permission,
        )


_CAPITALS: Final = {
    "Read": "READ",
    "Write": "WRITE",
    "Create": "CREATE",
    "Delete": "DELETE",
    "Describe": "DESCRIBE",
    "DescribeConfigs": "DESCRIBE_CONFIGS",
    "AlterConfigs": "ALTER_CONFIGS",
}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Everything that is logged in this process meanwhile, whatever its level."""
    lines: list[str] = []
    root, handler = logging.getLogger(), _Ear(lines)
    before = root.level
    root.addHandler(handler)
    root.setLevel(1)
    try:
        yield lines
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


class _Ear(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(1)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


# -- how it is run ------------------------------------------------------------------------------------------

_HERE: Final = "127.0.0.1"
"""The address for which the certificates are."""
_TALKATIVE: Final = "--log-level=DEBUG"


@contextmanager
def secured_cluster(
    backend: Backend, directory: Path, kafka_settings: Mapping[str, str] | None = None
) -> Iterator[Secured]:
    """A secured cluster, with more settings of its broker, and logs of it in a directory."""
    more = kafka_settings or {}
    with _processes(directory, more) if backend is Backend.LOCAL else _containers(directory, more) as cluster:
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
def _processes(directory: Path, more: Mapping[str, str]) -> Iterator[Secured]:
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
        **more,
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

    def __init__(self, logs: Path, more: Mapping[str, str]) -> None:
        super().__init__(kafka_settings={**broker_settings(_CERTIFICATES, ["SCRAM", "SCRAMINSIDE"]), **more})
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
def _containers(directory: Path, more: Mapping[str, str]) -> Iterator[Secured]:
    with _SecuredContainers(directory, more) as servers:
        yield servers.secured()
