"""Recorded requests of a client, sent again to another server, by which other names, ids and members are known.

What a server has handed out stands in later requests: producer ids and epochs, members of groups, ids of topics and of
sessions. Both answers to a request, the recorded one and the one that is had now, say what is what.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.serial import entity_reader
from kio.static.constants import EntityType

from integration_tests.patience import eventually
from integration_tests.recording import Exchange
from rollbridge.kafka.records import parse_header, stamp
from rollbridge_gateway.producer.table import Pair
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

PASSING: Final = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.unstable_offset_commit,
    }
)
"""Codes that say: ask again. Whether they come is a matter of chance."""
_HANDED_OUT: Final = ("member_id", "topic_id", "session_id", "generation_id")
_PRODUCER_ID: Final = "producer_id"
_PRODUCER_EPOCH: Final = "producer_epoch"


class Said(NamedTuple):
    """What a server has said to a request; None if it has closed the connection instead."""

    what: str
    api: int
    answer: Any


class Line:
    """A connection that is asked one thing after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def ask(self, api: int, version: int, request: bytes, *, is_answered: bool = True) -> Any:
        """Return the answer to a request; None if the connection was closed instead.

        What says "ask again" is asked again.
        """
        found: list[Any] = []

        def is_told() -> bool:
            found[:] = [self._exchange(api, version, request, is_answered=is_answered)]
            return not PASSING & codes_of(found[0])

        eventually(is_told, f"a lasting answer to API {api}")
        return found[0]

    def _exchange(self, api: int, version: int, request: bytes, *, is_answered: bool) -> Any:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 60)
            self._answers = self._socket.makefile("rb")
        self._socket.sendall(wire.framed(request))
        if not is_answered:
            return None
        try:
            size = int.from_bytes(self._answers.read(4), "big")
            answer = self._answers.read(size)
        except ConnectionError:
            answer = b""
        if not answer:
            self.close()
            return None
        return wire.read_answer(answer, api, version)

    def close(self) -> None:
        if self._socket is not None:
            self._answers.close()
            self._socket.close()
            self._socket = None


def codes_of(answer: Any) -> set[ErrorCode]:
    """Return the error codes in an answer, or in a part of one."""
    if isinstance(answer, ErrorCode):
        return {answer}
    names = getattr(answer, "__dataclass_fields__", ())
    parts = answer if isinstance(answer, tuple) else [getattr(answer, name) for name in names]
    return set().union(*map(codes_of, parts))


class Replay:
    """Sends a recording to a server, one request after the other."""

    def __init__(self, address_of: Callable[[int], tuple[str, int]], old: str, new: str) -> None:
        """Begin.

        Args:
            address_of: Returns the server's address for a port at which something was recorded.
            old, new: Beginning of all names that were recorded, and of those that take their places; equally long.
        """
        assert len(old) == len(new)
        self._address_of = address_of
        self._names = old.encode(), new.encode()
        self._known: dict[Any, Any] = {}

    def play(self, exchanges: Sequence[Exchange]) -> list[Said]:
        """Return what the server says. Requests that were to be asked again are left out, for they were."""
        said: list[Said] = []
        lines: dict[int, Line] = {}
        with ExitStack() as stack:
            for port, connection, request, answer in exchanges:
                head = wire.read_head(request)
                if head.key == Api.API_VERSIONS and head.version > wire.API_VERSIONS_MAX:
                    continue  # refused; it is asked again in an older version
                recorded = wire.read_answer(answer, head.key, head.version) if answer else None
                if recorded is None or PASSING & codes_of(recorded):
                    continue
                if connection not in lines:
                    lines[connection] = stack.enter_context(closing(Line(self._address_of(port))))
                kind = wire.schema(head.key, head.version, EntityType.request)
                read, _ = entity_reader(kind)(memoryview(request.replace(*self._names)), head.body)
                body = self._moved(read)
                told = self._told(lines[connection], head, wire.with_body(head, body), recorded)
                self._learn(recorded, told)
                said.append(Said(f"request {len(said)}", head.key, told))
        return said

    def _told(self, line: Line, head: wire.Head, request: bytes, recorded: Any) -> Any:
        """Return the answer to a request, asked again while it does not list what has begun."""
        told: list[Any] = []

        def is_whole() -> bool:
            told[:] = [line.ask(head.key, head.version, request)]
            return self._listed(told[0]) >= self._listed(recorded)

        eventually(is_whole, "what is open is listed")
        return told[0]

    def _listed(self, answer: Any) -> int:
        """Return how many open transactions of the session a listing has."""
        states = [item for item in getattr(answer, "transaction_states", ()) if item.transaction_state == "Ongoing"]
        names = tuple(name.decode() for name in self._names)
        return sum(str(item.transactional_id).startswith(names) for item in states)

    def _learn(self, recorded: Any, told: Any) -> None:
        if is_dataclass(recorded) and is_dataclass(told):
            if hasattr(recorded, _PRODUCER_EPOCH) and getattr(recorded, "error_code", None) is ErrorCode.none:
                before, after = (
                    Pair(getattr(item, _PRODUCER_ID), getattr(item, _PRODUCER_EPOCH)) for item in (recorded, told)
                )
                self._known |= {before: after, (_PRODUCER_ID, before.producer_id): after.producer_id}
            for field in fields(recorded):
                ours, theirs = getattr(recorded, field.name), getattr(told, field.name, None)
                if field.name in _HANDED_OUT:
                    self._known[field.name, ours] = theirs
                self._learn(ours, theirs)
        elif isinstance(recorded, tuple) and isinstance(told, tuple):
            for ours, theirs in zip(recorded, told, strict=False):
                self._learn(ours, theirs)

    def _moved(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(self._moved, part))
        if not is_dataclass(part) or isinstance(part, type):
            return part
        made: dict[str, Any] = {}
        for field in fields(part):
            value = getattr(part, field.name)
            made[field.name] = self._known.get((field.name, value), self._moved(value))
            if field.name.endswith(_PRODUCER_EPOCH):
                first = field.name.removesuffix(_PRODUCER_EPOCH) + _PRODUCER_ID
                pair = self._pair(Pair(made[first], value))
                made |= {first: pair.producer_id, field.name: pair.epoch}
            elif field.name == "producer_id_filters":
                made[field.name] = tuple(self._known.get((_PRODUCER_ID, number), number) for number in value)
            elif field.name == "records" and value is not None:
                made[field.name] = self._batch(bytes(value))
        return replace(part, **made)

    def _pair(self, pair: Pair) -> Pair:
        found: Pair = self._known.get(pair, pair)
        return found

    def _batch(self, batch: bytes) -> bytes:
        header = parse_header(batch)
        pair = self._pair(Pair(header.producer_id, header.producer_epoch))
        return stamp(
            batch,
            producer_id=pair.producer_id,
            producer_epoch=pair.epoch,
            base_sequence=header.base_sequence,
            transactional=bool(header.attributes & 0x10),
        )
