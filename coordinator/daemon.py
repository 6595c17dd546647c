"""The daemon: registers itself, and shares the transaction groups with the other coordinators that are alive.

Each group has a first choice among the coordinators by rendezvous hashing, so groups spread evenly and few move when
one comes or goes. A group that its first choice does not lead is led by another one after a short wait. A coordinator
that Kafka does not answer is no choice: it strikes itself off the list until it is answered again.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

import xxhash

from bridge.errors import RollbridgeError
from bridge.kafka.topics import TopicAdmin
from bridge.model import paths
from bridge.model.names import GroupName
from bridge.model.records import Coordinator
from bridge.zookeeper.errors import NodeExists
from bridge.zookeeper.metadata import Metadata
from bridge.zookeeper.session import SessionState, ZooKeeperSession
from coordinator.config import CoordinatorSettings
from coordinator.shell.leadership import Leadership
from coordinator.shell.pulse import Pulse

logger = logging.getLogger(__name__)

PROBE_S: Final = 1.0
"""How often a coordinator that Kafka does not answer asks again."""


def first_choice(group: GroupName, coordinators: list[str]) -> str | None:
    """Which of the coordinators should lead a group; None if there are none."""
    return max(
        coordinators, key=lambda name: (xxhash.xxh64_intdigest(f"{group.node}|{name}".encode()), name), default=None
    )


class Daemon:
    """One coordinator process."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._session = ZooKeeperSession(
            settings.zookeeper,
            root=settings.zookeeper_root,
            session_timeout_s=settings.session_timeout_s,
            name=settings.name,
            security=settings.zookeeper_security,
        )
        self._metadata = Metadata(self._session)
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._members: list[str] = []
        self._leaderships: dict[GroupName, Leadership] = {}
        self._pulse = Pulse(settings)
        self._answered = True
        self.is_fit = True
        """Whether Kafka answers, as far as is known; not while that is in doubt."""

    def run(self) -> None:
        """Serve until :meth:`stop`.

        Raises:
            WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
            KafkaUnavailable, ZooKeeperUnavailable: nobody answered at the start.
        """
        self._session.start()
        try:
            admin = TopicAdmin(self._settings.bootstrap_servers, security=self._settings.security)
            self._metadata.claim_cluster(admin.cluster_id())
            self._metadata.lay_out()
            self._session.on_state(self._state_changed)
            self._changed.set()
            logger.info("coordinator %s serves %s", self._settings.name, self._settings.bootstrap_servers)
            while not self._stopping.is_set():
                self._changed.wait(None if self.is_fit else PROBE_S)
                self._changed.clear()
                if not self._stopping.is_set():
                    self._look_for_kafka()
                    self._refresh()
        finally:
            for leadership in self._leaderships.values():
                leadership.stop()
            for leadership in self._leaderships.values():
                leadership.join(timeout=10)
            self._session.close()

    def stop(self) -> None:
        """End: groups are handed over at once."""
        self._stopping.set()
        self._changed.set()

    def doubt(self) -> None:
        """Something failed that may be due to the way to Kafka: lead nothing before it is known that it answers."""
        self.is_fit = False
        self._changed.set()

    def _look_for_kafka(self) -> None:
        if self.is_fit:
            return
        self.is_fit = self._pulse.is_there()
        if self.is_fit != self._answered:
            self._answered = self.is_fit
            logger.warning(
                "Kafka %s", "answers: this coordinator may lead" if self.is_fit else "is gone: it leads nothing"
            )

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._changed.set()

    def _refresh(self) -> None:
        """Read who is alive and which groups exist; watches lead here again."""
        try:
            self._register()
            self._members = self._session.children(paths.COORDINATORS, self._changed.set)
            for group in self._metadata.groups(self._changed.set):
                if group not in self._leaderships:
                    leadership = Leadership(self._settings, group, self._session, self._is_preferred, self)
                    self._leaderships[group] = leadership
                    leadership.start()
            for leadership in self._leaderships.values():
                leadership.poke()
        except RollbridgeError as fault:
            logger.warning("could not look up groups, trying again: %s", fault)
            self._stopping.wait(1.0)
            self._changed.set()

    def _register(self) -> None:
        path = paths.coordinator(self._settings.name)
        present = self._session.exists(path)
        if not self.is_fit:
            if present is not None and present.owner_session_id == self._session.session_id:
                self._session.delete(path)
            return
        if present is not None and present.owner_session_id != self._session.session_id:
            # Left by an earlier session of ours, or a namesake's: it goes when that session ends.
            logger.info("coordinator %s is still registered by another session", self._settings.name)
            self._stopping.wait(0.5)
            self._changed.set()
        if present is None:
            try:
                self._session.create(path, self._record(), ephemeral=True)
            except NodeExists:
                self._changed.set()

    def _record(self) -> bytes:
        snapshots = self._settings.leader.snapshots
        return Coordinator(
            snapshots.transaction_buffer_snapshot_max_transaction_count,
            snapshots.transaction_buffer_snapshot_min_time_in_millis,
        ).to_json()

    def _is_preferred(self, group: GroupName) -> bool:
        return first_choice(group, self._members) == self._settings.name
