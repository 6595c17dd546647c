"""A commit log that somebody deletes, or deletes and makes again, and the repair after which its group goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.common import ExitCode
from rollbridge.client.futures import OutcomeFuture
from rollbridge.errors import OutcomeExpiredError, OutcomeUnknownError, TransactionAbortedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, StreamName


@pytest.fixture
def site(cluster: AnyCluster, tmp_path: Path, unique_name: Callable[[str], str]) -> Iterator[Site]:
    with Site(cluster, f"/{unique_name('lost-log')}", tmp_path) as site:
        yield site


def values(client: rollbridge.Bridge, stream: str) -> list[bytes]:
    with client.reader(stream, follow=False) as reader:
        return [record.value or b"" for record in reader]


def commit(client: rollbridge.Bridge, *streams: str, value: bytes) -> str:
    with client.transaction(*streams) as txn:
        for stream in streams:
            txn.write(stream, key=b"k", value=value)
    return str(txn.id)


@pytest.mark.parametrize("is_made_again", [False, True], ids=["deleted", "made again"])
def test_a_group_goes_on_after_its_commit_log_was_deleted(
    site: Site, cluster: AnyCluster, scope: str, unique_name: Callable[[str], str], is_made_again: bool
) -> None:
    group, log = GroupName(scope), GroupName(scope).commit_log_topic
    orders, topic, other = f"{scope}/orders", unique_name("topic"), f"{scope}/other"
    cli = Cli(cluster, site.root)
    options = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)
    with (
        KafkaClient(cluster.bootstrap_servers) as kafka,
        site.connect("tester", options) as client,
    ):
        kafka.topics.create_topics([TopicSpec(name=topic, partitions=2)])
        client.admin.create_stream(orders, segments=2)
        client.admin.create_stream(other, group="apart")
        client.admin.adopt_topic(topic, stream=f"{scope}/adopted")
        before = commit(client, orders, topic, value=b"before")
        left = client.begin(orders, topic, label="left")
        left.write(orders, key=b"k", value=b"open")
        left.flush()

        kafka.topics.delete_topics([log])
        if is_made_again:
            kafka.topics.create_topics([TopicSpec(name=log, partitions=1)])
        eventually(lambda: "repair --commit-log" in cli("doctor").out, "doctor says what to do")
        commit(client, other, value=b"of another group")

        asked = client.begin(orders, topic)
        asked.write(orders, key=b"k", value=b"asked")
        answer = asked.commit_async()

        shown = cli("repair", "--commit-log", str(group), "--dry-run")
        assert shown.code == ExitCode.OK, shown
        assert log in shown.out
        assert cli("repair", "--commit-log", f"{scope}/apart").code == ExitCode.REFUSED
        assert cli("repair", "--commit-log", f"{scope}/nothing").code == ExitCode.NOT_FOUND
        done = cli("repair", "--commit-log", str(group))
        assert done.code == ExitCode.OK, done

        ended = left.commit_async()
        eventually(lambda: ended.done() and answer.done(), "those who wait are told")
        assert isinstance(ended.exception(), OutcomeUnknownError | TransactionAbortedError)
        fate = answer.exception()  # the old leader may have carried it out meanwhile, and nobody know that
        commit(client, orders, topic, value=b"after")
        with client.writer(topic) as writer:
            writer.write(b"k", b"plain").result(PATIENCE_S)
        with suppress(OutcomeExpiredError):
            told = client.outcome(transaction=before, group=group, client="tester", timeout=PATIENCE_S)
            assert told.state == "committed"
    site.stop_coordinator()
    site.start_coordinator()
    with site.connect("another", options) as client:
        commit(client, orders, topic, value=b"later")
        client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        commit(client, orders, topic, value=b"scaled")
        found = values(client, orders)
        if isinstance(fate, OutcomeUnknownError):
            assert found.count(b"asked") <= 1
        else:
            assert found.count(b"asked") == (0 if isinstance(fate, TransactionAbortedError) else 1)
        assert sorted(set(found) - {b"asked"}) == [b"after", b"before", b"later", b"scaled"]
        assert sorted(values(client, topic)) == [b"after", b"before", b"later", b"plain", b"scaled"]
    assert cli("verify", orders).code == ExitCode.OK, cli("verify", orders)
    assert scope not in "".join(line for line in cli("doctor").out.splitlines() if line.startswith("PROBLEM"))


def make_buffer_anew(kafka: KafkaClient, session: ZooKeeperSession, name: StreamName) -> None:
    """Have the next leader make the buffer of a stream anew, as a repair does."""
    kafka.topics.delete_topics([name.buffer_topic()])
    node = session.get(paths.stream(name))
    assert node is not None
    config = StreamConfig.from_json(node.value)
    session.set(paths.stream(name), replace(config, buffer_topic_id="", life_id=config.identity).to_json())


def test_a_commit_whose_buffer_was_made_anew_is_told_so(site: Site, cluster: AnyCluster, scope: str) -> None:
    name = StreamName(scope, "orders")
    with (
        KafkaClient(cluster.bootstrap_servers) as kafka,
        ZooKeeperSession(cluster.zookeeper, root=site.root) as session,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client,
    ):
        client.admin.create_stream(str(name), segments=2)
        commit(client, str(name), value=b"before")
        site.stop_coordinator()
        asked = client.begin(str(name))
        asked.write(str(name), key=b"k", value=b"asked")
        ended = asked.commit_async()
        asked.flush()
        make_buffer_anew(kafka, session, name)
        site.start_coordinator()
        eventually(ended.done, "who waits is told")
        assert isinstance(ended.exception(), TransactionAbortedError)
        commit(client, str(name), value=b"after")
        assert sorted(values(client, str(name))) == [b"after", b"before"]


@pytest.mark.parametrize("is_remembered", [True, False], ids=["remembered", "not remembered"])
def test_a_commit_that_an_emptied_log_may_have_held_is_carried_out_once_or_said_to_be_unknown(
    cluster: AnyCluster, scope: str, tmp_path: Path, unique_name: Callable[[str], str], is_remembered: bool
) -> None:
    name, log = StreamName(scope, "orders"), GroupName(scope).commit_log_topic
    count = {"ROLLBRIDGE_COORDINATOR_TRANSACTION_META_PERSIST_COUNT": "100" if is_remembered else "0"}
    with (
        Site(cluster, f"/{unique_name('emptied-log')}", tmp_path, **count) as site,
        KafkaClient(cluster.bootstrap_servers) as kafka,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client,
    ):
        client.admin.create_stream(str(name), segments=2)
        commit(client, str(name), value=b"before")
        site.stop_coordinator()
        asked, later = client.begin(str(name)), client.begin(str(name))
        asked.write(str(name), key=b"k", value=b"asked")
        later.write(str(name), key=b"k", value=b"asked later")
        answers = [asked.commit_async(), later.commit_async()]
        asked.flush()
        kafka.topics.delete_records({(log, 0): kafka.offsets.end([log], Isolation.READ_UNCOMMITTED)[log]})
        site.start_coordinator()
        eventually(lambda: all(item.done() for item in answers), "those who wait are told")
        found = [item.exception() for item in answers]
        if is_remembered:
            assert found == [None, None]
        else:
            assert [type(item) for item in found] == [OutcomeUnknownError, OutcomeUnknownError]
        commit(client, str(name), value=b"after")
        expected = [b"after", b"before", *([b"asked", b"asked later"] if is_remembered else [])]
        assert sorted(values(client, str(name))) == sorted(expected)


def test_who_waits_for_an_end_whose_frames_somebody_has_emptied_is_told_so(
    site: Site, cluster: AnyCluster, scope: str
) -> None:
    name = StreamName(scope, "orders")
    with (
        KafkaClient(cluster.bootstrap_servers) as kafka,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client,
    ):
        client.admin.create_stream(str(name), segments=2)
        commit(client, str(name), value=b"before")
        site.stop_coordinator()
        asked, dropped = client.begin(str(name)), client.begin(str(name))
        for txn in (asked, dropped):
            txn.write(str(name), key=b"k", value=b"gone")
            txn.flush()
        buffer = name.buffer_topic()

        def end_of_buffer() -> int:
            return kafka.offsets.end([buffer], Isolation.READ_UNCOMMITTED)[buffer]

        before = end_of_buffer()
        answers: list[OutcomeFuture[Any]] = [asked.commit_async(), dropped.abort_async()]
        eventually(lambda: end_of_buffer() == before + 2, "both ends are in the buffer")
        kafka.topics.delete_records({(buffer, 0): before + 2})
        site.start_coordinator()
        eventually(lambda: all(item.done() for item in answers), "those who wait are told")
        assert [type(item.exception()) for item in answers] == [OutcomeUnknownError, OutcomeUnknownError]
        commit(client, str(name), value=b"after")
        assert sorted(values(client, str(name))) == [b"after", b"before"]


def test_a_gateway_answers_no_commit_by_the_transaction_before_it(
    site: Site, cluster: AnyCluster, scope: str, tmp_path: Path
) -> None:
    name = StreamName(scope, "orders")
    topic = f"{scope}.orders"
    servers = Servers(cluster.bootstrap_servers, cluster.zookeeper, site.root)
    with (
        ThreadPoolExecutor(1) as pool,
        GatewayProcess(servers, "gateway", tmp_path) as gateway,
        ZooKeeperSession(cluster.zookeeper, root=site.root) as session,
        KafkaClient(cluster.bootstrap_servers) as kafka,
        site.connect("tester", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client,
    ):
        client.admin.create_stream(str(name), segments=2)
        gateway.await_ready()
        producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": f"{scope}-loader"})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        producer.produce(topic, b"before", b"k")
        producer.commit_transaction(PATIENCE_S)
        site.stop_coordinator()
        producer.begin_transaction()
        producer.produce(topic, b"asked", b"k")
        assert producer.flush(PATIENCE_S) == 0
        asked = pool.submit(commit_at, producer)
        eventually(lambda: b"END_TXN" in gateway.log.read_bytes(), "its end is not answered")
        make_buffer_anew(kafka, session, name)
        site.start_coordinator()
        with pytest.raises(KafkaException) as refused:
            asked.result()
        assert refused.value.args[0].code() == KafkaError.INVALID_PRODUCER_ID_MAPPING
        commit(client, str(name), value=b"after")
        assert sorted(values(client, str(name))) == [b"after", b"before"]


def commit_at(producer: Producer) -> None:
    """Commit, and ask again as long as that is what the error says."""
    while True:
        try:
            return producer.commit_transaction(PATIENCE_S)
        except KafkaException as fault:
            if not fault.args[0].retriable():
                raise
