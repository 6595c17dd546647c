"""Brokers of other releases, and of other feature levels: what lacks is said at once, with a remedy that is true."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.coordinators import command
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import InvalidRequestError
from rollbridge_devcluster.__main__ import write_tools
from rollbridge_devcluster.jars import LOCK_FILE, JarCache
from rollbridge_devcluster.services import gateway_command

LOCK = Path(__file__).with_name("brokers.lock")
ROOT = "/releases"
REMEDY = re.compile(r"kafka-features\.sh .*transaction\.version=2")


def broker_of(release: str, folder: Path) -> LocalCluster:
    """A cluster whose broker is of a release; its jars are fetched."""
    name = f"kafka-{release}"
    brokers = [line for line in LOCK.read_text().splitlines() if line.startswith(f"{name} ")]
    others = [line for line in LOCK_FILE.read_text().splitlines() if line.startswith("zookeeper ")]
    lock = folder / "jars.lock"
    lock.write_text("".join(f"{line.removeprefix(name)}\n".replace(" ", "kafka ", 1) for line in brokers))
    with lock.open("a") as file:
        file.writelines(f"{line}\n" for line in others)
    cache = JarCache(directory=JarCache.default().directory, lock_file=lock)
    cache.ensure("kafka", "zookeeper", quiet=True)
    return LocalCluster(cache=cache)


@contextmanager
def site_on(cluster: LocalCluster, folder: Path) -> Iterator[Site]:
    with Site(cluster, ROOT, folder) as site:
        yield site


def assert_all_say(cluster: LocalCluster, told: str) -> str:
    """Whoever starts says what lacks, and ends; return what a client is told."""
    with pytest.raises(InvalidRequestError, match=told) as refused:
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=ROOT)
    for program in (
        command(cluster, ROOT, "coordinator-1", {}),
        gateway_command(cluster.bootstrap_servers, cluster.zookeeper, "--listen=127.0.0.1:0", root=ROOT),
    ):
        ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ended.returncode != 0
        assert re.search(told, ended.stdout + ended.stderr), (ended.stdout, ended.stderr)
    return str(refused.value)


def use(site: Site, folder: Path, unique_name: Callable[[str], str]) -> None:
    """Do once what is done with a cluster: all ways of writing, in a stream and in an adopted topic."""
    stream, topic = f"releases/{unique_name('orders')}", unique_name("shop")
    create_topic(site.cluster.bootstrap_servers, topic, 2)
    with (
        site.connect("loader") as b,
        GatewayProcess(
            Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, ROOT), "gateway-1", folder
        ) as gateway,
    ):
        b.admin.create_stream(stream, segments=2)
        with b.transaction(stream) as open_beside:
            open_beside.write(stream, key=b"k", value=b"rolled")
            b.admin.scale(stream, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            with b.transaction(stream) as small:
                small.write(stream, key=b"k", value=b"direct")
        with b.cas_writer(stream) as writer:
            writer.write(b"k", b"conditional", expected=writer.tail(b"k"))
        with b.reader(stream, follow=False) as reader:
            assert sorted(record.value or b"" for record in reader) == [b"conditional", b"direct", b"rolled"]
        adopt(b, topic, partitioner="murmur2")
        with b.transaction(topic) as txn:
            txn.write(topic, key=b"k", value=b"ours")
        gateway.await_ready()
        producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": "billing-1"})
        producer.init_transactions(PATIENCE_S)
        for value, end in ((b"aborted", producer.abort_transaction), (b"theirs", producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce(topic, value, b"k")
            producer.flush(PATIENCE_S)
            end(PATIENCE_S)
        found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=2)
        assert sorted(message.value() or b"" for message in found) == [b"ours", b"theirs"]


def test_a_cluster_without_transactions_v2_is_named_at_every_start_with_what_mends_it(
    tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    write_tools(tmp_path / "kafka")
    with LocalCluster() as cluster:
        features = [str(tmp_path / "kafka" / "kafka-features.sh"), "--bootstrap-server", cluster.bootstrap_servers]
        subprocess.run([*features, "downgrade", "--feature", "transaction.version=1"], check=True)
        said = assert_all_say(cluster, r"has transaction\.version 1, and 2 is needed.*nothing was written")
        found = REMEDY.search(said)
        assert found is not None
        program, *arguments = shlex.split(found[0])
        subprocess.run([tmp_path / "kafka" / program, *arguments], check=True)
        with site_on(cluster, tmp_path) as site:
            use(site, tmp_path, unique_name)


def test_a_broker_before_4_0_is_named_at_every_start(tmp_path: Path) -> None:
    with broker_of("3.9.2", tmp_path) as cluster:
        assert_all_say(cluster, r"is of a release before 4\.0.*nothing was written; upgrade all brokers to Kafka 4\.0")


@pytest.mark.parametrize("release", ["4.0.2", "4.4.0"])
def test_the_oldest_and_the_newest_release_take_all_ways_of_writing(
    release: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    with broker_of(release, tmp_path) as cluster, site_on(cluster, tmp_path) as site:
        use(site, tmp_path, unique_name)
