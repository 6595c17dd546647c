"""A short history on three brokers, three ZooKeeper servers and two coordinators in containers, with their faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.interface import Ability
from integration_tests.history.run import running

SEED = 7
WINDOWS = (
    "cut a broker off from the others",
    "kill a coordinator",
    "kill a ZooKeeper server",
    "cut a coordinator off from ZooKeeper",
    "scale",
    "kill a broker",
)


@pytest.mark.long
@pytest.mark.containers
@pytest.mark.needs(Ability.PARTITION)
def test_no_promise_is_broken_under_faults_of_several_servers(ensemble: ContainerCluster, tmp_path: Path) -> None:
    with running(SEED, tmp_path, ensemble) as run:
        for fault in WINDOWS:
            run.window(fault, broken_s=4)
        run.end().demand()
