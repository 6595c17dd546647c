"""Free ports for servers that come back to the same port after a crash."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from typing import Final

from rollbridge.errors import EnvironmentProblem

LOOPBACK: Final = "127.0.0.1"
"""The embedded servers have no authentication, so they listen nowhere else."""

_RANGE = range(20_000, 32_768)
"""Below the range that Linux takes for outgoing connections: while a broker is down, its clients try to connect to
its port, and one of those connections could otherwise get that very port as its own and keep the broker away."""

_rng = random.SystemRandom()


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As the servers do: a connection that lingers in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            # Binding alone succeeds beside a listener on all addresses.
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(taken: Iterable[int] = ()) -> int:
    """A loopback port that nobody listens on, and that is not one of ``taken``."""
    for port in _rng.sample(_RANGE, 500):
        if port not in taken and is_free(port):
            return port
    raise EnvironmentProblem(
        f"none of 500 ports tried between {_RANGE.start} and {_RANGE.stop - 1} is free on {LOOPBACK}"
    )


def demand_port(port: int, purpose: str) -> int:
    """Promise that a port that was asked for by number is free.

    Raises:
        EnvironmentProblem: somebody listens there.
    """
    if not is_free(port):
        raise EnvironmentProblem(
            f"port {port} for {purpose} is in use; stop what listens there, or leave the port out to get a free one"
        )
    return port
