"""JSON documents of the live page, made of values, for the page and for ``curl``. Pure.

Names and meanings of fields are stable within :data:`VERSION`; fields may be added. Times are ``..._ms`` since 1970,
UTC; durations are ``..._ms`` too, and rates are ``..._per_s``. Unknown values are null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollbridge.base.ids import SegmentId
from rollbridge.buffer.fold import Stranger
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.gateways import GatewayRecord, is_gateway_label
from rollbridge.metadata.picture import ClusterPicture, GroupPicture, StreamPicture, coordinator_faults, stream_state
from rollbridge.metadata.records import Coordinator, TransactionRecord
from rollbridge.metadata.requests import NAMED_MAX, WaitCause
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory, TruncatedHistory
from rollbridge.stream.names import Partition
from rollbridge.stream.picture import DrawnLoad
from rollbridge_coordinator.commit.waiting import CAUSES
from rollbridge_coordinator.core.metrics import PastRound
from rollbridge_coordinator.page.overview import (
    LISTED_MAX,
    STEP_MS,
    Listing,
    LiveGroup,
    LiveStream,
    LiveTransaction,
    Period,
)

VERSION: Final = 1
"""Raised when a field is removed or changes its meaning; paths of the API hold it as well."""
EPOCHS_SHOWN: Final = 50
"""Epochs of a stream that are listed and drawn; more would not be readable."""
DRAWN_MAX: Final = 1_000
"""Segments that are drawn, unless a single epoch has more."""
STREAMS_IN_STATE: Final = 1_000
"""Streams of ``state.json``: first those in an error state."""
SEGMENTS_SHOWN: Final = 200
"""Active segments of a stream that are measured and listed."""

Document = dict[str, Any]


# The coordinator and its groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadView:
    """Leader of a group, from ZooKeeper.

    Attributes:
        picture: The group.
        page: URL of its leader's page, if known.
        is_here: True if that is this coordinator.
    """

    picture: GroupPicture
    page: str | None = None
    is_here: bool = False

    @property
    def group(self) -> str:
        """``scope/group``."""
        return str(self.picture.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A group that is led here: its present state, and its last minute."""

    live: LiveGroup
    minute: Period | None = None


def lead_document(lead: LeadView, now_ms: int) -> Document:
    """Return the leader of a group, and what is wrong with it."""
    known, fault = lead.picture.lead, lead.picture.fault(now_ms)
    return {
        "fault": None if fault is None else fault.what,
        "group": lead.group,
        "leader": lead.picture.leader,
        "since_ms": None if known is None else known.since_ms,
        "serving": known is not None and known.is_serving,
        "here": lead.is_here,
        "page": lead.page,
    }


def glance_document(overview: Overview | None) -> Document:
    """Return the present state of a group that is led here; all of it is null if it is led elsewhere."""
    if overview is None:
        return dict.fromkeys(
            (
                "streams",
                "streams_in_error",
                "open_transactions",
                "open_bytes",
                "oldest_age_ms",
                "least_lease_left_ms",
                "lag_messages",
                "lag_ms",
                "waiting_changes",
                *_RATES,
            )
        )
    live = overview.live
    return {
        "streams": live.streams_count,
        "streams_in_error": live.faults_count,
        "open_transactions": sum(live.states.values()),
        "open_bytes": live.open_bytes,
        "oldest_age_ms": None if live.oldest_ms is None else max(live.at_ms - live.oldest_ms, 0),
        "least_lease_left_ms": None if live.deadline_ms is None else live.deadline_ms - live.at_ms,
        "lag_messages": live.lag,
        "lag_ms": live.lag_ms,
        "waiting_changes": live.waiting_changes,
        **rates_document(overview.minute),
    }


_RATES: Final = (
    "commits_per_s",
    "aborts_per_s",
    "records_per_s",
    "bytes_per_s",
    "commit_latency_p50_ms",
    "commit_latency_p99_ms",
)


