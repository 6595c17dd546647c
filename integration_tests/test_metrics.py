"""Metrics of a real coordinator, as Prometheus scrapes them, and those of the connections that made them move."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator
from integration_tests.patience import eventually
from rollbridge import EMPTY, SN
from rollbridge.base.metrics import Unfinished, WriteEnd
from rollbridge.base.sn import DLSN
from rollbridge.errors import CasWriteError, StreamExistsError, TransactionAbortedError, TransactionRefusedError
from rollbridge.metrics import collector
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.core.metric_samples import FAMILIES
from rollbridge_devcluster.state import free_port

PREFIX = "ROLLBRIDGE_COORDINATOR_"

Values = dict[tuple[str, ...], float]


def scraped(port: int) -> Values:
    """What is served: values by the names of samples and the values of their labels, in the order of the names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("rollbridge_"), *sample.labels.values())
            assert key not in found, key
            found[key] = sample.value
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(set(heads)) == len(heads)
    assert {family.name for family in FAMILIES} <= set(heads), "each has a HELP and a TYPE whatever there is of it"
    return found


@contextmanager
def scraping(
    cluster: AnyCluster, root: str, logs: Path, **settings: str
) -> Iterator[tuple[Callable[[], Values], rollbridge.Bridge]]:
    """A coordinator whose metrics can be scraped, and a client."""
    port = free_port()
    environment = {f"{PREFIX}METRICS_ADDRESS": f"127.0.0.1:{port}", **settings}
    with coordinator(cluster, root, "one", logs, **environment), Site(cluster, root, logs).connect("teller") as b:
        yield lambda: scraped(port), b


