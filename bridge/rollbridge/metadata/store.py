"""Typed content of ZooKeeper: streams and their histories, groups, open transactions, counters, admin requests.

Paths come from :mod:`rollbridge.metadata.paths`, records from :mod:`rollbridge.metadata.records`. Reads take an
optional watch, which is called once when the answer may have changed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Final, TypeVar

from rollbridge.base.deadlines import Deadline, answers_within, patience_s, wall_ms
from rollbridge.base.ids import ISSUED_MAX as COUNT_MAX
from rollbridge.base.ids import PART_MAX, SHARED_MAX, TransactionId, counter_of, need_number, parse_number
from rollbridge.errors import (
    CoordinatorUnavailableError,
    CorruptDataError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    RollbridgeError,
    StreamNotFoundError,
    UnknownWriteError,
    ZooKeeperUnavailableError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.changes import (
    METADATA_UNREADABLE,
    CommittingTransactions,
    EpochTransition,
    StreamChange,
    StreamFault,
    works_of,
)
from rollbridge.metadata.errors import (
    NodeConflictError,
    NodeMissingError,
    ZooKeeperRefusedError,
)
from rollbridge.metadata.picture import ClusterPicture, GroupPicture, StreamPicture
from rollbridge.metadata.records import (
    LAYOUT_FORMAT,
    ClusterIdentity,
    ControllerEpoch,
    Coordinator,
    CreateNode,
    Group,
    Lead,
    NodeOperation,
    TransactionRecord,
    Truncation,
)
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.metadata.session import Watch, Znode, ZooKeeperSession
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.names import GroupName, StreamName, check_adoptable
from rollbridge.stream.scaling import ScalingWaits

logger = logging.getLogger(__name__)
NOBODY: Final = "no coordinator is running, or none that reaches Kafka (start one with `rollbridge coordinator`)"
T = TypeVar("T")

_TELL_S: Final = 2.0
"""Seconds without an answer after which a log says why that may be."""
_WITHDRAW_S: Final = 1.0
"""Time that is kept for withdrawing a request: of one that cannot be withdrawn it is not known whether it was taken."""
_CLOSED_LOOK_S: Final = 0.5
"""Interval at which waits for an answer check whether the session was closed."""
FIRST_COUNTER: Final = 1
"""First transaction counter given out in a new cluster."""
SET_RIGHT_S: Final = 15.0
"""Seconds to wait for a leader to repair a damaged counter; leaders check every few seconds."""


def _each(ask: Callable[[list[str]], Sequence[T]], wanted: list[str]) -> list[T | ZooKeeperRefusedError]:
    try:
        return list(ask(wanted))
    except ZooKeeperRefusedError as refused:
        if len(wanted) == 1:
            return [refused]
    middle = len(wanted) // 2
    return [*_each(ask, wanted[:middle]), *_each(ask, wanted[middle:])]


def _listed(found: list[str] | ZooKeeperRefusedError) -> list[str]:
    return sorted(found) if isinstance(found, list) else []


def _readable(node: Znode | RollbridgeError | None) -> Znode | None:
    """Return a node; raise why ZooKeeper refuses to give it."""
    if isinstance(node, RollbridgeError):
        raise node
    return node


def lead_in(node: Znode) -> Lead:
    """Return what a leader node says: its version is 0 until the takeover is over."""
    since_ms = node.modified_ms if node.version else node.created_ms
    return Lead(node.value.decode(errors="replace"), since_ms, is_serving=node.version > 0)


class Metadata:
    """Typed access to the nodes below a session's root path. Holds no state of its own."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self.session: Final = session

    # Streams ----------------------------------------------------------------------------------------------------

    def stream(self, name: StreamName, watch: Watch | None = None) -> StreamConfig | None:
        """Return a stream's configuration; None if the stream does not exist."""
        node = self.session.get(paths.stream(name), watch)
        return None if node is None else StreamConfig.from_json(node.value)

    def name_of(self, name: str, watch: Watch | None = None) -> StreamName:
        """Return the stream that a name means: ``scope/stream``, or a topic that a stream has adopted.

        ``watch`` is called once when a topic is adopted or released.

        Raises:
            StreamNotFoundError: no stream has adopted a topic of this name.
            InvalidNameError: not a name.
        """
        if "/" in name:
            return StreamName.parse(name)
        check_adoptable(name)
        node = self.session.get(paths.adopted(name), watch)
        found = None if node is None else StreamName.parse(node.value.decode(errors="replace"))
        config = None if found is None else self.stream(found)
        if found is None or config is None or config.topic != name:
            raise StreamNotFoundError(
                f"no stream has adopted topic {name} (`rollbridge stream adopt {name}` does), and a stream is named "
                "scope/stream; nothing was written"
            )
        return found

    def is_left(self, topic: str, topic_id: str) -> bool:
        """Return True if a stream that has adopted this very topic has left it, or is about to: it is closed then."""
        try:
            config = self.stream(self.name_of(topic))
        except StreamNotFoundError:
            return False
        return config is not None and config.topic_id == topic_id and bool(config.settings)

    def stream_fault(self, name: StreamName, watch: Watch | None = None) -> StreamFault | None:
        """Return why a stream's transactions are not merged; None unless the stream is in an error state."""
        node = self.session.get(paths.stream_fault(name), watch)
        return None if node is None else StreamFault.from_json(node.value)

    def stream_faults(self, names: Sequence[StreamName]) -> dict[StreamName, StreamFault]:
        """Return why transactions of streams are not merged, of those that are in an error state, or may be."""
        wanted = [paths.stream_fault(name) for name in names]
        found: dict[StreamName, StreamFault] = {}
        for name, said in zip(names, self._each_of(wanted, StreamFault.from_json), strict=True):
            if isinstance(said, RollbridgeError):
                found[name] = StreamFault(f"its fault cannot be read: {said}", METADATA_UNREADABLE, "", 0)
            elif said is not None:
                found[name] = said
        return found

    def scaling_waits(self, group: GroupName) -> ScalingWaits:
        """Return which streams of a group wait to be scaled by their load, and for what."""
        node = self.session.get(paths.scaling_waits(group))
        return ScalingWaits() if node is None else ScalingWaits.from_json(node.value)

    def history(
        self, name: StreamName, watch: Watch | None = None, known: EpochHistory | None = None
    ) -> EpochHistory | None:
        """Return the epochs of a stream; None if the stream does not exist. ``watch`` is called when an epoch is added.

        Args:
            name: The stream.
            watch: Called once when the answer may have changed.
            known: An earlier answer; its sealed epochs, which cannot change any more, are not read again.

        Raises:
            CorruptDataError: the epochs do not belong together.
        """
        final = itertools.takewhile(lambda record: record.sealed_ends is not None, known.records if known else ())
        settled = {int(record.epoch): record for record in final}
        seen: list[str] = []
        while True:
            numbers = self.session.children(paths.epochs(name), watch)
            missing = [number for number in numbers if int(number) not in settled]
            # What is dropped while this is read is known from the last node.
            *nodes, raw = self.session.get_many(
                [*(f"{paths.epochs(name)}/{number}" for number in missing), paths.truncation(name)]
            )
            truncation = Truncation() if raw is None else Truncation.from_json(raw.value)
            gone = [int(number) for number, node in zip(missing, nodes, strict=True) if node is None]
            if not numbers or any(truncation.keeps(number) for number in gone):
                return None  # the stream is being deleted
            read = [EpochRecord.from_json(node.value) for node in nodes if node is not None]
            old = [record for epoch, record in settled.items() if int(numbers[0]) <= epoch <= int(numbers[-1])]
            history = truncation.history_of([*old, *read])
            if history is not None:
                return history
            if numbers == seen:
                raise CorruptDataError(f"the epochs of stream {name} end before the first one that should be kept")
            seen = numbers

    def histories(self, names: Sequence[StreamName]) -> Iterator[EpochHistory | RollbridgeError | None]:
        """Yield the epochs of each stream, as :meth:`history` returns them, or what it raises; asked for together."""
        numbers = _each(self.session.children_many, [paths.epochs(name) for name in names])
        wanted = [
            # What may not be listed is read by itself below, which tells why.
            [*(f"{paths.epochs(name)}/{number}" for number in _listed(found)), paths.truncation(name)]
            for name, found in zip(names, numbers, strict=True)
        ]
        nodes = iter(self.get_each([path for group in wanted for path in group]))
        for name, group in zip(names, wanted, strict=True):
            own = list(itertools.islice(nodes, len(group)))
            try:
                *epochs, raw = (_readable(node) for node in own)
                history = None
                if epochs and None not in epochs:
                    truncation = Truncation() if raw is None else Truncation.from_json(raw.value)
                    history = truncation.history_of([EpochRecord.from_json(node.value) for node in epochs if node])
                # What does not fit was changed while it was read, or is broken: it is read by itself.
                yield self.history(name) if history is None else history
            except RollbridgeError as fault:
                yield fault

    def scopes(self) -> list[str]:
        """Return the scopes in which a stream was ever created."""
        return self.session.children(paths.SCOPES)

    def streams(self, scope: str | None = None) -> list[StreamConfig]:
        """Return the configurations of all streams, or of those of a scope, sorted by name.

        Those that cannot be read are left out; :meth:`stream_records` has them.
        """
        return [item for item in self.stream_records(scope).values() if isinstance(item, StreamConfig)]

    def stream_records(self, scope: str | None = None) -> dict[StreamName, StreamConfig | RollbridgeError]:
        """Return the configurations of all streams, or of those of a scope; the error in place of each unreadable."""
        scopes = self.scopes() if scope is None else [scope]
        children = self.session.children_many([paths.streams(item) for item in scopes])
        wanted: list[StreamName] = []
        for item, names in zip(scopes, children, strict=True):
            for stream in names:
                with suppress(InvalidNameError):  # not a node of ours
                    wanted.append(StreamName(item, stream))
        found = self._each_of(list(map(paths.stream, wanted)), StreamConfig.from_json)
        return {name: said for name, said in zip(wanted, found, strict=True) if said is not None}

    def get_each(self, wanted: list[str]) -> list[Znode | ZooKeeperRefusedError | None]:
        """Return nodes; the error in place of each that ZooKeeper refuses to return."""
        return _each(self.session.get_many, wanted)

    def _each_of(self, wanted: list[str], decode: Callable[[bytes], T]) -> Iterator[T | RollbridgeError | None]:
        """Yield the records in nodes; the error in place of each that cannot be read."""
        for node in self.get_each(wanted):
            try:
                known = _readable(node)
                yield None if known is None else decode(known.value)
            except RollbridgeError as fault:
                yield fault

    def lay_out(self) -> None:
        """Create the missing parents of everything else, so that they belong to this session's identity."""
        gateways = paths.GATEWAYS_LIVE, paths.GATEWAY_LEASES, paths.GATEWAY_IDS, paths.GATEWAY_HOLDERS
        for path in (
            paths.COORDINATORS,
            paths.GROUPS,
            paths.SCOPES,
            paths.CAS,
            paths.TOPICS,
            paths.GATEWAYS,
            *gateways,
        ):
            self.session.ensure(path)
        for path in (paths.TRANSACTION_COUNTER, paths.GROUP_NUMBERS):
            self.session.ensure(path, str(FIRST_COUNTER).encode())

    def require_layout(self) -> None:
        """Check that a coordinator has ever served this path: where nothing is listed, it may be a wrong one.

        Raises:
            NotFoundError: none has.
        """
        if self.session.exists(paths.SCOPES) is None:
            raise NotFoundError(
                f"ZooKeeper path {self.session.root} at {self.session.address} was never served by a coordinator, so "
                "nothing can be listed: check the address, its chroot and the root path (ROLLBRIDGE_ZOOKEEPER_ROOT, or "
                "zookeeper_root), or start the first coordinator with `rollbridge coordinator`; nothing was changed",
                code="nothing-served",
            )

    # Groups and coordinators ------------------------------------------------------------------------------------

    def groups(self, watch: Watch | None = None) -> list[GroupName]:
        return [GroupName.parse(name) for name in self.session.children(paths.GROUPS, watch)]

    def groups_of(self, client_name: str, groups: Sequence[GroupName]) -> list[GroupName]:
        """Return those of the groups in which a session of a client is on record.

        In others it has nothing open, and nothing is remembered of it, if it is a client that registers sessions.
        """
        nodes = self.session.get_many([paths.session(group, client_name) for group in groups])
        return [group for group, node in zip(groups, nodes, strict=True) if node is not None]

    def group(self, name: GroupName) -> Group | None:
        """Return a group's record; None if the group does not exist."""
        node = self.session.get(paths.group(name))
        return None if node is None else Group.from_json(node.value)

    def group_records(self) -> dict[GroupName, Group | RollbridgeError]:
        """Return the records of all groups; the error in place of each that cannot be read."""
        names = self.groups()
        found = self._each_of(list(map(paths.group, names)), Group.from_json)
        return {name: said for name, said in zip(names, found, strict=True) if said is not None}

    def ensure_group(self, name: GroupName, created_ms: int | None = None) -> bool:
        """Create the missing nodes of a group, which a coordinator then takes over; return True if there were any."""
        skeleton = paths.group_skeleton(name)
        if self.session.exists(skeleton[-1]) is not None:  # nodes are created in order, so this one is the last
            return False
        now_ms = wall_ms() if created_ms is None else created_ms
        self.session.ensure(paths.group(name), Group(name, now_ms).to_json())
        outcomes = self.session.multi_pipelined([CreateNode(path, b"")] for path in skeleton)
        for path, fault in zip(skeleton, outcomes, strict=True):
            if fault is not None and not isinstance(fault, NodeConflictError):
                self.session.ensure(path)
        return True

    def coordinators(self) -> list[str]:
        """Return the names of the coordinators that are alive."""
        return self.session.children(paths.COORDINATORS)

    def coordinator(self, name: str) -> Coordinator | None:
        """Return a coordinator's own record; None if it is not alive, or of a version that writes none."""
        node = self.session.get(paths.coordinator(name))
        return Coordinator.from_json(node.value) if node is not None and node.value else None

    def lacking(self, what: str) -> str | None:
        """Return a live coordinator that lacks a feature; None if all of them have it.

        Raises:
            CoordinatorUnavailableError: none is alive, so it is unknown.
        """
        names = self.coordinators()
        if not names:
            raise CoordinatorUnavailableError(
                f"no coordinator is there to say whether it knows {what}; nothing was written: try again later"
            )
        for name in names:
            node = self.session.get(paths.coordinator(name))
            if node is None:
                continue  # it has just gone
            found = Coordinator.from_json(node.value) if node.value else None
            if found is None or what not in found.knows:
                release = "" if found is None else found.release
                return f"{name}, of release {release or 'before 0.2.0'}"
        return None

    def leader(self, name: GroupName) -> str | None:
        """Return the name of the coordinator that leads a group; None if none does."""
        node = self.session.get(paths.leader(name))
        return None if node is None else node.value.decode(errors="replace")

    def lease_limit(self, name: GroupName) -> tuple[str, timedelta] | None:
        """Return the coordinator that leads a group and the longest lease that it grants; None if not known."""
        leader = self.leader(name)
        found = None if leader is None else self.coordinator(leader)
        if leader is None or found is None or not found.lease_ms_max:
            return None
        return leader, timedelta(milliseconds=min(found.lease_ms_max, timedelta.max // timedelta(milliseconds=1)))

    def lead(self, name: GroupName) -> Lead | None:
        """Return the leader of a group, and its first epoch; None without one."""
        node = self.session.get(paths.leader(name))
        return None if node is None else lead_in(node)

    # Transactions -----------------------------------------------------------------------------------------------

    def transactions(self, group: GroupName) -> list[TransactionRecord]:
        """Return the open transactions of a group that outlived a moment, oldest first."""
        buckets = [f"{paths.transactions(group)}/{number:02x}" for number in range(paths.BUCKETS)]
        found = [
            f"{bucket}/{name}"
            for bucket, names in zip(buckets, self.session.children_many(buckets), strict=True)
            for name in names
        ]
        records = [TransactionRecord.from_json(node.value) for node in self.session.get_many(found) if node is not None]
        return sorted(records, key=lambda record: (record.begun_ms, record.id))

    def find_transaction(self, identifier: TransactionId, watch: Watch | None = None) -> TransactionRecord | None:
        """Return the record of an open transaction, in whichever group; None if there is none (yet)."""
        for group in self.groups(watch):
            node = self.session.get(paths.transaction(group, identifier), watch)
            if node is not None:
                return TransactionRecord.from_json(node.value)
        return None

    def claim_part(self, group: GroupName, identifier: TransactionId, cooperative_of: str = "") -> int:
        """Return a part number of a transaction that was never given out before in its life, 1 or more.

        ``cooperative_of`` names the client of a cooperative transaction: nothing of one may have arrived yet, so its
        leader, who removes the counters of transactions that it does not know, asks the client's session."""
        path = paths.parts(group, identifier)
        while True:
            self.session.ensure(path, cooperative_of.encode())
            try:
                part = self.session.set(path, cooperative_of.encode())
            except UnknownWriteError:
                continue  # an unused number does no harm
            except NodeMissingError:
                continue  # the transaction has just ended: whatever is written to it has no effect
            if part > PART_MAX:
                raise InvalidRequestError(
                    f"all {PART_MAX} parts of transaction {identifier} have been given out; begin another transaction"
                )
            return part

    def reserve_counters(self, group: GroupName, count: int) -> range:
        """Return counters of a group's transactions that were never given out before and never will be again.

        The node's value is believed within the bounds that the group's leader has set. Where it is damaged, the leader
        repairs it soon, which is waited for.

        Raises:
            CoordinatorUnavailableError: not repaired in time; nothing was written.
            CorruptDataError: the group has no number yet, and the counter of groups without one is damaged.
        """
        deadline = Deadline(patience_s(SET_RIGHT_S))
        race_over = Deadline(deadline.timeout_s + SET_RIGHT_S)
        changed: threading.Event | None = None
        while True:
            if changed is None:
                record, node = self.session.get_many([paths.group(group), paths.counter(group)])
            else:
                record = self.session.get(paths.group(group), changed.set)
                node = self.session.get(paths.counter(group), changed.set)
            known = None if record is None else Group.from_json(record.value)
            if known is None or not known.number:
                return self._reserve_shared(count)
            first = None if node is None else parse_number(node.value, COUNT_MAX, known.counter_floor)
            if first is None or node is None or first + count > known.counter_ceiling:
                if changed is not None and (deadline.passed() or not changed.wait(deadline.left())):
                    held = "does not exist" if node is None else f"holds {node.value[:40]!r}"
                    raise CoordinatorUnavailableError(
                        f"ZooKeeper node {paths.counter(group)} {held} where a decimal number from "
                        f"{known.counter_floor} to {known.counter_ceiling - count} is expected; nothing was written. "
                        f"The leader of group {group} sets it right within seconds, if there is one: try again"
                    )
                changed = threading.Event()
                continue
            try:
                self.session.set(paths.counter(group), str(first + count).encode(), node.version)
            except (NodeMissingError, NodeConflictError, UnknownWriteError):
                # Another client was faster, or the write is unknown; counters that are skipped do no harm.
                if not race_over.passed():
                    continue
                raise
            start = counter_of(known.number, first)
            return range(start, start + count)

    def _reserve_shared(self, count: int) -> range:
        """Reserve counters of a group that no coordinator of this version has led yet, from the one that all share."""
        path = paths.TRANSACTION_COUNTER
        while True:
            node = self.session.get(path)
            try:
                if node is None:
                    self.session.create(path, str(FIRST_COUNTER + count).encode(), parents=True)
                    return range(FIRST_COUNTER, FIRST_COUNTER + count)
                first = need_number(path, node.value, SHARED_MAX - count, "`rollbridge repair --force` raises it")
                self.session.set(path, str(first + count).encode(), node.version)
            except (NodeConflictError, UnknownWriteError):
                continue
            return range(first, first + count)

    # The cluster ------------------------------------------------------------------------------------------------

    def cluster(self) -> ClusterIdentity | None:
        """Return the Kafka cluster that the path belongs to; None if it was never used."""
        node = self.session.get(paths.CLUSTER)
        return None if node is None or not node.value else ClusterIdentity.from_json(node.value)

    def claim_cluster(self, kafka_cluster_id: str, created_ms: int | None = None) -> ClusterIdentity:
        """Tie the path to a Kafka cluster, or check that it is tied to this one.

        Raises:
            InvalidRequestError: the path belongs to another cluster, or a newer version laid it out.
        """
        now_ms = wall_ms() if created_ms is None else created_ms
        ours = ClusterIdentity(kafka_cluster_id, now_ms)
        while True:
            node = self.session.get(paths.CLUSTER)
            try:
                if node is None:
                    self.session.create(paths.CLUSTER, ours.to_json(), parents=True)
                elif not node.value:
                    self.session.set(paths.CLUSTER, ours.to_json(), node.version)
                else:
                    return self._check_cluster(ours, ClusterIdentity.from_json(node.value))
            except (NodeConflictError, UnknownWriteError):
                continue

    def check_cluster(self, kafka_cluster_id: str) -> None:
        """Check that the path is not tied to another Kafka cluster, and write nothing.

        Raises:
            InvalidRequestError: the path belongs to another cluster, or a newer version laid it out.
        """
        node = self.session.get(paths.CLUSTER)
        if node is not None and node.value:
            self._check_cluster(ClusterIdentity(kafka_cluster_id, 0), ClusterIdentity.from_json(node.value))

    def _check_cluster(self, ours: ClusterIdentity, found: ClusterIdentity) -> ClusterIdentity:
        where = f"ZooKeeper path {self.session.root} at {self.session.address}"
        if found.kafka_cluster_id != ours.kafka_cluster_id:
            raise InvalidRequestError(
                f"{where} belongs to Kafka cluster {found.kafka_cluster_id}, but the brokers are those of cluster "
                f"{ours.kafka_cluster_id}; check both addresses, or use another root path; nothing was written",
                code="wrong-cluster",
            )
        if found.format > LAYOUT_FORMAT:
            raise InvalidRequestError(
                f"{where} has layout {found.format}; this version knows {LAYOUT_FORMAT} at most: upgrade this client; "
                "nothing was written",
                code="wrong-cluster",
            )
        return found

    # Admin requests ---------------------------------------------------------------------------------------------

    def ask(self, group: GroupName, request: AdminRequest, timeout_s: float) -> AdminAnswer:
        """Send a request to a group's leader and wait for the answer. The request ends with this session at the latest.

        Raises:
            CoordinatorUnavailableError: no leader took the request in time; it is withdrawn, so nothing was done.
            UnknownWriteError: taken, or possibly so, but not answered in time; it may still be carried out.
        """
        with answers_within(timeout_s):
            return self._ask(group, request, timeout_s)

    def _ask(self, group: GroupName, request: AdminRequest, timeout_s: float) -> AdminAnswer:
        deadline = Deadline(patience_s(timeout_s))  # less, if the caller has less
        return self.answer_to(group, request, self.put_request(group, request), deadline.left())

    def answer_to(self, group: GroupName, request: AdminRequest, name: str, timeout_s: float) -> AdminAnswer:
        """Wait for the answer to a request that :meth:`put_request` has put. Raises as :meth:`ask` does."""
        try:
            return self._answer_to(group, request, name, timeout_s)
        except ZooKeeperUnavailableError as fault:
            reason = "the connection was closed" if self.session.is_closed else str(fault)
            raise UnknownWriteError(
                f"{reason} while group {group} was asked to {request.kind}; the request goes with the session, and may "
                "have been carried out: look at the stream or transaction before asking again"
            ) from fault

    def _answer_to(self, group: GroupName, request: AdminRequest, name: str, timeout_s: float) -> AdminAnswer:
        left_s = patience_s(timeout_s)
        waited_s = left_s - min(_WITHDRAW_S, left_s / 4)
        answer = self._await_answer(group, name, Deadline(waited_s))
        if answer is not None:
            return answer
        withdrawn = self._withdraw(f"{paths.requests(group)}/{name}")
        answer = self._await_answer(group, name, None)  # the answer may have come between the two
        if answer is not None:
            return answer
        if withdrawn and not self._may_be_under_way(group, request):
            raise CoordinatorUnavailableError(
                f"{self.who_leads(group)}; the request to {request.kind} was withdrawn after {waited_s:.3g} s, "
                "nothing was done"
            )
        raise UnknownWriteError(
            f"the request to {request.kind} was taken by the coordinator, but not answered within {left_s:.3g} s; "
            "it may still be carried out: look at the stream or transaction before asking again"
        )

    def who_leads(self, group: GroupName) -> str:
        """Return in half a sentence why a request may have gone unanswered."""
        alive = self.coordinators()
        if not alive:
            return NOBODY
        lead = self.lead(group)
        if lead is None:
            return f"no coordinator leads group {group} at present ({len(alive)} running)"
        if not lead.is_serving:
            return f"coordinator {lead.name} has been taking over group {group} for {lead.age_s(time.time()):.0f} s"
        return lead.silence(group)

    def put_request(self, group: GroupName, request: AdminRequest, before: Sequence[NodeOperation] = ()) -> str:
        """Put a request to a group's leader, together with other operations or not at all; return its name.

        Raises:
            NodeConflictError, NodeMissingError: of the other operations; nothing was written.
            UnknownWriteError: the connection was lost meanwhile; all or nothing was written.
        """
        raw = request.to_json()
        parent = paths.requests(group)
        asked = CreateNode(f"{parent}/{paths.REQUEST_PREFIX}", raw, ephemeral=True, sequential=True)
        if before:
            return self.session.multi([*before, asked])[-1].rpartition("/")[2]
        try:
            path = self.session.create(asked.path, raw, ephemeral=True, sequential=True)
        except UnknownWriteError:
            self.session.sync()
            names = self.session.children(parent)
            nodes = self.session.get_many([f"{parent}/{name}" for name in names])
            own = [name for name, node in zip(names, nodes, strict=True) if node is not None and node.value == raw]
            if not own:
                raise
            return own[-1]
        return path.rpartition("/")[2]

    def _await_answer(self, group: GroupName, name: str, deadline: Deadline | None) -> AdminAnswer | None:
        """Take the answer away and return it; None at the deadline. Without a deadline, look once."""
        path = f"{paths.answers(group)}/{name}"
        tell_at = time.monotonic() + _TELL_S
        while True:
            changed = threading.Event()
            node = self.session.get(path, None if deadline is None else changed.set)
            if node is not None:
                self.session.delete_soon(path)  # what stays, leaders remove
                return AdminAnswer.from_json(node.value)
            if deadline is None:
                return None
            while not changed.wait(min(deadline.left(), _CLOSED_LOOK_S)):
                if self.session.is_closed:  # no watch comes any more
                    raise ZooKeeperUnavailableError("the connection was closed")
                if deadline.passed():
                    return None
                if time.monotonic() >= tell_at:
                    tell_at = inf
                    why = self._why(group)
                    logger.warning("request.waiting group=%s left_s=%.0f reason=%s", group, deadline.left(), why)

    def _why(self, group: GroupName) -> str:
        """Return the likely reason for the missing answer, without waiting: the answer may still come."""
        try:
            with answers_within(_CLOSED_LOOK_S):
                return self.who_leads(group)
        except RollbridgeError as fault:
            return str(fault)

    def _withdraw(self, path: str) -> bool:
        """Delete a node; return False if it was gone already."""
        while True:
            try:
                return self.session.delete(path)
            except UnknownWriteError:
                if self.session.exists(path) is None:
                    return False  # by us or by the leader: not known, so not ours to claim

    def _may_be_under_way(self, group: GroupName, request: AdminRequest) -> bool:
        """Return True if a leader may have begun on a request although its node was still there."""
        match request.kind:
            case (
                RequestKind.CREATE_STREAM
                | RequestKind.ADOPT_TOPIC
                | RequestKind.DELETE_STREAM
                | RequestKind.RELEASE_TOPIC
            ):
                return False  # all take the node away with the first thing that they write
            case RequestKind.SCALE_STREAM:
                # So does this, but native transactions of others are aborted before.
                return request.abort_foreign and self.leader(group) is not None
            case RequestKind.TRUNCATE_STREAM | RequestKind.UPDATE_STREAM | RequestKind.UPDATE_GROUP:
                return self.leader(group) is not None  # no harm is done by asking again
            case RequestKind.LOOK_UP | RequestKind.DESCRIBE | RequestKind.FENCE:
                return False  # none changes what anybody has asked for before
            case RequestKind.ABORT_TRANSACTION | RequestKind.CLEAR_SNAPSHOTS | RequestKind.REBUILD_SNAPSHOTS:
                return self.leader(group) is not None


# The picture


def look_at_cluster(metadata: Metadata) -> ClusterPicture:
    """Return a picture of all there is, with few requests however much that is.

    Raises:
        ZooKeeperUnavailableError: no server answers.
    """
    coordinators = metadata.coordinators()
    streams, unreadable = look_at_streams(metadata)
    return ClusterPicture(
        wall_ms(),
        coordinators=coordinators,
        records=_records(metadata, coordinators),
        groups=look_at_groups(metadata, metadata.groups()),
        streams=streams,
        unreadable=unreadable,
    )


def look_at_groups(metadata: Metadata, names: Sequence[GroupName]) -> list[GroupPicture]:
    """Return pictures of groups; those that are gone are left out."""
    parents = [parent for name in names for parent in (paths.pending_changes(name), paths.unreadable(name))]
    children = dict(zip(parents, metadata.session.children_many(parents), strict=True))
    below = {parent: [f"{parent}/{title}" for title in titles] for parent, titles in children.items()}
    own = {
        name: [
            *(paths.group(name), paths.leader(name), paths.controller(name), paths.outdated(name)),
            *(paths.committing(name), paths.scaling(name), *below[paths.pending_changes(name)]),
        ]
        for name in names
    }
    wanted = [path for found in own.values() for path in found]
    nodes = dict(zip(wanted, metadata.get_each(wanted), strict=True))
    return [
        _group(name, [(path, nodes[path]) for path in own[name]], below[paths.unreadable(name)])
        for name in names
        if nodes[paths.group(name)] is not None
    ]


def _group(
    name: GroupName, nodes: Sequence[tuple[str, Znode | RollbridgeError | None]], put_aside: Sequence[str]
) -> GroupPicture:
    record, record_fault = Group(name, 0), ""
    raised, lead, outdated = ControllerEpoch(0, "", 0), None, None
    works: list[StreamChange] = []
    unreadable, clock_ms = list(put_aside), 0
    for path, found in nodes:
        try:
            node = _readable(found)
            if node is None:
                continue
            if path == paths.group(name):
                record = Group.from_json(node.value)
            elif path == paths.leader(name):
                lead = lead_in(node)
            elif path == paths.outdated(name):
                outdated = node.value.decode("utf-8", "replace")
            elif path == paths.controller(name):
                raised = ControllerEpoch.from_json(node.value) if node.value else raised
                clock_ms = raised.since_ms - node.modified_ms if raised.epoch else 0
            else:
                works += [work for _, work in works_of({path: node.value}, name)]
        except RollbridgeError as why:
            if path in (paths.group(name), paths.controller(name)):
                record_fault = f"({path}) cannot be read, so none can lead it: {why}"
            else:
                unreadable.append(path)
    rolls = (item.created_ms for item in works if isinstance(item, CommittingTransactions))
    scales = (item.created_ms for item in works if isinstance(item, EpochTransition))
    return GroupPicture(
        record,
        lead,
        committing_ms=min(rolls, default=None),
        scaling_ms=min(scales, default=None),
        clock_ms=clock_ms,
        last_leader=raised.leader,
        outdated=outdated,
        unreadable=unreadable,
        record_fault=record_fault,
    )


def look_at_streams(metadata: Metadata, scope: str | None = None) -> tuple[list[StreamPicture], dict[str, str]]:
    """Return pictures of all streams, or those of a scope, and why the settings of others cannot be read."""
    found = metadata.stream_records(scope)
    configs = [item for item in found.values() if isinstance(item, StreamConfig)]
    unreadable = {str(name): str(item) for name, item in found.items() if isinstance(item, RollbridgeError)}
    faults = metadata.stream_faults([item.name for item in configs])
    return [StreamPicture(item, error=faults.get(item.name)) for item in configs], unreadable


def _records(metadata: Metadata, coordinators: Sequence[str]) -> dict[str, Coordinator]:
    found = {}
    for name, node in zip(coordinators, metadata.get_each(list(map(paths.coordinator, coordinators))), strict=True):
        try:
            known = _readable(node)
            if known is not None and known.value:
                found[name] = Coordinator.from_json(known.value)
        except RollbridgeError as fault:  # of a newer release, say
            logger.warning("coordinator.unread coordinator=%s: %s", name, fault)
    return found
