"""Kafka's rules of duplicates and gaps, and the notes that carry them on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge_gateway.protocol.sequences import (
    KEPT,
    SEQUENCE_MAX,
    SeenBatches,
    Sequences,
    SequenceVerdict,
    Taken,
    decode,
    encode,
    following,
    judge,
    last_of,
    note_of,
)

WHERE = ("orders", 3)
FIVE = SeenBatches(2, tuple(Taken(first, first + 9) for first in range(10, 60, 10)))


@pytest.mark.parametrize(
    ("seen", "epoch", "first", "records", "verdict"),
    [
        (None, 0, 0, 1, SequenceVerdict.NEW),
        (None, 7, 4711, 3, SequenceVerdict.NEW),  # transactions v1 number on, and nothing is known
        (SeenBatches(0), 0, 5, 1, SequenceVerdict.NEW),
        (FIVE, 2, 60, 1, SequenceVerdict.NEW),
        (FIVE, 2, 60, 500, SequenceVerdict.NEW),
        (FIVE, 2, 50, 10, SequenceVerdict.DUPLICATE),
        (FIVE, 2, 10, 10, SequenceVerdict.DUPLICATE),
        (FIVE, 2, 0, 10, SequenceVerdict.GAP),  # six batches ago
        (FIVE, 2, 50, 9, SequenceVerdict.GAP),  # no batch ever ended there
        (FIVE, 2, 50, 11, SequenceVerdict.GAP),
        (FIVE, 2, 55, 5, SequenceVerdict.GAP),
        (FIVE, 2, 61, 1, SequenceVerdict.GAP),
        (FIVE, 3, 0, 1, SequenceVerdict.NEW),  # another epoch begins with 0
        (FIVE, 3, 60, 1, SequenceVerdict.GAP),
        (SeenBatches(0, (Taken(SEQUENCE_MAX - 1, SEQUENCE_MAX),)), 0, 0, 4, SequenceVerdict.NEW),  # numbers go round
        (SeenBatches(0, (Taken(SEQUENCE_MAX, 1),)), 0, SEQUENCE_MAX, 3, SequenceVerdict.DUPLICATE),
        (SeenBatches(0, (Taken(SEQUENCE_MAX, 1),)), 0, 2, 3, SequenceVerdict.NEW),
    ],
)
def test_the_rules(seen: SeenBatches | None, epoch: int, first: int, records: int, verdict: SequenceVerdict) -> None:
    assert judge(seen, epoch, first, records, v2=False) is verdict


@pytest.mark.parametrize("seen", [None, SeenBatches(7)])
def test_with_transactions_v2_nothing_is_missing_before_the_first_batch(seen: SeenBatches | None) -> None:
    assert judge(seen, 7, 0, 3, v2=True) is SequenceVerdict.NEW
    assert judge(seen, 7, 3, 3, v2=True) is SequenceVerdict.GAP, "the batch before it is on its way again"


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.integers(0, SEQUENCE_MAX),
    st.data(),
)
def test_each_batch_counts_once_however_often_it_comes(sizes: list[int], start: int, data: st.DataObject) -> None:
    """A slow, obvious model: of everything sent, in order, each batch is new once."""
    sent: list[tuple[int, int]] = []
    first = start
    for size in sizes:
        sent.append((first, size))
        first = following(last_of(first, size))
    sequences, taken, notes = Sequences(), [], dict[str, bytes]()
    for at, (first, size) in enumerate(sent):
        for again in data.draw(st.lists(st.integers(max(0, at - KEPT), at - 1), max_size=3)) if at else []:
            assert sequences.judge(WHERE, 0, *sent[again], v2=False) is SequenceVerdict.DUPLICATE
        if data.draw(st.booleans()):  # another gateway goes on from the notes
            sequences = Sequences.restored(notes)
        assert sequences.judge(WHERE, 0, first, size, v2=False) is SequenceVerdict.NEW
        sequences.take(WHERE, 0, first, size)
        notes |= sequences.notes()
        taken.append((first, size))
    assert taken == sent


SEEN = st.builds(
    SeenBatches,
    st.integers(0, 32_766),
    st.lists(st.builds(Taken, *[st.integers(0, SEQUENCE_MAX)] * 2), max_size=KEPT).map(tuple),
)


@given(SEEN)
def test_a_note_is_read_as_it_was_written(seen: SeenBatches) -> None:
    assert decode(encode(seen)) == seen


@given(st.dictionaries(st.tuples(st.text(max_size=20), st.integers(0, 99)), SEEN, max_size=5))
def test_all_notes_are_restored(seen: dict[tuple[str, int], SeenBatches]) -> None:
    notes = {**Sequences(dict(seen), set(seen)).notes(), "o-group": b"not ours"}
    assert Sequences.restored(notes).seen == seen


def test_notes_tell_only_what_is_fresh() -> None:
    sequences = Sequences({("a", 0): FIVE})
    assert sequences.notes() == {}
    sequences.take(("b/c", 1), 0, 0, 2)
    assert sequences.notes() == {note_of(("b/c", 1)): encode(SeenBatches(0, (Taken(0, 1),)))}
    assert sequences.notes() == {}


@pytest.mark.parametrize("value", [b"", b"\0", b"\0\0\0", encode(FIVE) + bytes(8), b"\0\0" + b"\xff" * 8])
def test_other_bytes_are_no_note(value: bytes) -> None:
    with pytest.raises(ValueError, match="note"):
        decode(value)
