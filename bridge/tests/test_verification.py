"""A segment against what the commit log says of it: a slow, obvious version agrees, and each mutant is found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.attribution import RECORD_HEADER, pack_run
from rollbridge.base.ids import SegmentId, TransactionId, local_sequence
from rollbridge.doctor import verification
from rollbridge.doctor.verification import (
    FINDINGS_MAX,
    Discrepancies,
    DiscrepancyKind,
    Placed,
    SegmentCheck,
    VerificationTally,
)
from rollbridge.doctor.verify import Plan, Spill, Verifier
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.committed import SignedBatch, SignedRun, signed_batch
from rollbridge.kafka.fetch import RawStretch
from rollbridge.kafka.records import BatchBuilder, Compression, parse_header
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName

A, B = TransactionId.of(0, 7).bytes, TransactionId.of(0, 8).bytes


def check(
    placed: Sequence[Placed],
    pieces: Sequence[SignedRun],
    first: int = 0,
    end: int = 1_000,
    *,
    is_whole: bool = True,
    is_compacted: bool = False,
) -> tuple[Discrepancies, VerificationTally]:
    findings, tally = Discrepancies(), VerificationTally()
    present = SegmentCheck(
        "s", placed, first, end, is_whole=is_whole, is_compacted=is_compacted, findings=findings, tally=tally
    )
    for piece in pieces:
        present.found(piece)
    present.finish()
    return findings, tally


def piece(base: int, records: int, transaction: bytes = A, first: int = 0, part: int = 0) -> SignedRun:
    number = local_sequence(part, first)
    return SignedRun(base, records, transaction, number, number + records - 1)


GOOD = [Placed(10, 5, A, 0), Placed(20, 3, B, 2), Placed(23, 2, B, 3)]
THERE = [piece(10, 2), piece(12, 3, first=2), piece(20, 3, B, part=2), piece(23, 2, B, part=3)]


def test_what_stands_as_the_log_says_is_counted() -> None:
    findings, tally = check(GOOD, THERE)
    assert (findings.total, tally.matched) == (0, 10)


@pytest.mark.parametrize(
    ("placed", "pieces", "kinds"),
    [
        (GOOD, [*THERE[:1], *THERE[2:]], {DiscrepancyKind.MISSING: 1}),
        (GOOD, THERE[:2], {DiscrepancyKind.MISSING: 2}),
        (GOOD, [], {DiscrepancyKind.MISSING: 3}),
        (GOOD[1:], THERE, {DiscrepancyKind.FOREIGN: 2}),
        (GOOD, [*THERE, piece(40, 1, B, first=9, part=3)], {DiscrepancyKind.FOREIGN: 1}),
        (GOOD, [*THERE, piece(40, 5)], {DiscrepancyKind.FOREIGN: 1, DiscrepancyKind.DOUBLED: 1}),
        (GOOD, [*THERE, piece(40, 1, first=4)], {DiscrepancyKind.FOREIGN: 1, DiscrepancyKind.DOUBLED: 1}),
        (GOOD, [THERE[0], piece(12, 3, B), *THERE[2:]], {DiscrepancyKind.MISPLACED: 1}),
        (GOOD, [*THERE[:3], piece(23, 2, B, part=2, first=3)], {DiscrepancyKind.MISPLACED: 1}),
        (GOOD, [piece(10, 12), *THERE[2:]], {DiscrepancyKind.FOREIGN: 1, DiscrepancyKind.MISPLACED: 1}),
        ([*GOOD, Placed(24, 1, A, 0)], THERE, {DiscrepancyKind.OVERLAP: 1}),
        ([GOOD[1], GOOD[0], GOOD[2]], THERE, {DiscrepancyKind.OVERLAP: 1, DiscrepancyKind.FOREIGN: 2}),
    ],
)
def test_each_mutant_is_found(placed: list[Placed], pieces: list[SignedRun], kinds: dict[DiscrepancyKind, int]) -> None:
    findings, _ = check(placed, pieces)
    assert findings.counts.keys() >= kinds.keys()
    assert findings.total >= sum(kinds.values())


def test_what_retention_has_deleted_of_the_segment_is_counted() -> None:
    findings, tally = check(GOOD, [piece(12, 3, first=2), *THERE[2:]], first=13)
    assert (findings.total, tally.deleted, tally.matched) == (0, 3, 7)


def test_what_stands_before_the_first_commit_that_is_known_is_counted_if_the_log_was_truncated() -> None:
    before = [piece(3, 2, B, first=50, part=9)]
    findings, tally = check(GOOD, [*before, *THERE], is_whole=False)
    assert (findings.total, tally.forgotten, tally.matched) == (0, 2, 10)
    findings, _ = check(GOOD, [*before, *THERE])
    assert findings.counts == {DiscrepancyKind.FOREIGN: 1}
    behind = [piece(40, 2, B, first=50, part=9)]
    findings, _ = check(GOOD, [*THERE, *behind], is_whole=False)
    assert findings.counts == {DiscrepancyKind.FOREIGN: 1}, (
        "what comes behind a commit that is known must be known, too"
    )
    findings, _ = check(GOOD, behind, is_whole=False)
    assert findings.counts == {DiscrepancyKind.MISSING: 3, DiscrepancyKind.FOREIGN: 1}, (
        "also if its records are missing"
    )


@pytest.mark.parametrize("first", [15, 16])
def test_a_commit_whose_records_retention_has_deleted_is_one_that_is_known(first: int) -> None:
    stranger = piece(16, 2, B, first=50, part=9)
    findings, _ = check(GOOD, [stranger, *THERE[2:]], first=first, is_whole=False)
    assert findings.counts == {DiscrepancyKind.FOREIGN: 1}


def test_what_was_committed_since_is_counted() -> None:
    findings, tally = check(GOOD, THERE, end=21)
    assert (findings.total, tally.later, tally.matched) == (0, 4, 6)


def test_what_was_compacted_away_is_counted() -> None:
    findings, tally = check(GOOD, THERE[1:], is_compacted=True)
    assert (findings.total, tally.compacted) == (0, 2)


def test_findings_without_end_are_counted_and_not_kept() -> None:
    findings, _ = check([], [piece(number, 1, first=number) for number in range(FINDINGS_MAX + 7)], end=10_000)
    assert (findings.total, len(findings.named)) == (FINDINGS_MAX + 7, FINDINGS_MAX)


def test_what_is_remembered_of_a_segment_does_not_grow_with_its_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_WRITERS_MAX", 2)
    runs = [Placed(number, 1, A, number) for number in range(5)]
    pieces = [piece(number, 1, part=number) for number in range(5)]
    again = [piece(10 + part, 1, part=part) for part in (4, 3, 0)]
    findings, _ = check(runs, [*pieces, *again])
    assert findings.counts == {DiscrepancyKind.FOREIGN: 3, DiscrepancyKind.DOUBLED: 2}


Writer = tuple[bytes, int]
writers = st.tuples(st.sampled_from([A, B]), st.integers(0, 2))


@given(st.lists(st.none() | writers, max_size=30), st.lists(st.none() | writers, max_size=30), st.booleans())
def test_a_segment_is_as_the_log_says_or_there_is_a_finding(
    said: list[Writer | None], there: list[Writer | None], joined: bool
) -> None:
    """Offset by offset: whom the log names, and whom the record; each record has a sequence number of its own."""

    def runs(whose: list[Writer | None]) -> list[tuple[int, int, Writer]]:
        found: list[tuple[int, int, Writer]] = []
        for offset, writer in enumerate(whose):
            if writer is None:
                continue
            if joined and found and found[-1][2] == writer and found[-1][0] + found[-1][1] == offset:
                found[-1] = (found[-1][0], found[-1][1] + 1, writer)
            else:
                found.append((offset, 1, writer))
        return found

    placed = [Placed(base, count, *writer) for base, count, writer in runs(said)]
    pieces = [piece(base, count, writer[0], base, writer[1]) for base, count, writer in runs(there)]
    findings, tally = check(placed, pieces)
    length = max(len(said), len(there))
    pairs = list(zip([*said, *[None] * (length - len(said))], [*there, *[None] * (length - len(there))], strict=True))
    assert tally.matched == sum(one is not None and one == other for one, other in pairs)
    assert (findings.total == 0) == all(one == other for one, other in pairs)


@given(st.lists(st.none() | writers, max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_what_is_deleted_while_it_is_read_is_counted_and_no_finding(
    whose: list[Writer | None], read: int, first: int
) -> None:
    """Retention, or who deletes the topic, may be faster than the check: nothing that it could not read is missing."""
    there = [(offset, writer) for offset, writer in enumerate(whose) if writer is not None]
    placed = [Placed(offset, 1, *writer) for offset, writer in there]
    findings, tally = Discrepancies(), VerificationTally()
    present = SegmentCheck("s", placed, 0, len(whose), is_whole=True, findings=findings, tally=tally)
    for offset, (transaction, part) in there[:read]:
        present.found(piece(offset, 1, transaction, offset, part))
    present.deleted_below(first)
    for offset, (transaction, part) in there[read:]:
        if offset >= first:
            present.found(piece(offset, 1, transaction, offset, part))
    present.finish()
    lost = sum(offset < first for offset, _ in there[read:])
    assert (findings.named, tally.deleted, tally.matched) == ([], lost, len(there) - lost)


@pytest.mark.parametrize("bytes_max", [1, 100, 1 << 20])
def test_runs_come_back_by_segment_in_their_order_whether_they_were_spilled_or_not(
    tmp_path: Path, bytes_max: int
) -> None:
    """A segment's runs are compared in the order of the log, so each must come once, and none of another segment."""
    segments = [SegmentId.of(0, 0), SegmentId.of(1, 0), SegmentId.of(0, 1)]
    runs = [Placed(number << 33, number + 1, A if number % 2 else B, number) for number in range(20)]
    with Spill(tmp_path, bytes_max) as spill:
        for _ in range(2):
            for number, run in enumerate(runs):
                spill.add(segments[number % 3], run)
            for number, segment in enumerate(segments):
                assert list(spill.entries(segment)) == runs[number::3]
            spill.clear()
            assert not any(list(spill.entries(segment)) for segment in segments)


