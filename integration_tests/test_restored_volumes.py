"""Kafka restored from its volumes, and ZooKeeper from an older backup: the way of docs/backup-and-repair.md,
step by step."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

import rollbridge
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site, until
from rollbridge.base.sn import EMPTY
from rollbridge.cli.main import main
from rollbridge.errors import RollbridgeError

ROOT = "/restored"
STREAM, ACCOUNTS = "volumes/orders", "volumes/accounts"
NAMED = rollbridge.ClientOptions(admin_timeout_s=120)


class Volumes:
    """A cluster whose servers' directories can be copied while they are in use, and put back."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder

    def snapshot(self, server: str) -> None:
        """Copy a server's data at one moment, as a snapshot of its volume does: nothing is flushed or closed before."""
        with self.cluster.paused(server):
            shutil.copytree(self.cluster.home / server / "data", self._folder / server)

    def restore(self, server: str) -> None:
        """Put the copy in place of what there is, and start the server on it."""
        data = self.cluster.home / server / "data"
        shutil.rmtree(data)
        shutil.copytree(self._folder / server, data)
        self.cluster.restart(server)


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[Volumes]:
    with LocalCluster() as cluster:
        yield Volumes(cluster, tmp_path / "snapshots")


def commit(client: rollbridge.Bridge, value: str) -> None:
    """A transaction of one record in each of the two streams."""
    with client.transaction(STREAM, ACCOUNTS) as transaction:
        for stream in (STREAM, ACCOUNTS):
            transaction.write(stream, key=value.encode(), value=value.encode())


@contextmanager
def at_work(site: Site) -> Iterator[Callable[[], int]]:
    """Commit numbers, one after the other; gives how many are known to be committed."""
    stop, done = Event(), 0

    def work() -> None:
        nonlocal done
        with site.connect("worker", NAMED) as client:
            while not stop.is_set():
                commit(client, f"work-{done}")
                done += 1

    thread = Thread(target=work)
    thread.start()
    try:
        yield lambda: done
    finally:
        stop.set()
        thread.join()


def values_of(client: rollbridge.Bridge, stream: str) -> list[str]:
    with client.reader(stream, follow=False) as reader:
        return sorted((record.value or b"").decode() for record in reader)


def test_what_stood_on_the_volumes_is_served_again_and_nothing_of_it_twice(
    volumes: Volumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, site = volumes.cluster, Site(volumes.cluster, ROOT, tmp_path)
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)
    with site:
        with site.connect("app", NAMED) as client:
            client.admin.create_stream(STREAM, segments=2)
            client.admin.create_stream(ACCOUNTS)
            commit(client, "before")
            volumes.snapshot("zookeeper")
            # Kafka's snapshot is later: it has an epoch, ids and an open transaction of which ZooKeeper does not know.
            client.admin.scale(STREAM, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            left = client.begin(STREAM, ACCOUNTS, label="left")
            left.write(ACCOUNTS, key=b"left", value=b"left")
            left.flush()
            with at_work(site) as done:
                until(lambda: done() > 20)
                certain = done()
                volumes.snapshot("kafka")
                until(lambda: done() > certain + 20)
            client.admin.scale(STREAM, seal=[1], ranges=[(0.5, 0.75), (0.75, 1.0)])
            with client.cas_writer(ACCOUNTS) as writer:
                lost = writer.write(key=b"lost", value=b"lost", expected=EMPTY, scope="key")
            written = done()
        site.stop_coordinator()

        # The steps of docs/backup-and-repair.md, "Restore both so".
        cluster.kill("kafka")
        cluster.kill("zookeeper")
        volumes.restore("zookeeper")
        volumes.restore("kafka")
        assert main(["repair", "--dry-run", "--force"]) == 0
        told = capsys.readouterr().out
        assert f"restore stream {STREAM}: 1 epoch" in told, told
        assert main(["repair", "--force"]) == 0
        site.start_coordinator()

        until(lambda: main(["doctor"]) == 0)
        for stream in (STREAM, ACCOUNTS):
            assert main(["verify", stream, "--no-progress"]) == 0, capsys.readouterr().out

        with site.connect("app", NAMED) as client:
            found = values_of(client, ACCOUNTS)
            kept = [value for value in found if value.startswith("work-")]
            # All that was answered before the snapshot, no gap, and nothing of what came long after it.
            assert sorted(kept) == sorted(f"work-{number}" for number in range(len(kept)))
            assert certain <= len(kept) < written
            assert [value for value in found if not value.startswith("work-")] == ["before"]
            assert values_of(client, STREAM) == found
            # Whoever comes back with what only the lost days knew is refused.
            with client.cas_writer(ACCOUNTS) as writer, pytest.raises(RollbridgeError):
                writer.write(key=b"lost", value=b"again", expected=lost, scope="key")
            assert [str(item.transaction) for item in client.unfinished()] == [str(left.id)]
            resumed = client.resume(left.id)
            resumed.commit()
            commit(client, "after")
            client.admin.scale(STREAM, seal=[1], ranges=[(0.5, 0.75), (0.75, 1.0)])
            commit(client, "last")
            assert [item for item in values_of(client, ACCOUNTS) if item not in kept] == [
                "after",
                "before",
                "last",
                "left",
            ]
        for stream in (STREAM, ACCOUNTS):
            assert main(["verify", stream, "--no-progress"]) == 0, capsys.readouterr().out
    gc.collect()  # kazoo leaves sockets open when its server is killed
