"""``python -m rollbridge.serving.healthcheck [gateway]``: exit with 0 if this container's service is healthy, else 1.

The program asks ``/healthz`` at the port of ``ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS``, or ``ROLLBRIDGE_GATEWAY_...``
if it is told that a gateway runs here, and prints the answer. It imports next to nothing, since it is started every few
seconds.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping

COORDINATOR = "coordinator"
VARIABLES = {service: f"ROLLBRIDGE_{service.upper()}_METRICS_ADDRESS" for service in (COORDINATOR, "gateway")}
TIMEOUT_S = 3.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses that listen on all interfaces, with the loopback addresses to ask in their place."""


def check(environ: Mapping[str, str], service: str = COORDINATOR) -> tuple[int, str]:
    """Return the exit code and the text to print.

    Args:
        environ: Environment of the container.
        service: ``coordinator`` or ``gateway``.
    """
    variable = VARIABLES.get(service)
    if variable is None:
        return 1, f"{service!r} is none of {', '.join(VARIABLES)}"
    host, _, port = environ.get(variable, "").rpartition(":")
    if not host or not port.isdecimal():
        return 1, f"{variable} is not set to HOST:PORT, so nobody can tell"
    connection = http.client.HTTPConnection(EVERYWHERE.get(host, host).strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        text = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as fault:
        return 1, f"the {service} does not answer: {fault}"
    finally:
        connection.close()
    return int(response.status != http.HTTPStatus.OK), text


if __name__ == "__main__":
    code, said = check(os.environ, *sys.argv[1:2])
    print(said)
    sys.exit(code)
