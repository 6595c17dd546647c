"""Traces by OpenTelemetry, for applications that have set it up; without it nothing is imported and nothing is done.

A tracer provider counts if it is configured before a connection is made, or before a leader's term begins. Spans:

- ``rollbridge transaction``, by the client that begins it: from then to the known outcome, with an event for the commit
  that was asked for, and the records and bytes of it in sum. A span of the application that is current at the begin is
  its parent.
- ``rollbridge round``, by a leader: from the first append of a round to its commit.

Needs ``rollbridge[tracing]``, the API of OpenTelemetry, which whoever has a provider has in any case.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

API: Final = "opentelemetry.trace"
TRANSACTION: Final = "rollbridge transaction"
ROUND: Final = "rollbridge round"
_NS: Final = 1_000_000_000


def find_tracer() -> Tracer | None:
    """Return the tracer of the provider that is configured; None without one.

    Whoever has configured one has imported OpenTelemetry, so it is not imported here.
    """
    api: Any = sys.modules.get(API)
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return cast("Tracer", api.get_tracer("rollbridge"))


class Traced(Protocol):
    """Outcome of a transaction, as far as its span tells of it."""

    def when_settled(self, callback: Any) -> None:
        """Call back once it is known."""

    def error(self) -> Exception | None:
        """Return why it is not committed; None if it is."""

    @property
    def settled(self) -> bool:
        """True once it is known."""


class TransactionSpan:
    """Span of one transaction, which ends with its outcome."""

    __slots__ = ("_span",)

    def __init__(
        self, tracer: Tracer, identifier: str, client: str, streams: tuple[str, ...], label: str | None
    ) -> None:
        """Begin the span now, as a child of the current one."""
        self._span = tracer.start_span(
            TRANSACTION,
            attributes={
                "messaging.system": "rollbridge",
                "messaging.client.id": client,
                "rollbridge.transaction": identifier,
                "rollbridge.streams": list(streams),
                **({} if label is None else {"rollbridge.label": label}),
            },
        )

    def ask(self, wish: str, records: int, size: int) -> None:
        """Note that its end was asked for, with the records and bytes that were written."""
        self._span.set_attributes({"messaging.batch.message_count": records, "rollbridge.bytes": size})
        self._span.add_event(wish)

    def end_with(self, completion: Traced) -> None:
        """End the span once the outcome is known."""
        completion.when_settled(lambda: self._end(completion.error()))

    def fail(self, error: Exception) -> None:
        """End the span of a transaction that could not begin."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._span.set_attribute("rollbridge.outcome", "committed" if error is None else "not committed")
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.record_exception(error)
        self._span.end()


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
