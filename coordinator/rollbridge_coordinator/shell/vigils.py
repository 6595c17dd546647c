"""Vigils over all other coordinators, and what follows from the end of one: its ephemeral nodes go at once.

So its groups are vacant without waiting for ZooKeeper's session time-out. That is allowed because nothing rests on the
session: who can act is decided by the controller epoch and by Kafka's fencing. A coordinator that was taken for dead,
though it lives, finds its node gone, gives up what it leads, registers anew without an address, and so is never judged
by a connection again; see :mod:`rollbridge_coordinator.shell.presence`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.model import paths
from rollbridge.model.nodes import DeleteNode
from rollbridge.model.records import Coordinator
from rollbridge.zookeeper.errors import NodeMissing
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import Node, ZooKeeperSession
from rollbridge_coordinator.shell.presence import Vigil

logger = logging.getLogger(__name__)

NODES_AT_ONCE: Final = 1_000


class Vigils:
    """One for each other coordinator that says where it is; used by one thread."""

    def __init__(self, session: ZooKeeperSession, name: str) -> None:
        """Prepare; ``name`` is that of this coordinator, which need not watch itself."""
        self._session = session
        self._name = name
        self._kept: dict[tuple[str, str, str, int | None], Vigil] = {}

    def keep(self, records: Mapping[str, tuple[Node, Coordinator]]) -> None:
        """Watch exactly these."""
        wanted = {
            (name, said.address, said.life, node.owner_session_id)
            for name, (node, said) in records.items()
            if said.address and said.life and name != self._name
        }
        for key in self._kept.keys() - wanted:
            self._kept.pop(key).stop()
        for key in wanted - self._kept.keys():
            name, address, life, owner = key
            vigil = Vigil(name, address, life, partial(self._ended, name, life, owner))
            vigil.start()
            self._kept[key] = vigil

    def stop(self) -> None:
        """Let go of all."""
        self.keep({})

    def _ended(self, name: str, life: str, owner: int | None) -> None:
        try:
            removed = remove_dead(self._session, name, life, owner)
        except RollbridgeError as fault:
            logger.warning("coordinator %s has ended; its session time-out is waited for: %s", name, fault)
        except Exception:
            logger.exception("a defect kept the nodes of coordinator %s, which has ended", name)
        else:
            if removed is not None:
                logger.warning("coordinator %s has ended: removed it, and its lead of %d groups", name, removed)


def remove_dead(session: ZooKeeperSession, name: str, life: str, owner: int | None) -> int | None:
    """Remove the ephemeral nodes of a coordinator whose process has ended.

    The node that registers it goes with the first of its leads, in one step, so that only one of those who see the end
    does anything, and that one only while the node is there.

    Returns:
        How many groups are vacant now; None if its nodes were gone, or are another life's, and nothing was done.

    Raises:
        ZooKeeperDenied, ZooKeeperUnavailable: nothing was removed, or not all.
    """
    metadata = Metadata(session)
    place = paths.coordinator(name)
    session.sync()
    node = session.get(place)
    if node is None or node.owner_session_id != owner or Coordinator.from_json(node.value).life != life:
        return None
    leads = [paths.leader(group) for group in metadata.groups()]
    own = [
        DeleteNode(path, found.version)
        for path, found in zip(leads, session.get_many(leads), strict=True)
        if found is not None and found.owner_session_id == owner
    ]
    try:
        session.multi([DeleteNode(place, node.version), *own[: NODES_AT_ONCE - 1]])
        for start in range(NODES_AT_ONCE - 1, len(own), NODES_AT_ONCE):
            session.multi(own[start : start + NODES_AT_ONCE])
    except NodeMissing:
        return None  # somebody else was faster, or the session has just ended
    return len(own)
