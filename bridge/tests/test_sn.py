"""SNs: text and binary form, matching, refusals; bases of sequence ids along the lineage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import dlsns, histories, sns
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import (
    ANY,
    DLSN,
    EMPTY,
    LONG_MAX,
    SN,
    SN_BYTES,
    Token,
    unpack_transaction_id,
)
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange


@given(sns)
def test_text_and_bytes_round_trip(sn: SN) -> None:
    assert SN.parse(str(sn)) == sn
    assert SN.from_bytes(bytes(sn)) == sn
    assert len(bytes(sn)) == SN_BYTES


def test_texts() -> None:
    assert str(ANY) == "any"
    assert str(EMPTY) == "empty"
    assert str(SN(DLSN(4, 0, 17, 3), 42, 1017)) == "dlsn=4-0:17:3,txid=42,seq=1017"
    assert SN.parse("4-0:17:3") == SN(dlsn=DLSN(4, 0, 17, 3))
    assert SN.parse("seq=5,txid=1") == SN(transaction_id=1, sequence_id=5)


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (
            SN.parse,
            [
                *("", "none", "4-0:17", "empty,seq=1"),
                *("seq=", "seq=-1", "seq=+1", "seq=1,seq=2", "seq=1,", "seq=٣", f"seq={LONG_MAX + 1}", "txid=1_0"),
                *("dlsn=", "dlsn=4-0:17:3,dlsn=4-0:17:3", "dlsn=-1-0:0:0", f"dlsn=0-0:{LONG_MAX + 1}:0"),
            ],
        ),
        (SN.from_bytes, [b"", bytes(SN_BYTES - 1), bytes(SN_BYTES + 1), b"\xff" + bytes(40), bytes(40) + b"\1"]),
        (unpack_transaction_id, [b"", bytes(7), bytes(9), b"\xff" * 8]),
        (Token.parse, ["", "//", "00/-/empty/-", f"{'0' * 32}/x/empty/-", f"{'0' * 32}/-/empty/-/-"]),
        (lambda text: Token(text, None, SN()), [b"abc"]),
    ],
)
def test_what_is_none_of_them_is_refused(parse: Callable[[Any], object], values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError):
            parse(value)


def test_the_text_of_a_number_alone_is_refused_with_the_way_to_say_either() -> None:
    with pytest.raises(InvalidRequestError, match=r"seq=5 .* txid=5 "):
        SN.parse("5")


@pytest.mark.parametrize(
    "members",
    [
        {"transaction_id": -1},
        {"sequence_id": -1},
        {"sequence_id": LONG_MAX + 1},
        {"dlsn": DLSN(0, 0, -1)},
        {"dlsn": DLSN(-1, 0, 0)},
        {"dlsn": DLSN(0, 0, 0, -1)},
        {"sequence_id": 1, "empty": True},
    ],
)
def test_negative_and_contradictory_members_are_refused(members: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        SN(**members)  # type: ignore[arg-type]


def test_whatever_is_there_matches_any_also_if_there_is_nothing() -> None:
    assert ANY.matches(EMPTY)


def test_bases_of_the_first_epoch_are_zero_and_successors_go_on_after_the_longest_predecessor() -> None:
    history = EpochHistory.create([KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], 0)
    scaled = history.plan_scale([0, 1], [KeyRange(0.0, 1.0)], 1)
    history = history.with_records(scaled)
    history = history.with_sealed_ends(1, {SegmentId.of(0, 0): 10, SegmentId.of(1, 0): 25})
    assert history.graph.sequence_bases == {SegmentId.of(0, 0): 0, SegmentId.of(1, 0): 0, SegmentId.of(2, 1): 25}


@given(histories(), st.floats(0.0, 1.0, exclude_max=True), st.data())
def test_sequence_ids_grow_along_the_lineage_of_a_key(
    history: EpochHistory, position: float, data: st.DataObject
) -> None:
    bases = history.graph.sequence_bases
    assert bases.keys() == history.segments().keys()
    ids: list[int] = []
    for segment in dict.fromkeys(record.segment_at(position).id for record in history.records):
        end = history.sealed_end(segment)
        offsets = range(data.draw(st.integers(0, 3)) if end is None else end)
        ids.extend(bases[segment] + offset for offset in offsets)
    assert ids == sorted(set(ids))


def test_a_segment_whose_predecessor_has_no_known_end_has_no_base_yet() -> None:
    history = EpochHistory.create([KeyRange(0.0, 1.0)], 0)
    scaled = history.plan_scale([0], [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], 1)
    assert history.with_records(scaled).graph.sequence_bases.keys() == {SegmentId.of(0, 0)}


# Tokens: text that reads back, and refusals.


tokens = st.builds(
    Token, st.binary(min_size=16, max_size=16), st.none() | st.binary(max_size=20), sns, st.none() | dlsns
)


@given(tokens)
def test_a_token_reads_back_from_its_text(token: Token) -> None:
    assert Token.parse(str(token)) == token


def test_text_of_a_token() -> None:
    token = Token(bytes(16), b"acct-7", SN(sequence_id=3), DLSN(0, 1, 4))
    assert str(token) == "00000000000000000000000000000000/616363742d37/seq=3/0-1:4:0"
