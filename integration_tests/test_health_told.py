"""What is wrong with a stream or a group is said alike by status, list, describe, doctor, page and health."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.coordinators import coordinator
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.common import ExitCode
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata import paths
from rollbridge.metadata.picture import NO_COORDINATOR, NO_LEADER
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_devcluster.state import free_port

PREFIX = "ROLLBRIDGE_COORDINATOR_"


def test_what_one_surface_calls_an_error_all_do(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope, topic = unique_name("told"), unique_name("told-topic")
    stream, well, group = f"{scope}/orders", f"{scope}/well", f"{scope}/default"
    page = free_port()
    site = Site(cluster, f"/{scope}", tmp_path)
    cli = Cli(cluster, f"/{scope}")
    admin = KafkaClient(cluster.bootstrap_servers).topics
    admin.create_topics([TopicSpec(name=topic, replication_factor=1)])

    def asked(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/api/v1/{path}", timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def parts() -> dict[str, str]:
        answer = cli("status", "--json")
        found = {item["part"]: item["state"] for item in json.loads(answer.out)["parts"]}
        assert answer.code == (ExitCode.OK if set(found.values()) == {"running"} else ExitCode.UNAVAILABLE)
        return found

    def shown_alike() -> set[str]:
        """Return the codes of what is wrong, which is the same on all surfaces."""
        faults = asked("state.json")["faults"]
        wrong = {part for part, state in parts().items() if state != "running"}
        assert wrong == {f"{item['part']} {item['name']}" for item in faults}
        checks = {item["check"] for item in json.loads(cli("doctor", "--json").out)["findings"]}
        codes = {item["code"] for item in faults}
        assert checks >= codes
        return codes

    def is_led() -> bool:
        try:
            return any(item["serving"] for item in asked("overview")["groups"])
        except urllib.error.URLError:
            return False

    assert parts()["coordinator"] == NO_COORDINATOR
    environment = {f"{PREFIX}PAGE_ADDRESS": f"127.0.0.1:{page}", "CONSTANT_TOPIC_CHECK_MS": "200"}
    with site.connect("teller") as b, coordinator(cluster, f"/{scope}", "one", tmp_path, **environment):
        b.admin.adopt_topic(topic, stream=stream)
        b.admin.create_stream(well)
        eventually(lambda: set(parts().values()) == {"running"}, "all is well")
        admin.delete_topics([topic])
        eventually(lambda: parts().get(f"stream {stream}") == "error topic-deleted", "the stream is in error")
        listed = {item["stream"]: item for item in cli.json("stream", "list", "--scope", scope)}
        assert {name: item["state"] for name, item in listed.items()} == {stream: "error", well: "active"}
        assert listed[stream]["error"]["code"] == "topic-deleted"
        assert "error topic-deleted" in cli("stream", "list", "--scope", scope).out
        described = cli.json("stream", "describe", stream)
        assert (described["state"], described["error"]) == ("error", listed[stream]["error"])
        on_page = {item["stream"]: item for item in asked(f"groups/{group}")["streams"]}
        assert {name: item["state"] for name, item in on_page.items()} == {stream: "error", well: "active"}
        shown = asked(f"streams/{stream}")
        assert (shown["state"], shown["fault"]["code"]) == ("error", "topic-deleted")
        assert cli("doctor", "--json").code == ExitCode.FINDINGS
        eventually(lambda: shown_alike() == {"topic-deleted"}, "the state is read again")
    with ZooKeeperSession(cluster.zookeeper, root=f"/{scope}") as session:
        session.set(paths.stream(StreamName.parse(well)), b"what a newer release, or a hand, has written")
    with coordinator(cluster, f"/{scope}", "one", tmp_path, **environment):
        eventually(is_led, "its group is led without the stream")
        assert shown_alike() == {"topic-deleted", "metadata-unreadable"}
        assert parts()[f"stream {well}"] == "error metadata-unreadable"
        on_page = {item["stream"]: item for item in asked(f"groups/{group}")["streams"]}
        assert (on_page[well]["state"], on_page[well]["fault"]["code"]) == ("error", "metadata-unreadable")
        assert on_page[stream]["state"] == "error"
    eventually(lambda: parts().get(f"group {group}") == NO_LEADER, "nobody leads the group")
    assert parts()["coordinator"] == NO_COORDINATOR
    assert parts()[f"stream {stream}"] == "error topic-deleted"
    with ZooKeeperSession(cluster.zookeeper, root=f"/{scope}") as session:
        session.set(paths.controller(GroupName.parse(group)), b"what is no record")
    assert f"its record ({paths.controller(GroupName.parse(group))}) cannot be read" in parts()[f"group {group}"]
    [found] = [item for item in json.loads(cli("doctor", "--json").out)["findings"] if "controller" in item["what"]]
    assert (found["check"], found["severity"]) == ("metadata-unreadable", "problem")
