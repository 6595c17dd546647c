"""Traces of transactions: what a span says, and that there is nothing without a provider."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bridge.tests.transaction_makers import ORDERS, PAYMENTS, Bench
from rollbridge.base.tracing import ROUND, find_tracer, trace_round
from rollbridge.client.futures import TRANSACTION
from rollbridge.commitlog.control import ControlKind
from rollbridge.errors import BackpressureError


@pytest.fixture
def spans() -> Iterator[tuple[trace.Tracer, InMemorySpanExporter]]:
    """A tracer of a provider that nobody else sees, and what it has been told."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test"), exporter
    provider.shutdown()


def bench_with(tracer: trace.Tracer) -> Bench:
    bench = Bench()
    bench.use(ORDERS)
    bench.runtime = replace(bench.runtime, tracer=tracer)
    return bench


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_commit_is_a_span_with_its_writes_in_sum(spans: tuple[trace.Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    bench = bench_with(tracer)
    with tracer.start_as_current_span("request") as parent:
        transaction = bench.begin()
    exporter.clear()
    transaction.write_all(ORDERS, [(b"k", b"v")] * 3)
    transaction.commit_async()
    assert not exporter.get_finished_spans(), "its outcome is not known"
    bench.settle(transaction, ControlKind.COMMIT)
    span = only(exporter)
    said = dict(span.attributes or {})
    assert (span.name, [event.name for event in span.events]) == (TRANSACTION, ["commit"])
    assert span.parent is not None
    assert span.parent.span_id == parent.get_span_context().span_id
    assert (said["rollbridge.transaction"], said["rollbridge.label"]) == (str(transaction.id), "a label")
    assert (said["messaging.batch.message_count"], said["rollbridge.outcome"]) == (3, "committed")
    assert said["rollbridge.streams"] == (ORDERS,)
    assert "error.type" not in said


def test_an_abort_says_why(spans: tuple[trace.Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    bench = bench_with(tracer)
    transaction = bench.begin()
    transaction.write(ORDERS, b"k", b"v")
    transaction.abort_async("changed my mind")
    bench.settle(transaction, ControlKind.ABORT, "changed my mind")
    span = only(exporter)
    said = dict(span.attributes or {})
    assert (said["rollbridge.outcome"], said["error.type"]) == ("not committed", "TransactionAbortedError")
    assert [event.name for event in span.events] == ["abort", "exception"]


def test_a_begin_that_fails_ends_its_span(spans: tuple[trace.Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    bench = bench_with(tracer)
    bench.use(ORDERS, PAYMENTS)
    bench.sender.full_after = 1
    with pytest.raises(BackpressureError):
        bench.begin()
    assert dict(only(exporter).attributes or {})["error.type"] == "BackpressureError"


def test_a_round_is_a_span_of_its_time(spans: tuple[trace.Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    trace_round(tracer, "sales/default", 1_000.0, 1_000.5, 3, 4)
    span = only(exporter)
    assert (span.name, span.start_time, span.end_time) == (ROUND, 1_000 * 10**9, 1_000_500_000_000)
    said = dict(span.attributes or {})
    assert (said["messaging.batch.message_count"], said["rollbridge.frames"]) == (3, 4)


def test_nothing_is_traced_without_a_provider() -> None:
    assert find_tracer() is None, "OpenTelemetry is imported here, and nobody has configured it"
    assert Bench().runtime.tracer is None


def test_nothing_is_imported_unless_the_application_does() -> None:
    program = (
        "import sys, rollbridge\n"
        "from rollbridge.client.connection import Bridge\n"
        "from rollbridge.base.tracing import find_tracer\n"
        "assert find_tracer() is None\n"
        "found = [name for name in sys.modules if name.partition('.')[0] in ('opentelemetry', 'prometheus_client')]\n"
        "assert not found, found\n"
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "assert find_tracer() is None\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "assert find_tracer() is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
