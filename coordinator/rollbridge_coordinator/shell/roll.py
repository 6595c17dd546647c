"""The roll of coordinators: who is alive, and what each says of itself, as it stands in ZooKeeper."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.model import paths
from rollbridge.model.names import GroupName
from rollbridge.model.records import Coordinator
from rollbridge.zookeeper.session import Node, ZooKeeperSession
from rollbridge_coordinator.state.succession import Candidates

logger = logging.getLogger(__name__)

SILENT = Coordinator(0, 0)
"""A coordinator of which nothing is known but its name."""


class Roll:
    """Read by one thread; what was read may be asked for from any."""

    def __init__(self, session: ZooKeeperSession, on_change: Callable[[], None]) -> None:
        """Prepare. ``on_change`` is called when :meth:`read` has something new to read, and must not block."""
        self._session = session
        self._on_change = on_change
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._is_read = False
        self._names: list[str] = []
        self.candidates = Candidates()
        """Who is alive, and ready for what."""
        self.records: Mapping[str, tuple[Node, Coordinator]] = {}
        """Their nodes, and what these say, by name."""

    def read(self) -> None:
        """Read what has changed since; raises as ZooKeeper's session does."""
        if not self._is_read:
            self._is_read = True
            try:
                self._names = self._session.children(paths.COORDINATORS, self._members_changed)
            except BaseException:
                self._is_read = False
                raise
        found: dict[str, Node] = {}
        for name in self._names:
            node = self._nodes.get(name)
            if node is None:
                moved = threading.Event()
                node = self._session.get(paths.coordinator(name), partial(self._record_changed, name, moved))
                if node is None:
                    continue
                with self._lock:
                    if not moved.is_set():
                        self._nodes[name] = node
            found[name] = node
        with self._lock:
            for name in self._nodes.keys() - found.keys():
                del self._nodes[name]
        known = self.records
        self.records = {
            name: known[name] if name in known and known[name][0] == node else (node, _parse(name, node.value))
            for name, node in found.items()
        }
        self.candidates = Candidates({name: frozenset(item.ready) for name, (_, item) in self.records.items()})

    def _members_changed(self) -> None:
        self._is_read = False
        self._on_change()

    def _record_changed(self, name: str, moved: threading.Event) -> None:
        with self._lock:
            moved.set()
            self._nodes.pop(name, None)
        self._on_change()


def within(bytes_max: int, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
    """As many of the groups, in the order of their names, as fit into so many bytes."""
    found = []
    for group in sorted(groups, key=str):
        bytes_max -= len(str(group).encode()) + 4  # quotes, comma and blank
        if bytes_max < 0:
            break
        found.append(group)
    return tuple(found)


def _parse(name: str, value: bytes) -> Coordinator:
    try:
        return Coordinator.from_json(value) if value else SILENT
    except (CorruptDataError, InvalidRequestError) as fault:
        logger.warning("what coordinator %s says of itself can not be read: %s", name, fault)
        return SILENT
