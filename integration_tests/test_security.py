"""A secured cluster: who has rights on one stream does everything with it, and nothing with another; no secret is told.

Alice owns ``sales/orders``, in the group ``sales/default``; bob owns ``sales/ledger``, in ``sales/bobs``; carol only
reads orders. Their rights are those that ``rollbridge access`` prints and grants, so these are enough.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from pyspark.sql.types import StringType, StructField, StructType

import rollbridge
from integration_tests.backends import choice
from integration_tests.clients import consumer_raises, read_and_commit, until
from integration_tests.command_line import Answer, run_cli
from integration_tests.kafka_tools import create_topic
from integration_tests.secured import (
    CA,
    CERTIFICATE,
    CERTIFICATE_IDENTITY,
    Secured,
    kafka_security,
    listening,
    password,
    secured_cluster,
    zookeeper_security,
)
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import OwnerWriting
from rollbridge.errors import (
    ConflictError,
    IncompleteError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionAbortedError,
    ZooKeeperUnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.metadata import paths
from rollbridge.metadata.access import Resource, Right, coordinator, previewer, reader, writer
from rollbridge.metadata.acls import Access, digest_identity, open_nodes, parse_identity
from rollbridge.metadata.errors import ZooKeeperDeniedError
from rollbridge.metadata.records import Group
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.spark import sink_task as sink_connections
from rollbridge.spark.sink import batch_writer
from rollbridge.spark.worker import Kept
from rollbridge.stream.names import GroupName, StreamName

ORDERS, LEDGER = "sales/orders", "sales/ledger"
ALICES, BOBS = GroupName("sales"), GroupName("sales", "bobs")
SECRET = "Hush-"
USERS = ("coordinator", "alice", "bob", "carol", "trainee")

Do = Callable[[rollbridge.Bridge], object]


@pytest.fixture(scope="module")
def heard() -> Iterator[list[str]]:
    with listening() as lines:
        yield lines


@pytest.fixture(scope="module", params=choice.each(choice.chosen()))
def secured(
    request: pytest.FixtureRequest, heard: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    with ExitStack() as stack:
        cluster = stack.enter_context(secured_cluster(request.param, tmp_path_factory.mktemp("secured")))
        cluster.add_users(*USERS)
        cluster.allow("coordinator", coordinator("sales", ["billing"]))
        cluster.allow("alice", writer(StreamName.parse(ORDERS), ALICES, ["billing"]))
        cluster.allow("bob", writer(StreamName.parse(LEDGER), BOBS))
        cluster.allow("carol", reader(StreamName.parse(ORDERS), ["carols"]))
        stack.enter_context(cluster.coordinator("coordinator"))
        # Who is first makes the root path, and owns it.
        with opened(cluster, "coordinator") as session:
            until(lambda: session.children(paths.COORDINATORS))
        for group, user in ((ALICES, "alice"), (BOBS, "bob")):
            made = cli(cluster, user, "access", "identity", user, stdin=password(user).encode())
            done = cli(cluster, "coordinator", "access", "grant", str(group), made.out.strip())
            assert done.code == 0, done
        for user, stream, group in (("alice", ORDERS, ALICES), ("bob", LEDGER, BOBS)):
            with cluster.connect(user) as client:
                client.admin.create_stream(stream, segments=2, group=group.group)
        yield cluster


@pytest.fixture(scope="module")
def alice(secured: Secured) -> Iterator[rollbridge.Bridge]:
    with secured.connect("alice") as client:
        yield client


@pytest.fixture(scope="module")
def bob(secured: Secured) -> Iterator[rollbridge.Bridge]:
    with secured.connect("bob") as client:
        yield client


def opened(cluster: Secured, user: str, security: Mapping[str, str] | None = None) -> ZooKeeperSession:
    return ZooKeeperSession(
        cluster.zookeeper, root=cluster.root, security=zookeeper_security(user) if security is None else security
    )


def cli(cluster: Secured, user: str, *arguments: str, stdin: bytes = b"") -> Answer:
    return run_cli(cluster.environment(user), *arguments, stdin=stdin)


def consume(cluster: Secured, user: str, group: str, last: bytes) -> list[bytes | None]:
    config = {
        "bootstrap.servers": cluster.bootstrap_servers,
        "zookeeper": cluster.zookeeper,
        "zookeeper.root": cluster.root,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        **kafka_security(user),
        **{f"zookeeper.{key}": value for key, value in zookeeper_security(user).items()},
    }
    consumer = rollbridge.Consumer(config)
    try:
        consumer.subscribe([ORDERS])
        return read_and_commit(consumer, last)
    finally:
        consumer.close()


def values(client: rollbridge.Bridge, stream: str, isolation: Any = "read_committed") -> set[bytes | None]:
    with client.reader(stream, isolation=isolation, follow=False) as records:
        return {record.value for record in records}


def test_alice_does_everything_with_her_stream(secured: Secured, alice: rollbridge.Bridge) -> None:
    with alice.transaction(ORDERS) as transaction:
        transaction.write(ORDERS, key=b"a", value=b"committed")
        transaction.send_offsets([TopicPartition("sales.orders.segment-0.epoch-0", 0, 0)], "billing")
    assert alice.outcome(transaction.id).committed
    aborted = alice.begin(ORDERS)
    aborted.write(ORDERS, key=b"a", value=b"aborted")
    aborted.abort()
    with alice.writer(ORDERS) as plain:
        plain.write(b"b", b"plain").result(120)
    with alice.cas_writer(ORDERS) as conditional:
        first = conditional.write(b"c", b"first", expected=rollbridge.ANY)
        conditional.write(b"c", b"second", expected=first)
    counter: rollbridge.Synchronizer[bytes, bytes] = alice.synchronizer(ORDERS, b"counter", b"", operator.add)
    counter.update(lambda state: [b"x"])
    assert counter.fetch() == b"x"
    preview = alice.begin(ORDERS)
    preview.write(ORDERS, key=b"d", value=b"open")
    preview.flush()
    written = {b"committed", b"plain", b"first", b"second"}
    assert written <= values(alice, ORDERS)
    assert b"open" in values(alice, ORDERS, "read_uncommitted")
    alice.admin.scale(ORDERS, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
    preview.commit()
    with alice.writer(ORDERS) as plain:
        plain.write(b"e", b"last").result(120)
    assert {*written, b"open", b"last"} <= values(alice, ORDERS)
    assert b"aborted" not in values(alice, ORDERS)
    assert b"last" in consume(secured, "alice", "billing", b"last")
    shared = alice.begin(ORDERS)
    shared.flush()
    part = alice.join(shared.id, timeout=120)
    part.write(ORDERS, key=b"f", value=b"of another process")
    shared.commit(parts=[part.finish()])
    assert b"of another process" in values(alice, ORDERS)
    assert alice.unfinished() == []
    with alice.transactions("sales", follow=False) as transactions:
        assert [item.id for item in transactions] == [transaction.id, preview.id, shared.id]
    alice.admin.update_stream(ORDERS, retention_groups=["billing"])
    with pytest.raises(ConflictError, match="billing"):
        alice.admin.truncate(ORDERS, "latest")
    alice.admin.update_stream(ORDERS, retention_groups=[])
    alice.admin.create_stream("sales/orders-of-old")
    alice.admin.delete_stream("sales/orders-of-old")
    for arguments in (("stream", "describe", ORDERS), ("txn", "list"), ("consume", ORDERS), ("status",)):
        assert cli(secured, "alice", *arguments).code == 0


NOTHING_WITH_ANOTHER: Mapping[str, Do] = {
    "begins a transaction": lambda b: b.begin(ORDERS),
    "begins one with a stream of its own": lambda b: b.begin(LEDGER, ORDERS),
    "writes plainly": lambda b: b.writer(ORDERS).write(b"k", b"no").result(120),
    "writes conditionally": lambda b: b.cas_writer(ORDERS).write(b"k", b"no", expected=rollbridge.ANY),
    "reads": lambda b: values(b, ORDERS),
    "previews": lambda b: values(b, ORDERS, "read_uncommitted"),
    "reads transactions": lambda b: [*b.transactions("sales", follow=False)],
    "scales": lambda b: b.admin.scale(ORDERS, seal=[1], ranges=[(0.5, 1.0)]),
    "truncates": lambda b: b.admin.truncate(ORDERS, "latest"),
    "sets a retention": lambda b: b.admin.update_stream(ORDERS, retention_bytes=1),
    "deletes": lambda b: b.admin.delete_stream(ORDERS),
    "creates one beside it": lambda b: b.admin.create_stream("sales/more"),
    "creates one in a group of nobody": lambda b: b.admin.create_stream("sales/more", group="new"),
}


@pytest.mark.parametrize("what", NOTHING_WITH_ANOTHER)
def test_bob_can_do_nothing_with_it_and_is_told_why(secured: Secured, bob: rollbridge.Bridge, what: str) -> None:
    before = state_of(secured)
    with pytest.raises(RollbridgeError) as refused:
        NOTHING_WITH_ANOTHER[what](bob)
    assert isinstance(refused.value, NotAuthorizedError | ZooKeeperDeniedError) or what.startswith("begins one with")
    assert "nothing was" in str(refused.value)
    assert SECRET not in str(refused.value)
    assert state_of(secured) == before


def state_of(cluster: Secured) -> object:
    """Everything of alice's that anybody could have changed."""
    with opened(cluster, "coordinator") as session:
        stream = StreamName.parse(ORDERS)
        nodes = [paths.stream(stream), paths.truncation(stream)]
        known: list[object] = [None if node is None else node.version for node in session.get_many(nodes)]
        for node in session.get_many([paths.group(item) for item in (ALICES, BOBS)]):
            assert node is not None
            # Leaders note now and then how far their clients' counters have come.
            known.append(replace(Group.from_json(node.value), counter_floor=0, counter_ceiling=0))
        lists = [
            session.children(path)
            for path in (paths.GROUPS, paths.streams("sales"), paths.epochs(stream), paths.sessions(ALICES))
        ]
        topics = [f"{stream.scope}.{stream.stream}.segment-{n}.epoch-0" for n in range(2)]
        return known, lists, KafkaClient(cluster.inner).offsets.end([stream.buffer_topic(), *topics])


