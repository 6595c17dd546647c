"""What the integration tests share: one real broker and ZooKeeper for the whole run, and names of their own."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rollbridge
from integration_tests.backends.choice import (
    BACKEND_VARIABLE,
    Backend,
    chosen,
    demand,
    descriptions,
    lacking,
    new_cluster,
    why_no_containers,
)
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.interface import AnyCluster, Unsupported
from integration_tests.clients import Site, adopt
from integration_tests.command_line import Cli
from integration_tests.defects import WATCH
from integration_tests.faults import FaultProxy
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic
from integration_tests.leftovers import children, left_behind, share
from integration_tests.spark_tools import spark_session
from rollbridge.errors import LocalEnvironmentError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = {
    "containers/test_reaper.py",
    "containers/test_survival.py",
    "test_adoption.py",
    "test_cas.py",
    "test_cli_streams.py",
    "test_client_scaling.py",
    "test_client_transactions.py",
    "test_commits_by_name.py",
    "test_consumer.py",
    "test_crash_points.py",
    "test_doctor.py",
    "test_fast_takeover.py",
    "test_gateway_checks.py",
    "test_gateway_librdkafka.py",
    "test_histories.py",
    "test_history_checks.py",
    "test_house.py",
    "test_interop.py",
    "test_kafka_wire.py",
    "test_leases.py",
    "test_lives.py",
    "test_outcomes.py",
    "test_readers.py",
    "test_seal.py",
    "test_snapshots.py",
    "test_spark_sink.py::test_a_batch_job_is_one_transaction_of_several_streams",
    "test_spark_source.py::test_a_batch_begins_and_ends_where_it_is_told_to",
    "test_transaction_reader.py",
    "test_verify.py",
    "test_zookeeper_metadata.py",
}
"""Files and tests that `make test` runs, a few of each promise, but for what they mark as long. All others are long."""
SMALL_DISK_MIB = 512
_PROPERTY = "containers"
"""Of a test's reports: why it had none, or nothing."""
_HERE = Path(__file__).parent
_run = uuid.uuid4().hex[:8]
_numbers = itertools.count(1)


def pytest_configure() -> None:
    """A backend or a quick file that there is not ends the run before it begins."""
    chosen()
    gone = [name for name in QUICK if not (_HERE / name.partition("::")[0]).exists()]
    if gone:
        raise pytest.UsageError(f"QUICK names files that do not exist: {', '.join(gone)}")


def pytest_report_header() -> str:
    """Which backend was asked for."""
    return f"servers: {BACKEND_VARIABLE}={chosen()}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of this folder as long, but for the quick ones."""
    file = item.path.relative_to(_HERE).as_posix()
    if not QUICK & {file, f"{file}::{getattr(item, 'originalname', '')}"}:
        item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that ask for containers end here where there are none, before anything is started for them."""
    if item.get_closest_marker("containers") is not None:
        reason = why_no_containers()
        item.user_properties.append((_PROPERTY, reason or ""))
        if reason:
            lacking(reason, containers=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A fault that turns out to be impossible here is no failure, unless that is asked for."""
    try:
        return (yield)
    except Unsupported as exc:
        lacking(str(exc))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which images tests on containers have used, or why there were none."""
    reasons = {
        str(reason)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, reason in getattr(report, "user_properties", ())
        if name == _PROPERTY
    }
    if not reasons and chosen() is not Backend.DOCKER:
        return
    terminalreporter.section("containers")
    try:
        lines = sorted(reasons - {""}) or list(descriptions())
    except LocalEnvironmentError as exc:
        lines = [str(exc)]
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of all tests' files; what is logged after the last test fails it, too."""
    WATCH.add(tmp_path_factory.getbasetemp())
    yield
    found = WATCH.found()
    assert not found, "\n".join(found)


@pytest.fixture
def defects_elsewhere(_watched: None) -> Callable[[], list[str]]:
    """Return what coordinators, gateways and clients in processes of their own have logged as defects."""
    return WATCH.found


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """``@pytest.mark.needs(Ability...)``: what a test needs beyond servers that run."""
    needed = [ability for mark in request.node.iter_markers("needs") for ability in mark.args]
    if needed:
        servers = "ensemble" if "ensemble" in request.fixturenames else "cluster"
        demand(request.getfixturevalue(servers), needed)


