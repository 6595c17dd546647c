"""Bad input, each kind: what is refused, when, with which error, and that the rest is untouched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from rollbridge.errors import (
    IncompleteError,
    InvalidNameError,
    InvalidRequestError,
    RecordTooLargeError,
    RollbridgeError,
    StreamExistsError,
    StreamNotFoundError,
    TransactionAbortedError,
    TransactionCommittedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import StreamName


def test_after_the_commit_nothing_can_be_written_or_aborted(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders)
    transaction.write(orders, key=b"k", value=b"v")
    transaction.commit()
    with pytest.raises(TransactionCommittedError):
        transaction.write(orders, value=b"late")
    with pytest.raises(TransactionCommittedError):
        transaction.write_all(orders, [(b"k", b"late")])
    with pytest.raises(TransactionCommittedError):
        transaction.abort()
    assert [message.value() for message in site.committed(orders)] == [b"v"]


def test_an_expired_transaction_says_so_everywhere(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    transaction = client.begin(orders, timeout=timedelta(milliseconds=300))
    future = transaction.write(orders, key=b"k", value=b"v")
    assert getattr(future.exception(120), "code", "") == "transaction-expired"
    with raises_code("transaction-expired"):
        transaction.write(orders, value=b"late")
    with raises_code("transaction-expired"):
        transaction.commit()
    transaction.abort()
    assert site.committed(orders) == []


def test_a_commit_after_the_lease_ended_is_refused_by_the_leader(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    """The commit is asked for before the client has heard of the expiry; the log says what it is told."""
    transaction = client.begin(orders, timeout=timedelta(milliseconds=1))
    transaction.write(orders, key=b"k", value=b"v")
    transaction.flush()
    try:
        transaction.commit()
    except TransactionAbortedError:
        assert site.committed(orders) == []
    else:
        assert len(site.committed(orders)) == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nowhere/orders", StreamNotFoundError),
        ("{scope}/nothing", StreamNotFoundError),
        ("orders", StreamNotFoundError),
        ("a.b.segment-0.epoch-0", InvalidNameError),
        ("a/b/c", InvalidNameError),
        ("sales/or.ders", InvalidNameError),
        ("sales/" + "x" * 230, InvalidNameError),
        ("__sales/orders", InvalidNameError),
    ],
)
def test_unknown_and_invalid_streams_are_refused(
    client: rollbridge.Bridge, orders: str, scope: str, name: str, error: type[RollbridgeError]
) -> None:
    wanted = name.format(scope=scope)
    for attempt in (
        lambda: client.begin(wanted),
        lambda: client.admin.describe(wanted),
        lambda: client.admin.scale(wanted, seal=[0], ranges=[(0.0, 0.5)]),
        lambda: client.admin.delete_stream(wanted),
    ):
        with pytest.raises(error):
            attempt()


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=-1), timedelta(days=8)])
def test_a_lease_must_be_positive_and_within_the_limit(
    client: rollbridge.Bridge, orders: str, lease: timedelta
) -> None:
    with raises_code("invalid-timeout"):
        client.begin(orders, timeout=lease)


def test_a_lease_over_the_coordinators_limit_is_refused_with_both_quoted(
    cluster: AnyCluster,
    unique_name: Callable[[str], str],
    scope: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the begin where the leader tells its limit, and by the leader where the client does not know it."""
    stream, minute = f"{scope}/orders", "60000"
    both = r"0:01:00.*1:00:00"
    with (
        Site(cluster, f"/{unique_name('lease')}", tmp_path, ROLLBRIDGE_COORDINATOR_LEASE_MS_MAX=minute) as site,
        site.connect("asker") as client,
    ):
        client.admin.create_stream(stream)
        for _ in range(2):
            with raises_code("invalid-timeout", match=f"{both}.*nothing was written"):
                client.begin(stream, timeout=timedelta(hours=1))
        with client.transaction(stream, timeout=timedelta(seconds=60)) as allowed:
            allowed.write(stream, value=b"yes")
        monkeypatch.setattr(client._planner, "_lease_limit", lambda _: None)
        unaware = client.begin(stream, timeout=timedelta(hours=1))
        unaware.write(stream, value=b"no")
        with pytest.raises(TransactionAbortedError, match=r"lease of 1:00:00.*lease_ms_max, is 0:01:00.*nothing of it"):
            unaware.commit()
        with client.transaction(stream, timeout=timedelta(seconds=60)) as again:
            again.write(stream, value=b"yes")
        assert [message.value() for message in site.committed(stream)] == [b"yes", b"yes"]


