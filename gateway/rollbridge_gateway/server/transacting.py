"""The requests of transactional producers: from their fields to procedures, and back to Kafka's answers.

Requests of one connection are carried out in their order, whatever each of them has to ask for before: a producer that
has several batches on their way takes the second one's refusal for fatal if the first one is answered well. What is
waited for out of turn is only that the brokers have what was written.

Tour of a gateway request, stop 3 of 5: see docs/tour.md.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.effects import Steps
from rollbridge.base.logs import log_defect
from rollbridge.errors import CorruptDataError, InvalidRequestError, RollbridgeError
from rollbridge.kafka.records import Compression
from rollbridge.stream.group_offsets import NO_EPOCH, is_too_large
from rollbridge_gateway.producer import procedures
from rollbridge_gateway.producer.ids import IS_ELSEWHERE
from rollbridge_gateway.producer.procedures import (
    TIMEOUT_UNBOUNDED,
    GroupCommit,
    IdState,
    Incoming,
    NothingWrittenError,
    OffsetToCommit,
    RefusedError,
    StartedProducer,
    Written,
)
from rollbridge_gateway.producer.table import NOBODY, TRANSACTIONAL_ID_BYTES_MAX, KafkaFault, Pair
from rollbridge_gateway.producer.writes import Ticket
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.batch_rewrite import ProducedBatch, check_batch
from rollbridge_gateway.protocol.errors import code_of, code_of_error, fault_of
from rollbridge_gateway.protocol.versions import Api, VersionRange
from rollbridge_gateway.protocol.wire import Head, RawMessage
from rollbridge_gateway.server.access import DESCRIBE, READ, Rights
from rollbridge_gateway.server.context import Services
from rollbridge_gateway.server.relay import Upstream

# Consumer groups as a broker looks at them before it takes a transaction's offsets: who is in which generation.
#
# No request asks for exactly that and changes nothing, but a member's heartbeat is judged alike in a classic group, and
# does no more than say that the member lives. Members of the newer protocol (KIP-848) have no such heartbeat; they are
# listed with their epochs. All of it is asked on the client's own connection, which is one to the group's coordinator:
# on any other one the broker says so, and the client looks for it, as it would at a broker.
#
# Source: Kafka's ``OffsetMetadataManager.validateTransactionalOffsetCommit``, ``ClassicGroup.validateOffsetCommit`` and
# ``ConsumerGroup.validateOffsetCommit``.


_HEARTBEAT: Final = 12
_DESCRIBE_GROUPS: Final = 15
_CONSUMER_GROUP_DESCRIBE: Final = 69
_IN_REBALANCE: Final = ErrorCode.rebalance_in_progress
"""The group is about to begin another generation; until then the member's is the present one."""
_DEAD: Final = "Dead"
"""State of a group that does not exist."""


