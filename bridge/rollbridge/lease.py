"""Leases: who leads a group, serves a transactional id, uses a slot, or is registered under a name.

A lease is an ephemeral node. It says who should act, not who can: its holder may have been paused, its session may have
ended, or ZooKeeper may have been set back. Two things say who can:

- The *token*, a node that stays. It is written in the step that takes the lease, so its version tells holders apart.
  Each write of a holder checks it (:meth:`Lease.guard`), as does the removal of the node. While it is missing holders
  are not told apart, but only one of them creates it. Slots of conditional writers have none, as Kafka fences their
  transactional ids, and names have none, as they decide nothing.
- A time, for what is acknowledged without a write: a holder is *sure* for a while after it began to renew. Others wait
  longer than that before they remove its node (:class:`Witness`).

Sessions of client names (:mod:`rollbridge.client.sessions`) are no leases: their records stay, nothing is renewed, and
a newer session needs no proof that the older one is over.

Source: Gray and Cheriton, "Leases", and Kleppmann, "How to do distributed locking" (fencing tokens).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Final, NamedTuple

from rollbridge.errors import RollbridgeError, UnknownWriteError
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.session import Watch, WatchedRead, Znode, ZooKeeperSession

logger = logging.getLogger(__name__)
Succeed = Callable[[bytes | None], bytes | None]


class LeaseState(Enum):
    """State of a lease, at one who may hold it."""

    VACANT = "not taken, or given up"
    HELD = "held"
    SUSPENDED = "held until the connection was interrupted; its node has to be seen again"
    LOST = "not held any more"


class LeaseEvent(Enum):
    """Event after which a lease may have another state."""

    TAKEN = "it was seen with what was written to take it"
    SEEN = "its node was seen, and is ours"
    GONE = "its node was removed"
    REPLACED = "its node is another holder's, or its token has another version"
    INTERRUPTED = "the connection to ZooKeeper was interrupted"
    EXPIRED = "the ZooKeeper session was lost"
    GIVEN_UP = "it was given up"


_S, _E = LeaseState, LeaseEvent

MOVES: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    **{(state, event): state for state in (_S.VACANT, _S.LOST) for event in LeaseEvent},
    **{(state, event): _S.LOST for state in (_S.HELD, _S.SUSPENDED) for event in (_E.GONE, _E.REPLACED, _E.EXPIRED)},
    **{(state, _E.SEEN): _S.HELD for state in (_S.HELD, _S.SUSPENDED)},
    **{(state, _E.INTERRUPTED): _S.SUSPENDED for state in (_S.HELD, _S.SUSPENDED)},
    **{(state, _E.TAKEN): _S.HELD for state in LeaseState},
    **{(state, _E.GIVEN_UP): _S.VACANT for state in LeaseState},
}
"""The next state. What is not held stays so, whatever is seen, until it is taken."""


MARGIN: Final = 0.1
"""Share by which others wait longer: the possible difference of clock rates, and more. No clocks are compared."""


class Witness:
    """Time for which another holder's node was seen unchanged.

    After more than a holder is sure, deleting it at that version is safe: the last renewal that succeeded was begun
    before it was seen, and no other one succeeds.
    """

    def __init__(self, sure_s: float) -> None:
        self._wait_s = sure_s * (1 + MARGIN)
        self._version: int | None = None
        self._since_s = 0.0

    def is_over(self, version: int, now_s: float) -> bool:
        """Note the version that was read before ``now_s``; return True if it proves the lease to be over."""
        if version != self._version:
            self._version, self._since_s = version, now_s
        return now_s - self._since_s > self._wait_s


class Link(NamedTuple):
    """Connection to ZooKeeper: the session's id, None while it is interrupted, and how often it was."""

    session_id: int | None = None
    interruptions: int = 0

    def owns(self, node: Znode) -> bool:
        """Return True if a node is that of this session."""
        return node.owner_session_id is not None and node.owner_session_id == self.session_id


class Tenure(NamedTuple):
    """A lease as it was last seen: over which connection, with which token, and the event before."""

    state: LeaseState = LeaseState.VACANT
    link: Link = Link()
    token: Znode | None = None
    cause: LeaseEvent = LeaseEvent.GIVEN_UP

    def after(self, event: LeaseEvent) -> Tenure:
        """Return it after an event."""
        state = MOVES[self.state, event]
        return self if state is self.state else self._replace(state=state, cause=event)

    def over(self, link: Link) -> Tenure:
        """Return it as this connection shows it."""
        if link == self.link:
            return self
        is_another = link.session_id not in (None, self.link.session_id)
        return self.after(LeaseEvent.EXPIRED if is_another else LeaseEvent.INTERRUPTED)


