"""Traces by OpenTelemetry, for applications that have set it up; without it nothing is imported and nothing is done.

A tracer provider counts if it is configured before a connection is made, or before a leader's term begins. Spans:

- ``rollbridge transaction``, by the client that begins it: from then to the known outcome, with an event for the commit
  that was asked for, and the records and bytes of it in sum. A span of the application that is current at the begin is
  its parent.
- ``rollbridge round``, by a leader: from the first append of a round to its commit.

Needs ``rollbridge[tracing]``, the API of OpenTelemetry, which every provider installs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

API: Final = "opentelemetry.trace"
ROUND: Final = "rollbridge round"
_NS: Final = 1_000_000_000


def find_tracer() -> Tracer | None:
    """Return the configured provider's tracer; None without one.

    OpenTelemetry is not imported here: the application that configured a provider has done so.
    """
    api: Any = sys.modules.get(API)
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return cast("Tracer", api.get_tracer("rollbridge"))


def trace_round(tracer: Tracer, group: str, began_s: float, ended_s: float, transactions: int, frames: int) -> None:
    """Record the span of a round that is committed; times are in seconds since 1970."""
    span = tracer.start_span(
        ROUND,
        start_time=int(began_s * _NS),
        attributes={
            "messaging.system": "rollbridge",
            "rollbridge.group": group,
            "messaging.batch.message_count": transactions,
            "rollbridge.frames": frames,
        },
    )
    span.end(int(ended_s * _NS))
