"""A network link in user space: passes TCP connections on, late or slowly if wanted, until it is cut and healed again.

While it is cut nothing is refused and nothing arrives, as with a switch that is off: both sides wait until their own
time-outs tell them. ``reset`` hangs up instead. It needs no privilege and nothing of the kernel.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress
from queue import Queue
from types import TracebackType
from typing import Final, Self

from integration_tests.patience import PATIENCE_S

_BYTES: Final = 1 << 14
_CHUNKS: Final = 256
"""What is on its way in one direction of one connection, at most; who sends more waits."""


class Link:
    """From an address of its own to ``target`` ("host:port"); a context manager."""

    def __init__(self, target: str, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """Listen ``at`` an address; port 0 takes a free one."""
        self.lead_to(target)
        self._listener = socket.create_server(at)
        self.address: Final = f"{at[0]}:{self._listener.getsockname()[1]}"
        """What to connect to instead of the target."""
        self._whole = threading.Event()
        self._whole.set()
        self._delay_s = 0.0
        self._bytes_per_s = math.inf
        self._ending = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, name=f"link to {target}", daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that is in accept()
        self._listener.close()
        self._whole.set()
        self.reset()
        self._accepting.join(PATIENCE_S)

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

    def slow_down(self, *, delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        """From now on everything takes so long, each way, and no connection gets more through than so much.

        Without arguments it is as fast as ever.
        """
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

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
        way: Queue[tuple[float, bytes]] = Queue(_CHUNKS)
        delivering = threading.Thread(target=self._deliver, args=(way, target), daemon=True)
        delivering.start()
        data = b"-"
        while data:
            try:
                data = source.recv(_BYTES)
            except OSError:
                data = b""
            way.put((time.monotonic() + self._delay_s, data))
        delivering.join()
        with self._lock:
            self._open -= {source, target}
        _hang_up(source)
        _hang_up(target)

    def _deliver(self, way: Queue[tuple[float, bytes]], target: socket.socket) -> None:
        """Send what comes when it is due, until its end; what nobody takes any more is thrown away."""
        gone = False
        while True:
            due, data = way.get()
            if not gone:
                self._ending.wait(max(0.0, due - time.monotonic(), len(data) / self._bytes_per_s))
                self._whole.wait()
            if not data:
                return
            try:
                if not gone:
                    target.sendall(data)
            except OSError:
                gone = True
                _hang_up(target)  # which ends the other direction, and so this one


def _hang_up(one: socket.socket) -> None:
    with suppress(OSError):  # not connected any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()
