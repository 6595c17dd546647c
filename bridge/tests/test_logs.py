"""The lines of a program's log: as JSON, in files that are moved or turned over, and what is wrong with settings."""

from __future__ import annotations

import ast
import json
import logging
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.deadlines import Deadline
from rollbridge.base.logs import (
    JSON,
    MARK,
    JsonFormatter,
    Limiter,
    LogOutput,
    event_text,
    handler_of,
    limited_child,
    log_defect,
    take_all,
)
from rollbridge.errors import ConfigError

PLAIN = "%(levelname)s %(message)s"


def record(message: str, *arguments: object, fault: BaseException | None = None) -> logging.LogRecord:
    about = None if fault is None else (type(fault), fault, fault.__traceback__)
    made = logging.LogRecord("rollbridge.x", logging.WARNING, "f.py", 1, message, arguments, about)
    made.created, made.msecs, made.threadName = 1_700_000_000.5, 500.0, "leader"
    return made


def line_of(made: logging.LogRecord) -> dict[str, Any]:
    text = JsonFormatter().format(made)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_thread_and_message() -> None:
    assert line_of(record("%s waits for %d", "it", 3)) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "WARNING",
        "logger": "rollbridge.x",
        "thread": "leader",
        "message": "it waits for 3",
    }


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("of all things")
    except ValueError as fault:
        found = line_of(record("it ended", fault=fault))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: of all things")


@given(st.text())
def test_every_message_is_one_line_and_comes_back_as_it_was(text: str) -> None:
    encoded = JsonFormatter().format(record("%s", text))
    assert len(encoded.splitlines()) == 1
    assert json.loads(encoded)["message"] == text


def test_nothing_that_a_stranger_has_written_begins_a_line_or_steers_a_terminal(tmp_path: Path) -> None:
    hostile = "a\n2026-01-01 00:00:00 INFO forged\r\x1b[2J\x9b2J\u202e\u2066\u2028b\x85"
    path = tmp_path / "coordinator.log"
    handler = handler_of(LogOutput(file=str(path)), "%(levelname)s %(threadName)s %(message)s")
    made = record("id %s", hostile, fault=ValueError(hostile))
    made.threadName, made.stack_info = hostile, f"Stack\n  {hostile}"
    handler.handle(made)
    handler.close()
    first, *others = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert first.startswith("WARNING a\ufffd2026")
    assert all(other.startswith("  ") for other in others)
    assert len(others) == 5, "two of the exception, three of the stack"
    assert all(line.isprintable() for line in (first, *others))


def test_a_file_that_was_moved_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.log"
    handler = handler_of(LogOutput(file=str(path), format=JSON), PLAIN)
    handler.handle(record("first"))
    path.rename(tmp_path / "coordinator.log.1")
    handler.handle(record("second"))
    handler.close()
    assert json.loads((tmp_path / "coordinator.log.1").read_text())["message"] == "first"
    assert json.loads(path.read_text())["message"] == "second"


def test_options_win_over_the_environment() -> None:
    environ = {"ROLLBRIDGE_LOG_FORMAT": "json", "ROLLBRIDGE_LOG_FILE": "a.log"}
    assert LogOutput.of({}, environ) == LogOutput(format="json", file="a.log")
    assert LogOutput.of({"format": "text"}, environ).format == "text"


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="log_format: 'xml' is not one of text, json"):
        LogOutput.of({"format": "xml"}, {})


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        handler_of(LogOutput(file=str(tmp_path / "no-such-directory" / "x.log")), PLAIN)


def test_what_librdkafka_says_goes_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    handler = handler_of(LogOutput(file=str(path), format=JSON), PLAIN)
    log = logging.getLogger("reads")
    log.addHandler(handler)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
    consumer = Consumer({"bootstrap.servers": nowhere, "group.id": "g"}, logger=limited_child(log))
    try:
        deadline = Deadline(60)
        while not path.read_text() and not deadline.passed():
            consumer.poll(0.1)
    finally:
        consumer.close()
        log.removeHandler(handler)
        handler.close()
    first = json.loads(path.read_text().splitlines()[0])
    assert first["logger"] == "reads.librdkafka"
    assert nowhere in first["message"]


