"""The requests of one client connection: each is answered here, relayed with its answer rewritten, or relayed.

Transactions are in :mod:`rollbridge_gateway.server.transacting`, and what lists them in ``listing``.

Tour of a gateway request, stop 2 of 5: see docs/tour.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from math import inf
from typing import Any, Final, ParamSpec, TypeVar

from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import (
    BROKER_RESOURCE,
    NAMINGS,
    TABLE,
    TRANSACTION_VERSION,
    TRANSACTION_VERSION_MAX,
    Api,
    Handling,
    Naming,
    VersionRange,
    offered,
    room_of,
)
from rollbridge_gateway.protocol.wire import Head, MalformedError, RawMessage
from rollbridge_gateway.server.access import DESCRIBE, READ, Rights
from rollbridge_gateway.server.cluster import ToldDepartures, View, is_gateway
from rollbridge_gateway.server.connection import ClientConnection
from rollbridge_gateway.server.context import Services
from rollbridge_gateway.server.framing import Closing
from rollbridge_gateway.server.listing import (
    asked_of,
    describe_transactions,
    described_of,
    list_transactions,
    listed_at,
    with_producers,
)
from rollbridge_gateway.server.relay import BrokerGoneError, Upstream
from rollbridge_gateway.server.topics import MISS_S
from rollbridge_gateway.server.transacting import Transacting

# Progress of a client's authentication to its broker, as far as a gateway that only passes tokens on can tell.
#
# The broker decides. That it has accepted a token does not say that it is content: mechanisms have several tokens, and
# OAUTHBEARER refuses by a token, too. So nothing is served before the broker has answered something else.
#
# A client authenticates itself again in the middle of its connection (KIP-368): then nothing that was known of it holds
# any more until the broker has said so again. It has to before its session is over, where the broker gives that an end;
# then its next request closes the connection, unless it begins a login.
#
# Source: Kafka's ``SaslServerAuthenticator``, and ``Processor.processCompletedReceives``.


class LoginPhase(Enum):
    """Progress of the login."""

    STRANGER = "stranger"
    """It has not tried."""
    EXCHANGING = "exchanging"
    """Tokens are on their way, or the broker has refused the last one."""
    ACCEPTED = "accepted"
    """The broker has accepted a token; perhaps not the last one."""
    CONFIRMED = "confirmed"
    """The broker has answered another request since."""


class Login:
    """The login of one connection. Times are those of one clock that does not go back.

    Attributes:
        phase: How far it has come.
        again: Number of logins that it has begun in the middle of the connection.
    """

    __slots__ = ("_over_s", "again", "phase")

    def __init__(self, *, is_needed: bool) -> None:
        self.phase = LoginPhase.STRANGER if is_needed else LoginPhase.CONFIRMED
        self.again = 0
        self._over_s = inf

    @property
    def is_confirmed(self) -> bool:
        """True if the broker has confirmed the client's identity."""
        return self.phase is LoginPhase.CONFIRMED

    @property
    def is_accepted(self) -> bool:
        """True if the broker can be asked if it is content."""
        return self.phase in (LoginPhase.ACCEPTED, LoginPhase.CONFIRMED)

    def begin(self) -> None:
        """The client begins to authenticate itself, for the first time or again."""
        self.again += self.phase is LoginPhase.CONFIRMED
        self.phase = LoginPhase.EXCHANGING

    def answered(self, *, accepted: bool, lifetime_s: float, now_s: float) -> None:
        """The broker has answered a token, ``accepted`` if without an error; a lifetime of 0 is for ever."""
        self.phase = LoginPhase.ACCEPTED if accepted else LoginPhase.EXCHANGING
        self._over_s = now_s + lifetime_s if lifetime_s > 0 else inf

    def confirmed(self) -> None:
        """The broker has answered another request."""
        self.phase = LoginPhase.CONFIRMED

    def is_over(self, now_s: float) -> bool:
        """Return True if the session is over, so that only another login is heard."""
        return now_s >= self._over_s and self.phase is not LoginPhase.EXCHANGING


logger = logging.getLogger(__name__)

