"""Nothing stays behind: neither after a block, nor after a test process that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from testcontainers.core.labels import LABEL_SESSION_ID

from integration_tests.backends import engine as engines
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.engine import engine
from integration_tests.images import TOOLBOX
from integration_tests.patience import eventually
from rollbridge.errors import LocalEnvironmentError

HOLDER = """
import sys
from testcontainers.core.labels import SESSION_ID
from integration_tests.backends.containers import ContainerCluster
cluster = ContainerCluster(disk_mib={"kafka": 256}).start()
coordinator = cluster.start_coordinator()
print(SESSION_ID, flush=True)
sys.stdin.read()
"""


def left(label: str, value: str) -> list[str]:
    """The names of all that has a label."""
    return [str(one.name) for one in engines.labelled(f"{label}={value}")]


@pytest.mark.long
@pytest.mark.containers
def test_a_killed_test_process_takes_its_containers_with_it() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder, holder.stdin, holder.stdout:
        session = holder.stdout.readline().strip()
        # Two servers, a coordinator and the keeper of a disk; two volumes; a network.
        assert len(left(LABEL_SESSION_ID, session)) == 7
        holder.kill()
    eventually(lambda: not left(LABEL_SESSION_ID, session), "everything is gone")


@pytest.mark.long
@pytest.mark.containers
def test_what_a_dead_process_has_left_is_swept_and_nothing_else() -> None:
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = engines.owner_of(dead.pid)
    dead.communicate()
    elsewhere = owner.replace(owner.partition("/")[0], "another-machine")
    sessions = {who: uuid.uuid4().hex for who in (owner, elsewhere, engines.owner_of(os.getpid()))}
    try:
        for who, session in sessions.items():
            marks = {engines.OWNER_LABEL: who, LABEL_SESSION_ID: session}
            engine().networks.create(f"rollbridge-test-{session}", labels=marks)
            engine().volumes.create(f"rollbridge-test-{session}", labels=marks)
            engine().containers.create(TOOLBOX, ["true"], labels=marks)
        assert engines.remove_stale() >= 3
        assert {who: len(left(LABEL_SESSION_ID, session)) for who, session in sessions.items()} == {
            who: 0 if who == owner else 3 for who in sessions
        }
    finally:
        for session in sessions.values():
            engines.remove(f"{LABEL_SESSION_ID}={session}")


@pytest.mark.containers
def test_a_cluster_that_cannot_start_leaves_nothing_and_shows_its_logs() -> None:
    broken = ContainerCluster(kafka_settings={"num.io.threads": "none"})
    with pytest.raises(LocalEnvironmentError, match="kafka ended while it was starting") as caught:
        broken.start()
    assert any("num.io.threads" in note for note in caught.value.__notes__)
    assert left(engines.CLUSTER_LABEL, broken.id) == []


def test_who_is_not_known_to_be_gone_is_left_alone() -> None:
    for owner in ("", "somebody", "host/boot/x/1", "another-machine/boot/1/1", engines.owner_of(os.getpid())):
        assert not engines.is_gone(owner)
