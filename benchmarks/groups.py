"""Groups are led side by side: what four groups on two coordinators commit, against one group on one.

Both sides have the same clients, as many processes and as many transactions in flight: only whom these are for differs.
All share the machine's cores with the broker, so what can be gained is what one leader leaves idle of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import rollbridge
from benchmarks.harness import Better, Experiment, Measure, Measured, Row
from benchmarks.site import Site, another_coordinator, answers_of, await_start, records
from rollbridge.client.transaction import CommitFuture
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.daemon.succession import first_choice

ONE, FOUR = "one group, one coordinator", "four groups, two coordinators"
COORDINATORS: Final = ("one", "two")
GROUPS: Final = 4
CLIENTS: Final = 2
IN_FLIGHT: Final = 256
"""Of each client."""
_PATIENCE_S: Final = 120.0


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Transactions of ten records."""
    seconds = 1.0 if quick else 5.0
    return Experiment(
        name="groups",
        rounds=rounds,
        warm_ups=1,
        sides={ONE: _side(site, 1, COORDINATORS[:1], seconds), FOUR: _side(site, GROUPS, COORDINATORS, seconds)},
        rows=[
            Row(
                name="groups",
                title=f"10-record transactions of {CLIENTS} clients, {IN_FLIGHT} in flight each: {FOUR}, against {ONE}",
                metric="per_s",
                unit="transactions/s",
                better=Better.MORE,
                bar=1.2,
                ours=FOUR,
                peers=(ONE,),
            )
        ],
    )


def _side(site: Site, groups: int, coordinators: tuple[str, ...], seconds: float) -> Measure:
    """Coordinators of its own, started for each measurement, so that they take nothing from the other side."""
    root, scope = f"/groups-{groups}", f"groups{groups}"
    streams: list[str] = []

    def measure() -> Measured:
        with _led(site, root, scope, groups, coordinators, streams):
            arguments = (site.bootstrap_servers, site.cluster.zookeeper, root, str(seconds), *streams)
            counts = answers_of("benchmarks.groups", CLIENTS, *arguments)
            return {"per_s": sum(counts)}

    return measure


@contextmanager
def _led(
    site: Site, root: str, scope: str, groups: int, coordinators: tuple[str, ...], streams: list[str]
) -> Iterator[None]:
    """Coordinators that lead as many groups each, once each leads its own."""
    names = _groups(scope, groups, coordinators)
    with ExitStack() as stack:
        for name in coordinators:
            stack.enter_context(another_coordinator(site, root, name))
        if not streams:
            with rollbridge.connect(site.bootstrap_servers, zookeeper=site.cluster.zookeeper, zookeeper_root=root) as b:
                for group in names:
                    stream = f"{scope}/orders-of-{group.group}"
                    b.admin.create_stream(stream, group=group.group)
                    streams.append(stream)
        session = stack.enter_context(ZooKeeperSession(site.cluster.zookeeper, root=root))
        metadata, deadline = Metadata(session), time.monotonic() + _PATIENCE_S
        while any(metadata.leader(group) != first_choice(group, coordinators) for group in names):
            if time.monotonic() > deadline:
                raise TimeoutError("the groups are not led by the coordinators that should lead them")
            time.sleep(0.1)
        yield


def _groups(scope: str, count: int, coordinators: tuple[str, ...]) -> list[GroupName]:
    """Names of groups of which each coordinator is to lead as many."""
    wanted = {name: count // len(coordinators) for name in coordinators}
    found: list[GroupName] = []
    number = 0
    while len(found) < count:
        group = GroupName(scope, f"group-{number}")
        number += 1
        first = first_choice(group, coordinators) or ""
        if wanted[first]:
            wanted[first] -= 1
            found.append(group)
    return found


def main(bootstrap_servers: str, zookeeper: str, root: str, duration: str, *streams: str) -> None:
    """Be a client: commit until the time is over, and print how many a second were answered within it."""
    seconds = float(duration)
    pairs = list(records(10, b"ten"))
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, zookeeper_root=root) as b:
        waiting = {stream: deque[CommitFuture]() for stream in streams}
        for stream in streams:  # the first takes longer than others
            with b.transaction(stream) as first:
                first.write_all(stream, pairs)
        await_start()
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for stream, queue in waiting.items():
                while len(queue) < IN_FLIGHT // len(streams):
                    transaction = b.begin(stream)
                    for key, value in pairs:
                        transaction.write(stream, key=key, value=value)
                    queue.append(transaction.commit_async())
                queue.popleft().result(_PATIENCE_S)
                count += 1
                while queue and queue[0].done():
                    queue.popleft().result()
                    count += 1
        elapsed = time.perf_counter() - start
        for queue in waiting.values():
            for future in queue:
                future.result(_PATIENCE_S)
        print(json.dumps(count / elapsed), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
