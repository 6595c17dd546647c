"""Access control of transaction groups: ACLs of the few ZooKeeper nodes that clients write to.

Every node belongs to its creator, and all may read it (:mod:`rollbridge.base.security`). Coordinators create nearly all
of them, so clients can change none. Members of a group have only these rights; the last three are for gateways, which
are members of the groups that they serve:

======================================  ==========  ==============================================================
node                                    right       why
======================================  ==========  ==============================================================
``/groups/SCOPE.GROUP/requests``        cdr         put admin requests and questions, withdraw them
``/groups/SCOPE.GROUP/answers``         dr          take answers away
``/groups/SCOPE.GROUP/sessions``        cdr         register the session of a client name; the node is then its own
``/groups/SCOPE.GROUP/parts``           cr          number the processes that write one transaction
``/cas/SCOPE.STREAM``                   cdr         take a slot as conditional writer; for each stream of the group
``/groups/SCOPE.GROUP/counter``         rw          reserve transaction ids; of no other group's number, see below
``/gateways/live``                      cdr         say that a gateway is there
``/gateways/ids``                       cr          keep entries of transactional ids; they are then its own
``/gateways/held``                      cr          hold transactional ids
======================================  ==========  ==============================================================

The value of a group's counter is trusted within bounds only (:mod:`rollbridge.base.ids`). ``/counters/transaction``,
the counter that all groups shared in earlier versions, is not granted any more; identities that had it keep it for
clients of these versions until :meth:`Access.secure` closes it.

The group is the smallest unit: its members may send its leader every request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from kazoo.security import ACL, Id, Permissions, make_digest_acl_credential

from rollbridge.base.security import OWNED
from rollbridge.errors import InvalidNameError, InvalidRequestError, NotFoundError
from rollbridge.metadata import paths
from rollbridge.metadata.errors import NodeMissingError
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName

_READ: Final = Permissions.READ
_MEMBER: Final = _READ | Permissions.CREATE | Permissions.DELETE
_RESERVER: Final = _READ | Permissions.WRITE
GRANTED: Final = {
    f"{paths.GROUPS}/SCOPE.GROUP/requests": _MEMBER,
    f"{paths.GROUPS}/SCOPE.GROUP/answers": _READ | Permissions.DELETE,
    f"{paths.GROUPS}/SCOPE.GROUP/sessions": _MEMBER,
    f"{paths.GROUPS}/SCOPE.GROUP/parts": _READ | Permissions.CREATE,
    f"{paths.GROUPS}/SCOPE.GROUP/counter": _RESERVER,
    f"{paths.CAS}/SCOPE.STREAM": _MEMBER,
}
"""Rights of members of a group on nodes that coordinators own; all may read everything."""
GRANTED_TO_GATEWAYS: Final = {
    paths.GATEWAYS_LIVE: _MEMBER,
    paths.GATEWAY_LEASES: _MEMBER,
    paths.GATEWAY_IDS: _READ | Permissions.CREATE,
    paths.GATEWAY_HOLDERS: _READ | Permissions.CREATE,
}
"""Rights of gateways there, likewise. All gateways of a root path use one identity."""
_IDENTITY: Final = re.compile(r"digest:[^:]+:[A-Za-z0-9+/]{27}=|(?:x509|sasl|ip):.+")
_OF_CLIENTS: Final = re.compile(
    rf"{paths.GROUPS}/[^/]+/(?:sessions|parts|requests)|{paths.CAS}/[^/]+|{paths.GATEWAYS}/[^/]+"
)
"""Nodes whose children are made by clients, or by gateways."""
_WORLD: Final = "world"


def digest_identity(username: str, password: str) -> str:
    """Return the identity of a user of the scheme ``digest``, which holds a hash of the password.

    Raises:
        InvalidRequestError: a name that ZooKeeper cannot tell from the password.
    """
    if not username or ":" in username:
        raise InvalidRequestError(f"{username!r} is not a user name: it is empty or holds a colon")
    return f"digest:{make_digest_acl_credential(username, password)}"


def parse_identity(text: str) -> Id:
    """Parse ``digest:USER:HASH``, ``x509:SUBJECT``, ``sasl:NAME`` or ``ip:ADDRESS``.

    Raises:
        InvalidRequestError: none of these.
    """
    if not _IDENTITY.fullmatch(text):
        raise InvalidRequestError(
            f"{shown(text)!r} is not an identity: digest:USER:HASH (`rollbridge access identity USER` makes one), "
            "x509:SUBJECT, sasl:NAME or ip:ADDRESS is expected; nothing was granted"
        )
    scheme, _, name = text.partition(":")
    return Id(scheme, name)


def shown(identity: Id | str) -> str:
    """Return an identity without the hash of its password, from which that could be guessed."""
    text = identity if isinstance(identity, str) else f"{identity.scheme}:{identity.id}"
    return ":".join(text.split(":")[:2]) if text.startswith("digest:") else text


class Access:
    """Grants and revocations of clients' rights. The session needs the identity of the coordinators."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._metadata = Metadata(session)

    def secure(self, *, shared_counter: bool = False) -> int:
        """Close all nodes that are open to everybody; return their number.

        Missing nodes that coordinators need are created first, so that they belong to this identity. Nodes of sessions,
        parts and slots stay as they are, since clients own them.

        Args:
            shared_counter: Also close the counter that members of all groups could write in earlier versions: clients
                of these versions can then begin no transactions any more.

        Raises:
            InvalidRequestError: the session has no identity that could own a node; nothing was changed.
            ZooKeeperDeniedError: another identity owns a node; those before it are closed.
        """
        self._need_identity()
        self._metadata.lay_out()
        closed = 0
        for path in self._tree(paths.CLUSTER):
            if _is_open(self._session.acl(path)):
                self._session.set_acl(path, OWNED)
                closed += 1
        if shared_counter and len(self._session.acl(paths.TRANSACTION_COUNTER)) > len(OWNED):
            self._session.set_acl(paths.TRANSACTION_COUNTER, OWNED)
            closed += 1
        return closed

    def grant(self, group: GroupName, identities: Iterable[Id]) -> None:
        """Let identities use a group, which is made if it does not exist.

        Raises:
            InvalidRequestError: the session has no identity; nothing was changed.
            InvalidNameError: a stream has the name of the group, so its writers could write to the commit log.
            ZooKeeperDeniedError: the session is not a coordinator's.
        """
        self._need_identity()
        if self._metadata.stream(StreamName(group.scope, group.group)) is not None:
            raise InvalidNameError(f"group {group} has the name of a stream of its scope; nothing was granted")
        self._metadata.lay_out()
        self._metadata.ensure_group(group)
        self._grant(self._places(group), identities)

    def _grant(self, places: Iterable[tuple[str, int]], identities: Iterable[Id]) -> None:
        wanted = list(dict.fromkeys(identities))
        for path, rights in places:
            kept = [entry for entry in self._closed(path) if entry.id not in wanted]
            self._session.set_acl(path, [*kept, *(ACL(rights, item) for item in wanted)])

    def grant_gateways(self, identities: Iterable[Id]) -> None:
        """Let identities be gateways: say that they are there, and keep transactional ids. Groups are granted apart.

        Raises:
            InvalidRequestError: the session has no identity; nothing was changed.
            ZooKeeperDeniedError: the session is not a coordinator's.
        """
        self._need_identity()
        self._metadata.lay_out()
        self._grant(GRANTED_TO_GATEWAYS.items(), identities)

    def revoke_gateways(self, identities: Iterable[str]) -> list[Id]:
        """Let identities be gateways no longer; they may be named without hashes. Return those that might."""
        self._need_identity()
        self._metadata.lay_out()
        gone = _named(self.gateways(), identities)
        for path in GRANTED_TO_GATEWAYS:
            self._session.set_acl(path, [entry for entry in self._closed(path) if entry.id not in gone])
        return gone

    def gateways(self) -> list[Id]:
        """Return the identities that may be gateways."""
        try:
            return _members(self._session.acl(paths.GATEWAYS_LIVE))
        except NodeMissingError:  # no coordinator of this version has been there yet
            return []

    def revoke(self, group: GroupName, identities: Iterable[str]) -> list[Id]:
        """Revoke identities' use of a group; they may be named without hashes. Return those that had it.

        Raises:
            NotFoundError: there is no such group.
        """
        self._need_identity()
        gone = _named(self.members(group), identities)
        elsewhere = {item for other in self._metadata.groups() if other != group for item in self.members(other)}
        for path, _ in self._places(group):
            self._session.set_acl(path, [entry for entry in self._closed(path) if entry.id not in gone])
        with suppress(NodeMissingError):  # granted by an earlier version
            known = self._closed(paths.TRANSACTION_COUNTER)
            kept = [entry for entry in known if entry.id not in gone or entry.id in elsewhere]
            self._session.set_acl(paths.TRANSACTION_COUNTER, kept)
        return gone

    def members(self, group: GroupName) -> list[Id]:
        """Return the identities that may use a group.

        Raises:
            NotFoundError: there is no group of this name.
        """
        if group not in self._metadata.groups():
            raise NotFoundError(f"there is no transaction group {group}")
        return _members(self._session.acl(paths.requests(group)))

    def is_open(self, group: GroupName) -> bool:
        """Return True if everybody who reaches ZooKeeper may use a group."""
        return _is_open(self._session.acl(paths.requests(group)))

    def _need_identity(self) -> None:
        if not self._session.has_identity:
            raise InvalidRequestError(
                "access is given by whom ZooKeeper knows: set digest.username and digest.password, or a certificate, "
                "under zookeeper_security (docs/security.md); nothing was changed"
            )

    def _closed(self, path: str) -> Sequence[ACL]:
        """Return the ACL of a node as it is once the node is closed to everybody."""
        acl = self._session.acl(path)
        return OWNED if _is_open(acl) else acl

    def _places(self, group: GroupName) -> Iterator[tuple[str, int]]:
        """Yield the nodes that members write to, and their rights there."""
        self._session.ensure(paths.counter(group))  # a group of an earlier version has none yet
        for title, rights in GRANTED.items():
            if not title.startswith(paths.CAS):
                yield title.replace("SCOPE.GROUP", group.node), rights
        for stream in self._metadata.streams(group.scope):
            if stream.group == group:
                self._session.ensure(paths.cas_slots(stream.name))
                yield paths.cas_slots(stream.name), GRANTED[f"{paths.CAS}/SCOPE.STREAM"]

    def _tree(self, path: str) -> Iterator[str]:
        """Yield a node and everything below it, except what clients own."""
        yield path
        if not _OF_CLIENTS.fullmatch(path):
            for name in self._session.children(path):
                yield from self._tree(f"{path.rstrip('/')}/{name}")


