"""Conditional writers on real topics: what they promise, and every bad input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.clients import Site
from rollbridge import ANY, DLSN, EMPTY, SN
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import Token
from rollbridge.cas.machine import Contention
from rollbridge.cas.router import SegmentRouter
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import (
    CasWriteError,
    ConfigError,
    InvalidNameError,
    InvalidRequestError,
    RecordTooLargeError,
    StreamNotFoundError,
    TransactionIdOutOfOrderError,
)
from rollbridge.metadata.catalog import Catalog
from rollbridge.stream.config import TopicLimits
from rollbridge.stream.keyspace import KeySpace, even_ranges
from rollbridge.stream.names import StreamName


@pytest.fixture
def writer(client: rollbridge.Bridge, ledger: str) -> Iterator[CasWriter]:
    with client.cas_writer(ledger) as writer:
        yield writer


def values(site: Site, stream: str) -> list[bytes | None]:
    return [message.value() for message in site.committed(stream)]


def rescale(client: rollbridge.Bridge, stream: str, segments: int) -> None:
    """Replace all segments by so many even ones."""
    numbers = [item.id.number for item in client.admin.history(stream).active.segments]
    client.admin.scale(stream, seal=numbers, ranges=[(item.low, item.high) for item in even_ranges(segments)])


def two_keys(client: rollbridge.Bridge, stream: str) -> tuple[bytes, bytes]:
    """Keys of different segments."""
    active = client.admin.history(stream).active
    found: dict[SegmentId, bytes] = {}
    for number in range(1000):
        key = b"key-%d" % number
        found.setdefault(active.segment_at(KeySpace().position(key)).id, key)
        if len(found) == 2:
            break
    one, other = found.values()
    return one, other


# What it promises ---------------------------------------------------------------------------------------------------


def test_a_first_write_expects_nothing_and_each_expects_the_one_before(
    site: Site, writer: CasWriter, ledger: str
) -> None:
    assert writer.tail() == EMPTY
    sn = writer.write(b"a", b"1", expected=EMPTY)
    for number in range(2, 6):
        assert writer.tail() == sn
        sn = writer.write(b"a", b"%d" % number, expected=sn)
    assert values(site, ledger) == [b"1", b"2", b"3", b"4", b"5"]


def test_a_refusal_by_a_look_says_what_is_in_the_successors(
    site: Site, client: rollbridge.Bridge, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that looks before it appends, and has not heard of a scale, must not answer with an old segment."""
    monkeypatch.setattr(Contention, "looks_first", lambda self: True)
    with site.connect("late") as late, late.cas_writer(ledger) as unaware, client.cas_writer(ledger) as writer:
        first = unaware.write(b"a", b"1", expected=EMPTY)
        monkeypatch.setattr(late._catalog, "_changed", lambda stream: None)
        rescale(client, ledger, 2)
        second = writer.write(b"a", b"2", expected=first)
        with pytest.raises(CasWriteError) as caught:
            unaware.write(b"a", b"no", expected=EMPTY)
        assert caught.value.actual == second


def test_a_refused_write_says_what_is_there_and_leaves_nothing(site: Site, writer: CasWriter, ledger: str) -> None:
    first = writer.write(b"a", b"1", expected=EMPTY)
    second = writer.write(b"a", b"2", expected=first)
    for stale in (EMPTY, first):
        with pytest.raises(CasWriteError, match="525") as caught:
            writer.write(b"a", b"no", expected=stale)
        assert caught.value.expected == stale
        assert caught.value.actual == second
        assert caught.value.status_code == 525
        assert caught.value.exit_code == 5
    third = writer.write(b"a", b"3", expected=second)
    assert writer.tail() == third
    assert values(site, ledger) == [b"1", b"2", b"3"]


