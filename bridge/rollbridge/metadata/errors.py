"""Errors of ZooKeeper nodes, and the one place where kazoo's errors are translated.

The tree, below :mod:`rollbridge.errors`::

    ConflictError
    └─ NodeConflictError         the node exists, has children, or was written meanwhile; nothing was written
    NotFoundError
    └─ NodeMissingError          the node (or its parent) does not exist; nothing was written
    RollbridgeError
    └─ ZooKeeperRefusedError     ZooKeeper will never accept the request: size, malformed
       └─ ZooKeeperDeniedError   a permission is missing; carries the node and the caller
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from kazoo import exceptions as kazoo
from kazoo.handlers.threading import KazooTimeoutError

from rollbridge.errors import (
    ConflictError,
    NotFoundError,
    RollbridgeError,
    UnknownWriteError,
    ZooKeeperUnavailableError,
)
from rollbridge.metadata.records import NodeOperation

NODE_NOT_EMPTY: Final = "node-not-empty"


class NodeConflictError(ConflictError):
    """The node exists already, has children, or another version than expected: see ``code``; nothing was written."""

    code = "node-exists"
    codes: ClassVar[tuple[str, ...]] = (NODE_NOT_EMPTY, "node-version-mismatch")

    def __init__(self, message: str, *, path: str, code: str = "") -> None:
        super().__init__(message, code=code)
        self.path = path


class NodeMissingError(NotFoundError):
    """The node does not exist, or its parent does not; nothing was written."""

    code = "node-missing"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ZooKeeperRefusedError(RollbridgeError):
    """ZooKeeper refuses the request, and will when it is repeated; nothing was written."""

    code = "zookeeper-refused"


class ZooKeeperDeniedError(ZooKeeperRefusedError):
    """ZooKeeper's ACLs do not allow the request; nothing was written.

    Attributes:
        path: The node, below the root path.
        identity: Who asked, such as ``digest user alice``.
    """

    code = "zookeeper-denied"
    exit_code = 4

    def __init__(self, message: str, *, path: str, identity: str) -> None:
        super().__init__(message)
        self.path = path
        self.identity = identity


_LOST_ON_THE_WAY = (
    kazoo.ConnectionLoss,
    kazoo.SessionExpiredError,  # ConnectionClosedError is one, too
    kazoo.OperationTimeoutError,
    kazoo.RequestTimeoutError,
    kazoo.SessionMovedError,
    kazoo.ConnectionDropped,
    kazoo.CancelledError,
    kazoo.ZookeeperStoppedError,
    KazooTimeoutError,  # our own time-out while waiting for the answer
)
_NOTHING_DONE = (kazoo.ThrottledOpError, kazoo.NewConfigNoQuorumError, kazoo.ReconfigInProcessError)
_CONSEQUENCES = (kazoo.RolledBackError, kazoo.RuntimeInconsistency)
"""Errors that the other operations of a refused multi report."""


def is_transient(fault: BaseException) -> bool:
    """Return True if a read that failed this way may succeed when it is repeated."""
    return isinstance(fault, _LOST_ON_THE_WAY + _NOTHING_DONE)


def translate(fault: Exception, path: str, *, writes: bool, who: str = "this client") -> RollbridgeError:
    """Translate an error of kazoo's into one of rollbridge's.

    Args:
        fault: Error that kazoo raised.
        path: The node concerned, for the message.
        writes: True if the request would have changed something.
        who: Who asked, for the message.
    """
    match fault:
        case kazoo.NodeExistsError():
            return NodeConflictError(f"ZooKeeper node {path} exists already; nothing was written", path=path)
        case kazoo.NotEmptyError():
            return NodeConflictError(
                f"ZooKeeper node {path} has children; nothing was written", path=path, code=NODE_NOT_EMPTY
            )
        case kazoo.NoNodeError():
            return NodeMissingError(
                f"ZooKeeper node {path} or its parent does not exist; nothing was written", path=path
            )
        case kazoo.BadVersionError():
            return NodeConflictError(
                f"ZooKeeper node {path} was written meanwhile; nothing was written",
                path=path,
                code="node-version-mismatch",
            )
        case kazoo.NoAuthError():
            return ZooKeeperDeniedError(
                f"ZooKeeper does not allow {who} to {'change' if writes else 'read'} {path}; nothing was written: "
                "check the credentials, or have the right granted (`rollbridge access grant`, docs/security.md)",
                path=path,
                identity=who,
            )
        case kazoo.InvalidACLError() | kazoo.AuthFailedError() | kazoo.SessionClosedRequireSaslError():
            return ZooKeeperDeniedError(
                f"ZooKeeper does not accept the identity of {who} for {path} ({_text(fault)}); nothing was written: "
                "check what the server asks for, and whether it offers this scheme",
                path=path,
                identity=who,
            )
        case kazoo.UnimplementedError():
            return ZooKeeperRefusedError(
                f"ZooKeeper is too old for the request for {path}: 3.6 or newer is needed; nothing was written"
            )
        case _ if isinstance(fault, _NOTHING_DONE):
            return ZooKeeperUnavailableError(f"ZooKeeper is too busy for {path} ({_text(fault)}); nothing was written")
        case _ if isinstance(fault, _LOST_ON_THE_WAY):
            if writes:
                return UnknownWriteError(
                    f"the connection to ZooKeeper was lost while {path} was being written ({_text(fault)}); "
                    "the write may have happened: read the node to learn whether it did"
                )
            return ZooKeeperUnavailableError(
                f"ZooKeeper did not answer for {path} in time ({_text(fault)}); that was a read, so nothing was "
                "written: try again, and look at its servers if that lasts"
            )
        case _:
            return ZooKeeperRefusedError(
                f"ZooKeeper refuses the request for {path}: {_text(fault)}; nothing was written"
            )


def translate_multi(
    results: Sequence[object], operations: Sequence[NodeOperation], *, who: str = "this client"
) -> RollbridgeError | None:
    """Return the error of the first operation that made a multi fail, or None if all were carried out."""
    faults = [(item, place) for place, item in enumerate(results) if isinstance(item, Exception)]
    for fault, place in faults:
        if not isinstance(fault, _CONSEQUENCES):
            return translate(fault, operations[place].path, writes=True, who=who)
    if faults:
        return ZooKeeperRefusedError(f"ZooKeeper rolled back {len(operations)} operations without saying why")
    return None


def _text(fault: BaseException) -> str:
    """Return the class and text of an error; kazoo's messages alone are mostly empty."""
    detail = str(fault)
    return f"{type(fault).__name__}: {detail}" if detail and detail != "()" else type(fault).__name__