def test_streams_of_another_group_are_refused(client: rollbridge.Bridge, scope: str, orders: str) -> None:
    bulk = f"{scope}/bulk-orders"
    client.admin.create_stream(bulk, group="bulk")
    with raises_code("group-mismatch") as refused:
        client.begin(orders, bulk)
    assert f"{scope}/default" in str(refused.value)
    assert f"{scope}/bulk" in str(refused.value)
    with client.transaction(bulk) as transaction:
        transaction.write(bulk, key=b"k", value=b"v")


def test_a_begin_must_name_streams_once(client: rollbridge.Bridge, orders: str) -> None:
    for streams, label in (((), None), ((orders, orders), None), ((orders,), "x" * 2_000)):
        with pytest.raises(InvalidRequestError):
            client.begin(*streams, label=label)


def test_a_record_over_the_limit_is_refused_and_the_rest_commits(
    site: Site, client: rollbridge.Bridge, scope: str
) -> None:
    small = f"{scope}/small"
    client.admin.create_stream(small, record_bytes_max=100_000)
    with client.transaction(small) as transaction:
        largest = transaction.write(small, key=b"k", value=b"x" * 99_900)
        with pytest.raises(RecordTooLargeError) as refused:
            transaction.write(small, key=b"k", value=b"x" * 100_000)
        transaction.write(small, key=b"k", value=b"small")
    assert refused.value.limit_bytes == 100_000
    assert [len(message.value() or b"") for message in site.committed(small)] == [99_900, 5]
    assert largest.result().offset == 0