def test_bobs_own_stream_is_his(bob: rollbridge.Bridge) -> None:
    with bob.transaction(LEDGER) as transaction:
        transaction.write(LEDGER, key=b"k", value=b"bob's")
    with bob.cas_writer(LEDGER) as conditional:
        conditional.write(b"c", b"first", expected=rollbridge.ANY)
    assert values(bob, LEDGER) == {b"bob's", b"first"}


def test_what_bob_does_with_his_counter_is_set_right_and_hurts_nobody_else(
    secured: Secured, alice: rollbridge.Bridge, bob: rollbridge.Bridge
) -> None:
    """Each group has a counter of its own; what stands there is believed within bounds only."""

    def commit(client: rollbridge.Bridge, stream: str) -> rollbridge.TransactionId:
        with client.transaction(stream) as transaction:
            transaction.write(stream, key=b"k", value=b"counted")
        return transaction.id

    used = [commit(bob, LEDGER), commit(alice, ORDERS)]
    with opened(secured, "bob") as session, opened(secured, "coordinator") as watching:
        for denied in (paths.counter(ALICES), paths.TRANSACTION_COUNTER, paths.GROUP_NUMBERS, paths.group(BOBS)):
            with pytest.raises(ZooKeeperDeniedError):
                session.set(denied, b"0")
        with pytest.raises(ZooKeeperDeniedError):
            session.delete(paths.counter(BOBS))
        led = watching.get(paths.controller(BOBS))
        for raw in (b"1", b"", b"nonsense", b"-1", b"9" * 5_000, str(1 << 96).encode(), str((1 << 62) - 1).encode()):
            session.set(paths.counter(BOBS), raw)
            # Who begins waits until it is set right, and is told if nobody does that.
            with rollbridge.Bridge(replace(secured.settings("bob"), client_name="bob-too")) as other:
                used.append(commit(other, LEDGER))
            used.append(commit(alice, ORDERS))
        for forged in ((1 << 96) - 1, used[-1].counter + 10_000_000, used[0].counter + (1 << 39)):
            plan = bob._planner.plan((LEDGER,), None, None, None)
            transaction = Transaction(OwnerWriting.begun(bob._runtime, plan, forged))
            transaction.write(LEDGER, key=b"k", value=b"forged")
            with pytest.raises(TransactionAbortedError, match="not given out"):
                transaction.commit()
            used.append(commit(bob, LEDGER))
        assert watching.get(paths.controller(BOBS)) == led, "the leader is the one that it was"
    assert len(set(used)) == len(used)
    assert b"forged" not in values(bob, LEDGER)


