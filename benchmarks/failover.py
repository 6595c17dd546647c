"""How long clients wait when the leader of their transaction group is killed and another coordinator takes over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Site, another_coordinator
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.daemon.succession import first_choice

SESSION_S: Final = 6.0
"""ZooKeeper session time-out of the coordinators, their default."""
_ROOT: Final = "/failover"
_GROUP: Final = GroupName("failover")
_STREAM: Final = "failover/orders"
_BEFORE: Final = 50
_PATIENCE_S: Final = 60.0


def experiment(site: Site, *, rounds: int) -> Experiment:
    """One transaction of one record after the other, while the leader dies."""
    title = f"killed leader: wait for a commit, with a ZooKeeper session time-out of {SESSION_S:g} s"
    return Experiment(
        name="failover",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _outage(site)},
        rows=[Row(name="failover", title=title, metric="outage_s", unit="s", better=Better.LESS, bar=1.0)],
    )


def _outage(site: Site) -> Measured:
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(another_coordinator(site, _ROOT, name, f"--session-timeout={SESSION_S}"))
            for name in ("one", "two")
        }
        session = stack.enter_context(ZooKeeperSession(site.cluster.zookeeper, root=_ROOT))
        client = stack.enter_context(
            rollbridge.connect(site.bootstrap_servers, zookeeper=site.cluster.zookeeper, zookeeper_root=_ROOT)
        )
        metadata = Metadata(session)
        _await(lambda: len(metadata.coordinators()) == len(running))
        if _STREAM not in {str(item.name) for item in client.admin.list_streams()}:
            client.admin.create_stream(_STREAM)
        for _ in range(_BEFORE):
            _commit(client)
        leader = settled(metadata, _GROUP)
        running[leader].kill()
        started = time.perf_counter()
        _commit(client)
        return {"outage_s": time.perf_counter() - started}


def settled(metadata: Metadata, group: GroupName) -> str:
    """The leader of coordinators one and two, once it is the first choice, and the other one is ready to follow it."""
    first = first_choice(group, ("one", "two"))

    def is_ready() -> bool:
        records = [metadata.coordinator(name) for name in ("one", "two")]
        ready = [record is not None and group in record.ready for record in records]
        return metadata.leader(group) == first and any(ready)

    _await(is_ready)
    return first or ""


def _commit(client: rollbridge.Bridge) -> None:
    with client.transaction(_STREAM) as transaction:
        transaction.write(_STREAM, key=b"key", value=b"value")


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinators did not come up")
        time.sleep(0.05)
