"""Plain writes that meet lost connections, lost answers, and refusals: nothing is lost, doubled or out of order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import cast

import pytest
from kio.schema.errors import ErrorCode

import rollbridge
from integration_tests.clients import Site
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.patience import eventually
from integration_tests.plain_faults import ONE, exposed, nobody_reached
from integration_tests.plain_tools import Load, check, join_all, read_in_order, split_first
from rollbridge.base.sn import DLSN
from rollbridge.errors import (
    BackpressureError,
    InvalidRequestError,
    KafkaUnavailableError,
    OutcomeUnknownError,
    StreamNotFoundError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.dispatch import new_producer_id
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.kafka.metadata import Cluster
from rollbridge.stream.names import StreamName
from rollbridge.writer import PlainFuture, StreamWriter, WriterOptions

__all__ = ["exposed"]


def wait_for_answers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give up connections after so long without an answer."""
    monkeypatch.setattr(KafkaClient, "cluster", partialmethod(KafkaClient.cluster, request_timeout_s=seconds))


def test_brokers_that_have_no_producer_ids_yet_are_asked_again(site: Site, proxy: FaultProxy) -> None:
    with Cluster(site.cluster.bootstrap_servers) as cluster:
        proxy.strike(Api.INIT_PRODUCER_ID, Point.REFUSED, times=3, error=ErrorCode.coordinator_load_in_progress)
        assert new_producer_id(cluster)[1] == 0
        assert proxy.requests.count(Api.INIT_PRODUCER_ID) >= 4, "the broker itself may have none yet"
        proxy.strike(Api.INIT_PRODUCER_ID, Point.REFUSED, times=9, error=ErrorCode.coordinator_load_in_progress)
        with pytest.raises(KafkaUnavailableError, match="COORDINATOR_LOAD_IN_PROGRESS"):
            new_producer_id(cluster, timeout_s=0)
        proxy.strike(Api.INIT_PRODUCER_ID, Point.REFUSED, error=ErrorCode.cluster_authorization_failed)
        with pytest.raises(NotAuthorizedError):
            new_producer_id(cluster)


@pytest.mark.parametrize("point", [Point.BEFORE_REQUEST, Point.AFTER_REQUEST, Point.BEFORE_ANSWER])
def test_a_lost_connection_neither_loses_nor_doubles(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str, point: Point
) -> None:
    writer = exposed.writer(orders, options=ONE)
    with Load(writer.write, threads=2) as load:
        for _ in range(3):
            load.grow(500)
            proxy.strike(Api.PRODUCE, point, after=1)
            proxy.await_strike()
        load.grow(500)
    writer.close()
    check(load, read_in_order(exposed, orders))


@contextmanager
def in_doubt(
    writer: StreamWriter, client: rollbridge.Bridge, proxy: FaultProxy, *, written: bool = True
) -> Iterator[list[PlainFuture]]:
    """Two writes, the answer to the first of which is lost; then their only segment is sealed, and split."""
    proxy.strike(Api.PRODUCE, Point.BEFORE_ANSWER if written else Point.BEFORE_REQUEST)
    with nobody_reached():
        futures = [writer.write(b"k", b"doubtful")]
        proxy.await_strike()
        futures.append(writer.write(b"k", b"behind it"))
        assert not futures[0].done()
        split_first(client, writer.stream)
        yield futures


BOTH = pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])


@BOTH
def test_an_answer_that_is_lost_before_the_seal_is_found_out_in_the_log(
    exposed: rollbridge.Bridge, client: rollbridge.Bridge, proxy: FaultProxy, orders: str, written: bool
) -> None:
    """A sealed segment refuses what it has as it refuses what it has not: who guesses loses a record or doubles it."""
    join_all(client, orders)
    writer = exposed.writer(orders, options=ONE)
    first = writer.write(b"k", b"first").result(120)
    with in_doubt(writer, client, proxy, written=written) as futures:
        pass
    places = [cast("DLSN", future.result(60).dlsn) for future in futures]
    found = read_in_order(client, orders)
    assert [message.value() for _, message in found] == [b"first", b"doubtful", b"behind it"]
    assert [place for place, _ in found] == [first.dlsn, *places]
    assert places[0].epoch == (1 if written else 2)
    assert places[1].epoch == 2