# Batches, as brokers send them


@pytest.mark.parametrize(
    ("begin", "damaged", "is_compacted", "kinds", "matched"),
    [
        (2, False, False, {}, 4),
        (3, False, False, {DiscrepancyKind.GAP: 1}, 4),
        (3, False, True, {}, 4),
        (2, True, False, {DiscrepancyKind.CORRUPT: 1, DiscrepancyKind.MISSING: 1}, 2),
    ],
)
def test_batches_that_are_damaged_or_lacking_are_found_but_where_compaction_may_take_some(
    *, begin: int, damaged: bool, is_compacted: bool, kinds: dict[DiscrepancyKind, int], matched: int
) -> None:
    """Brokers send what their disks hold; nothing but the checksum tells that it is not what was written."""
    batches = bytearray(batch_of([run_of(2, 0), None]) + batch_of([run_of(2, 2), None]))
    batches[len(batches) // 2 + 7] = begin  # its first offset, of which checksums know nothing
    batches[-1] ^= damaged
    history, plan = EpochHistory.create(even_ranges(1), 0), Plan({}, (0, 0), {})
    config = StreamConfig(name=StreamName("s", "own"), group=GroupName("s"), created_ms=0, buffer_topic_id="")
    verifier = Verifier(KafkaClient("localhost:1"), config, history, plan)
    tally, findings = VerificationTally(), verifier._found.findings
    placed = [Placed(0, 2, A, 0), Placed(begin, 2, A, 0)]
    present = SegmentCheck("s", placed, 0, 5, is_whole=True, findings=findings, tally=tally)
    raw = RawStretch(0, bytes(batches), [], 5)
    assert verifier._examine(raw, 0, 5, present, tally, "s", is_compacted=is_compacted) == begin + 2
    present.finish()
    assert (findings.counts, tally.matched) == (kinds, matched)


# Whose the records of a batch are


def batch_of(headers: Sequence[bytes | None], codec: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(1 << 20, codec)
    for number, value in enumerate(headers):
        own: list[tuple[str, bytes | None]] = [] if value is None else [(RECORD_HEADER, value)]
        assert builder.append(0, b"key", b"value %d" % number, [("other", b"x"), *own])
    return builder.build()


def signed(headers: Sequence[bytes | None], codec: Compression = Compression.NONE) -> SignedBatch:
    raw = batch_of(headers, codec)
    return signed_batch(parse_header(raw), raw)


def run_of(records: int, first: int = 5, transaction: bytes = A, steps: bytes = b"") -> bytes:
    return pack_run(transaction, first, records, steps or bytes([1]) * (records - 1))


@pytest.mark.parametrize("codec", list(Compression))
def test_a_batch_of_one_run_is_known_by_its_first_record(codec: Compression) -> None:
    found = signed([run_of(4), None, None, None], codec)
    assert found.pieces == [SignedRun(0, 4, A, 5, 8)]
    assert found.plain == 0


@pytest.mark.parametrize(
    ("headers", "pieces", "plain"),
    [
        (
            [run_of(2), None, run_of(3, 9, B, bytes([2, 1])), None, None, None],
            [SignedRun(0, 2, A, 5, 6), SignedRun(2, 3, B, 9, 12)],
            1,
        ),
        ([run_of(1, 5), run_of(1, 6)], [SignedRun(0, 1, A, 5, 5), SignedRun(1, 1, A, 6, 6)], 0),
        ([run_of(9), None], [SignedRun(0, 2, A, 5, 6)], 0),
        ([run_of(4), None, run_of(1, 77, B), None], [SignedRun(0, 2, A, 5, 6), SignedRun(2, 1, B, 77, 77)], 1),
        ([run_of(4), None, b"no header of ours", None], [SignedRun(0, 2, A, 5, 6)], 2),
    ],
    ids=["joined", "each of its own", "behind its batch", "a header within", "a stranger's within"],
)
def test_runs_end_with_their_batch_or_at_any_header_and_the_rest_is_plain(
    headers: Sequence[bytes | None], pieces: list[SignedRun], plain: int
) -> None:
    found = signed(headers)
    assert (found.pieces, found.plain) == (pieces, plain)


def test_names_in_values_are_no_headers() -> None:
    assert signed([None] * 5) == SignedBatch(plain=5)
    builder = BatchBuilder(1 << 20)
    builder.append(0, None, b"v", [("rollbridge-cas", b"x")])
    builder.append(0, None, b"\x14rollbridge in a value", [])
    raw = builder.build()
    assert signed_batch(parse_header(raw), raw) == SignedBatch(plain=1, conditional=1)