def test_a_reader_reads_and_writes_nothing(secured: Secured, alice: rollbridge.Bridge) -> None:
    with alice.writer(ORDERS) as plain:
        plain.write(b"e", b"for carol").result(120)
    with secured.connect("carol") as carol:
        assert b"for carol" in values(carol, ORDERS)
        for attempt in (
            lambda: carol.begin(ORDERS),
            lambda: carol.writer(ORDERS).write(b"k", b"no").result(120),
            lambda: values(carol, ORDERS, "read_uncommitted"),
        ):
            with pytest.raises((NotAuthorizedError, ZooKeeperDeniedError)):
                attempt()
    assert b"for carol" in consume(secured, "carol", "carols", b"for carol")
    with consumer_raises(NotAuthorizedError, match="billing"):
        consume(secured, "carol", "billing", b"for carol")


def test_a_member_of_the_group_without_rights_on_the_stream_can_not_write_a_transaction(
    secured: Secured, alice: rollbridge.Bridge
) -> None:
    with alice.writer(ORDERS) as plain:
        plain.write(b"e", b"for dave").result(120)
    secured.add_users("dave")
    secured.allow("dave", previewer(StreamName.parse(ORDERS), ALICES))
    with opened(secured, "coordinator") as session:
        Access(session).grant(ALICES, [parse_identity(digest_identity("dave", password("dave")))])
    try:
        with secured.connect("dave") as dave:
            assert b"for dave" in values(dave, ORDERS, "read_uncommitted")
            # First without a right to write anywhere, in which case brokers give it no producer id.
            for said in ("CLUSTER_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"):
                transaction = dave.begin(ORDERS)
                future = transaction.write(ORDERS, key=b"k", value=b"no")
                with pytest.raises(IncompleteError, match=f"{said}.*nothing was written"):
                    transaction.commit()
                with pytest.raises(IncompleteError):
                    future.result(1)
                secured.allow("dave", writer(StreamName("sales", "daves"), ALICES))
    finally:
        cli(secured, "coordinator", "access", "revoke", str(ALICES), "digest:dave")