def only_topic(client: rollbridge.Bridge, stream: str) -> str:
    """Of the only active segment."""
    [segment] = client.admin.history(stream).active.segments
    return StreamName.parse(stream).segment_topic(segment.id)


def fill(client: rollbridge.Bridge, stream: str, count: int) -> None:
    """Records of somebody else."""
    with client.writer(stream) as writer:
        for _ in range(count):
            writer.write(b"k", b"before")


@BOTH
def test_a_first_answer_that_is_lost_is_not_looked_for_in_what_was_there_before(
    site: Site,
    exposed: rollbridge.Bridge,
    client: rollbridge.Bridge,
    proxy: FaultProxy,
    orders: str,
    payments: str,
    written: bool,
) -> None:
    """So nothing of that is missed, either, when it is truncated away."""
    join_all(client, orders)
    fill(client, orders, 50)
    topic = only_topic(client, orders)
    exposed.writer(payments, options=ONE).write(b"k", b"v").result(120)  # connected from here on
    writer = exposed.writer(orders, options=ONE)
    with in_doubt(writer, client, proxy, written=written) as futures:
        KafkaClient(site.cluster.bootstrap_servers).topics.delete_records({topic: 50})
    places = [cast("DLSN", future.result(60).dlsn) for future in futures]
    assert [place.epoch for place in places] == [1 if written else 2, 2]
    found = read_in_order(client, orders)
    assert [(place, message.value()) for place, message in found] == [
        (places[0], b"doubtful"),
        (places[1], b"behind it"),
    ]


@BOTH
def test_a_record_that_may_have_stood_in_what_is_truncated_is_unknown(
    site: Site, exposed: rollbridge.Bridge, client: rollbridge.Bridge, proxy: FaultProxy, orders: str, written: bool
) -> None:
    join_all(client, orders)
    fill(client, orders, 50)
    topic = only_topic(client, orders)
    writer = exposed.writer(orders, options=ONE)
    writer.write(b"k", b"first").result(120)
    with in_doubt(writer, client, proxy, written=written) as futures:
        KafkaClient(site.cluster.bootstrap_servers).topics.delete_records({topic: 52 if written else 51})
    if written:
        with pytest.raises(OutcomeUnknownError, match=r"may not have been written.*part of the segment is deleted"):
            futures[0].result(60)
    else:
        assert cast("DLSN", futures[0].result(60).dlsn).epoch == 2, "where it would have stood nothing is missing"
    assert cast("DLSN", futures[1].result(60).dlsn).epoch == 2