def test_the_largest_record_of_the_default_limit_arrives(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    with client.transaction(orders) as transaction:
        transaction.write(orders, key=b"k", value=b"x" * 999_000)
    assert [len(message.value() or b"") for message in site.committed(orders)] == [999_000]


def test_a_write_to_a_stream_that_cannot_join_is_refused_and_the_transaction_goes_on(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    elsewhere = f"{orders}-elsewhere"
    client.admin.create_stream(elsewhere, group="another")
    transaction = client.begin(orders)
    with raises_code("group-mismatch"):
        transaction.write(elsewhere, value=b"v")
    with pytest.raises(StreamNotFoundError):
        transaction.write(f"{orders}-of-nobody", value=b"v")
    assert transaction.streams == (orders,)
    transaction.write(orders, value=b"kept")
    assert transaction.commit().records == 1
    assert [message.value() for message in site.committed(orders)] == [b"kept"]


def test_admin_requests_that_can_not_be_met_say_why(client: rollbridge.Bridge, orders: str) -> None:
    with pytest.raises(StreamExistsError):
        client.admin.create_stream(orders)
    for ranges in ([(0.0, 0.4), (0.5, 1.0)], [(0.0, 0.6), (0.5, 1.0)], [(0.0, 0.5)], [(0.5, 0.5)]):
        with raises_code("invalid-ranges"):
            client.admin.create_stream(orders + "-2", ranges=ranges)
        with raises_code("invalid-ranges"):
            client.admin.scale(orders, seal=[0, 1], ranges=ranges)
    with raises_code("invalid-ranges", match="not active"):
        client.admin.scale(orders, seal=[7], ranges=[(0.0, 1.0)])
    with pytest.raises(InvalidRequestError, match="not both"):
        client.admin.create_stream(orders + "-2", segments=2, ranges=[(0.0, 1.0)])
    open_one = client.begin(orders)
    open_one.write(orders, value=b"v")
    open_one.flush()
    until(lambda: bool(client.admin.describe(orders).open_transactions))
    with raises_code("stream-busy"):
        client.admin.delete_stream(orders)
    open_one.abort()
    assert len(client.admin.history(orders).records) == 1


def test_a_stream_that_exists_is_left_as_it_is_where_that_is_wanted(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    before = client.admin.describe(orders)
    other = orders + "-2"
    with raises_code("invalid-ranges"):
        client.admin.create_stream(other, ranges=[(0.0, 0.5)], exist_ok=True)
    made = client.admin.create_stream(other, segments=3, exist_ok=True)
    assert len(client.admin.history(other).active.segments) == 3
    # Several at once: whoever asks second finds what the first has made.
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: client.admin.create_stream(orders + "-3", exist_ok=True), range(4))
        assert len({config.created_ms for config in found}) == 1
    site.stop_coordinator()  # nothing is left to be done, so nobody is needed for it
    assert client.admin.create_stream(other, segments=3, exist_ok=True) == made
    assert client.admin.create_stream(orders, exist_ok=True) == before.config
    with raises_code("stream-differs", match="it is default, and audit was asked for") as caught:
        client.admin.create_stream(
            other, segments=5, group="audit", headers="each", retention_time=timedelta(days=1), exist_ok=True
        )
    assert [item.partition(":")[0] for item in vars(caught.value)["differences"]] == [
        "group",
        "headers",
        "segments",
        "retention time",
    ]
    assert client.admin.create_stream(other, exist_ok=True) == made, "nothing was changed"
    assert client.admin.describe(orders).active == before.active
    site.start_coordinator()


def test_a_stream_that_does_not_exist_is_deleted_where_that_is_wanted(client: rollbridge.Bridge, orders: str) -> None:
    client.admin.delete_stream(orders)
    with pytest.raises(StreamNotFoundError):
        client.admin.delete_stream(orders)
    client.admin.delete_stream(orders, missing_ok=True)
    client.admin.delete_stream("no-such-scope/stream", missing_ok=True)


def test_a_frame_that_the_brokers_refuse_makes_the_transaction_incomplete(
    site: Site, client: rollbridge.Bridge, orders: str
) -> None:
    admin = KafkaClient(site.cluster.bootstrap_servers).topics
    buffer = StreamName.parse(orders).buffer_topic()
    admin.set_topic_config(buffer, {"max.message.bytes": "1000"})

    refused: list[tuple[rollbridge.Transaction, rollbridge.WriteFuture]] = []
    why: list[str] = []

    def try_one() -> bool:
        transaction = client.begin(orders)
        future = transaction.write(orders, key=b"k", value=b"x" * 5_000)
        try:
            transaction.flush()
        except IncompleteError as fault:
            refused.append((transaction, future))
            why.append(str(fault))
        else:
            transaction.abort()  # the broker does not know of the limit yet
        return bool(refused)

    until(try_one)
    assert "too large" in why[0]
    transaction, future = refused[0]
    with pytest.raises(IncompleteError):
        transaction.commit()
    assert isinstance(future.exception(0), IncompleteError)
    with pytest.raises(RollbridgeError):
        transaction.write(orders, value=b"late")
    with client.transaction(orders) as small:
        small.write(orders, key=b"k", value=b"fits")
    late = client.begin(orders)
    late.flush()
    late.write(orders, key=b"k", value=b"x" * 5_000)
    assert isinstance(late.commit_async().exception(60), IncompleteError), "refused after the commit was asked for"
    admin.set_topic_config(buffer, {"max.message.bytes": "10"})
    # Not even their begin arrives; empty ones are committed for as long as the broker does not know of the new limit.
    until(lambda: isinstance(client.begin(orders).commit_async().exception(60), IncompleteError))
    assert [message.value() for message in site.committed(orders)] == [b"fits"]


def test_a_path_of_another_cluster_is_refused(cluster: AnyCluster, unique_name: Callable[[str], str]) -> None:
    root = "/" + unique_name("foreign")
    with ZooKeeperSession(cluster.zookeeper, root=root) as session:
        Metadata(session).claim_cluster("another-cluster")
    with raises_code("wrong-cluster") as refused:
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root)
    assert "another-cluster" in str(refused.value)
    assert cluster.kafka_cluster_id in str(refused.value)


WRONG_RECORDS: dict[str, Any] = {
    "key": ("key", b"v"),
    "value": (b"k", "value"),
    "number": (b"k", 7),
    "one": b"k",
    "three": (b"k", b"v", b"more"),
}


@pytest.mark.parametrize("wrong", WRONG_RECORDS.values(), ids=WRONG_RECORDS)
@pytest.mark.parametrize("segments", [1, 2])
def test_wrong_records_are_named_and_those_around_them_are_written(
    site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str], wrong: Any, segments: int
) -> None:
    stream = f"{unique_name('scope')}/orders"
    client.admin.create_stream(stream, segments=segments)
    key: Any = bytearray(b"k")
    values: list[Any] = [memoryview(b"%d" % number) for number in range(10)]
    some: list[Any] = [(b"k", b"1"), wrong, (b"k", b"not read")]
    with client.transaction(stream) as transaction:
        with pytest.raises(TypeError, match=r"must be .* not written"):
            transaction.write_all(stream, some)
        if isinstance(wrong, tuple) and len(wrong) == 2:
            with pytest.raises(TypeError, match=r"must be bytes or None, not .* not written"):
                transaction.write(stream, *wrong)
        assert transaction.write_all(stream, [(key, b"2"), (b"k", values[3])]) == 2
        transaction.write(stream, key=key, value=values[4])
    with client.writer(stream) as writer:
        with pytest.raises(TypeError, match=r"must be .* not written"):
            writer.write_all(some)
        if isinstance(wrong, tuple) and len(wrong) == 2:
            with pytest.raises(TypeError, match=r"must be bytes or None, not .* not written"):
                writer.write(*wrong)
        assert writer.write_all([(key, b"5"), (b"k", values[6])]) == 2
        writer.write(key=key, value=values[7])
    with client.cas_writer(stream) as conditional:
        with pytest.raises(TypeError, match=r"must be .* not written"):
            conditional.write_all(some[:2], expected=rollbridge.ANY)
        conditional.write_all([(key, values[8])], expected=rollbridge.ANY)
        conditional.write(key, values[9], expected=rollbridge.ANY)
    expected = [b"1", *(b"%d" % number for number in range(2, 5)), b"1", *(b"%d" % number for number in range(5, 10))]
    assert [message.value() for message in site.committed(stream)] == expected


