"""TLS handshakes that fail: the client is told why, by an alert, and so is the log.

asyncio and uvloop close a connection whose handshake fails at once, and what OpenSSL has for the client with it. Here
the failure looks as if more had to come, so the loop sends what there is; the client's end, or the time for handshakes,
closes the connection.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from rollbridge.kafka.ratelimit import limited

logger = limited(logging.getLogger(__name__))


def telling(failed: Callable[[], None]) -> type[ssl.SSLObject]:
    """Return the class of a context's connections (``SSLContext.sslobject_class``) that tell why a handshake fails.

    Args:
        failed: Called after each handshake that has failed.
    """

    class Telling(ssl.SSLObject):
        _fault: ssl.SSLError | None = None

        def do_handshake(self) -> None:
            if self._fault is not None:
                raise self._fault
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise
            except ssl.SSLError as fault:
                self._fault = fault
                reason = getattr(fault, "verify_message", None) or fault.reason or fault
                logger.warning("tls.refused reason=%r: a client's handshake has failed; it was told so", str(reason))
                failed()
                raise ssl.SSLWantReadError from fault

    return Telling
