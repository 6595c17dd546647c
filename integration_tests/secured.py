"""A cluster that trusts nobody: Kafka with SCRAM over TLS and ACLs, ZooKeeper with TLS, digests, certificates and ACLs.

What servers and clients are told is in functions of addresses, so that it does not matter how the servers are run. The
listeners without security are for the test itself, which is Kafka's super user there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

import bridge
from bridge.config import ConnectionSettings
from bridge.embedded.cluster import Cluster as EmbeddedServers
from bridge.embedded.plan import Wishes
from bridge.embedded.ports import free_port
from bridge.embedded.reaper import Reaper
from bridge.embedded.servers import KAFKA, ZOOKEEPER
from bridge.embedded.state import Home
from bridge.model.rights import Resource, Right

CERTIFICATES: Final = Path(__file__).parent / "certificates"
CA: Final = str(CERTIFICATES / "ca.pem")
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


def broker_settings(inner: str, controller: str, outer: str) -> dict[str, str]:
    """A broker's settings, given the addresses of its listeners: for tests, for the controller, and for everybody."""
    return {
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"PLAINTEXT://{inner},CONTROLLER://{controller},SCRAM://{outer}",
        "advertised.listeners": f"PLAINTEXT://{inner},SCRAM://{outer}",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SCRAM:SASL_SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(CERTIFICATES / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": CA,
        "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "listener.name.scram.scram-sha-256.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }


def zookeeper_settings(port: int) -> dict[str, str]:
    """ZooKeeper's settings for a port with TLS, at which clients may have certificates."""
    return {
        "secureClientPort": str(port),
        "secureClientPortAddress": "127.0.0.1",
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "authProvider.x509": "org.apache.zookeeper.server.auth.X509AuthenticationProvider",
        "ssl.keyStore.location": str(CERTIFICATES / "server.pem"),
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": CA,
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "want",
    }


def kafka_security(user: str) -> dict[str, str]:
    """How a user gets into Kafka."""
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": CA,
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": password(user),
    }


def zookeeper_security(user: str) -> dict[str, str]:
    """How a user gets into ZooKeeper."""
    return {
        "security.protocol": "SSL",
        "ssl.ca.location": CA,
        "digest.username": user,
        "digest.password": password(user),
    }


@dataclass(frozen=True, slots=True)
class Secured:
    """Where a secured cluster is, and who gets in.

    Attributes:
        inner: Kafka's address for the test.
        bootstrap_servers, zookeeper: The addresses for everybody else.
        root: ZooKeeper path of the one rollbridge here.
    """

    inner: str
    bootstrap_servers: str
    zookeeper: str
    root: str = "/rollbridge"

    def settings(self, user: str) -> ConnectionSettings:
        """What a user is told."""
        return ConnectionSettings(
            bootstrap_servers=self.bootstrap_servers,
            zookeeper=self.zookeeper,
            zookeeper_root=self.root,
            client_name=user,
            kafka=kafka_security(user),
            zookeeper_security=zookeeper_security(user),
        )

    def environment(self, user: str) -> dict[str, str]:
        """The same as environment variables."""
        settings = self.settings(user)
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

    def connect(self, user: str) -> bridge.Bridge:
        """A client of a user."""
        return bridge.Bridge(self.settings(user))

    def add_users(self, *users: str) -> None:
        """Make users of Kafka; they have no rights. ZooKeeper's digests need no making."""
        admin = AdminClient({"bootstrap.servers": self.inner})
        kind = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        for user in users:
            change = UserScramCredentialUpsertion(user, kind, password(user).encode())
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(30)

    def allow(self, user: str, rights: Iterable[Right]) -> None:
        """Give a user rights."""
        admin = AdminClient({"bootstrap.servers": self.inner})
        wanted = dict.fromkeys(item for right in rights for item in _bindings(user, right))
        for future in admin.create_acls(list(wanted)).values():
            future.result(30)


def _bindings(user: str, right: Right) -> Iterator[AclBinding]:
    pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
    for operation in right.operations:
        yield AclBinding(
            _RESOURCES[right.resource],
            right.name,
            pattern,
            f"User:{user}",
            "*",
            AclOperation[_CAPITALS[operation]],
            AclPermissionType.ALLOW,
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
def secured_processes(directory: Path, more: Mapping[str, str] | None = None) -> Iterator[Secured]:
    """A secured cluster as local processes; ``more`` are further settings of the broker."""
    ports: list[int] = []
    for _ in range(5):
        ports.append(free_port(ports))
    kafka, controller, outer, plain, secure = ports
    inner = f"127.0.0.1:{kafka}"
    address = f"127.0.0.1:{outer}"
    home = Home(directory / "home")
    reaper = Reaper(home.path)
    servers = EmbeddedServers(home)
    wishes = Wishes(
        kafka_port=kafka,
        zookeeper_port=plain,
        ephemeral=True,
        coordinators=0,
        kafka_heap="512m",
        kafka_settings={**broker_settings(inner, f"127.0.0.1:{controller}", address), **(more or {})},
        zookeeper_settings=zookeeper_settings(secure),
    )
    servers.up(wishes, only=[ZOOKEEPER, KAFKA])
    try:
        yield Secured(inner, address, f"127.0.0.1:{secure}")
    finally:
        servers.down()
        reaper.dismiss()