def test_what_happens_on_a_cluster_is_seen_in_its_metrics(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope, other = unique_name("metrics"), unique_name("quiet")
    orders, ledger, quiet = (str(StreamName(name, kind)) for name, kind in ((scope, "o"), (scope, "l"), (other, "q")))
    group, still = f"{scope}/default", f"{other}/default"
    with scraping(cluster, f"/{scope}", tmp_path) as (look, b):
        b.admin.create_stream(orders)
        b.admin.create_stream(ledger)
        b.admin.create_stream(quiet)
        eventually(lambda: look()["coordinator_groups_led",] == 2, "both groups are led")
        eventually(lambda: ("stream_topics", still, quiet) in look(), "the streams are known")
        before = look()
        for key in (
            ("transactions_committed_total", group),
            ("transactions_aborted_total", group, "condition"),
            ("frames_rejected_total", group, "corrupt"),
            ("commit_latency_seconds_count", group, "rolling"),
            ("stream_committed_records_total", group, orders),
            ("scales_total", group),
        ):
            assert before[key] == 0, key

        for number in range(3):
            with b.transaction(orders, ledger) as txn:
                txn.write(orders, b"k", b"%d" % number)
                txn.write_all(ledger, [(b"k", b"v"), (b"l", b"w")])
        b.begin(orders).abort()
        refused = b.begin(orders)
        refused.expect(orders, key=b"k", sn=EMPTY)
        refused.write(orders, b"k", b"no")
        with pytest.raises(TransactionRefusedError):
            refused.commit()
        late = b.begin(orders)
        late.write(orders, b"k", b"late")
        late.flush()
        admin = b.begin(ledger)
        admin.flush()
        eventually(lambda: [item for item in b.admin.transactions() if item.id == admin.id], "it is on record")
        b.admin.abort_transaction(admin.id)
        with pytest.raises(TransactionAbortedError):
            admin.commit()
        with pytest.raises(StreamExistsError):
            b.admin.create_stream(orders)
        b.admin.scale(orders, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        eventually(lambda: look()["scales_total", group] == 1, "the scale is counted")
        open_now = look()
        assert open_now["open_transactions", group, "open"] == 1
        assert open_now["open_transactions_bytes", group] > 0
        assert open_now["oldest_transaction_age_seconds", group] > 0
        assert open_now["least_lease_left_seconds", group] > 3_600
        assert open_now["stream_open_transactions", group, orders] == 1
        assert open_now["stream_open_transactions_bytes", group, orders] == open_now["open_transactions_bytes", group]
        assert open_now["readings_age_seconds", group] >= 0
        assert open_now["oldest_transaction_info", b.client_name, group, "", str(late.id)] == 1
        late.commit()
        eventually(lambda: look()["commit_latency_seconds_count", group, "rolling"] == 1, "the late commit is counted")

        after = look()
        wanted = {
            ("transactions_committed_total", group): 4,
            ("commit_latency_seconds_count", group, "direct"): 3,
            ("transactions_aborted_total", group, "client"): 1,
            ("transactions_aborted_total", group, "condition"): 1,
            ("transactions_aborted_total", group, "operator"): 1,
            ("transactions_aborted_total", group, "expired"): 0,
            ("stream_committed_records_total", group, orders): 4,
            ("stream_committed_records_total", group, ledger): 6,
            ("admin_requests_total", group, "create-stream", "done"): 2,
            ("admin_requests_total", group, "create-stream", "refused"): 1,
            ("admin_requests_total", group, "scale-stream", "done"): 1,
            ("admin_requests_total", group, "abort-transaction", "done"): 1,
            ("admin_requests_total", still, "create-stream", "done"): 1,
            ("open_transactions", group, "open"): 0,
            ("stream_fold_lag_messages", group, orders): 0,
            ("transactions_committed_total", still): 0,
            ("streams_in_error", group): 0,
            ("zookeeper_connected",): 1,
        }
        assert {key: after[key] for key in wanted} == wanted
        assert after["stream_committed_bytes_total", group, ledger] > 0
        assert after["round_transactions_count", group] >= 4
        assert after["merge_duration_seconds_count", group] >= 4
        assert after["seal_duration_seconds_count", group] >= 2
        assert after["effect_duration_seconds_count", "Seal", group] == after["seal_duration_seconds_count", group]
        assert after["takeover_duration_seconds_count", group, "cold"] == 1
        assert 0 < after["last_takeover_seconds", group] < 600
        assert after["stream_epochs", group, orders] > after["stream_epochs", group, ledger]
        for operation in ("read", "write", "multi"):
            assert after["zookeeper_request_duration_seconds_count", operation] > 0
        assert after["process_cpu_seconds_total",] > 0


def test_a_connection_tells_what_it_has_done(client: rollbridge.Bridge, orders: str, site: Site) -> None:
    with site.connect("counter") as b:
        registry = CollectorRegistry()
        registry.register(collector(b))

        def told(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"rollbridge_client_{name}", {"client": "counter", **labels})

        assert told("transactions_begun_total") == 0
        assert told("transactions_unfinished_total", reason="expired") == 0
        assert told("conditional_writes_total", result="written") == 0
        with b.transaction(orders) as txn:
            txn.write_all(orders, [(b"k", b"%d" % number) for number in range(10)])
        b.begin(orders).abort()
        refused = b.begin(orders)
        refused.expect(orders, key=b"k", sn=EMPTY)
        with pytest.raises(TransactionRefusedError):
            refused.commit()
        with b.writer(orders) as writer:
            for number in range(5):
                writer.write(b"p", b"%d" % number)
            writer.flush()
        with b.cas_writer(orders) as cas:
            last = cas.write(b"p", b"if", expected=cas.tail(b"p"))
            with pytest.raises(CasWriteError):
                cas.write(b"p", b"no", expected=EMPTY)
        assert isinstance(last, SN)
        assert isinstance(last.dlsn, DLSN)
        eventually(lambda: b.metrics.transactions_committed == 1, "the commit is counted")
        found = b.metrics
        assert (found.transactions_begun, found.records_committed) == (3, 10)
        unfinished = {how: times for how, times in found.transactions_unfinished.items() if times}
        assert unfinished == {Unfinished.ABORTED: 1, Unfinished.REFUSED: 1}
        assert 0 < found.commit_latency.total < 600
        assert found.bytes_committed > 0
        assert found.frames_sent >= 3
        assert found.frame_bytes_sent > found.bytes_committed
        assert (found.plain_records_written, found.plain_records_failed, found.bytes_waiting) == (5, 0, 0)
        assert {end: times for end, times in found.conditional_writes.items() if times} == {
            WriteEnd.WRITTEN: 1,
            WriteEnd.REFUSED: 1,
        }
        assert told("commit_latency_seconds_count") == told("transactions_committed_total") == 1
        assert told("plain_records_total") == 5