class Lease:
    """One lease. Any thread may ask for its state; one at a time does anything else."""

    def __init__(
        self,
        session: ZooKeeperSession,
        path: str,
        token: str = "",
        *,
        makes_parents: bool = True,
        sure_s: float = math.nan,
        changed: Watch = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin vacant.

        Args:
            makes_parents: False if it goes with the parent of its node.
            sure_s: Time for which a holder is sure, much shorter than a session's time-out.
            changed: Called on the session's thread when :meth:`look` has something new to read.
        """
        self.path: Final = path
        self.name: Final = path.rpartition("/")[2]
        self.renewed_s = math.nan
        self._session = session
        self._token = token
        self._makes_parents = makes_parents
        self._sure_s = sure_s
        self._clock = clock
        self._tenure = Tenure()
        self._others: Znode | None = None
        self._node = WatchedRead(self._read, changed)

    @property
    def tenure(self) -> Tenure:
        """The lease as far as is known now; costs no round trip."""
        return self._tenure.over(self._link())

    @property
    def is_held(self) -> bool:
        """True if it is held, as far as is known now."""
        return self.tenure.state is LeaseState.HELD

    @property
    def is_kept(self) -> bool:
        """True if it is held or suspended."""
        return self.tenure.state in (LeaseState.HELD, LeaseState.SUSPENDED)

    @property
    def is_sure(self) -> bool:
        """True if no proof can exist that it is over."""
        return self.is_kept and self._clock() < self.renewed_s + self._sure_s

    def is_own(self, found: Znode) -> bool:
        """Return True if a node is of this session, as one is that could not be given up."""
        return self._link().owns(found)

    def guard(self) -> list[CheckNode]:
        """Return the condition of each write of its holder: it was not taken since."""
        return self._checks(self._tenure.token)

    def take(self, value: bytes, succeed: Succeed = lambda token: token, over: Znode | None = None) -> Znode | None:
        """Take it, and write what ``succeed`` returns to the token; return None once that was seen.

        Otherwise return the node of another holder; if it is ``over``, it is replaced.
        """
        expected: int | None = -1
        begun_s = self._clock()
        while True:
            link, (token, found) = self._link(), self._nodes()
            if link.session_id is None:
                continue  # it is connected again by now, or the next read waits for that
            if found is not None and expected == version_of(token) and found.value == value and link.owns(found):
                self._node.forget()
                self.renewed_s, self._tenure = begun_s, Tenure(LeaseState.HELD, link, token, LeaseEvent.TAKEN)
                return None
            if found is not None and found != over:
                self._others = token
                return found
            fresh, expected = succeed(None if token is None else token.value), version_of(token)
            operations: list[NodeOperation] = [] if found is None else [DeleteNode(self.path, found.version)]
            operations.append(CreateNode(self.path, value, ephemeral=True))
            if fresh is not None:
                operations.append(self._write_of(token, fresh))
                expected = 0 if token is None else token.version + 1
            try:
                self._session.multi(operations)
            except NodeMissingError:
                if not self._makes_parents:
                    raise
                self._session.ensure(self.path.rpartition("/")[0])
            except (NodeConflictError, UnknownWriteError):
                continue  # what has become of it is seen at once

    def look(self) -> Znode | None:
        """Return the node, read again if it may have changed. A lease is held again if that is ours, else lost."""
        link, token, found = self._node.get()
        while link != self._link():  # a session that has ended in between is no node that was removed
            self._node.forget()
            link, token, found = self._node.get()
        tenure = self._tenure.over(link)
        if found is not None and link.owns(found) and version_of(token) == version_of(tenure.token):
            self._tenure = tenure.after(LeaseEvent.SEEN)._replace(link=link)
        else:
            self._tenure = tenure.after(LeaseEvent.GONE if found is None else LeaseEvent.REPLACED)
        return found

    def ask(self, found: Znode, value: bytes) -> None:
        """Write to the node of the other holder that :meth:`take` has returned, unless another one has taken it."""
        with suppress(NodeMissingError, NodeConflictError):
            self._session.multi([*self._checks(self._others), SetNode(self.path, value, found.version)])

    def renew(self, value: bytes) -> bool:
        """Write the node; return False if the lease is lost."""
        begun_s = self._clock()
        is_ours = self._change(*self.guard(), SetNode(self.path, value))
        self.renewed_s = begun_s if is_ours else self.renewed_s
        return is_ours

    def write(self, value: bytes) -> bool:
        """Write the token; return False if the lease is lost, and nothing was written."""
        token, version = self._tenure.token, 0
        if token is None:
            self._session.ensure(self._token.rpartition("/")[0])
        else:
            version = token.version + 1
        is_ours = self._change(self._write_of(token, value))
        self._tenure = self._tenure._replace(token=Znode(version, 0, 0, None, value)) if is_ours else self._tenure
        return is_ours

    def give_up(self) -> None:
        """Remove the node if it is this session's, also one that an interrupted :meth:`take` has left.

        If that fails, it goes with the session.
        """
        self._tenure = self._tenure.after(LeaseEvent.GIVEN_UP)
        try:
            while not self._is_removed():
                """Another one has written to it, to ask for it, or the connection was interrupted."""
        except RollbridgeError as fault:
            logger.info('lease.node_kept path=%s reason="%s"', self.path, fault)

    def _is_removed(self) -> bool:
        (token, found), link = self._nodes(), self._link()
        if found is None or not (link.session_id is None or link.owns(found)):
            return True
        if link.session_id is None:
            return False  # it is not known whose the node is
        return self._change(*self._checks(token), DeleteNode(self.path, found.version))

    def _nodes(self) -> tuple[Znode | None, Znode | None]:
        """Return token and node, read in this order: if the node is that of one holder, so was the token."""
        token, found = self._session.get_many([self._token or self.path, self.path])
        return token if self._token else None, found

    def _read(self, watch: Watch) -> tuple[Link, Znode | None, Znode | None]:
        link = self._link()
        return link, self._session.get(self._token) if self._token else None, self._session.get(self.path, watch)

    def _checks(self, token: Znode | None) -> list[CheckNode]:
        return [] if token is None else [CheckNode(self._token, token.version)]

    def _write_of(self, token: Znode | None, value: bytes) -> NodeOperation:
        return CreateNode(self._token, value) if token is None else SetNode(self._token, value, token.version)

    def _change(self, *operations: NodeOperation) -> bool:
        self._node.forget()  # the watch for this change may still be due
        try:
            self._session.multi(operations)
        except (NodeConflictError, NodeMissingError):
            self._tenure = self._tenure.after(LeaseEvent.REPLACED)
            return False
        return True

    def _link(self) -> Link:
        return Link(self._session.session_id, self._session.interruptions)


def version_of(node: Znode | None) -> int | None:
    return None if node is None else node.version
