"""ZooKeeper restored from a backup: nobody leads, and gives ids out again, until it has been repaired from Kafka."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site, until
from integration_tests.coordinators import coordinator
from rollbridge.base.ids import SegmentId
from rollbridge.cli.main import main
from rollbridge.config import load_settings
from rollbridge.doctor.checks import find
from rollbridge.doctor.facts import Finding, gather
from rollbridge.errors import RollbridgeError, StreamNotFoundError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import StreamName

ROOT = "/restored"
STREAM, DOOMED, YOUNG = "restored/orders", "restored/doomed", "restored/later"


class Rewound:
    """A cluster whose ZooKeeper can be copied, and set back to the copy."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.site = Site(cluster, ROOT, folder)
        self._data = cluster.home / "zookeeper" / "data"
        self._copy = folder / "backup"

    def back_up(self) -> None:
        """Copy its files while it is down."""
        self.cluster.kill("zookeeper")
        shutil.copytree(self._data, self._copy)
        self.cluster.restart("zookeeper")

    def restore(self) -> None:
        """Put the copy in place of what there is."""
        self.cluster.kill("zookeeper")
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)
        self.cluster.restart("zookeeper")


@pytest.fixture
def rewound(tmp_path: Path) -> Iterator[Rewound]:
    with LocalCluster() as cluster:
        yield Rewound(cluster, tmp_path)


def look() -> list[Finding]:
    """Return what the doctor finds, by the environment."""
    settings = load_settings()
    with KafkaClient.of(settings) as kafka:
        return list(find(gather(settings, kafka)))


def commit(client: rollbridge.Bridge, value: bytes) -> rollbridge.TransactionId:
    with client.transaction(STREAM) as transaction:
        for key in (b"a", b"b", b"c", b"d"):
            transaction.write(STREAM, key=key, value=key + value)
    return transaction.id


def rows(values: list[bytes]) -> list[bytes]:
    return sorted(key + value for value in values for key in (b"a", b"b", b"c", b"d"))


