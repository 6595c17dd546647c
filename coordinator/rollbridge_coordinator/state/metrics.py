"""Metrics of a coordinator in Prometheus' text format, and whether it is ready to lead a group. Pure.

:mod:`rollbridge_coordinator.shell` writes the metrics to files, or serves them. Those of snapshots have the names of
PIP-196, with our prefix in place of ``pulsar``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

PREFIX: Final = "rollbridge"
SNAPSHOT: Final = f"{PREFIX}_txn_tb_snapshot"
ENTRY_BYTES_BOUNDS: Final = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 24)


class Op(StrEnum):
    """What is done to a record of a snapshot."""

    ADD = "add"
    DEL = "del"
    READ = "read"


@dataclass(slots=True)
class SnapshotMetrics:
    """What has happened to snapshots in this term of a leader.

    Attributes:
        segment_ops: Operations on sealed segments.
        index_ops: Operations on indexes, those of single snapshots included.
        ongoing_ops: Operations on records of ongoing transactions.
        faults: Records that could not be used, and snapshots that could not be taken.
        entry_bytes: Sizes of the indexes that were written, by the first bound that they do not exceed.
        entry_bytes_sum: The sum of all of them.
    """

    segment_ops: Counter[Op] = field(default_factory=Counter)
    index_ops: Counter[Op] = field(default_factory=Counter)
    ongoing_ops: Counter[Op] = field(default_factory=Counter)
    faults: int = 0
    entry_bytes: Counter[float] = field(default_factory=Counter)
    entry_bytes_sum: int = 0

    def note_entry(self, size: int) -> None:
        """Note that an index was written."""
        self.index_ops[Op.ADD] += 1
        self.entry_bytes[next((bound for bound in ENTRY_BYTES_BOUNDS if size <= bound), float("inf"))] += 1
        self.entry_bytes_sum += size

    def lines(self, group: str, segments: int) -> Iterator[str]:
        """Return the metrics of a group that has so many sealed segments."""
        label = f'group="{group}"'
        kinds = {"segment": self.segment_ops, "index": self.index_ops, "ongoing": self.ongoing_ops}
        for what, operations in kinds.items():
            yield f"# TYPE {SNAPSHOT}_{what}_op_total counter"
            for op in Op:
                yield f'{SNAPSHOT}_{what}_op_total{{{label},op="{op}"}} {operations[op]}'
        yield f"# TYPE {SNAPSHOT}_segment_total gauge"
        yield f"{SNAPSHOT}_segment_total{{{label}}} {segments}"
        yield f"# TYPE {SNAPSHOT}_fault_total counter"
        yield f"{SNAPSHOT}_fault_total{{{label}}} {self.faults}"
        yield f"# TYPE {SNAPSHOT}_index_entry_bytes histogram"
        below = 0
        for bound in (*ENTRY_BYTES_BOUNDS, float("inf")):
            below += self.entry_bytes[bound]
            shown = "+Inf" if bound == float("inf") else f"{bound:d}"
            yield f'{SNAPSHOT}_index_entry_bytes_bucket{{{label},le="{shown}"}} {below}'
        yield f"{SNAPSHOT}_index_entry_bytes_sum{{{label}}} {self.entry_bytes_sum}"
        yield f"{SNAPSHOT}_index_entry_bytes_count{{{label}}} {below}"


def standby_lines(group: str, lag: int | None, held: int) -> Iterator[str]:
    """Return the metrics of a standby: messages it has not read, -1 without a tail; transactions it holds."""
    for name, value in (("lag_messages", -1 if lag is None else lag), ("transactions", held)):
        yield f"# TYPE {PREFIX}_standby_{name} gauge"
        yield f'{PREFIX}_standby_{name}{{group="{group}"}} {value}'


def clock_lines(group: str, spread_ms: int, *, differ: bool) -> Iterator[str]:
    """Return the metrics of clocks: by how much they differ, and whether nothing is deleted for its age by them."""
    for name, value in (("clock_spread_seconds", f"{spread_ms / 1000:g}"), ("clocks_differ", int(differ))):
        yield f"# TYPE {PREFIX}_{name} gauge"
        yield f'{PREFIX}_{name}{{group="{group}"}} {value}'


def count_lines(group: str, counts: Mapping[str, int]) -> Iterator[str]:
    """Return the metrics of a leader's counts."""
    for name in sorted(counts):
        yield f"# TYPE {PREFIX}_{name}_total counter"
        yield f'{PREFIX}_{name}_total{{group="{group}"}} {counts[name]}'


