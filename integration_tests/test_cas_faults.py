"""Conditional writes when answers are lost, connections break and writers die: never doubled, never guessed."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise

import psutil
import pytest
from kazoo.security import OPEN_ACL_UNSAFE, make_acl

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.patience import PATIENCE_S
from rollbridge import ANY, DLSN, EMPTY
from rollbridge.base.ids import SegmentId
from rollbridge.cas.session import take_slot, transactional_ids
from rollbridge.errors import CasOutcomeUnknownError, CasWriteError, UnavailableError
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import BatchBuilder
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import StreamName

LOST = [Point.BEFORE_REQUEST, Point.AFTER_REQUEST, Point.BEFORE_ANSWER]


def values(site: Site, stream: str) -> list[bytes | None]:
    return [message.value() for message in site.committed(stream)]


def open_by_hand(site: Site, stream: str, value: bytes) -> tuple[TransactionalAppender, int]:
    """A native transaction of somebody else, left open."""
    appender = KafkaClient(site.cluster.bootstrap_servers).appender(f"{stream}-by-hand")
    appender.init()
    builder = BatchBuilder(1 << 10)
    builder.append(0, b"a", value)
    topic = StreamName.parse(stream).segment_topic(SegmentId.of(0, 0))
    return appender, appender.append([(topic, builder.build())])[0]


@pytest.mark.parametrize("point", LOST)
@pytest.mark.parametrize("api", [Api.PRODUCE, Api.END_TXN])
def test_a_lost_answer_is_looked_into_and_nothing_is_written_twice(
    site: Site,
    client: rollbridge.Bridge,
    ledger: str,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    api: Api,
    point: Point,
) -> None:
    caplog.set_level(logging.DEBUG, "rollbridge.kafka.appender")
    with client.cas_writer(ledger) as writer:
        sn = writer.write(b"a", b"0", expected=EMPTY)
        for number in range(1, 4):
            proxy.strike(api, point)
            sn = writer.write(b"a", b"%d" % number, expected=sn)
            proxy.await_strike()
        assert writer.tail() == sn
    assert values(site, ledger) == [b"0", b"1", b"2", b"3"]
    said = [record.getMessage() for record in caplog.records if record.name == "rollbridge.kafka.appender"]
    for line, next_line in pairwise(said):
        if " operation=append result=unknown " in line:  # its open transaction is aborted before anything else
            assert next_line.startswith(line.partition(" operation=")[0] + " operation=init result=ok ")


@pytest.mark.parametrize("point", LOST)
def test_a_refusal_whose_abort_is_lost_leaves_nothing(
    site: Site, client: rollbridge.Bridge, ledger: str, proxy: FaultProxy, point: Point
) -> None:
    with site.connect("other") as other, other.cas_writer(ledger) as earlier:
        first = earlier.write(b"a", b"1", expected=EMPTY)
    with client.cas_writer(ledger) as writer:
        proxy.strike(Api.END_TXN, point)
        with pytest.raises(CasWriteError) as caught:
            writer.write(b"a", b"no", expected=EMPTY)
        assert caught.value.actual == first
        proxy.await_strike()
        for number in range(2, 6):  # all transactional ids of the writer are used again
            first = writer.write(b"a", b"%d" % number, expected=first)
    assert values(site, ledger) == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("api", [Api.FETCH, Api.LIST_OFFSETS, Api.PRODUCE, Api.END_TXN])
def test_no_call_outlives_its_time_out_by_another_one(
    client: rollbridge.Bridge, ledger: str, proxy: FaultProxy, api: Api
) -> None:
    """A broker that is silent has half a minute for an answer, elsewhere."""
    with client.cas_writer(ledger, timeout=3) as writer:
        sn = writer.write(b"a", b"1", expected=EMPTY)
        proxy.strike(api, Point.SILENT, times=100_000)
        calls: list[Callable[[], object]] = [writer.tail, partial(writer.write, b"a", b"2", expected=sn)]
        for ask in calls:
            began = time.monotonic()
            with suppress(UnavailableError, CasOutcomeUnknownError):  # not each asks for everything
                ask()
            assert time.monotonic() - began < 20
        proxy.calm()
        assert writer.write(b"a", b"3", expected=ANY) == writer.tail()


def test_an_outcome_that_nobody_can_tell_is_called_unknown_and_can_be_asked_for(
    site: Site, client: rollbridge.Bridge, ledger: str, proxy: FaultProxy
) -> None:
    with client.cas_writer(ledger, timeout=5) as writer:
        first = writer.write(b"a", b"1", expected=EMPTY)
        # The commit reaches the broker; from then on the coordinator does not answer this client any more.
        proxy.strike(Api.END_TXN, Point.AFTER_REQUEST, times=100_000)
        with pytest.raises(CasOutcomeUnknownError) as caught:
            writer.write(b"a", b"2", expected=first)
        proxy.calm()
        token = caught.value.token
        assert token.place is not None
        second = writer.outcome(str(token))
    with client.cas_writer(ledger) as another:
        assert another.outcome(token) == second
        assert another.tail() == (second or first)
    assert values(site, ledger) == ([b"1", b"2"] if second else [b"1"])


def test_a_write_waits_for_earlier_transactions_and_outlives_its_own_time_out(
    site: Site, client: rollbridge.Bridge, ledger: str
) -> None:
    appender, offset = open_by_hand(site, ledger, b"earlier")
    found: list[object] = []

    def write() -> None:
        with client.cas_writer(ledger, transaction_timeout=1) as writer:
            try:
                found.append(writer.write(b"a", b"later", expected=DLSN(0, 0, offset)))
            except CasWriteError as refusal:
                found.append(refusal)

    thread = threading.Thread(target=write)
    thread.start()
    # It has given up and tried again a few times meanwhile, so that its own transaction never gets too old.
    until(lambda: appender.end_offset(StreamName.parse(ledger).segment_topic(SegmentId.of(0, 0))) > offset + 3)
    assert thread.is_alive()
    appender.commit()
    appender.close()
    thread.join(PATIENCE_S)
    assert isinstance(found[0], rollbridge.SN)
    assert values(site, ledger) == [b"earlier", b"later"]


def test_a_writer_that_lost_its_slot_takes_another_and_goes_on(
    site: Site, client: rollbridge.Bridge, ledger: str, caplog: pytest.LogCaptureFixture
) -> None:
    with client.cas_writer(ledger) as writer:
        sn = writer.write(b"a", b"1", expected=EMPTY)
        usurpers = [
            KafkaClient(site.cluster.bootstrap_servers).appender(identifier)
            for identifier in transactional_ids(StreamName.parse(ledger), 0)
        ]
        for usurper in usurpers:
            usurper.init()
        for number in range(2, 6):
            sn = writer.write(b"a", b"%d" % number, expected=sn)
        for usurper in usurpers:
            usurper.close()
    assert "slot.lost stream=" in caplog.text
    assert values(site, ledger) == [b"1", b"2", b"3", b"4", b"5"]


def connections_to(address: str) -> int:
    """How many this process has."""
    port = int(address.rpartition(":")[2])
    return sum(bool(item.raddr) and item.raddr.port == port for item in psutil.Process().net_connections("tcp"))


def close_without_its_slot(bootstrap_servers: str, zookeeper: str, root: str, ledger: str) -> None:
    """Close a client that has written in both ways, whose slot an administrator or a stranger has locked."""
    slots = paths.cas_slots(StreamName.parse(ledger))
    with ZooKeeperSession(zookeeper, root=root) as session:
        client = rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, zookeeper_root=root, client_name="closer")
        with client.writer(ledger) as plain:
            plain.write(b"a", b"plain").result()
        writer = client.cas_writer(ledger)
        writer.write(b"a", b"conditional", expected=writer.tail(b"a"))
        assert connections_to(bootstrap_servers)
        session.set_acl(slots, [make_acl("world", "anyone", read=True, admin=True)])
        try:
            client.close()
        finally:
            session.set_acl(slots, OPEN_ACL_UNSAFE)
    until(lambda: not connections_to(bootstrap_servers))


def test_a_connection_is_closed_whole_although_its_slot_can_not_be_given_back(site: Site, ledger: str) -> None:
    # In a process of its own: the clients of other tests open and close connections in this one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        alone.submit(
            close_without_its_slot, site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root, ledger
        ).result()


def test_slots_are_numbered_from_the_lowest_that_is_free(site: Site, client: rollbridge.Bridge, ledger: str) -> None:
    name = StreamName.parse(ledger)
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        slots = [take_slot(session, name, "tester") for _ in range(3)]
        assert [slot.name for slot in slots] == ["0", "1", "2"]
        slots[1].give_up()
        slots[1].give_up()
        assert take_slot(session, name, "tester").name == "1"
        assert [slot.is_held for slot in slots] == [True, False, True]
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        assert take_slot(session, name, "tester").name == "0"
