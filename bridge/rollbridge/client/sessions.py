"""Sessions of this client's name: each one fences the one before, in each group in which it begins transactions.

A session registers in ZooKeeper when it first begins, resumes or lists transactions in a group. If there was a session
before it, the group's leader is told, and answers once nothing that the older one asked for is under way any more. So
whoever has begun a transaction knows that an older process of the same name can not change anything behind its back.

Connections without a name of their own do none of this: nobody else has their name. Their epoch is 0.

Several processes may share a session: those that name the same holder. The first one registers it; once another holder
has registered, they are all fenced, also those that begin only then.

Source: Kafka's ``InitProducerId`` and producer epochs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from rollbridge.errors import Fenced, UnavailableError
from rollbridge.model import paths
from rollbridge.model.names import GroupName
from rollbridge.model.records import ClientSession, next_session
from rollbridge.model.requests import Request, RequestKind
from rollbridge.zookeeper.errors import NodeExists, NodeMissing, NodeVersionMismatch, UnknownWriteError
from rollbridge.zookeeper.metadata import Metadata

logger = logging.getLogger(__name__)


class ClientSessions:
    """The sessions of one connection, one in each group. Safe to use from several threads."""

    def __init__(
        self, metadata: Metadata, client_name: str, *, named: bool, changed: Callable[[], None], holder: str = ""
    ) -> None:
        """Start without any.

        Args:
            metadata: Where they are registered.
            client_name: Whose they are.
            named: Whether others may use the same name; otherwise nothing is registered.
            changed: Called when :meth:`look` has something to do.
            holder: What all processes that share the session call it; empty: it is this one's own.
        """
        self._holder = holder
        self._metadata = metadata
        self._client_name = client_name
        self._named = named
        self._changed = changed
        self._epochs: dict[GroupName, int] = {}
        self._suspect: set[GroupName] = set()
        self._lock = threading.Lock()
        self.fenced: dict[GroupName, int] = {}
        """Groups in which a newer session has begun, with its epoch."""

    def epoch(self, group: GroupName, timeout_s: float) -> int:
        """The epoch of this session in a group; registers it at the first time.

        Raises:
            Fenced: a newer session has begun.
            CoordinatorUnavailable, UnknownWriteError: an older one could not be fenced in time; nothing was begun.
            ZooKeeperUnavailable.
        """
        self.check()
        if not self._named:
            return 0
        known = self._epochs.get(group)
        if known is not None:
            return known
        with self._lock:
            if group not in self._epochs:
                self._epochs[group] = self._register(group, timeout_s)
            return self._epochs[group]

    def take_over(self, groups: Iterable[GroupName], timeout_s: float) -> None:
        """Fence the older sessions in all groups that have one. Raises as :meth:`epoch` does."""
        self.check()
        wanted = [group for group in groups if self._named and group not in self._epochs]
        nodes = self._metadata.session.get_many([paths.session(group, self._client_name) for group in wanted])
        for group, node in zip(wanted, nodes, strict=True):
            if node is not None:
                self.epoch(group, timeout_s)

    def check(self) -> None:
        """Raise Fenced if a newer session has begun in any group: this process is not the one to go on."""
        for group, epoch in self.fenced.items():
            raise Fenced(
                f"a newer session of client {self._client_name} (epoch {epoch}) has begun in group {group}, so this "
                "one is over; nothing was written; what became of a transaction can be asked for by its id"
            )

    def look(self) -> None:
        """Find out whether a newer session has begun, if something has changed; tried again after errors."""
        while self._suspect:
            group = self._suspect.pop()
            try:
                self._watch(group)
            except UnavailableError as fault:
                logger.info("whether a newer session has begun in group %s can not be said now: %s", group, fault)
                self._suspect.add(group)
                return

    def _register(self, group: GroupName, timeout_s: float) -> int:
        session, path = self._metadata.session, paths.session(group, self._client_name)
        while True:
            node = session.get(path)
            before = None if node is None else ClientSession.from_json(node.value)
            if before is not None and self._holder:
                if before.holder == self._holder:
                    self._epochs[group] = before.epoch
                    break
                if before.is_former(self._holder):
                    self.fenced[group] = before.epoch
                    self.check()
            fresh = next_session(before, self._client_name, self._holder, int(time.time() * 1000))
            try:
                if node is None:
                    session.create(path, fresh.to_json(), parents=True)
                else:
                    session.set(path, fresh.to_json(), node.version)
            except (NodeExists, NodeMissing, NodeVersionMismatch, UnknownWriteError):
                continue  # somebody else was faster, or nobody knows: an epoch that nobody has does no harm
            if before is not None:
                self.fence(group, fresh.epoch, timeout_s)
            self._epochs[group] = fresh.epoch
            break
        self._watch(group)
        return self._epochs[group]

    def fence(self, group: GroupName, epoch: int, timeout_s: float) -> None:
        """Return once nothing that sessions below an epoch have asked for is under way. Raises as :meth:`epoch`."""
        request = Request(
            kind=RequestKind.FENCE,
            owner=self._client_name,
            owner_epoch=epoch,
            client_name=self._client_name,
            created_ms=int(time.time() * 1000),
        )
        self._metadata.ask(group, request, timeout_s)

    def _watch(self, group: GroupName) -> None:
        node = self._metadata.session.get(paths.session(group, self._client_name), lambda: self._suspect_change(group))
        newest = 0 if node is None else ClientSession.from_json(node.value).epoch
        if newest > self._epochs[group] and group not in self.fenced:
            logger.warning("client %s is fenced in group %s by epoch %d", self._client_name, group, newest)
            self.fenced[group] = newest

    def _suspect_change(self, group: GroupName) -> None:
        self._suspect.add(group)
        self._changed()
