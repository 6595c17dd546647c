"""A segment against what the commit log says of it: a slow, obvious version agrees, and each mutant is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.kafka.batches import BatchBuilder, Compression, parse_header
from rollbridge.kafka.signed_runs import SignedBatch, signed_batch
from rollbridge.model.attribution import RECORD_HEADER, pack_run
from rollbridge.model.ids import TransactionId, local_sequence
from rollbridge.model.verification import (
    FINDINGS_MAX,
    Discrepancies,
    DiscrepancyKind,
    Placed,
    SegmentCheck,
    SignedRun,
    VerificationTally,
)

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


def test_runs_that_were_joined_are_told_apart_and_the_rest_is_plain() -> None:
    found = signed([run_of(2), None, run_of(3, 9, B, bytes([2, 1])), None, None, None])
    assert found.pieces == [SignedRun(0, 2, A, 5, 6), SignedRun(2, 3, B, 9, 12)]
    assert found.plain == 1


def test_each_record_may_carry_a_header_of_its_own() -> None:
    assert signed([run_of(1, 5), run_of(1, 6)]).pieces == [SignedRun(0, 1, A, 5, 5), SignedRun(1, 1, A, 6, 6)]


def test_a_run_claims_nothing_behind_its_batch() -> None:
    assert signed([run_of(9), None]).pieces == [SignedRun(0, 2, A, 5, 6)]


def test_a_header_within_a_run_ends_it_whoever_has_put_it_there() -> None:
    found = signed([run_of(4), None, run_of(1, 77, B), None])
    assert found.pieces == [SignedRun(0, 2, A, 5, 6), SignedRun(2, 1, B, 77, 77)]
    assert found.plain == 1
    found = signed([run_of(4), None, b"no header of ours", None])
    assert found.pieces == [SignedRun(0, 2, A, 5, 6)]
    assert found.plain == 2


def test_plain_batches_are_not_parsed() -> None:
    assert signed([None] * 5) == SignedBatch(plain=5)
    builder = BatchBuilder(1 << 20)
    builder.append(0, None, b"v", [("rollbridge-cas", b"x")])
    builder.append(0, None, b"\x14rollbridge in a value", [])
    raw = builder.build()
    assert signed_batch(parse_header(raw), raw) == SignedBatch(plain=1, conditional=1)
