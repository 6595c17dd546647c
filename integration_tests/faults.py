"""A TCP proxy in front of a Kafka broker that loses, cuts and holds back single requests, by name and on demand.

It reads the frames it passes on, so that a fault hits exactly one request of one kind, at an exact point: before the
broker has it, after the broker has it, or after the broker has answered.
"""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntEnum, auto
from typing import assert_never
from weakref import WeakSet

import pytest
from kio.schema.end_txn.v5 import EndTxnResponse
from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdResponse
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.response import MetadataResponseBroker, MetadataResponseTopic
from kio.schema.produce.v12 import ProduceRequest, ProduceResponse
from kio.schema.produce.v12.response import PartitionProduceResponse, TopicProduceResponse
from kio.schema.types import BrokerId, ProducerId
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32, i32Timedelta, i64

from integration_tests.patience import PATIENCE_S
from rollbridge.base.deadlines import Deadline
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.metadata import Broker, Cluster


class Api(IntEnum):
    """Requests that faults can be aimed at."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


class Point(Enum):
    """Where a request meets its fault."""

    BEFORE_REQUEST = auto()
    """The broker never sees it; the client sees the connection close."""
    AFTER_REQUEST = auto()
    """The broker gets it; the client sees the connection close at once."""
    BEFORE_ANSWER = auto()
    """The broker has answered; the client sees the connection close instead."""
    HELD = auto()
    """The client sees the connection close; the broker gets the request when ``release`` is called."""
    REFUSED = auto()
    """The broker never sees it; the client is answered with an error code."""
    MISREPORTED = auto()
    """The broker gets it and answers; the client is answered with an error code instead."""
    SILENT = auto()
    """The broker never sees it, and the connection stays as it is."""
    LATE = auto()
    """The broker gets it and answers; the client gets an error code instead, unless that is ``none``, and this answer
    and those behind it only when ``let_answer`` is called."""


@dataclass(eq=False, slots=True)
class _Pair:
    """One connection and its continuation to the broker."""

    client: socket.socket
    upstream: socket.socket
    last_answer: Point | None = None
    """Set before the request whose answer the client must not see; what to do when that answer comes."""
    substitute: bytes | None = None
    """Goes to the client in place of the next answer."""
    answer: bytes = b""
    answered: threading.Event = field(default_factory=threading.Event)
    outstanding: int = 0
    """Requests that the client waits for; answers keep the order of the requests."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_late: bool = False
    """True if answers wait to be let through."""

    def close(self) -> None:
        _close(self.client)
        _close(self.upstream)

    def count(self, change: int) -> None:
        with self.changed:
            self.outstanding += change
            self.changed.notify_all()

    def await_idle(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.outstanding == 0, 20), "the broker does not answer"


@dataclass(slots=True)
class _Fault:
    """What is going to happen to which requests."""

    api: Api
    point: Point
    after: int
    times: int
    error: ErrorCode


