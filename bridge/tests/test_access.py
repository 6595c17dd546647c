"""What roles are allowed: no more than the prefix of a stream, and commands that Kafka's tool takes."""

from __future__ import annotations

from pathlib import Path

from rollbridge.metadata.access import (
    Resource,
    Right,
    compactor,
    coordinator,
    coordinator_operations,
    gateway,
    previewer,
    reader,
    writer,
)
from rollbridge.stream.names import GroupName, StreamName

ORDERS = StreamName("sales", "orders")
GROUP = GroupName("sales")


def covers(right: Right, topic: str) -> bool:
    return right.resource is Resource.TOPIC and (
        topic.startswith(right.name) if right.prefixed else topic == right.name
    )


def allowed(rights: list[Right], topic: str) -> set[str]:
    return {operation for right in rights if covers(right, topic) for operation in right.operations}


def test_a_writer_may_do_with_its_stream_what_it_has_to_and_nothing_with_others() -> None:
    rights = list(writer(ORDERS, GROUP))
    assert allowed(rights, ORDERS.buffer_topic()) == {"Read", "Write"}
    assert allowed(rights, "sales.orders.segment-0.epoch-0") == {"Read", "Write"}
    assert allowed(rights, GROUP.commit_log_topic) == {"Read"}
    for topic in (
        "sales.orders-archive.segment-0.epoch-0",
        StreamName("sales", "ledger").buffer_topic(),
        GroupName("sales", "other").commit_log_topic,
        GROUP.terminated_topic,
    ):
        assert allowed(rights, topic) == set()


def test_rights_on_an_adopted_topic_reach_its_buffer_by_either_name() -> None:
    stream, other = StreamName.of_topic("orders"), StreamName.of_topic("orders-archive")
    rights = list(writer(stream, GroupName("topics"), (), "orders"))
    for topic in (stream.buffer_topic(3), stream.internal_buffer_topic(), stream.internal_buffer_topic(3)):
        assert allowed(rights, topic) == {"Read", "Write"}
        assert "Write" in allowed(list(gateway(stream, GroupName("topics"), "orders")), stream.internal_buffer_topic(3))
        assert coordinator_operations(topic) >= {"Create", "Delete", "Read", "Write"}
    for topic in (
        other.buffer_topic(),
        other.internal_buffer_topic(),
        StreamName("t", "orders").internal_buffer_topic(),
    ):
        assert allowed(rights, topic) == set()


def test_a_gateway_may_write_to_every_life_of_a_stream_and_to_no_other() -> None:
    rights = list(gateway(ORDERS, GROUP))
    assert all(allowed(rights, ORDERS.buffer_topic(epoch)) == {"Write"} for epoch in (0, 7))
    assert allowed(rights, StreamName("sales", "orders-archive").buffer_topic()) == set()


def test_a_reader_does_not_see_what_is_not_committed() -> None:
    rights = list(reader(ORDERS, ["billing"]))
    assert allowed(rights, "sales.orders.segment-3.epoch-2") == {"Read"}
    assert allowed(rights, ORDERS.buffer_topic()) == set()
    assert [right.name for right in rights if right.resource is Resource.GROUP] == ["rollbridge", "billing"]
    assert allowed(list(previewer(ORDERS, GROUP)), ORDERS.buffer_topic()) == {"Read"}


def test_a_coordinator_has_rights_to_every_topic_of_its_scope_only() -> None:
    rights = list(coordinator("sales"))
    assert "Create" in allowed(rights, ORDERS.buffer_topic())
    assert "Write" in allowed(rights, GROUP.terminated_topic)
    assert allowed(rights, "marketing.orders.transaction-buffer") == set()
    assert coordinator_operations(GROUP.terminated_topic) == {"Create", "Read", "Write", "DescribeConfigs"}
    assert "AlterConfigs" in coordinator_operations(ORDERS.buffer_topic())


def test_commands_are_those_of_kafkas_tool() -> None:
    right = Right(Resource.TRANSACTIONAL_ID, "sales.orders.", ("Write",), "", prefixed=True)
    assert right.command("User:CN=a b", "k:9093") == (
        "kafka-acls.sh --bootstrap-server k:9093 --add --allow-principal 'User:CN=a b' --operation Write "
        "--transactional-id sales.orders. --resource-pattern-type prefixed"
    )
    assert (
        Right(Resource.CLUSTER, "kafka-cluster", ("Describe",), "")
        .command("User:c", "k:1")
        .endswith("--operation Describe --cluster")
    )


def test_the_page_on_security_has_every_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    roles = [reader(ORDERS), previewer(ORDERS, GROUP), writer(ORDERS, GROUP), compactor(ORDERS), coordinator("sales")]
    adopted = StreamName.of_topic("orders")
    roles += [
        reader(adopted, (), "orders"),
        previewer(adopted, GROUP, (), "orders"),
        writer(adopted, GROUP, (), "orders"),
        compactor(adopted, "orders"),
        coordinator("topics", (), "orders"),
    ]
    # Rights on topics of the stream's own are written down for one stream; they are of the same form for each.
    for right in (right for role in roles for right in role if "topics." not in right.name):
        named = f"`{right.name}`" if right.resource is not Resource.CLUSTER else "cluster"
        pattern = "prefix " if right.prefixed else ""
        assert any(f"{pattern}{named} | {', '.join(right.operations)} |" in row for row in rows), right