def test_a_new_writer_finds_the_last_record_behind_many_aborted_ones(
    client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    first = writer.write(b"a", b"1", expected=EMPTY)
    second = writer.write(b"b", b"2", expected=first)
    with client.cas_writer(ledger) as loser:
        for _ in range(80):
            with pytest.raises(CasWriteError):
                loser.write(b"a", b"no", expected=first)
    with client.cas_writer(ledger) as fresh:
        assert fresh.tail() == second
        assert fresh.tail(b"a", scope="key") == first
        with pytest.raises(CasWriteError) as caught:
            fresh.write(b"a", b"no", expected=EMPTY)
        assert caught.value.actual == second
        fresh.write(b"a", b"3", expected=first, scope="key")


def test_a_run_is_written_whole_or_not_at_all(site: Site, writer: CasWriter, ledger: str) -> None:
    run = [(b"a", b"%d" % number) for number in range(50)]
    sns = writer.write_all(run, expected=EMPTY)
    assert [sn.dlsn.offset for sn in sns if sn.dlsn is not None] == list(range(50))
    with pytest.raises(CasWriteError) as caught:
        writer.write_all(run, expected=sns[-2])
    assert caught.value.actual == sns[-1]
    writer.write_all([(b"b", b"end")], expected=sns[-1])
    assert values(site, ledger) == [value for _, value in run] + [b"end"]


def test_writes_in_the_background_may_expect_each_other(site: Site, writer: CasWriter, ledger: str) -> None:
    futures = [writer.write_async(b"a", b"0", expected=EMPTY)]
    for number in range(1, 500):
        futures.append(writer.write_async(b"a", b"%d" % number, expected=futures[-1]))
    sns = [future.result(60) for future in futures]
    places = [sn.sequence_id or 0 for sn in sns]
    assert places == sorted(set(places))
    assert values(site, ledger) == [b"%d" % number for number in range(500)]


def test_writes_of_one_round_do_not_hide_what_another_expects(site: Site, writer: CasWriter, ledger: str) -> None:
    first = writer.write(b"a", b"1", expected=EMPTY)
    for _ in range(5):
        # While the first is carried out the others wait, so that they go into one round.
        writer.write_async(b"b", b"2", expected=ANY)
        refused = writer.write_async(b"a", b"no", expected=EMPTY, scope="key")
        writer.write_async(b"a", b"3", expected=ANY, scope="key")
        with pytest.raises(CasWriteError) as caught:
            refused.result(60)
        assert caught.value.actual == first
        writer.flush()
        first = writer.tail(b"a", scope="key")
    assert b"no" not in values(site, ledger)


def test_it_holds_against_plain_producers_and_transactions(
    site: Site, client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    first = writer.write(b"a", b"1", expected=EMPTY)
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "enable.idempotence": True})
    producer.produce(StreamName.parse(ledger).segment_topic(SegmentId.of(0, 0)), b"plain", b"a")
    assert producer.flush(120) == 0
    with pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"no", expected=first)
    second = caught.value.actual
    assert second == writer.tail()
    with client.transaction(ledger) as txn:
        future = txn.write(ledger, key=b"b", value=b"merged")
    merged = future.result(120)
    with pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"no", expected=second)
    assert caught.value.actual.dlsn == merged
    writer.write(b"a", b"2", expected=merged)
    assert values(site, ledger) == [b"1", b"plain", b"merged", b"2"]