@pytest.mark.logs_defects
def test_warnings_and_the_ends_of_threads_are_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", sys.excepthook)
    log = logging.getLogger("ends")
    take_all(log)
    try:
        ended = threading.Thread(target=lambda: 1 / 0, name="worker")
        ended.start()
        ended.join()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            logging.captureWarnings(False)
            logging.captureWarnings(True)
            warnings.warn("an old friend", UserWarning, stacklevel=1)
    finally:
        logging.captureWarnings(False)
    told = [item.getMessage() for item in caplog.records]
    assert told[0] == "defect: thread.ended thread=worker"
    assert caplog.records[0].exc_info is not None
    assert "an old friend" in told[1]


# Defects are logged in one way, and a test during which one is logged fails.


logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
WITH_STACK = {
    "bridge/rollbridge/base/deadlines.py": "callbacks of the application",
    "bridge/rollbridge/base/logs.py": "defects",
    "bridge/rollbridge/observe/http_service.py": "connections, at the lowest level",
}
"""Modules that log stacks, and of what."""


def logs_stacks(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr == "exception" and ast.unparse(node.func.value) == "logger")
            or any(keyword.arg == "exc_info" for keyword in node.keywords)
        )
        for node in ast.walk(tree)
    )


def test_there_is_one_way_to_log_a_defect() -> None:
    packages = ("bridge/rollbridge", "coordinator/rollbridge_coordinator", "gateway/rollbridge_gateway")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if logs_stacks(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == set(WITH_STACK)


@pytest.mark.logs_defects
def test_a_defect_is_logged_with_its_stack_and_fails_other_tests(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("100 % ours")
    except RuntimeError:
        log_defect(logger, "it is at 100 %")
    log_defect(logger, "%s has ended", "it", fault=ValueError("later"))
    first, second = caplog.records
    assert (first.getMessage(), second.getMessage()) == (f"{MARK}it is at 100 %", f"{MARK}it has ended")
    assert first.exc_info is not None
    assert second.exc_info is not None
    assert "100 % ours" in str(first.exc_info[1])
    assert "later" in str(second.exc_info[1])
    assert first.filename == Path(__file__).name


# What is logged while a server is away: one line for each cause, minute and client, and how many were left out.


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


@pytest.mark.parametrize(
    ("message", "args", "text"),
    [
        ("a.b id=%s n=%d", ("x", 7), "a.b id=x n=7"),
        ("a.b id=%s", ("evil code=NONE",), 'a.b id="evil code=NONE"'),
        ('a.b reason="%s"', ("plain",), "a.b reason=plain"),
        ('a.b reason="%s" n=%d', ('say "no"\nERROR', 7), r'a.b reason="say \"no\"\nERROR" n=7'),
        ("a.b action=%r", ("do it",), 'a.b action="do it"'),
        ("a.b id=%s: it is %s (%d%%)", ("x:", "a b", 7), 'a.b id="x:": it is a b (7%)'),
        ("a.b id=%s", ("",), 'a.b id=""'),
        ("a.b at=%s:%d", ("h", 9), "a.b at=h:9"),
        ("a.b took_s=%.1f done=100%%", (1.25,), "a.b took_s=1.2 done=100%"),
        ("no arguments: 100%", (), "no arguments: 100%"),
        ("%s said", ("a b",), "a b said"),
        ("%s said n=%s", (("a",), (1, 2)), "('a',) said n=\"(1, 2)\""),
    ],
)
def test_a_value_that_is_not_one_plain_word_is_quoted(message: str, args: tuple[object, ...], text: str) -> None:
    assert event_text(message, args) == text