def test_what_is_wrong_with_a_write_is_named(client: rollbridge.Bridge, orders: str) -> None:
    wrong: Any
    with client.transaction(orders) as transaction, client.writer(orders) as writer:
        for wrong in (7, None, [], b"x"):
            with pytest.raises(TypeError, match=r"stream must be str, not .* not written"):
                transaction.write(wrong, b"k", b"v")
        with pytest.raises(TypeError, match="records must be Iterable"):
            transaction.write_all(orders, 7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="transaction_id must be int or None, not str"):
            writer.write(b"k", b"v", transaction_id="7")  # type: ignore[arg-type]
        writes: dict[str, Callable[..., object]] = {
            "transaction": partial(transaction.write, orders),
            "writer": writer.write,
            "conditional": partial(client.cas_writer(orders).write, expected=rollbridge.ANY),
        }
        for name, write in writes.items():
            for headers in ({"a": b"x"}, [("a",)], "a"):
                with pytest.raises(TypeError, match="headers must be"):
                    write(key=b"k", value=name.encode(), headers=headers)


def test_times_are_seconds_or_timedeltas_everywhere(client: rollbridge.Bridge, orders: str) -> None:
    with client.transaction(orders, timeout=60, retain=3600.0) as transaction:
        transaction.write(orders, b"k", b"v")
        before = transaction.extend(90)
        assert transaction.extend(timedelta(seconds=600)) > before
    with raises_code("invalid-timeout"):
        client.begin(orders, timeout=float("inf"))
    client.admin.update_stream(orders, retention_time=86400)
    with pytest.raises(TypeError, match="timeout must be seconds as a number or a timedelta or None, not str"):
        client.begin(orders, timeout="1h")  # type: ignore[arg-type]