def test_others_write_on_while_a_broker_is_silent_about_a_sealed_segment(
    exposed: rollbridge.Bridge,
    client: rollbridge.Bridge,
    proxy: FaultProxy,
    orders: str,
    payments: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for_answers(monkeypatch, 120)
    options = WriterOptions(linger_s=0.0)
    join_all(client, orders)
    writer, beside = exposed.writer(orders, options=options), exposed.writer(payments, options=options)
    for one in (writer, beside):
        one.write(b"k", b"first").result(120)
    with in_doubt(writer, client, proxy) as futures:
        proxy.strike(Api.FETCH, Point.SILENT)
    proxy.await_strike()
    for number in range(10):
        beside.write(b"k", b"%d" % number).result(60)
    assert not futures[0].done()
    proxy.cut_all()
    assert [cast("DLSN", future.result(60).dlsn).epoch for future in futures] == [1, 2]


def test_what_can_not_be_looked_up_is_unknown_in_the_end(
    exposed: rollbridge.Bridge, client: rollbridge.Bridge, proxy: FaultProxy, orders: str
) -> None:
    options = WriterOptions(linger_s=0.0, delivery_timeout_s=8.0)
    join_all(client, orders)
    writer = exposed.writer(orders, options=options)
    writer.write(b"k", b"first").result(120)
    with in_doubt(writer, client, proxy) as futures:
        proxy.strike(Api.FETCH, Point.BEFORE_ANSWER, times=1_000_000)
    with pytest.raises(OutcomeUnknownError, match="may or may not have been written"):
        futures[0].result(60)
    assert proxy.requests.count(Api.FETCH) < 200, "it is asked again without a pause"


def test_where_segments_end_is_asked_once_for_all_of_a_broker(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str, payments: str
) -> None:
    exposed.writer(payments, options=ONE).write(b"k", b"v").result(120)
    before = proxy.requests.count(Api.LIST_OFFSETS)
    writer = exposed.writer(orders, options=WriterOptions(linger_s=0.5))
    for _ in range(3):
        for number in range(20):
            writer.write(b"key-%d" % number, b"v")
        writer.flush()
    assert proxy.requests.count(Api.LIST_OFFSETS) == before + 1


def test_an_end_that_is_not_told_at_once_is_asked_for_again(
    exposed: rollbridge.Bridge, client: rollbridge.Bridge, proxy: FaultProxy, ledger: str
) -> None:
    writer = exposed.writer(ledger, options=ONE)
    proxy.strike(Api.LIST_OFFSETS, Point.BEFORE_ANSWER, times=2)
    assert writer.write(b"k", b"first").result(120).dlsn is not None
    assert proxy.requests.count(Api.LIST_OFFSETS) == 3
    assert [message.value() for _, message in read_in_order(client, ledger)] == [b"first"]


@pytest.mark.parametrize(
    ("point", "error"),
    [
        (Point.REFUSED, ErrorCode.not_leader_or_follower),
        (Point.REFUSED, ErrorCode.not_enough_replicas),
        (Point.REFUSED, ErrorCode.out_of_order_sequence_number),
        (Point.REFUSED, ErrorCode.unknown_producer_id),
        (Point.REFUSED, ErrorCode.message_too_large),
        (Point.REFUSED, ErrorCode.none),  # acknowledged without an offset, and lost
        (Point.MISREPORTED, ErrorCode.none),  # the same, and written
        (Point.MISREPORTED, ErrorCode.not_enough_replicas_after_append),
        (Point.MISREPORTED, ErrorCode.request_timed_out),
    ],
    ids=lambda item: item.name.lower(),
)
def test_passing_errors_neither_lose_nor_double(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str, point: Point, error: ErrorCode
) -> None:
    writer = exposed.writer(orders, options=ONE)
    with Load(writer.write, threads=2) as load:
        load.grow(500)
        proxy.strike(Api.PRODUCE, point, after=1, times=2, error=error)
        proxy.await_strike()
        load.grow(500)
    writer.close()
    check(load, read_in_order(exposed, orders))


def test_what_is_refused_for_good_fails_alone_and_flush_says_so(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str
) -> None:
    writer = exposed.writer(orders, options=ONE)
    writer.write(b"k", b"first").result(120)
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=ErrorCode.invalid_record)
    refused = writer.write(b"k", b"second")
    with pytest.raises(InvalidRequestError, match=r"INVALID_RECORD.*not written"):
        refused.result(120)
    writer.write(b"k", b"third").result(120)
    with pytest.raises(InvalidRequestError, match="INVALID_RECORD"):
        writer.flush()
    writer.flush()
    assert [message.value() for _, message in read_in_order(exposed, orders)] == [b"first", b"third"]


def test_what_is_given_up_and_comes_late_does_not_stand_for_the_next_record(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that stood still may have the request of a record that has failed, and take it after the next one's."""
    wait_for_answers(monkeypatch, 1)
    writer = exposed.writer(orders, options=WriterOptions(linger_s=0.0, delivery_timeout_s=2.0))
    writer.write(b"k", b"first").result(120)
    proxy.strike(Api.PRODUCE, Point.HELD)
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, times=1_000, also=True)
    given_up = writer.write(b"k", b"given up")
    with pytest.raises(OutcomeUnknownError, match="may or may not have been written"):
        given_up.result(120)
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, after=1)  # the broker refuses the number of the first attempt
    following = writer.write(b"k", b"following")
    proxy.await_strike()
    proxy.release()
    place = following.result(120).dlsn
    assert place is not None
    found = [(message.offset(), message.value()) for _, message in read_in_order(exposed, orders)]
    assert (place.offset, b"following") in found
    assert [value for _, value in found] == [b"first", b"given up", b"following"], "the broker had both in this order"


