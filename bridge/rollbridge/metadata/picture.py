"""One picture of a cluster, as ZooKeeper has it, and what is wrong in it. Pure.

Status, page, ``state.json``, lists and doctor are made of it, so what is an error on one of them is one on all:
:meth:`ClusterPicture.faults` alone judges. The doctor adds what it hears from Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rollbridge.metadata.changes import METADATA_UNREADABLE, StreamFault
from rollbridge.metadata.journal import LOG_BEGINS
from rollbridge.metadata.records import Coordinator, Group, Lead
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName

ERROR: Final = "error"
"""State of a stream with a fault, whatever else it does."""
TAKEOVER_MS: Final = 10_000
"""Duration beyond which a takeover is told of: nothing is committed meanwhile."""
NO_LEADER: Final = "the group has no leader, so none of its transactions is committed"
NO_COORDINATOR: Final = "none is registered"


class PartFault(NamedTuple):
    """Something that does not work.

    Attributes:
        part: ``coordinator``, ``group`` or ``stream``.
        name: Which; empty for all of them.
        code: Stable: the name of the doctor's check, or of the stream's fault.
        what: Description, without the name.
        topic: Topic that is refused; empty if it is about none.
    """

    part: str
    name: str
    code: str
    what: str
    topic: str = ""

    @property
    def label(self) -> str:
        """Part and name."""
        return f"{self.part} {self.name}".rstrip()

    @property
    def state(self) -> str:
        """Description in a table: of a stream the code, as its reason can be long."""
        return f"{ERROR} {self.code}" if self.part == "stream" else self.what


def stream_state(config: StreamConfig, fault: StreamFault | None) -> str:
    return ERROR if fault is not None else config.state.value.lower()


def shown_state(config: StreamConfig, fault: StreamFault | None) -> str:
    """Return the state of a stream in words for people: with the code of its fault, if it has one."""
    return stream_state(config, fault) if fault is None else f"{ERROR} {fault.code}"


def coordinator_faults(name: str, record: Coordinator | None) -> Iterator[PartFault]:
    """Yield what is wrong with a coordinator, as it says itself."""
    for broker in () if record is None else record.unreachable:
        yield PartFault("coordinator", name, "broker-unreachable", f"cannot reach {broker}")


@dataclass(frozen=True, slots=True)
class GroupPicture:
    """Transaction group.

    Attributes:
        record: Its record; nothing but its name if that cannot be read.
        lead: Its leader; None if there is none.
        committing_ms, scaling_ms: Start of the rolling commit or scale in progress; None if there is none.
        clock_ms: Lead of its leader's clock over ZooKeeper's at the takeover; negative if behind.
        last_leader: Coordinator that leads it, or led it last; empty if none ever has.
        outdated: State that ZooKeeper has lost, as a leader has found; None if nothing.
        unreadable: Nodes of its changes that cannot be read, or were put aside as they could not.
        record_fault: Which record of it cannot be read, and why.
    """

    record: Group
    lead: Lead | None = None
    committing_ms: int | None = field(default=None, kw_only=True)
    scaling_ms: int | None = field(default=None, kw_only=True)
    clock_ms: int = field(default=0, kw_only=True)
    last_leader: str = field(default="", kw_only=True)
    outdated: str | None = field(default=None, kw_only=True)
    unreadable: Sequence[str] = field(default=(), kw_only=True)
    record_fault: str = field(default="", kw_only=True)

    @property
    def name(self) -> GroupName:
        return self.record.name

    @property
    def leader(self) -> str | None:
        return None if self.lead is None else self.lead.name

    def fault(self, now_ms: int) -> PartFault | None:
        """Return why nothing of it is committed; None if it is."""
        name, lead = str(self.name), self.lead
        if self.record_fault:
            return PartFault("group", name, METADATA_UNREADABLE, f"its record {self.record_fault}")
        if self.outdated == LOG_BEGINS.decode():
            what = "it has no leader: a restart of its commit log was interrupted"
            return PartFault("group", name, "topic-replaced", what)
        if self.outdated is not None:
            what = f"it has no leader: ZooKeeper was set back, as from a backup: {self.outdated}"
            return PartFault("group", name, "zookeeper-outdated", what)
        if lead is None:
            return PartFault("group", name, "no-leader", NO_LEADER)
        if not lead.is_serving and now_ms - lead.since_ms > TAKEOVER_MS:
            what = f"coordinator {lead.name} has been taking it over for {(now_ms - lead.since_ms) // 1000} s"
            return PartFault("group", name, "taking-over", what)
        return None


@dataclass(frozen=True, slots=True)
class StreamPicture:
    """Stream, and the reason why its transactions are not merged, if it is in an error state."""

    config: StreamConfig
    error: StreamFault | None = field(default=None, kw_only=True)

    @property
    def fault(self) -> PartFault | None:
        """Return why its transactions are not merged; None if they are."""
        if self.error is None:
            return None
        what = f"{self.error.effect}: {self.error.reason}"
        return PartFault("stream", str(self.config.name), self.error.code, what, self.error.topic)


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """Coordinators, groups and streams of a cluster.

    Attributes:
        now_ms: Time of the look, ms since 1970.
        coordinators: Those that are alive.
        records: What they say of themselves, as far as it can be read.
        unreadable: Streams whose settings cannot be read, with the reasons.
    """

    now_ms: int
    coordinators: Sequence[str] = field(default=(), kw_only=True)
    records: Mapping[str, Coordinator] = field(default_factory=dict, kw_only=True)
    groups: Sequence[GroupPicture] = field(default=(), kw_only=True)
    streams: Sequence[StreamPicture] = field(default=(), kw_only=True)
    unreadable: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def faults(self) -> Iterator[PartFault]:
        """Yield what does not work."""
        if not self.coordinators:
            yield PartFault("coordinator", "", "no-coordinator", NO_COORDINATOR)
        for name in self.coordinators:
            yield from coordinator_faults(name, self.records.get(name))
        yield from (fault for group in self.groups if (fault := group.fault(self.now_ms)))
        for stream, why in self.unreadable.items():
            yield PartFault("stream", stream, METADATA_UNREADABLE, f"its settings cannot be read: {why}")
        yield from (fault for item in self.streams if (fault := item.fault))