def rates_document(period: Period | None) -> Document:
    """Return the rates of a period; null where unknown."""
    if period is None or not period.ms:
        return dict.fromkeys(_RATES)
    return {
        "commits_per_s": _rounded(period.per_second(period.committed)),
        "aborts_per_s": _rounded(period.per_second(period.aborted)),
        "records_per_s": _rounded(period.per_second(period.records)),
        "bytes_per_s": _rounded(period.per_second(period.bytes)),
        "commit_latency_p50_ms": _rounded(period.latency_ms(0.5)),
        "commit_latency_p99_ms": _rounded(period.latency_ms(0.99)),
    }


def last_hour_document(group: str, periods: Iterable[Period], now_ms: int) -> Document:
    """Return the last hour of a group, oldest first, without times in which it was led elsewhere."""
    return {
        "version": VERSION,
        "group": group,
        "now_ms": now_ms,
        "step_ms": STEP_MS,
        "points": [{"at_ms": item.at_ms, "ms": item.ms, **rates_document(item)} for item in periods if item.ms],
    }


def state_document(
    picture: ClusterPicture, groups: Sequence[Document], waiting: Mapping[str, list[Document]]
) -> Document:
    """Return all that is known of a cluster at one moment: what is wrong in it first.

    Args:
        groups: Entries of the overview.
        waiting: All that waits in each group that is led here, by name.
    """
    streams = sorted(picture.streams, key=lambda item: item.error is None)
    return {
        "version": VERSION,
        "now_ms": picture.now_ms,
        "faults": [item._asdict() for item in picture.faults()],
        "coordinators": [coordinator_entry(name, picture.records.get(name)) for name in picture.coordinators],
        "groups": [{**entry, "waiting": waiting.get(entry["group"])} for entry in groups],
        "streams": [stream_entry(item.config, item.error) for item in streams[:STREAMS_IN_STATE]],
        "streams_not_listed": max(len(streams) - STREAMS_IN_STATE, 0),
    }


def coordinator_entry(name: str, record: Coordinator | None) -> Document:
    """Return a coordinator that is alive."""
    return {
        "name": name,
        "release": None if record is None else record.release or None,
        "page": None if record is None else record.page or None,
        "faults": [item.what for item in coordinator_faults(name, record)],
    }


# Transactions


def transaction_entry(item: LiveTransaction, now_ms: int) -> Document:
    """Return an open transaction."""
    return {
        "transaction": item.id,
        "state": item.state,
        "client": item.client,
        "label": item.label,
        "through_gateway": is_gateway_label(item.label),
        "transactional_id": None,
        "gateway": None,
        "begun_ms": item.begun_ms,
        "age_ms": max(now_ms - item.begun_ms, 0),
        "lease_ends_ms": item.deadline_ms,
        "lease_left_ms": item.deadline_ms - now_ms,
        "bytes": item.bytes,
        "frames": item.frames,
        "streams": list(item.streams),
        "more_streams": item.streams_count - len(item.streams),
    }


@dataclass(frozen=True, slots=True)
class ProducerOrigin:
    """Origin of a transaction that a producer began through a gateway.

    Attributes:
        transactional_id: Its transactional id; None if not on record.
        gateway: The gateway that serves it; empty if none does.
    """

    transactional_id: str | None = None
    gateway: str = ""


def clients_at_gateways(group: Document) -> list[str]:
    """Return the clients of the listed transactions of a group that producers began through gateways."""
    listed = (*group["transactions"]["oldest"], *group["transactions"]["largest"])
    return sorted({item["client"] for item in listed if item["through_gateway"]})


def with_origins(group: Document, origins: Mapping[str, ProducerOrigin]) -> Document:
    """Add the producers of its listed transactions to the document of a group.

    Args:
        origins: Known origins, by client name.
    """

    def told(item: Document) -> Document:
        known = origins.get(item["client"]) if item["through_gateway"] else None
        if known is None:
            return item
        return {**item, "transactional_id": known.transactional_id, "gateway": known.gateway}

    listing = group["transactions"]
    lists = {name: [told(item) for item in listing[name]] for name in ("oldest", "largest")}
    return {**group, "transactions": {**listing, **lists}}


