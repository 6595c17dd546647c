"""The metrics of a coordinator: name, meaning and remedy of each, and the samples of the present values. Pure.

:mod:`rollbridge_coordinator.daemon.health` serves the samples, or writes them to files. Label values of closed sets
exist from the first scrape on, at 0. Metrics of snapshots have the names of PIP-196, with our prefix in place of
``pulsar``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rollbridge.base.effects import Effect
from rollbridge.base.metrics import PREFIX, Family, FamilyKind, Histogram, Sample
from rollbridge.buffer.table import AbortCause, Rejection, State
from rollbridge.metadata.requests import RequestKind, WaitKind
from rollbridge_coordinator.commit.waiting import waits_of
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.metrics import Answered, CommitPath, LeaderView, Op, Warmth, lag_of
from rollbridge_coordinator.core.state import GroupState

SNAPSHOT: Final = f"{PREFIX}_txn_tb_snapshot"
UNKNOWN: Final = float("nan")
OPEN_STATES: Final = (State.OPEN, State.COMMITTING, State.ABORTING)
EFFECTS: Final = tuple(sorted({kind.__name__ for kind in Effect.__subclasses__() if kind.__module__ == fx.__name__}))
"""Names of the kinds of effects that a leader has."""
ZOOKEEPER_OPERATIONS: Final = ("read", "write", "multi")


TEXT_CHARACTERS_MAX: Final = 64
"""Limit on client names and labels in labels of metrics: each takes room in Prometheus."""


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"


def _gauge(name: str, labels: str, about: str, advice: str = "") -> Family:
    return Family(f"{PREFIX}_{name}", FamilyKind.GAUGE, about, tuple(labels.split()), advice)


def _counter(name: str, labels: str, about: str, advice: str = "") -> Family:
    return Family(f"{PREFIX}_{name}_total", FamilyKind.COUNTER, about, tuple(labels.split()), advice)


def _histogram(name: str, labels: str, about: str, advice: str = "") -> Family:
    return Family(f"{PREFIX}_{name}", FamilyKind.HISTOGRAM, about, tuple(labels.split()), advice)


# The coordinator

INFO: Final = _gauge("coordinator_info", "name version", "Always 1; names the coordinator and its version.")
HEALTHY: Final = _gauge(
    "coordinator_healthy", "", "1 if the coordinator could lead a group now.", "`/healthz` says what keeps it from that"
)
GROUPS: Final = _gauge("coordinator_groups", "", "Groups that the coordinator knows.")
GROUPS_LED: Final = _gauge(
    "coordinator_groups_led",
    "",
    "Groups that it leads.",
    "if the sum over all coordinators is below `rollbridge_coordinator_groups`, a group has no leader",
)
LEADS_GIVEN_UP: Final = _counter(
    "coordinator_leads_given_up",
    "",
    "Terms that this coordinator ended since they got nowhere; others compete for the group before it then.",
    "its log says why; if only one coordinator counts them, look at its way to the brokers",
)
ZOOKEEPER_CONNECTED: Final = _gauge(
    "zookeeper_connected", "", "1 while the ZooKeeper session is known to live.", "look at ZooKeeper, and the network"
)
ZOOKEEPER_INTERRUPTIONS: Final = _counter(
    "zookeeper_interruptions", "", "Times that the connection to ZooKeeper was lost.", "the same, if it rises"
)
ZOOKEEPER_REQUEST: Final = _histogram(
    "zookeeper_request_duration_seconds",
    "operation",
    "Time to the answer of a request to ZooKeeper.",
    "ZooKeeper writes each change to disk: give it one of its own",
)

# Transactions

OPEN: Final = _gauge(
    "open_transactions", "group state", "Transactions whose outcome is not in the commit log yet, by state."
)
OPEN_BYTES: Final = _gauge("open_transactions_bytes", "group", "Bytes of the frames of open transactions.")
OLDEST_AGE: Final = _gauge(
    "oldest_transaction_age_seconds",
    "group",
    "Age of the oldest open transaction; 0 without one.",
    "it pins the buffers: `rollbridge txn list`; end it, or `rollbridge txn abort ID`",
)
OLDEST: Final = _gauge(
    "oldest_transaction_info",
    "group transaction client label",
    "Always 1; names the oldest open transaction. Absent without one.",
)
LEASE_LEFT: Final = _gauge(
    "least_lease_left_seconds",
    "group",
    "Time until the first lease of an open transaction ends; not a number without one.",
    "its client has to commit, or to extend the lease",
)
HELD_BYTES: Final = _gauge(
    "transactions_held_bytes",
    "group",
    "Memory of open transactions without cached frames, estimated.",
    "from three quarters of `HELD_BYTES_MAX` on transactions are refused",
)
CACHED_BYTES: Final = _gauge(
    "transactions_cached_bytes",
    "group",
    "Memory that cached frames of open transactions take.",
    "at `CACHE_BYTES_MAX` frames are read again at the merge, which takes longer",
)
STREAM_OPEN: Final = _gauge(
    "stream_open_transactions", "group stream", "Open transactions that write to the stream, or could."
)
STREAM_OPEN_BYTES: Final = _gauge(
    "stream_open_transactions_bytes", "group stream", "Bytes of the frames that open transactions have for the stream."
)
COMMIT_LATENCY: Final = _histogram(
    "commit_latency_seconds",
    "group path",
    "Time from the arrival of a COMMIT frame at the leader to the commit, by the way that the transaction took.",
    "compare with `rollbridge_merge_duration_seconds`: what is left is waiting",
)
COMMITTED: Final = _counter("transactions_committed", "group", "Transactions that were committed.")
ABORTED: Final = _counter(
    "transactions_aborted", "group reason", "Transactions that ended as aborted, by reason.", "see the reasons below"
)
STREAM_RECORDS: Final = _counter("stream_committed_records", "group stream", "Records committed by transactions.")
STREAM_BYTES: Final = _counter(
    "stream_committed_bytes", "group stream", "Bytes of their frames, as compressed by the clients."
)

# Rounds and what they wait for

ROUND_TRANSACTIONS: Final = _histogram(
    "round_transactions",
    "group",
    "Transactions in a round, which is one native transaction; its count is that of rounds.",
)
ROUND_BYTES: Final = _histogram("round_bytes", "group", "Bytes of the frames that a round commits.")
MERGE: Final = _histogram(
    "merge_duration_seconds",
    "group",
    "Time from the first append of a round to its commit.",
    "look at the brokers: `acks=all` waits for all replicas in sync",
)
SEAL: Final = _histogram(
    "seal_duration_seconds",
    "group",
    "Time that a seal of segments took, waiting for native transactions of others included.",
    "`rollbridge doctor` names native transactions of others that are open for long",
)
WAITING: Final = _gauge(
    "waiting_changes",
    "group kind",
    "Scales and rolling commits that wait for native transactions of others, or for partition leaders.",
    "the leader's log names the obstacles",
)
LONGEST_WAIT: Final = _gauge("longest_wait_seconds", "group", "Wait of the first of them so far; 0 without one.")
BESIDE: Final = _gauge("merges_beside", "group", "Large transactions that are being merged in the background.")
EFFECT: Final = Family(
    f"{PREFIX}_effect_duration_seconds",
    FamilyKind.SUMMARY,
    "Number and time of what the leader has asked of Kafka and ZooKeeper, by kind of effect.",
    ("group", "effect"),
    "where the leader's time goes",
)

# The buffers and the commit log

LAG_MESSAGES: Final = _gauge(
    "stream_fold_lag_messages",
    "group stream",
    "Messages of the stream's buffer that the leader has not folded yet, as of its last fetch.",
    "a leader that lags for minutes has too much to do, or a broker answers slowly",
)
LAG_SECONDS: Final = _gauge(
    "stream_fold_lag_seconds",
    "group stream",
    "Age of the last folded message of the partition that lags the most, 0 while none does; or for how long a broker "
    "has given nothing of one, not even its end.",
    "the same; a broker that is away or holds the leader back, as `quota` in `rollbridge doctor`, gives nothing",
)
REJECTED: Final = _counter(
    "frames_rejected",
    "group reason",
    "Frames and messages of buffers that changed nothing, by reason; those that a takeover reads again count, too.",
    "see the [reasons](protocol-states.md); `foreign`: a writer that is no client of ours; `corrupt`: a broken client; "
    "`newer`: upgrade the coordinators; `crowded`: there are too many open transactions",
)
DROPPED: Final = _counter(
    "frames_dropped",
    "group reason",
    "The same as `rollbridge_frames_rejected_total`, by its name until 0.3.",
)
BUFFER_HELD: Final = _gauge(
    "stream_buffer_held_bytes",
    "group stream",
    "About how many bytes of the buffer cannot be truncated, because an open transaction has frames there.",
    "`rollbridge_oldest_transaction_info` names the transaction",
)
BUFFER_DISK: Final = _gauge(
    "stream_buffer_disk_bytes",
    "group stream",
    "Bytes of the buffer on the disks of partition leaders; not a number before they were measured.",
    "Kafka frees whole files; if it grows all the same, see `rollbridge_stream_buffer_held_bytes`",
)
SESSIONS: Final = _gauge(
    "sessions",
    "group",
    "Client names with a session on record, when that was listed last, about once an hour; not a number before.",
    "each costs a takeover 0.1 ms; names that are used once go a day after their outcomes are forgotten, see "
    "`rollbridge_sessions_forgotten_total`",
)
LOG_DISK: Final = _gauge(
    "commit_log_disk_bytes",
    "group",
    "Bytes of the commit log on the disk of its partition leader; not a number before they were measured.",
    "`rollbridge group update` sets its retention",
)

# Streams

TOPICS: Final = _gauge(
    "stream_topics", "group stream", "Topics of the stream's segments.", "`rollbridge doctor` warns from 1,000 on"
)
EPOCHS: Final = _gauge("stream_epochs", "group stream", "Epochs of the stream that are kept.", "the same from 2,000 on")
IN_ERROR: Final = _gauge("streams_in_error", "group", "Streams in an error state.", "alert when it is not 0")
ERROR: Final = _gauge(
    "stream_error",
    "group stream code",
    "1 for each stream in an error state, with the code of the refusal; absent for all others.",
    "`rollbridge stream describe` says more, see [when something is wrong](troubleshooting.md#when-something-is-wrong)",
)
ADOPTED: Final = _gauge(
    "adopted_topic",
    "group stream topic",
    "1 for each stream that lies in a topic that it has adopted; joins metrics of streams with those of topics.",
)

# Leaders and standbys

REQUESTS: Final = _counter(
    "admin_requests",
    "group kind result",
    "Admin requests that were answered, by kind and result.",
    "the leader's log and the client say why one was refused",
)
CONTROLLER_EPOCH: Final = _gauge(
    "controller_epoch",
    "group",
    "Number of this leader's term; it rises with each change of leaders.",
    "leaders that change often: look at their logs, and at ZooKeeper",
)
READINGS_AGE: Final = _gauge(
    "readings_age_seconds",
    "group",
    "Time since the leader last updated its metrics, which it does every second, between two steps of its "
    "work; as of the scrape, and only served over HTTP.",
    "a leader that waits for a broker for minutes, or is paused, shows old ages and lags",
)
LEADS_SINCE: Final = _gauge(
    "leader_start_time_seconds", "group", "Time at which this leader began to serve, in seconds since 1970."
)
TAKEOVER: Final = _histogram(
    "takeover_duration_seconds",
    "group start",
    "Time that takeovers of this coordinator took: warm behind what its standby had read, or cold.",
    "run a second coordinator, which follows",
)
LAST_TAKEOVER: Final = _gauge(
    "last_takeover_seconds", "group", "Time that the takeover of this term took; not a number before its end."
)
SPREAD: Final = _gauge("clock_spread_seconds", "group", "Largest difference between clocks of machines and brokers.")
DIFFER: Final = _gauge(
    "clocks_differ",
    "group",
    "1 if they differ so much that nothing is deleted by age.",
    "[correct them](retention.md#when-clocks-differ), and restart the coordinator",
)
STANDBY_LAG: Final = _gauge(
    "standby_lag_messages",
    "group",
    "Messages of the buffers that a standby has not read yet; -1 while it follows nothing.",
    "a takeover has to read them",
)
STANDBY_HELD: Final = _gauge(
    "standby_transactions",
    "group",
    "Transactions that a standby holds.",
    "at `STANDBY_TRANSACTIONS_MAX` it pauses, and a takeover is cold",
)

# Snapshots

SEGMENT_OPS: Final = Family(
    f"{SNAPSHOT}_segment_op_total", FamilyKind.COUNTER, "Operations on sealed snapshot segments.", ("group", "op")
)
INDEX_OPS: Final = Family(
    f"{SNAPSHOT}_index_op_total",
    FamilyKind.COUNTER,
    "Operations on snapshot indexes and single snapshots.",
    ("group", "op"),
)
ONGOING_OPS: Final = Family(
    f"{SNAPSHOT}_ongoing_op_total",
    FamilyKind.COUNTER,
    "Operations on records of ongoing transactions.",
    ("group", "op"),
)
SEGMENTS: Final = Family(
    f"{SNAPSHOT}_segment_total", FamilyKind.GAUGE, "Sealed snapshot segments that are kept.", ("group",)
)
ENTRY_BYTES: Final = Family(
    f"{SNAPSHOT}_index_entry_bytes", FamilyKind.HISTOGRAM, "Sizes of snapshot indexes that were written.", ("group",)
)
SNAPSHOT_FAULTS: Final = Family(
    f"{SNAPSHOT}_fault_total",
    FamilyKind.COUNTER,
    "Snapshot records that could not be used, and snapshots that could not be taken.",
    ("group",),
    "the log says which; it is rebuilt without help",
)

# What is only counted

_COUNTS: Final[Mapping[str, tuple[str, str]]] = {
    "answers_expired": ("Answers to admin requests that were not fetched within an hour.", ""),
    "buffer_truncations": ("Truncations of partitions of buffers.", ""),
    "changes_suspended": ("Scales and rolling commits that had to wait half done.", "see `rollbridge_waiting_changes`"),
    "chores_refused": ("Pieces of housekeeping that were refused.", "the leader's log says which"),
    "commit_log_truncations": ("Truncations of the commit log.", ""),
    "commits_forsaken": ("Commits that waited in vain for an earlier one of their connection.", ""),
    "conditions_refused": ("Transactions aborted because a condition does not hold.", ""),
    "counters_set_right": (
        "Times that a counter of ids was behind the ids in use.",
        "ZooKeeper may have been [restored](backup-and-repair.md#when-zookeeper-was-restored-from-a-backup)",
    ),
    "ended_written": ("Times that the list of ended transactions was written.", ""),
    "epochs_dropped": ("Epochs of streams that were dropped with what they held.", ""),
    "foreign_aborted": ("Native transactions of others that were aborted as asked.", ""),
    "late_commits_merged": (
        "Late commits that needed no epochs of their own, because the segments of one before were still open.",
        "",
    ),
    "late_records": (
        "Records that were written to sealed segments, and were forwarded.",
        "`late-records` in `rollbridge doctor`",
    ),
    "late_records_refused": (
        "Such records that could not be forwarded.",
        "write them again, as `rollbridge doctor` says",
    ),
    "merges_beside_begun": ("Background merges of large transactions that were begun.", ""),
    "merges_beside_lost": (
        "Such merges that have to begin again, as they failed or gave their place to others while they had to wait.",
        "if it keeps rising, `rollbridge txn describe` names the obstacles",
    ),
    "offsets_refused": ("Transactions aborted because offsets of a consumer group were refused.", ""),
    "parts_expired": ("Counters of the parts of ended transactions that were removed.", ""),
    "preserver_appended": ("Outcomes of transactions that were remembered.", ""),
    "preserver_expired": ("Remembered outcomes that were forgotten in time.", ""),
    "preserver_flushed": ("Records in which outcomes were remembered.", ""),
    "preserver_repeated": ("Times that outcomes were written again, because others wrote to the commit log.", ""),
    "requests_refused": ("Admin requests that were refused.", "see `rollbridge_admin_requests_total`"),
    "rolling_commits": ("Rolling commits, two epochs each.", "commit what is open before a scale"),
    "rolling_commits_gathered": ("Rolling commits that waited a moment for more.", ""),
    "rolling_commits_held": (
        "Rolling commits that waited for native transactions of others.",
        "see `rollbridge_waiting_changes`",
    ),
    "rolling_commits_undone": ("Rolling commits that were given up, and planned again.", ""),
    "rounds_refused": ("Rounds of which something was refused.", "the leader's log says what"),
    "rounds_repeated": ("Rounds that were done again, because others wrote to their segments.", ""),
    "scales": ("Scales of streams.", ""),
    "scales_by_load": ("Those of them that a scaling policy asked for.", "`rollbridge stream history` says why"),
    "segments_emptied": ("Segments whose last record has been deleted.", ""),
    "segments_removed": ("Segments that were removed, topics and all.", ""),
    "segments_reopened": ("Segments that got successors because they had been closed in vain.", ""),
    "sessions_forgotten": ("Sessions of clients that were forgotten.", ""),
    "stream_faults": ("Times that a stream got into an error state.", "see `rollbridge_stream_error`"),
    "stream_truncations": ("Truncations of segments of streams.", ""),
    "takeovers_tail_unfit": ("1 if this leader could not use its standby's state.", ""),
    "takeovers_warm": ("1 if this leader continued from its standby's state.", ""),
    "topic_changes": ("Times that the limits of an adopted topic were found to be others.", ""),
    "transactions_ended_long_ago": ("Transactions that a takeover met again after their end.", ""),
    "transactions_expired": ("Transactions whose lease has run out.", "their clients died, or take too long"),
    "transactions_not_given_out": ("Transactions aborted because their ids were never given out.", ""),
    "transactions_refused": ("Transactions aborted because Kafka refused something.", "the leader's log says what"),
    "truncations_refused": ("Truncations that Kafka refused.", "a right is missing, or the topic was made compacted"),
}
COUNTS: Final[Mapping[str, Family]] = {
    "transactions_committed": COMMITTED,
    **{name: _counter(name, "group", about, advice) for name, (about, advice) in _COUNTS.items()},
}
"""Families of :attr:`.GroupState.counts`, by the name there. Its ``transactions_aborted`` is shown in more detail
instead, as :data:`ABORTED`.
"""

OF_COORDINATOR: Final = (
    INFO, HEALTHY, GROUPS, GROUPS_LED, LEADS_GIVEN_UP, ZOOKEEPER_CONNECTED, ZOOKEEPER_INTERRUPTIONS, ZOOKEEPER_REQUEST,
)  # fmt: skip
OF_STANDBY: Final = (STANDBY_LAG, STANDBY_HELD)
OF_TRANSACTIONS: Final = (
    OPEN, OPEN_BYTES, OLDEST_AGE, OLDEST, LEASE_LEFT, HELD_BYTES, CACHED_BYTES, COMMITTED, ABORTED, COMMIT_LATENCY,
)  # fmt: skip
OF_ROUNDS: Final = (ROUND_TRANSACTIONS, ROUND_BYTES, MERGE, SEAL, WAITING, LONGEST_WAIT, BESIDE, EFFECT)
OF_STREAMS: Final = (
    STREAM_OPEN, STREAM_OPEN_BYTES, STREAM_RECORDS, STREAM_BYTES, LAG_MESSAGES, LAG_SECONDS, BUFFER_HELD, BUFFER_DISK,
    TOPICS, EPOCHS, IN_ERROR, ERROR, ADOPTED,
)  # fmt: skip
OF_LEADERS: Final = (
    REQUESTS, REJECTED, DROPPED, SESSIONS, LOG_DISK, CONTROLLER_EPOCH, READINGS_AGE, LEADS_SINCE, TAKEOVER,
    LAST_TAKEOVER, SPREAD, DIFFER,
)  # fmt: skip
OF_SNAPSHOTS: Final = (SEGMENT_OPS, INDEX_OPS, ONGOING_OPS, SEGMENTS, ENTRY_BYTES, SNAPSHOT_FAULTS)
OF_COUNTS: Final = tuple(family for family in COUNTS.values() if family is not COMMITTED)
FAMILIES: Final = (
    *OF_COORDINATOR, *OF_TRANSACTIONS, *OF_ROUNDS, *OF_STREAMS, *OF_LEADERS, *OF_STANDBY, *OF_SNAPSHOTS, *OF_COUNTS,
)  # fmt: skip
"""All families, each once."""


def coordinator_samples(
    name: str, version: str, *, healthy: bool, groups: int, led: int, given_up: int
) -> Iterator[Sample]:
    """Return the metrics of the coordinator: its name, its fitness to lead, and its leads."""
    yield Sample(INFO, (name, version), 1)
    yield Sample(HEALTHY, (), int(healthy))
    yield Sample(GROUPS, (), groups)
    yield Sample(GROUPS_LED, (), led)
    yield Sample(LEADS_GIVEN_UP, (), given_up)


def zookeeper_samples(*, connected: bool, interruptions: int, requests: Mapping[str, Histogram]) -> Iterator[Sample]:
    """Return the metrics of its ZooKeeper session; ``requests`` are durations in seconds by operation."""
    yield Sample(ZOOKEEPER_CONNECTED, (), int(connected))
    yield Sample(ZOOKEEPER_INTERRUPTIONS, (), interruptions)
    for operation, durations in requests.items():
        yield Sample(ZOOKEEPER_REQUEST, (operation,), durations)


def standby_samples(group: str, lag: int | None, held: int) -> Iterator[Sample]:
    """Return the metrics of a standby: its lag in messages, None without a tail, and the transactions it holds."""
    yield Sample(STANDBY_LAG, (group,), -1 if lag is None else lag)
    yield Sample(STANDBY_HELD, (group,), held)


def leader_samples(group: GroupState, view: LeaderView) -> Iterator[Sample]:
    """Return the metrics of a leader, from its state and its shell's view."""
    name = str(group.name)
    for count, family in COUNTS.items():
        yield Sample(family, (name,), group.counts[count])
    yield from _transactions(group, name, view)
    yield from _rounds(group, name, view)
    yield from _streams(group, name, view)
    yield from _leading(group, name, view)
    yield from _snapshots(group, name)


