"""Remembered outcomes: write a round's with the round, restore those of earlier leaders, and forget expired ones.

A remembered outcome names its position in the commit log, which is known only when the control records have been
appended. Since only the leader writes there, it predicts the positions and sends both in one request. If a prediction
was wrong, because a control marker came in between, the leader appends the same outcomes again with the right
positions: for each key the last record counts.

Source: PIP-255, ``append``, ``flush`` and the timer of ``TransactionMetaExpireCheckIntervalInSecond``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import JUMP, SHARED_MAX, counter_of, parse_number
from rollbridge.buffer.frames import REASON_CHARACTERS_MAX
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import Terminated
from rollbridge.metadata import paths
from rollbridge.metadata.journal import split
from rollbridge.metadata.records import Group, SetNode
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.commit.outcome_store import Draft, OutcomeStore
from rollbridge_coordinator.core.effects import (
    AppendControl,
    AppendMessages,
    CommitRound,
    CreateTopics,
    Messages,
    ReadCompacted,
    TopicIds,
    Write,
    read_node,
)
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import compacted_topic_spec
from rollbridge_coordinator.core.waits import StaleStateError

logger = logging.getLogger(__name__)


class Outcomes:
    """Outcomes of a round to remember, while its records are being appended."""

    def __init__(self, group: GroupState, transactions: Sequence[BufferedTransaction]) -> None:
        self._group = group
        self._retain_ms = [transaction.begin.retain_ms for transaction in transactions]
        self._foretold: list[int] | None = None

    def append(self, records: Sequence[ControlRecord]) -> Steps[None]:
        """Append control records together with the remembered outcomes."""
        positions = yield from AppendControl(self._group.commit_log, records, self.predict(records))
        yield from self.settle(records, positions)

    def predict(self, records: Sequence[ControlRecord]) -> Messages | None:
        """Return the messages to append with control records; None without a memory or a predictable position."""
        first = self._group.predictor.log_end
        self._foretold = None
        if self._group.outcome_store is None or first is None:
            return None
        self._foretold = list(range(first, first + len(records)))
        return self._flush(self._group.outcome_store, records, self._foretold)

    def settle(self, records: Sequence[ControlRecord], positions: Sequence[int]) -> Steps[None]:
        """Append the outcomes again if their predicted positions were wrong, or if there was no prediction."""
        group = self._group
        group.predictor.log_end = log_end_after(positions)
        if group.outcome_store is None or list(positions) == self._foretold:
            return
        if self._foretold is not None:
            group.counts["preserver_repeated"] += 1
        yield from AppendMessages(self._flush(group.outcome_store, records, positions))

    def drop(self, positions: Sequence[int]) -> None:
        """Note that the round was aborted, control records included, and will be appended again."""
        self._group.predictor.log_end = log_end_after(positions)

    def _flush(
        self, outcome_store: OutcomeStore, records: Sequence[ControlRecord], positions: Sequence[int]
    ) -> Messages:
        committed = ControlKind.COMMIT
        appended = [
            (
                record.client_name,
                Terminated(
                    record.transaction,
                    record.kind is committed,
                    position,
                    record.records,
                    record.decided_ms,
                    retain_ms,
                    record.label,
                    record.reason[:REASON_CHARACTERS_MAX],
                ),
            )
            for record, retain_ms, position in zip(records, self._retain_ms, positions, strict=True)
        ]
        self._group.draft = outcome_store.flush(appended)
        return _messages(self._group.name, self._group.draft)


def adopt(group: GroupState) -> None:
    """Adopt the outcomes of a committed round."""
    draft, group.draft = group.draft, None
    if draft is not None and group.outcome_store is not None:
        group.outcome_store.adopt(draft)
        group.counts["preserver_appended"] += draft.appended
        group.counts["preserver_flushed"] += len(draft.histories)


def coalescing(group: GroupState) -> float:
    """Return the records written per remembered outcome in this term; 1.0 if there was none."""
    appended = group.counts["preserver_appended"]
    return group.counts["preserver_flushed"] / appended if appended else 1.0


EXPIRY: Final = "expiry of outcomes"
"""Name of this work in housekeeping."""


def forget_expired(group: GroupState, now_ms: int) -> Steps[None]:
    """Forget expired outcomes, at intervals or when the memory is full."""
    outcome_store = group.outcome_store
    interval_ms = group.settings.transaction_meta_expire_check_interval_in_second * 1000
    is_due = group.housekeeping.is_due(EXPIRY, now_ms, interval_ms)
    if outcome_store is None or not (outcome_store.is_crowded or is_due):
        return
    draft = outcome_store.expire(0 if group.times.differ else group.times.earliest(now_ms))
    if draft is not None:
        yield from AppendMessages(_messages(group.name, draft))
        yield from CommitRound()
        outcome_store.adopt(draft)
        group.counts["preserver_expired"] += len(draft.removed)


def open_preserver(
    name: GroupName, settings: LeaderSettings, replication_factor: int
) -> Steps[tuple[OutcomeStore | None, dict[str, bytes]]]:
    """Restore the outcomes that earlier leaders remembered.

    If the topic is new but the group is not, or if records in it are damaged, the preserver notes that outcomes have
    been forgotten, so that no query is answered with "never existed".

    Returns:
        The preserver, None if it is switched off; and the journal, which is in the same topic.

    Raises:
        StaleStateError: the group is gone.
    """
    raw = yield from read_node(paths.group(name))
    if raw is None:
        raise StaleStateError(f"group {name} is gone")
    known = Group.from_json(raw)
    topic = name.terminated_topic
    identity = (yield from TopicIds([topic])).get(topic)
    is_known = identity is not None and identity == known.terminated_topic_id
    clients: dict[bytes, bytes] = {}
    journal: dict[str, bytes] = {}
    if identity is None:
        ids = yield from CreateTopics([compacted_topic_spec(topic, replication_factor)])
        identity = ids[topic]
    else:
        clients, journal = split((yield from ReadCompacted(topic)))
    if not settings.transaction_meta_persist_count:
        if known.terminated_topic_id:
            yield from _note_topic(replace(known, terminated_topic_id=""))
        return None, journal
    outcome_store = OutcomeStore(
        settings.transaction_meta_persist_count,
        settings.transaction_meta_persist_time_in_hour,
        settings.transaction_meta_persist_total,
    )
    faults = outcome_store.restore(clients)
    if known.terminated_topic_id and not is_known:
        faults.append(f"topic {topic} was deleted or created again; the outcomes in it are forgotten")
    for fault in faults:
        logger.warning("outcomes.damaged group=%s: %s", name, fault)
    # A group whose log was lost and was created again has a number.
    is_new_group = not (known.commit_log_topic_id or known.number or known.former_numbers)
    if faults or not (is_known or is_new_group):
        draft = outcome_store.raise_horizon((yield from _horizon(known)))
        yield from AppendMessages(_messages(name, draft))
        yield from CommitRound()
        outcome_store.adopt(draft)
    if not is_known:
        yield from _note_topic(replace(known, terminated_topic_id=identity))
    return outcome_store, journal


def _horizon(group: Group) -> Steps[int]:
    """Return a bound above the counters of all transactions that may have been forgotten, even with damaged nodes."""
    shared = parse_number((yield from read_node(paths.TRANSACTION_COUNTER)), SHARED_MAX)
    if not group.number:
        return SHARED_MAX if shared is None else shared
    count = parse_number((yield from read_node(paths.counter(group.name))), group.counter_ceiling, group.counter_floor)
    return counter_of(group.number, group.counter_floor + JUMP if count is None else count)


def log_end_after(positions: Sequence[int]) -> int:
    """Predict the offset of the next round's control records: behind the control marker of this round."""
    return positions[-1] + 2


def _note_topic(group: Group) -> Steps[None]:
    if not (yield from Write([SetNode(paths.group(group.name), group.to_json())])):
        raise StaleStateError(f"group {group.name} is gone")


def _messages(name: GroupName, draft: Draft) -> Messages:
    return Messages(name.terminated_topic, draft.records)