def gateway_entry(gateway: GatewayRecord) -> Document:
    """Return a gateway that is registered."""
    return {
        "name": gateway.name,
        "address": gateway.address,
        "release": gateway.release or None,
        "since_ms": gateway.since_ms or None,
        "encrypted": gateway.encrypted,
        "brokers": len(gateway.ports),
        "lacking_rights": len(gateway.lacking),
    }


def listing_document(
    listing: Listing, states: Mapping[str, int], size: int | None, now_ms: int, source: str
) -> Document:
    """Return the open transactions of a group: two lists, and the number of all.

    Args:
        states: Number in each state.
        size: Bytes of all of them; None if unknown.
        now_ms: Time for their ages.
        source: ``leader``, or ``zookeeper`` if the group is led elsewhere: then only transactions older than a moment
            are included, without sizes.
    """
    listed = {item.id for item in (*listing.oldest, *listing.largest)}
    return {
        "source": source,
        "listed_ms": listing.at_ms,
        "count": listing.count,
        "bytes": size,
        "states": dict(states),
        "not_listed": max(listing.count - len(listed), 0),
        "oldest": [transaction_entry(item, now_ms) for item in listing.oldest],
        "largest": [transaction_entry(item, now_ms) for item in listing.largest],
    }


def recorded_listing(records: Sequence[TransactionRecord], count: int, now_ms: int) -> Listing:
    """Return the open transactions in ZooKeeper, the oldest of ``count``, without sizes."""
    oldest = tuple(
        LiveTransaction(
            id=str(record.id),
            state=record.state,
            client=record.client_name,
            label=record.label or "",
            begun_ms=record.begun_ms,
            deadline_ms=record.begun_ms + record.lease_ms,
            bytes=None,
            frames=None,
            streams=tuple(record.streams)[:NAMED_MAX],
            streams_count=len(record.streams),
        )
        for record in records[:LISTED_MAX]
    )
    return Listing(now_ms, count, oldest, ())


# A group


def round_document(item: PastRound) -> Document:
    """Return a committed round."""
    return {
        "at_ms": item.at_ms,
        "path": item.path.value,
        "transactions": item.transactions,
        "aborted": item.aborted,
        "records": sum(records for records, _ in item.volumes.values()),
        "bytes": sum(size for _, size in item.volumes.values()),
        "waited_ms": item.waited_ms,
        "streams": list(item.volumes)[:NAMED_MAX],
        "more_streams": max(len(item.volumes) - NAMED_MAX, 0),
    }


def fault_document(fault: StreamFault | None) -> Document | None:
    """Return the reason why a stream's transactions wait; None if they do not."""
    if fault is None:
        return None
    return {"code": fault.code, "reason": fault.reason, "topic": fault.topic, "since_ms": fault.since_ms}


def stream_entry(config: StreamConfig, fault: StreamFault | None = None) -> Document:
    """Return a stream as in ZooKeeper; facts known only to its leader are null."""
    return {
        "stream": str(config.name),
        "state": stream_state(config, fault),
        "topic": config.topic or None,
        "fault": fault_document(fault),
        "epoch": None,
        "segments": None,
        "open_transactions": None,
        "open_bytes": None,
        "lag_messages": None,
        "lag_ms": None,
        "held_bytes": None,
        "committed_records_per_s": None,
        "committed_bytes_per_s": None,
    }


def live_stream_entry(stream: LiveStream, rates: tuple[float, float] | None) -> Document:
    """Return a stream that is led here, with the rates of records and bytes that transactions commit to it."""
    return {
        **stream_entry(stream.config, stream.fault),
        "epoch": int(stream.history.active.epoch),
        "segments": len(stream.history.active.segments),
        "open_transactions": stream.open,
        "open_bytes": stream.open_bytes,
        "lag_messages": stream.lag,
        "lag_ms": stream.lag_ms,
        "held_bytes": stream.held_bytes,
        "committed_records_per_s": None if rates is None else _rounded(rates[0]),
        "committed_bytes_per_s": None if rates is None else _rounded(rates[1]),
    }


