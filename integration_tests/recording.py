"""What real clients send, as it is on the wire: a relay in front of a gateway that keeps the bytes.

A gateway tells its clients where it is, by the host that it advertises. So the relay has the gateway's own ports at
another address of this machine.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from integration_tests.patience import PATIENCE_S

HOST: Final = "127.0.0.2"
"""What the gateway is to advertise."""
_BYTES: Final = 1 << 16


class Recorder:
    """Passes connections on to the same ports of 127.0.0.1; a context manager. Keeps what clients have sent."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._listeners = [socket.create_server((HOST, port)) for port in ports]
        self._streams: list[bytearray] = []
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
        found = []
        for stream in self._streams:
            data, place = bytes(stream), 0
            while place + 4 <= len(data):
                end = place + 4 + int.from_bytes(data[place : place + 4], "big")
                if end > len(data):
                    break
                found.append(data[place:end])
                place = end
        return found

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
            stream = bytearray()
            self._streams.append(stream)
            self._sockets += [near, far]
            self._run(self._pass_on, near, far, stream)
            self._run(self._pass_on, far, near, bytearray())

    def _pass_on(self, source: socket.socket, target: socket.socket, stream: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                stream += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
