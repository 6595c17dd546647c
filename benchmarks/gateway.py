"""The gateway beside the broker itself: the same clients, first through the one, then straight at the other.

Kafka's client in Java writes transactions of many records, once with its defaults (16 KiB a batch) and once with
batches of 512 KiB, to an adopted topic, where the gateway passes batches on, and to a stream with key ranges, where it
routes each record by its key. What the gateway's process uses is read beside, so that its cost for each record does not
hang on who is the bottleneck.

Gateways share producers, so each experiment ends those of the one before.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import psutil
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.harness import OURS, Better, Experiment, Measure, Measured, Row
from benchmarks.native import NO_LINGER, NativeProducer, commit_once
from benchmarks.site import RECORD_BYTES, Site, records
from rollbridge.metadata import paths
from rollbridge.metadata.gateways import Holder
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command
from rollbridge_devcluster.services import gateway_command
from rollbridge_devcluster.state import KAFKA
from rollbridge_gateway.producer.table import client_name

PARTITIONS: Final = 4
PATIENCE_S: Final = 120.0
_LARGE: Final = {"batch.size": 512 * 1024, "linger.ms": 20}
_PRODUCERS: Final = 32
_DIRECT: Final = "straight at the broker"


class GatewayUnderLoad:
    """A gateway in a process of its own."""

    def __init__(self, site: Site, name: str, log: Path) -> None:
        options = ("--listen=127.0.0.1:0", f"--name={name}", "--log-level=WARNING")
        command = gateway_command(site.bootstrap_servers, site.cluster.zookeeper, *options)
        self.name = name
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # "gateway NAME listens at HOST:PORT"
        if not line:
            raise AssertionError(log.read_text())
        self.address = line.split()[-1]
        self._measured = psutil.Process(self.process.pid)

    def used_s(self) -> float:
        """Return the processor time that it has used, in seconds."""
        return sum(self._measured.cpu_times()[:2])

    def end(self) -> None:
        """End it; harmless where it is gone."""
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)


_running: list[GatewayUnderLoad] = []


def start_gateways(site: Site, *names: str) -> list[GatewayUnderLoad]:
    """Start gateways in place of those that run; they end with the site."""
    end_gateways()
    folder = Path(site.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rollbridge-gateways-")))
    site.cleanup.callback(end_gateways)
    for name in names:
        _running.append(GatewayUnderLoad(site, name, folder / f"{name}.log"))
    return list(_running)


def end_gateways() -> None:
    """End all gateways that run."""
    while _running:
        _running.pop().end()


class JavaLoad:
    """``Load.java`` as a process: a JVM that has compiled what it does once it was measured for some time."""

    def __init__(self, servers: str, **settings: object) -> None:
        wanted = {"bootstrap.servers": servers, "transaction.timeout.ms": 600_000, **settings}
        program = program_command(
            Path(__file__).with_name("Load.java"),
            JarCache.default().ensure(KAFKA),
            heap="512m",
            options=["-XX:TieredStopAtLevel=4"],
        )
        self._process = subprocess.Popen(
            [*program, *(f"{name.replace('_', '.')}={value}" for name, value in wanted.items())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def seconds(self, *words: object) -> float:
        """Have it do something; return the seconds that it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the load ended at {words}")
        return float(line)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def throughput(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Transactions of 300,000 records of 100 bytes from Java (a tenth of that if ``quick``)."""
    count = 30_000 if quick else 300_000
    [gateway] = start_gateways(site, "benchmark")
    topic, plain = _adopted(site, "gateway-passed"), site.make_topic("gateway-direct", PARTITIONS)
    stream = site.make_stream("gateway-routed", PARTITIONS).replace("/", ".")
    sides: dict[str, Measure] = {}
    rows: list[Row] = []
    for batches, settings in (("", {}), (", batches of 512 KiB", _LARGE)):
        direct = f"{_DIRECT}{batches}"
        sides[direct] = _written(JavaLoad(site.bootstrap_servers, **settings), plain, count, None, site)
        for way, where, bar, cost in (("passed", topic, 0.9, 0.1), ("routed", stream, 0.5, 1.5)):
            side = f"{way}{batches}"
            sides[side] = _written(JavaLoad(gateway.address, **settings), where, count, gateway, site)
            name = f"gateway-{way}{'-large' if batches else ''}"
            does = "passes batches on (adopted topic)" if way == "passed" else "routes records by their keys"
            rows += [
                Row(
                    name=name,
                    title=f"Java's producer, {count:,} records of {RECORD_BYTES} bytes in one transaction{batches}: "
                    f"through a gateway that {does}, against the same straight at the broker",
                    metric="records_per_s",
                    unit="records/s",
                    better=Better.MORE,
                    bar=bar,
                    ours=side,
                    peers=(direct,),
                ),
                Row(
                    name=f"{name}-cpu",
                    title=f"the same, the gateway's processor time for each record; bar: {cost:g}",
                    metric="us_per_record",
                    unit="us",
                    better=Better.LESS,
                    bar=cost,
                    ours=side,
                ),
            ]
    return Experiment(name="gateway", rounds=rounds, warm_ups=1 if quick else 2, sides=sides, rows=rows)


def requests(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Requests of one record each, from many Java producers at a time."""
    [gateway] = start_gateways(site, "benchmark-requests")
    topic = _adopted(site, "gateway-requests")
    load = JavaLoad(gateway.address, linger_ms=0)
    site.cleanup.callback(load.end)
    each = 50 if quick else 1_000

    def measure() -> Measured:
        before = gateway.used_s()
        seconds = load.seconds("singly", topic, _PRODUCERS, each)
        used_s, asked = gateway.used_s() - before, _PRODUCERS * each
        return {"per_s": asked / seconds, "us": used_s / asked * 1e6}

    return Experiment(
        name="gateway-requests",
        rounds=rounds,
        sides={OURS: measure},
        rows=[
            Row(
                name="gateway-requests",
                title="Produce requests of one record that one gateway answers in a second; "
                f"{_PRODUCERS} Java producers at a time, each waits for its answer; all on two cores; bar: 5,000",
                metric="per_s",
                unit="requests/s",
                better=Better.MORE,
                bar=5_000.0,
            ),
            Row(
                name="gateway-requests-cpu",
                title="the same, the gateway's processor time for each",
                metric="us",
                unit="us",
                better=Better.LESS,
            ),
        ],
    )


def latency(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Transactions of one record, one at a time: producers through a gateway, and our own client.

    Of librdkafka, which adds partitions before it writes to them (transactions v1), and of Java, which does not (v2).
    """
    [gateway] = start_gateways(site, "benchmark-latency")
    count = 50 if quick else 300
    topic, [pair] = _adopted(site, "gateway-latency"), list(records(1, b"one"))
    stream = site.make_stream("gateway-latency-own", PARTITIONS)
    plain = site.make_topic("gateway-latency-direct", PARTITIONS)
    places = ((gateway.address, topic), (site.bootstrap_servers, plain))
    clients = {"": [_one_by_one(servers, where, pair) for servers, where in places], "java_": []}
    for servers, where in places:
        load = JavaLoad(servers, linger_ms=0)
        site.cleanup.callback(load.end)
        clients["java_"].append(partial(load.seconds, "transaction", where, 1, RECORD_BYTES))

    def own() -> float:
        started = time.perf_counter()
        with site.bridge.transaction(stream) as transaction:
            transaction.write(stream, key=pair[0], value=pair[1])
        return time.perf_counter() - started

    def measure() -> Measured:
        """Of each client in turns, so that what the machine is doing meanwhile is the same for all."""
        found: dict[str, float] = {}
        for client, ways in clients.items():
            took = [[way() for way in (own, *ways)] for _ in range(count)]
            ours, through, direct = (statistics.median(each) * 1000 for each in zip(*took, strict=True))
            found |= {f"{client}ms": through, f"{client}more_ms": through - ours, f"{client}direct_ms": direct}
        return found

    rows: list[Row] = []
    for client, who in (("", "confluent-kafka (transactions v1)"), ("java-", "Java's producer (transactions v2)")):
        told = (
            (
                "",
                f"transactions of one record, one at a time, {who} through a gateway: latency to the answer, p50",
                None,
            ),
            ("more-", "the same, more than with rollbridge's own client; bar: 2", 2.0),
            ("direct-", "the same, straight at the broker: a native transaction", None),
        )
        rows += [
            Row(
                name=f"gateway-latency-{client}{what}".rstrip("-"),
                title=title,
                metric=f"{client}{what}ms".replace("-", "_"),
                unit="ms",
                better=Better.LESS,
                bar=bar,
            )
            for what, title, bar in told
        ]
    return Experiment(name="gateway-latency", rounds=rounds, sides={OURS: measure}, rows=rows)


def _one_by_one(servers: str, topic: str, pair: tuple[bytes, bytes]) -> Callable[[], float]:
    """Return what commits one record with confluent-kafka, and tells the seconds that it took."""
    producer = NativeProducer(servers, {**NO_LINGER, "socket.timeout.ms": 60_000})

    def commit() -> float:
        started = time.perf_counter()
        commit_once(producer, topic, [pair])
        return time.perf_counter() - started

    return commit


def fetching(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """A consumer in Java that reads a topic from its beginning, its fetches relayed."""
    [gateway] = start_gateways(site, "benchmark-fetches")
    count = 100_000 if quick else 1_000_000
    topic = site.make_topic("gateway-fetches", PARTITIONS)
    writing = JavaLoad(site.bootstrap_servers, **_LARGE)
    writing.seconds("transaction", topic, count, RECORD_BYTES)
    writing.end()

    def reading(servers: str) -> Measure:
        load = JavaLoad(servers)
        site.cleanup.callback(load.end)
        return lambda: {"records_per_s": count / load.seconds("read", topic, count)}

    return Experiment(
        name="gateway-fetches",
        rounds=rounds,
        warm_ups=1 if quick else 3,
        sides={OURS: reading(gateway.address), _DIRECT: reading(site.bootstrap_servers)},
        rows=[
            Row(
                name="gateway-fetches",
                title=f"Java's consumer reads {count:,} records of {RECORD_BYTES} bytes through a gateway, "
                "which relays its fetches, against the same straight at the broker",
                metric="records_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=0.8,
                peers=(_DIRECT,),
            )
        ],
    )


def takeover(site: Site, *, rounds: int) -> Experiment:
    """How long a producer stands still whose gateway is killed while there is another one."""
    return Experiment(
        name="gateway-takeover",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _takeover(site)},
        rows=[
            Row(
                name="gateway-takeover",
                title="a producer with a transaction open whose gateway is killed: "
                "longest wait for an acknowledgement, until another gateway goes on; bar: 5,000",
                metric="ms",
                unit="ms",
                better=Better.LESS,
                bar=5_000.0,
            )
        ],
    )


def dead_job(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """A Flink job that is left for dead with a transaction open: how long readers of its topic wait."""
    dead_s = 5.0 if quick else 60.0

    def measure() -> Measured:
        # Flink is needed by this experiment alone.
        from spark_examples.demo.gateway import BEHIND, STRAIGHT, play

        [gateway] = start_gateways(site, "benchmark-dead-job")
        with tempfile.TemporaryDirectory() as folder:
            told = play(site.bridge, gateway.address, Path(folder), dead_s=dead_s)
        if not all(told.exact.values()):
            raise AssertionError(f"the counts are not exact: {told.exact}")
        return {f"{side}_ms": told.waits_s[topic] * 1000 for side, topic in (("ours", BEHIND), ("kafka", STRAIGHT))}

    what = f"a reader's longest wait while a Flink job is dead for {dead_s:g} s with a transaction open"
    return Experiment(
        name="gateway-dead-job",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: measure},
        rows=[
            Row(
                name="gateway-dead-job",
                title=f"{what}, behind a gateway; bar: 100",
                metric="ours_ms",
                unit="ms",
                better=Better.LESS,
                bar=100.0,
            ),
            Row(
                name="gateway-dead-job-kafka",
                title="the same, straight at Kafka",
                metric="kafka_ms",
                unit="ms",
                better=Better.LESS,
            ),
        ],
    )


def _adopted(site: Site, name: str) -> str:
    """Make a topic that a stream has adopted; return its name."""
    topic = site.make_topic(name, PARTITIONS)
    site.bridge.admin.adopt_topic(topic)
    return topic


def _written(load: JavaLoad, topic: str, count: int, gateway: GatewayUnderLoad | None, site: Site) -> Measure:
    site.cleanup.callback(load.end)

    def measure() -> Measured:
        before = gateway.used_s() if gateway else 0.0
        seconds = load.seconds("transaction", topic, count, RECORD_BYTES)
        used_s = gateway.used_s() - before if gateway else 0.0
        return {"records_per_s": count / seconds, "us_per_record": used_s / count * 1e6}

    return measure


def _takeover(site: Site) -> Measured:
    """A record every 5 ms, until 200 were acknowledged after the longest wait."""
    topic = _adopted(site, f"gateway-takeover-{time.monotonic_ns()}")
    acknowledged: list[float] = []
    refused: list[KafkaError] = []

    def told(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            refused.append(error)
        acknowledged.append(time.monotonic())

    both = start_gateways(site, "benchmark-first", "benchmark-second")
    name = f"takeover-{time.monotonic_ns()}"
    producer = Producer(
        {
            "bootstrap.servers": ",".join(gateway.address for gateway in both),
            "transactional.id": name,
            "client.id": name,
            "transaction.timeout.ms": 600_000,
            "on_delivery": told,
            **NO_LINGER,
        }
    )
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    ending = threading.Event()

    def write() -> None:
        while not ending.wait(0.005):
            producer.produce(topic, b"x" * RECORD_BYTES)
            producer.poll(0)

    thread = threading.Thread(target=write, name="writer", daemon=True)
    thread.start()
    try:
        _await(lambda: len(acknowledged) > 200)
        holder = _holder(site, name)
        next(gateway for gateway in both if gateway.name == holder).process.kill()
        count = len(acknowledged)
        _await(lambda: len(acknowledged) > count + 200 and time.monotonic() - acknowledged[-200] > 0.5)
    finally:
        ending.set()
        thread.join()
    producer.commit_transaction(PATIENCE_S)
    if refused:
        raise AssertionError(f"records were refused: {refused[0]}")
    waits = [later - before for before, later in pairwise(acknowledged)]
    return {"ms": max(waits) * 1000}


def _holder(site: Site, transactional_id: str) -> str:
    """Return the name of the gateway that serves a transactional id."""
    settings = site.bridge.settings
    session = ZooKeeperSession(settings.zookeeper, root=settings.zookeeper_root, name="benchmark-holders")
    session.start(PATIENCE_S)
    try:
        node = session.get(paths.gateway_holder(client_name(transactional_id)))
    finally:
        session.close()
    if node is None:
        raise AssertionError(f"nobody holds {transactional_id}")
    return Holder.decode(node.value).gateway


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the producer stands still")
        time.sleep(0.001)
