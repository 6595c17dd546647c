"""Settings of a leader: its bounds and delays, those of snapshots and those of scaling by load. Pure.

Class variables are constants, which no file or variable sets. Simulations have smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from rollbridge.base.options import KIB, MIB, option
from rollbridge.stream.config import LOG_RETENTION_MS_DEFAULT

BESIDE_IDENTITIES: Final = 4
"""Transactional ids for background merges. Every leader takes all of them, however many it uses; otherwise a replaced
leader might still commit with one that its successor does not know.
"""
SCALING_CHECK_MS_MIN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Times and form of snapshots; the names are PIP-196's, except the last two."""

    transaction_buffer_segmented_snapshot_enabled: bool = True
    """Keep aborted transactions in segments; ``false``: every snapshot lists all of them."""

    transaction_buffer_snapshot_segment_size: ClassVar[int] = 256 * KIB
    """Bytes of a sealed segment, at most."""
    transaction_buffer_snapshot_max_transaction_count: ClassVar[int] = 1_000
    """Ended transactions of a buffer partition after which its snapshot is rewritten."""
    transaction_buffer_snapshot_min_time_in_millis: ClassVar[int] = 5_000
    """Time after which it is, if any has ended."""
    transaction_buffer_snapshot_replay_max: ClassVar[int] = 1_000
    """About how many messages of a buffer partition and of the commit log a takeover reads again although transactions
    have been open for longer; beyond it open ones are recorded.
    """
    transaction_buffer_snapshot_cache_bytes_max: ClassVar[int] = 64 * MIB
    """Memory for segments that were read back, per group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """Times and limits of scaling by load."""

    scaling_window_ms: int = option(120_000, low=2 * SCALING_CHECK_MS_MIN)
    """Shortest of the four windows over which rates are measured; the others are 2.5, 5 and 10 times as long. Streams
    that have a scaling policy are measured 24 times in it, every 5 s, but not more often than every 100 ms."""
    scaling_cooldown_ms: int = option(600_000, low=0)
    """Time after the scale that made a segment in which it is not scaled. Pravega's ``autoScale.cooldown.time``."""
    scaling_per_hour_max: int = option(12, low=1)
    """Most scales by load of one stream in an hour; merges may be half of them."""

    scaling_checks: ClassVar[int] = 24
    """Measurements within the shortest window."""
    scaling_parts_max: ClassVar[int] = 8
    """Most parts into which one segment is split, and most neighbours that are merged, in one scale."""
    scaling_open_ms: ClassVar[int] = 10_000
    """Age from which an open transaction delays a scale: its commit, later, takes a rolling commit with two epochs."""
    scaling_open_max: ClassVar[int] = 10
    """Most open transactions of that age with which a stream is scaled by load; with more it waits."""

    @property
    def scaling_check_ms(self) -> int:
        """Interval between measurements."""
        return max(self.scaling_window_ms // self.scaling_checks, SCALING_CHECK_MS_MIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Bounds and delays of a leader."""

    transaction_meta_persist_count: int = option(100, low=0)
    """Terminated transactions remembered of each client name; 0 remembers none. PIP-255's
    ``TransactionMetaPersistCount``, which is 0 there."""
    transaction_meta_persist_time_in_hour: int = 72
    """Time for which they are remembered, unless a transaction specifies its own. PIP-255's name."""
    merge_beside_bytes: int = option(16 * MIB, low=0)
    """Bytes of frames from which on a transaction is merged in the background: into segments of its own that are not
    read yet, while others commit. Smaller ones take less time than the two epochs of such a merge. 0: none is.
    """
    late_commit_window_ms: int = option(200, low=0, former=("linger_ms_max",))
    """Longest time that the segments of a rolling commit stay open for the next late commit, where these come in
    succession; a single one never waits for that. 0: none.
    """
    commit_log_retention_ms: int = option(LOG_RETENTION_MS_DEFAULT, low=-1)
    """Shortest retention of the commit log, in groups without their own setting; -1 is unlimited."""
    commit_log_retention_bytes: int = option(-1, low=-1)
    """Bytes of the commit log kept at least, in groups without their own setting; -1 is all."""
    validate: bool = False
    """Check the leader's state after each step of its work, which takes time with many open transactions. If it
    contradicts itself, the log says how, and the leader gives up its group instead of continuing."""
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)

    merges_beside_max: ClassVar[int] = BESIDE_IDENTITIES
    """Transactions merged in the background at a time; further ones wait."""
    round_bytes_max: ClassVar[int] = 64 * MIB
    """Bytes of frames in one native transaction, unless one transaction is larger; bounds the wait of readers."""
    round_transactions_max: ClassVar[int] = 5_000
    """Transactions in one native transaction."""
    rolling_transactions_max: ClassVar[int] = 10_000
    """Transactions in one rolling commit; their ids must fit into a ZooKeeper node of 1 MiB."""
    commit_order_patience_ms: ClassVar[int] = 60_000
    """Shortest wait of a commit for earlier ones of its connection, once its lease has run out."""
    late_commit_batch_ms: ClassVar[int] = 100
    """Longest time that a rolling commit waits for more late commits, where several clients make them. 0: none."""
    scale_wait_ms: ClassVar[int] = 20_000
    """Time that a scale waits for native transactions of other Kafka clients before it is refused. It is less than the
    clients' ``admin_timeout_s``, so that the error names these transactions.
    """
    record_after_ms: ClassVar[int] = 500
    """Time after which an open transaction gets a ZooKeeper record."""
    forecast_patience: ClassVar[int] = 8
    """Rounds without offset prediction after the first wrong one; twice as many after each further one."""
    requests_per_turn: ClassVar[int] = 16
    """Admin requests handled before the buffers are read again."""
    write_bytes_max: ClassVar[int] = 900_000
    """Bytes of one ZooKeeper multi that is built bit by bit; ZooKeeper takes up to 1 MiB."""
    truncate_buffers_ms: ClassVar[int] = 10_000
    """Shortest interval between truncations of buffers; nothing is truncated without settled transactions."""
    retention_check_ms: ClassVar[int] = 30_000
    """Interval between retention checks."""
    topic_check_ms: ClassVar[int] = 10_000
    """Interval between checks of adopted topics for changes by their owners."""
    bookkeeping_ms: ClassVar[int] = 60_000
    """Interval between removals of obsolete bookkeeping in ZooKeeper."""
    counter_check_ms: ClassVar[int] = 5_000
    """Interval between checks of the group's transaction counter."""
    answers_keep_ms: ClassVar[int] = 60 * 60 * 1000
    """Time for which the answer to an admin request is kept for its client."""
    epochs_keep_ms: ClassVar[int] = 24 * 60 * 60 * 1000
    """Time for which clients may begin transactions against a replaced epoch, because they do not know the new one yet.
    """
    transaction_meta_persist_total: ClassVar[int] = 500_000
    """Terminated transactions remembered of all clients of a group together; of more, the oldest tenth is forgotten.
    Each takes 0.5 KB of memory (0.7 KB where each client name has one)."""
    transaction_meta_expire_check_interval_in_second: ClassVar[int] = 300
    """Interval between removals of expired outcomes. PIP-255's name."""
    late_watch_ms: ClassVar[int] = 20 * 60 * 1000
    """Time for which leaders check behind the end of a sealed segment: longer than any native transaction may be open
    (``transaction.max.timeout.ms``, 15 minutes), and than any request lives in a broker.
    """
    outcomes_again: ClassVar[int] = 20_000
    """Offsets before the position in a snapshot from which on the commit log is read, for BEGIN frames that a writer
    has doubled.
    """
    outcomes_unlisted_max: ClassVar[int] = 10_000
    """Outcomes after which the record of ended transactions is rewritten. A takeover reads at most about so much more
    of the commit log.
    """
    ended_ranges_kept: ClassVar[int] = 10_000
    """Ranges of ended transactions beyond which gaps that no client can use any more are closed; a record of so many
    takes about 40 KB.
    """
    counters_keep_ms: ClassVar[int] = 2 * 24 * 60 * 60 * 1000
    """Age after which unused transaction ids are retired. Clients give up a block of ids after a day."""