def test_an_adopted_topic_takes_the_rights_of_the_table_and_no_others(
    secured: Secured, alice: rollbridge.Bridge, bob: rollbridge.Bridge
) -> None:
    topic, stream = "shop.orders", StreamName("sales", "shop")
    create_topic(secured.inner, topic, 2)

    def adopt() -> None:
        alice.admin.adopt_topic(topic, stream=str(stream), partitioner="murmur2", check=False)

    secured.allow("alice", writer(stream, ALICES, topic=topic))
    needed, truncating, leaving = (right for right in coordinator("sales", (), topic) if right.name == topic)
    for operation in needed.operations:
        with pytest.raises(RollbridgeError, match=f"{topic}.*nothing was (written|done)"):
            adopt()
        secured.allow("coordinator", [replace(needed, operations=(operation,))])
    adopt()
    with alice.transaction(topic) as transaction:
        transaction.write(topic, b"k", b"committed")
    with alice.writer(topic) as plain:
        plain.write(b"k", b"plain").result(120)
    with alice.cas_writer(topic) as conditional:
        conditional.write(b"k", b"conditional", expected=conditional.tail(b"k"))
    # A right to write to the topic is not needed for transactions: they are merged by the leader.
    with secured.denied("alice", Right(Resource.TOPIC, topic, ("Write",), "")), alice.transaction(topic) as transaction:
        transaction.write(topic, b"k", b"without Write")
    written = {b"committed", b"plain", b"conditional", b"without Write"}
    assert values(alice, topic) == written
    secured.allow("carol", [right for right in reader(stream, (), topic) if right.name == topic])
    with secured.connect("carol") as carol:
        assert values(carol, topic) == written, "who may read the topic needs nothing else"
    for attempt in (lambda: bob.begin(topic), lambda: values(bob, topic), lambda: bob.admin.release_topic(topic)):
        with pytest.raises((NotAuthorizedError, ZooKeeperDeniedError)):
            attempt()
    for right, act in (
        (truncating, lambda: alice.admin.truncate(topic, "latest")),
        (leaving, lambda: alice.admin.scale(topic, seal=[0, 1], ranges=[(0.0, 1.0)], leave_topic=True)),
    ):
        with pytest.raises(RollbridgeError, match=r"nothing was|repeat the request"):
            act()
        assert alice.admin.describe(topic).fault is None, "the stream goes on as before"
        secured.allow("coordinator", [right])
        act()
    with alice.transaction(topic) as transaction:
        transaction.write(topic, b"k", b"left")
    assert b"left" in values(alice, topic)
    alice.admin.delete_stream(str(stream))


