"""``python -m rollbridge.observe.healthcheck [coordinator|gateway] [--alive]``: exit with 0 if the service is, else 1.

The program asks ``/healthz``, or ``/livez`` with ``--alive``, and prints the answer. It asks at the Unix socket
``ROLLBRIDGE_COORDINATOR_PROBE_SOCKET`` if that is set, which strangers cannot keep busy; else at the port of
``ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS``. Variables of gateways begin with ``ROLLBRIDGE_GATEWAY_``. It imports
little, since it is started every few seconds.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from collections.abc import Mapping, Sequence

COORDINATOR = "coordinator"
VARIABLES = {
    service: (f"ROLLBRIDGE_{service.upper()}_PROBE_SOCKET", f"ROLLBRIDGE_{service.upper()}_METRICS_ADDRESS")
    for service in (COORDINATOR, "gateway")
}
ALIVE = "--alive"
TIMEOUT_S = 3.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses that listen on all interfaces, with the loopback addresses to ask in their place."""


class _ProbeConnection(http.client.HTTPConnection):
    """Connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def check(environ: Mapping[str, str], arguments: Sequence[str] = ()) -> tuple[int, str]:
    """Return the exit code and the text to print.

    Args:
        environ: Environment of the container.
        arguments: ``coordinator`` or ``gateway``, and ``--alive`` if that is the question.
    """
    service = next((item for item in arguments if item != ALIVE), COORDINATOR)
    if service not in VARIABLES:
        return 1, f"{service!r} is none of {', '.join(VARIABLES)}"
    socket_variable, address_variable = VARIABLES[service]
    host, _, port = environ.get(address_variable, "").rpartition(":")
    if path := environ.get(socket_variable, ""):
        connection: http.client.HTTPConnection = _ProbeConnection(path)
    elif host and port.isdecimal():
        connection = http.client.HTTPConnection(EVERYWHERE.get(host, host).strip("[]"), int(port), timeout=TIMEOUT_S)
    else:
        return 1, f"set {socket_variable} to a path, or {address_variable} to HOST:PORT; nothing was asked"
    try:
        connection.request("GET", "/livez" if ALIVE in arguments else "/healthz")
        response = connection.getresponse()
        text = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as fault:
        return 1, f"the {service} does not answer: {fault}"
    finally:
        connection.close()
    return int(response.status != http.HTTPStatus.OK), text


if __name__ == "__main__":
    code, said = check(os.environ, sys.argv[1:])
    print(said)
    sys.exit(code)
