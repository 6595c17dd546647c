"""Which errors are definite refusals of an effect, and how they reach its procedure."""

from __future__ import annotations

import pytest

from rollbridge.base.effects import AnyEffect
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailableError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge.kafka.errors import (
    AppendRefusedError,
    AppendUnknownError,
    AuthenticationError,
    NotAuthorizedError,
    TopicNotFoundError,
)
from rollbridge.kafka.records import BatchBuilder
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.frame_reader import FrameFeed
from rollbridge_coordinator.core.interpreter import refusal

A, B = ("a", 0), ("b", 0)
SEAL = fx.Seal((("t", 0),))


@pytest.mark.parametrize(
    ("fault", "code", "topic"),
    [
        (AppendRefusedError("no", topic="t", kafka_error="INVALID_RECORD"), "INVALID_RECORD", "t"),
        (NotAuthorizedError("no", resource="topic t"), "not-authorized", "t"),
        (NotAuthorizedError("no", resource="cluster"), "not-authorized", None),
        (InvalidRequestError("no"), "invalid-request", None),
        (TopicNotFoundError("no", topic="t"), "topic-not-found", "t"),
        (ConflictError("no", resource="topic t", code="topic-mismatch"), "topic-mismatch", "t"),
        (UnavailableError("slow", resource="topic t", code="seal-timeout"), "seal-timeout", "t"),
    ],
)
def test_what_will_never_work_is_a_refusal(fault: RollbridgeError, code: str, topic: str | None) -> None:
    refused = refusal(SEAL, fault, None)
    assert refused is not None
    assert (refused.effect, refused.code, refused.topic, refused.places) == (SEAL, code, topic, ())


@pytest.mark.parametrize(
    "fault",
    [
        AppendUnknownError("lost", transactional_id="x"),
        FencedError("gone", transactional_id="x", kafka_error="PRODUCER_FENCED"),
        KafkaUnavailableError("away"),
        AuthenticationError("who are you?"),
        CorruptDataError("of the commit log"),
        ValueError("a defect"),
    ],
)
def test_what_leaves_a_doubt_is_none(fault: Exception) -> None:
    assert refusal(SEAL, fault, None) is None


@pytest.mark.parametrize("effect", [fx.ReadLate(A, 0, 9, 9), fx.FindLate(A, 0, {B: 0}), fx.Look(())])
def test_what_a_stranger_has_written_so_that_nobody_can_read_it_ends_no_term(effect: AnyEffect) -> None:
    refused = refusal(effect, CorruptDataError("a batch of topic t does not parse"), None)
    assert refused is not None
    assert refused.code == "corrupt-data"


def frame(value: bytes, count: int = 1) -> FrameRef:
    builder = BatchBuilder(1 << 20)
    for _ in range(count):
        builder.append(0, b"k", value)
    batch = builder.build()
    return FrameRef(("buffer", 0), 0, PieceKey(0, 0, 0), 0, count, len(batch), batch)


def test_a_refused_batch_names_the_frames_that_were_joined_in_it() -> None:
    items = [(A, frame(b"1")), (B, frame(b"2")), (A, frame(b"3")), (A, frame(bytes(40_000)))]
    feed = FrameFeed(items, lambda _: b"")
    topics = [topic for topic, _, _ in feed.batches()]
    assert topics == ["a", "a", "b"]
    named = []
    for batch in range(4):
        fault = AppendRefusedError("no", topic="a", kafka_error="INVALID_RECORD", batch=batch)
        refused = refusal(fx.MergeFrames(items), fault, feed)
        assert refused is not None
        named.append(refused.places)
    assert named == [(0, 2), (3,), (1,), ()]


def test_a_frame_that_is_no_batch_is_named_as_well() -> None:
    items = [(A, frame(b"1")), (B, frame(b"2"))]
    broken = items[1][1].batch
    assert broken is not None
    items[1][1].batch = broken[:20]
    feed = FrameFeed(items, lambda _: b"")
    with pytest.raises(CorruptDataError) as fault:
        list(feed.batches())
    refused = refusal(fx.MergeFrames(items), fault.value, feed)
    assert refused is not None
    assert (refused.topic, refused.places, refused.code) == ("b", (1,), "corrupt-data")
