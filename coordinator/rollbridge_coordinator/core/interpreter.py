"""The interpreter: carry out the effects of a leader's procedures on Kafka and ZooKeeper, one after the other.

Each kind of effect has one method, entered into :data:`HANDLERS` by a decorator that checks the method against the
effect's type of result. :func:`refusal` decides which errors of the adapters are definite: the effect was not, and will
not be, carried out. These are thrown into the procedure. After any other error the outcome is unknown, and the leader's
term ends.

Only the leader's thread runs effects, one at a time, so nothing here is locked.

Tour of a commit, stop 7 of 8: see docs/tour.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from time import perf_counter, time
from typing import Any, Final, Literal, TypeVar

from kio.schema.errors import ErrorCode

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.base.effects import AnyEffect, Effect, Steps, UnderWay
from rollbridge.base.errors import INVALID_STATE, INVALID_TRANSITION
from rollbridge.base.tracing import find_tracer, trace_round
from rollbridge.buffer.snapshot_topic import read_latest, read_values
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import (
    ID_LOCKED,
    UNSUPPORTED_BROKER,
    AppendRefusedError,
    AppendUnknownError,
    AuthenticationError,
    NotAuthorizedError,
)
from rollbridge.kafka.errors import name as kafka_name
from rollbridge.kafka.foreign import end_transactions, obstacles
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.seal import SEALED
from rollbridge.kafka.topics import TopicDescription
from rollbridge.kafka.transactions import Addressed
from rollbridge.lease import Lease
from rollbridge.metadata import paths
from rollbridge.metadata.acls import open_counter, open_slots
from rollbridge.metadata.errors import (
    NodeConflictError,
    NodeMissingError,
    ZooKeeperRefusedError,
)
from rollbridge.metadata.records import NodeOperation
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.conditions import Obstacle, Unreplicated, with_own
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.late import LateRecord
from rollbridge.stream.names import (
    GroupName,
    Partition,
    group_topics,
    is_buffer_topic,
    is_group_topic,
    is_segment_topic,
)
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.condition_reader import (
    ConditionReader,
    LateRecords,
    RetentionReader,
    asking,
)
from rollbridge_coordinator.core.frame_reader import (
    FRAMES_S,
    FrameFeed,
    FrameReader,
    beside_batches,
    control_batches,
    late_copies,
    message_batches,
    read_commit_log,
    read_ended,
    read_orders,
)
from rollbridge_coordinator.core.merge_pool import MergePool, spec_of
from rollbridge_coordinator.core.metrics import EffectTimes
from rollbridge_coordinator.core.settings import BESIDE_IDENTITIES
from rollbridge_coordinator.core.transactional_ids import (
    FENCE_RECORDS,
    IDENTITIES,
    LOCKED_MS,
    CommitGuard,
    Rotation,
    take,
)
from rollbridge_coordinator.core.waits import (
    LEADERLESS,
    LEADERLESS_S,
    SEAL_TIMEOUT,
    UNREPLICATED,
    StaleStateError,
)

logger = logging.getLogger(__name__)

BESIDE_CLIENT_ID: Final = "rollbridge-merge"
"""Client id of background merges, so that a quota of the brokers can bound their rate."""

OFFSETS_S: Final = 15.0
"""Time for which a group coordinator may fail to take offsets before their transaction is refused."""
NO_ANSWER: Final = "REQUEST_TIMED_OUT"
"""Kafka's name for offsets of a large transaction that were not answered in that time."""

SEGMENT_MS: Final = round(LEADERLESS_S * 1000)
"""Time that a segment may be without a partition leader before its append counts as refused."""
GROUP_TOPIC_MS: Final = 60_000
"""The same time for topics of the whole group; longer, because nothing can be decided without them."""

SEAL_FOREIGN_S: Final = 2.0
"""Time that a seal waits for open native transactions of others. All other work of the group waits meanwhile, so it is
short; most end within milliseconds, and the leader returns for the rest.
"""

DELETE_S: Final = 5.0
"""Time-out of deletions, which no other work waits for; after it they are postponed."""

# Refusals

_LOOKS: Final = (fx.Look, fx.ReadLate, fx.FindLate, fx.EndOffsets)
"""Effects that change nothing."""
_OF_MERGES: Final = frozenset({fx.MergeFrames, fx.AppendTogether, fx.AppendControl, fx.SendOffsets, fx.TakeUp})
"""Effects with which a round of transactions begins."""
_ENDS: Final = frozenset({fx.CommitRound, fx.AbortRound})
_OF_FRAMES: Final = (fx.MergeFrames, fx.AppendTogether, fx.Prepare)
_DEFINITE: Final = (AppendRefusedError, InvalidRequestError, NotFoundError, ConflictError)
_DOUBTFUL: Final = (
    INVALID_TRANSITION,  # a defect of ours
    INVALID_STATE,
    AuthenticationError.code,  # the connection is refused, not the request
    UNSUPPORTED_BROKER,
)
"""Codes of definite errors that say nothing about the effect. The outcome is unknown after these, and after every
error that is not definite: time-outs, lost connections, ``AppendUnknownError``, and all of ZooKeeper's
but a refused write."""


