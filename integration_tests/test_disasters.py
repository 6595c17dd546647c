"""What machines do to servers: a full disk (skipped where none can be mounted)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import read_committed
from integration_tests.coordinators import coordinator, until
from rollbridge.errors import RollbridgeError

DISK_MIB = 400


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for little."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        while _has_room(disk):
            file.write(bytes(os.statvfs(disk).f_frsize))
            file.flush()
    return ballast


def _has_room(disk: Path) -> bool:
    return os.statvfs(disk).f_bavail > 0


def test_a_broker_whose_disk_is_full_loses_nothing_that_was_acknowledged(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    stream = "full/orders"
    acknowledged: list[bytes] = []
    options = rollbridge.ClientOptions(commit_timeout_s=3, admin_timeout_s=60)
    with LocalCluster() as own, coordinator(own, "/full", "one", tmp_path):

        def connected() -> rollbridge.Bridge:
            return rollbridge.connect(
                own.bootstrap_servers, zookeeper=own.zookeeper, zookeeper_root="/full", options=options
            )

        def commit(b: rollbridge.Bridge, value: bytes) -> None:
            transaction = b.begin(stream)
            transaction.write(stream, key=b"k", value=value + bytes(100_000))
            transaction.commit()
            acknowledged.append(value)

        with connected() as b:
            b.admin.create_stream(stream)
            commit(b, b"before")
            ballast = fill(small_disk)
            number = 1  # what is left in the last page of each file is little
            while _succeeds(lambda: commit(b, b"%d" % number)):  # noqa: B023
                number += 1
                assert number < 100, "the disk is not full"
            ballast.unlink()
            own.restart("zookeeper", gracefully=False)  # on the same disk: a server that cannot write its log ends
            own.restart("kafka", gracefully=False)
        with connected() as b:
            until(lambda: _succeeds(lambda: commit(b, b"after")))
            [segment] = b.admin.history(stream).segments()
        topic = rollbridge.StreamName.parse(stream).segment_topic(segment)
        there = [(message.value() or b"").rstrip(b"\0") for message in read_committed(own.bootstrap_servers, [topic])]
        unclear = [value for value in there if value not in acknowledged]
        assert [value for value in there if value not in unclear] == acknowledged
        assert set(unclear) <= {b"%d" % number, b"after"}, "only what had no answer may be there or not"


def _succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except RollbridgeError:
        return False
    return True
