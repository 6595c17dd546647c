"""What is logged while a server is away: one line for each cause, minute and client, and how many were left out."""

from __future__ import annotations

import logging

from rollbridge.kafka.ratelimit import Limiter

FAIL = (
    "FAIL [rdkafka#{client}] [thrd:localhost:{port}/1]: localhost:{port}/1: Connect to ipv4#127.0.0.1:{port} failed: "
    "Connection refused (after {after}ms in state CONNECT, {count} identical error(s) suppressed)"
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def said(limiter: Limiter, text: str, *arguments: object, level: int = logging.WARNING) -> str | None:
    record = logging.LogRecord("rollbridge.consumer.reader", level, "", 0, text, arguments, None)
    return record.getMessage() if limiter.filter(record) else None


def test_one_line_for_each_minute_with_the_number_of_those_left_out() -> None:
    clock = Clock()
    limiter = Limiter(60.0, clock)
    told = []
    for count in range(60 * 22 * 2):  # 22 a second for two minutes
        clock.now = 100.0 + count / 22
        line = said(limiter, FAIL.format(client="consumer-1", port=9092, after=count % 7, count=count))
        if line is not None:
            told.append(line)
    assert len(told) == 2
    assert "left out" not in told[0]
    assert f"({60 * 22 - 1} lines like this were left out in the last 60 s)" in told[1]


def test_what_the_library_says_of_repetitions_makes_no_new_cause() -> None:
    limiter = Limiter()
    first = FAIL.format(client="consumer-1", port=9092, after=0, count=1)
    assert said(limiter, first.replace(", 1 identical error(s) suppressed", "")) is not None
    assert said(limiter, first) is None


def test_clients_and_brokers_and_causes_are_told_apart() -> None:
    limiter = Limiter()
    lines = [
        FAIL.format(client="consumer-1", port=9092, after=0, count=0),
        FAIL.format(client="consumer-2", port=9092, after=0, count=0),
        FAIL.format(client="consumer-1", port=9093, after=0, count=0),
        "reading shop/orders: Broker: Not leader for partition",
        "reading shop/lines: Broker: Not leader for partition",
    ]
    assert [said(limiter, line) for line in lines] == lines
    assert [said(limiter, line) for line in lines] == [None] * 5


def test_figures_that_change_make_no_new_cause() -> None:
    limiter = Limiter()
    assert said(limiter, "offset %d of %s did not come within %.1f s", 7, "t", 1.5) is not None
    assert said(limiter, "offset %d of %s did not come within %.1f s", 8, "t", 2.25) is None
    assert said(limiter, "offset %d of %s did not come within %.1f s", 8, "t-2", 2.25) is not None


def test_what_is_said_for_debugging_is_not_limited() -> None:
    limiter = Limiter()
    assert [said(limiter, "x", level=logging.DEBUG) for _ in range(3)] == ["x"] * 3


def test_no_end_of_causes_takes_no_end_of_memory() -> None:
    limiter = Limiter()
    for number in range(5_000):
        assert said(limiter, f"topic t-{number} is away") is not None
    assert len(limiter._causes) <= 1_000