def led_group_document(lead: LeadView, overview: Overview, earlier: LiveGroup | None) -> Document:
    """Return a group that is led here; ``earlier`` is its state some seconds ago, for rates."""
    live = overview.live
    rates = stream_rates(earlier, live)
    return {
        "version": VERSION,
        "now_ms": live.at_ms,
        **lead_document(lead, live.at_ms),
        "controller_epoch": live.controller_epoch,
        "summary": glance_document(overview),
        "transactions": listing_document(live.listing, live.states, live.open_bytes, live.at_ms, "leader"),
        "streams": [
            *(stream_entry(config, fault) for config, fault in live.unled),
            *(live_stream_entry(item, rates.get(str(item.config.name))) for item in live.streams),
        ],
        "streams_not_listed": live.streams_count - len(live.unled) - len(live.streams),
        "rounds": [round_document(item) for item in reversed(live.rounds)],
        "waiting": waiting_entries(live),
        "waiting_not_listed": live.waits_count - len(live.waits),
        "foreign": stranger_document(live.foreign, live.stranger),
    }


def waiting_entries(live: LiveGroup) -> list[Document]:
    """Return what waits in a group that is led here, the longest wait first."""
    return [
        {
            **item.document(),
            "half_done": item.cause is WaitCause.HALF_DONE,
            "bound": CAUSES[item.cause].bound,
        }
        for item in live.waits
    ]


def stranger_document(count: int, last: Stranger | None) -> Document | None:
    """Return the foreign messages of buffers, that are no frames; None if there were none in this term."""
    if last is None:
        return None
    return {
        "messages": count,
        "topic": last.partition[0],
        "partition": last.partition[1],
        "offset": last.offset,
        "at_ms": last.appended_ms,
        "key": None if last.key is None else last.key.decode(errors="replace"),
        "value": None if last.value is None else last.value.decode(errors="replace"),
    }


def other_group_document(
    lead: LeadView,
    streams: Sequence[StreamPicture],
    streams_count: int,
    records: Sequence[TransactionRecord],
    count: int,
    now_ms: int,
) -> Document:
    """Return ZooKeeper's facts about a group that is led elsewhere, or not at all.

    Args:
        streams: Its streams, or the first of them.
        records: Its open transactions, oldest first, or the oldest of them.
    """
    states: dict[str, int] = {}
    for record in records:
        states[record.state] = states.get(record.state, 0) + 1
    return {
        "version": VERSION,
        "now_ms": now_ms,
        **lead_document(lead, now_ms),
        "controller_epoch": None,
        "summary": glance_document(None),
        "transactions": listing_document(recorded_listing(records, count, now_ms), states, None, now_ms, "zookeeper"),
        "streams": [stream_entry(item.config, item.error) for item in streams],
        "streams_not_listed": streams_count - len(streams),
        "rounds": [],
        "waiting": [],
        "waiting_not_listed": 0,
        "foreign": None,
    }


def stream_rates(earlier: LiveGroup | None, now: LiveGroup) -> dict[str, tuple[float, float]]:
    """Return the records and bytes per second that transactions committed to each stream between two states.

    Empty without an earlier state of this term.
    """
    if earlier is None or earlier.controller_epoch != now.controller_epoch or earlier.at_ms >= now.at_ms:
        return {}
    seconds = (now.at_ms - earlier.at_ms) / 1000
    before = {str(item.config.name): item for item in earlier.streams}
    found = {}
    for item in now.streams:
        then = before.get(str(item.config.name))
        if then is not None and item.records >= then.records and item.bytes >= then.bytes:
            found[str(item.config.name)] = (
                (item.records - then.records) / seconds,
                (item.bytes - then.bytes) / seconds,
            )
    return found


# A stream


@dataclass(frozen=True, slots=True)
class Measure:
    """Kafka's measurements of the partitions of a stream's active segments.

    Attributes:
        at_ms: Time.
        ends: Offset after the last record of each.
        sizes: Bytes of each on the disk of its leader; empty without the right.
        fault: Partial failure; empty if none.
    """

    at_ms: int
    ends: Mapping[Partition, int] = field(default_factory=dict)
    sizes: Mapping[Partition, int] = field(default_factory=dict)
    fault: str = ""


