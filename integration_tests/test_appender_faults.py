"""The appender when answers are lost, brokers die and requests come late: never half, twice or out of order.

A native transaction may end up committed or not when an answer is lost; which of the two is looked up in the log, as
callers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from kio.schema.errors import ErrorCode

from bridge.tests.refusals import raises_code
from integration_tests.adapter_tools import await_settled, batch_of, read_values
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.patience import eventually
from rollbridge.errors import FencedError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendRefusedError, AppendUnknownError, KafkaUnavailableError
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.kafka.topics import TopicSpec
from rollbridge.kafka.transactions import (
    Coordination,
    ProducerFields,
    ProducerStanding,
    ProduceSession,
    RequestRefusedError,
)

Opener = Callable[..., TransactionalAppender]

LOST = [Point.BEFORE_REQUEST, Point.AFTER_REQUEST, Point.BEFORE_ANSWER]


@pytest.fixture(scope="module")
def frail() -> Iterator[AnyCluster]:
    """A broker of this module's own, to be killed, which ends what is open too long at once."""
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "100"}
    with new_cluster(kafka_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def impatient() -> Iterator[AnyCluster]:
    """A broker with short patience for idle connections; one that waits for an answer is idle to it, too."""
    with new_cluster(kafka_settings={"connections.max.idle.ms": "5000"}) as cluster:
        yield cluster


@pytest.fixture
def forgetful() -> Iterator[AnyCluster]:
    """A broker that forgets transactional ids soon after they were last in use."""
    settings = {
        "transactional.id.expiration.ms": "5000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    }
    with new_cluster(kafka_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def servers(cluster: AnyCluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture
def topics(cluster: AnyCluster, topic_prefix: str) -> list[str]:
    names = [f"{topic_prefix}-{n}" for n in range(3)]
    KafkaClient(cluster.bootstrap_servers).topics.create_topics(TopicSpec(name=name) for name in names)
    return names


@pytest.fixture
def opener(topic_prefix: str) -> Iterator[Opener]:
    with contextlib.ExitStack() as opened:

        def make(bootstrap_servers: str, suffix: str = "", **options: int) -> TransactionalAppender:
            appender = KafkaClient(bootstrap_servers).appender(f"{topic_prefix}{suffix}", **options)  # type: ignore[arg-type]
            opened.enter_context(appender)
            appender.init()
            return appender

        yield make


def check_one_outcome(servers: str, topics: list[str], before: list[bytes], maybe: bytes) -> bool:
    """Whether ``maybe`` is committed; AssertionError if it is in some topics and not in others."""
    contents = [read_values(servers, name) for name in topics]
    assert all(content == contents[0] for content in contents)
    assert contents[0] in (before, [*before, maybe])
    return contents[0] != before


@pytest.mark.parametrize("point", LOST)
@pytest.mark.parametrize("nth", [0, 1, 4])
def test_a_produce_that_is_lost_leaves_nothing(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], point: Point, nth: int
) -> None:
    appender = opener(servers)
    appender.append((name, batch_of([b"before"])) for name in topics)
    appender.commit()
    proxy.strike(Api.PRODUCE, point, after=nth)
    # Several batches for one topic take a request each, so that there is a pipeline to be cut.
    with pytest.raises(AppendUnknownError) as unknown:
        appender.append((topics[n % 2], batch_of([b"lost"])) for n in range(20))
    assert unknown.value.transactional_id == appender.transactional_id
    proxy.await_strike()
    assert appender.state is AppenderState.UNKNOWN
    for attempt in (appender.commit, appender.abort, lambda: appender.append([])):
        with raises_code("invalid-state", match="unknown"):
            attempt()
    appender.init()
    appender.append((name, batch_of([b"after"])) for name in topics)
    appender.commit()
    for name in topics:
        assert read_values(servers, name) == [b"before", b"after"]


@pytest.mark.parametrize("point", LOST)
@pytest.mark.parametrize("committed", [True, False])
def test_an_end_that_is_lost_is_whole_or_nothing(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], point: Point, committed: bool
) -> None:
    appender = opener(servers)
    appender.append((name, batch_of([b"maybe"])) for name in topics)
    proxy.strike(Api.END_TXN, point)
    with pytest.raises(AppendUnknownError):
        appender.commit() if committed else appender.abort()
    proxy.await_strike()
    appender.init()
    there = check_one_outcome(servers, topics, [], b"maybe")
    if point is Point.BEFORE_REQUEST or not committed:
        assert not there
    if point is Point.BEFORE_ANSWER and committed:
        assert there
    appender.append((name, batch_of([b"after"])) for name in topics)
    appender.commit()
    for name in topics:
        assert read_values(servers, name)[-1:] == [b"after"]


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_that_arrives_late_does_not_end_the_next_transaction(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], committed: bool
) -> None:
    """What transactions before version 2 get wrong: KAFKA-17754."""
    appender = opener(servers)
    appender.append([(topics[0], batch_of([b"first"]))])
    proxy.strike(Api.END_TXN, Point.HELD)
    with pytest.raises(AppendUnknownError):
        appender.commit() if committed else appender.abort()
    proxy.await_strike()
    appender.init()
    appender.append([(topics[0], batch_of([b"second"]))])
    proxy.release()
    assert appender.end_offset(topics[0], Isolation.READ_COMMITTED) < appender.end_offset(topics[0])
    appender.append([(topics[0], batch_of([b"third"]))])
    appender.commit()
    assert read_values(servers, topics[0]) == [b"second", b"third"]


def test_a_produce_that_arrives_late_is_refused(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    appender = opener(servers)
    proxy.strike(Api.PRODUCE, Point.HELD)
    with pytest.raises(AppendUnknownError):
        appender.append([(topics[0], batch_of([b"straggler"]))])
    proxy.await_strike()
    appender.init()
    appender.append([(topics[0], batch_of([b"second"]))])
    proxy.release()
    appender.commit()
    assert read_values(servers, topics[0]) == [b"second"]


@pytest.mark.parametrize("point", [Point.REFUSED, Point.MISREPORTED])
@pytest.mark.parametrize(
    "error", [ErrorCode.not_leader_or_follower, ErrorCode.not_enough_replicas_after_append, ErrorCode.request_timed_out]
)
def test_a_request_of_a_pipeline_that_fails_is_repeated_in_order(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], point: Point, error: ErrorCode
) -> None:
    """Those behind it are refused for their sequence numbers, or were written: neither doubles nor loses any."""
    appender = opener(servers)

    def batches() -> Iterator[tuple[str, bytes]]:
        for n in range(40):
            if n == 12:
                proxy.strike(Api.PRODUCE, point, after=1, times=2, error=error)
            yield topics[n % 2], batch_of([b"%d" % n, b"-%d" % n])

    offsets = appender.append(batches())
    proxy.await_strike()
    appender.commit()
    assert offsets == [n // 2 * 2 for n in range(40)]
    for which in (0, 1):
        expected = [value for n in range(which, 40, 2) for value in (b"%d" % n, b"-%d" % n)]
        assert read_values(servers, topics[which]) == expected


def test_a_refusal_that_does_not_pass_gives_up(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    appender = opener(servers, retry_timeout_ms=3_000)
    proxy.strike(Api.PRODUCE, Point.REFUSED, times=1_000_000, error=ErrorCode.not_enough_replicas)
    with pytest.raises(AppendUnknownError, match="NOT_ENOUGH_REPLICAS"):
        appender.append([(topics[0], batch_of([b"no"]))])
    proxy.calm()
    appender.init()
    appender.append([(topics[0], batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topics[0]) == [b"yes"]


@pytest.mark.parametrize(
    ("error", "raised", "state"),
    [
        (ErrorCode.record_list_too_large, AppendRefusedError, AppenderState.MUST_ABORT),
        (ErrorCode.transaction_abortable, AppendRefusedError, AppenderState.MUST_ABORT),
        (ErrorCode.topic_authorization_failed, AppendRefusedError, AppenderState.MUST_ABORT),
        # Not behind a failed one, so nothing explains it.
        (ErrorCode.out_of_order_sequence_number, AppendRefusedError, AppenderState.MUST_ABORT),
        (ErrorCode.unknown_server_error, AppendUnknownError, AppenderState.UNKNOWN),
        (ErrorCode.duplicate_sequence_number, AppendUnknownError, AppenderState.UNKNOWN),
        # The coordinator says that nobody else has the id.
        (ErrorCode.producer_fenced, AppendUnknownError, AppenderState.UNKNOWN),
    ],
)
def test_answers_that_are_final(
    proxy: FaultProxy,
    opener: Opener,
    servers: str,
    topics: list[str],
    error: ErrorCode,
    raised: type[Exception],
    state: AppenderState,
) -> None:
    appender = opener(servers)
    proxy.strike(Api.PRODUCE, Point.REFUSED, after=3, error=error)
    with pytest.raises(raised, match=error.name.upper()):
        appender.append((topics[0], batch_of([b"no"])) for _ in range(12))
    assert appender.state is state
    if state is AppenderState.MUST_ABORT:
        appender.abort()
    else:
        appender.init()
    appender.append([(topics[0], batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topics[0]) == [b"yes"]


@pytest.mark.parametrize("point", [Point.REFUSED, Point.MISREPORTED])
def test_an_acknowledgement_without_an_offset_is_an_unknown_outcome(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], point: Point
) -> None:
    appender = opener(servers)
    proxy.strike(Api.PRODUCE, point, error=ErrorCode.none)
    with pytest.raises(AppendUnknownError, match="without an offset"):
        appender.append([(topics[0], batch_of([b"lost"]))])
    assert appender.state is AppenderState.UNKNOWN
    appender.init()
    appender.append([(topics[0], batch_of([b"after"]))])
    appender.commit()
    assert read_values(servers, topics[0]) == [b"after"]


@pytest.mark.parametrize("point", [Point.REFUSED, Point.MISREPORTED])
def test_an_end_is_repeated_until_the_coordinator_is_there(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], point: Point
) -> None:
    appender = opener(servers)
    expected = []
    for error in (ErrorCode.not_coordinator, ErrorCode.coordinator_load_in_progress, ErrorCode.concurrent_transactions):
        appender.append((name, batch_of([error.name.encode()])) for name in topics)
        proxy.strike(Api.END_TXN, point, times=2, error=error)
        appender.commit()
        proxy.await_strike()
        expected.append(error.name.encode())
    for name in topics:
        assert read_values(servers, name) == expected


def test_an_end_wrongly_called_fenced_is_repeated(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    """The coordinator answers so while it writes the markers of the transaction before."""
    appender = opener(servers)
    appender.append([(topics[0], batch_of([b"yes"]))])
    proxy.strike(Api.END_TXN, Point.REFUSED, times=3, error=ErrorCode.producer_fenced)
    appender.commit()
    assert read_values(servers, topics[0]) == [b"yes"]


def test_an_abort_right_after_a_commit_is_not_taken_for_a_fencing(
    opener: Opener, cluster: AnyCluster, servers: str, topic_prefix: str
) -> None:
    """The same with the real coordinator: many markers to write, and an abort of what has not begun."""
    names = [f"{topic_prefix}-{n}" for n in range(100)]
    KafkaClient(servers).topics.create_topics(TopicSpec(name=name) for name in names)
    appender = opener(servers, unknown_topic_timeout_ms=0)
    for _ in range(5):
        appender.append((name, batch_of([b"x"])) for name in names)
        appender.commit()
        with pytest.raises(AppendRefusedError):
            appender.append([(f"{topic_prefix}-missing", batch_of([b"x"]))])
        appender.abort()
    assert read_values(servers, names[-1]) == [b"x"] * 5


def test_a_connection_lost_between_transactions_is_replaced(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    appender = opener(servers)
    for n in range(5):
        proxy.cut_all()
        appender.append((name, batch_of([b"%d" % n])) for name in topics)
        appender.commit()
        proxy.cut_all()
        assert appender.end_offset(topics[0]) > 0
    for name in topics:
        assert read_values(servers, name) == [b"%d" % n for n in range(5)]


def test_a_zombie_whose_answer_was_lost_is_told_so_and_harms_nobody(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    old = opener(servers)
    old.append([(topics[0], batch_of([b"old"]))])
    proxy.strike(Api.END_TXN, Point.BEFORE_REQUEST)
    with pytest.raises(AppendUnknownError):
        old.commit()
    new = opener(servers)
    new.append([(topics[0], batch_of([b"new"]))])
    with pytest.raises(FencedError):
        old.init()
    new.append([(topics[0], batch_of([b"new too"]))])
    new.commit()
    assert read_values(servers, topics[0]) == [b"new", b"new too"]


def test_init_waits_for_a_broker_that_comes_back_and_no_longer(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str]
) -> None:
    appender = opener(servers, retry_timeout_ms=3_000)
    proxy.strike(Api.END_TXN, Point.BEFORE_REQUEST, times=1_000_000)
    with pytest.raises(KafkaUnavailableError):
        appender.init()
    assert appender.state is AppenderState.UNKNOWN
    proxy.strike(Api.END_TXN, Point.BEFORE_REQUEST, times=3)
    appender.init()
    appender.append([(topics[0], batch_of([b"yes"]))])
    appender.commit()


def test_an_interrupt_in_the_middle_leaves_the_outcome_unknown(opener: Opener, servers: str, topics: list[str]) -> None:
    appender = opener(servers)

    def batches() -> Iterator[tuple[str, bytes]]:
        for _ in range(8):
            yield topics[0], batch_of([b"no"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        appender.append(batches())
    assert appender.state is AppenderState.UNKNOWN
    appender.init()
    appender.append([(topics[0], batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topics[0]) == [b"yes"]


def test_nobody_there_is_said_at_once() -> None:
    with KafkaClient("127.0.0.1:1").appender("t", retry_timeout_ms=0) as appender:
        with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1"):
            appender.init()
        assert appender.state is AppenderState.NEW


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_epochs_run_out_without_anybody_noticing(
    proxy: FaultProxy, opener: Opener, servers: str, topics: list[str], topic_prefix: str, lost: bool
) -> None:
    """Every transaction uses up an epoch, of which there are 32,767: then the coordinator gives another producer id."""
    with Cluster(servers) as brokers:
        coordination = Coordination(brokers, topic_prefix, transaction_timeout_ms=60_000, retry_timeout_s=60)
        producer = coordination.take_over()
        session = ProduceSession()
        while producer.epoch < 32_760:
            producer = coordination.end(session, producer, committed=False)
    appender = opener(servers)
    expected = []
    for n in range(15):
        value = b"%d" % n
        appender.append((name, batch_of([value])) for name in topics)
        if lost:
            proxy.strike(Api.END_TXN, Point.BEFORE_ANSWER)
            with pytest.raises(AppendUnknownError):
                appender.commit()
            appender.init()
        else:
            appender.commit()
        expected.append(value)
    for name in topics:
        assert read_values(servers, name) == expected
    with Cluster(servers) as brokers:
        coordination = Coordination(brokers, topic_prefix, transaction_timeout_ms=60_000, retry_timeout_s=60)
        assert coordination.standing(producer) is ProducerStanding.TAKEN
        assert coordination.take_over().producer_id != producer.producer_id


@pytest.mark.slow
def test_a_broker_killed_at_any_moment_leaves_whole_transactions(
    frail: AnyCluster, opener: Opener, topic_prefix: str
) -> None:
    servers = frail.bootstrap_servers
    names = [f"{topic_prefix}-{n}" for n in range(3)]
    KafkaClient(servers).topics.create_topics(TopicSpec(name=name) for name in names)
    appender = opener(servers)

    appender.append((name, batch_of([b"first"])) for name in names)
    appender.commit()
    await_settled(servers, names)

    # Between append and commit.
    appender.append((name, batch_of([b"second"])) for name in names)
    frail.kill("kafka")
    with pytest.raises(AppendUnknownError):
        appender.commit()
    frail.restart("kafka")
    appender.init()
    assert not check_one_outcome(servers, names, [b"first"], b"second")

    # Between two appends of a transaction.
    appender.append((name, batch_of([b"third"])) for name in names)
    frail.kill("kafka")
    with pytest.raises(AppendUnknownError):
        appender.append((name, batch_of([b"third"])) for name in names)
    frail.restart("kafka")
    appender.init()

    # Between the answer to the commit and, perhaps, some of the markers.
    appender.append((name, batch_of([b"fourth"])) for name in names)
    appender.commit()
    frail.kill("kafka")
    frail.restart("kafka")
    appender.append((name, batch_of([b"fifth"])) for name in names)
    appender.commit()
    for name in names:
        assert read_values(servers, name) == [b"first", b"fourth", b"fifth"]


def test_connections_the_broker_closed_as_idle_are_replaced(
    impatient: AnyCluster, opener: Opener, topic_prefix: str
) -> None:
    servers = impatient.bootstrap_servers
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix)])
    appender = opener(servers)
    appender.append([(topic_prefix, batch_of([b"1"]))])
    appender.commit()
    with Cluster(servers) as watcher:
        # A connection of the same age as the appender's: when the broker has closed it, it has closed those.
        probe = watcher.connection(watcher.leader(topic_prefix, 0))
        eventually(lambda: not probe.usable(), "the broker closes idle connections")
    appender.append([(topic_prefix, batch_of([b"2"]))])
    appender.commit()
    assert read_values(servers, topic_prefix) == [b"1", b"2"]


def test_a_transaction_open_too_long_is_refused_not_fenced(
    frail: AnyCluster, opener: Opener, topic_prefix: str
) -> None:
    servers = frail.bootstrap_servers
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix)])
    slow = opener(servers, transaction_timeout_ms=5_000)
    for end in (slow.commit, lambda: slow.append([(topic_prefix, batch_of([b"late"]))])):
        slow.append([(topic_prefix, batch_of([b"slow"]))])
        await_settled(servers, [topic_prefix])
        with pytest.raises(AppendRefusedError):
            end()
        slow.abort()
    slow.append([(topic_prefix, batch_of([b"quick"]))])
    slow.commit()
    assert read_values(servers, topic_prefix) == [b"quick"]


def test_an_id_that_the_coordinator_forgot_is_taken_again_unless_somebody_has_it(
    forgetful: AnyCluster, opener: Opener, topic_prefix: str
) -> None:
    servers = forgetful.bootstrap_servers
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix)])

    def used(suffix: str) -> TransactionalAppender:
        appender = opener(servers, suffix)
        appender.append([(topic_prefix, batch_of([b"1"]))])
        appender.commit()
        return appender

    used("-first")  # which waits until a fresh broker has made what transactions need
    lonely, replaced = used("-lonely"), used("-other")

    def forgotten(appender: TransactionalAppender) -> bool:
        with Cluster(servers) as cluster:
            coordination = Coordination(
                cluster, appender.transactional_id, transaction_timeout_ms=1, retry_timeout_s=60
            )
            try:
                coordination.standing(ProducerFields(appender.transactional_id, 0, 0))
            except RequestRefusedError as exc:
                return exc.error is ErrorCode.transactional_id_not_found
            return False

    for appender in (lonely, replaced):
        eventually(lambda one=appender: forgotten(one), "the id expires")  # type: ignore[misc]
    with pytest.raises(AppendUnknownError, match="INVALID_PRODUCER_ID_MAPPING"):
        lonely.append([(topic_prefix, batch_of([b"refused"]))])
    lonely.init()
    lonely.append([(topic_prefix, batch_of([b"2"]))])
    lonely.commit()
    newer = opener(servers, "-other")
    newer.append([(topic_prefix, batch_of([b"3"]))])  # an id with a transaction is not forgotten
    with pytest.raises(AppendUnknownError, match="INVALID_PRODUCER_ID_MAPPING"):
        replaced.append([(topic_prefix, batch_of([b"refused"]))])
    with pytest.raises(FencedError):
        replaced.init()
    newer.commit()
    assert read_values(servers, topic_prefix) == [b"1", b"1", b"1", b"2", b"3"]
