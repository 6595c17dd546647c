"""The parts of the demo that need neither Spark nor the flights' package; ``make demo`` itself tests the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import eventually
from spark_examples.demo import common, scaling
from spark_examples.demo import gateway as gateways
from spark_examples.demo.cas import ACCOUNT, Ledger, Place, balances, race
from spark_examples.demo.common import longest_silence
from spark_examples.demo.flights import carriers_of, parse_value, record, tail_numbers_of
from spark_examples.demo.native_rival import NativeRival
from spark_examples.demo.plain_reader import PlainReader
from spark_examples.demo.rolling import duration, takeover, waits
from spark_examples.demo.small_writer import Commit

WITH_TAIL = b"2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
WITHOUT_TAIL = b"2013,1,2,NA,1545,NA,NA,1910,NA,AA,133,NA,JFK,LAX,NA,2475,15,45,2013-01-02T20:00:00Z"
SAMPLE = [WITH_TAIL, WITHOUT_TAIL, WITH_TAIL]


def counts_are(reader: PlainReader, flights: int, small_records: int) -> None:
    eventually(lambda: reader.counts() == (flights, small_records), "the reader has all there is")


# -- the input ------------------------------------------------------------------------------------


def test_a_flight_is_keyed_by_its_aircraft_and_numbered() -> None:
    assert record(7, WITH_TAIL) == (b"N14228", b"7," + WITH_TAIL)
    assert parse_value(b"7," + WITH_TAIL) == (7, b"UA")


def test_a_flight_without_an_aircraft_has_no_key() -> None:
    assert record(0, WITHOUT_TAIL)[0] is None


def test_flights_are_counted_by_carrier_and_aircraft() -> None:
    assert carriers_of(SAMPLE) == {"AA": 1, "UA": 2}
    assert tail_numbers_of(SAMPLE) == [b"N14228"]


# -- the plain reader -----------------------------------------------------------------------------


@pytest.fixture
def reader(cluster: AnyCluster, topic_prefix: str) -> Iterator[PlainReader]:
    reader = PlainReader(cluster.bootstrap_servers, rf"{re.escape(topic_prefix)}\.segment-[0-9]+", topic_prefix)
    yield reader
    reader.close()


def small(number: int, records: int = 2) -> list[bytes]:
    return [b'{"note": %d, "place": %d}' % (number, place) for place in range(records)]


def test_the_reader_goes_on_in_old_topics_and_finds_new_ones(
    cluster: AnyCluster, topic_prefix: str, reader: PlainReader
) -> None:
    servers = cluster.bootstrap_servers
    first, second, other = (f"{topic_prefix}.{name}" for name in ("segment-1", "segment-2", "buffer"))
    for topic in (first, other):
        create_topic(servers, topic)
    produce(servers, other, small(9))
    produce(servers, first, small(1))
    counts_are(reader, 0, 2)
    create_topic(servers, second)
    produce(servers, second, small(2))
    produce(servers, first, small(3))
    counts_are(reader, 0, 6)
    seen = reader.seen()
    assert seen.notes == {1: 2, 2: 2, 3: 2}
    assert seen.topics.keys() == {first, second}
    assert seen.found_s[2] == seen.topics[second]
    assert seen.found_s[3] == seen.topics[first] < seen.arrived_s[3]
    assert seen.doubled == 0


def test_the_reader_sees_nothing_of_an_open_transaction(
    cluster: AnyCluster, topic_prefix: str, reader: PlainReader
) -> None:
    servers, first, second = cluster.bootstrap_servers, f"{topic_prefix}.segment-1", f"{topic_prefix}.segment-2"
    for topic in (first, second):
        create_topic(servers, topic)
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic_prefix})
    producer.init_transactions(30)
    producer.begin_transaction()
    for row, line in enumerate(SAMPLE):
        key, value = record(row, line)
        producer.produce(first, value, key, partition=0)
    assert producer.flush(120) == 0
    produce(servers, second, small(1))
    counts_are(reader, 0, 2)
    producer.commit_transaction(30)
    counts_are(reader, 3, 2)
    seen = reader.seen()
    assert seen.carriers == carriers_of(SAMPLE)
    assert (seen.doubled, seen.out_of_order) == (0, 0)


def test_the_reader_notices_doubled_and_reordered_flights(
    cluster: AnyCluster, topic_prefix: str, reader: PlainReader
) -> None:
    topic = f"{topic_prefix}.segment-1"
    create_topic(cluster.bootstrap_servers, topic)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    for row in (5, 3, 5):
        key, value = record(row, WITH_TAIL)
        producer.produce(topic, value, key, partition=0)
    assert producer.flush(120) == 0
    eventually(lambda: reader.seen().carriers.total() == 3, "the reader has all there is")
    seen = reader.seen()
    assert seen.rows == {3, 5}
    assert seen.doubled == 1
    assert seen.out_of_order == 1


# -- the rival ------------------------------------------------------------------------------------


def test_a_native_transaction_keeps_its_reader_from_what_is_written_behind_it(
    cluster: AnyCluster, topic_prefix: str
) -> None:
    rival = NativeRival(cluster.bootstrap_servers, topic_prefix, SAMPLE)
    rival.begin()
    eventually(lambda: rival.acked() >= 5, "small writes are acknowledged")
    assert rival.reader.counts() == (0, 0)
    report = rival.commit()
    assert report.flights == 3
    assert report.small_read == report.small_written >= 5
    assert report.longest_wait_s > 0


# -- measuring ----------------------------------------------------------------------------------


def test_waits_count_from_the_answer_and_never_below_zero() -> None:
    commits = [Commit(0, 10.0, 11.0), Commit(1, 11.0, 12.0), Commit(2, 12.0, 13.0)]
    assert waits(commits, {0: 11.5, 1: 11.9, 2: 15.0}) == [0.0, 0.5, 2.0]


def test_silence_includes_both_ends() -> None:
    assert longest_silence([1.0, 4.0, 5.0, 9.0], 2.0, 8.0) == 3.0
    assert longest_silence([], 2.0, 8.0) == 6.0


def test_a_takeover_ends_with_the_first_commit_asked_for_after_the_kill() -> None:
    commits = [Commit(0, 1.0, 1.5), Commit(1, 1.9, 2.1), Commit(2, 2.2, 8.5), Commit(3, 8.6, 8.7)]
    assert takeover(commits, killed_s=2.0) == 6.5
    assert takeover(commits[:2], killed_s=2.0) is None


def test_durations_have_the_unit_that_suits_them() -> None:
    assert [duration(seconds) for seconds in (0.0123, 0.999, 1.0, 61.25)] == ["12 ms", "999 ms", "1.0 s", "61.2 s"]


# -- the other demos and examples -----------------------------------------------------------------


@pytest.fixture
def place(site: Site, client: rollbridge.Bridge, orders: str) -> Place:
    return Place(site.cluster.bootstrap_servers, site.cluster.zookeeper, orders, site.root)


def test_conditional_deposits_of_two_processes_are_all_there(place: Place) -> None:
    race(place, 25, conditional=True)
    assert balances(place) == list(range(1, 51))


def test_blind_deposits_all_stand_in_the_log_whatever_they_overwrite(place: Place) -> None:
    race(place, 25, conditional=False)
    found = balances(place)
    assert len(found) == 50
    assert max(found) <= 50


def test_a_ledger_reads_on_to_the_entry_that_is_asked_for(client: rollbridge.Bridge, orders: str) -> None:
    with client.cas_writer(orders) as writer, client.reader(orders) as reader:
        ledger = Ledger(reader)
        first = writer.write(ACCOUNT, b"1 anna", expected=rollbridge.EMPTY)
        writer.write(b"other", b"99", expected=rollbridge.ANY)
        second = writer.write(ACCOUNT, b"2 anna", expected=first, scope="key")
        ledger.read_to(second)
        assert (ledger.balance, ledger.sn) == (2, second)


def test_a_stream_follows_its_load(
    cluster: AnyCluster, root: str, scope: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(cluster, root, tmp_path, **scaling.SECONDS) as site, site.connect("demo") as b:
        assert scaling.play(b, f"{scope}/clicks", [(400, 10)])
    told = capsys.readouterr().out
    assert "cut at quantiles of" in told
    assert "once each and in order: yes" in told


def test_a_dead_job_behind_the_gateway_holds_nobody_up(tmp_path: Path) -> None:
    with LocalCluster() as cluster, Site(cluster, "/demo-gateway", tmp_path) as site, site.connect("demo") as b:
        gateway = GatewayProcess(Servers(cluster.bootstrap_servers, cluster.zookeeper, site.root), "demo", tmp_path)
        gateway.start()
        try:
            gateway.await_ready()
            told = gateways.play(b, gateway.address, tmp_path, records=4_000, dead_s=6.0)
        finally:
            gateway.stop()
    assert told.exact == {gateways.BEHIND: True, gateways.STRAIGHT: True}
    assert told.waits_s[gateways.BEHIND] < told.waits_s[gateways.STRAIGHT]


@pytest.mark.parametrize(
    ("example", "arguments", "checks"),
    [("box_office", ["--seats=80"], 3), ("copy_file", ["--lines=400"], 1), ("one_writer", [], 2)],
)
def test_an_example_does_what_it_says(site: Site, example: str, arguments: list[str], checks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"spark_examples.demo.{example}", *arguments],
        env={**os.environ, **site.environment()},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok: ") == checks, done.stdout
    assert "WRONG" not in done.stdout


def test_an_example_whose_check_fails_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        common.play(lambda: all([common.check("water is wet", True), common.check("fire is cold", False)]))
    assert ended.value.code == 1
    assert capsys.readouterr().out == "  ok: water is wet\n  WRONG: fire is cold\n"


def test_a_process_that_fails_ends_its_example() -> None:
    with pytest.raises(common.StuckError, match="the processes end: a process ended with 3"):
        common.finish([common.start(sys.exit, 3), common.start(sys.exit, 0)])


def test_an_example_that_reaches_nobody_says_so() -> None:
    environment = {"ROLLBRIDGE_BOOTSTRAP_SERVERS": "127.0.0.1:1", "ROLLBRIDGE_ZOOKEEPER": "127.0.0.1:bad"}
    done = subprocess.run(
        [sys.executable, "-m", "spark_examples.demo.one_writer"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr.startswith("config: zookeeper:")
