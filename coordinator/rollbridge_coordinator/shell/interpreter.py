"""The interpreter: carries out the effects of a leader's procedures, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from typing import Any, Final, Literal, TypeVar, assert_never

from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailable,
    NotFoundError,
    RollbridgeError,
)
from rollbridge.kafka.appender import TransactionalAppender
from rollbridge.kafka.errors import (
    AppendRefusedError,
    AppendUnknownError,
    AuthenticationError,
    InvalidStateError,
    NotAuthorizedError,
    SealTimeoutError,
    UnsupportedBrokerError,
)
from rollbridge.kafka.foreign import end_transactions, obstacles
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.snapshots import read_latest, read_values
from rollbridge.kafka.topics import TopicAdmin, TopicSpec
from rollbridge.model import paths
from rollbridge.model.conditions import ForeignTransaction
from rollbridge.model.group_offsets import GroupOffsets
from rollbridge.model.late import LateRecord
from rollbridge.model.names import GroupName, is_segment_topic
from rollbridge.model.pieces import FrameRef, Partition
from rollbridge.model.records import CheckNode, NodeOperation
from rollbridge.zookeeper.access import open_counter, open_slots
from rollbridge.zookeeper.errors import NodeExists, NodeMissing, NodeNotEmpty, NodeVersionMismatch, ZooKeeperRefused
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.shell.frames import (
    Batches,
    FrameFeed,
    FrameReader,
    beside_batches,
    control_batches,
    message_batches,
    read_commit_log,
    read_orders,
)
from rollbridge_coordinator.shell.outlook import LateRecords, Measures, Outlook, late_batches
from rollbridge_coordinator.state import effects as fx
from rollbridge_coordinator.state.faults import LEADERLESS, LEADERLESS_S, SEAL_TIMEOUT, DeposedError, StaleStateError
from rollbridge_coordinator.state.steps import Steps

# --------------------------------------------------------------------------------------------------------------------
# Refusals: which errors of the adapters say for certain that an effect was not carried out, and will not be.


_LOOKS: Final = (fx.Look, fx.ReadLate, fx.FindLate, fx.EndOffsets)
"""What changes nothing."""
_DEFINITE: Final = (AppendRefusedError, InvalidRequestError, NotFoundError, ConflictError)
_DOUBTFUL: Final = (
    FencedError,
    InvalidStateError,  # a defect of ours
    AuthenticationError,  # the connection is refused, and not what was asked for
    UnsupportedBrokerError,
)
"""Those of the definite ones that say nothing about the effect. All others leave a doubt: time-outs, lost
connections, ``AppendUnknownError``, and of ZooKeeper's all but a write that it does not take."""


def refusal(effect: fx.Effect, fault: Exception, feed: FrameFeed | None) -> fx.Refused | None:
    """What to throw into a procedure for an error of its effect; None if that leaves a doubt.

    Args:
        effect: What was tried.
        fault: What an adapter raised.
        feed: The frames of the effect, if it has any.
    """
    if isinstance(fault, CorruptDataError) and isinstance(effect, fx.MergeFrames | fx.AppendTogether) and feed:
        # A frame that is no batch, or is gone from the buffer: found while the batches were made, nothing was sent.
        topic = effect.items[feed.at[0]][0] if feed.at else None
        return fx.Refused(effect, str(fault), code=fault.code, topic=topic, places=feed.at)
    if isinstance(fault, ZooKeeperRefused) and isinstance(effect, fx.ON_ZOOKEEPER):
        return fx.Refused(effect, str(fault), code=fault.code)
    if isinstance(fault, AppendUnknownError) and fault.batch is not None and feed is not None:
        # A round that was not to be committed yet leaves no doubt once it has been aborted.
        places = feed.items_of(fault.batch)
        return fx.Refused(effect, str(fault), code=fx.STUMBLED, topic=fault.topic, places=places) if places else None
    if isinstance(fault, AppendUnknownError) and fault.topic is not None and is_segment_topic(fault.topic):
        # Neither does one with a segment that no broker leads now.
        return fx.Refused(effect, str(fault), code=fault.kafka_error, topic=fault.topic)
    if isinstance(fault, KafkaUnavailable) and isinstance(effect, _LOOKS) and is_segment_topic(_topic_of(fault) or ""):
        return fx.Refused(effect, str(fault), code=LEADERLESS, topic=_topic_of(fault))
    if isinstance(effect, fx.Look | fx.ReadLate | fx.FindLate) and isinstance(fault, CorruptDataError):
        # Whoever may write to a segment can write there what nobody can read: only who expects something of it suffers,
        # or what came in late there.
        return fx.Refused(effect, str(fault), code=fault.code, topic=_topic_of(fault))
    if isinstance(fault, SealTimeoutError) and isinstance(effect, fx.Seal):
        # Whatever of it was done: sealing again goes on from there.
        return fx.Refused(effect, str(fault), code=SEAL_TIMEOUT, topic=_topic_of(fault))
    if isinstance(fault, _DOUBTFUL) or not isinstance(fault, _DEFINITE):
        return None
    if isinstance(fault, AppendRefusedError):
        places = feed.items_of(fault.batch) if feed is not None and fault.batch is not None else ()
        return fx.Refused(effect, str(fault), code=fault.kafka_error, topic=fault.topic, places=places)
    return fx.Refused(effect, str(fault), code=fault.code, topic=_topic_of(fault))