def test_nobody_else_gets_in(secured: Secured) -> None:
    stranger = replace(secured.settings("alice"), kafka={**kafka_security("alice"), "sasl.password": "guessed"})
    with pytest.raises(RollbridgeError, match="refused our credentials"):
        rollbridge.Bridge(stranger)
    # ZooKeeper's digests are names: a wrong password makes another one, which has no rights.
    wrong = {**zookeeper_security("alice"), "digest.password": "guessed"}
    with opened(secured, "alice", wrong) as session:
        for attempt in (
            lambda: session.create(f"{paths.requests(ALICES)}/request-", b"{}", sequential=True),
            lambda: session.set(paths.TRANSACTION_COUNTER, b"1"),
            lambda: session.set(paths.GROUP_NUMBERS, b"1"),
            lambda: session.set(paths.counter(ALICES), b"1"),
            lambda: session.delete(paths.stream(StreamName.parse(ORDERS))),
            lambda: session.set_acl(paths.CLUSTER, []),
            lambda: Access(session).grant(ALICES, [parse_identity("ip:127.0.0.1")]),
        ):
            with pytest.raises(ZooKeeperDeniedError, match="digest user alice") as refused:
                attempt()
            assert "guessed" not in str(refused.value)
    with (
        pytest.raises(ZooKeeperUnavailableError, match="TLS handshake"),
        opened(secured, "alice", {"security.protocol": "SSL", "ssl.ca.location": CA.replace("ca.", "stranger.")}) as it,
    ):
        it.start(2.0)
    # The certificates are for no such name.
    kafka, zookeeper = (
        item.replace("127.0.0.1", "localhost") for item in (secured.bootstrap_servers, secured.zookeeper)
    )
    for renamed in (replace(secured, bootstrap_servers=kafka), replace(secured, zookeeper=zookeeper)):
        with pytest.raises(RollbridgeError, match=r"Hostname mismatch|not valid for"):
            renamed.connect("alice")