def open_slots(session: ZooKeeperSession, group: GroupName, path: str) -> None:
    """Let the members of a group take slots below a node that has just been made for a stream of it."""
    if session.has_identity:
        session.set_acl(path, session.acl(paths.requests(group)))


def open_counter(session: ZooKeeperSession, group: GroupName) -> None:
    """Let the members of a group write its counter, which has just been created."""
    if session.has_identity:
        path, known = paths.counter(group), session.acl(paths.requests(group))
        wanted = [
            entry if entry.id.scheme == _WORLD or entry.perms == Permissions.ALL else ACL(_RESERVER, entry.id)
            for entry in known
        ]
        if list(session.acl(path)) != wanted:
            session.set_acl(path, wanted)


def open_nodes(session: ZooKeeperSession) -> list[str]:
    """Return those of the most important nodes that everybody may change."""
    groups = [path for name in Metadata(session).groups() for path in (paths.group(name), paths.requests(name))]
    found = []
    for path in (
        paths.CLUSTER,
        paths.SCOPES,
        paths.GROUPS,
        paths.CAS,
        paths.TRANSACTION_COUNTER,
        paths.GROUP_NUMBERS,
        paths.GATEWAYS,
        *GRANTED_TO_GATEWAYS,
        *groups,
    ):
        with suppress(NodeMissingError):
            if _is_open(session.acl(path)):
                found.append(path)
    return found


def _members(acl: Iterable[ACL]) -> list[Id]:
    return [entry.id for entry in acl if entry.id.scheme != _WORLD and entry.perms != Permissions.ALL]


def _named(known: Iterable[Id], names: Iterable[str]) -> list[Id]:
    """Return those of the identities that are named, with or without hashes."""
    wanted = set(names)
    return [item for item in known if shown(item) in wanted or f"{item.scheme}:{item.id}" in wanted]


def _is_open(acl: Iterable[ACL]) -> bool:
    return any(entry.id.scheme == _WORLD and entry.perms != _READ for entry in acl)
