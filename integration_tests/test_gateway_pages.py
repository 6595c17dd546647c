"""The pages of a gateway's clients: the program of each runs as it is printed, but for addresses and names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.foreign.java import CLIENTS, jars_of
from integration_tests.foreign.others import build_go, node_program
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command
from spark_examples.demo.flink_job import OPENED

PAGES = Path(__file__).parents[1] / "docs"
PARTITIONS = 2
RECORDS = 1_000
_PROGRAM = re.compile(r"^```(?:go|java|javascript|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def topic(site: Site, client: rollbridge.Bridge, topic_prefix: str) -> str:
    """An adopted topic."""
    create_topic(site.cluster.bootstrap_servers, topic_prefix, PARTITIONS)
    adopt(client, topic_prefix)
    return topic_prefix


@pytest.fixture
def names(gateway: GatewayProcess, topic: str) -> dict[str, str]:
    """What stands on pages, and what there is instead."""
    return {
        "gateway-1:9192": gateway.address,
        "gateway-2:9192": gateway.address,
        "shop.orders": topic,
        "orders-loader": topic,
    }


def program_of(page: str, file: Path, names: Mapping[str, str]) -> Path:
    """Write the program of a page into a file."""
    [program] = _PROGRAM.findall((PAGES / page).read_text(encoding="utf-8"))
    for printed, real in names.items():
        assert printed in program, f"{printed} does not stand in the program of {page}"
        program = program.replace(printed, real)
    file.write_text(program, encoding="utf-8")
    return file


def assert_it_loads(site: Site, topic: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS)
    told = sorted((item.key() or b"", item.value() or b"") for item in found)
    expected = ((f"customer-{number % 10}", f"order-{number}") for number in range(RECORDS))
    assert told == sorted((key.encode(), value.encode()) for key, value in expected)


@pytest.mark.parametrize("client_version", CLIENTS)
def test_java(site: Site, topic: str, names: dict[str, str], tmp_path: Path, client_version: str) -> None:
    program = program_of("gateway-java.md", tmp_path / "Loader.java", names)
    assert_it_loads(site, topic, program_command(program, jars_of(client_version)))


def test_python(site: Site, topic: str, names: dict[str, str], tmp_path: Path) -> None:
    program = program_of("gateway-python.md", tmp_path / "loader.py", names)
    assert_it_loads(site, topic, [sys.executable, str(program)])


def test_node(site: Site, topic: str, names: dict[str, str], tmp_path: Path) -> None:
    program = program_of("gateway-node.md", tmp_path / "loader.js", names)
    assert_it_loads(site, topic, node_program(program))


def test_go(site: Site, topic: str, names: dict[str, str], tmp_path: Path) -> None:
    program = program_of("gateway-go.md", tmp_path / "loader.go", names)
    assert_it_loads(site, topic, build_go(program))


def test_flink(site: Site, topic: str, names: dict[str, str], tmp_path: Path) -> None:
    requests = f"{topic}.requests"
    create_topic(site.cluster.bootstrap_servers, requests)
    values = [b"request-%d" % number for number in range(RECORDS)]
    produce(site.cluster.bootstrap_servers, requests, values)
    del names["orders-loader"]
    others = {"shop.requests": requests, "60_000": "500", 'Prefix("orders")': f'Prefix("{topic}")'}
    program = program_of("gateway-flink.md", tmp_path / "Orders.java", {**names, **others})
    jars = JarCache.default().ensure("flink")
    with (tmp_path / "flink.log").open("wb") as log:
        job = subprocess.Popen(
            program_command(program, jars, heap="700m", options=OPENED), stdout=log, stderr=log, cwd=tmp_path
        )

    def written() -> list[bytes]:
        found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS)
        return [item.value() or b"" for item in found]

    try:
        eventually(lambda: job.poll() is not None or len(written()) >= RECORDS, "all requests are there")
        assert job.poll() is None, (tmp_path / "flink.log").read_text()
        assert sorted(written()) == sorted(values)
    finally:
        job.kill()
        job.wait()