async def refusal(upstream: Upstream, versions: Mapping[int, VersionRange], commit: GroupCommit) -> ErrorCode:
    """Return the code with which a group's coordinator would refuse offsets; none if it would not.

    Raises:
        BrokerGoneError: the broker does not answer.
    """
    if commit.group and commit.generation < 0 and not commit.member and commit.instance is None:
        return ErrorCode.none  # a client outside of it
    values = {
        "group_id": commit.group,
        "generation_id": commit.generation,
        "member_id": commit.member,
        "group_instance_id": commit.instance,
    }
    code: ErrorCode = (await upstream.ask(_HEARTBEAT, 4, None, values)).error_code
    if code in (ErrorCode.none, _IN_REBALANCE):
        return ErrorCode.none
    if code is not ErrorCode.unknown_member_id:
        return code
    if _CONSUMER_GROUP_DESCRIBE in versions:
        group = await _described(upstream, _CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": [commit.group]})
        if group.error_code is ErrorCode.none:
            return _of_members({str(item.member_id): int(item.member_epoch) for item in group.members}, commit)
        if group.error_code is ErrorCode.topic_authorization_failed:
            return (
                ErrorCode.none
            )  # members read topics that the client may not see; the leader asks again at the commit
        if group.error_code is not ErrorCode.group_id_not_found:
            return ErrorCode(group.error_code)
    return await _of_classic_group(upstream, commit)


def _of_members(epochs: Mapping[str, int], commit: GroupCommit) -> ErrorCode:
    if commit.generation < 0 and not epochs:
        return ErrorCode.none
    epoch = epochs.get(commit.member)
    if epoch is None:
        return ErrorCode.unknown_member_id
    return ErrorCode.none if epoch == commit.generation else ErrorCode.illegal_generation


async def _of_classic_group(upstream: Upstream, commit: GroupCommit) -> ErrorCode:
    """Return the code of a member that a classic group does not know; there may be no such group."""
    group = await _described(upstream, _DESCRIBE_GROUPS, 5, {"groups": [commit.group]})
    if group.error_code is not ErrorCode.none:
        return ErrorCode(group.error_code)
    if group.group_state == _DEAD:
        return ErrorCode.none if commit.generation < 0 else ErrorCode.illegal_generation
    is_empty = not group.members
    return ErrorCode.none if commit.generation < 0 and is_empty else ErrorCode.unknown_member_id


async def _described(upstream: Upstream, key: int, version: int, values: Mapping[str, Any]) -> Any:
    [group] = (await upstream.ask(key, version, None, values)).groups
    return group


logger = logging.getLogger(__name__)

HOMELESS_S: Final = 1.0
"""For so long a transaction that has offsets first waits for a write, before it begins where it may belong."""
PRODUCE_V2: Final = 12
OFFSETS_V2: Final = 5
END_V2: Final = 5
_ACKS: Final = (-1, 0, 1)
_ANSWERED: Final = (RollbridgeError, RefusedError, TimeoutError)
_PRODUCED_OFFSET: Final = -1
"""Base offset in answers: the offset of a record is known at the commit."""

_SERVED_MAX: Final = 1_000
"""Transactional ids of a connection of which it is noted that more than an end was asked for on it."""
_ANSWERS_KEPT: Final = 1_024
_PLACES_KEPT: Final = 100
"""Answers to requests with batches of more partitions are not kept."""

Where = tuple[str, int]
T = TypeVar("T")


class Transacting:
    """Handlers of the transactional APIs of one connection."""

    def __init__(self, server: Services, access: Rights, end: Callable[[], None]) -> None:
        """Begin; ``end`` closes the connection once what is under way is answered."""
        self._server = server
        self._access = access
        self._end = end
        self._order = asyncio.Lock()
        self._served: set[str] = set()
        self.has_left = False
        """True if the client has closed the connection."""

    def leave(self) -> None:
        """Take note that the client has closed the connection."""
        self.has_left = True
        users = self._server.producers.users
        for name in self._served:
            users[name] -= 1
            if not users[name]:
                del users[name]
        self._served.clear()

    # Helpers

    def _told(self, error: BaseException, head: Head, transactional_id: str) -> ErrorCode:
        """Return Kafka's code of an error, and put it into the log."""
        code = code_of_error(error, head.key, head.version)
        self._server.count_refusal(head.key, code.name)
        if getattr(error, "code", "") == IS_ELSEWHERE:
            # Most clients ask for Metadata now, and continue to use open connections to a broker's old address.
            self._end()
        said = Api(head.key).name, transactional_id, head.version, code.name, error
        if fault_of(error) is KafkaFault.UNFORESEEN:
            log_defect(logger, "request.failed api=%s id=%s version=%d code=%s: %s", *said, fault=error)
        else:
            logger.info("request.refused api=%s id=%s version=%d code=%s: %s", *said)
        return code

    def _count(self, head: Head, codes: Iterable[ErrorCode]) -> None:
        for code in codes:
            self._server.count_refusal(head.key, code.name)

    async def _denied(
        self, transactional_id: str, topics: Sequence[str] = (), group: str | None = None
    ) -> dict[str, ErrorCode]:
        """Return what the client may not do; by topic as it has named them."""
        access, buffers = self._access, self._server.topics.known.buffers
        virtual = self._server.topics.known.virtual
        places = {topic: buffers[topic] if topic in virtual else topic for topic in topics}
        if group is None and access.knows(transactional_id, places.values()):
            return {}
        denied = await access.check(transactional_id, places.values(), group)
        found = {topic: denied[place] for topic, place in places.items() if place in denied}
        return found | ({"": denied[""]} if "" in denied else {})

    async def _run(self, name: str, make: Callable[[IdState], Steps[T]], head: Head, *, writes: bool = False) -> T:
        """Carry a procedure out, unless the client has left before it begins.

        A client that belongs to another gateway is served as long as no other one serves the id. After a change of
        gateways a client may keep one as coordinator and another as leader: if both took the id over each time, it
        would change hands with every transaction.

        A client that has left asks for the same on another connection, and for something else once that is answered.
        What it had asked for here would come late, and with transactions v1 it would be for another transaction.
        """

        def begin(held: IdState) -> Steps[T]:
            if self.has_left:
                raise RefusedError(
                    KafkaFault.AWAY, "the client has closed its connection before this was begun; nothing was changed"
                )
            return make(held)

        is_new = name not in self._served and len(self._served) < _SERVED_MAX
        if head.key != Api.END_TXN and is_new and not self.has_left:
            self._served.add(name)
            self._server.producers.users[name] += 1
        takes_over = partial(self._server.is_chosen, head.client_id)
        return await self._server.producers.run(name, begin, writes=writes, takes_over=takes_over)

    async def _refusal(self, head: Head, transactional_id: str, group: str | None = None) -> ErrorCode:
        """Return the error of a client that may not use an id, or a group; it is counted."""
        denied = await self._denied(transactional_id, group=group)
        self._count(head, denied.values())
        return denied.get("", ErrorCode.none)

    # InitProducerId

    async def init_producer_id(self, data: RawMessage, head: Head) -> bytes:
        body = wire.read_body(data, head)
        name = str(body.transactional_id)
        pair = Pair(int(getattr(body, "producer_id", -1)), int(getattr(body, "producer_epoch", -1)))
        is_unbounded = bool(getattr(body, "enable2_pc", False))
        keep = bool(getattr(body, "keep_prepared_txn", False))
        timeout_ms = int(body.transaction_timeout.total_seconds() * 1000)
        is_half = (pair.producer_id == NOBODY.producer_id) != (pair.epoch == NOBODY.epoch)
        if not 0 < len(name.encode()) <= TRANSACTIONAL_ID_BYTES_MAX or (keep and not is_unbounded) or is_half:
            return self._started(head, ErrorCode.invalid_request)
        lease_max_ms = self._server.lease_max_ms
        if is_unbounded or timeout_ms >= procedures.JAVA_MAX:
            timeout_ms = TIMEOUT_UNBOUNDED
        elif not 0 < timeout_ms <= lease_max_ms:
            return self._started(head, ErrorCode.invalid_transaction_timeout)

        def make(held: IdState) -> Steps[StartedProducer]:
            if pair == NOBODY or keep:
                return procedures.start(held, name, timeout_ms, secrets.randbits(62), wall_ms(), keep=keep)
            return procedures.come_back(held, name, timeout_ms, pair, secrets.randbits(62), wall_ms())

        async with self._order:
            if (code := await self._refusal(head, name)) is not ErrorCode.none:
                return self._started(head, code)
            try:
                started = await self._run(name, make, head)
            except _ANSWERED as fault:
                return self._started(head, self._told(fault, head, name))
        return self._started(head, ErrorCode.none, started)

    def _started(self, head: Head, code: ErrorCode, started: StartedProducer | None = None) -> bytes:
        pair, ongoing = (NOBODY, NOBODY) if started is None else (started.pair, started.ongoing)
        values = {
            "error_code": code,
            "producer_id": pair.producer_id,
            "producer_epoch": pair.epoch,
            "ongoing_txn_producer_id": ongoing.producer_id,
            "ongoing_txn_producer_epoch": ongoing.epoch,
        }
        return wire.write_answer(head.key, head.version, head.correlation, values)

    # AddPartitionsToTxn, AddOffsetsToTxn

    async def add_partitions(self, data: RawMessage, head: Head) -> bytes:
        body = wire.read_body(data, head)
        name = str(body.v3_and_below_transactional_id)
        pair = Pair(int(body.v3_and_below_producer_id), int(body.v3_and_below_producer_epoch))
        topics = [str(topic.name) for topic in body.v3_and_below_topics]
        places = [(str(topic.name), int(index)) for topic in body.v3_and_below_topics for index in topic.partitions]
        ticket: Ticket | None = None
        absent: set[Where] = set()
        async with self._order:
            bad = await self._bad_topics(name, topics, head)
            if not bad:
                absent = await self._absent(places)
                self._count(head, [ErrorCode.unknown_topic_or_partition] * len(absent))
            if bad or absent or not topics:
                code = bad.get("", ErrorCode.operation_not_attempted)
            else:
                stream = self._server.topics.known.streams[topics[0]]
                code, ticket = await self._carried_out(
                    name, lambda held: procedures.add(held, pair, stream, wall_ms()), head
                )
        code = await self._settled(ticket, code, name, head)

        def told(where: Where) -> ErrorCode:
            return ErrorCode.unknown_topic_or_partition if where in absent else bad.get(where[0], code)

        values = {
            "results_by_topic_v3_and_below": [
                {
                    "name": topic.name,
                    "results_by_partition": [
                        {"partition_index": index, "partition_error_code": told((str(topic.name), int(index)))}
                        for index in topic.partitions
                    ],
                }
                for topic in body.v3_and_below_topics
            ]
        }
        return wire.write_answer(head.key, head.version, head.correlation, values)

    async def _absent(self, places: Sequence[Where]) -> set[Where]:
        """Return those of the partitions that there are not, of topics that can be written to."""
        virtual = self._server.topics.known.virtual
        absent = {where for where in places if where[0] in virtual and not 0 <= where[1] < self._server.partitions}
        others = [where for where in places if where[0] not in virtual]
        return absent | await self._access.missing(DESCRIBE, others) if others else absent

    async def add_offsets(self, data: RawMessage, head: Head) -> bytes:
        body = wire.read_body(data, head)
        name = str(body.transactional_id)
        pair, ticket = Pair(int(body.producer_id), int(body.producer_epoch)), None
        async with self._order:
            code = await self._refusal(head, name, str(body.group_id))
        if code is ErrorCode.none:

            def make(stream: str, is_sure: bool) -> Callable[[IdState], Steps[Any]]:
                return lambda held: procedures.add(held, pair, stream, wall_ms(), is_home=True, is_sure=is_sure)

            code, ticket = await self._begun_by_offsets(name, make, head)
        code = await self._settled(ticket, code, name, head)
        return wire.write_answer(head.key, head.version, head.correlation, {"error_code": code})

    async def _begun_by_offsets(
        self, name: str, make: Callable[[str, bool], Callable[[IdState], Steps[Any]]], head: Head
    ) -> tuple[ErrorCode, Ticket | None]:
        """Carry out a procedure of offsets, which may be the first of its transaction, and return its ticket.

        For a moment it waits for a write to tell in which group of streams the transaction is to begin. What comes
        behind it on this connection is carried out meanwhile, as some clients add the write's partitions there.

        ``make`` makes the procedure, of a stream to begin with, and whether that is to be taken though it is a guess.
        """
        ends_s = time.monotonic() + HOMELESS_S
        while True:
            async with self._order:
                is_last = time.monotonic() >= ends_s
                stream, is_sure = await self._home(name, head)
                try:
                    return ErrorCode.none, await self._run(name, make(stream, is_sure or is_last), head)
                except _ANSWERED as fault:
                    if is_last or fault_of(fault) is not KafkaFault.NOWHERE:
                        return self._told(fault, head, name), None
            await asyncio.sleep(HOMELESS_S / 20)

    async def _home(self, name: str, head: Head) -> tuple[str, bool]:
        """Return a stream to begin a transaction with that has offsets first, and whether it is no guess.

        The stream is empty if the client may write to none, and no guess if there is but one group. The client may
        write to it: the begin of the transaction is recorded in the stream's buffer.
        """
        topics, are_sure = self._server.homes(head.client_id)
        known = self._server.topics.known.streams
        for some in (topics[:1], topics[1:]):  # mostly the first one will do, and what is denied is not remembered
            denied = await self._denied(name, some)
            for topic in some:
                if topic in known and topic not in denied:
                    return known[topic], are_sure
        return "", are_sure

    async def _carried_out(
        self, name: str, make: Callable[[IdState], Steps[Any]], head: Head
    ) -> tuple[ErrorCode, Ticket | None]:
        """Carry out a procedure that returns a ticket."""
        try:
            return ErrorCode.none, await self._run(name, make, head)
        except _ANSWERED as fault:
            return self._told(fault, head, name), None

    async def _settled(self, ticket: Ticket | None, code: ErrorCode, name: str, head: Head) -> ErrorCode:
        """Wait until the brokers have what a request wrote; return its error, or that of the wait."""
        try:
            await self._server.producers.settled(ticket)
        except _ANSWERED as fault:
            return self._told(fault, head, name)
        return code

    async def _bad_topics(self, name: str, topics: Sequence[str], head: Head) -> dict[str, ErrorCode]:
        """Return the errors of topics that cannot be written to; ``""`` is that of the transactional id."""
        bad: dict[str, ErrorCode] = {}
        for topic in topics:
            if topic in self._server.topics.known.streams:
                continue
            if await self._server.blocking(self._server.topics.stream_of, topic) is None:
                bad[topic] = code_of(KafkaFault.NOT_ADOPTED, head.key, head.version)
                logger.info("topic.no_stream id=%s topic=%s: `rollbridge stream adopt` makes it one", name, topic)
        bad |= await self._denied(name, [topic for topic in topics if topic not in bad])
        self._count(head, bad.values())
        return bad

    # Produce

    async def produce(self, data: RawMessage, head: Head) -> bytes | None:
        body = wire.read_body(data, head)
        name = str(body.transactional_id)
        codes: dict[Where, ErrorCode] = {}
        messages: dict[Where, str] = {}
        places = tuple((topic.name, tuple(part.index for part in topic.partition_data)) for topic in body.topic_data)
        if body.acks not in _ACKS:
            self._count(head, [ErrorCode.invalid_required_acks])
            codes = {(str(name), int(n)): ErrorCode.invalid_required_acks for name, numbers in places for n in numbers}
            return wire.write_answer(head.key, head.version, head.correlation, _produced(places, codes, messages))
        async with self._order:
            incoming = await self._incoming(name, body, head, codes, messages)
            ticket = await self._write(name, incoming, head, codes, messages) if incoming else None
        code = await self._settled(ticket, ErrorCode.none, name, head)
        if code is not ErrorCode.none:
            codes |= {item.where: code for item in incoming if item.where not in codes}
        if body.acks == 0:
            if codes:
                self._end()  # a broker has no other way, either, to say that something is lost
            return None
        if not codes and sum(len(partitions) for _, partitions in places) <= _PLACES_KEPT:
            return wire.numbered(_all_taken(head.version, places), head.correlation)
        return wire.write_answer(head.key, head.version, head.correlation, _produced(places, codes, messages))

    async def _incoming(
        self, name: str, body: Any, head: Head, codes: dict[Where, ErrorCode], messages: dict[Where, str]
    ) -> list[Incoming]:
        """Return the batches of a Produce request that may be written, and tell what is wrong with the others."""
        known = self._server.topics.known.streams
        topics = [str(topic.name) for topic in body.topic_data]
        bad: dict[str, ErrorCode] = {}
        if any(topic not in known for topic in topics) or not self._may(name, topics):
            bad = await self._bad_topics(name, topics, head)
            known = self._server.topics.known.streams
        places = [(str(topic.name), int(part.index)) for topic in body.topic_data for part in topic.partition_data]
        absent = await self._absent(places) if not bad else set()
        found: list[Incoming] = []
        for topic in body.topic_data:
            for part in topic.partition_data:
                where = (str(topic.name), int(part.index))
                if where[0] in bad or "" in bad:
                    codes[where] = bad.get(where[0]) or bad[""]
                    continue
                if where in absent:
                    codes[where] = ErrorCode.unknown_topic_or_partition
                    self._count(head, [codes[where]])
                    continue
                try:
                    found.append(_incoming(where, known[where[0]], part.records))
                except (CorruptDataError, NothingWrittenError) as fault:
                    codes[where], messages[where] = self._told(fault, head, name), str(fault)
        return found

    def _may(self, name: str, topics: Sequence[str]) -> bool:
        known = self._server.topics.known
        places = [known.buffers[topic] if topic in known.virtual else topic for topic in topics]
        return bool(self._access.knows(name, places))

    async def _write(
        self,
        name: str,
        incoming: Sequence[Incoming],
        head: Head,
        codes: dict[Where, ErrorCode],
        messages: dict[Where, str],
    ) -> Ticket | None:
        v2 = head.version >= PRODUCE_V2

        def make(held: IdState) -> Steps[Written]:
            return procedures.write(held, incoming[0].pair, incoming, wall_ms(), v2=v2)

        try:
            written = await self._run(name, make, head, writes=True)
        except _ANSWERED as fault:
            code = self._told(fault, head, name)
            for item in incoming:
                codes[item.where], messages[item.where] = code, str(fault)
            return None
        self._server.count_written(incoming, written.faults)
        for item, refused in zip(incoming, written.faults, strict=True):
            if refused is not None:
                codes[item.where], messages[item.where] = self._told(refused, head, name), str(refused)
        found: Ticket | None = written.ticket
        return found

    # TxnOffsetCommit

    async def commit_offsets(self, data: RawMessage, head: Head) -> bytes:
        body = wire.read_body(data, head)
        name, group = str(body.transactional_id), str(body.group_id)
        offsets = {
            (str(topic.name), int(part.partition_index)): _committed(part)
            for topic in body.topics
            for part in topic.partitions
        }
        ticket: Ticket | None = None
        bad: dict[Where, ErrorCode] = {}
        async with self._order:
            code = await self._refusal(head, name, group)
            if code is ErrorCode.none:
                denied = await self._access.without(READ, {topic for topic, _ in offsets})
                bad = {where: denied[where[0]] for where in offsets if where[0] in denied}
                absent = await self._access.missing(READ, (where for where in offsets if where not in bad))
                bad |= dict.fromkeys(absent, ErrorCode.unknown_topic_or_partition)
                self._count(head, [*denied.values(), *(bad[where] for where in absent)])
                offsets = {where: item for where, item in offsets.items() if where not in bad}
            # A broker, too, takes the others of the request.
            large = {where for where, item in offsets.items() if is_too_large(item.metadata)}
            offsets = {where: item for where, item in offsets.items() if where not in large}
            if code is ErrorCode.none:
                self._count(head, [ErrorCode.offset_metadata_too_large] * len(large))
        if code is ErrorCode.none and offsets:
            code, ticket = await self._commit_offsets(name, group, offsets, body, head)
        code = await self._settled(ticket, code, name, head)

        def told(where: Where) -> ErrorCode:
            if where in large and code is ErrorCode.none:
                return ErrorCode.offset_metadata_too_large
            return bad.get(where, code)

        values = {
            "topics": [
                {
                    "name": topic.name,
                    "partitions": [
                        {
                            "partition_index": part.partition_index,
                            "error_code": told((str(topic.name), int(part.partition_index))),
                        }
                        for part in topic.partitions
                    ],
                }
                for topic in body.topics
            ]
        }
        return wire.write_answer(head.key, head.version, head.correlation, values)

    async def _commit_offsets(
        self, name: str, group: str, offsets: dict[Where, OffsetToCommit], body: Any, head: Head
    ) -> tuple[ErrorCode, Ticket | None]:
        pair = Pair(int(body.producer_id), int(body.producer_epoch))
        commit = GroupCommit(
            group,
            offsets,
            int(getattr(body, "generation_id", -1)),
            str(getattr(body, "member_id", "")),
            getattr(body, "group_instance_id", None),
        )
        async with self._order:
            code = await refusal(await self._access.upstream(), self._server.brokers.versions, commit)
        if code is not ErrorCode.none:
            self._count(head, [code])
            member = commit.member or "none"
            logger.info("offsets.refused id=%s group=%s member=%s code=%s", name, group, member, code.name)
            return code, None
        v2 = head.version >= OFFSETS_V2

        def make(stream: str, is_sure: bool) -> Callable[[IdState], Steps[Any]]:
            return lambda held: procedures.send_offsets(held, pair, commit, stream, wall_ms(), v2=v2, is_sure=is_sure)

        return await self._begun_by_offsets(name, make, head)

    # EndTxn

    async def end(self, data: RawMessage, head: Head) -> bytes:
        body = wire.read_body(data, head)
        name = str(body.transactional_id)
        pair = Pair(int(body.producer_id), int(body.producer_epoch))
        v2, commit = head.version >= END_V2, bool(body.committed)
        is_recovery = not v2 and name not in self._server.producers.users
        following = NOBODY

        def make(held: IdState) -> Steps[Pair]:
            random, now_ms = secrets.randbits(62), wall_ms()
            return procedures.end(held, pair, random, now_ms, commit=commit, v2=v2, is_recovery=is_recovery)

        async with self._order:
            code = await self._refusal(head, name) if name else ErrorCode.invalid_request
            if code is ErrorCode.none:
                try:
                    following = await self._run(name, make, head)
                except _ANSWERED as fault:
                    code = self._told(fault, head, name)
        values = {"error_code": code, "producer_id": following.producer_id, "producer_epoch": following.epoch}
        return wire.write_answer(head.key, head.version, head.correlation, values)


def _committed(part: Any) -> OffsetToCommit:
    """Return what a partition of TxnOffsetCommit says; a broker stores an empty text where there is none."""
    # Leader epochs are in it from version 2 on. What is below -1 is none to clients.
    epoch = max(int(getattr(part, "committed_leader_epoch", NO_EPOCH)), NO_EPOCH)
    return OffsetToCommit(int(part.committed_offset), epoch, part.committed_metadata or "")


def _incoming(where: Where, stream: str, records: Any) -> Incoming:
    batch = b"" if records is None else bytes(records)
    try:
        header = check_batch(batch)
    except InvalidRequestError as fault:
        raise NothingWrittenError(str(fault)) from fault
    return Incoming(
        where,
        stream,
        Pair(header.producer_id, header.producer_epoch),
        header.base_sequence,
        header.record_count,
        ProducedBatch(stream, where[1], batch, header.record_count, header.compression != Compression.NONE),
    )


Places = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Topics of a Produce request, with their partitions."""


@lru_cache(maxsize=_ANSWERS_KEPT)
def _all_taken(version: int, places: Places) -> bytes:
    return wire.write_answer(Api.PRODUCE, version, 0, _produced(places, {}, {}))


def _produced(places: Places, codes: dict[Where, ErrorCode], messages: dict[Where, str]) -> dict[str, Any]:
    return {
        "responses": [
            {
                "name": topic,
                "partition_responses": [
                    {
                        "index": index,
                        "error_code": codes.get((str(topic), int(index)), ErrorCode.none),
                        "base_offset": _PRODUCED_OFFSET,
                        "log_append_time": None,
                        "error_message": messages.get((str(topic), int(index))),
                    }
                    for index in partitions
                ],
            }
            for topic, partitions in places
        ]
    }
