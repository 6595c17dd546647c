"""Client: one name under which transactions begin, on a connection of its own or a shared one.

A :class:`rollbridge.Bridge` is a connection and the client of its own name. Any number of other names share its
sender, stream cache, outcome tail, ZooKeeper session and threads. Sessions and commit order are per name, some
kilobytes; a name with nothing open costs no time, here or at the leader.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Final

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Closable, Deadline, Timeout, answers_within
from rollbridge.client.futures import Completion
from rollbridge.client.identity import uptime_s
from rollbridge.client.recovery import ClientContext, Resumer
from rollbridge.client.sessions import ClientSessions
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import OwnerWriting, Planner, TransactionContext
from rollbridge.errors import BackpressureError, InvalidRequestError, RollbridgeError, UnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.records import CheckNode
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

_PLANS_MAX: Final = 4
"""Plans kept for each of the names that share a connection: mostly a name writes to the same streams, if any."""


@checked()
class BaseClient(Resumer, Closable):
    """Operations on transactions under one name."""

    __slots__ = ("_planner",)

    _planner: Planner

    def _use(
        self,
        name: str,
        client_context: ClientContext,
        sessions: ClientSessions,
        runtime: TransactionContext,
        *plans_max: int,
    ) -> None:
        """Set up; called once."""
        Resumer.__init__(self, name, client_context, sessions, runtime)
        self._planner = client_context.planner(name, sessions, *plans_max)

    @property
    @abstractmethod
    def client_name(self) -> str:
        """Name under which this client begins transactions."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise InvalidRequestError if the client or its connection is closed, or of a process that has forked."""

    def begin(
        self,
        *streams: str,
        timeout: Timeout = None,
        label: str | None = None,
        retain: Timeout = None,
    ) -> Transaction:
        """Begin a transaction. Costs no round trip, except for the first one of its streams.

        The first transaction under a client name that was given fences earlier sessions of this name in the group; see
        :meth:`unfinished`.

        Args:
            streams: ``scope/stream`` or adopted topics, one or more of one transaction group.
            timeout: Lease: how long it may stay open, without pings; 24 hours by default.
            label: Free text, at most 1,000 characters, to find it again.
            retain: How long its outcome is remembered, see :meth:`outcome`; 0 is not at all, and by default it is as
                long as the coordinator is set to, 72 hours unless changed.

        Raises:
            ClientFencedError: a newer session of this client name has begun; nothing was written.
            CoordinatorUnavailableError: an earlier session of this client name could not be fenced.
            InvalidNameError, StreamNotFoundError, InvalidRequestError,
                InvalidRequestError, BackpressureError: nothing was written.
            KafkaUnavailableError, ZooKeeperUnavailableError: the streams could not be looked up.
        """
        self._check_open()
        sessions = self._sessions
        if sessions.fenced:
            sessions.check()
        if uptime_s() > sessions.renew_at_s:
            sessions.renew()
            sessions.check()
        if sessions.left:
            sessions.left = {}
        plan = self._planner.plan(streams, timeout, label, retain)
        runtime, client_context = self._runtime, self._client_context
        if len(runtime.outcomes.waiting) >= client_context.options.open_transactions_max:
            raise BackpressureError(
                f"{client_context.options.open_transactions_max} transactions of this connection are open or wait for "
                "their outcome; end some of them; nothing was written"
            )
        return Transaction(OwnerWriting.begun(runtime, plan, client_context.counters.next(plan.group)))

    def transaction(
        self,
        *streams: str,
        timeout: Timeout = None,
        label: str | None = None,
        retain: Timeout = None,
    ) -> Transaction:
        """Begin a transaction for a ``with`` block, whose end commits it, or aborts it after an exception."""
        return self.begin(*streams, timeout=timeout, label=label, retain=retain)

    def new_session(self, group: str | GroupName | None = None, timeout: Timeout = None) -> int:
        """Begin another session of this client name and fence all earlier ones, those of this object included.

        Commits that earlier sessions have asked for are finished before this returns; nothing else of theirs ever will
        be. :meth:`unfinished` lists what they have left open, without asking the leader once more if it is called next.
        Kafka calls this ``InitProducerId``.

        Args:
            group: ``scope/group``; by default all in which there are sessions of this name. In others it begins with
                its first transaction.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Returns:
            Epoch of the session, higher than any before; in several groups, the highest; 0 if there was none before
            in any.

        Raises:
            InvalidRequestError: the client was given no name, so it has no other sessions.
            NotFoundError: there is no such group.
            CoordinatorUnavailableError, UnknownWriteError: earlier sessions could not be fenced in time; they may be
                over all the same.
            ZooKeeperUnavailableError.
        """
        self._check_open()
        if not self._sessions.is_named:
            raise InvalidRequestError(
                f"client {self.client_name} was given no name, so it has no sessions; connect with a client_name, or "
                "use b.client(name)"
            )
        deadline = Deadline(self._seconds(timeout))
        with answers_within(deadline.left()):
            return max((self._begin_anew(item, deadline.left()) for item in self._places(group)), default=0)