def test_a_leader_refuses_what_was_set_back_and_repair_goes_on_where_it_was(
    rewound: Rewound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = rewound.site
    options = rollbridge.ClientOptions(admin_timeout_s=120)
    with site:
        with site.connect("app", options) as client:
            client.admin.create_stream(STREAM, segments=2)
            client.admin.create_stream(DOOMED)
            used = [commit(client, b"1")]
        site.stop_coordinator()
        rewound.back_up()
        site.start_coordinator()
        with site.connect("app", options) as client:
            used.append(commit(client, b"2"))
            client.admin.scale(STREAM, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            used.append(commit(client, b"3"))
            old = client.begin(STREAM)
            old.write(STREAM, key=b"z", value=b"open")
            old.flush()
            client.admin.scale(STREAM, seal=[1], ranges=[(0.5, 1.0)])
            used.append(commit(client, b"4"))
            client.admin.delete_stream(DOOMED)
            client.admin.create_stream(YOUNG, group="young")
            with client.transaction(YOUNG) as transaction:
                transaction.write(YOUNG, value=b"young")
            history = client.admin.history(STREAM)
            site.stop_coordinator()
        admin = KafkaClient(rewound.cluster.bootstrap_servers).topics
        beyond = SegmentId.of(history.active.epoch + 7, history.active.epoch + 1)
        interrupted = StreamName.parse(STREAM).segment_topic(beyond)  # a scale came so far, and ZooKeeper forgets it
        admin.create_topics([TopicSpec(name=interrupted)])
        rewound.restore()
        site.start_coordinator()
        log = tmp_path / "coordinator-3.log"
        until(lambda: "rollbridge repair" in log.read_text())
        for name, value in site.environment().items():
            monkeypatch.setenv(name, value)
        until(lambda: "zookeeper-outdated" in [item.check for item in look()])
        with site.connect("other", rollbridge.ClientOptions(commit_timeout_s=3)) as client:
            transaction = client.begin(STREAM)
            transaction.write(STREAM, key=b"a", value=b"early")
            with pytest.raises(RollbridgeError) as raised:
                transaction.commit()
            assert raised.value.code == "outcome-unknown", "nobody leads, so it is not told another one's outcome"
        assert main(["repair", "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert f"restore stream {STREAM}: 2 epochs" in told
        assert "restore group restored/young, which was created since" in told
        assert f"delete topic {interrupted}, which is empty" in told
        assert "lead.lost " not in log.read_text()
        assert interrupted in admin.list_topics()
        assert main(["repair"]) == 0
        assert interrupted not in admin.list_topics()
        with site.connect("app", options) as client:
            fresh = [commit(client, b"5"), commit(client, b"6")]
            assert not set(used).intersection(fresh), "an id was given out again"
            assert client.admin.history(STREAM).records[: len(history.records)] == history.records
            with client.transaction(YOUNG) as transaction:
                transaction.write(YOUNG, value=b"older")
            with client.reader(YOUNG, follow=False) as reader:
                assert [record.value for record in reader] == [b"young", b"older"]
            with pytest.raises(StreamNotFoundError):
                client.admin.history(DOOMED)
            client.admin.create_stream(DOOMED)
            assert client.admin.history(DOOMED).first > 0, "names of its former life are not used again"
            assert [client.outcome(item).state for item in (*used, *fresh)] == ["committed"] * 6
            resumed = client.resume(old.id)
            resumed.commit()
            client.admin.scale(STREAM, seal=[4], ranges=[(0.5, 0.75), (0.75, 1.0)])
            fresh.append(commit(client, b"7"))
            with client.reader(STREAM, follow=False) as reader:
                found = sorted(record.value or b"" for record in reader)
            expected = [*rows([b"1", b"2", b"3", b"4", b"5", b"6", b"7"]), b"open"]
            assert sorted([*expected, b"early"]) == found or sorted(expected) == found
    gc.collect()  # kazoo leaves sockets open when its server is killed


def test_a_leader_whose_session_outlives_the_backup_finds_out_before_it_writes(
    rewound: Rewound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = rewound.cluster
    site = rewound.site
    log = tmp_path / "coordinator-1.log"
    options = rollbridge.ClientOptions(admin_timeout_s=120)
    with coordinator(cluster, ROOT, "coordinator-1", tmp_path, arguments=["--session-timeout=60"]):
        with site.connect("app", options) as client:
            client.admin.create_stream(STREAM, segments=2)
            commit(client, b"1")
        rewound.back_up()
        with site.connect("app", options) as client:
            commit(client, b"2")
            client.admin.scale(STREAM, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            commit(client, b"3")
            history = client.admin.history(STREAM)
        terms = log.read_text().count("lead.won ")  # what was under way when ZooKeeper stopped may have begun another
        assert "rollbridge repair" not in log.read_text(), "it goes on where nothing was lost"
        rewound.restore()
        # ZooKeeper takes nobody who has seen more of it than it has; of several servers a new leader counts on from
        # above, of one it takes others who write.
        with ZooKeeperSession(cluster.zookeeper, root="/others") as others:
            others.ensure("/written")

            def is_found() -> bool:
                for _ in range(100):
                    others.set("/written", b"")
                return "rollbridge repair" in log.read_text()

            until(is_found)
        text = log.read_text()
        assert text.count("lead.won ") == terms, "it may not lead again"
        assert "session was lost" not in text
        for name, value in site.environment().items():
            monkeypatch.setenv(name, value)
        assert main(["repair"]) == 0
        with site.connect("app", options) as client:
            commit(client, b"4")
            assert client.admin.history(STREAM).records == history.records
            with client.reader(STREAM, follow=False) as reader:
                assert sorted(record.value or b"" for record in reader) == rows([b"1", b"2", b"3", b"4"])
    gc.collect()
