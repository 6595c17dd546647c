"""Mutated requests, as far as they are decoded: an error of ours, and no more of anything than there are bytes."""

from __future__ import annotations

import os
import random
import tracemalloc

import pytest

from gateway.tests.mutations import captures, mutated
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api, Handling, room_of
from rollbridge_gateway.protocol.wire import MalformedError

EXAMPLES = int(os.environ.get("EXAMPLES", "20000"))


def decode(data: bytes) -> bool:
    """Do with a request what a gateway does before it serves it; return whether it is one."""
    try:
        head = wire.read_head(data)
        if room_of(head.key, head.version) in (None, Handling.RELAYED):
            return False
        if head.key == Api.PRODUCE:
            wire.peek_produce(data, head)
        elif head.key == Api.INIT_PRODUCER_ID:
            wire.is_transactional_start(data, head)
        wire.read_body(data, head)
    except MalformedError:
        return False
    return True


def play(seed: int, examples: int) -> int:
    """Decode mutated requests; return how many were sound all the same."""
    dice, known = random.Random(seed), [data[4:] for data in captures("topic")]
    assert all(map(decode, known))
    return sum(decode(mutated(b"0000" + dice.choice(known), dice)[4:]) for _ in range(examples))


def test_mutated_requests_are_refused_by_an_error_of_ours() -> None:
    assert 0 < play(1, EXAMPLES) < EXAMPLES


@pytest.mark.long
def test_millions_of_mutated_requests() -> None:
    for seed in range(2, 102):
        play(seed, EXAMPLES)


def test_no_request_takes_more_memory_for_what_it_claims() -> None:
    dice, known = random.Random(3), [data[4:] for data in captures("topic")]
    for data in known:
        decode(data)
    tracemalloc.start()
    try:
        for _ in range(2_000):
            data = mutated(b"0000" + dice.choice(known), dice)[4:]
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            decode(data)
            assert tracemalloc.get_traced_memory()[1] - before < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [data[4:] for data in captures("topic")], ids=lambda data: data[:4].hex())
def test_a_large_request_is_read_as_a_small_one(data: bytes) -> None:
    """Large ones come in memory that can be written to, which kio does not take."""
    head, large = wire.read_head(data), bytearray(data)
    assert wire.read_head(large) == head
    if room_of(head.key, head.version) is not Handling.RELAYED:
        assert wire.read_body(large, head) == wire.read_body(data, head)
    if head.key == Api.PRODUCE:
        assert wire.peek_produce(large, head) == wire.peek_produce(data, head)
