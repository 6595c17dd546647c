"""What of a cluster answers, whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollbridge.embedded import probes

RUNNING: Final = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One part of a cluster as it is now."""

    part: str
    state: str
    """``running``, ``paused``, ``not answering``, ``died`` (it should run) or ``stopped`` (it should not)."""
    pid: int | None = None
    address: str | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """A whole cluster as it is now."""

    bootstrap_servers: str | None
    zookeeper: str | None
    parts: tuple[PartStatus, ...]
    """None of them: there never was a cluster here."""
    home: str | None = None
    """The directory of an embedded cluster."""
    ephemeral: bool = False

    @property
    def ok(self) -> bool:
        """Whether all parts run and answer."""
        return bool(self.parts) and all(part.state == RUNNING for part in self.parts)


def existing_status(
    bootstrap_servers: str,
    zookeeper: str,
    zookeeper_root: str,
    *,
    kafka_security: Mapping[str, str],
    zookeeper_security: Mapping[str, str],
) -> ClusterStatus:
    """Look at a cluster that somebody else runs."""
    registered = probes.registered_coordinators(zookeeper, zookeeper_root, security=zookeeper_security)
    cluster_id = probes.kafka_cluster_id(bootstrap_servers, security=kafka_security)

    def part(name: str, address: str | None, ok: bool) -> PartStatus:
        return PartStatus(part=name, state=RUNNING if ok else "not answering", address=address)

    return ClusterStatus(
        bootstrap_servers=bootstrap_servers,
        zookeeper=zookeeper,
        parts=(
            part("kafka", bootstrap_servers, cluster_id is not None),
            part("zookeeper", zookeeper, registered is not None),
            *(part(f"coordinator {name}", None, True) for name, _ in sorted(registered or ())),
        ),
    )
