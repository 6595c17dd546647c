"""Whatever stands in a buffer, a leader can plan what comes next: who may write there may write anything."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from coordinator.tests.makers import Bench
from rollbridge.base.ids import COUNTER_MAX, SEGMENT_NUMBER_MAX, TransactionId
from rollbridge.base.sn import EMPTY
from rollbridge.buffer.frames import (
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    PieceKey,
    encode_abort,
    encode_extend,
    pack_bundle,
)
from rollbridge.buffer.savepoints import SavepointFrame
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import EpochTransition, Roll, StreamFault
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge.stream.group_offsets import GroupOffsets, OffsetDetails
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.plan import (
    DirectRound,
    Incomplete,
    Refusal,
    RollingRound,
    conditions_of,
    merge_fault,
    plan_round,
    still_fitting,
)
from rollbridge_coordinator.commit.waiting import waiting
from rollbridge_coordinator.core.waits import PendingChange, Wait

ORDERS, PAYMENTS, REFUNDS = "sales/orders", "sales/payments", "sales/refunds"
STREAMS = (ORDERS, PAYMENTS, REFUNDS, "sales/none", "other/orders")
places = st.integers(0, 4) | st.sampled_from([999, SEGMENT_NUMBER_MAX])
segments = st.integers(0, 3) | st.just(SEGMENT_NUMBER_MAX)
counts = st.integers(0, 3) | st.just((1 << 32) - 1)
identifiers = st.builds(
    TransactionId.of, st.integers(0, 3), st.integers(1, 4) | st.sampled_from([1 << 64, COUNTER_MAX])
)
pieces = st.builds(PieceKey, st.integers(0, 2), places, segments)
conditions = st.builds(
    StreamCondition, places, st.builds(Condition, st.just(EMPTY), st.sampled_from(Scope), st.just(b"k"))
)
offsets = st.builds(
    GroupOffsets,
    st.sampled_from(["billing", "x" * 1_000]),
    st.dictionaries(
        st.tuples(st.sampled_from(["t", "sales.orders"]), st.integers(0, 2)), st.integers(0, 9), min_size=1
    ),
).flatmap(
    lambda item: st.builds(
        replace,
        st.just(item),
        details=st.dictionaries(
            st.sampled_from(sorted(item.offsets)), st.builds(OffsetDetails, st.integers(-1, 9), st.text(max_size=5))
        ),
    )
)
begins = st.builds(
    BeginFrame,
    st.sampled_from(["c", "d"]),
    st.integers(0, 3),
    st.none() | st.just("label"),
    st.integers(-5, 1 << 60),
    st.dictionaries(st.sampled_from(STREAMS), st.integers(0, 3) | st.just(1 << 40), min_size=1),
)
manifests = st.builds(
    Manifest,
    st.dictionaries(pieces, counts, max_size=4),
    st.lists(offsets, max_size=2).map(tuple),
    st.lists(conditions, max_size=2).map(tuple),
)


Frame = tuple[str, FrameHeader, bytes]


@st.composite
def rubbish(draw: st.DrawFn) -> list[Frame]:
    """A frame that no client would send."""
    kind = draw(st.sampled_from(FrameKind))
    header = FrameHeader(
        kind,
        draw(identifiers).bytes,
        draw(st.integers(0, 2)),
        draw(segments),
        draw(st.integers(0, 3) | st.just((1 << 64) - 1)),
        draw(counts),
        draw(st.integers(0, 3) | st.just((1 << 32) - 1)),
    )
    inner = [(header._replace(kind=FrameKind.DATA).pack(), b"x"), (header.pack(), b"y")]
    values = {
        FrameKind.BEGIN: begins.map(BeginFrame.encode),
        FrameKind.COMMIT: manifests.map(Manifest.encode),
        FrameKind.ABORT: st.just(encode_abort("why")),
        FrameKind.BUNDLE: st.just(pack_bundle(inner)[1]),
        FrameKind.DATA: st.just(b"data"),
        FrameKind.EXTEND: st.integers(-(1 << 63), (1 << 63) - 1).map(encode_extend),
        FrameKind.SAVEPOINT: st.builds(
            SavepointFrame, st.integers(0, 3), st.booleans(), manifests, st.dictionaries(st.text(), st.binary())
        ).map(SavepointFrame.encode),
    }
    return [(draw(st.sampled_from(STREAMS[:3])), header, draw(values[kind] | st.binary(max_size=60)))]


@st.composite
def transactions(draw: st.DrawFn) -> list[Frame]:
    """One as a client sends it, but for what its commit names."""
    identifier = draw(identifiers).bytes
    names = draw(st.lists(st.sampled_from(STREAMS[:3]), min_size=1, max_size=2, unique=True))
    value = BeginFrame("c", 0, None, 60_000, {name: draw(st.integers(0, 1)) for name in names}).encode()
    sent = [(name, FrameHeader(FrameKind.BEGIN, identifier), value) for name in names]
    wrote = draw(st.dictionaries(st.builds(PieceKey, st.just(0), st.integers(0, 1), st.integers(0, 2)), st.just(1)))
    for piece in wrote:
        header = FrameHeader(FrameKind.DATA, identifier, 0, piece.segment, 0, 1)
        sent.append((names[piece.stream % len(names)], header, b"x" * 50))
    right = {piece: count for piece, count in wrote.items() if piece.stream < len(names)}
    asked = Manifest(right, (), draw(st.lists(conditions, max_size=1).map(tuple)))
    end = draw(st.just(asked) | manifests)
    return [*sent, (names[0], FrameHeader(FrameKind.COMMIT, identifier), end.encode())]


def bench() -> Bench:
    """A group in the middle of things: two streams were scaled, one is in an error state, or suspended."""
    made = Bench({ORDERS: 2, PAYMENTS: 1, REFUNDS: 1})
    made.scale(ORDERS, [0], [(0.0, 0.25), (0.25, 0.5)])
    made.scale(PAYMENTS, [0], [(0.0, 0.5), (0.5, 1.0)])
    return made


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.lists(transactions() | rubbish(), max_size=6), st.sampled_from(["sound", "fault", "suspended"]))
def test_what_is_forged_is_refused_or_waits_and_stops_no_leader(sent: list[list[Frame]], state: str) -> None:
    made = bench()
    group = made.group
    for name, header, value in chain.from_iterable(sent):
        made.feed(name, header, value)
    fault = StreamFault("no", "CODE", "", 1)
    if state == "fault":
        group.waits.faults.note(PAYMENTS, fault, 1)
    elif state == "suspended":
        group.waits.faults.suspend(PAYMENTS, fault)
        work = EpochTransition(StreamName.parse(PAYMENTS), "request-1", 2, (1,), (), 1, 1)
        group.waits.pending_changes["/x"] = PendingChange(work, Wait(1, 1, frozenset()))
    asked = [item for item in group.fold.decided.values() if item.state is State.COMMITTING]
    still_fitting(group, asked, (Roll(ORDERS, 0, 1, 2, 3, (0,)), Roll(PAYMENTS, 0, 1, 2, 3, (0,))))
    assert {item.transaction_id for item, _ in waiting(group)} <= {item.transaction_id for item in asked}
    for _ in range(3 * len(sent) + 3):  # each may be refused, taken out of a round, and settled
        planned = plan_round(group)
        event(f"{state}: {type(planned).__name__}")
        match planned:
            case Refusal(transaction, reason):
                group.fold.refuse(transaction.id, reason, 1)
            case DirectRound(chosen):
                for item in chosen:
                    assert item.state is not State.COMMITTING or merge_fault(group, item) is None
                    conditions_of(item)
                for item in chosen:
                    group.fold.settle(item.id)
            case RollingRound(chosen):
                assert still_fitting(group, chosen, planned.rolls)
                for item in chosen:
                    group.fold.settle(item.id, rolled=True)
            case Incomplete() | None:
                return
    raise AssertionError("there was always something to plan")
