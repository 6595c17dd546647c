"""Transactions with conditions on real topics: committed only if the streams are where their client believes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.coordinators import controller_epoch
from integration_tests.kafka_tools import create_topic, produce
from rollbridge import ANY, EMPTY, SN
from rollbridge.base.sn import DLSN
from rollbridge.errors import (
    CasWriteError,
    InvalidRequestError,
    StreamNotFoundError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionRefusedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import batch_of_one
from rollbridge.stream.conditions import CONDITIONS_MAX, Condition, Scope
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, SegmentPlaces, StreamName
from rollbridge.stream.reading import KeyLineage
from rollbridge_coordinator.core.condition_reader import ConditionReader
from rollbridge_coordinator.core.effects import Found, Query, Span, Undecided


def values(site: Site, stream: str) -> list[bytes | None]:
    return [message.value() for message in site.committed(stream)]


def topic_of(client: rollbridge.Bridge, stream: str) -> str:
    """The topic of the only active segment."""
    (segment,) = client.admin.history(stream).active.segments
    return StreamName.parse(stream).segment_topic(segment.id)


def write_if(client: rollbridge.Bridge, stream: str, key: bytes, value: bytes, sn: SN, scope: str = "segment") -> DLSN:
    """One record in a transaction that depends on ``sn``; gives where it stands."""
    transaction = client.begin(stream)
    transaction.expect(stream, key=key, sn=sn, scope=scope)
    written = transaction.write(stream, key=key, value=value)
    transaction.commit()
    return written.result()


def test_a_transaction_commits_if_the_stream_is_where_it_expects_it(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    sn = EMPTY
    for number in range(5):
        sn = SN(dlsn=write_if(client, ledger, b"acct-7", b"%d" % number, sn))
    with client.cas_writer(ledger) as writer:
        assert sn.matches(writer.tail())
        sn = writer.write(b"acct-7", b"5", expected=sn)
    write_if(client, ledger, b"acct-7", b"6", sn)
    assert values(site, ledger) == [b"%d" % number for number in range(7)]


@pytest.mark.parametrize("within", ["segment", "key"])
@pytest.mark.parametrize("size", [0, 24])
@pytest.mark.parametrize("name", ["\udcff\udcfe", "", "rollbridge", "rollbridge-late", "h" * 300])
def test_what_a_stranger_writes_is_noticed_whatever_its_headers(
    site: Site, client: rollbridge.Bridge, ledger: str, name: str, size: int, within: Scope
) -> None:
    with client.cas_writer(ledger) as writer:
        known = writer.write(b"a", b"0", expected=EMPTY, scope=within)
        with KafkaClient(site.cluster.bootstrap_servers).appender(f"foreign-{ledger}") as foreign:
            foreign.init()
            foreign.append([(topic_of(client, ledger), batch_of_one(1, b"a", b"foreign", [(name, b"x" * size)]))])
            foreign.commit()
        with pytest.raises(CasWriteError) as caught:
            writer.write(b"a", b"1", expected=known, scope=within)
        assert caught.value.actual is not None
        with pytest.raises(TransactionRefusedError):
            write_if(client, ledger, b"a", b"2", known, within)
        writer.write(b"a", b"3", expected=caught.value.actual, scope=within)
    assert values(site, ledger) == [b"0", b"foreign", b"3"]


@pytest.mark.parametrize("within", ["segment", "key"])
def test_a_record_whose_header_name_is_no_text_is_a_record_like_others(
    site: Site, client: rollbridge.Bridge, ledger: str, within: str
) -> None:
    with KafkaClient(site.cluster.bootstrap_servers).appender(f"foreign-{ledger}") as foreign:
        foreign.init()
        foreign.append([(topic_of(client, ledger), batch_of_one(1, b"a", b"foreign", [("\udcff\udcfe", b"x")]))])
        foreign.commit()
    term = controller_epoch(client._metadata.session, GroupName(StreamName.parse(ledger).scope))
    with client.cas_writer(ledger) as writer, pytest.raises(CasWriteError) as caught:
        writer.write(b"a", b"1", expected=EMPTY, scope=within)
    assert caught.value.actual is not None
    sn = SN(dlsn=write_if(client, ledger, b"a", b"2", caught.value.actual, within))
    with client.cas_writer(ledger) as writer:
        writer.write(b"a", b"3", expected=sn, scope=within)
    assert values(site, ledger) == [b"foreign", b"2", b"3"]
    assert controller_epoch(client._metadata.session, GroupName(StreamName.parse(ledger).scope)) == term


@pytest.mark.parametrize("within", ["segment", "key"])
def test_a_refused_transaction_leaves_nothing_and_says_what_is_there(
    site: Site, client: rollbridge.Bridge, ledger: str, orders: str, within: str
) -> None:
    with client.cas_writer(ledger) as writer, client.writer(ledger) as plain:
        first = writer.write(b"a", b"1", expected=EMPTY)
        transaction = client.begin(ledger, orders)
        transaction.expect(ledger, key=b"a", sn=first, scope=within)
        lost = [transaction.write(stream, key=b"a", value=b"no") for stream in (ledger, orders)]
        second = plain.write(b"a", b"2").result(120)
        with pytest.raises(TransactionRefusedError, match="525") as caught:
            transaction.commit()
        error = caught.value
        assert isinstance(error, CasWriteError)
        assert isinstance(error, TransactionAbortedError)
        assert (error.status_code, error.stream, error.key) == (525, ledger, b"a")
        assert error.expected == first
        assert second.matches(error.actual)
        for future in lost:
            with pytest.raises(TransactionRefusedError):
                future.result(120)
        with pytest.raises(TransactionClosedError):
            transaction.expect(ledger, key=b"a", sn=second)
        write_if(client, ledger, b"a", b"3", error.actual, within)
    assert values(site, ledger) == [b"1", b"2", b"3"]
    assert values(site, orders) == []


def test_other_keys_matter_to_the_segment_and_not_to_the_key(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    with client.cas_writer(ledger) as writer:
        mine = writer.write(b"a", b"1", expected=EMPTY)
        other = writer.write(b"b", b"2", expected=mine)
    with pytest.raises(TransactionRefusedError) as caught:
        write_if(client, ledger, b"a", b"no", mine)
    assert caught.value.actual == other
    write_if(client, ledger, b"a", b"3", mine, "key")
    write_if(client, ledger, b"c", b"4", EMPTY, "key")
    with pytest.raises(TransactionRefusedError):
        write_if(client, ledger, b"c", b"no", EMPTY, "key")
    assert values(site, ledger) == [b"1", b"2", b"3", b"4"]


def test_a_stream_that_is_not_written_can_be_depended_on_and_all_conditions_must_hold(
    site: Site, client: rollbridge.Bridge, ledger: str, orders: str
) -> None:
    with client.cas_writer(ledger) as writer:
        sn = writer.write(b"a", b"1", expected=EMPTY)
        transaction = client.begin(orders, ledger)
        transaction.expect(ledger, key=b"a", sn=sn)
        transaction.expect(orders, key=b"k", sn=EMPTY, scope="key")
        transaction.expect(orders, key=b"k", sn=ANY)
        transaction.write(orders, key=b"k", value=b"yes")
        transaction.commit()
        changed = writer.write(b"a", b"2", expected=sn)
    transaction = client.begin(orders, ledger)
    transaction.expect(orders, key=b"other", sn=EMPTY, scope="key")
    transaction.expect(ledger, key=b"a", sn=sn)
    transaction.write(orders, key=b"k", value=b"no")
    with pytest.raises(TransactionRefusedError) as caught:
        transaction.commit()
    assert (caught.value.stream, caught.value.actual) == (ledger, changed)
    empty = client.begin(ledger)
    empty.expect(ledger, sn=changed)
    assert empty.commit().records == 0
    assert values(site, orders) == [b"yes"]


def test_contenders_with_and_without_transactions_lose_no_update(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    """Each adds one to a number, with what it read as the condition."""

    def add(kind: int) -> None:
        done = 0
        with client.cas_writer(ledger) as writer:
            while done < 8:
                sn = writer.tail(b"n", scope="key")
                value = b"%d" % (1 + (0 if sn.empty else last_number(client, ledger, sn)))
                try:
                    if kind:
                        writer.write(b"n", value, expected=sn, scope="key")
                    else:
                        write_if(client, ledger, b"n", value, sn, "key")
                    done += 1
                except CasWriteError:
                    continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [0, 1, 0, 1]))
    assert values(site, ledger) == [b"%d" % number for number in range(1, 33)]


def last_number(client: rollbridge.Bridge, stream: str, sn: SN) -> int:
    with client.reader(stream, start=sn, follow=False) as reader:
        return int(next(iter(reader)).value or b"")


def test_impossible_conditions_are_refused_at_once(client: rollbridge.Bridge, ledger: str, orders: str) -> None:
    transaction = client.begin(orders)
    with pytest.raises(StreamNotFoundError):
        transaction.expect(f"{ledger}-of-nobody", sn=EMPTY)
    with pytest.raises(InvalidRequestError, match="several segments: a condition needs a key"):
        transaction.expect(orders, sn=EMPTY)
    with pytest.raises(InvalidRequestError, match="a key is bytes, not str"):
        transaction.expect(orders, key="k", sn=EMPTY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="cannot hold records of this key"):
        transaction.expect(orders, key=b"k", sn=SN(dlsn=DLSN(7, 9, 0)))
    with pytest.raises(InvalidRequestError, match="cannot be expected"):
        transaction.expect(orders, key=b"k", sn="seq=1")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"SN\(sequence_id=5\).*SN\(transaction_id=5\)"):
        transaction.expect(orders, key=b"k", sn=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="is not a scope"):
        transaction.expect(orders, key=b"k", sn=EMPTY, scope="stream")
    for _ in range(CONDITIONS_MAX):
        transaction.expect(orders, key=b"k", sn=ANY)
    with pytest.raises(InvalidRequestError, match=f"at most {CONDITIONS_MAX} conditions"):
        transaction.expect(orders, key=b"k", sn=ANY)
    assert transaction.commit().records == 0, "what was refused is not part of it, the others hold"


def test_an_sn_beyond_the_tail_is_refused_with_what_is_there(client: rollbridge.Bridge, ledger: str) -> None:
    with client.cas_writer(ledger) as writer:
        sn = writer.write(b"a", b"1", expected=EMPTY)
    for scope in ("segment", "key"):
        with pytest.raises(TransactionRefusedError) as caught:
            write_if(client, ledger, b"a", b"no", SN(sequence_id=1_000), scope)
        assert caught.value.actual == sn


# How the leader looks ------------------------------------------------------------------------------------------------


@pytest.fixture
def outlook(site: Site) -> Iterator[ConditionReader]:
    with closing(KafkaClient(site.cluster.bootstrap_servers).log()) as log:
        yield ConditionReader(log)


def test_records_of_others_between_own_ones_are_noticed_if_they_are_in_scope(
    site: Site, outlook: ConditionReader, scope: str
) -> None:
    stream = StreamName.parse(f"{scope}/looked-at")
    history = EpochHistory.create(even_ranges(1), 0)
    topic = stream.segment_topic(history.active.segments[0].id)
    create_topic(site.cluster.bootstrap_servers, topic)
    produce(site.cluster.bootstrap_servers, topic, [b"mine", b"other", b"mine", b"mine"])

    def look(kind: Scope, key: bytes, own: tuple[Span, ...]) -> Found:
        query = Query(
            SegmentPlaces(stream), KeyLineage(history, 0.0), Condition(EMPTY, kind, key), None, own[0].start, own
        )
        (answer,) = outlook.look([query])
        assert not isinstance(answer, Undecided)
        return answer

    apart, together = (Span(0, 1), Span(2, 4)), (Span(2, 3), Span(3, 4))
    assert look(Scope.SEGMENT, b"k", apart) == Found(EMPTY, 0, disturbed=True)
    assert look(Scope.KEY, b"k", apart) == Found(EMPTY, 0, disturbed=False), "records without a key are none with it"
    assert not look(Scope.SEGMENT, b"k", together).disturbed
    assert look(Scope.SEGMENT, b"k", together).last.sequence_id == 1
