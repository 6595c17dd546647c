"""A run: a cluster of its own, clients, faults one after the other, a drain, and a verdict."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import rollbridge
from integration_tests.adapter_tools import await_settled
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.history.checks import find_faults
from integration_tests.history.events import (
    Answer,
    History,
    Kept,
    Operation,
    Passing,
    Shrunk,
    StreamState,
    Window,
)
from integration_tests.history.final import commit_log, starts, stream_states
from integration_tests.history.groups import AWAITED, COPIED
from integration_tests.history.historian import NAME as HISTORIAN
from integration_tests.history.historian import Historian
from integration_tests.history.natives import PARTITIONS, topic_of
from integration_tests.history.nemesis import BOUNDS_S, COORDINATORS, CUT_S, Nemesis
from integration_tests.history.owner import Owner
from integration_tests.history.report import Report
from integration_tests.history.shrinking import KEY, shared_state
from integration_tests.history.trial import (
    ADOPTED,
    ALL,
    BEGIN_S,
    GROUP,
    HEAL_S,
    KAFKA_SETTINGS,
    OWNED,
    STREAMS,
    WINDOWS,
    Trial,
)
from integration_tests.history.workers import Workers
from integration_tests.patience import eventually
from integration_tests.three_brokers import ThreeBrokers
from rollbridge.commitlog.control import ControlRecord
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import GroupName

COPIES: Final = "history/copies"
"""What a consumer group makes of the first of them."""
PASSING: Final = "history/passing"
"""Deleted and made anew, again and again."""
TRIMMED: Final = "history/trimmed"
"""Truncated again and again, and written to by strangers."""
CUT: Final = "history/cut"
"""Its logs lose their ends. In a group of its own: what was acknowledged there may be gone."""
CUTS: Final = GroupName("history", "cuts")
STATE: Final = "history/state"
"""A list that several threads share and compact."""
NATIVES: Final = ("native", "idempotent", "transactional")
"""Producers that know nothing of us."""
OWNED_NATIVES: Final = ("native", "idempotent")
"""Those of them that write to the topic which its owner changes."""
PULSE: Final = "history/pulse"
"""Where somebody commits all the time, whatever happens to the others."""
WRITERS: Final = 4
LOG_KEPT: Final = timedelta(seconds=45)
"""Every second history has a commit log that is kept for no longer, but for what its historian has not read."""
CALM: Final = 40
"""So many more things must be noted between two faults."""


class Run(Trial):
    """One run; made by :func:`running`."""

    def __init__(self, cluster: AnyCluster, workers: Workers, seed: int, folder: Path) -> None:
        choice = random.Random(seed)
        self._historian = Historian(cluster.bootstrap_servers, GROUP.commit_log_topic) if seed % 2 else None
        self._owner = Owner(cluster.bootstrap_servers, cluster.zookeeper, OWNED, seed)
        nemesis = Nemesis(
            cluster,
            workers,
            choice,
            folder,
            streams=STREAMS,
            adopted=ADOPTED,
            copies=COPIES,
            passing=PASSING,
            pulse=PULSE,
            trimmed=TRIMMED,
            cut=CUT,
            owner=self._owner,
        )
        brokers, servers = len(cluster.brokers), len(cluster.zookeepers)
        where = "containers" if Ability.CONTAINERS in cluster.can else "processes"
        report = Report(seed, f"{brokers} + {servers} + {COORDINATORS} {where}")
        super().__init__(cluster, workers, choice, nemesis, report)

    def begin(self) -> None:
        """Start coordinators, make the streams, let clients begin."""
        self._nemesis.start_coordinators()
        with self._connect() as client:
            for stream in (*STREAMS, COPIES, PASSING, PULSE, TRIMMED):
                client.admin.create_stream(stream, segments=2)
            self._adopt(client)
            self._owner.begin()
            client.admin.create_stream(STATE, retention_groups=[AWAITED])
            client.admin.create_stream(CUT, segments=2, group=CUTS.group)
            if self._historian is not None:
                client.admin.update_group(str(GROUP), retention_time=LOG_KEPT, retention_groups=[HISTORIAN])
                self._historian.start()
        for _ in range(WRITERS):
            self._workers.start("writer", ALL)
        for stream in ALL:
            self._workers.start("reader", (stream,))
        for _ in range(2):
            self._workers.start("guest", (PASSING,))
            self._workers.start("guest", (OWNED,))
            self._workers.start("member", (*ALL, PULSE))
            self._workers.start("trimmed", (TRIMMED,))
        self._workers.start("follower", (TRIMMED,))
        self._workers.start("loser", (CUT,))
        for stream in (STATE, CUT):
            self._workers.start("keeper", (stream,))
        self._workers.start("awaited", (STATE,))
        self._workers.start("lister", (*ALL, PULSE))
        self._workers.start("namer", (*ALL, PULSE))
        self._workers.start("odd", ALL)
        for role in NATIVES:
            self._workers.start(role, (ADOPTED,))
        for role in OWNED_NATIVES:
            self._workers.start(role, (OWNED,))
        self._workers.start("pulse", (PULSE,))
        self._workers.start("transformer", (STREAMS[0], COPIES))
        java = self._workers.start("java", (ADOPTED,))
        self._await_progress("clients begin", BEGIN_S)
        eventually(lambda: java not in self._workers.alive("java"), "a Java producer ends", BEGIN_S)

    def _adopt(self, client: rollbridge.Bridge) -> None:
        with KafkaClient(self._cluster.bootstrap_servers) as kafka:
            admin = kafka.topics
            admin.create_topics([TopicSpec(name=topic_of(ADOPTED), partitions=PARTITIONS)])
        adopted = client.admin.adopt_topic(topic_of(ADOPTED), stream=ADOPTED)
        assert adopted.config.first_epoch == 0, "native producers note places in the first epoch"

    def window(self, fault: str, broken_s: float) -> None:
        """Break something for a while, then see that it heals: a new client commits, and the others go on."""
        bound_s = BOUNDS_S.get(fault)
        with self._nemesis.broken(fault):
            began = time.monotonic_ns()
            # Standing still for longer than the bound can only show in a window that is longer.
            least_s = CUT_S if fault.startswith("cut ") else 0.0
            time.sleep(max(broken_s, least_s if bound_s is None else bound_s + 2))
            ended = time.monotonic_ns()
        self._heal(Window(fault, began, ended, bound_s, self._nemesis.paused))

    def random_fault(self) -> str:
        """The next fault; every second window is quiet, or a stream is scaled in it.

        Runs with seeds one after the other go on with the faults where the one before stopped, so that in some runs all
        of them come.
        """
        number = sum(self.report.faults.values())
        if number % 2:
            return self._choice.choice(("quiet", "scale"))
        names = sorted(self._nemesis.faults.keys() - {"quiet", "scale"})
        if isinstance(self._cluster, ThreeBrokers):  # which are there for what happens to one of several
            names = [name for name in names if name.split()[1:3] in (["a", "broker"], ["a", "coordinator"])]
        random.Random(0).shuffle(names)
        return names[(self.report.seed * WINDOWS // 2 + number // 2) % len(names)]

    def end(self) -> Report:
        """Let everything come to rest, and compare what is there with what was asked for and told."""
        self._workers.stop("writer", 180)
        for role in ("guest", "odd", "trimmed", "loser", "keeper", *NATIVES):
            self._workers.stop(role, 180)
        self._workers.stop("pulse", 180)
        servers = self._cluster.bootstrap_servers
        states = self._settled_states((*ALL, PULSE))
        rows = {stream: sum(map(len, state.rows.values())) for stream, state in states.items()}
        eventually(
            lambda: all(len(item.rows) >= rows[item.stream] for item in self._workers.readings()),
            "readers come to the end",
            HEAL_S,
        )
        self._workers.stop("reader", 60)
        values = {
            (stream, row.value) for stream, item in states.items() for found in item.rows.values() for row in found
        }
        for role, group in (("member", "members"), ("namer", "namers")):
            eventually(lambda group=group: self._handed(group) >= values, f"a group comes to the end: {group}")  # type: ignore[misc]
            self._workers.stop(role, 60)
        copied: list[str] = []

        def are_copied() -> bool:
            copied[:] = self._copies()
            return len(copied) >= rows[STREAMS[0]]

        eventually(are_copied, "all records are copied")
        self._workers.stop("transformer", 120)
        copied[:] = self._copies()
        kept = [self._kept(), Kept(self._entries(CUT), list(self._workers.operations("keeper", CUT)), loses_end=True)]
        log = commit_log(servers, GROUP) if self._historian is None else self._whole_log(self._historian)
        self._workers.stop("lister", 180)
        passing = [
            Passing(PASSING, list(self._workers.operations("guest", PASSING)), self._state_of(PASSING)),
            Passing(OWNED, self._owned_operations(), self._state_of(OWNED), self._owner.since),
        ]
        deaths = [*self._workers.deaths(), *self._nemesis.deaths()]
        operations = [
            *self._workers.operations(),
            *self._workers.operations("odd"),
            *self._workers.operations("pulse"),
            *(item for role in (*NATIVES, "java") for item in self._workers.operations(role, ADOPTED)),
            *self._probes,
        ]
        history = History(
            operations,
            states,
            log,
            list(self._workers.readings()),
            self._windows,
            list(self._workers.calls()),
            deaths,
            self._nemesis.led_outdated,
            list(self._workers.handed()),
            (STREAMS[0], copied),
            passing,
            [self._trimmed(), self._cut()],
            kept,
            list(self._workers.listed()),
        )
        self.report.seconds = time.monotonic() - self._began
        counted = [*operations, *(item for state in kept for item in state.operations)]
        self.report.answers.update(f"{item.kind} {item.wish}: {item.answer}" for item in counted)
        self.report.records = sum(rows.values())
        self.report.epochs = sum(len(state.history.records) for state in states.values())
        self.report.found = find_faults(history)
        return self.report

    def _whole_log(self, historian: Historian) -> list[tuple[int, ControlRecord]]:
        """The commit log, most of which has been truncated; the historian has read it all."""
        place = GROUP.commit_log_topic
        with KafkaClient(self._cluster.bootstrap_servers) as kafka:
            [end] = kafka.offsets.end([place]).values()
            eventually(lambda: historian.next >= end or bool(historian.gaps), "the historian comes to the end", HEAL_S)
            [first] = kafka.offsets.first([place]).values()
        log = historian.end()
        assert not historian.gaps, historian.gaps
        self.report.answers["offsets of the commit log truncated"] = first
        return log

    def _handed(self, group: str) -> set[tuple[str, str]]:
        return {(item.stream, item.value) for item in self._workers.handed() if item.group == group}

    def _trimmed(self) -> Shrunk:
        """The stream that was truncated, all of whose records that are left have been followed to their end."""
        self._await_markers(TRIMMED)
        state = self._state_of(TRIMMED)
        begins = starts(self._cluster.bootstrap_servers, state)
        self._workers.stop("follower", 60)
        followed = list(self._workers.followed())
        return Shrunk(TRIMMED, list(self._workers.operations("trimmed")), state, begins, followed)

    def _cut(self) -> Shrunk:
        """The stream whose logs lost their ends, but for what is a state there."""
        self._await_markers(CUT)
        state = self._state_of(CUT)
        rows = {segment: [row for row in found if row.key != KEY.decode()] for segment, found in state.rows.items()}
        return Shrunk(CUT, list(self._workers.operations("loser")), replace(state, rows=rows), None)

    def _await_markers(self, stream: str) -> None:
        places = list(self._state_of(stream).places.values())
        await_settled(self._cluster.bootstrap_servers, places, timeout_s=HEAL_S)

    def _kept(self) -> Kept:
        """The list that was shared and compacted; the group for which its stream waits has read everything."""
        operations = list(self._workers.operations("keeper", STATE))
        told = {write.value for item in operations if item.answer is Answer.OK for write in item.writes}
        eventually(lambda: told <= set(self._workers.awaited()), f"a group comes to the end: {AWAITED}")
        self._workers.stop("awaited", 60)
        return Kept(self._entries(STATE), operations, self._workers.awaited())

    def _entries(self, stream: str) -> list[str]:
        """A list that was shared, as somebody finds it who comes now."""
        with self._connect() as client, shared_state(client, stream) as shared:
            return shared.fetch()

    def _owned_operations(self) -> list[Operation]:
        return [item for role in ("guest", *OWNED_NATIVES) for item in self._workers.operations(role, OWNED)]

    def _copies(self) -> list[str]:
        rows = self._state_of(COPIES).rows.values()
        return [row.value.removeprefix(COPIED) for found in rows for row in found]

    def _state_of(self, stream: str) -> StreamState:
        return stream_states(self._cluster.bootstrap_servers, self._cluster.zookeeper, [stream])[stream]

    def _await_progress(self, what: str, timeout_s: float = HEAL_S) -> None:
        goal = self._workers.noted() + CALM
        eventually(lambda: self._workers.noted() >= goal, what, timeout_s)


@contextmanager
def running(seed: int, folder: Path, cluster: AnyCluster | None = None) -> Iterator[Run]:
    """A run that has begun, with clients and coordinators that are gone afterwards.

    Its servers are ``cluster``, which runs, or its own, on the backend that was chosen.
    """
    with ExitStack() as ending:
        servers = cluster or ending.enter_context(new_cluster(stalling=True, kafka_settings=KAFKA_SETTINGS))
        workers = ending.enter_context(Workers(servers.bootstrap_servers, servers.zookeeper, folder, seed))
        run = Run(servers, workers, seed, folder)
        ending.callback(run.stop_coordinators)
        run.begin()
        yield run
