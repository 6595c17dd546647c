"""A network link in user space: passes TCP connections on until it is cut, either way or both, and healed again.

While it is cut nothing is refused and nothing arrives, as with a switch that is off: both sides wait until their own
time-outs tell them. ``reset`` hangs up instead.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

_BYTES: Final = 1 << 16


class Link:
    """From an address of its own to ``target`` ("host:port"); a context manager."""

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Final = f"127.0.0.1:{self._listener.getsockname()[1]}"
        """What to connect to instead of the target."""
        self._whole = threading.Event()
        self._whole.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"link to {target}", daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that is in accept()
        self._listener.close()
        self._whole.set()
        self.reset()
        self._accepting.join(10)

    def lead_to(self, target: str) -> None:
        """Pass new connections on to another target."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Nothing arrives any more, in either direction; what is sent waits."""
        self._whole.clear()

    def heal(self) -> None:
        """What waits arrives."""
        self._whole.set()

    def reset(self) -> None:
        """Hang up on everybody; new connections are passed on, unless the link is cut."""
        with self._lock:
            doomed, self._open = self._open, set()
        for one in doomed:
            _hang_up(one)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._whole.wait()
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            _hang_up(near)
            return
        far.settimeout(None)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {near, far}
        threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()
        self._pass_on(far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                self._whole.wait()
                target.sendall(data)
        with self._lock:
            self._open -= {source, target}
        _hang_up(source)
        _hang_up(target)


def _hang_up(one: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()
