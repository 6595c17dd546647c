"""A broker dies while a coordinator takes over and readers read: what its successor tells too little of is not missed.

A broker that has just been elected leader may know a high watermark that is behind what its predecessor acknowledged,
and tells consumers that their log ends there; ListOffsets waits until it has caught up (KIP-207). So the ends that
takeovers and readers go by are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.containers import ContainerCluster
from integration_tests.containers.partitions import in_sync, partitions_of
from integration_tests.patience import eventually
from rollbridge.errors import RollbridgeError
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName

ROUNDS = 3
MORE = 20
"""Commits that are waited for after each election."""
NAMES = ("one", "two")


class Teller:
    """Commits all the time, and remembers what was acknowledged; a commit whose outcome is unknown is asked for."""

    def __init__(self, client: rollbridge.Bridge, stream: str) -> None:
        self._client = client
        self._stream = stream
        self.acknowledged: list[bytes] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Until :attr:`over`."""
        number = 0
        while not self.over.is_set():
            number += 1
            value = b"%d" % number
            transaction = self._client.begin(self._stream)
            try:
                for key in (b"a", b"b", b"c"):
                    transaction.write(self._stream, key=key, value=value)
                transaction.commit()
            except RollbridgeError:
                if self._client.outcome(transaction.id, timeout=180).state != "committed":
                    continue
            self.acknowledged.append(value)


class Follower:
    """Reads in the background what a reader gives."""

    def __init__(self, records: Iterator[bytes]) -> None:
        self._records = records
        self.found: list[bytes] = []

    def run(self, is_over: Callable[[list[bytes]], bool]) -> None:
        """Until it is over, which is looked at after each record."""
        for value in self._records:
            self.found.append(value)
            if is_over(self.found):
                return


@pytest.mark.long
@pytest.mark.containers
def test_a_leader_of_logs_dies_while_a_coordinator_takes_over_and_nothing_is_missed(
    ensemble: ContainerCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("election")
    root, stream, group = f"/{scope}", f"{scope}/s", GroupName(scope)
    last: list[bytes] = []
    with (
        ZooKeeperSession(ensemble.zookeeper, root=root) as session,
        rollbridge.connect(ensemble.bootstrap_servers, zookeeper=ensemble.zookeeper, zookeeper_root=root) as client,
        ExitStack() as stack,
    ):
        nodes = {name: stack.enter_context(ensemble.coordinator(root, name, tmp_path, {})) for name in NAMES}
        client.admin.create_stream(stream, segments=2, buffer_partitions=2)
        config = Metadata(session).stream(StreamName.parse(stream))
        assert config is not None

        def leader() -> str | None:
            node = session.get(paths.leader(group))
            return None if node is None else node.value.decode()

        teller = Teller(client, stream)
        reader = stack.enter_context(client.reader(stream))
        log = stack.enter_context(client.transactions(scope))
        followers = [
            Follower(record.value or b"" for record in reader),
            Follower(record.value or b"" for transaction in log for record in transaction.records()),
        ]

        def is_over(found: list[bytes]) -> bool:
            return bool(last) and found.count(last[0]) == 3

        with ThreadPoolExecutor() as pool:
            committing = pool.submit(teller.run)
            following = [pool.submit(follower.run, is_over) for follower in followers]
            try:
                for number in range(ROUNDS):
                    eventually(lambda: leader() in NAMES and len(teller.acknowledged) > MORE, "it is led")
                    topic = (group.commit_log_topic, config.buffer_topic)[number % 2]
                    broker = ensemble.brokers[partitions_of(ensemble, topic)[0].leader - 1]
                    deposed = nodes[leader() or NAMES[0]]
                    for done in [pool.submit(ensemble.kill, broker), pool.submit(deposed.kill)]:
                        done.result()
                    seen = len(teller.acknowledged)
                    eventually(lambda seen=seen: len(teller.acknowledged) > seen + MORE, "commits go on")  # type: ignore[misc]
                    ensemble.restart(broker)
                    deposed.restart()
                    eventually(lambda topic=topic: in_sync(ensemble, topic), "the broker has caught up")  # type: ignore[misc]
            finally:
                teller.over.set()
            committing.result()
            last.append(b"last")
            with client.transaction(stream) as transaction:
                for key in (b"a", b"b", b"c"):
                    transaction.write(stream, key=key, value=last[0])
            transaction.commit()
            for done in following:
                done.result()
        with client.reader(stream, follow=False) as again:
            whole = [record.value or b"" for record in again]
    expected = sorted([value for value in teller.acknowledged for _ in range(3)] + [last[0]] * 3)
    for found in (*(follower.found for follower in followers), whole):
        assert sorted(found) == expected
    logs = "".join((tmp_path / f"{name}.log").read_text(errors="replace") for name in NAMES)
    assert logs.count("lead.won ") > ROUNDS