def offset_rate(before: Measure | None, now: Measure | None, place: Partition) -> float | None:
    """Return a partition's offsets per second between two measurements; None if unknown."""
    if before is None or now is None or before.at_ms >= now.at_ms:
        return None
    if place not in before.ends or place not in now.ends:
        return None
    return max(now.ends[place] - before.ends[place], 0) * 1000 / (now.at_ms - before.at_ms)


def newest_epochs(history: EpochHistory) -> EpochHistory:
    """Return the end of a history that can be drawn, as if the stream had dropped all earlier epochs."""
    first, segments = len(history.records) - 1, len(history.active.segments)
    while first > max(0, len(history.records) - EPOCHS_SHOWN):
        segments += len(history.ended_with(history.records[first].epoch))
        if segments > DRAWN_MAX:
            break
        first -= 1
    if not first:
        return history
    records = history.records[first:]
    foundation = TruncatedHistory(records[0].epoch, history.created_ms, (0,) * len(records[0].segments))
    return EpochHistory(records, foundation=foundation)


def measured_places(config: StreamConfig, history: EpochHistory) -> dict[SegmentId, Partition]:
    of = config.places.of
    return {item.id: of(item.id) for item in history.active.segments[:SEGMENTS_SHOWN]}


def segment_loads(
    config: StreamConfig, history: EpochHistory, measures: tuple[Measure | None, Measure | None]
) -> dict[SegmentId, DrawnLoad]:
    """Return the load of the shown active segments, as far as measured."""
    before, last = measures
    if last is None:
        return {}
    return {
        segment: DrawnLoad(offset_rate(before, last, place), last.sizes.get(place))
        for segment, place in measured_places(config, history).items()
    }


def stream_document(
    config: StreamConfig,
    history: EpochHistory,
    fault: StreamFault | None,
    measures: tuple[Measure | None, Measure | None],
    now_ms: int,
) -> Document:
    """Return a stream: its active segments with rates and sizes, and its last epochs.

    Args:
        fault: Reason why its transactions wait, if it is in an error state.
        measures: The measurement before, and the last one.
    """
    last = measures[1]
    loads = segment_loads(config, history, measures)
    active = history.active
    shown = newest_epochs(history)
    nodes = shown.graph.nodes
    segments = []
    for segment, place in measured_places(config, history).items():
        node = nodes[segment]
        load = loads.get(segment, DrawnLoad(None, None))
        segments.append(
            {
                "segment": str(segment),
                "number": segment.number,
                "low": node.segment.range.low,
                "high": node.segment.range.high,
                "since_epoch": None if node.first == shown.first > history.born else node.first,
                "topic": place[0],
                "partition": place[1],
                "end_offset": None if last is None else last.ends.get(place),
                "bytes": load.bytes,
                "offsets_per_s": _rounded(load.per_s),
            }
        )
    epochs = shown.records
    return {
        "version": VERSION,
        "now_ms": now_ms,
        "stream": str(config.name),
        "group": str(config.group),
        "state": stream_state(config, fault),
        "topic": config.topic or None,
        "fault": fault_document(fault),
        "epoch": int(active.epoch),
        "reference_epoch": int(active.reference_epoch),
        "first_epoch": int(history.first),
        "measured_ms": None if last is None else last.at_ms,
        "measure_fault": None if last is None or not last.fault else last.fault,
        "segments": segments,
        "segments_not_listed": len(active.segments) - len(segments),
        "epochs": [
            {
                "epoch": int(record.epoch),
                "cause": record.cause.value,
                "reference_epoch": int(record.reference_epoch),
                "created_ms": record.created_ms,
                "segments": len(record.segments),
            }
            for record in reversed(epochs)
        ],
        "epochs_not_listed": len(history.records) - len(epochs),
    }


# Errors


def error_document(code: str, message: str) -> Document:
    return {"version": VERSION, "error": {"code": code, "message": message}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