_TRANSACTION: Final = 1
"""Type of the keys of FindCoordinator that are transactional ids."""
STRANGER_BYTES_MAX: Final = 64 << 10
"""Largest request of a client that has not authenticated itself: what has come of one takes the room of others."""
_BEFORE_LOGIN: Final = frozenset((Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE))

_LISTINGS: Final = frozenset((Api.DESCRIBE_PRODUCERS, Api.DESCRIBE_TRANSACTIONS, Api.LIST_TRANSACTIONS))
LISTING_BYTES_MAX: Final = 1 << 20
"""Largest request for a listing: some 50,000 ids."""

_NO_TIME: Final = timedelta(0)

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[RawMessage, Head], Awaitable[RawMessage | None]]


class RequestHandler:
    """Dispatcher of one client's connection.

    Attributes:
        broker: Broker whose port the client has come to; None at the first port, which reaches any.
    """

    def __init__(self, server: Services, broker: int | None, line: ClientConnection) -> None:
        self.server = server
        self.broker = broker
        self.line = line
        self.login = Login(is_needed=server.needs_login)
        self._told = ToldDepartures(server.now_s())
        self._connecting: asyncio.Future[Upstream] | None = None
        self._access = Rights(self.upstream, server.rights_s)
        self._transacting = transacting = Transacting(server, self._access, line.end)
        self._handlers: Mapping[int, Handler] = {
            Api.PRODUCE: transacting.produce,
            Api.INIT_PRODUCER_ID: transacting.init_producer_id,
            Api.ADD_PARTITIONS_TO_TXN: transacting.add_partitions,
            Api.ADD_OFFSETS_TO_TXN: transacting.add_offsets,
            Api.TXN_OFFSET_COMMIT: transacting.commit_offsets,
            Api.END_TXN: transacting.end,
            Api.API_VERSIONS: self._api_versions,
            Api.METADATA: self._metadata,
            Api.FIND_COORDINATOR: self._find_coordinator,
            Api.LIST_GROUPS: self._list_groups,
            Api.DESCRIBE_CLUSTER: self._describe_cluster,
            Api.DESCRIBE_PRODUCERS: self._describe_producers,
            Api.DESCRIBE_TRANSACTIONS: self._describe_transactions,
            Api.LIST_TRANSACTIONS: self._list_transactions,
            Api.DESCRIBE_LOG_DIRS: self._describe_log_dirs,
            Api.DESCRIBE_TOPIC_PARTITIONS: self._describe_topics,
            **dict.fromkeys(NAMINGS, self._about_topics),
            Api.DESCRIBE_CONFIGS: self._describe_configs,
        }

    async def dispatch(self, data: RawMessage, head: Head) -> Awaitable[RawMessage | None]:
        """Begin to serve a request. See :class:`rollbridge_gateway.server.connection.Responder`."""
        if head.key == Api.API_VERSIONS:
            return self._api_versions(data, head)
        room = room_of(head.key, head.version)
        if room is None:
            raise MalformedError(f"API {head.key}, version {head.version}, is not offered")
        if head.key in _LISTINGS and len(data) > LISTING_BYTES_MAX:
            raise MalformedError(f"API {head.key}, {len(data)} bytes: {LISTING_BYTES_MAX} are the most for a listing")
        if head.key == Api.SASL_HANDSHAKE and self.server.needs_login:
            await self._begin_login()
        elif self.login.is_over(time.monotonic()):
            self.server.count_closed(Closing.SESSION)
            raise BrokerGoneError("the client's session is over, and it has not authenticated itself again")
        if not self.login.is_confirmed and head.key not in _BEFORE_LOGIN:
            await self._confirm_login(f"API {head.key}")
        if head.key == Api.SASL_AUTHENTICATE:
            return self._authenticate(data, head)
        if room is Handling.RELAYED:
            return await self.relay(data)
        if head.key == Api.PRODUCE:
            peeked = wire.peek_produce(data, head)
            if peeked.transactional_id is None:
                answer = await self.relay(data, is_answered=peeked.acks != 0)
                return self._passed_on(answer, head) if peeked.acks else _nothing(answer)
        elif head.key == Api.INIT_PRODUCER_ID and not wire.is_transactional_start(data, head):
            return await self.relay(data)
        return self._handlers[head.key](data, head)

    async def admits(self, size: int) -> bool:
        """Return whether requests of so many bytes are accepted by now."""
        if size > STRANGER_BYTES_MAX and not self.login.is_confirmed:
            await self._confirm_login(f"a request of {size} bytes")
        return True

    def leave(self) -> None:
        """Take note that the client is gone."""
        self._transacting.leave()

    async def close(self) -> None:
        if self._connecting is not None:
            with suppress(BrokerGoneError):
                await (await self._connecting).close()

    # Relaying

    async def upstream(self) -> Upstream:
        """Return the client's own connection to its broker, which is opened when it is first needed.

        Raises:
            BrokerGoneError: the broker cannot be reached, or is none any more.
        """
        if self._connecting is None:
            host, port = self.server.address_of(self.broker)
            connecting = Upstream.connect(host, port, self.server.upstream_tls, self.line, self.line.broker_gone)
            self._connecting = asyncio.ensure_future(connecting)
        return await asyncio.shield(self._connecting)

    async def relay(self, data: RawMessage, *, is_answered: bool = True) -> asyncio.Future[RawMessage]:
        """Send a request to the broker as it is; return its answer to come."""
        upstream = await self.upstream()
        answer = upstream.send(data, is_answered=is_answered)
        await upstream.drain()
        return answer

    async def _passed_on(self, answer: asyncio.Future[RawMessage], head: Head) -> RawMessage:
        """Return the answer to a plain Produce, without the addresses of brokers that newer ones may have."""
        data = await answer
        if head.version >= 10 and any(host.encode() in data for host in self.server.broker_hosts):
            body = wire.read_answer(data, head.key, head.version)
            return wire.write_entity(replace(body, node_endpoints=()), head.correlation)
        return data

    async def _authenticate(self, data: RawMessage, head: Head) -> RawMessage:
        answer = await (await self.relay(data))
        body = wire.read_answer(answer, head.key, head.version)
        lifetime_s = getattr(body, "session_lifetime", _NO_TIME).total_seconds()
        accepted = body.error_code is ErrorCode.none
        self.login.answered(accepted=accepted, lifetime_s=lifetime_s, now_s=time.monotonic())
        return answer

    async def _begin_login(self) -> None:
        """Have nothing under way that could be judged by another login than that under which it came.

        A broker serves one request of a connection after the other. Here several are under way, and ask for rights on
        the connection to the broker, which would close it in the middle of a login.
        """
        await self.line.rest()
        self._access.forget()
        if self.login.is_confirmed:
            logger.debug("login.again")
        self.login.begin()

    async def _confirm_login(self, what: str) -> None:
        """Have the broker say that the client has authenticated itself, before anything is served.

        That a token was accepted does not say so: mechanisms have several, and OAUTHBEARER refuses by a token, too.
        In between a broker closes the connection at any other request.

        Raises:
            MalformedError: the client has not tried.
            BrokerGoneError: the broker has closed the connection.
        """
        if not self.login.is_accepted:
            raise MalformedError(f"{what} before the client has authenticated itself")
        answer = await (await self.upstream()).ask(Api.METADATA, 4, None, {"topics": ()})
        if not answer.brokers:
            raise MalformedError(f"{what} before the client has authenticated itself to its broker")
        self.login.confirmed()

    # What brokers know

    async def _api_versions(self, data: RawMessage, head: Head) -> RawMessage:
        versions = offered(self.server.brokers.versions)
        if self.server.needs_login:
            versions[Api.SASL_HANDSHAKE] = VersionRange(1, 1)  # version 0 is followed by bytes that are no requests
        else:
            versions.pop(Api.SASL_HANDSHAKE, None)
            versions.pop(Api.SASL_AUTHENTICATE, None)
        values: dict[str, Any] = {
            "api_keys": [
                {"api_key": key, "min_version": low, "max_version": high}
                for key, (low, high) in sorted(versions.items())
            ],
            "supported_features": [
                {"name": TRANSACTION_VERSION, "min_version": 0, "max_version": TRANSACTION_VERSION_MAX}
            ],
            "finalized_features": [
                {
                    "name": TRANSACTION_VERSION,
                    "max_version_level": TRANSACTION_VERSION_MAX,
                    "min_version_level": TRANSACTION_VERSION_MAX,
                }
            ],
            "finalized_features_epoch": 1,
        }
        if not 0 <= head.version <= TABLE[Api.API_VERSIONS].high:
            values["error_code"] = ErrorCode.unsupported_version
            return wire.write_answer(head.key, 0, head.correlation, values)
        wire.read_body(data, head)
        return wire.write_answer(head.key, head.version, head.correlation, values)

    async def _view(self) -> View:
        await self.server.fresh_topics()
        return self.server.view()

    async def _metadata(self, data: RawMessage, head: Head) -> RawMessage:
        body = wire.read_body(data, head)
        asked = body.topics
        if head.version == 0 and not asked:
            asked = None
        names = [str(item.name) for item in asked or () if item.name is not None]
        if any(name not in self.server.topics.known.streams for name in names):
            await self.server.fresh_topics(MISS_S)
        await self.server.fresh_topics()
        await self._look_at_brokers(names, makes_topics=bool(getattr(body, "allow_auto_topic_creation", True)))
        view = self.server.view()
        self.server.note_asked(head.client_id, names)
        request = data
        if asked is not None:
            theirs = tuple(item for item in asked if item.name is None or str(item.name) not in view.virtual)
            if len(theirs) != len(asked) and (theirs or head.version > 0):
                # A broker that makes topics by itself would make these.
                request = wire.with_body(head, replace(body, topics=theirs))
        answer = await (await self.relay(request))
        found = wire.read_answer(answer, head.key, head.version)
        buffers = self.server.topics.known.buffers
        if asked is None:
            self.server.topics.saw(found.topics)
            view = self.server.view()
            described = {str(item.name) for item in found.topics if item.error_code is ErrorCode.none}
            hidden = (name for name in view.virtual if buffers.get(name) not in described)
            denied = dict.fromkeys(hidden, ErrorCode.topic_authorization_failed)
        else:
            denied = await self._hidden(name for name in names if name in view.virtual)
        hides_brokers = bool(names) and self._told.hides_brokers(
            self.server.departures(), head.client_id, self.server.now_s()
        )
        told = view.metadata(found, head.client_id, asked, denied, hides_brokers=hides_brokers)
        return wire.write_entity(told, head.correlation)

    async def _look_at_brokers(self, names: Iterable[str], *, makes_topics: bool) -> None:
        """Find out which names are topics of the brokers by now, as far as the client may see.

        One that is none, and that a broker may make for the asking, could mean a stream that is younger than the list.
        """
        topics = self.server.topics
        known = topics.known
        wanted = [{"name": name} for name in names if makes_topics or name in known.virtual or name in known.clashes]
        if not wanted:
            return
        values = {"topics": wanted, "allow_auto_topic_creation": False}
        found = (await (await self.upstream()).ask(Api.METADATA, 4, None, values)).topics
        topics.saw(found)
        missing = {str(item.name) for item in found if item.error_code is ErrorCode.unknown_topic_or_partition}
        if missing - known.streams.keys():
            await asyncio.sleep(MISS_S)  # from then on a list that is fresh was read after this request
            await self.server.fresh_topics(MISS_S)

    async def _hidden(self, virtual: Iterable[str], operation: int = DESCRIBE) -> dict[str, ErrorCode]:
        """Return those of the virtual topics of which the client may not know, or which it may not read, and why.

        One whose buffer is gone is that of a stream that has been deleted since the list was read.
        """
        buffers = self.server.topics.known.buffers
        places = {name: buffers.get(name, name) for name in virtual}
        denied = await self._access.without(operation, places.values())
        return {name: denied[place] for name, place in places.items() if place in denied}

    async def _describe_cluster(self, data: RawMessage, head: Head) -> RawMessage:
        answer = await (await self.relay(data))
        found = wire.read_answer(answer, head.key, head.version)
        return wire.write_entity(self.server.view().describe_cluster(found, head.client_id), head.correlation)

    async def _find_coordinator(self, data: RawMessage, head: Head) -> RawMessage:
        body = wire.read_body(data, head)
        of_transaction = getattr(body, "key_type", 0) == _TRANSACTION
        if not of_transaction and not self._told.hides_coordinator(self.server.departures()):
            answer = await (await self.relay(data))
            found = wire.read_answer(answer, head.key, head.version)
            return wire.write_entity(self.server.view().find_coordinator(found, head.client_id), head.correlation)
        keys = list(body.coordinator_keys) if head.version >= 4 else [body.key]
        if of_transaction:
            found_all = [self._coordinator(key, head.client_id) for key in keys]
        else:
            found_all = [_no_coordinator(key, ErrorCode.coordinator_not_available) for key in keys]
        values: Mapping[str, Any] = {"coordinators": found_all} if head.version >= 4 else found_all[0]
        return wire.write_answer(head.key, head.version, head.correlation, values)

    def _coordinator(self, key: str, client_id: str | None) -> dict[str, Any]:
        node, host, port = self.server.view().coordinator(client_id)
        return {"key": key, "node_id": node, "host": host, "port": port, "error_code": ErrorCode.none}

    async def _list_groups(self, data: RawMessage, head: Head) -> RawMessage:
        if self.broker is None:
            wire.read_body(data, head)
            return wire.write_answer(head.key, head.version, head.correlation, {"groups": ()})
        return await (await self.relay(data))

    async def _describe_log_dirs(self, data: RawMessage, head: Head) -> RawMessage:
        if self.broker is None:
            wire.read_body(data, head)
            return wire.write_answer(head.key, head.version, head.correlation, {})
        return await (await self.relay(data))

    # What names topics

    async def _describe_topics(self, data: RawMessage, head: Head) -> RawMessage:
        body = wire.read_body(data, head)
        view = await self._view()
        theirs = tuple(item for item in body.topics if str(item.name) not in view.virtual)
        if body.topics:
            first = "" if body.cursor is None else str(body.cursor.topic_name)
            asked = {str(item.name) for item in body.topics if str(item.name) in view.virtual and item.name >= first}
        else:
            asked = set() if body.cursor else set(view.virtual)  # all are asked for: with the first of the answers
        answer = await self._answer_about(head, replace(body, topics=theirs), is_asked=bool(theirs or not body.topics))
        denied = await self._hidden(asked)
        if not body.topics:
            asked -= denied.keys()
        told = view.describe_topics(answer, self.server.brokers.addresses, sorted(asked), denied)
        return wire.write_entity(told, head.correlation)

    async def _about_topics(self, data: RawMessage, head: Head) -> RawMessage:
        """Answer for streams, and have the broker answer for the rest."""
        body, naming, view = wire.read_body(data, head), NAMINGS[head.key], await self._view()
        theirs, ours = naming.split(body, view.virtual)
        if not ours:
            return await (await self.relay(data))
        answer = await self._answer_about(head, replace(body, **{naming.field(body): theirs}), is_asked=bool(theirs))
        denied = await self._hidden(ours)
        told = [
            naming.answer(name, entry, view.virtual[name], denied.get(name, ErrorCode.none))
            for name, entry in ours.items()
        ]
        return self._with_answers(answer, naming, told, head)

    async def _describe_configs(self, data: RawMessage, head: Head) -> RawMessage:
        """Tell the settings of a stream's buffer for those of the stream; gateways have no settings of Kafka's."""
        body, naming, view = wire.read_body(data, head), NAMINGS[head.key], await self._view()
        theirs, ours = naming.split(body, view.virtual)
        gateways = [item for item in theirs if item.resource_type == BROKER_RESOURCE and is_gateway(item.resource_name)]
        if not ours and not gateways:
            return await (await self.relay(data))
        theirs = tuple(item for item in theirs if item not in gateways)
        answer = await self._answer_about(head, replace(body, resources=theirs), is_asked=bool(theirs))
        streams = {self.server.topics.known.buffers.get(name, name): name for name in ours}
        buffers = tuple(replace(ours[name], resource_name=buffer) for buffer, name in streams.items())
        found = await self._answer_about(head, replace(body, resources=buffers), is_asked=bool(buffers))
        answer = replace(
            answer,
            results=(
                *answer.results,
                *(replace(item, resource_name=streams[item.resource_name]) for item in found.results),
            ),
        )
        told = [{"resource_type": BROKER_RESOURCE, "resource_name": item.resource_name} for item in gateways]
        return self._with_answers(answer, naming, told, head)

    async def _answer_about(self, head: Head, body: Any, *, is_asked: bool) -> Any:
        """Return what the broker answers to a request with another body; an empty answer if it is not asked."""
        if not is_asked:
            return wire.build(wire.schema(head.key, head.version, EntityType.response), {})
        return wire.read_answer(await (await self.relay(wire.with_body(head, body))), head.key, head.version)

    @staticmethod
    def _with_answers(answer: Any, naming: Naming, told: Sequence[Mapping[str, Any]], head: Head) -> bytes:
        made = wire.build(type(answer), {naming.answered: told})
        both = (*getattr(answer, naming.answered), *getattr(made, naming.answered))
        return wire.write_entity(replace(answer, **{naming.answered: both}), head.correlation)

    # What lists transactions

    async def _list_transactions(self, data: RawMessage, head: Head) -> RawMessage:
        body = wire.read_body(data, head)
        answer = await (await self.relay(data)) if self.broker is not None else b""
        theirs = wire.read_answer(answer, head.key, head.version) if answer else None
        listed = await self._listed(listed_at, self.server, self.broker, body)
        allowed = await self._access.describable(item.transactional_id for item in listed)
        ours = [item for item in listed if item.transactional_id in allowed]
        return wire.write_answer(head.key, head.version, head.correlation, list_transactions(body, theirs, ours))

    async def _describe_transactions(self, data: RawMessage, head: Head) -> RawMessage:
        names = await self._listed(asked_of, data, head)
        allowed = await self._access.describable(names)
        found = await self._listed(described_of, self.server, [name for name in names if name in allowed])
        view, known = self.server.view(), self.server.topics.known
        topics = {topic for item in found.values() for topic in item.topics}
        places = {topic: known.buffers.get(topic, topic) if topic in view.virtual else topic for topic in topics}
        hidden = await self._access.without(DESCRIBE, places.values())
        shown = {topic for topic, place in places.items() if place not in hidden}
        partitions = {topic: view.virtual[topic] for topic in shown & view.virtual.keys()}
        if adopted := [{"name": topic} for topic in shown - partitions.keys()]:
            asked = {"topics": adopted, "allow_auto_topic_creation": False}
            answer = await (await self.upstream()).ask(Api.METADATA, 4, None, asked)
            partitions |= {str(item.name): len(item.partitions) for item in answer.topics}
        return await self._listed(describe_transactions, data, head, found, partitions)

    async def _listed(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.server.listers.run(lambda: self._transacting.has_left, work, *args, **kwargs)

    async def _describe_producers(self, data: RawMessage, head: Head) -> RawMessage:
        body = wire.read_body(data, head)
        view = await self._view()
        theirs = tuple(item for item in body.topics if str(item.name) not in view.virtual)
        answered = await self._answer_about(head, replace(body, topics=theirs), is_asked=bool(theirs))
        asked = {str(item.name) for item in body.topics if str(item.name) in view.virtual}
        denied = await self._hidden(asked, READ)
        return await self._listed(with_producers, self.server, body, answered, asked - denied.keys(), denied, head)


def _no_coordinator(key: str, code: ErrorCode) -> dict[str, Any]:
    return {"key": key, "node_id": -1, "host": "", "port": -1, "error_code": code}


async def _nothing(answer: asyncio.Future[RawMessage]) -> None:
    await answer
