"""Groups whose offsets an operator sets with Kafka's tools: what that does to a stream that has grown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.consumer_groups import Group, take, values
from integration_tests.foreign.tools import KafkaTools
from integration_tests.gateway_tools import GROUPS
from integration_tests.grown_streams import KEYS, write

Reset = Callable[..., None]
FROM_THE_BEGINNING = {key: [b"before", b"after"] for key in KEYS}


@pytest.fixture
def group(site: Site, unique_name: Callable[[str], str]) -> Group:
    return Group(site, unique_name("group"))


@pytest.fixture
def tool(site: Site, group: Group, tmp_path: Path) -> Iterator[Reset]:
    """Run ``kafka-consumer-groups.sh`` for the group."""
    with KafkaTools(tmp_path / "tools.log") as tools:

        def run(*arguments: str) -> None:
            told = ["--bootstrap-server", site.cluster.bootstrap_servers, "--group", group.name, *arguments]
            said = tools.run(GROUPS, *told)
            assert said.code == 0, said.text

        yield run


@pytest.fixture
def grown(client: rollbridge.Bridge, orders: str, group: Group) -> str:
    """A stream that was scaled, and read by the group to its end."""
    write(client, orders, b"before")
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    write(client, orders, b"after")
    with group.member(orders) as consumer:
        assert values(take(consumer, 2 * len(KEYS))) == FROM_THE_BEGINNING
    return orders


def is_begun(consumer: rollbridge.Consumer) -> bool:
    places = consumer.position(consumer.assignment())
    return bool(places) and all(place.offset >= 0 for place in places)


def test_a_group_whose_offsets_are_deleted_begins_again(
    client: rollbridge.Bridge, group: Group, grown: str, tool: Reset
) -> None:
    tool("--delete")
    with group.member(grown) as consumer:
        assert values(take(consumer, 2 * len(KEYS))) == FROM_THE_BEGINNING
    tool("--delete")
    with group.member(grown, auto_offset_reset="latest") as consumer:
        until(lambda: consumer.poll(0.2) is None and is_begun(consumer))
        write(client, grown, b"new")
        assert values(take(consumer, len(KEYS))) == {key: [b"new"] for key in KEYS}


def test_a_group_that_is_set_to_the_earliest_offsets_skips_what_others_continue_and_says_so(
    group: Group, grown: str, tool: Reset, caplog: pytest.LogCaptureFixture
) -> None:
    tool("--reset-offsets", "--to-earliest", "--all-topics", "--execute")
    with group.member(grown) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"after"] for key in KEYS}
    told = [record.getMessage() for record in caplog.records if "consumer.offset_ignored" in record.getMessage()]
    assert sum(any(f"segment-{number}" in line for line in told) for number in (0, 1)) == 2


def test_a_group_that_is_set_to_the_latest_offsets_reads_what_comes(
    client: rollbridge.Bridge, group: Group, grown: str, tool: Reset
) -> None:
    write(client, grown, b"skipped")
    tool("--reset-offsets", "--to-latest", "--all-topics", "--execute")
    write(client, grown, b"new")
    with group.member(grown) as consumer:
        assert values(take(consumer, len(KEYS))) == {key: [b"new"] for key in KEYS}