def refusal(effect: AnyEffect, fault: Exception, feed: FrameFeed | None) -> fx.EffectRefusedError | None:
    """Return the refusal to throw into a procedure for an error of its effect; None if the outcome is unknown."""
    if isinstance(fault, CorruptDataError) and isinstance(effect, _OF_FRAMES) and feed:
        # The frame is no batch, or is gone from the buffer. Its own batch was being made, so it has not been sent.
        topic = effect.items[feed.at[0]][0][0] if feed.at else None
        return fx.EffectRefusedError(effect, str(fault), code=fault.code, topic=topic, places=feed.at)
    if isinstance(fault, ZooKeeperRefusedError) and isinstance(effect, fx.ON_ZOOKEEPER):
        return fx.EffectRefusedError(effect, str(fault), code=fault.code)
    if isinstance(fault, AppendUnknownError) and fault.batch is not None and feed is not None:
        # The outcome of a round that was not to be committed yet is known once :meth:`run` has aborted it.
        places = feed.items_of(fault.batch)
        return (
            fx.EffectRefusedError(effect, str(fault), code=fx.STUMBLED, topic=fault.topic, places=places)
            if places
            else None
        )
    if isinstance(fault, AppendUnknownError) and fault.topic is not None and not is_group_topic(fault.topic):
        # So is that of a round with a segment that has no partition leader now.
        return fx.EffectRefusedError(effect, str(fault), code=fault.kafka_error, topic=fault.topic)
    topic = _topic_of(fault) if isinstance(fault, RollbridgeError) else None
    if (
        isinstance(fault, KafkaUnavailableError)
        and isinstance(effect, _LOOKS)
        and topic is not None
        and not is_group_topic(topic)
    ):
        return fx.EffectRefusedError(effect, str(fault), code=LEADERLESS, topic=topic)
    if isinstance(effect, fx.Look | fx.ReadLate | fx.FindLate) and isinstance(fault, CorruptDataError):
        # A writer of a segment can write there what cannot be decoded. That harms only transactions with a condition on
        # the segment, and late records in it, not the group.
        return fx.EffectRefusedError(effect, str(fault), code=fault.code, topic=_topic_of(fault))
    if isinstance(fault, UnavailableError) and fault.code == SEAL_TIMEOUT and isinstance(effect, fx.Seal):
        # A part may be done; sealing again continues from there.
        return fx.EffectRefusedError(effect, str(fault), code=SEAL_TIMEOUT, topic=_topic_of(fault))
    if not isinstance(fault, _DEFINITE) or fault.code in _DOUBTFUL:
        return None
    if isinstance(fault, AppendRefusedError):
        places = feed.items_of(fault.batch) if feed is not None and fault.batch is not None else ()
        return fx.EffectRefusedError(effect, str(fault), code=fault.kafka_error, topic=fault.topic, places=places)
    return fx.EffectRefusedError(effect, str(fault), code=fault.code, topic=_topic_of(fault))


def look_of(found: TopicDescription | ErrorCode | None) -> fx.TopicLook:
    """Return a topic's id, and the errors that prevent reading and writing it, from its description."""
    if found is None:
        return fx.TopicLook("")
    if isinstance(found, ErrorCode):
        return fx.TopicLook("", kafka_name(found))
    if found.operations and "READ" not in found.operations:
        return fx.TopicLook(str(found.topic_id), "TOPIC_AUTHORIZATION_FAILED")
    refused = "" if found.is_led else LEADERLESS
    demanded = int(found.config.get("min.insync.replicas", "1"))
    return fx.TopicLook(str(found.topic_id), refused, refused or (UNREPLICATED if found.in_sync < demanded else ""))


def _topic_of(fault: RollbridgeError) -> str | None:
    kind, _, name = fault.resource.partition(" ")
    return name if kind == "topic" else None


# The interpreter

Moment = Literal["before", "fenced", "after"]
"""Moment of an effect; ``fenced`` is between the last check of the fence and a request that Kafka does not fence."""
Hook = Callable[[Steps[Any], AnyEffect, Moment], None]
"""Function called with the running procedure at each moment of each effect. Tests inject one that ends the process."""

T = TypeVar("T")
E = TypeVar("E", bound=AnyEffect)

HANDLERS: Final[dict[type[AnyEffect], Callable[[Interpreter, Any], Any]]] = {}
"""Methods of the interpreter by kind of effect; a test finds kinds without one."""


