"""The decision of conditional writes: complete tables, and rounds against a slow and obvious model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.errors import InvalidRequestError, UnavailableError
from rollbridge.stream.conditions import (
    Accepted,
    Condition,
    ConditionalWrite,
    NonMonotonicId,
    Refused,
    RoundBuilder,
    Scope,
    holds,
    is_refuted,
    judge,
    place_of,
)
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.reading import KeyLineage

WHOLE = EpochHistory.create([KeyRange(0.0, 1.0)], 0)
HALVES = WHOLE.with_records(WHOLE.plan_scale([0], [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], 1)).with_sealed_ends(
    1, {SegmentId.of(0, 0): 10}
)
"""Segment 0.#epoch.0 sealed at 10, continued by 1.#epoch.1 and 2.#epoch.1 whose sequence ids begin at 10."""
LOW = KeyLineage(HALVES, 0.0)
KEY = b"k"


def sn(offset: int, *, epoch: int = 1, number: int = 1, transaction_id: int | None = None) -> SN:
    base = 10 if epoch else 0
    return SN(DLSN(epoch, number, offset), transaction_id, base + offset)


OLD, NEW = sn(9, epoch=0, number=0), sn(5)
TAGGED = sn(5, transaction_id=7)
LOCAL = SN(DLSN(1, 1, 5, 3), None, 15)

SEGMENT_TABLE = [
    # expected, last record of the segment, whether it holds
    (ANY, EMPTY, True),
    (ANY, OLD, True),
    (ANY, NEW, True),
    (ANY, ANY, True),
    (EMPTY, EMPTY, True),
    (EMPTY, OLD, False),
    (EMPTY, NEW, False),
    (EMPTY, ANY, False),
    (OLD, EMPTY, False),
    (OLD, OLD, True),
    (OLD, NEW, False),
    (OLD, ANY, False),
    (NEW, EMPTY, False),
    (NEW, OLD, False),
    (NEW, NEW, True),
    (NEW, ANY, False),
    (SN(sequence_id=15), NEW, True),
    (SN(sequence_id=14), NEW, False),
    (SN(sequence_id=16), NEW, False),
    (SN(sequence_id=9), OLD, True),
    (SN(dlsn=DLSN(1, 1, 5)), NEW, True),
    (SN(dlsn=DLSN(1, 1, 5)), LOCAL, True),
    (SN(dlsn=DLSN(1, 1, 5, 3)), LOCAL, True),
    (SN(dlsn=DLSN(1, 1, 5, 4)), LOCAL, False),
    (SN(dlsn=DLSN(1, 1, 5), sequence_id=14), NEW, False),
    (SN(transaction_id=7), TAGGED, True),
    (SN(transaction_id=7), NEW, False),
    (SN(transaction_id=8), TAGGED, False),
    (SN(DLSN(1, 1, 5), 7, 15), TAGGED, True),
    (SN(DLSN(1, 1, 5), 8, 15), TAGGED, False),
]

KEY_TABLE = [
    # expected, last record with the key, whether it holds; the write stands at sequence id 20
    (ANY, EMPTY, True),
    (ANY, NEW, True),
    (EMPTY, EMPTY, True),
    (EMPTY, OLD, False),
    (EMPTY, ANY, False),
    (OLD, EMPTY, True),
    (OLD, OLD, True),
    (OLD, NEW, False),
    (OLD, ANY, False),
    (NEW, EMPTY, True),
    (NEW, OLD, True),
    (NEW, NEW, True),
    (NEW, sn(6), False),
    (SN(sequence_id=15), NEW, True),
    (SN(sequence_id=14), NEW, False),
    (SN(sequence_id=19), NEW, True),
    (SN(sequence_id=20), NEW, False),
    (SN(sequence_id=20), EMPTY, False),
    (SN(sequence_id=21), NEW, False),
    (sn(10), EMPTY, False),
    (SN(dlsn=DLSN(1, 1, 5), sequence_id=14), EMPTY, False),
    (SN(transaction_id=7), TAGGED, True),
    (SN(transaction_id=7), NEW, False),
    (SN(transaction_id=7), EMPTY, False),
    (SN(DLSN(1, 1, 5), 7, 15), TAGGED, True),
    (SN(DLSN(1, 1, 5), 8, 15), TAGGED, False),
    (SN(DLSN(1, 1, 5), 7, 15), sn(6, transaction_id=7), False),
    (SN(DLSN(1, 1, 5), 7, 15), OLD, True),
    (SN(DLSN(1, 1, 5), 7, 15), EMPTY, True),
]