def test_a_worker_of_spark_that_serves_two_users_writes_as_nobody_else_than_who_asked(
    secured: Secured, alice: rollbridge.Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes live on, and keep connections; here two jobs differ in ZooKeeper's identity only."""
    kept: Kept[rollbridge.Bridge] = Kept()
    monkeypatch.setattr(sink_connections, "_kept", kept)
    schema = StructType([StructField("value", StringType())])

    def run(user: str, credentials: Mapping[str, str], value: str) -> None:
        options = {
            "kafka.bootstrap.servers": secured.bootstrap_servers,
            "zookeeper": secured.zookeeper,
            "zookeeper.root": secured.root,
            "stream": ORDERS,
            "client.name": f"job-of-{user}",
            **{f"kafka.{key}": item for key, item in kafka_security("alice").items()},
            **{f"zookeeper.{key}": item for key, item in credentials.items()},
        }
        sink = batch_writer(options, schema, overwrite=False)
        sink.commit([sink.write(iter([pa.RecordBatch.from_pydict({"value": [value]})]))])

    with closing(kept):
        run("alice", zookeeper_security("alice"), "job of alice")
        with pytest.raises(ZooKeeperDeniedError, match="digest user bob"):
            run("bob", zookeeper_security("bob"), "job of bob")
        with pytest.raises(ZooKeeperDeniedError, match="digest user alice"):
            run("rotated", {**zookeeper_security("alice"), "digest.password": "of yesterday"}, "not with this one")
        run("alice", zookeeper_security("alice"), "another job of alice")
    jobs = {b"job of alice", b"another job of alice", b"job of bob", b"not with this one"}
    assert jobs & values(alice, ORDERS) == {b"job of alice", b"another job of alice"}


def test_a_certificate_is_an_identity_and_what_is_granted_can_be_revoked(secured: Secured) -> None:
    by_certificate = {"security.protocol": "SSL", "ssl.ca.location": CA, **CERTIFICATE}
    granted = cli(secured, "coordinator", "access", "grant", str(BOBS), CERTIFICATE_IDENTITY, "--json")
    assert json.loads(granted.out) == {"group": str(BOBS), "granted": [CERTIFICATE_IDENTITY]}
    listed = json.loads(cli(secured, "carol", "access", "list", "--json").out)
    assert listed == {str(ALICES): ["digest:alice"], str(BOBS): ["digest:bob", CERTIFICATE_IDENTITY]}
    with opened(secured, "", by_certificate) as session:
        slot = f"{paths.cas_slots(StreamName.parse(LEDGER))}/17"
        session.create(slot, ephemeral=True)
        session.delete(slot)
        revoked = cli(secured, "coordinator", "access", "revoke", str(BOBS), CERTIFICATE_IDENTITY)
        assert CERTIFICATE_IDENTITY in revoked.out
        with pytest.raises(ZooKeeperDeniedError, match="certificate"):
            session.create(slot, ephemeral=True)
        with pytest.raises(ZooKeeperDeniedError):
            session.set(paths.counter(BOBS), b"1")
    for group, identity in ((ALICES, "digest:eve"), (ORDERS, CERTIFICATE_IDENTITY), ("nonsense", "x509:CN=a")):
        assert cli(secured, "coordinator", "access", "grant", str(group), identity).code == 4
    with opened(secured, "coordinator") as session, pytest.raises(NotFoundError):
        Access(session).members(GroupName("sales", "none"))


@pytest.mark.parametrize("operation", ["Write", "AlterConfigs", "Create", "Describe"])
def test_a_right_that_is_missing_on_the_topics_of_one_stream_stops_that_stream_only(
    secured: Secured, alice: rollbridge.Bridge, operation: str
) -> None:
    """In a rolling commit of two streams, whose segments are to be created, written to and sealed."""
    innocent = "sales/innocent"
    secured.allow("alice", writer(StreamName.parse(innocent), ALICES))
    if innocent not in {str(item.name) for item in alice.admin.list_streams("sales")}:
        alice.admin.create_stream(innocent)
    both = alice.begin(ORDERS, innocent)
    for stream in (ORDERS, innocent):
        both.write(stream, key=b"a", value=operation.encode())
        [*_, last] = alice.admin.history(stream).active.segments
        alice.admin.scale(stream, seal=[last.id.number], ranges=[(last.range.low, last.range.high)])
    with rollbridge.Bridge(replace(secured.settings("alice"), client_name="alice-too")) as other:
        right = Right(Resource.TOPIC, "sales.orders.segment-", (operation,), "merges and seals", prefixed=True)
        with secured.denied("coordinator", right):
            answer = both.commit_async()
            until(lambda: alice.admin.describe(ORDERS).fault is not None)
            for _ in range(3):
                with other.transaction(innocent) as transaction:
                    transaction.write(innocent, key=b"b", value=b"meanwhile")
                other.writer(innocent).write(b"c", b"plainly").result(120)
            assert alice.admin.describe(innocent).fault is None
            assert not answer.done()
        answer.result(180)
        until(lambda: alice.admin.describe(ORDERS).fault is None, 180)
        other.writer(ORDERS).write(b"c", b"plainly").result(120)
    assert operation.encode() in values(alice, ORDERS)


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_an_end_that_was_refused_is_sent_again(secured: Secured, end: str) -> None:
    """Else it would be open until its lease ends, long after the right to write is back."""
    buffer = StreamName.parse(ORDERS).buffer_topic()
    with rollbridge.Bridge(replace(secured.settings("alice"), client_name=f"alice-{end}")) as client:
        transaction = client.begin(ORDERS)
        transaction.write(ORDERS, key=b"a", value=b"refused")
        transaction.flush()
        ask = transaction.abort if end == "abort" else transaction.commit
        right = Right(Resource.TOPIC, buffer, ("Write",), "")
        with secured.denied("alice", right), pytest.raises(OutcomeUnknownError, match=f"an abort is sent .*{buffer}"):
            ask(timeout=3)
        if end == "abort":
            ask(timeout=60)
        else:
            with pytest.raises(IncompleteError):
                ask(timeout=60)
        assert client.outcome(transaction.id).state == "aborted"
        assert b"refused" not in values(client, ORDERS)


def test_what_was_open_to_everybody_can_be_closed(secured: Secured) -> None:
    old = replace(secured, root="/old")
    anonymous = {"security.protocol": "SSL", "ssl.ca.location": CA}
    with opened(old, "", anonymous) as nobody, opened(old, "coordinator") as session:
        Metadata(nobody).lay_out()
        Metadata(nobody).ensure_group(ALICES)
        nobody.create(paths.session(ALICES, "loader"), b"{}")
        assert open_nodes(nobody) == open_nodes(session)
        assert paths.requests(ALICES) in open_nodes(session)
        assert json.loads(cli(old, "carol", "access", "list", "--json").out) == {str(ALICES): ["everybody"]}
        with pytest.raises(InvalidRequestError, match=r"digest.username"):
            Access(nobody).grant(ALICES, [parse_identity(CERTIFICATE_IDENTITY)])
        assert json.loads(cli(old, "coordinator", "access", "secure", "--json").out)["closed"] > paths.BUCKETS
        assert open_nodes(session) == []
        assert cli(old, "coordinator", "access", "secure").out == "0 nodes closed.\n"
        assert cli(old, "carol", "access", "secure").out == "0 nodes closed.\n"
        with pytest.raises(ZooKeeperDeniedError, match="without identity"):
            nobody.create(f"{paths.requests(ALICES)}/request-", sequential=True)
        assert nobody.set(paths.session(ALICES, "loader"), b"{}") > 0  # it is its client's


def test_the_doctor_says_which_rights_are_missing(secured: Secured, alice: rollbridge.Bridge) -> None:
    def found(user: str) -> list[dict[str, str]]:
        answer = cli(secured, user, "doctor", "--json")
        assert answer.out, answer
        checks = ("permission", "zookeeper-open", "topic-replaced", "segment-gone")
        return [item for item in json.loads(answer.out)["findings"] if item["check"] in checks]

    assert found("coordinator") == []
    lacking = [
        replace(right, operations=tuple(item for item in right.operations if item not in ("AlterConfigs", "Delete")))
        for right in coordinator("sales")
    ]
    secured.allow("trainee", lacking)
    said = {item["what"] for item in found("trainee")}
    assert said
    assert all(
        re.search(r"may not ALTER_CONFIGS, DELETE topic (sales|__transaction_buffer_sales)\.", item) for item in said
    )
    assert any("may not look at" in item["what"] for item in found("bob"))


def test_a_coordinator_that_lacks_a_right_says_which(secured: Secured) -> None:
    lacking: list[Right] = [
        replace(right, operations=tuple(item for item in right.operations if item != "Create"))
        for right in coordinator("school")
    ]
    secured.allow("trainee", lacking)
    school = replace(secured, root="/school")
    with school.coordinator("trainee") as told:
        with opened(school, "trainee") as session:
            until(lambda: session.children(paths.COORDINATORS))
            Access(session).grant(GroupName("school"), [])
        until(lambda: "cannot create topic" in told())
        said = told()
    assert "TOPIC_AUTHORIZATION_FAILED" in said
    assert "docs/security.md" in said


def test_nothing_tells_a_secret(secured: Secured, heard: list[str], alice: rollbridge.Bridge) -> None:
    said = [cli(secured, "alice", *item, "--json", "-vv") for item in (("stream", "list"), ("doctor",), ("status",))]
    with patch.dict(os.environ, {}):
        said.append(run_cli({**secured.environment("alice"), "ROLLBRIDGE_KAFKA_SASL_MECHANISM": "X"}, "txn", "list"))
    assert said[-1].code == 4
    for answer in said:
        assert SECRET not in answer.out + answer.err
    visible = secured.runner.visible()
    assert [what for what, text in visible.items() if SECRET in text] == []
    assert "zookeeper_session.state" in visible["log of coordinator"]
    assert {"log of kafka", "log of zookeeper"} <= visible.keys()
    assert any("Auth(...)" in line for line in heard)
    assert not [line for line in heard if SECRET in line]
    for thing in (alice, alice.settings, alice.admin):
        assert SECRET not in repr(thing)