def fault_lines(group: str, faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return the metrics of streams in an error state: their number, and each with the code of its refusal."""
    found = list(faults)
    yield f"# TYPE {PREFIX}_streams_in_error gauge"
    yield f'{PREFIX}_streams_in_error{{group="{group}"}} {len(found)}'
    yield f"# TYPE {PREFIX}_stream_error gauge"
    for stream, code in found:
        yield f'{PREFIX}_stream_error{{group="{group}",stream="{stream}",code="{code}"}} 1'


def adopted_lines(group: str, topics: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return a metric for each stream and the topic that it has adopted, by which metrics of either find the other."""
    yield f"# TYPE {PREFIX}_adopted_topic gauge"
    for stream, topic in topics:
        yield f'{PREFIX}_adopted_topic{{group="{group}",stream="{stream}",topic="{topic}"}} 1'


def beside_lines(group: str, merges: int) -> Iterator[str]:
    """Return the metric of large transactions that are being merged beside the line."""
    yield f"# TYPE {PREFIX}_merges_beside gauge"
    yield f'{PREFIX}_merges_beside{{group="{group}"}} {merges}'


def growth_lines(group: str, streams: Iterable[tuple[str, int, int]]) -> Iterator[str]:
    """Return the metrics of what streams have: their topics of segments, and the epochs that are kept."""
    found = list(streams)
    for what, place in (("topics", 1), ("epochs", 2)):
        yield f"# TYPE {PREFIX}_stream_{what} gauge"
        for item in found:
            yield f'{PREFIX}_stream_{what}{{group="{group}",stream="{item[0]}"}} {item[place]}'


def coordinator_lines(name: str, version: str, *, healthy: bool, groups: int, led: int) -> Iterator[str]:
    """Return the metrics of the coordinator: its name, whether it is fit to lead, and how many groups it leads."""
    escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    yield f"# TYPE {PREFIX}_coordinator_info gauge"
    yield f'{PREFIX}_coordinator_info{{name="{escaped}",version="{version}"}} 1'
    for what, value in (("healthy", int(healthy)), ("groups", groups), ("groups_led", led)):
        yield f"# TYPE {PREFIX}_coordinator_{what} gauge"
        yield f"{PREFIX}_coordinator_{what} {value}"


def process_lines(*, cpu_s: float, resident_bytes: int, open_files: int, started_s: float) -> Iterator[str]:
    """Return the metrics of the process, by the names that Prometheus' own clients use."""
    for what, kind, value in (
        ("cpu_seconds_total", "counter", cpu_s),
        ("resident_memory_bytes", "gauge", resident_bytes),
        ("open_fds", "gauge", open_files),
        ("start_time_seconds", "gauge", started_s),
    ):
        yield f"# TYPE process_{what} {kind}"
        yield f"process_{what} {value}"


def joined(sheets: Iterable[Iterable[str]]) -> str:
    """Join the metrics of several groups to one document, where all samples of a metric must stand together."""
    families: dict[str, list[str]] = {}
    for sheet in sheets:
        samples: list[str] = []
        for line in sheet:
            if line.startswith("#"):
                samples = families.setdefault(line, [])
            else:
                samples.append(line)
    return "".join(f"{line}\n" for head, samples in families.items() for line in (head, *samples))


# Readiness


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a coordinator knows of itself at one moment."""

    connected: bool
    """Its ZooKeeper session is known to live."""
    registered: bool
    """It stands among the coordinators, in this session."""
    answered: bool
    """Kafka answers, as far as is known."""
    ended: Sequence[str] = ()
    """Groups whose thread has ended although the coordinator goes on."""


def faults(vitals: Vitals) -> Iterator[str]:
    """Return what keeps it from leading; nothing if it is healthy, whether or not it has a group to lead."""
    if not vitals.connected:
        yield "not connected to ZooKeeper"
    elif not vitals.registered:
        yield "not registered among the coordinators"
    if not vitals.answered:
        yield "Kafka does not answer"
    for group in vitals.ended:
        yield f"the thread of group {group} has ended"