@pytest.mark.parametrize(("expected", "last", "answer"), SEGMENT_TABLE)
def test_scope_segment(expected: SN, last: SN, answer: bool) -> None:
    assert holds(Condition(expected), last, 20, LOW) is answer


@pytest.mark.parametrize(("expected", "last", "answer"), KEY_TABLE)
def test_scope_key(expected: SN, last: SN, answer: bool) -> None:
    assert holds(Condition(expected, Scope.KEY, KEY), last, 20, LOW) is answer


@given(st.data())
def test_what_is_refuted_never_holds_again_and_what_may_be_seen_already_is_not(data: st.DataObject) -> None:
    ids = st.none() | st.integers(0, 3)
    scope = data.draw(st.sampled_from(Scope))
    lasts = [sn(offset, transaction_id=data.draw(ids)) for offset in range(6)]
    expected = data.draw(st.sampled_from([*lasts, OLD, EMPTY, ANY, SN(transaction_id=1), SN(sequence_id=13)]))
    known = data.draw(st.integers(0, 5))
    condition = Condition(expected, scope, KEY)
    if is_refuted(condition, lasts[known], LOW):
        assert not any(holds(condition, last, 19, LOW) for last in lasts[known:])
    elif expected.sequence_id is not None:
        assert expected.sequence_id >= (lasts[known].sequence_id or 0)


def test_scope_key_needs_a_key() -> None:
    with pytest.raises(InvalidRequestError, match="needs a key"):
        Condition(EMPTY, Scope.KEY)


@pytest.mark.parametrize("dlsn", [DLSN(1, 2, 0), DLSN(7, 0, 0), DLSN(0, 3, 0)])
@pytest.mark.parametrize("scope", Scope)
def test_a_segment_of_other_keys_or_of_another_stream_is_refused(dlsn: DLSN, scope: Scope) -> None:
    with pytest.raises(InvalidRequestError, match="another stream, another key range"):
        holds(Condition(SN(dlsn=dlsn), scope, KEY), EMPTY, 20, LOW)


def test_places_grow_across_the_scale() -> None:
    assert place_of(OLD, LOW) == 9
    assert place_of(sn(0), LOW) == 10
    assert place_of(SN(sequence_id=3), LOW) == 3
    assert place_of(SN(transaction_id=3), LOW) is None


def test_a_course_whose_base_is_not_known_yet_has_to_be_waited_for() -> None:
    unfinished = WHOLE.with_records(WHOLE.plan_scale([0], [KeyRange(0.0, 1.0)], 1))
    with pytest.raises(UnavailableError, match="not known yet"):
        KeyLineage(unfinished, 0.0)


@given(histories(), st.floats(0.0, 1.0, exclude_max=True))
def test_a_course_is_the_lineage_of_one_position_newest_first(history: EpochHistory, position: float) -> None:
    lineage = KeyLineage(history, position)
    along = list(dict.fromkeys(record.segment_at(position).id for record in history.records))
    assert [stage.segment for stage in lineage.stages] == along[::-1]
    assert lineage.stages[0].segment == lineage.active == history.active.segment_at(position).id
    assert lineage.stages[0].end is None
    bases = history.graph.sequence_bases
    for stage in lineage.stages:
        assert stage.base == bases[stage.segment] == lineage.base(stage.segment)
    for later, earlier in zip(lineage.stages, lineage.stages[1:], strict=False):
        assert earlier.end is not None
        assert later.base >= earlier.base + earlier.end
    others = set(history.segments()) - set(along)
    assert all(lineage.base(segment) is None for segment in others)


