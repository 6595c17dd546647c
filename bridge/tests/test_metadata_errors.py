"""Every error class of kazoo has an answer to "did it happen?"."""

from __future__ import annotations

import inspect

import pytest
from kazoo import exceptions as kazoo
from kazoo.handlers.threading import KazooTimeoutError

from rollbridge.errors import ConfigError, RollbridgeError, UnknownWriteError, ZooKeeperUnavailableError
from rollbridge.metadata.errors import (
    NodeConflictError,
    NodeMissingError,
    ZooKeeperDeniedError,
    ZooKeeperRefusedError,
    is_transient,
    translate,
    translate_multi,
)
from rollbridge.metadata.records import ROOT_CHARACTERS_MAX, CheckNode, CreateNode, NodeOperation, SetNode
from rollbridge.metadata.session import REQUEST_BYTES_MAX, ZooKeeperSession

CLASSES = [
    item
    for _, item in inspect.getmembers(kazoo, inspect.isclass)
    if issubclass(item, kazoo.KazooException) and item.__module__ == kazoo.__name__
]

# What each class means for a write. The rest is refused by the server for good.
STATES: dict[str, type[RollbridgeError]] = {
    "NodeExistsError": NodeConflictError,
    "NotEmptyError": NodeConflictError,
    "NoNodeError": NodeMissingError,
    "BadVersionError": NodeConflictError,
}
MAY_HAVE_HAPPENED = {
    "ConnectionLoss",
    "ConnectionClosedError",
    "ConnectionDropped",
    "SessionExpiredError",
    "SessionMovedError",
    "OperationTimeoutError",
    "RequestTimeoutError",
    "CancelledError",
    "ZookeeperStoppedError",
}
NOT_DONE_NOW = {"ThrottledOpError", "NewConfigNoQuorumError", "ReconfigInProcessError"}
DENIED = {"NoAuthError", "InvalidACLError", "AuthFailedError", "SessionClosedRequireSaslError"}
REFUSED = {
    "APIError",
    "BadArgumentsError",
    "ConfigurationError",
    "DataInconsistency",
    "EphemeralOnLocalSessionError",
    "InvalidCallbackError",
    "KazooException",
    "LockTimeout",
    "MarshallingError",
    "NoChildrenForEphemeralsError",
    "NoWatcherError",
    "NotReadOnlyCallError",
    "QuotaExceededError",
    "ReconfigDisabledError",
    "RolledBackError",
    "RuntimeInconsistency",
    "SASLException",
    "SystemZookeeperError",
    "UnimplementedError",
    "UnknownSessionError",
    "WriterNotClosedException",
    "ZookeeperError",
}


def expected(name: str, *, writes: bool) -> type[RollbridgeError]:
    if name in STATES:
        return STATES[name]
    if name in MAY_HAVE_HAPPENED:
        return UnknownWriteError if writes else ZooKeeperUnavailableError
    if name in NOT_DONE_NOW:
        return ZooKeeperUnavailableError
    if name in DENIED:
        return ZooKeeperDeniedError
    assert name in REFUSED, f"kazoo has a new error, {name}: decide what it means"
    return ZooKeeperRefusedError


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
@pytest.mark.parametrize("writes", [True, False])
def test_every_error_of_the_library_is_sorted(error: type[Exception], writes: bool) -> None:
    translated = translate(error(), "/a/b", writes=writes)
    assert type(translated) is expected(error.__name__, writes=writes)
    assert "/a/b" in str(translated)


def test_our_own_time_out_leaves_a_write_unknown() -> None:
    assert isinstance(translate(KazooTimeoutError(), "/a", writes=True), UnknownWriteError)
    assert isinstance(translate(KazooTimeoutError(), "/a", writes=False), ZooKeeperUnavailableError)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_only_what_may_pass_is_tried_again(error: type[Exception]) -> None:
    assert is_transient(error()) == (error.__name__ in MAY_HAVE_HAPPENED | NOT_DONE_NOW)


def test_a_multi_fails_with_the_operation_that_was_refused() -> None:
    operations: list[NodeOperation] = [CheckNode("/a"), SetNode("/b", b""), CreateNode("/c", b"")]
    results = [kazoo.RolledBackError(), kazoo.BadVersionError(), kazoo.RuntimeInconsistency()]
    error = translate_multi(results, operations)
    assert isinstance(error, NodeConflictError)
    assert error.path == "/b"
    assert translate_multi([True, object(), "/c"], operations) is None
    assert isinstance(translate_multi([kazoo.RolledBackError()] * 3, operations), ZooKeeperRefusedError)


@pytest.mark.parametrize("hosts", ["", ":2181", "host:port", "host:0", "host:70000", "a:1,,b:2"])
def test_malformed_addresses_are_refused(hosts: str) -> None:
    with pytest.raises(ConfigError):
        ZooKeeperSession(hosts)


@pytest.mark.parametrize(
    ("hosts", "root", "whole"),
    [
        ("h:1", "/rollbridge", "/rollbridge"),
        ("h:1/chroot", "/rollbridge", "/chroot/rollbridge"),
        ("h:1/a/b/", "c/d/", "/a/b/c/d"),
        ("h:1", "/", "/"),
    ],
)
def test_chroot_and_root_are_one_path(hosts: str, root: str, whole: str) -> None:
    assert ZooKeeperSession(hosts, root=root).root == whole


def test_a_root_that_climbs_is_refused() -> None:
    with pytest.raises(ConfigError):
        ZooKeeperSession("h:1", root="/a/../b")


def test_a_root_is_no_longer_than_what_is_counted_for_it() -> None:
    rest = ROOT_CHARACTERS_MAX - len("/chroot/")
    assert len(ZooKeeperSession("h:1/chroot", root="/" + "r" * rest).root) == ROOT_CHARACTERS_MAX
    with pytest.raises(ConfigError, match="has 129 characters; with the chroot in the addresses 128 are possible"):
        ZooKeeperSession("h:1/chroot", root="/" + "r" * (rest + 1))


def test_a_write_that_zookeeper_would_drop_the_connection_over_is_not_sent() -> None:
    session = ZooKeeperSession("h:1")
    for attempt in (
        lambda: session.create("/a", b"x" * (REQUEST_BYTES_MAX + 1)),
        lambda: session.set("/a", b"x" * (REQUEST_BYTES_MAX + 1)),
        lambda: session.multi([CreateNode("/a", b"x" * REQUEST_BYTES_MAX), SetNode("/b", b"x")]),
    ):
        with pytest.raises(ZooKeeperRefusedError, match="1 MiB"):
            attempt()