def _topic_of(fault: RollbridgeError) -> str | None:
    kind, _, name = fault.resource.partition(" ")
    return name if kind == "topic" else None


logger = logging.getLogger(__name__)

IDENTITIES: Final = 3
"""Transactional ids used in turn, so that a round never waits for the markers of the one before."""

OFFSETS_S: Final = 15.0
"""How long the coordinator of a consumer group may fail to take offsets before their transaction is refused."""

SEGMENT_MS: Final = round(LEADERLESS_S * 1000)
GROUP_TOPIC_MS: Final = 60_000
"""The same for topics of the whole group, without which nothing can be decided."""
SEAL_FOREIGN_S: Final = 2.0
"""How long a seal waits for native transactions of others that are open on what it has closed. Everybody else waits
meanwhile, so it is short; most end within milliseconds, and for the others the leader comes back."""

FOREIGN_S: Final = 5.0
"""How long a broker may take to tell of native transactions of others."""
FOREIGN_CONNECT_S: Final = 2.0
"""How long it may take to connect to one for that, before it counts as away."""

DELETE_S: Final = 5.0
"""How long brokers may take to delete what nobody waits for, before that is left for another time."""

T = TypeVar("T")

Moment = Literal["before", "fenced", "after"]
"""Of an effect; ``fenced`` is between the last look at the fence and a request that Kafka fences nobody from."""
Hook = Callable[[Steps[Any], fx.Effect, Moment], None]
"""Called with the procedure under way at each moment of each of its effects. Tests inject one that ends the process."""