@checked()
class Client(BaseClient):
    """One of many client names on a connection. Made by :meth:`rollbridge.Bridge.client`; safe to use from threads.

    It does for transactions what a :class:`rollbridge.Bridge` with this ``client_name`` does. Commits of one client
    take effect in the order in which they were asked for; those of different clients do not wait for each other.
    """

    __slots__ = ("_closed", "_name", "_owner", "_release")

    def __init__(
        self, name: str, client_context: ClientContext, check: Callable[[], None], release: Callable[[Client], None]
    ) -> None:
        """Applications call :meth:`rollbridge.Bridge.client`.

        Args:
            name: Client name.
            client_context: What it has in common with other names.
            check: Raises InvalidRequestError if the connection is closed.
            release: Called when this is closed.
        """
        self._name = name
        self._closed = False
        self._owner = check
        self._release = release
        self._use(
            name, client_context, client_context.sessions(name, None), client_context.runtime_of_client(), _PLANS_MAX
        )

    @property
    def client_name(self) -> str:
        """Name under which this client begins transactions."""
        return self._name

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self._closed

    def only_while(self, guard: Callable[[], CheckNode]) -> None:
        """Begin sessions only while a node in ZooKeeper that decides on the owner of this name has a version.

        A process that stalled while another took the name over cannot take it back: it raises
        :class:`ClientFencedError`, and no other session is fenced.

        Args:
            guard: Gives the node's path and version when a session is to begin.
        """
        self._sessions.guard = guard

    def close(self) -> None:
        """Send what is queued, and forget the name. Open transactions stay open until their lease ends."""
        if self._closed:
            return
        self._closed = True
        self._release(self)

    def __repr__(self) -> str:
        return f"<Client {self._name}{' (closed)' if self._closed else ''}>"

    def _check_open(self) -> None:
        self._owner()
        if self._closed:
            raise InvalidRequestError(
                f"client {self._name} was closed; take it from the connection again; nothing was written"
            )


# Fences


_AT_ONCE: Final = 200
"""Records of sessions read in one turn."""
_ENDING_S: Final = 1.0
"""Seconds between two reads of the record of a client with a pending outcome."""
_OPEN_S: Final = 10.0
"""The same of one whose transactions are all open."""
_TURN_S: Final = 1.0
"""Seconds after which a turn asks no more leaders for the transactions of fenced clients."""


class FenceMonitor:
    """Finds the fenced clients among those with something open, a bounded number in each turn.

    Clients with nothing open do not lengthen it.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._fenced: dict[str, BaseClient] = {}

    def look(self, clients: dict[str, Client], waiting: Iterable[Completion]) -> None:
        """Read the records that are due, and fence the waiters of fenced clients; called on the housekeeping thread."""
        if not clients:
            return
        now_s = uptime_s()
        active: dict[str, bool] = {}
        for item in waiting:
            if item.held_by is not None:
                active[item.held_by] = active.get(item.held_by, False) or item.closed
        due: list[Client] = []
        for name, ending in active.items():
            client = clients.get(name)
            if client is None:
                continue
            sessions = client._sessions
            if sessions.fenced or sessions.gone:
                self._fenced[name] = client
            elif now_s - sessions.looked_s > (_ENDING_S if ending else _OPEN_S):
                due.append(client)
        due.sort(key=lambda client: client._sessions.looked_s)
        self._read(due[:_AT_ONCE], now_s)
        self._let_go(active, now_s)

    def _read(self, due: list[Client], now_s: float) -> None:
        places = [(client, group) for client in due for group in client._sessions.groups()]
        try:
            nodes = self._metadata.session.get_many([paths.session(group, item.client_name) for item, group in places])
        except UnavailableError:
            return  # read again in the next turn
        for (client, group), node in zip(places, nodes, strict=True):
            client._sessions.looked_s = now_s
            client._sessions.note(group, node)
            if client._sessions.fenced or client._sessions.gone:
                self._fenced[client.client_name] = client

    def _let_go(self, active: dict[str, bool], now_s: float) -> None:
        for name, client in list(self._fenced.items()):
            del self._fenced[name]
            if name not in active:
                continue
            if uptime_s() - now_s > _TURN_S:
                self._fenced[name] = client
                return
            try:
                client._look_at_sessions()
            except RollbridgeError:
                self._fenced[name] = client
                raise
