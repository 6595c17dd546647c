"""How long a takeover takes when much has happened since the last snapshots: with a standby, and without one."""

from __future__ import annotations

import re
import tempfile
import urllib.request
from pathlib import Path
from typing import Final
from urllib.error import URLError

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.recovery import logged_coordinator, took_s, wait_for, write_aborted
from benchmarks.site import Site
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.daemon.succession import first_choice
from rollbridge_devcluster.state import free_port

COLD: Final = "cold"
_ROOT: Final = "/standby"
_OF_STANDBY: Final = re.compile(r"rollbridge_standby_\w+\{")
_PREFIX: Final = "ROLLBRIDGE_COORDINATOR_"
_NEVER: Final = str(10**13)
_NAMES: Final = ("one", "another")
_RARE: Final = {
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": _NEVER,
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": _NEVER,
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": _NEVER,
}
"""No snapshot is written, so nothing is truncated: what a takeover reads grows without bound."""


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """300,000 aborted transactions since the last snapshots (a tenth if ``quick``)."""
    history = LongTail(site, 30_000 if quick else 300_000)
    return Experiment(
        name="standby",
        rounds=rounds,
        warm_ups=0,
        sides={COLD: history.cold, OURS: history.warm},
        rows=[
            Row(
                name="standby-takeover",
                title=f"takeover with a long tail, {history.aborts:,} transactions since the last snapshots: warm "
                "against cold",
                metric="took_s",
                unit="s",
                better=Better.LESS,
                peers=(COLD,),
            )
        ],
    )


class LongTail:
    """A stream under a ZooKeeper path of its own, whose coordinators take no snapshots."""

    def __init__(self, site: Site, aborts: int) -> None:
        self.aborts = aborts
        self._site = site
        self._stream = StreamName(f"standby-{aborts}", "orders")
        self._logs = Path(tempfile.mkdtemp(prefix="standby-", dir=site.cluster.home))
        self._environment = {**_RARE, f"{_PREFIX}STANDBY_TRANSACTIONS_MAX": str(10 * aborts)}
        self._is_made = False

    def cold(self) -> Measured:
        """Take over without having followed."""
        self._make()
        with logged_coordinator(self._site, _ROOT, self._logs, **self._environment) as (_, log):
            return {"took_s": took_s(log)}

    def warm(self) -> Measured:
        """Kill a leader, and see the standby take over that has followed it."""
        self._make()
        metrics = f"127.0.0.1:{free_port()}"
        # A leader gives way to whose turn it is, and that must not be the newcomer, who has read nothing yet.
        choice = first_choice(GroupName(self._stream.scope), list(_NAMES))
        first, second = sorted(_NAMES, key=lambda name: name != choice)
        leading = {**self._environment, f"{_PREFIX}NAME": first}
        following = {**self._environment, f"{_PREFIX}NAME": second, f"{_PREFIX}METRICS_ADDRESS": metrics}
        with logged_coordinator(self._site, _ROOT, self._logs, **leading) as (leader, log):
            took_s(log)
            with logged_coordinator(self._site, _ROOT, self._logs, **following) as (_, own):
                wait_for(lambda: self._has_followed(metrics), "standby that has read everything")
                leader.kill()
                seconds = took_s(own)
                if "standby=warm" not in own.read_text():
                    raise RuntimeError("the standby did not use what it had read")
                return {"took_s": seconds}

    def _has_followed(self, metrics: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        except URLError:
            return False  # it does not listen yet
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if _OF_STANDBY.match(line)}
        return values == {
            "rollbridge_standby_lag_messages": 0.0,
            "rollbridge_standby_transactions": float(self.aborts),
        }

    def _make(self) -> None:
        if self._is_made:
            return
        cluster = self._site.cluster
        with (
            logged_coordinator(self._site, _ROOT, self._logs, **self._environment),
            rollbridge.connect(
                cluster.bootstrap_servers,
                zookeeper=cluster.zookeeper,
                zookeeper_root=_ROOT,
                options=rollbridge.ClientOptions(admin_timeout_s=60),
            ) as b,
        ):
            b.admin.create_stream(str(self._stream))
        write_aborted(self._site.bootstrap_servers, self._stream, range(1, self.aborts + 1))
        self._is_made = True
