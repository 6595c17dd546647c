"""What is on the board: rows of panels, each with its queries. The first row is to be read in ten seconds.

A panel's text says what a good value is, or where to look if it is not one. Queries sum over coordinators, as those of
alerts do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final


class PanelKind(Enum):
    """How a panel shows its values."""

    NUMBER = auto()
    LINES = auto()
    HEAT = auto()
    TABLE = auto()


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the board.

    Attributes:
        about: What it shows, and what follows from it.
        unit: As Grafana calls it.
        queries: Expressions, each with the legend of its series.
        steps: From which value on it has which colour; None is below all. Empty for colours that mean nothing.
        nothing: What is shown where there is no value.
        words: What is shown in place of some values.
        width, height: In Grafana's grid of 24 columns.
        from_zero: The axis begins at 0.
    """

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: PanelKind = PanelKind.LINES
    steps: tuple[tuple[float | None, str], ...] = ()
    nothing: str = ""
    words: Mapping[int, str] = field(default_factory=dict)
    width: int = 8
    height: int = 8
    decimals: int | None = None
    from_zero: bool = True


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of panels under a title."""

    title: str
    panels: tuple[Panel, ...]


_JOB: Final = 'job=~"$job"'
_GROUP: Final = f'{_JOB}, group=~"$group"'
_STREAM: Final = f'{_GROUP}, stream=~"$stream"'
_LATENCY: Final = "rollbridge_commit_latency_seconds"
_ORDINARY: Final = f'{_GROUP}, path=~"direct|conditional"'
_OLDEST: Final = (
    f"rollbridge_oldest_transaction_age_seconds{{{_GROUP}}} * on (job, instance, group) "
    f"group_left (transaction, client, label) rollbridge_oldest_transaction_info{{{_GROUP}}}"
)
_OURS: Final = f"and on (job, instance) rollbridge_coordinator_info{{{_JOB}}}"
"""Of processes that are coordinators."""
_GOOD_AT_ZERO: Final = ((None, "green"), (1.0, "red"))
_WARN_AT_ONE: Final = ((None, "green"), (1.0, "orange"))


def _number(
    title: str,
    about: str,
    unit: str,
    query: str,
    steps: tuple[tuple[float | None, str], ...],
    nothing: str = "",
    words: Mapping[int, str] | None = None,
    decimals: int | None = None,
) -> Panel:
    """A panel of the first row."""
    return Panel(
        title,
        about,
        unit,
        ((query, ""),),
        PanelKind.NUMBER,
        steps,
        nothing,
        words or {},
        width=3,
        height=4,
        decimals=decimals,
    )


def _rate(name: str, by: str, labels: str = _GROUP) -> str:
    return f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"


def _quantile(share: float, name: str, by: str = "", labels: str = _GROUP) -> str:
    grouped = f"{by}, le" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({grouped}) (rate({name}_bucket{{{labels}}}[$__rate_interval])))"


def _quantiles(name: str, by: str = "group") -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, name, by), f"p{share * 100:g} {{{{{by}}}}}") for share in (0.5, 0.99))


_P50_P99: Final = ((0.5, "p50 {{job}}"), (0.99, "p99 {{job}}"))


def worst(name: str, by: str, labels: str = _GROUP) -> str:
    """Return an expression: the largest value of a gauge among the coordinators."""
    return f"max by ({by}) ({name}{{{labels}}})"


ALL_WELL: Final = PanelRow(
    "Is all well?",
    (
        _number(
            "Groups without leader",
            "0 is good. Their transactions do not commit: RollbridgeNoLeader, RollbridgeNoCoordinator.",
            "short",
            f"sum(max by (job) (rollbridge_coordinator_groups{{{_JOB}}}) "
            f"- sum by (job) (rollbridge_coordinator_groups_led{{{_JOB}}})) or vector(-1)",
            ((None, "red"), (0.0, "green"), (1.0, "red")),
            words={-1: "no coordinator"},
        ),
        _number(
            "Unhealthy coordinators",
            "0 is good. Coordinators that could not lead, or that do not answer: RollbridgeCoordinatorUnhealthy, "
            "RollbridgeCoordinatorDown.",
            "short",
            f"(count(rollbridge_coordinator_healthy{{{_JOB}}} == 0) or vector(0)) + (count((up{{{_JOB}}} == 0) and on "
            f"(job, instance) last_over_time(rollbridge_coordinator_info{{{_JOB}}}[1d])) or vector(0))",
            _GOOD_AT_ZERO,
        ),
        _number(
            "Streams in error",
            "0 is good. Their transactions wait: RollbridgeStreamInError.",
            "short",
            f"sum(rollbridge_streams_in_error{{{_GROUP}}})",
            _GOOD_AT_ZERO,
            nothing="no leader",
        ),
        _number(
            "Oldest transaction",
            "It holds the buffers that it writes to: RollbridgeOldTransaction. Its name is further below.",
            "s",
            f"max(rollbridge_oldest_transaction_age_seconds{{{_GROUP}}})",
            ((None, "green"), (6 * 3600.0, "yellow"), (12 * 3600.0, "orange")),
            nothing="no leader",
            decimals=0,
        ),
        _number(
            "Least lease left",
            "Until the first open transaction is aborted, if nobody commits it or extends its lease: "
            "RollbridgeLeaseEnds. Below 0 the leader does not come to it: RollbridgeLeaseOverdue.",
            "s",
            f"min(rollbridge_least_lease_left_seconds{{{_GROUP}}} > -Inf)",
            ((None, "red"), (0.0, "yellow"), (1_800.0, "green")),
            nothing="none open",
            decimals=0,
        ),
        _number(
            "Fold lag",
            "How far leaders lag behind what writers write. Commits wait for it: RollbridgeFoldLag.",
            "s",
            f"max(rollbridge_stream_fold_lag_seconds{{{_STREAM}}})",
            ((None, "green"), (5.0, "yellow"), (30.0, "orange")),
            nothing="no leader",
        ),
        _number(
            "Commit p99",
            "Of ordinary commits, at the leader: RollbridgeSlowCommits.",
            "s",
            f"{_quantile(0.99, _LATENCY, labels=_ORDINARY)} >= 0",
            ((None, "green"), (0.5, "yellow"), (2.0, "orange")),
            nothing="no commits",
        ),
        _number(
            "Groups without standby",
            "0 is good. A takeover of theirs is slow, or there is nobody for it: RollbridgeNoStandby.",
            "short",
            f"count(max by (job, group) (rollbridge_controller_epoch{{{_GROUP}}}) unless on (job, group) "
            f"(rollbridge_standby_lag_messages{{{_GROUP}}} >= 0)) or vector(0)",
            _WARN_AT_ONE,
        ),
        Panel(
            "Alerts that fire",
            "`rollbridge doctor --explain NAME` says what one means and what to do.",
            "short",
            ((f'ALERTS{{alertname=~"Rollbridge.*", alertstate="firing", {_JOB}}}', ""),),
            PanelKind.TABLE,
            nothing="none",
            width=24,
            height=5,
        ),
    ),
)

COMMITS: Final = PanelRow(
    "Commits",
    (
        Panel(
            "Commits",
            "Transactions committed, by the way that they took.",
            "ops",
            ((_rate(f"{_LATENCY}_count", "path"), "{{path}}"),),
        ),
        Panel(
            "Commit latency",
            "From the COMMIT frame's arrival at the leader to the commit. Compare with merges: the rest is waiting.",
            "s",
            _quantiles(_LATENCY, "path"),
        ),
        Panel(
            "Ordinary commits, by latency",
            "How many commits took how long: two bands are two kinds of commits.",
            "s",
            (
                (
                    f"sum by (le) (increase({_LATENCY}_bucket{{{_ORDINARY}}}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            PanelKind.HEAT,
        ),
        Panel(
            "Aborts",
            "Transactions that ended as aborted, by reason. `limit`, `refused` and `other` are for somebody to look "
            "at: RollbridgeTransactionsRefused.",
            "ops",
            ((_rate("rollbridge_transactions_aborted_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Open transactions",
            "By state. Committing ones wait for a round, or for their stream.",
            "short",
            ((f"sum by (state) (rollbridge_open_transactions{{{_GROUP}}})", "{{state}}"),),
        ),
        Panel(
            "Oldest transaction of each group",
            "It names whom to ask: `rollbridge txn describe ID`.",
            "s",
            ((_OLDEST, "{{group}} {{transaction}} {{client}} {{label}}"),),
        ),
    ),
)

STREAMS: Final = PanelRow(
    "Streams",
    (
        Panel(
            "Records committed",
            "By transactions.",
            "rowsps",
            ((_rate("rollbridge_stream_committed_records_total", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Bytes committed",
            "As clients have compressed them.",
            "Bps",
            ((_rate("rollbridge_stream_committed_bytes_total", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Open transactions by stream",
            "One that writes to several streams counts in each.",
            "short",
            ((worst("rollbridge_stream_open_transactions", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Bytes of open transactions",
            "What they have written to the stream so far. The buffer holds it until they end.",
            "bytes",
            ((worst("rollbridge_stream_open_transactions_bytes", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Topics and epochs",
            "They rise with scales and rolling commits, and go with their records: RollbridgeStreamGrows.",
            "short",
            (
                (worst("rollbridge_stream_topics", "stream", _STREAM), "{{stream}} topics"),
                (worst("rollbridge_stream_epochs", "stream", _STREAM), "{{stream}} epochs"),
            ),
        ),
        Panel(
            "Streams in error",
            "With the code of what is refused: RollbridgeStreamInError.",
            "short",
            ((worst("rollbridge_stream_error", "stream, code", _STREAM), "{{stream}}: {{code}}"),),
        ),
        Panel(
            "Scales and rolling commits",
            "Each makes epochs. Rolling commits are of transactions that outlived a scale, or were large.",
            "ops",
            (
                (_rate("rollbridge_scales_total", "group"), "scales {{group}}"),
                (_rate("rollbridge_rolling_commits_total", "group"), "rolling commits {{group}}"),
            ),
        ),
    ),
)

BUFFERS: Final = PanelRow(
    "Buffers and commit log",
    (
        Panel(
            "Fold lag",
            "Age of what the leader has not read yet: RollbridgeFoldLag.",
            "s",
            ((worst("rollbridge_stream_fold_lag_seconds", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Fold lag in messages",
            "As of the leader's last fetch.",
            "short",
            ((worst("rollbridge_stream_fold_lag_messages", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Dropped frames",
            "Messages of buffers that changed nothing, by reason. `corrupt`, `crowded`, `foreign` and `newer` are for "
            "somebody to look at: RollbridgeFramesDropped.",
            "ops",
            ((_rate("rollbridge_frames_dropped_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Buffer bytes held by open transactions",
            "They cannot be truncated: RollbridgeBufferHeld.",
            "bytes",
            ((worst("rollbridge_stream_buffer_held_bytes", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Buffers on disk",
            "Kafka frees whole files, so this is more than what is held.",
            "bytes",
            ((worst("rollbridge_stream_buffer_disk_bytes", "stream", _STREAM), "{{stream}}"),),
        ),
        Panel(
            "Commit log on disk",
            "It grows for as long as its retention, and then no more: RollbridgeCommitLogGrows.",
            "bytes",
            ((worst("rollbridge_commit_log_disk_bytes", "group"), "{{group}}"),),
        ),
        Panel(
            "Client names on record",
            "A takeover reads each. Names that are used once go a day after their outcomes are forgotten.",
            "short",
            ((worst("rollbridge_sessions", "group"), "{{group}}"),),
        ),
    ),
)

LEADER: Final = PanelRow(
    "Leaders",
    (
        Panel(
            "Transactions in a round",
            "A round is one native transaction. Large rounds mean that commits come faster than rounds.",
            "short",
            _quantiles("rollbridge_round_transactions"),
        ),
        Panel(
            "Merges",
            "From the first append of a round to its commit: what the brokers take.",
            "s",
            _quantiles("rollbridge_merge_duration_seconds"),
        ),
        Panel(
            "Seals",
            "Closing segments, with the wait for native transactions of others.",
            "s",
            _quantiles("rollbridge_seal_duration_seconds"),
        ),
        Panel(
            "Scales and rolling commits that wait",
            "For native transactions of others, or for leaders of partitions: RollbridgeChangeWaits.",
            "s",
            ((worst("rollbridge_longest_wait_seconds", "group"), "{{group}}"),),
        ),
        Panel(
            "Where the leader's time goes",
            "Seconds in each second that the leader waits for what it asks of Kafka and ZooKeeper, by kind of effect.",
            "percentunit",
            ((f"topk(8, {_rate('rollbridge_effect_duration_seconds_sum', 'effect')})", "{{effect}}"),),
        ),
        Panel(
            "Age of what leaders show",
            "A second is good. One that does not come to the end of a step shows ages and lags of before: "
            "RollbridgeLeaderStandsStill.",
            "s",
            ((worst("rollbridge_readings_age_seconds", "group"), "{{group}}"),),
        ),
        Panel(
            "Terms",
            "The number of the leader's term; a step is a new leader: RollbridgeTakeoversFlap.",
            "short",
            ((worst("rollbridge_controller_epoch", "group"), "{{group}}"),),
            from_zero=False,
        ),
        Panel(
            "Leads given up",
            "Terms that got nowhere, by coordinator: one of them only may be cut off from a broker.",
            "short",
            (
                (
                    f"increase(rollbridge_coordinator_leads_given_up_total{{{_JOB}}}[$__rate_interval])",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Last takeover",
            "How long commits waited for the present leader.",
            "s",
            ((worst("rollbridge_last_takeover_seconds", "group"), "{{group}}"),),
        ),
        Panel(
            "Admin requests",
            "By kind and result: RollbridgeRequestsRefused.",
            "ops",
            ((_rate("rollbridge_admin_requests_total", "kind, result"), "{{kind}} {{result}}"),),
        ),
        Panel(
            "Refused work",
            "Housekeeping and rounds that Kafka or ZooKeeper refuse: RollbridgeChoresRefused. The leader's log says "
            "which.",
            "ops",
            (
                (_rate("rollbridge_chores_refused_total", "group"), "housekeeping {{group}}"),
                (_rate("rollbridge_rounds_refused_total", "group"), "rounds {{group}}"),
                (_rate("rollbridge_truncations_refused_total", "group"), "truncations {{group}}"),
                (_rate("rollbridge_late_records_refused_total", "group"), "late records {{group}}"),
            ),
        ),
    ),
)

STANDBYS: Final = PanelRow(
    "Standbys and clocks",
    (
        Panel(
            "Standby lag",
            "Messages that a takeover would have to read; -1 follows nothing: RollbridgeStandbyLags, "
            "RollbridgeNoStandby.",
            "short",
            ((f"rollbridge_standby_lag_messages{{{_GROUP}}}", "{{group}} at {{instance}}"),),
            from_zero=False,
        ),
        Panel(
            "Transactions that standbys hold",
            "At STANDBY_TRANSACTIONS_MAX a standby pauses.",
            "short",
            ((f"rollbridge_standby_transactions{{{_GROUP}}}", "{{group}} at {{instance}}"),),
        ),
        Panel(
            "Clock spread",
            "More than 60 s: nothing is deleted for its age: RollbridgeClocksDiffer.",
            "s",
            ((worst("rollbridge_clock_spread_seconds", "group"), "{{group}}"),),
        ),
    ),
)

ZOOKEEPER: Final = PanelRow(
    "ZooKeeper",
    (
        Panel(
            "Requests",
            "Time to the answer, 99 of 100: RollbridgeZooKeeperSlow.",
            "s",
            (
                (
                    _quantile(0.99, "rollbridge_zookeeper_request_duration_seconds", "operation", _JOB),
                    "{{operation}}",
                ),
            ),
        ),
        Panel(
            "Sessions",
            "1 while the session is known to live: RollbridgeZooKeeperDisconnected.",
            "short",
            ((f"rollbridge_zookeeper_connected{{{_JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "Interruptions",
            "Times that the connection was lost: RollbridgeZooKeeperInterrupted.",
            "short",
            ((f"increase(rollbridge_zookeeper_interruptions_total{{{_JOB}}}[$__rate_interval])", "{{instance}}"),),
        ),
    ),
)

SNAPSHOTS: Final = PanelRow(
    "Snapshots (PIP-196)",
    (
        Panel(
            "Segments",
            "Sealed snapshot segments that are kept.",
            "short",
            ((worst("rollbridge_txn_tb_snapshot_segment_total", "group"), "{{group}}"),),
            width=6,
        ),
        Panel(
            "Operations",
            "On segments, indexes and records of ongoing transactions.",
            "ops",
            (
                (_rate("rollbridge_txn_tb_snapshot_segment_op_total", "op"), "segment {{op}}"),
                (_rate("rollbridge_txn_tb_snapshot_index_op_total", "op"), "index {{op}}"),
                (_rate("rollbridge_txn_tb_snapshot_ongoing_op_total", "op"), "ongoing {{op}}"),
            ),
            width=6,
        ),
        Panel(
            "Size of indexes",
            "Of those that were written, 99 of 100.",
            "bytes",
            ((_quantile(0.99, "rollbridge_txn_tb_snapshot_index_entry_bytes", "group"), "{{group}}"),),
            width=6,
        ),
        Panel(
            "Faults",
            "They heal by themselves; the leader's log says which.",
            "ops",
            ((_rate("rollbridge_txn_tb_snapshot_fault_total", "group"), "{{group}}"),),
            width=6,
        ),
    ),
)

PROCESSES: Final = PanelRow(
    "Processes",
    (
        Panel(
            "Processor",
            "Of each coordinator; a leader has one thread for a group.",
            "percentunit",
            ((f"rate(process_cpu_seconds_total{{{_JOB}}}[$__rate_interval]) {_OURS}", "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Of each coordinator; open transactions and what their frames take are below the limits that are set.",
            "bytes",
            ((f"process_resident_memory_bytes{{{_JOB}}} {_OURS}", "{{instance}}"),),
        ),
        Panel(
            "Memory of open transactions",
            "At three quarters of HELD_BYTES_MAX further ones are refused; beyond CACHE_BYTES_MAX frames are read "
            "again at the merge.",
            "bytes",
            (
                (worst("rollbridge_transactions_held_bytes", "group"), "held {{group}}"),
                (worst("rollbridge_transactions_cached_bytes", "group"), "cached {{group}}"),
            ),
        ),
    ),
)

_GW: Final = "rollbridge_gateway"

GATEWAYS: Final = PanelRow(
    "Gateways",
    (
        Panel(
            "Gateways",
            "Those that serve, and how many each knows of. All should be the same number: RollbridgeNoGateway, "
            "RollbridgeGatewayDown, RollbridgeGatewayUnhealthy, RollbridgeGatewaysDisagree.",
            "short",
            (
                (f"sum by (job) ({_GW}_healthy{{{_JOB}}})", "serve {{job}}"),
                (f"{_GW}_known_gateways{{{_JOB}}}", "gateways known at {{instance}}"),
                (f"{_GW}_known_brokers{{{_JOB}}}", "brokers known at {{instance}}"),
                (f"{_GW}_lacking_rights{{{_JOB}}}", "rights lacking at {{instance}}"),
            ),
        ),
        Panel(
            "Requests at gateways",
            "Of clients, relayed ones included.",
            "reqps",
            ((_rate(f"{_GW}_request_seconds_count", "api", _JOB), "{{api}}"),),
        ),
        Panel(
            "Request times at gateways",
            "99 of 100 take less. END_TXN is a commit; FETCH waits for records, as at a broker.",
            "s",
            ((_quantile(0.99, f"{_GW}_request_seconds", "api", _JOB), "{{api}}"),),
        ),
        Panel(
            "Errors told to producers",
            'CONCURRENT_TRANSACTIONS and others that say "ask again" are good order: RollbridgeGatewayRefuses, '
            "RollbridgeGatewayDefect.",
            "ops",
            ((_rate(f"{_GW}_errors_total", "api, code", _JOB), "{{api}} {{code}}"),),
        ),
        Panel(
            "Room at gateways",
            "Parts of their limits that are taken: RollbridgeGatewayFull.",
            "percentunit",
            (
                (f"{_GW}_connections{{{_JOB}}} / {_GW}_connections_limit{{{_JOB}}}", "connections {{instance}}"),
                (
                    f"{_GW}_transactional_ids{{{_JOB}}} / {_GW}_transactional_ids_limit{{{_JOB}}}",
                    "transactional ids {{instance}}",
                ),
                (f"{_GW}_under_way_bytes{{{_JOB}}} / {_GW}_under_way_limit_bytes{{{_JOB}}}", "bytes {{instance}}"),
            ),
        ),
        Panel(
            "Transactions at gateways",
            "Open ones of the ids that each serves, and what becomes of them.",
            "short",
            (
                (f"{_GW}_open_transactions{{{_JOB}}}", "open {{instance}}"),
                (_rate(f"{_GW}_ended_transactions_total", "outcome", _JOB), "{{outcome}} per second"),
                (_rate(f"{_GW}_taken_over_total", "job", _JOB), "taken over per second {{job}}"),
            ),
        ),
        Panel(
            "Traffic of gateways",
            "All bytes of clients, and of these what transactional producers have written.",
            "Bps",
            (
                (_rate(f"{_GW}_received_bytes_total", "instance", _JOB), "in {{instance}}"),
                (_rate(f"{_GW}_sent_bytes_total", "instance", _JOB), "out {{instance}}"),
                (_rate(f"{_GW}_bytes_total", "instance", _JOB), "batches {{instance}}"),
            ),
        ),
        Panel(
            "Records through gateways",
            "Of transactional producers.",
            "short",
            ((_rate(f"{_GW}_records_total", "instance", _JOB), "{{instance}}"),),
        ),
        Panel(
            "Savepoints",
            "What producers wait for with each request, and how many waited in vain: RollbridgeGatewaySavepointsFail.",
            "s",
            (
                *((_quantile(share, f"{_GW}_savepoint_seconds", "job", _JOB), name) for share, name in _P50_P99),
                (_rate(f"{_GW}_savepoint_failures_total", "job", _JOB), "failures per second {{job}}"),
            ),
        ),
        Panel(
            "Event loops of gateways",
            "By how much they come late, 99 of 100: RollbridgeGatewayLate.",
            "s",
            ((_quantile(0.99, f"{_GW}_loop_lag_seconds", "instance", _JOB), "{{instance}}"),),
        ),
        Panel(
            "Leases of gateways",
            "For how long they were not written, and how old they are. A young one has cost all ids: "
            "RollbridgeGatewayUnhealthy.",
            "s",
            (
                (f"{_GW}_lease_unwritten_seconds{{{_JOB}}}", "unwritten {{instance}}"),
                (f"{_GW}_lease_age_seconds{{{_JOB}}}", "age {{instance}}"),
                (f"increase({_GW}_leases_lost_total{{{_JOB}}}[$__rate_interval])", "lost {{instance}}"),
            ),
        ),
        Panel(
            "Certificates of gateways",
            "Time until they run out: RollbridgeGatewayCertificateExpires.",
            "s",
            ((f"{_GW}_certificate_expiry_timestamp_seconds{{{_JOB}}} - time()", "{{instance}}"),),
        ),
        Panel(
            "Handovers and lost connections",
            "Ids that change gateways (RollbridgeGatewayHandovers, RollbridgeGatewayHolds), and clients that were "
            "closed for their broker's fault (RollbridgeGatewayRelayFails), their own, or for want of room.",
            "ops",
            (
                (_rate(f"{_GW}_handovers_total", "way", _JOB), "ids {{way}}"),
                (_rate(f"{_GW}_relay_errors_total", "instance", _JOB), "broker gone {{instance}}"),
                (_rate(f"{_GW}_malformed_requests_total", "instance", _JOB), "no request {{instance}}"),
                (_rate(f"{_GW}_refused_connections_total", "instance", _JOB), "refused {{instance}}"),
                (_rate(f"{_GW}_closed_connections_total", "reason", _JOB), "closed, {{reason}}"),
                (_rate(f"{_GW}_forgotten_ids_total", "job", _JOB), "ids forgotten {{job}}"),
            ),
        ),
    ),
)

ROWS: Final = (ALL_WELL, COMMITS, STREAMS, BUFFERS, LEADER, STANDBYS, GATEWAYS, ZOOKEEPER, SNAPSHOTS, PROCESSES)