# Rounds -------------------------------------------------------------------------------------------------------------

FLAT = KeyLineage(WHOLE, 0.0)
KEYS = [b"a", b"b", b"c"]


def at(offset: int, transaction_id: int | None = None) -> SN:
    return SN(DLSN(0, 0, offset), transaction_id, offset)


@dataclass(frozen=True)
class Write:
    """A write as the model sees it; ``after`` is the place in the round of the write whose record it expects."""

    keys: tuple[bytes, ...]
    scope: Scope
    expected: SN
    after: int | None
    ids: tuple[int | None, ...] = ()
    rising: bool = False

    @property
    def all_ids(self) -> tuple[int | None, ...]:
        return self.ids or (None,) * len(self.keys)


def entry(write: Write) -> ConditionalWrite:
    condition = Condition(write.expected, write.scope, write.keys[0])
    return ConditionalWrite(condition, FLAT, write.keys, write.all_ids, write.after, write.rising)


def fits(round_builder: Sequence[ConditionalWrite], item: ConditionalWrite) -> bool:
    round_ = RoundBuilder()
    for mate in round_builder:
        round_.add(mate)
    return round_.fits(item)


def one_by_one(log: Sequence[bytes | None], writes: Sequence[Write], last_id: int | None = None) -> list[bool]:
    """Carry out writes one after the other on a log of keys (None: no record), each at the end; obvious and slow."""
    present = list(log)
    ends: list[int | None] = []
    answers = []
    for write in writes:
        expected = write.expected
        if write.after is not None:
            end = ends[write.after]
            if end is None:
                answers.append(False)
                ends.append(None)
                present.extend([None] * len(write.keys))
                continue
            expected = at(end, writes[write.after].all_ids[-1])
        records = [place for place, key in enumerate(present) if key is not None]
        if write.scope is Scope.KEY:
            records = [place for place in records if present[place] == write.keys[0]]
        if expected == ANY:
            good = True
        elif expected == EMPTY:
            good = not records
        else:
            assert expected.sequence_id is not None
            place = expected.sequence_id
            if write.scope is Scope.SEGMENT:
                good = bool(records) and records[-1] == place
            else:
                good = place < len(present) and all(record <= place for record in records)
        given_ids = [number for number in write.all_ids if number is not None]
        if write.rising:
            along = given_ids if last_id is None else [last_id, *given_ids]
            good = good and along == sorted(along)
        if good and given_ids:
            last_id = given_ids[-1]
        answers.append(good)
        ends.append(len(present) + len(write.keys) - 1 if good else None)
        present.extend(write.keys if good else [None] * len(write.keys))
    return answers


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[bytes | None], list[Write]]:
    """A log, and writes that go together."""
    log = draw(st.lists(st.sampled_from([None, *KEYS]), max_size=6))
    writes: list[Write] = []
    for _ in range(draw(st.integers(1, 5))):
        after = draw(st.none() | st.integers(0, len(writes) - 1)) if writes else None
        key = draw(st.sampled_from(KEYS))
        scope = draw(st.sampled_from(Scope))
        extra = draw(st.integers(0, 2))
        keys = (key,) * (extra + 1) if scope is Scope.KEY else (key, *draw(st.tuples(*[st.sampled_from(KEYS)] * extra)))
        expected = draw(st.just(EMPTY) | st.just(ANY) | st.builds(at, st.integers(0, len(log) + 2)))
        ids = draw(st.just(()) | st.tuples(*[st.none() | st.integers(0, 3)] * len(keys)))
        write = Write(keys, scope, expected, after, ids, draw(st.booleans()))
        if fits([entry(item) for item in writes], entry(write)):
            writes.append(write)
    return log, writes