def _transactions(group: GroupState, name: str, view: LeaderView) -> Iterator[Sample]:
    seen = view.survey
    for state in OPEN_STATES:
        yield Sample(OPEN, (name, state), seen.states.get(state, 0))
    yield Sample(OPEN_BYTES, (name,), seen.size)
    oldest = seen.oldest
    yield Sample(OLDEST_AGE, (name,), 0 if oldest is None else max(view.now_ms - oldest.begun_ms, 0) / 1000)
    if oldest is not None:
        texts = map(_cut, (oldest.begin.client_name, oldest.begin.label or ""))
        labels = (name, str(oldest.transaction_id), *texts)
        yield Sample(OLDEST, labels, 1)
    left = UNKNOWN if seen.deadline_ms is None else (seen.deadline_ms - view.now_ms) / 1000
    yield Sample(LEASE_LEFT, (name,), left)
    yield Sample(HELD_BYTES, (name,), group.fold.held_bytes)
    yield Sample(CACHED_BYTES, (name,), group.fold.cached_bytes)
    for cause in AbortCause:
        yield Sample(ABORTED, (name, cause), group.metrics.aborted[cause])
    for path in CommitPath:
        yield Sample(COMMIT_LATENCY, (name, path), group.metrics.latencies[path].copy())


def _rounds(group: GroupState, name: str, view: LeaderView) -> Iterator[Sample]:
    yield Sample(ROUND_TRANSACTIONS, (name,), group.metrics.round_transactions.copy())
    yield Sample(ROUND_BYTES, (name,), group.metrics.round_bytes.copy())
    yield Sample(MERGE, (name,), view.times.merges.copy())
    yield Sample(SEAL, (name,), view.times.seals.copy())
    waiting = [row for row in waits_of(group) if row.is_change]
    for kind in (WaitKind.SCALE, WaitKind.ROLLING_COMMIT):
        yield Sample(WAITING, (name, kind), sum(item.kind is kind for item in waiting))
    since_ms = min([item.since_ms for item in waiting if item.since_ms], default=view.now_ms)
    yield Sample(LONGEST_WAIT, (name,), max(view.now_ms - since_ms, 0) / 1000)
    yield Sample(BESIDE, (name,), len(group.large.preparations))
    for effect in EFFECTS:
        yield Sample(EFFECT, (name, effect), view.times.of(effect))


