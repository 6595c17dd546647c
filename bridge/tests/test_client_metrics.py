"""What a connection counts of its transactions, and what a sender counts of its batches."""

from __future__ import annotations

import math
import time

import pytest
from prometheus_client import CollectorRegistry

from bridge.tests.transaction_makers import ORDERS, PAYMENTS, REFUSED, Bench
from rollbridge.base.metrics import (
    FAMILIES,
    ClientMetrics,
    PlainCounts,
    SenderCounts,
    TransactionCounts,
    Unfinished,
    WriteEnd,
    client_samples,
)
from rollbridge.commitlog.control import EXPIRED, FENCED, ControlKind
from rollbridge.errors import BackpressureError
from rollbridge.metrics import collector


def read(bench: Bench) -> ClientMetrics:
    under_way = sum(item.counts is not None for item in bench.outcomes.waiting.values())
    return bench.runtime.counts.read(under_way, SenderCounts(), 0, 0, PlainCounts())


def ends(bench: Bench) -> dict[Unfinished, int]:
    return {how: times for how, times in read(bench).transactions_unfinished.items() if times}


def test_a_commit_that_is_asked_for_knows_when_and_what() -> None:
    bench = Bench()
    transaction = bench.begin(ORDERS)
    transaction.write_all(ORDERS, [(b"k", b"v"), (b"k", b"w")])
    before = transaction._writing.completion.asked
    transaction.commit_async()
    asked = transaction._writing.completion.asked
    assert before is None
    assert asked is not None
    at_s, records, size = asked
    assert records == 2
    assert size > 4
    assert at_s <= time.monotonic()
    assert read(bench).transactions_begun == 1


@pytest.mark.parametrize(
    ("reason", "how"),
    [("client", Unfinished.ABORTED), (EXPIRED, Unfinished.EXPIRED), (FENCED, Unfinished.FENCED)],
)
def test_an_end_is_counted_by_what_the_commit_log_says(reason: str, how: Unfinished) -> None:
    bench = Bench()
    transaction = bench.begin()
    bench.settle(transaction, ControlKind.ABORT, reason)
    transaction._writing.completion.count_unfinished()
    transaction._writing.completion.count_unfinished()
    assert ends(bench) == {how: 1}, "once"


def test_what_could_not_be_sent_is_counted_once() -> None:
    bench = Bench()
    bench.use(ORDERS, PAYMENTS)
    transaction = bench.begin()
    bench.sender.acknowledge(1, REFUSED)
    assert transaction._writing.completion.settled
    transaction._writing.completion.count_unfinished()
    assert ends(bench) == {Unfinished.INCOMPLETE: 1}


def test_a_begin_that_finds_no_room_is_no_open_transaction() -> None:
    bench = Bench()
    bench.use(ORDERS, PAYMENTS)
    bench.sender.full_after = 1
    with pytest.raises(BackpressureError):
        bench.begin()
    found = read(bench)
    assert (found.transactions_begun, ends(bench)) == (1, {Unfinished.INCOMPLETE: 1})


def test_an_outcome_that_will_not_be_learned_is_unknown() -> None:
    bench = Bench()
    bench.begin()._writing.completion.give_up("closed")
    second = bench.begin(counter=7)
    second._writing.completion.fence()
    second._writing.completion.give_up("closed")
    assert ends(bench) == {Unfinished.UNKNOWN: 1, Unfinished.FENCED: 1}


def test_commits_are_counted_together() -> None:
    counts = TransactionCounts()
    counts.note_commits([(1.0, 3, 30), None, (2.0, 4, 40)], 2.5)
    found = counts.read(0, SenderCounts(), 0, 0, PlainCounts())
    assert (found.transactions_committed, found.records_committed, found.bytes_committed) == (2, 7, 70)
    assert found.commit_latency.total == 2.0


def test_the_number_of_begins_never_falls() -> None:
    """A commit is on its way from the open ones to the counted ones for a moment: Prometheus would see a restart."""
    counts = TransactionCounts()
    numbers = []
    for under_way, commits in ((2, []), (0, []), (0, [(0.0, 1, 1)] * 2), (1, [])):
        counts.note_commits(commits, 1.0)
        numbers.append(counts.read(under_way, SenderCounts(), 0, 0, PlainCounts()).transactions_begun)
    assert numbers == [2, 2, 2, 3]


def test_all_families_are_told_at_zero_with_the_name_of_the_client() -> None:
    plain = PlainCounts()
    plain.add(SenderCounts(2, 20, 200, 1, 3, 0.5), 4, 50)
    plain.add(SenderCounts(2, 20, 200, 1, 3, 0.5), 4, 50)
    counts = TransactionCounts()
    counts.note_conditional(WriteEnd.UNKNOWN)
    found = counts.read(0, SenderCounts(1, 10, 100, 0, 1, 0.25), 1, 5, plain)
    assert {sample.family for sample in client_samples("c", found)} == set(FAMILIES)
    assert (found.batches_retried, found.backpressure_waits, found.backpressure_waited_s) == (9, 7, 1.25)
    assert (found.bytes_waiting, found.plain_records_written, found.plain_records_failed) == (105, 40, 2)
    for family in FAMILIES:
        assert family.name.startswith("rollbridge_client_")
        assert family.about.endswith(".")

    class Connection:
        client_name = "teller"
        metrics = found

    registry = CollectorRegistry()
    registry.register(collector(Connection()))
    told = {
        "sent_frames_total": 10.0,
        "sent_frame_bytes_total": 100.0,
        "waiting_bytes": 105.0,
        "transactions_begun_total": 0.0,
    }
    for name, value in told.items():
        shown = registry.get_sample_value(f"rollbridge_client_{name}", {"client": "teller"})
        assert shown == value, name
    shown = registry.get_sample_value(
        "rollbridge_client_conditional_writes_total", {"client": "teller", "result": "unknown"}
    )
    assert shown == 1
    assert not math.isnan(found.backpressure_waited_s)