def test_after_a_scale_the_sealed_predecessor_is_honoured_in_empty_successors(
    site: Site, client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    first = writer.write(b"a", b"1", expected=EMPTY)
    rescale(client, ledger, 2)
    one, other = two_keys(client, ledger)
    for key in (one, other):
        assert writer.tail(key) == first
        with pytest.raises(CasWriteError) as caught:
            writer.write(key, b"no", expected=EMPTY)
        assert caught.value.actual == first
        second = writer.write(key, b"2", expected=first)
        assert second.dlsn is not None
        assert second.dlsn.epoch == 1
        assert (second.sequence_id or 0) > (first.sequence_id or 0)
        with pytest.raises(CasWriteError):
            writer.write(key, b"no", expected=first)
    rescale(client, ledger, 1)
    # Both segments go on in one; each key still sees the last record of its own way.
    assert writer.tail(one) != writer.tail(other)
    third = writer.write(one, b"3", expected=writer.tail(one))
    assert writer.tail(other) == third
    assert writer.tail(b"a", scope="key") == first
    assert values(site, ledger).count(b"no") == 0


def test_a_writer_that_knows_nothing_of_a_scale_follows_it(
    site: Site, client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    sn = writer.write(b"a", b"0", expected=EMPTY)
    with site.connect("scaler") as scaler:
        for number in range(1, 30):
            if number % 10 == 0:
                rescale(scaler, ledger, 1 + number // 10)
            sn = writer.write(b"a", b"%d" % number, expected=sn)
    assert values(site, ledger) == [b"%d" % number for number in range(30)]


def test_a_rolling_commit_counts_as_the_last_record(
    site: Site, client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    txn = client.begin(ledger)
    merged = txn.write(ledger, key=b"a", value=b"rolled")
    first = writer.write(b"a", b"1", expected=EMPTY)
    rescale(client, ledger, 1)
    second = writer.write(b"a", b"2", expected=first)
    txn.commit()
    with pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"no", expected=second)
    assert caught.value.actual.dlsn == merged.result(120)
    third = writer.write(b"a", b"3", expected=caught.value.actual)
    assert (third.sequence_id or 0) > (caught.value.actual.sequence_id or 0) > (second.sequence_id or 0)
    assert values(site, ledger) == [b"1", b"2", b"rolled", b"3"]


def test_a_write_can_be_asked_about_and_repeated_by_its_token(site: Site, writer: CasWriter, ledger: str) -> None:
    token = writer.token(b"a", expected=EMPTY)
    assert writer.outcome(str(token)) is None
    sn = writer.write(b"a", b"1", expected=EMPTY, token=token)
    assert writer.outcome(token) == sn
    assert writer.write(b"a", b"1", expected=EMPTY, token=str(token)) == sn
    later = writer.write(b"a", b"2", expected=sn)
    assert writer.write(b"a", b"1", expected=EMPTY, token=Token.parse(str(token))) == sn
    with pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"no", expected=EMPTY)
    assert caught.value.actual == later
    assert values(site, ledger) == [b"1", b"2"]


def test_a_falling_transaction_id_is_refused_against_the_log_where_that_was_asked_for(
    site: Site, client: rollbridge.Bridge, writer: CasWriter, ledger: str
) -> None:
    def refusal(strict: CasWriter, key: bytes, number: int) -> tuple[int, int]:
        with pytest.raises(TransactionIdOutOfOrderError, match="nothing was written") as caught:
            strict.write(key, b"no", expected=ANY, transaction_id=number)
        return caught.value.transaction_id, caught.value.last

    with client.writer(ledger) as plain:
        plain.write(b"a", b"1", transaction_id=7)
    # Further back than a new writer looks at first, and behind records that have none.
    writer.write_all([(b"a", b"2")] * 700, expected=ANY)
    with client.cas_writer(ledger, monotonic_ids=True) as strict:
        assert refusal(strict, b"a", 6) == (6, 7)
        strict.write(b"a", b"3", expected=ANY, transaction_id=7)
        with pytest.raises(TransactionIdOutOfOrderError) as caught:
            strict.write_all([(b"a", b"no")] * 3, expected=ANY, transaction_ids=[8, 9, 8])
        assert (caught.value.transaction_id, caught.value.last) == (8, 9)
        chain = [strict.write_async(b"a", b"4", expected=ANY, transaction_id=number) for number in (8, 10, 9, 10)]
        assert [future.exception() is None for future in chain] == [True, True, False, True]
    writer.write(b"a", b"5", expected=ANY, transaction_id=3)
    rescale(client, ledger, 2)
    with client.cas_writer(ledger, monotonic_ids=True) as strict:
        for key in two_keys(client, ledger):
            assert refusal(strict, key, 2) == (2, 3)
            strict.write(key, b"6", expected=ANY, transaction_id=3)
    assert [value for value in values(site, ledger) if value != b"2"] == [
        b"1",
        b"3",
        b"4",
        b"4",
        b"4",
        b"5",
        b"6",
        b"6",
    ]


def test_two_writers_of_one_client_do_not_fence_each_other(client: rollbridge.Bridge, ledger: str) -> None:
    with client.cas_writer(ledger) as one, client.cas_writer(ledger) as other:
        sn = one.write(b"a", b"1", expected=EMPTY)
        for _ in range(5):
            sn = other.write(b"a", b"2", expected=sn)
            sn = one.write(b"a", b"1", expected=sn)


def test_timestamps_of_the_caller_are_kept(client: rollbridge.Bridge, writer: CasWriter, ledger: str) -> None:
    sn = writer.write(b"a", b"1", expected=EMPTY, timestamp=1_000_000)
    writer.write_all([(b"a", b"2"), (b"a", b"3")], expected=sn, timestamp=2_000_000)
    with pytest.raises(InvalidRequestError, match="before 1970"):
        writer.write(b"a", b"no", expected=ANY, timestamp=-1)
    with client.reader(ledger, follow=False) as reader:
        assert [record.timestamp_ms for record in reader] == [1_000_000, 2_000_000, 2_000_000]


# Bad input ----------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused(writer: CasWriter) -> None:
    pair: list[tuple[bytes, bytes]] = [(b"a", b"no"), (b"b", b"no")]
    wrong: list[tuple[str | None, Callable[[], object]]] = [
        ("needs a key", lambda: writer.write(None, b"no", expected=EMPTY, scope="key")),
        ("needs a key", lambda: writer.tail(scope="key")),
        ("segment or key", lambda: writer.write(b"a", b"no", expected=EMPTY, scope="stream")),
        ("at least one", lambda: writer.write_all([], expected=EMPTY)),
        ("exceeds 900000", lambda: writer.write_all([(b"a", bytes(300_000))] * 4, expected=EMPTY)),
        ("have one key", lambda: writer.write_all(pair, expected=EMPTY, scope="key")),
        ("1 transaction ids for 2", lambda: writer.write_all(pair, expected=EMPTY, transaction_ids=[1])),
        ("headers for 1 of 2", lambda: writer.write_all(pair, expected=EMPTY, headers=[[("n", b"1")]])),
        ("are ours", lambda: writer.write(b"a", b"no", expected=EMPTY, headers=[("rollbridge-cas", b"x")])),
        ("not a token", lambda: writer.outcome("nonsense")),
        ("other than ANY", lambda: writer.token(b"a", expected=ANY)),
    ]
    for number in (-1, 1 << 63):
        wrong.append(("transaction id", partial(writer.write, b"a", b"no", expected=EMPTY, transaction_id=number)))
    for expected in (-1, 1 << 63, True, "seq=1", None, 1.5):
        wrong.append((None, partial(writer.write, b"a", b"no", expected=expected)))  # type: ignore[arg-type]
    for words, attempt in wrong:
        with pytest.raises(InvalidRequestError, match=words):
            attempt()
    token = writer.token(b"a", expected=EMPTY)
    with pytest.raises(InvalidRequestError, match="another key or expectation"):
        writer.write(b"b", b"no", expected=EMPTY, token=token)


def test_a_number_alone_is_refused_with_the_way_to_say_either_id(site: Site, writer: CasWriter, ledger: str) -> None:
    said = r"SN\(sequence_id=5\).*SN\(transaction_id=5\).*nothing was written"
    number: Any = 5
    with pytest.raises(InvalidRequestError, match=said):
        writer.write(b"a", b"no", expected=number)
    with pytest.raises(InvalidRequestError, match=said):
        writer.write_all([(b"a", b"no")], expected=number, scope="key")
    with pytest.raises(InvalidRequestError, match=said):
        writer.write_async(b"a", b"no", expected=number)
    with pytest.raises(InvalidRequestError, match=said):
        writer.token(b"a", expected=number)
    assert values(site, ledger) == []


@pytest.mark.parametrize("dlsn", [DLSN(0, 3, 0), DLSN(9, 0, 0)])
@pytest.mark.parametrize("about", ["segment", "key"])
def test_an_sn_of_another_stream_is_refused(site: Site, writer: CasWriter, ledger: str, dlsn: DLSN, about: str) -> None:
    with pytest.raises(InvalidRequestError, match="another stream"):
        writer.write(b"a", b"no", expected=dlsn, scope=about)
    assert values(site, ledger) == []


@pytest.mark.parametrize("about", ["segment", "key"])
def test_an_sn_beyond_the_tail_is_refused(writer: CasWriter, about: str) -> None:
    sn = writer.write(b"a", b"1", expected=EMPTY)
    with pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"no", expected=SN(sequence_id=1_000_000), scope=about)
    assert caught.value.actual == sn


def test_a_stream_that_does_not_exist(client: rollbridge.Bridge, ledger: str) -> None:
    with pytest.raises(StreamNotFoundError):
        client.cas_writer(f"{ledger}-no")
    with raises_code("scope-not-found"):
        client.cas_writer("nobody-made-this/ledger")
    with pytest.raises(StreamNotFoundError, match="no stream has adopted topic ledger"):
        client.cas_writer("ledger")
    with pytest.raises(InvalidNameError):
        client.cas_writer("__ledger")


def test_each_record_of_a_run_has_headers_of_its_own(client: rollbridge.Bridge, writer: CasWriter, ledger: str) -> None:
    writer.write_all([(b"a", b"1"), (b"a", b"2")], expected=EMPTY, headers=[[("n", b"one")], [("n", b"two")]])
    with client.reader(ledger, follow=False) as reader:
        assert [dict(record.headers)["n"] for record in reader] == [b"one", b"two"]


def test_a_run_across_two_segments_is_refused_with_a_hint(site: Site, client: rollbridge.Bridge, orders: str) -> None:
    one, other = two_keys(client, orders)
    with client.cas_writer(orders) as writer:
        with pytest.raises(InvalidRequestError, match="write them as a transaction"):
            writer.write_all([(one, b"no"), (other, b"no")], expected=EMPTY)
        with pytest.raises(InvalidRequestError, match="key is needed"):
            writer.tail()
        with pytest.raises(InvalidRequestError, match="needs a key"):
            writer.write(None, b"no", expected=EMPTY)
    assert values(site, orders) == []


def test_a_record_that_is_too_large_is_refused(writer: CasWriter) -> None:
    with pytest.raises(RecordTooLargeError):
        writer.write(b"a", bytes(1_100_000), expected=EMPTY)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeouts_that_are_not_positive_are_refused(client: rollbridge.Bridge, ledger: str, timeout: float) -> None:
    with pytest.raises(InvalidRequestError, match="must be positive"):
        client.cas_writer(ledger, timeout=timeout)


def test_a_transaction_timeout_beyond_the_brokers_limit_is_refused(client: rollbridge.Bridge, ledger: str) -> None:
    with (
        client.cas_writer(ledger, transaction_timeout=86_400) as writer,
        pytest.raises(ConfigError, match="TRANSACTION_TIMEOUT"),
    ):
        writer.write(b"a", b"no", expected=EMPTY)


def test_a_closed_writer_says_so(client: rollbridge.Bridge, ledger: str) -> None:
    writer = client.cas_writer(ledger)
    writer.write(b"a", b"1", expected=EMPTY)
    writer.close()
    writer.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        writer.write(b"a", b"no", expected=ANY)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_deleted_stream_is_noticed(
    site: Site, writer: CasWriter, ledger: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(b"a", b"1", expected=EMPTY)
    if not is_told:
        monkeypatch.setattr(Catalog, "_changed", lambda *_: None)  # as if ZooKeeper's notice were still on its way
    with site.connect("deleter") as deleter:
        deleter.admin.delete_stream(ledger)
    with pytest.raises(StreamNotFoundError):
        writer.write(b"a", b"no", expected=ANY)


def test_writes_that_wait_while_their_stream_goes_are_told_so(
    client: rollbridge.Bridge, writer: CasWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caller = threading.current_thread()
    limits: Callable[[SegmentRouter], TopicLimits | None] = vars(SegmentRouter)["limits"].fget

    def gone_for_workers(router: SegmentRouter) -> TopicLimits | None:
        if threading.current_thread() is not caller:
            raise StreamNotFoundError(f"stream {router.stream} does not exist")
        return limits(router)

    with monkeypatch.context() as patched:
        patched.setattr(SegmentRouter, "limits", property(gone_for_workers))
        for future in [writer.write_async(b"a", b"no", expected=ANY) for _ in range(3)]:
            assert isinstance(future.exception(60), StreamNotFoundError)
    assert "defect" not in caplog.text
    writer.write(b"a", b"yes", expected=EMPTY)
