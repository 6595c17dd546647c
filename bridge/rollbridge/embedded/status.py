"""What of an embedded cluster runs and answers now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

from rollbridge.embedded import processes
from rollbridge.embedded.cluster import coordinators_of
from rollbridge.embedded.reachable import RUNNING, ClusterStatus, PartStatus
from rollbridge.embedded.servers import (
    COORDINATOR_PREFIX,
    KAFKA,
    ZOOKEEPER,
    coordinators_answer,
    kafka_answers,
    zookeeper_answers,
)
from rollbridge.embedded.state import Home, State


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


def _state_of(found: Sequence[psutil.Process] | None, state: State, answers: Callable[[], bool]) -> str:
    if not found:
        return "died" if state.running else "stopped"
    try:
        if found[0].status() == psutil.STATUS_STOPPED:
            return "paused"
    except psutil.NoSuchProcess:
        return "died"
    return RUNNING if answers() else "not answering"