def _streams(group: GroupState, name: str, view: LeaderView) -> Iterator[Sample]:
    disk, fold = group.metrics.log_bytes, group.fold
    for stream, led in group.streams.items():
        labels = name, stream
        yield Sample(STREAM_OPEN, labels, view.survey.of_streams.get(stream, 0))
        yield Sample(STREAM_OPEN_BYTES, labels, view.survey.bytes_of_streams.get(stream, 0))
        yield Sample(STREAM_RECORDS, labels, group.metrics.records[stream])
        yield Sample(STREAM_BYTES, labels, group.metrics.bytes[stream])
        lag = held = size = 0
        behind_ms = 0
        partitions = list(led.partitions())
        for partition in partitions:
            left, late_ms = lag_of(view, partition, fold.positions.get(partition, 0), group.metrics.since_ms)
            lag += left
            behind_ms = max(behind_ms, late_ms)
            held += view.held_bytes.get(partition, 0)
            size += disk.get(partition, 0)
        yield Sample(LAG_MESSAGES, labels, lag)
        yield Sample(LAG_SECONDS, labels, behind_ms / 1000)
        yield Sample(BUFFER_HELD, labels, held)
        yield Sample(BUFFER_DISK, labels, size if any(item in disk for item in partitions) else UNKNOWN)
        yield Sample(TOPICS, labels, led.topics)
        yield Sample(EPOCHS, labels, len(led.history.records))
        if led.is_on_topic:
            yield Sample(ADOPTED, (name, stream, led.config.topic), 1)
    faults = list(group.waits.faults.items())
    yield Sample(IN_ERROR, (name,), len(faults))
    for stream, fault in faults:
        yield Sample(ERROR, (name, stream, fault.code), 1)