class FaultProxy:
    """Passes connections on to ``upstream`` ("host:port") until told otherwise; a context manager."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._struck = threading.Event()
        self._held: tuple[_Pair, bytes] | None = None
        self._may_answer = threading.Semaphore(0)
        self._pairs: set[_Pair] = set()
        self.requests: list[int] = []
        """Kinds of all requests passed on or struck, in order of arrival."""
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone does not wake a thread that is in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        self._thread.join(PATIENCE_S)

    def strike(
        self,
        api: Api,
        point: Point,
        *,
        after: int = 0,
        times: int = 1,
        error: ErrorCode = ErrorCode.unknown_server_error,
        also: bool = False,
    ) -> None:
        """Hit the next request of this kind (or a later one, letting ``after`` pass first), ``times`` in a row.

        What else was to be hit is let through, unless this is meant ``also``.
        """
        with self._lock:
            self._struck.clear()
            self._faults = [*self._faults, _Fault(api, point, after, times, error)][0 if also else -1 :]

    def calm(self) -> None:
        """Hit nothing any more."""
        with self._lock:
            self._faults = []

    def await_strike(self, timeout_s: float = 20.0) -> None:
        """Return once the fault has happened; AssertionError if it does not."""
        assert self._struck.wait(timeout_s), "no request met the fault"

    def release(self) -> bytes:
        """Let the held request through to the broker, on the connection it came on, and return the answer's body."""
        with self._lock:
            assert self._held is not None, "nothing is held"
            (pair, frame), self._held = self._held, None
        assert _send(pair.upstream, frame), "the broker hung up"
        assert pair.answered.wait(PATIENCE_S), "no answer from the broker"
        return pair.answer

    def let_answer(self) -> None:
        """Let the next of the late answers through to the client."""
        self._may_answer.release()

    def cut_all(self) -> None:
        """Close every connection there is, on both sides."""
        with self._lock:
            doomed, self._pairs = self._pairs, set()
        for pair in doomed:
            pair.close()

    @contextmanager
    def in_between(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Make every connection of the adapter go through the proxy in this block; earlier ones are used no more."""
        direct, is_usable = Cluster._connect, Connection.usable
        opened: WeakSet[Connection] = WeakSet()

        def through_proxy(cluster: Cluster, broker: Broker, deadline: Deadline | None) -> Connection:
            connection = direct(cluster, Broker("127.0.0.1", self.port), deadline)
            opened.add(connection)
            return connection

        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "_connect", through_proxy)
            patch.setattr(Connection, "usable", lambda connection: connection in opened and is_usable(connection))
            yield

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                upstream = socket.create_connection(self._upstream, timeout=10)
            except OSError:
                _close(client)
                continue
            for one in (client, upstream):
                one.settimeout(None)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(client, upstream)
            with self._lock:
                self._pairs.add(pair)
            threading.Thread(target=self._requests, args=(pair,), daemon=True).start()
            threading.Thread(target=self._answers, args=(pair,), daemon=True).start()

    def _requests(self, pair: _Pair) -> None:
        while (frame := _read_frame(pair.client)) is not None:
            (kind,) = struct.unpack_from(">h", frame, 4)
            fault = self._hit(kind)
            if fault is None:
                pair.count(+1)
                if _send(pair.upstream, frame):
                    continue
                break
            match fault.point:
                case Point.BEFORE_REQUEST:
                    pair.close()
                case Point.AFTER_REQUEST:
                    # The broker's side stays open until it has answered: it may drop a request whose connection has
                    # gone before it gets to it.
                    pair.last_answer = fault.point
                    _send(pair.upstream, frame)
                    _close(pair.client)
                case Point.BEFORE_ANSWER:
                    pair.last_answer = fault.point
                    _send(pair.upstream, frame)
                    return  # the other direction strikes
                case Point.HELD:
                    pair.last_answer = fault.point
                    with self._lock:
                        self._held = (pair, frame)
                    _close(pair.client)
                case Point.REFUSED:
                    pair.await_idle()
                    self._struck.set()
                    _send(pair.client, _error_answer(frame, fault.error))
                    continue
                case Point.MISREPORTED:
                    pair.await_idle()
                    pair.substitute = _error_answer(frame, fault.error)
                    self._struck.set()
                    pair.count(+1)
                    _send(pair.upstream, frame)
                    pair.await_idle()
                    continue
                case Point.SILENT:
                    self._struck.set()
                    continue
                case Point.LATE:
                    pair.await_idle()
                    if fault.error is not ErrorCode.none:
                        pair.substitute = _error_answer(frame, fault.error)
                    pair.is_late = True
                    pair.count(+1)
                    _send(pair.upstream, frame)
                    self._struck.set()
                    continue
                case never:
                    assert_never(never)
            self._struck.set()
            return
        if pair.last_answer is None:
            pair.close()

    def _answers(self, pair: _Pair) -> None:
        while (frame := _read_frame(pair.upstream)) is not None:
            if pair.last_answer is not None:
                _close(pair.client)
                self._struck.set()
                pair.answer = frame[4:]
                break
            if pair.substitute is not None:
                frame, pair.substitute = pair.substitute, None
            if pair.is_late and not self._may_answer.acquire(timeout=PATIENCE_S):
                break
            if not _send(pair.client, frame):
                break
            pair.count(-1)
        pair.answered.set()
        pair.close()
        with self._lock:
            self._pairs.discard(pair)

    def _hit(self, kind: int) -> _Fault | None:
        with self._lock:
            self.requests.append(kind)
            fault = next((item for item in self._faults if item.api == kind), None)
            if fault is None:
                return None
            if fault.after:
                fault.after -= 1
                return None
            fault.times -= 1
            if not fault.times:
                self._faults.remove(fault)
            return fault


def _error_answer(frame: bytes, error: ErrorCode) -> bytes:
    """What a broker would send to answer this request with an error."""
    kind, version, correlation_id, client_id_bytes = struct.unpack_from(">hhih", frame, 4)
    body_start = 4 + 10 + client_id_bytes + 1
    answer = io.BytesIO()
    match kind, version:
        case Api.PRODUCE, 12:
            request, _ = entity_reader(ProduceRequest)(frame, body_start)
            topics = tuple(
                TopicProduceResponse(
                    name=topic.name,
                    partition_responses=tuple(
                        PartitionProduceResponse(
                            index=partition.index, error_code=error, base_offset=i64(-1), record_errors=()
                        )
                        for partition in topic.partition_data
                    ),
                )
                for topic in request.topic_data
            )
            entity_writer(ProduceResponse)(answer, ProduceResponse(responses=topics))
        case Api.END_TXN, 5:
            no_time = i32Timedelta.parse(timedelta())
            entity_writer(EndTxnResponse)(answer, EndTxnResponse(throttle_time=no_time, error_code=error))
        case Api.INIT_PRODUCER_ID, 5:
            no_time = i32Timedelta.parse(timedelta())
            entity_writer(InitProducerIdResponse)(
                answer,
                InitProducerIdResponse(
                    throttle_time=no_time, error_code=error, producer_id=ProducerId(-1), producer_epoch=i16(-1)
                ),
            )
        case Api.METADATA, 12:
            wanted, _ = entity_reader(MetadataRequest)(frame, body_start)
            described = tuple(
                MetadataResponseTopic(error_code=error, name=topic.name, topic_id=None, partitions=())
                for topic in wanted.topics or ()
            )
            entity_writer(MetadataResponse)(
                answer,
                MetadataResponse(
                    brokers=(MetadataResponseBroker(node_id=BrokerId(1), host="127.0.0.1", port=i32(1), rack=None),),
                    controller_id=BrokerId(1),
                    topics=described,
                    cluster_id=None,
                    throttle_time=i32Timedelta.parse(timedelta()),
                ),
            )
        case _:
            raise AssertionError(f"cannot answer request {kind} version {version}")
    body = struct.pack(">i", correlation_id) + b"\0" + answer.getvalue()
    return struct.pack(">i", len(body)) + body


def _read_frame(source: socket.socket) -> bytes | None:
    head = _read_exactly(source, 4)
    if head is None:
        return None
    body = _read_exactly(source, struct.unpack(">i", head)[0])
    return None if body is None else head + body


def _read_exactly(source: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = source.recv(size - len(data))
        except OSError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _send(target: socket.socket, frame: bytes) -> bool:
    try:
        target.sendall(frame)
    except OSError:
        return False
    return True


def _close(one: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()
