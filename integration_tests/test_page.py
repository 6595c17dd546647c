"""The live page's JSON on real servers: what it shows, what follows of it, and what its actions do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import coordinator
from integration_tests.pages import act, ask_page, page_of, paged_coordinator, read_page
from integration_tests.patience import eventually
from rollbridge.client.connection import Bridge
from rollbridge.errors import TransactionAbortedError

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def orders(unique_name: Callable[[str], str]) -> str:
    """A stream in a scope of the test's own: tests share the brokers."""
    return f"{unique_name('sales')}/orders"


@pytest.fixture
def page(cluster: AnyCluster, root: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a coordinator's page."""
    with paged_coordinator(cluster, root, "one", tmp_path) as (url, _):
        yield url


def connected(cluster: AnyCluster, root: str, name: str = "importer") -> Bridge:
    """A client."""
    return rollbridge.connect(
        cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, client_name=name
    )


def group_of(url: str, stream: str) -> Any:
    """What the page says about the group of a stream."""
    return read_page(url, f"groups/{stream.partition('/')[0]}/default")


def lineage_of(url: str, stream: str) -> bytes:
    """The picture of a stream."""
    status, _, picture = ask_page(url, f"/api/v1/streams/{stream}/lineage.svg")
    assert status == 200, picture
    return picture


def test_what_happens_is_shown_within_seconds(cluster: AnyCluster, root: str, orders: str, page: str) -> None:
    assert read_page(page, "overview")["groups"] == []
    with connected(cluster, root) as b:
        b.admin.create_stream(orders, segments=2)
        eventually(lambda: [item["here"] for item in read_page(page, "overview")["groups"]] == [True], "it leads")
        with b.transaction(orders) as txn:
            txn.write(orders, key=b"k", value=b"v")
        txn = b.begin(orders, label=HOSTILE)
        txn.write(orders, key=b"k", value=b"v" * 1000)
        txn.flush()
        eventually(lambda: group_of(page, orders)["transactions"]["bytes"], "its bytes are known")
        found = group_of(page, orders)
        [listed] = found["transactions"]["oldest"]
        assert (listed["transaction"], listed["client"], listed["label"]) == (str(txn.id), "importer", HOSTILE)
        assert listed["state"] == "open"
        assert listed["bytes"] > 0
        assert 0 < listed["lease_left_ms"] <= listed["lease_ends_ms"] - listed["begun_ms"]
        assert found["transactions"]["largest"] == found["transactions"]["oldest"]
        [newest, *_] = found["rounds"]
        assert (newest["path"], newest["transactions"], newest["records"], newest["streams"]) == (
            "direct",
            1,
            1,
            [orders],
        )
        [stream] = found["streams"]
        assert (stream["stream"], stream["segments"], stream["open_transactions"]) == (orders, 2, 1)
        txn.commit()
        eventually(lambda: not group_of(page, orders)["transactions"]["count"], "it is gone")
        hour = f"groups/{orders.partition('/')[0]}/default/last-hour"
        eventually(
            lambda: sum(item["commits_per_s"] * item["ms"] for item in read_page(page, hour)["points"]), "a point"
        )
        assert read_page(page, hour)["points"][-1]["commit_latency_p99_ms"] > 0


def test_a_stream_is_shown_with_its_lineage_rates_and_sizes(
    cluster: AnyCluster, root: str, orders: str, page: str
) -> None:
    with connected(cluster, root) as b:
        b.admin.create_stream(orders, segments=2)
        with b.transaction(orders) as txn:
            for number in range(50):
                txn.write(orders, key=b"%d" % number, value=b"v" * 100)
        first = read_page(page, f"streams/{orders}")
        assert [item["number"] for item in first["segments"]] == [0, 1]
        assert sum(item["end_offset"] for item in first["segments"]) >= 50
        assert all(item["bytes"] > 0 for item in first["segments"])
        assert [item["offsets_per_s"] for item in first["segments"]] == [None, None]
        with b.transaction(orders) as txn:
            for number in range(50):
                txn.write(orders, key=b"%d" % number, value=b"v" * 100)
        eventually(
            lambda: sum(item["offsets_per_s"] or 0 for item in read_page(page, f"streams/{orders}")["segments"]),
            "a rate",
        )
        eventually(lambda: b'class="bar"' in lineage_of(page, orders), "the picture has it as well")
        b.admin.scale(orders, seal=[0], ranges=[(0, 0.25), (0.25, 0.5)])
        eventually(lambda: read_page(page, f"streams/{orders}")["epoch"] == 1, "the scale is seen")
        found = read_page(page, f"streams/{orders}")
        assert [(item["epoch"], item["cause"]) for item in found["epochs"]] == [(1, "scale"), (0, "create")]
        assert [item["since_epoch"] for item in found["segments"]] == [1, 1, 0]
        status, headers, picture = ask_page(page, f"/api/v1/streams/{orders}/lineage.svg")
        assert (status, headers["content-type"]) == (200, "image/svg+xml; charset=utf-8")
        assert picture.count(b'class="box') == 4
        status, _, body = ask_page(page, "/api/v1/streams/sales/nothing")
        assert (status, json.loads(body)["error"]["code"]) == (404, "stream-not-found")


def test_actions_do_what_the_command_line_does(cluster: AnyCluster, root: str, orders: str, page: str) -> None:
    with connected(cluster, root) as b:
        b.admin.create_stream(orders)
        txn = b.begin(orders, timeout=timedelta(minutes=5))
        eventually(lambda: b.admin.transactions(), "it has a record")
        assert act(page, "check", {})[0] == 200
        hour_ms = 3_600_000
        status, said = act(page, "extend", {"transaction": str(txn.id), "lease_ms": hour_ms})
        assert status == 200, said
        eventually(
            lambda: group_of(page, orders)["transactions"]["oldest"][0]["lease_left_ms"] > hour_ms / 2,
            "its lease is longer",
        )
        status, said = act(page, "scale", {"stream": orders, "seal": [0], "into": 3})
        assert (status, said.get("epoch")) == (200, 1), said
        assert len(b.admin.history(orders).active.segments) == 3
        status, said = act(page, "scale", {"stream": orders, "seal": [0], "into": 2})
        assert (status, said["error"]["code"]) == (400, "invalid-ranges")
        assert "not all of [0] are active segments" in said["error"]["message"]
        status, said = act(page, "abort", {"transaction": str(txn.id), "reason": "for a test"})
        assert (status, said["done"]) == (200, f"Aborted {txn.id}.")
        with pytest.raises(TransactionAbortedError, match="for a test"):
            txn.commit()
        status, _ = act(page, "abort", {"transaction": str(txn.id)})
        assert status == 200, "asked again, it answers the same"


def test_a_group_that_is_led_elsewhere_is_shown_with_where_to_look(
    cluster: AnyCluster, root: str, orders: str, tmp_path: Path
) -> None:
    """Which of the two leads is theirs to decide, and may change while one of them is looked at."""
    names = ("one", "two")
    addresses = {name: {"ROLLBRIDGE_COORDINATOR_PAGE_URL": f"https://ops.example/{name}/"} for name in names}
    with (
        paged_coordinator(cluster, root, "one", tmp_path, **addresses["one"]) as (one, process),
        connected(cluster, root) as b,
    ):
        b.admin.create_stream(orders)
        txn = b.begin(orders, label=HOSTILE)
        eventually(lambda: b.admin.transactions(), "it has a record")
        with paged_coordinator(cluster, root, "two", tmp_path, **addresses["two"]) as (two, _):
            urls = {"one": one, "two": two}

            def is_shown_by_the_other() -> bool:
                groups = read_page(two, "overview")["groups"]
                if not groups or groups[0]["leader"] not in names:
                    return False
                leader = groups[0]["leader"]
                [other] = set(names) - {leader}
                found = group_of(urls[other], orders)
                return (found["leader"], found["here"], found["page"], found["transactions"]["source"]) == (
                    (leader, False, f"https://ops.example/{leader}/", "zookeeper")
                ) and [
                    (item["transaction"], item["label"], item["bytes"]) for item in found["transactions"]["oldest"]
                ] == [(str(txn.id), HOSTILE, None)]

            eventually(is_shown_by_the_other, "who leads, where that one's page is, and what is open")
            assert act(two, "abort", {"transaction": str(txn.id)})[0] == 200, "whoever leads does it"
            eventually(lambda: not group_of(one, orders)["transactions"]["count"], "it is gone")
            process.kill()
            eventually(lambda: read_page(two, "overview")["groups"][0]["here"], "the other one leads")
            eventually(lambda: group_of(two, orders)["transactions"]["source"] == "leader", "and shows what it knows")


def test_a_page_is_there_before_the_servers_are(cluster: AnyCluster, root: str, tmp_path: Path) -> None:
    address = {"ROLLBRIDGE_COORDINATOR_PAGE_ADDRESS": "127.0.0.1:0"}
    with coordinator(cluster, root, "early", tmp_path, zookeeper="127.0.0.1:1", **address):
        url = page_of(tmp_path / "early.log")
        wait = "waits for ZooKeeper at 127.0.0.1:1"
        eventually(
            lambda: wait in str(read_page(url, "overview")["coordinator"]["faults"]), "it says what it waits for"
        )
        found = read_page(url, "overview")
        assert "has not reached ZooKeeper" in found["fault"]
        status, _, body = ask_page(url, "/api/v1/groups/sales/default")
        assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
