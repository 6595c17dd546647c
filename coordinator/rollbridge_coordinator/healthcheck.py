"""``python -m rollbridge_coordinator.healthcheck``: exit code 0 if the coordinator of this container is healthy, 1 if
not.

It asks ``/healthz`` at the port of ``ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS``, and prints what that says. It imports
next to nothing, since it is started every few seconds.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping

VARIABLE = "ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS"
TIMEOUT_S = 3.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses to listen at that are none to ask at, and what is asked in their place."""


def check(environ: Mapping[str, str]) -> tuple[int, str]:
    """Exit code, and what to say."""
    host, _, port = environ.get(VARIABLE, "").rpartition(":")
    if not host or not port.isdecimal():
        return 1, f"{VARIABLE} is not set to HOST:PORT, so nobody can tell"
    connection = http.client.HTTPConnection(EVERYWHERE.get(host, host).strip("[]"), int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        text = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as fault:
        return 1, f"the coordinator does not answer: {fault}"
    finally:
        connection.close()
    return int(response.status != http.HTTPStatus.OK), text


if __name__ == "__main__":
    code, said = check(os.environ)
    print(said)
    sys.exit(code)