def decided(
    log: list[bytes | None], writes: list[Write], last_id: int | None = None
) -> list[Accepted | Refused | NonMonotonicId]:
    places = [place for place, key in enumerate(log) if key is not None]
    last = at(places[-1]) if places else EMPTY
    key_lasts = {key: next((at(place) for place in reversed(places) if log[place] == key), EMPTY) for key in KEYS}
    return judge([entry(write) for write in writes], len(log), last, key_lasts, dict.fromkeys(range(9), last_id))


LAST_IDS = st.none() | st.integers(0, 3)


@given(rounds(), LAST_IDS)
def test_a_round_decides_as_writes_one_by_one_would_be(
    given_round: tuple[list[bytes | None], list[Write]], last_id: int | None
) -> None:
    log, writes = given_round
    verdicts = decided(log, writes, last_id)
    assert [isinstance(verdict, Accepted) for verdict in verdicts] == one_by_one(log, writes, last_id)
    offset = len(log)
    for write, verdict in zip(writes, verdicts, strict=True):
        if isinstance(verdict, Accepted):
            assert verdict.sns == tuple(at(offset + place, number) for place, number in enumerate(write.all_ids))
        offset += len(write.keys)


@given(rounds(), LAST_IDS)
def test_what_is_refused_rests_on_what_is_committed(
    given_round: tuple[list[bytes | None], list[Write]], last_id: int | None
) -> None:
    """A refusal must not depend on writes of the same round: the round is aborted because of it."""
    log, writes = given_round
    places = [place for place, key in enumerate(log) if key is not None]
    for write, verdict in zip(writes, decided(log, writes, last_id), strict=True):
        if isinstance(verdict, Refused):
            assert verdict.actual in (EMPTY, *map(at, places))
        if not isinstance(verdict, Accepted) and write.after is None and (write.expected.sequence_id or 0) < len(log):
            assert decided(log, [write], last_id) == [verdict]


FALLING_TABLE = [
    # ids of the records, the last one before, what falls
    ((), None, None),
    ((5,), None, None),
    ((5,), 4, None),
    ((5,), 5, None),
    ((5,), 6, (5, 6)),
    ((None,), 6, None),
    ((5, 6), None, None),
    ((5, None, 4), None, (4, 5)),
    ((5, None, 4), 3, (4, 5)),
    ((2, 1), 3, (2, 3)),
]


@pytest.mark.parametrize(("ids", "before", "falls"), FALLING_TABLE)
@pytest.mark.parametrize("rising", [True, False])
def test_transaction_ids_that_fall(
    ids: tuple[int | None, ...], before: int | None, falls: tuple[int, int] | None, rising: bool
) -> None:
    write = Write((b"a",) * max(len(ids), 1), Scope.SEGMENT, ANY, None, ids, rising)
    [verdict] = decided([], [write], before)
    assert verdict == NonMonotonicId(*falls) if rising and falls else isinstance(verdict, Accepted)


def test_another_record_than_expected_is_told_before_an_id_that_falls() -> None:
    [verdict] = decided([b"a"], [Write((b"a",), Scope.SEGMENT, EMPTY, None, (1,), rising=True)], 2)
    assert verdict == Refused(EMPTY, at(0))


def test_a_chain_and_a_run_need_one_check() -> None:
    first = Write((b"a",), Scope.SEGMENT, at(0), None)
    chain = [first, *(Write((b"a",), Scope.SEGMENT, ANY, place) for place in range(3))]
    entries = [entry(write) for write in chain]
    assert all(fits(entries[:place], item) for place, item in enumerate(entries))
    assert all(isinstance(verdict, Accepted) for verdict in judge(entries, 2, at(0), {}))
    assert all(isinstance(verdict, Refused) for verdict in judge(entries, 2, at(1), {}))


def test_two_writes_that_expect_the_same_do_not_go_together() -> None:
    one, other = (entry(Write((key,), Scope.SEGMENT, at(0), None)) for key in (b"a", b"b"))
    assert not fits([one], other)


def test_writes_of_different_keys_go_together_with_scope_key() -> None:
    one, other = (entry(Write((key,), Scope.KEY, at(0), None)) for key in (b"a", b"b"))
    assert fits([one], other)
    assert not fits([one, other], one)