def _check_ids(effect: fx.Seal, found: Mapping[str, str]) -> None:
    """Check that adopted topics to be sealed exist and have the expected ids.

    Raises:
        ConflictError: one is not.
    """
    for topic, identity in effect.ids.items():
        if found.get(topic) != identity:
            raise ConflictError(
                f"topic {topic} has id {found.get(topic, 'none')}, and had {identity} when it was adopted"
            )


def _carries_out(
    kind: type[Effect[T]],
) -> Callable[[Callable[[Interpreter, E], T]], Callable[[Interpreter, E], T]]:
    """Enter a method into :data:`HANDLERS`; mypy compares its result with the one that the effect declares."""

    def enter(method: Callable[[Interpreter, E], T]) -> Callable[[Interpreter, E], T]:
        HANDLERS[kind] = method
        return method

    return enter


class Interpreter:
    """Runner of procedures for one term of one leader.

    A definite refusal of an effect is thrown into its procedure as
    :class:`~rollbridge_coordinator.core.effects.EffectRefusedError`. All other errors of the adapters pass through: the
    outcome is unknown, so the leader ends its term and takes over again.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        kafka: KafkaClient,
        group: GroupName,
        session: ZooKeeperSession,
        lead: Lease,
        now_ms: Callable[[], int],
        hook: Hook | None = None,
    ) -> None:
        """Prepare a term.

        Args:
            lead: Lease of the lead, whose token every write checks.
            hook: Called at each moment of each effect.
        """
        self._settings = settings
        self._group = group
        self._session = session
        self._lead = lead
        self._now_ms = now_ms
        self._kafka = kafka
        self._admin = kafka.topics
        self._keeper = kafka.topics.within(DELETE_S)
        self._reader = FrameReader(kafka.log(retry_timeout_s=FRAMES_S))
        log = kafka.log(retry_timeout_s=LEADERLESS_S)
        self._condition_reader = ConditionReader(log)
        self._late = LateRecords(log)
        self._measures = RetentionReader(kafka)
        beside = kafka.named(BESIDE_CLIENT_ID)
        self._appenders = [
            (kafka if number < IDENTITIES else beside).appender(
                group.transactional_id(number),
                transaction_timeout_ms=int(settings.merge_timeout_s * 1000),
                topic_timeout_ms=lambda topic: GROUP_TOPIC_MS if is_group_topic(topic) else SEGMENT_MS,
                locked_timeout_ms=LOCKED_MS,
            )
            for number in range(IDENTITIES + BESIDE_IDENTITIES)
        ]
        self._merge_pool = MergePool(settings, kafka, self._appenders[IDENTITIES:], refusal)
        self._rotation = Rotation(self._appenders[:IDENTITIES], self._merge_pool.borrow)
        self._guard = CommitGuard()
        self._current = self._appenders[0]
        self._taken: TransactionalAppender | None = None
        self._hook = hook
        self._feed: FrameFeed | None = None
        self._procedure: Steps[Any] | None = None
        self._merging_since_s: float | None = None
        self._merging = [0, 0]
        """Transactions and frames of the round, for its tracing span."""
        self._tracer = find_tracer()
        self.times = EffectTimes()
        """Durations of the effects of this term."""

    def run(self, procedure: Steps[T]) -> T:
        """Carry out a procedure and return its result.

        Raises:
            RollbridgeError: an effect failed whose refusal the procedure does not handle, or whose outcome is unknown.
        """
        under_way = UnderWay(procedure)
        while True:
            try:
                effect = under_way.look_ahead()
            except fx.EffectRefusedError as uncaught:
                raise uncaught.__cause__ or uncaught from None
            if effect is None:
                return under_way.result
            if self._hook is not None:
                self._hook(procedure, effect, "before")
            refused = None
            self._feed = None
            self._procedure = procedure
            began_s = perf_counter()
            self.times.present = type(effect).__name__, began_s
            try:
                under_way.reply(HANDLERS[type(effect)](self, effect))
            except Exception as fault:
                refused = refusal(effect, fault, self._feed)
                logger.debug('effect.failed group=%s effect=%s reason="%s"', self._group, type(effect).__name__, fault)
                if refused is None:
                    procedure.close()
                    raise
                refused.__cause__ = fault
                under_way.refuse(refused)
                if isinstance(fault, AppendUnknownError):
                    self._current.init()  # fences the round: for certain nothing of it is or will be committed
                if isinstance(effect, fx.ROUND):
                    self._empty_round()
                    self._merging_since_s = None
            finally:
                self.times.present = None
            self._note(effect, began_s, perf_counter(), is_refused=refused is not None)
            if self._hook is not None:
                self._hook(procedure, effect, "after")

    def _note(self, effect: AnyEffect, began_s: float, ended_s: float, *, is_refused: bool) -> None:
        """Count an effect with its duration, and with those of its round."""
        kind = type(effect)
        spent = self.times.spent.get(kind.__name__)
        if spent is None:
            spent = self.times.spent[kind.__name__] = [0.0, 0.0]
        spent[0] += 1
        spent[1] += ended_s - began_s
        if kind is fx.Seal:
            self.times.seals.note(ended_s - began_s)
        elif kind in _ENDS:
            if kind is fx.CommitRound and self._merging_since_s is not None and not is_refused:
                self.times.merges.note(ended_s - self._merging_since_s)
                if self._tracer is not None:
                    took_s, now_s = ended_s - self._merging_since_s, time()
                    trace_round(self._tracer, str(self._group), now_s - took_s, now_s, *self._merging)
            self._merging_since_s = None
        elif kind in _OF_MERGES and self._merging_since_s is None and not is_refused:
            self._merging_since_s = began_s
            self._merging = [0, 0]
        if self._tracer is not None and not is_refused:
            if isinstance(effect, fx.AppendControl | fx.AppendTogether):
                self._merging[0] += len(effect.records)
            if isinstance(effect, fx.MergeFrames | fx.AppendTogether):
                self._merging[1] += len(effect.items)

    def close(self) -> None:
        """End the term: close all connections and abort open Kafka transactions."""
        self._merge_pool.close()
        for appender in self._appenders[:IDENTITIES]:
            appender.close()

    @_carries_out(fx.ReadNodes)
    def _read_nodes(self, effect: fx.ReadNodes) -> Mapping[str, bytes | None]:
        nodes = self._session.get_many(effect.paths)
        return {path: None if node is None else node.value for path, node in zip(effect.paths, nodes, strict=True)}

    @_carries_out(fx.ReadDated)
    def _read_dated(self, effect: fx.ReadDated) -> Mapping[str, fx.DatedNode | None]:
        nodes = self._session.get_many(effect.paths)
        return {
            path: None if node is None else fx.DatedNode(node.value, node.version, node.modified_ms)
            for path, node in zip(effect.paths, nodes, strict=True)
        }

    @_carries_out(fx.ReadCounter)
    def _read_counter(self, effect: fx.ReadCounter) -> tuple[bytes, int] | None:
        found = self._session.get(effect.path)
        return None if found is None else (found.value, found.version)

    @_carries_out(fx.ReadChildren)
    def _read_children(self, effect: fx.ReadChildren) -> Mapping[str, list[str]]:
        return dict(zip(effect.paths, self._session.children_many(effect.paths), strict=True))

    @_carries_out(fx.EnsureNodes)
    def _ensure_nodes(self, effect: fx.EnsureNodes) -> None:
        known = self._session.get_many(effect.paths)
        for path, node in zip(effect.paths, known, strict=True):
            if node is None:
                self._session.ensure(path)
            if path.startswith(f"{paths.CAS}/"):
                open_slots(self._session, self._group, path)
            elif path == paths.counter(self._group):
                open_counter(self._session, self._group)

    @_carries_out(fx.Write)
    def _write(self, effect: fx.Write) -> bool:
        return self._write_fenced(effect.operations)

    def _write_fenced(self, operations: Sequence[NodeOperation]) -> bool:
        if not self._lead.is_held:  # ZooKeeper may have been set back
            raise StaleStateError("the connection to ZooKeeper was interrupted; nothing was written")
        try:
            self._session.multi([*self._lead.guard(), *operations])
        except (NodeConflictError, NodeMissingError) as fault:
            if fault.path == paths.controller(self._group):
                raise FencedError(f"{self._group} has a newer leader; nothing was written") from fault
            logger.info('zookeeper.write-conflict group=%s reason="%s"', self._group, fault)
            return False
        return True

    def _look_at_fence(self, effect: AnyEffect) -> None:
        """Check that there is no newer leader, before a request that Kafka does not fence.

        A leader paused right after this check may still send the request hours later. That is harmless: no topic name
        is reused, so the request concerns the same life of the same stream; and a newer leader carries it out anyway,
        because it finishes what is on record (docs/protocol.md).

        Only adopted topics keep their names; :meth:`_open_again` handles late requests there.

        Raises:
            FencedError: there is a newer leader.
        """
        self._write_fenced(())
        if self._hook is not None and self._procedure is not None:
            self._hook(self._procedure, effect, "fenced")

    # Topics.

    @_carries_out(fx.CreateTopics)
    def _create_topics(self, effect: fx.CreateTopics) -> Mapping[str, str]:
        self._look_at_fence(effect)
        self._admin.create_topics(map(spec_of, effect.topics))
        return self._ids_of([spec.name for spec in effect.topics])

    @_carries_out(fx.TopicIds)
    def _topic_ids(self, effect: fx.TopicIds) -> Mapping[str, str]:
        return self._ids_of(effect.topics)

    def _ids_of(self, topics: Sequence[str]) -> Mapping[str, str]:
        return {name: str(identity) for name, identity in self._admin.topic_ids(topics).items()}

    @_carries_out(fx.LookAtTopics)
    def _look_at_topics(self, effect: fx.LookAtTopics) -> Mapping[str, fx.TopicLook]:
        """Check topics, with retries while the only problem is a broker that has just stopped."""
        deadline = Deadline(LEADERLESS_S if effect.is_patient else 0.0)
        backoff = Backoff()
        while True:
            looks = self._looks_at(effect.topics)
            if deadline.passed() or all(item.refused != LEADERLESS for item in looks.values()):
                return looks
            backoff.sleep(deadline)

    def _looks_at(self, topics: Collection[str]) -> dict[str, fx.TopicLook]:
        found = self._admin.look_at_each(topics)
        return {topic: look_of(found.get(topic)) for topic in topics}

    @_carries_out(fx.MendTopics)
    def _mend_topics(self, effect: fx.MendTopics) -> Mapping[str, str] | None:
        self._look_at_fence(effect)
        admin = self._keeper if effect.optional else self._admin
        try:
            return admin.mend([spec_of(spec) for spec in effect.topics])
        except KafkaUnavailableError as fault:
            if not effect.optional:
                raise
            logger.info('topics.check-failed group=%s reason="%s"', self._group, fault)
            return None

    @_carries_out(fx.DescribeTopics)
    def _describe_topics(self, effect: fx.DescribeTopics) -> Mapping[str, fx.TopicState] | None:
        admin = self._keeper if effect.optional else self._admin
        try:
            found = admin.describe(effect.topics, with_operations=True)
        except (KafkaUnavailableError, NotAuthorizedError) as fault:
            if not effect.optional:
                raise
            logger.info('topics.check-failed group=%s reason="%s"', self._group, fault)
            return None
        return {
            name: fx.TopicState(
                str(item.topic_id),
                item.partitions,
                item.config,
                item.operations,
                item.sealed,
                item.sealing,
            )
            for name, item in found.items()
        }

    @_carries_out(fx.SetTopicConfig)
    def _set_topic_config(self, effect: fx.SetTopicConfig) -> None:
        self._look_at_fence(effect)
        self._admin.set_topic_config(effect.topic, effect.config)

    @_carries_out(fx.DeleteTopics)
    def _delete_topics(self, effect: fx.DeleteTopics) -> bool:
        """Delete topics by ids that were looked up before the fence: a topic created under the name since then is kept.

        A broker may not know yet that a topic was created, so a topic without a known id is deleted by its name.
        """
        try:
            ids = self._keeper.topic_ids(effect.topics)
            self._look_at_fence(effect)
            self._keeper.delete_topics(ids)
            self._keeper.delete_topics([name for name in effect.topics if name not in ids])
        except KafkaUnavailableError as fault:
            logger.warning('topics.deletion-failed group=%s reason="%s"', self._group, fault)
            return False
        self._condition_reader.forget()
        return True

    @_carries_out(fx.Seal)
    def _seal(self, effect: fx.Seal) -> Mapping[Partition, int]:
        ours = {topic for topic, _ in effect.partitions if is_segment_topic(topic) or is_buffer_topic(topic)}
        adopted = {topic for topic, _ in effect.partitions} - ours
        before = self._admin.describe(adopted) if adopted else {}
        _check_ids(effect, {topic: str(item.topic_id) for topic, item in before.items()})
        self._look_at_fence(effect)
        return self._admin.seal(
            effect.partitions,
            timeout_s=self._settings.seal_timeout_s,
            transactional_id=self._group.sealing_id,
            foreign_s=SEAL_FOREIGN_S,
            closed=lambda: self._open_again(effect, before),
        )

    def _open_again(self, effect: fx.Seal, before: Mapping[str, TopicDescription]) -> None:
        """Open adopted topics again that were closed too late, or that were recreated before they were closed.

        A leader may have paused before it closed one, until others had finished the scale and the stream was deleted,
        so that the topic is a plain one. If it dies here, the topic stays closed: nothing is lost, but its writers are
        refused until its owner resets the settings (docs/adopted-topics.md).

        Args:
            before: Descriptions before the seal; topics that were closed already are skipped.

        Raises:
            ConflictError: a topic is not the one that the stream had adopted; the topic of its name is open.
            FencedError, StaleStateError: this leader was replaced, or may have been.
        """
        if not before:
            return
        try:
            self._write_fenced(())
        except (FencedError, StaleStateError):
            metadata = Metadata(self._session)
            for topic, described in before.items():
                if not described.sealed and not metadata.is_left(topic, str(described.topic_id)):
                    logger.warning("topic.reopened group=%s topic=%s cause=stream-deleted", self._group, topic)
                    self._admin.set_topic_config(topic, described.sealing)
            raise
        looks = self._admin.look(before)
        given = Counter(topic for topic, _ in effect.partitions)
        for topic, described in before.items():
            look = looks.get(topic)
            if look is not None and look.topic_id == described.topic_id and look.partitions > given[topic]:
                logger.warning("topic.reopened group=%s topic=%s cause=partitions-added", self._group, topic)
                self._admin.set_topic_config(topic, described.sealing)
                raise InvalidRequestError(f"cannot seal topic {topic}: partitions were added to it meanwhile")
        found = {topic: str(look.topic_id) for topic, look in looks.items()}
        for topic, described in before.items():
            if found.get(topic, str(described.topic_id)) != str(described.topic_id):
                logger.warning("topic.reopened group=%s topic=%s cause=created-again", self._group, topic)
                # Brokers do not tell any more what its owner has just given it.
                self._admin.set_topic_config(topic, dict.fromkeys(SEALED) if described.sealed else described.sealing)
        _check_ids(effect, found)

    @_carries_out(fx.LookForObstacles)
    def _look_for_obstacles(self, effect: fx.LookForObstacles) -> Sequence[Obstacle]:
        own = {appender.transactional_id for appender in self._appenders}
        looks = self._looks_at({topic for topic, _ in effect.partitions})
        short = [Unreplicated(topic) for topic, look in looks.items() if look.lacks == UNREPLICATED]
        with asking(self._kafka) as cluster:
            return [*short, *with_own(obstacles(cluster, effect.partitions), own)]

    @_carries_out(fx.Closed)
    def _closed(self, effect: fx.Closed) -> frozenset[str]:
        return self._admin.closed(effect.topics)

    @_carries_out(fx.EndForeign)
    def _end_foreign(self, effect: fx.EndForeign) -> str | None:
        try:
            with asking(self._kafka) as cluster:
                end_transactions(cluster, effect.transactions)
        except (KafkaUnavailableError, NotAuthorizedError) as fault:
            logger.warning('native-txn.end-failed group=%s reason="%s"', self._group, fault)
            return str(fault)
        return None

    # The round.

    @_carries_out(fx.MergeFrames)
    def _merge(self, effect: fx.MergeFrames) -> Sequence[int]:
        feed = self._feed = FrameFeed(effect.items, self._reader.read, effect.rooms, effect.stamped)
        return feed.offsets(self._append(feed.batches, {topic for (topic, _), _ in effect.items}))

    @_carries_out(fx.AppendTogether)
    def _append_together(self, effect: fx.AppendTogether) -> tuple[Sequence[int], Sequence[int]]:
        feed = self._feed = FrameFeed(effect.items, self._reader.read, effect.rooms, effect.stamped)
        control, places = control_batches(effect.records)
        beside = beside_batches(effect.beside)
        bases = self._append(
            lambda: chain(feed.batches(), ((effect.topic, batch) for batch in control), beside),
            {topic for (topic, _), _ in effect.items},
        )
        offsets = feed.offsets(bases)
        first = len(bases) - len(beside) - len(control)
        positions = [bases[first + batch] + delta for batch, delta in places]
        self._guard.appended(positions)
        if offsets != list(effect.expected):
            self._abort()
        return offsets, positions

    @_carries_out(fx.AppendControl)
    def _append_control(self, effect: fx.AppendControl) -> Sequence[int]:
        batches, places = control_batches(effect.records)
        beside = beside_batches(effect.beside)
        bases = self._append(lambda: chain(((effect.topic, batch) for batch in batches), beside))
        positions = [bases[batch] + delta for batch, delta in places]
        self._guard.appended(positions)
        return positions

    @_carries_out(fx.AppendMessages)
    def _append_messages(self, effect: fx.AppendMessages) -> Sequence[int]:
        batches, places = message_batches(effect.messages)
        messages = effect.messages
        bases = self._append(lambda: ((messages.topic, messages.partition, batch) for batch in batches))
        return [bases[batch] + delta for batch, delta in places]

    @_carries_out(fx.AppendLate)
    def _append_late(self, effect: fx.AppendLate) -> str | None:
        try:
            self._append(lambda: late_copies(effect.source, effect.items))
        except AppendRefusedError as fault:
            self._abort()
            return fault.kafka_error
        return None

    @_carries_out(fx.SendOffsets)
    def _send_offsets(self, effect: fx.SendOffsets) -> tuple[int, str] | None:
        """Send offsets; without an answer, retry for :data:`OFFSETS_S`.

        The bound keeps the broker of one consumer group from delaying all others.

        Raises:
            AppendRefusedError: the native transaction of a preparation got no answer, so its frames are aborted.
        """
        items = effect.items
        deadline = Deadline(OFFSETS_S)
        retry_s = OFFSETS_S / 3 if self._taken is None else OFFSETS_S
        while True:
            sent = 0
            try:
                for item in items:
                    self._with_unlocked(partial(self._send, item, retry_s))
                    sent += 1
            except AppendRefusedError as fault:
                self._abort()
                return sent, f"offsets of consumer group {items[sent].group_id} were refused: {fault.kafka_error}"
            except AppendUnknownError as fault:
                logger.info('offsets.retry group=%s reason="%s"', self._group, fault)
                self._current.init()
                unanswered = f"consumer group {items[sent].group_id} took no offsets within {OFFSETS_S:g} s"
                if self._taken is not None:  # with offsets alone its COMMIT would name records that no reader sees
                    raise AppendRefusedError(unanswered, topic=None, kafka_error=NO_ANSWER) from fault
                if deadline.passed():
                    return sent, unanswered
            else:
                return None

    def _send(self, item: GroupOffsets, retry_s: float) -> None:
        self._current.send_offsets(item.member, item.offsets, item.details, retry_timeout_s=retry_s)

    @_carries_out(fx.AbortRound)
    def _abort_round(self, _: fx.AbortRound) -> None:
        self._abort()

    @_carries_out(fx.CommitRound)
    def _commit_round(self, _: fx.CommitRound) -> int:
        if not self._guard.is_safe:
            self._write_fenced(())
            self._guard.checked()
        self._current.commit()
        self._next()
        self._merge_pool.note_round()
        return self._now_ms()

    def _abort(self) -> None:
        self._current.abort()
        self._next()

    def _next(self) -> None:
        if self._taken is not None:
            self._merge_pool.give_back(self._taken)
            self._taken = None
        self._guard.begin()
        self._current, is_borrowed = self._rotation.advance()
        if is_borrowed:
            self._taken = self._current

    def _append(self, batches: Callable[[], Iterable[Addressed]], topics: Collection[str] = ()) -> list[int]:
        """Append to the round; while an id is locked, only if ``topics`` have brokers enough to take its marker.

        Raises:
            AppendRefusedError: A topic has too few in-sync replicas; nothing was sent.
        """
        if self._rotation.is_any_locked and topics:
            for topic, look in self._looks_at(topics).items():
                if look.lacks:
                    raise AppendRefusedError(
                        f"topic {topic} has too few brokers: {look.lacks}; nothing was sent",
                        topic=topic,
                        kafka_error=look.lacks,
                    )
        return self._with_unlocked(lambda: self._current.append(batches()))

    def _with_unlocked(self, operation: Callable[[], T]) -> T:
        """Carry out an operation of the current appender, with the next one if Kafka has locked its id.

        Raises:
            KafkaUnavailableError: All are locked; the term ends.
        """
        for _ in self._appenders[1:]:
            try:
                take(self._current)
                return operation()
            except KafkaUnavailableError as fault:
                if fault.code != ID_LOCKED:
                    raise
                self._rotation.lock(self._current, fault)
                self._next()
        take(self._current)
        return operation()

    def _empty_round(self) -> None:
        """Abort what was appended before a refusal; the next round uses the next transactional id."""
        try:
            self._current.abort()
        except AppendUnknownError:
            self._current.init()
        self._next()

    # Large transactions.

    @_carries_out(fx.Prepare)
    def _prepare(self, effect: fx.Prepare) -> None:
        self._look_at_fence(effect)
        self._merge_pool.start(effect)

    @_carries_out(fx.LookAtPrepared)
    def _look_at_prepared(self, _: fx.LookAtPrepared) -> Mapping[str, fx.PreparationProgress]:
        return self._merge_pool.look()

    @_carries_out(fx.TakeUp)
    def _take_up(self, effect: fx.TakeUp) -> None:
        self._current = self._taken = self._merge_pool.take_up(effect.key)

    @_carries_out(fx.GiveUp)
    def _give_up(self, effect: fx.GiveUp) -> None:
        self._merge_pool.give_up(effect.key)

    # The logs.

    @_carries_out(fx.Look)
    def _look(self, effect: fx.Look) -> Sequence[fx.Found | fx.Undecided]:
        return self._condition_reader.look(effect.queries)

    @_carries_out(fx.EndOffsets)
    def _end_offsets(self, effect: fx.EndOffsets) -> Mapping[Partition, int]:
        is_of_group = all(is_group_topic(topic) for topic, _ in effect.partitions)
        with nullcontext() if is_of_group else self._current.within(Deadline(LEADERLESS_S)):
            return {
                (topic, number): self._current.end_offset(topic, partition=number)
                for topic, number in effect.partitions
            }

    @_carries_out(fx.StartOffsets)
    def _start_offsets(self, effect: fx.StartOffsets) -> Mapping[Partition, int]:
        if not effect.is_patient:
            return self._measures.starts(effect.partitions)
        starts = self._kafka.offsets.first(effect.partitions)
        return {partition: starts[partition] for partition in effect.partitions}

    @_carries_out(fx.StableEnds)
    def _stable_ends(self, effect: fx.StableEnds) -> Mapping[Partition, int]:
        return self._measures.stable_ends(effect.partitions)

    @_carries_out(fx.DeleteRecords)
    def _delete_records(self, effect: fx.DeleteRecords) -> frozenset[Partition]:
        """Delete records. Return refusals instead of raising them: truncation can wait, and no term ends for it."""
        self._look_at_fence(effect)
        return self._measures.delete(effect.before)

    @_carries_out(fx.Now)
    def _now(self, _: fx.Now) -> int:
        return self._now_ms()

    @_carries_out(fx.DiskBytes)
    def _disk_bytes(self, effect: fx.DiskBytes) -> Mapping[Partition, int]:
        return self._measures.disk_bytes(effect.partitions)

    @_carries_out(fx.LogEnds)
    def _log_ends(self, effect: fx.LogEnds) -> Mapping[Partition, int]:
        return self._measures.log_ends(effect.partitions)

    @_carries_out(fx.SampleKeys)
    def _sample_keys(self, effect: fx.SampleKeys) -> Sequence[tuple[bytes | None, int]]:
        return self._measures.sample(effect.partition, effect.records, effect.bytes_max)

    @_carries_out(fx.GroupCommits)
    def _group_commits(self, effect: fx.GroupCommits) -> Mapping[str, Mapping[Partition, int]]:
        return self._measures.group_commits(effect.groups)

    @_carries_out(fx.ReadLate)
    def _read_late(self, effect: fx.ReadLate) -> tuple[Sequence[LateRecord], int]:
        return self._late.read(effect.partition, effect.start, effect.end, effect.records_max)

    @_carries_out(fx.FindLate)
    def _find_late(self, effect: fx.FindLate) -> bool | None:
        return self._late.find(effect.source, effect.offset, effect.targets)

    # Takeover.

    @_carries_out(fx.TakeIdentity)
    def _take_identity(self, effect: fx.TakeIdentity) -> None:
        """Initialize all transactional ids in parallel: clients wait meanwhile, and each takes several round trips.

        Those that are locked are left out, after the second rule of :mod:`.transactional_ids`.
        """
        locked = self._take(self._appenders)
        usable = [appender for appender in self._appenders if appender not in locked]
        if not usable:
            raise next(iter(locked.values()))
        if locked:
            batches, _ = message_batches(fx.Messages(effect.group.commit_log_topic, FENCE_RECORDS))
            usable[0].append((effect.group.commit_log_topic, 0, batch) for batch in batches)
            usable[0].abort()
            present = self._admin.topic_ids(group_topics(effect.group))
            ends = {topic: usable[0].end_offset(topic) for topic in present}
            for appender, fault in self._take(locked).items():
                self._rotation.lock(appender, fault)
            self._await_markers(usable[0], ends)
        self._next()

    def _await_markers(self, appender: TransactionalAppender, ends: Mapping[str, int]) -> None:
        """Wait until all that was written to topics below some offsets is decided there, as taking every id would.

        Raises:
            KafkaUnavailableError: It was not in time.
        """
        deadline = Deadline(GROUP_TOPIC_MS / 1000)
        for topic, end in ends.items():
            backoff = Backoff()
            while appender.end_offset(topic, Isolation.READ_COMMITTED) < end:
                if deadline.passed():
                    raise KafkaUnavailableError(f"topic {topic} lacks markers below offset {end}; nothing was written")
                backoff.sleep(deadline)

    def _take(self, appenders: Collection[TransactionalAppender]) -> dict[TransactionalAppender, KafkaUnavailableError]:
        """Initialize appenders in parallel; return those whose ids are locked."""
        locked = {}
        with ThreadPoolExecutor(len(self._appenders), "take-identity") as pool:
            for appender, taken in [(appender, pool.submit(appender.init)) for appender in appenders]:
                try:
                    taken.result()
                except KafkaUnavailableError as fault:
                    if fault.code != ID_LOCKED:
                        raise
                    locked[appender] = fault
        return locked

    @_carries_out(fx.ReadCommitLog)
    def _read_commit_log(self, effect: fx.ReadCommitLog) -> fx.LogSummary:
        return read_commit_log(self._kafka, effect.topic, effect.start)

    @_carries_out(fx.ReadEnded)
    def _read_ended(self, effect: fx.ReadEnded) -> EndedIds:
        return read_ended(self._kafka, effect.topic, effect.start, effect.end)

    @_carries_out(fx.ReadOrders)
    def _read_orders(self, effect: fx.ReadOrders) -> Mapping[LineKey, int]:
        return read_orders(self._kafka, effect.topic, effect.records)

    @_carries_out(fx.ReadCompacted)
    def _read_compacted(self, effect: fx.ReadCompacted) -> Mapping[bytes, bytes]:
        latest = read_latest(self._kafka, effect.topic)
        return {key: item.value for key, item in latest.items()}

    @_carries_out(fx.ReadRecords)
    def _read_records(self, effect: fx.ReadRecords) -> Mapping[int, bytes | None]:
        return read_values(self._kafka, effect.topic, effect.offsets)