def test_a_record_without_an_answer_fails_in_the_end_as_unknown(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_answers(monkeypatch, 1)
    writer = exposed.writer(orders, options=WriterOptions(linger_s=0.0, delivery_timeout_s=4.0))
    writer.write(b"k", b"first").result(120)
    proxy.strike(Api.PRODUCE, Point.BEFORE_ANSWER, times=1_000)
    lost = writer.write(b"k", b"second")
    with pytest.raises(OutcomeUnknownError, match="may or may not have been written"):
        lost.result(120)
    proxy.calm()
    assert writer.write(b"k", b"third").result(120).dlsn is not None
    values = [message.value() for _, message in read_in_order(exposed, orders)]
    assert values == [b"first", b"second", b"third"], "it was written, and once only"


def test_a_full_buffer_makes_writers_wait_and_then_refuses(
    exposed: rollbridge.Bridge, proxy: FaultProxy, orders: str
) -> None:
    options = WriterOptions(linger_s=0.0, buffer_bytes=4 << 20, block_s=0.5)
    writer = exposed.writer(orders, options=options)
    writer.write(b"k", b"first").result(120)
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, times=1_000_000)
    count = 0

    def write_on() -> None:
        nonlocal count
        while True:
            writer.write(b"k", b"%06d" % count + b"." * 50_000)
            count += 1

    with pytest.raises(BackpressureError, match="not written"):
        write_on()
    assert count * 50_000 < 10 << 20
    proxy.calm()
    writer.flush(60)
    values = [cast("bytes", message.value())[:6] for _, message in read_in_order(exposed, orders)]
    assert values == [b"first", *(b"%06d" % number for number in range(count))]


def test_nobody_who_writes_waits_for_a_new_producer_id(
    exposed: rollbridge.Bridge,
    client: rollbridge.Bridge,
    proxy: FaultProxy,
    orders: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for_answers(monkeypatch, 120)
    writer = exposed.writer(orders, options=WriterOptions(linger_s=0.0))
    writer.write(b"k", b"0").result(120)
    proxy.strike(Api.PRODUCE, Point.REFUSED, error=ErrorCode.unknown_producer_id)
    proxy.strike(Api.INIT_PRODUCER_ID, Point.SILENT, also=True)
    writes = [writer.write(b"k", b"1")]
    eventually(lambda: proxy.requests.count(Api.INIT_PRODUCER_ID) == 2, "a new producer id is asked for")
    beside = threading.Thread(target=lambda: writes.append(writer.write(b"k", b"2")), daemon=True)
    beside.start()
    beside.join(60)
    assert not beside.is_alive(), "it waits for a broker that is silent"
    proxy.cut_all()
    assert [write.exception(120) for write in writes] == [None, None]
    assert [message.value() for _, message in read_in_order(client, orders)] == [b"0", b"1", b"2"]


def test_records_on_their_way_to_a_stream_that_is_deleted_fail_and_others_go_on(
    exposed: rollbridge.Bridge, client: rollbridge.Bridge, proxy: FaultProxy, orders: str, payments: str
) -> None:
    writer, beside = exposed.writer(orders, options=ONE), exposed.writer(payments, options=ONE)
    writer.write(b"k", b"v").result(120)
    proxy.strike(Api.PRODUCE, Point.BEFORE_REQUEST, times=1_000_000)
    doomed = [writer.write(b"k", b"%d" % number) for number in range(10)]
    spared = [beside.write(b"k", b"%d" % number) for number in range(10)]
    proxy.await_strike()
    client.admin.delete_stream(orders)
    for future in doomed:
        assert isinstance(future.exception(60), StreamNotFoundError)
    with pytest.raises(StreamNotFoundError):
        writer.flush()
    proxy.calm()
    beside.flush(60)
    assert [future.exception(0) for future in spared] == [None] * 10
