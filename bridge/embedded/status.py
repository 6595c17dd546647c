"""What of an embedded cluster runs and answers now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from bridge.embedded import probes, processes
from bridge.embedded.cluster import coordinators_of
from bridge.embedded.servers import (
    COORDINATOR_PREFIX,
    KAFKA,
    ZOOKEEPER,
    coordinators_answer,
    kafka_answers,
    zookeeper_answers,
)
from bridge.embedded.state import Home, State

RUNNING = "running"


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


def embedded_status(home: Home) -> ClusterStatus:
    """Look at the embedded cluster in a directory.

    Raises:
        EnvironmentProblem: its state file is not readable.
    """
    state = home.load()
    if state is None:
        return ClusterStatus(bootstrap_servers=None, zookeeper=None, parts=(), home=str(home.path))
    running = processes.find(home.path)
    alive = coordinators_of(running)
    answers: dict[str, Callable[[], bool]] = {
        KAFKA: lambda: kafka_answers(state),
        ZOOKEEPER: lambda: zookeeper_answers(state),
    }
    # All coordinators or none: which of them has registered under which name only they know.
    registered = bool(alive) and ZOOKEEPER in running and coordinators_answer(state, len(alive))
    addresses = {KAFKA: state.bootstrap_servers, ZOOKEEPER: state.zookeeper}
    expected = [f"{COORDINATOR_PREFIX}{number + 1}" for number in range(state.coordinators)]
    parts = [
        PartStatus(
            part=name,
            state=_state_of(running.get(name), state, answers.get(name, lambda: registered)),
            pid=running[name][0].pid if name in running else None,
            address=addresses.get(name),
            log=str(home.logs / f"{name}.log"),
        )
        for name in dict.fromkeys([KAFKA, ZOOKEEPER, *expected, *alive])
    ]
    return ClusterStatus(
        bootstrap_servers=state.bootstrap_servers,
        zookeeper=state.zookeeper,
        parts=tuple(parts),
        home=str(home.path),
        ephemeral=state.ephemeral,
    )


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
            part(KAFKA, bootstrap_servers, cluster_id is not None),
            part(ZOOKEEPER, zookeeper, registered is not None),
            *(part(f"coordinator {name}", None, True) for name, _ in sorted(registered or ())),
        ),
    )


def _state_of(found: Sequence[psutil.Process] | None, state: State, answers: Callable[[], bool]) -> str:
    if not found:
        return "died" if state.running else "stopped"
    try:
        if found[0].status() == psutil.STATUS_STOPPED:
            return "paused"
    except psutil.NoSuchProcess:
        return "died"
    return RUNNING if answers() else "not answering"