def _leading(group: GroupState, name: str, view: LeaderView) -> Iterator[Sample]:
    for kind in RequestKind:
        for result in Answered:
            yield Sample(REQUESTS, (name, kind, result), group.metrics.answered[kind, result])
    for reason in Rejection:
        for family in (REJECTED, DROPPED):
            yield Sample(family, (name, reason), group.fold.rejected[reason])
    yield Sample(SESSIONS, (name,), UNKNOWN if group.sessions.count < 0 else group.sessions.count)
    yield Sample(LOG_DISK, (name,), group.metrics.log_bytes.get((group.commit_log, 0), UNKNOWN))
    yield Sample(CONTROLLER_EPOCH, (name,), group.controller_epoch)
    yield Sample(LEADS_SINCE, (name,), group.serves_since_ms / 1000)
    for warmth in Warmth:
        yield Sample(TAKEOVER, (name, warmth), view.takeovers.took[warmth].copy())
    yield Sample(LAST_TAKEOVER, (name,), view.takeovers.last_s)
    yield Sample(SPREAD, (name,), group.times.spread_ms / 1000)
    yield Sample(DIFFER, (name,), int(group.times.differ))


def _snapshots(group: GroupState, name: str) -> Iterator[Sample]:
    metrics = group.snapshots.metrics
    for family, operations in (
        (SEGMENT_OPS, metrics.segment_ops),
        (INDEX_OPS, metrics.index_ops),
        (ONGOING_OPS, metrics.ongoing_ops),
    ):
        for op in Op:
            yield Sample(family, (name, op), operations[op])
    segments = sum(len(item.aborted.indexes) for item in group.snapshots.partitions.values())
    yield Sample(SEGMENTS, (name,), segments)
    yield Sample(ENTRY_BYTES, (name,), metrics.entry_bytes.copy())
    yield Sample(SNAPSHOT_FAULTS, (name,), metrics.faults)


def without_texts(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples without names of clients and labels of transactions."""
    for sample in samples:
        if sample.family is OLDEST:
            group, transaction, *_ = sample.labels
            sample = sample._replace(labels=(group, transaction, "", ""))
        yield sample
