"""A cluster that trusts nobody: Kafka with SCRAM over TLS and ACLs, ZooKeeper with TLS, digests, certificates and ACLs.

What servers and clients are told is here, so that it does not matter how the servers are run, which
``integration_tests.backends.secured`` does. The listeners without security are for the test itself, which is Kafka's
super user there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

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
from rollbridge.config import ConnectionSettings
from rollbridge.model.rights import Resource, Right

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

    @contextmanager
    def denied(self, user: str, right: Right) -> Iterator[None]:
        """Meanwhile a user has not got a right, whatever else gives it."""
        admin = AdminClient({"bootstrap.servers": self.inner})
        bindings = list(_bindings(user, right, AclPermissionType.DENY))
        for future in admin.create_acls(bindings).values():
            future.result(120)
        try:
            yield
        finally:
            filters = [
                AclBindingFilter(
                    item.restype,
                    item.name,
                    item.resource_pattern_type,
                    item.principal,
                    item.host,
                    item.operation,
                    item.permission_type,
                )
                for item in bindings
            ]
            for future in admin.delete_acls(filters).values():
                assert future.result(120)

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        """Give a user rights."""
        admin = AdminClient({"bootstrap.servers": self.inner})
        wanted = dict.fromkeys(item for right in rights for item in _bindings(user, right))
        for future in admin.create_acls(list(wanted)).values():
            future.result(120)


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
