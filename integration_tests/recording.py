"""What real clients send and are told, as it is on the wire: a relay in front of a gateway that keeps the bytes.

A gateway tells its clients where it is, by the host that it advertises. So the relay has the gateway's own ports at
another address of this machine.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

from integration_tests.patience import PATIENCE_S

HOST: Final = "127.0.0.2"
"""What the gateway is to advertise."""
_BYTES: Final = 1 << 16


class Exchange(NamedTuple):
    """A request and its answer, without their lengths; the answer is empty if there was none."""

    port: int
    connection: int
    request: bytes
    answer: bytes


class _Stream:
    """Bytes of one direction, and when which of them had come: ends in it, and numbers that rise over all streams."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.came: list[tuple[int, int]] = []

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Yield whole messages with their lengths, and when each had come."""
        data, place, times = bytes(self.data), 0, iter(self.came)
        had = (0, 0)
        while place + 4 <= len(data):
            end = place + 4 + int.from_bytes(data[place : place + 4], "big")
            if end > len(data):
                return
            while had[0] < end:
                had = next(times)
            yield had[1], data[place:end]
            place = end


class Recorder:
    """Passes connections on to the same ports of 127.0.0.1; a context manager. Keeps what clients send and are told."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._listeners = [socket.create_server((HOST, port)) for port in ports]
        self._streams: list[tuple[int, _Stream, _Stream]] = []
        self._order = itertools.count()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for listener in self._listeners:
            self._run(self._accept, listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (*self._listeners, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def requests(self) -> list[bytes]:
        """All whole requests, with their lengths."""
        return [data for _, sent, _ in self._streams for _, data in sent.messages()]

    def exchanges(self) -> list[Exchange]:
        """All whole requests of all connections, in the order in which they came, with their answers."""
        found: list[tuple[int, Exchange]] = []
        for number, (port, sent, told) in enumerate(self._streams):
            answers = {data[4:8]: data[4:] for _, data in told.messages()}
            for came, data in sent.messages():
                found.append((came, Exchange(port, number, data[4:], answers.get(data[8:12], b""))))
        return [exchange for _, exchange in sorted(found, key=lambda item: item[0])]

    def _run(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            except OSError:
                return
            sent, told = _Stream(), _Stream()
            self._streams.append((listener.getsockname()[1], sent, told))
            self._sockets += [near, far]
            self._run(self._pass_on, near, far, sent)
            self._run(self._pass_on, far, near, told)

    def _pass_on(self, source: socket.socket, target: socket.socket, stream: _Stream) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                stream.data += data
                stream.came.append((len(stream.data), next(self._order)))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