@pytest.fixture(autouse=True)
def _leaves_nothing(_needs: None) -> Iterator[None]:
    """A process that outlives the test that started it is that test's failure."""
    before = children()
    yield
    left = [f"{pid}: {' '.join(command)}" for pid, command in left_behind(before).items()]
    assert not left, "the test left processes behind:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def ensemble() -> Iterator[ContainerCluster]:
    """Three brokers and three ZooKeeper servers in containers, for all tests that ask for several of them.

    They share it, so each leaves it whole, and without coordinators of its own. The disk of the last broker is small.
    """
    with ContainerCluster(brokers=3, zookeepers=3, disk_mib={"kafka-3": SMALL_DISK_MIB}) as shared:
        yield shared


@pytest.fixture(scope="session")
def cluster() -> Iterator[AnyCluster]:
    """A broker and a ZooKeeper for the whole run, without a coordinator.

    Tests share it, so each leaves it as it was: running, and without coordinators of its own. A test that breaks
    servers for good takes a ``new_cluster`` of its own.
    """
    before = children()
    with new_cluster() as shared:
        share([command for pid, command in children().items() if pid not in before])
        yield shared


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark, and so one JVM, for the whole run; it finds the formats ``rollbridge`` by itself."""
    before = children()
    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        share([command for pid, command in children().items() if pid not in before])  # some ask for it in their midst
        yield session


@pytest.fixture
def unique_name() -> Callable[[str], str]:
    """Makes names that no other test and no earlier run has used; they fit topics, streams and znodes."""

    def make(stem: str) -> str:
        return f"{stem}-{_run}-{next(_numbers)}"

    return make


@pytest.fixture
def topic_prefix(request: pytest.FixtureRequest, unique_name: Callable[[str], str]) -> str:
    """A prefix for the topics of one test, which says whose they are."""
    return unique_name(re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:80])


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A rollbridge with a coordinator for the tests of one module, under a ZooKeeper path of its own."""
    with Site(cluster, f"/site-{_run}-{next(_numbers)}", tmp_path_factory.mktemp("coordinators")) as site:
        yield site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[rollbridge.Bridge]:
    """A client named ``tester`` for the tests of one module."""
    with site.connect("tester") as client:
        yield client


@pytest.fixture
def cli(site: Site) -> Cli:
    """The command line, for the site of the module."""
    return Cli(site.cluster, site.root)


@pytest.fixture
def root(unique_name: Callable[[str], str]) -> str:
    """A ZooKeeper root path of the test's own."""
    return f"/{unique_name('root')}"


@pytest.fixture
def scope(unique_name: Callable[[str], str]) -> str:
    """A scope for the streams of one test."""
    return unique_name("scope")


@pytest.fixture
def orders(client: rollbridge.Bridge, scope: str) -> str:
    """A stream of two segments."""
    name = f"{scope}/orders"
    client.admin.create_stream(name, segments=2)
    return name


@pytest.fixture
def ledger(client: rollbridge.Bridge, scope: str) -> str:
    """A stream of one segment."""
    name = f"{scope}/ledger"
    client.admin.create_stream(name)
    return name


@pytest.fixture
def payments(client: rollbridge.Bridge, scope: str) -> str:
    """A stream of three segments in the same group."""
    name = f"{scope}/payments"
    client.admin.create_stream(name, segments=3)
    return name


@pytest.fixture
def proxy(cluster: AnyCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stands between the broker and what of ours connects to it in this process."""
    with FaultProxy(cluster.bootstrap_servers) as proxy, proxy.in_between(monkeypatch):
        yield proxy


@pytest.fixture
def topic(site: Site, client: rollbridge.Bridge, topic_prefix: str) -> str:
    """A topic of one partition that a stream of the site has adopted."""
    create_topic(site.cluster.bootstrap_servers, topic_prefix)
    adopt(client, topic_prefix)
    return topic_prefix


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[AnyCluster]:
    """Servers of a module's own, which its tests may stop, pause and kill."""
    with new_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def servers(site: Site) -> Servers:
    """Where gateways of a module's tests find their site."""
    return Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)


@pytest.fixture(scope="module")
def gateway(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[GatewayProcess]:
    """A gateway for the tests of a module, named after it."""
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_").replace("_", "-")
    with GatewayProcess(servers, name, tmp_path_factory.mktemp("gateways")) as process:
        yield process


@pytest.fixture
def own_site(own_cluster: AnyCluster, tmp_path: Path) -> Iterator[Site]:
    """A rollbridge on them."""
    with Site(own_cluster, f"/{tmp_path.name}", tmp_path) as site:
        yield site
