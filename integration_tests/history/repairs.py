"""ZooKeeper is set back to a backup, and repaired, as an administrator does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Final

from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.doctor import probes
from rollbridge.doctor.repair import outdated_groups
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import StreamName

NOTICED_S: Final = 60.0
"""Within this time somebody tries to lead."""


class Restoration:
    """One of them; ``stream`` is what tells whether something has changed since the backup."""

    def __init__(self, cluster: AnyCluster, stream: str) -> None:
        self._cluster = cluster
        self._stream = StreamName.parse(stream)
        self._epoch = -1

    def back_up(self) -> None:
        """Copy what ZooKeeper holds."""
        self._epoch = self._active_epoch()
        self._cluster.back_up_zookeeper()

    def await_change(self, change: Callable[[], None]) -> None:
        """Try to change something until ZooKeeper holds what the backup does not."""

        def has_changed() -> bool:
            change()
            return self._active_epoch() > self._epoch

        eventually(has_changed, "another epoch")

    def is_refused(self) -> bool:
        """Whether somebody who was to lead has found that ZooKeeper holds too little; it is waited for."""
        try:
            eventually(self._is_outdated, "a leader that refuses", NOTICED_S)
        except AssertionError:
            return False
        return True

    def repair(self) -> None:
        """Run ``rollbridge repair``.

        Raises:
            AssertionError: It fails.
        """
        environment = {
            **os.environ,
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self._cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": self._cluster.zookeeper,
        }
        command = [sys.executable, "-m", "rollbridge", "repair"]
        done = subprocess.run(command, capture_output=True, env=environment, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"rollbridge repair: {done.returncode}: {(done.stdout + done.stderr).decode()}"
        assert not self._is_outdated(), f"rollbridge repair has changed nothing: {done.stdout.decode()}"

    def _active_epoch(self) -> int:
        with self._session() as session:
            history = Metadata(session).history(self._stream)
        assert history is not None
        return history.active.epoch

    def _is_outdated(self) -> bool:
        with self._session() as session:
            return bool(outdated_groups(session))

    def _session(self) -> ZooKeeperSession:
        return ZooKeeperSession(self._cluster.zookeeper, root=probes.ZOOKEEPER_ROOT)