class Interpreter:
    """Runs procedures for one term of one leader.

    An effect that was refused for good is thrown into its procedure as
    :class:`~rollbridge_coordinator.state.effects.Refused`. All other errors of the adapters pass through: after them
    nobody knows what was done, so the leader takes over anew.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        group: GroupName,
        session: ZooKeeperSession,
        controller_version: int,
        now_ms: Callable[[], int],
        hook: Hook | None = None,
    ) -> None:
        """Prepare a term.

        Args:
            settings: Of the daemon.
            group: Which group is led.
            session: The ZooKeeper session that holds the leadership.
            controller_version: Version of the controller node that makes this leader the newest.
            now_ms: The leader's clock.
            hook: Is called at each moment of each effect.
        """
        self._settings = settings
        self._group = group
        self._session = session
        self._interruptions = session.interruptions
        self._now_ms = now_ms
        self._fence = CheckNode(paths.controller(group), controller_version)
        self._admin = TopicAdmin(settings.bootstrap_servers, security=settings.security)
        self._keeper = TopicAdmin(settings.bootstrap_servers, security=settings.security, timeout_s=DELETE_S)
        self._reader = FrameReader(settings.bootstrap_servers, settings.security)
        self._outlook = Outlook(settings)
        self._measures = Measures(settings)
        self._late = LateRecords(settings)
        self._foreign = Cluster(
            settings.bootstrap_servers,
            security=settings.security,
            connect_timeout_s=FOREIGN_CONNECT_S,
            request_timeout_s=FOREIGN_S,
        )
        self._appenders = [
            TransactionalAppender(
                settings.bootstrap_servers,
                group.transactional_id(number),
                security=settings.security,
                transaction_timeout_ms=int(settings.merge_timeout_s * 1000),
                topic_timeout_ms=lambda topic: SEGMENT_MS if is_segment_topic(topic) else GROUP_TOPIC_MS,
            )
            for number in range(IDENTITIES)
        ]
        self._turn = cycle(self._appenders)
        self._current = next(self._turn)
        self._hook = hook
        self._feed: FrameFeed | None = None
        self._procedure: Steps[Any] | None = None

    def run(self, procedure: Steps[T]) -> T:
        """Carry out a procedure; gives its result."""
        result: Any = None
        refused: fx.Refused | None = None
        while True:
            try:
                effect = procedure.send(result) if refused is None else procedure.throw(refused)
            except StopIteration as end:
                value: T = end.value
                return value
            except fx.Refused as uncaught:
                raise uncaught.__cause__ or uncaught from None
            if self._hook is not None:
                self._hook(procedure, effect, "before")
            refused = None
            self._feed = None
            self._procedure = procedure
            try:
                result = self._execute(effect)
            except Exception as fault:
                refused = refusal(effect, fault, self._feed)
                logger.debug("%s: %s failed: %s", self._group, type(effect).__name__, fault)
                if refused is None:
                    procedure.close()
                    raise
                refused.__cause__ = fault
                if isinstance(fault, AppendUnknownError):
                    self._current.init()  # this says for certain that nothing of the round is or will be committed
                if isinstance(effect, fx.ROUND):
                    self._empty_round()
            if self._hook is not None:
                self._hook(procedure, effect, "after")

    def close(self) -> None:
        """End the term: what is open in Kafka is aborted."""
        for appender in self._appenders:
            appender.close()
        self._outlook.close()
        self._measures.close()
        self._late.close()
        self._foreign.close()
        self._reader.close()

    def _empty_round(self) -> None:
        """Abort what was appended, after a refusal; the next round uses the next identity."""
        try:
            self._current.abort()
        except AppendUnknownError:
            self._current.init()
        self._current = next(self._turn)

    def _execute(self, effect: fx.Effect) -> Any:
        match effect:
            case fx.MergeFrames(items):
                return self._merge(items)
            case fx.AppendControl():
                return self._append_control(effect)
            case fx.AppendTogether():
                return self._append_together(effect)
            case fx.SendOffsets(offsets):
                return self._send_offsets(offsets)
            case fx.Look(queries):
                return self._outlook.look(queries)
            case fx.AbortRound():
                self._current.abort()
                self._current = next(self._turn)
            case fx.AppendMessages(messages):
                return self._append_batches(messages.topic, message_batches(messages))
            case fx.CommitRound():
                self._current.commit()
                self._current = next(self._turn)
            case fx.Write(operations):
                return self._write(operations)
            case fx.ReadNodes(names):
                nodes = self._session.get_many(names)
                return {name: None if node is None else node.value for name, node in zip(names, nodes, strict=True)}
            case fx.ReadCounter(name):
                found = self._session.get(name)
                return None if found is None else (found.value, found.version)
            case fx.ReadChildren(names):
                return dict(zip(names, self._session.children_many(names), strict=True))
            case fx.EnsureNodes(names):
                known = self._session.get_many(names)
                for name, node in zip(names, known, strict=True):
                    if node is None:
                        self._session.ensure(name)
                    if name.startswith(f"{paths.CAS}/"):
                        open_slots(self._session, self._group, name)
                    elif name == paths.counter(self._group):
                        open_counter(self._session, self._group)
            case fx.CreateTopics(topics):
                self._look_at_fence(effect)
                return self._create_topics(topics)
            case fx.MendTopics():
                return self._mend_topics(effect)
            case fx.DeleteTopics():
                return self._delete_topics(effect)
            case fx.TopicIds(topics):
                return self._topic_ids(topics)
            case fx.Seal(topics):
                self._look_at_fence(effect)
                return self._admin.seal(
                    topics,
                    timeout_s=self._settings.seal_timeout_s,
                    transactional_id=self._group.sealing_id,
                    foreign_s=SEAL_FOREIGN_S,
                )
            case fx.LookForObstacles(topics):
                return obstacles(self._foreign, topics)
            case fx.Closed(topics):
                return self._admin.closed(topics)
            case fx.EndForeign(transactions):
                return self._end_foreign(transactions)
            case fx.EndOffsets(partitions):
                return self._end_offsets(partitions)
            case fx.StartOffsets(partitions):
                return self._admin.start_offsets(partitions)
            case fx.DeleteRecords(before):
                self._look_at_fence(effect)
                return self._delete_records(before)
            case fx.StableEnds(topics):
                return self._measures.stable_ends(topics)
            case fx.ReadLate(topic, start, end, records_max):
                return self._late.read(topic, start, end, records_max)
            case fx.AppendLate(source, items):
                return self._append_late(source, items)
            case fx.FindLate(source, offset, targets):
                return self._late.find(source, offset, targets)
            case fx.Now():
                return self._now_ms()
            case fx.DiskBytes(topics):
                return self._measures.disk_bytes(topics)
            case fx.GroupCommits(groups):
                return self._measures.group_commits(groups)
            case fx.ReadCompacted(topic):
                latest = read_latest(self._settings.bootstrap_servers, self._settings.security, topic)
                return {key: item.value for key, item in latest.items()}
            case fx.ReadRecords(topic, offsets):
                return read_values(self._settings.bootstrap_servers, self._settings.security, topic, offsets)
            case fx.TakeIdentity(_):
                self._take_identity()
            case fx.ReadCommitLog(topic, start):
                return read_commit_log(self._settings.bootstrap_servers, self._settings.security, topic, start)
            case fx.ReadOrders(topic, records):
                return read_orders(self._settings.bootstrap_servers, self._settings.security, topic, records)
            case _:
                assert_never(effect)
        return None

    def _take_identity(self) -> None:
        """Take all transactional ids, side by side: clients wait for it, and each takes several round trips."""
        with ThreadPoolExecutor(len(self._appenders), "take-identity") as pool:
            for taken in [pool.submit(appender.init) for appender in self._appenders]:
                taken.result()

    @property
    def was_away(self) -> bool:
        """Whether the connection to ZooKeeper was away since: what is there now may be less than there was."""
        return self._session.interruptions != self._interruptions

    def resume(self) -> None:
        """Go on with the connection that there is now."""
        self._interruptions = self._session.interruptions

    def _write(self, operations: Sequence[NodeOperation]) -> bool:
        if self.was_away:
            raise StaleStateError("the connection to ZooKeeper was away in the middle of the work; nothing was written")
        try:
            self._session.multi([self._fence, *operations])
        except (NodeExists, NodeMissing, NodeNotEmpty, NodeVersionMismatch) as fault:
            if fault.path == self._fence.path:
                raise DeposedError(f"{self._group} has a newer leader; nothing was written") from fault
            logger.info("%s: a write did not apply: %s", self._group, fault)
            return False
        return True

    def _merge(self, items: Sequence[tuple[str, FrameRef]]) -> Sequence[int]:
        feed = self._feed = FrameFeed(items, self._reader.read)
        return feed.offsets(self._current.append(feed.batches()))

    def _append_together(self, effect: fx.AppendTogether) -> tuple[Sequence[int], Sequence[int]]:
        feed = self._feed = FrameFeed(effect.items, self._reader.read)
        control, places = control_batches(effect.records)
        beside = beside_batches(effect.beside)
        bases = self._current.append(chain(feed.batches(), ((effect.topic, batch) for batch in control), beside))
        offsets = feed.offsets(bases)
        first = len(bases) - len(beside) - len(control)
        if offsets != list(effect.expected):
            self._current.abort()
            self._current = next(self._turn)
        return offsets, [bases[first + batch] + delta for batch, delta in places]

    def _append_control(self, effect: fx.AppendControl) -> Sequence[int]:
        batches, places = control_batches(effect.records)
        beside = beside_batches(effect.beside)
        bases = self._current.append(chain(((effect.topic, batch) for batch in batches), beside))
        return [bases[batch] + delta for batch, delta in places]

    def _append_batches(self, topic: str, made: Batches) -> Sequence[int]:
        batches, places = made
        bases = self._current.append((topic, batch) for batch in batches)
        return [bases[batch] + delta for batch, delta in places]

    def _send_offsets(self, items: Sequence[GroupOffsets]) -> tuple[int, str] | None:
        """Tried again for a moment where there is no answer, so that a group whose broker is gone holds nobody up."""
        deadline = time.monotonic() + OFFSETS_S
        while True:
            sent = 0
            try:
                for item in items:
                    self._current.send_offsets(item.member, item.offsets, retry_timeout_s=OFFSETS_S / 3)
                    sent += 1
            except AppendRefusedError as fault:
                self._current.abort()
                self._current = next(self._turn)
                return sent, f"offsets of consumer group {items[sent].group_id} were refused: {fault.kafka_error}"
            except AppendUnknownError as fault:
                self._current.init()
                if time.monotonic() >= deadline:
                    return sent, f"consumer group {items[sent].group_id} took no offsets within {OFFSETS_S:g} s"
                logger.info("%s: offsets are sent again: %s", self._group, fault)
            else:
                return None

    def _end_foreign(self, transactions: Sequence[ForeignTransaction]) -> str | None:
        try:
            end_transactions(self._foreign, transactions)
        except (KafkaUnavailable, NotAuthorizedError) as fault:
            logger.warning("%s: %s", self._group, fault)
            return str(fault)
        return None

    def _append_late(self, source: str, items: Sequence[tuple[str, LateRecord]]) -> str | None:
        try:
            self._current.append(late_batches(source, items))
        except AppendRefusedError as fault:
            self._current.abort()
            self._current = next(self._turn)
            return fault.kafka_error
        return None

    def _create_topics(self, specs: Sequence[fx.TopicSpec]) -> Mapping[str, str]:
        self._admin.create_topics(map(_spec, specs))
        return self._topic_ids([spec.name for spec in specs])

    def _topic_ids(self, topics: Sequence[str]) -> Mapping[str, str]:
        return {name: str(identity) for name, identity in self._admin.topic_ids(topics).items()}

    def _look_at_fence(self, effect: fx.Effect) -> None:
        """Give up if there is a newer leader: the request that follows is one that Kafka takes from anybody.

        A leader that is stopped right behind this look still sends it, hours later. What it names is then of the same
        life of the same stream, as no name of a topic is used twice, and was to be done in any case, as a newer leader
        finishes what is on record (docs/protocol.md).

        Raises:
            DeposedError: there is a newer leader.
        """
        self._write(())
        if self._hook is not None and self._procedure is not None:
            self._hook(self._procedure, effect, "fenced")

    def _mend_topics(self, effect: fx.MendTopics) -> Mapping[str, str] | None:
        self._look_at_fence(effect)
        admin = self._keeper if effect.optional else self._admin
        try:
            return admin.mend([_spec(spec) for spec in effect.topics])
        except KafkaUnavailable as fault:
            if not effect.optional:
                raise
            logger.info("%s: topics could not be looked at, trying again later: %s", self._group, fault)
            return None

    def _delete_topics(self, effect: fx.DeleteTopics) -> bool:
        """By their ids, looked up before the look at the fence: what was made under a name since is not touched.

        A broker may not know yet that a topic was made. One that has no id for us goes by its name.
        """
        admin = self._keeper if effect.optional else self._admin
        try:
            ids = admin.topic_ids(effect.topics)
            self._look_at_fence(effect)
            admin.delete_topics(ids)
            admin.delete_topics([name for name in effect.topics if name not in ids])
        except KafkaUnavailable as fault:
            if not effect.optional:
                raise
            logger.warning("%s: topics could not be deleted, trying again later: %s", self._group, fault)
            return False
        self._outlook.forget()
        return True

    def _delete_records(self, before: Mapping[Partition, int]) -> frozenset[Partition]:
        """Refusals are reported and not raised: that something is deleted later is no reason to give up the lead."""
        try:
            self._keeper.delete_records(dict(before.items()))
        except (InvalidRequestError, KafkaUnavailable, NotFoundError) as fault:
            logger.warning("%s: records could not be deleted: %s", self._group, fault)
            return frozenset(before)
        return frozenset()

    def _end_offsets(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        return {(topic, number): self._current.end_offset(topic, partition=number) for topic, number in partitions}


def _spec(spec: fx.TopicSpec) -> TopicSpec:
    return TopicSpec(
        name=spec.name, partitions=spec.partitions, replication_factor=spec.replication_factor, config=spec.config
    )
