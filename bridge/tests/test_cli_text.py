"""What the command line reads and prints: option values, tables, ages, lines of files, records as lines."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import BinaryIO

import click
import pytest
from confluent_kafka import Message
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.tests.refusals import raises_code
from bridge.tests.strategies import histories
from rollbridge.base.attribution import RECORD_HEADER, pack_record_header
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import DLSN
from rollbridge.base.text import printable
from rollbridge.cli import records as values
from rollbridge.cli.common import CliContext, ExitCode, counted, duration, moment, table
from rollbridge.cli.produce import LINE_BYTES_MAX, lines, split
from rollbridge.cli.records import FIELDS, json_line, line_of
from rollbridge.cli.stream import description_text, divide, history_table, stream_table
from rollbridge.client.admin import StreamDescription
from rollbridge.consumer.records import Origin, Record, record_of
from rollbridge.errors import InvalidRequestError, LocalEnvironmentError, RecordTooLargeError
from rollbridge.metadata.changes import TOPIC_CLOSED, TOPIC_DELETED, TOPIC_RECREATED, StreamFault
from rollbridge.metadata.picture import StreamPicture
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, check_partition, even_ranges
from rollbridge.stream.names import GroupName, StreamName


class Full(io.StringIO):
    """An output on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_result_that_standard_output_does_not_take_stands_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(LocalEnvironmentError, match="carried out: transaction 17 is committed") as refused:
        CliContext().answer({}, "transaction 17 is committed")
    assert refused.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (values.duration, "90s", timedelta(seconds=90)),
        (values.duration, "15m", timedelta(seconds=900)),
        (values.duration, "36h", timedelta(seconds=129_600)),
        (values.duration, "2d", timedelta(seconds=172_800)),
        (values.duration, "1w", timedelta(seconds=604_800)),
        (values.duration, "1d12h", timedelta(seconds=129_600)),
        (values.duration, "1.5s", timedelta(seconds=1.5)),
        (values.duration, "500ms", timedelta(milliseconds=500)),  # and not minutes and seconds
        (values.duration, "5m500ms", timedelta(minutes=5, milliseconds=500)),
        (values.size, "0", 0),
        (values.size, "1000", 1_000),
        (values.size, "1kB", 1_000),
        (values.size, "1.5KiB", 1_536),
        (values.size, "10 GiB", 10 * 1024**3),
        (values.size, "2tb", 2 * 1000**4),
        (values.key_range, "0:0.5", (0.0, 0.5)),
        (values.key_range, "0.25:1", (0.25, 1.0)),
        (values.key_range, "1e-3:.5", (0.001, 0.5)),
        (values.segment_numbers, "3", (3,)),
        (values.segment_numbers, "0,3,4", (0, 3, 4)),
        (values.escaped, r"a\tb", "a\tb"),
        (values.escaped, r"\\t", r"\t"),
        (values.escaped, r"\x41\0", "A\0"),
        (values.escaped, "{key}", "{key}"),
        (values.escaped, r"\r\n", "\r\n"),
        (values.header, "trace=a=b", ("trace", b"a=b")),
        (values.header, "empty=", ("empty", b"")),
    ],
)
def test_a_value_is_read(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts", "words"),
    [
        (values.size, ["", "GiB", "-1", "1 G", "1e3", "10GiBs"], "is not a size"),
        (
            values.duration,
            ["", "90", "s", "-1s", "1 h", "1y", "1d2", "1e3s", "9" * 20 + "w"],
            r"is not a duration|is too long",
        ),
        (values.key_range, ["", "0.5", "0-0.5", "a:b", "0:", ":", "0:0.5:1"], "use LOW:HIGH"),
        (values.segment_numbers, ["", "a", "1,", "1;2"], "segment numbers"),
        (values.escaped, [r"\q", "a\\", r"\x4", r"\xzz"], "is not an escape"),
        (values.header, ["", "=x", "name"], "use NAME=VALUE"),
    ],
)
def test_what_is_no_such_value_is_refused(parse: Callable[[str], object], texts: list[str], words: str) -> None:
    for text in texts:
        with pytest.raises(click.BadParameter, match=words):
            parse(text)


@given(st.text())
def test_escaped_backslashes_stand_for_themselves(text: str) -> None:
    assert values.escaped(text.replace("\\", "\\\\")) == text


def test_a_table_is_padded_by_what_a_terminal_shows() -> None:
    rows = [("a", "1"), ("東京", "10,000")]
    assert table(("NAME", "COUNT"), rows, right=("COUNT",)) == "NAME   COUNT\na          1\n東京  10,000"


def test_what_could_steer_a_terminal_is_replaced() -> None:
    assert printable("a\x1b[31m\n\x07b\u202e") == "a\ufffd[31m\ufffd\ufffdb\ufffd"
    assert "\x1b" not in table(("LABEL",), [("\x1b[2J",)])


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0.0s"),
        (300, "0.3s"),
        (12_345, "12s"),
        (65_000, "1m 5s"),
        (3_600_000, "1h 0m"),
        (100_000_000, "1d 3h"),
        (-65_000, "-1m 5s"),
    ],
)
def test_ages(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


def test_moments_and_counts() -> None:
    assert moment(1_388_534_400_000) == "2014-01-01 00:00:00Z"
    assert [counted(count, "record") for count in (0, 1, 336_776)] == ["0 records", "1 record", "336,776 records"]


@given(st.lists(st.binary().filter(lambda line: b"\n" not in line), min_size=1))
def test_lines_are_what_stands_between_line_feeds(written: list[bytes]) -> None:
    assert list(lines(io.BytesIO(b"\n".join(written) + b"\n"))) == written
    if written[-1]:
        assert list(lines(io.BytesIO(b"\n".join(written)))) == written


def test_no_lines() -> None:
    assert list(lines(io.BytesIO(b""))) == []


class Endless(io.RawIOBase):
    """A file without a line end; counts what is taken from it."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 < size <= LINE_BYTES_MAX + 1
        self.taken += size
        return b"x" * size


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory() -> None:
    source: BinaryIO = Endless()  # type: ignore[assignment]
    with pytest.raises(RecordTooLargeError, match="line 1 is longer than 16777216 bytes"):
        list(lines(source))


def test_keys_end_at_the_first_separator() -> None:
    source = io.BytesIO(b"a:1\nb:2:3\n:4\nc:\n")
    assert list(split(source, b":")) == [(b"a", b"1"), (b"b", b"2:3"), (b"", b"4"), (b"c", b"")]
    assert list(split(io.BytesIO(b"a:1\n"), None)) == [(None, b"a:1")]


def test_a_line_without_the_separator_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"line 2 has no b':': b'oops'; no line was committed"):
        list(split(io.BytesIO(b"a:1\noops\n"), b":"))


T = TransactionId.of(1, 42)


def delivered(**fields: object) -> Record:
    message = Message(
        **{
            "topic": "s.t.segment-0.epoch-4",
            "partition": 0,
            "offset": 17,
            "key": b"k",
            "value": b"v",
            "headers": [("a", b"1"), (RECORD_HEADER, pack_record_header(T, 3)), ("b", None)],
            "timestamp": (1, 1_388_534_400_000),
            **fields,
        }  # type: ignore[arg-type]
    )
    return record_of(message, Origin(lambda _: EpochHistory.create(even_ranges(1), 0)))


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{value}", b"v"),
        ("{key}\t{value}", b"k\tv"),
        ("{dlsn} {offset} {segment}", b"4-0:17:3 17 0.#epoch.4"),
        ("{topic}@{timestamp_ms}", b"s.t.segment-0.epoch-4@1388534400000"),
        ("{topic}@{timestamp}", b"s.t.segment-0.epoch-4@1388534400000"),
        ("{transaction}/{local_sequence}", f"{T}/3".encode()),
        ("{headers}", b"a=1,b="),
        ("{{{key}}}", b"{k}"),
        ("", b""),
    ],
)
def test_formats(template: str, line: bytes) -> None:
    assert line_of(template, "null")(delivered()) == line + b"\n"


def test_every_field_can_be_printed() -> None:
    printed = {field: line_of(f"{{{field}}}", "-")(delivered()) for field in FIELDS}
    assert {field for field, line in printed.items() if line == b"\n"} == {"commit_position"}


def test_formats_and_json_call_the_fields_the_same() -> None:
    assert set(json.loads(json_line(delivered()))) - set(FIELDS) == {"sequence_id", "transaction_id"}, "parts of the SN"
    assert set(FIELDS) - set(json.loads(json_line(delivered()))) == {"sn"}


def test_nulls_and_bytes_that_are_no_text() -> None:
    line = line_of("{key}={value}", "NULL")
    assert line(delivered(key=None, value=None)) == b"NULL=NULL\n"
    assert line(delivered(key=b"\xff", value=b"")) == b"\xff=\n"


@pytest.mark.parametrize(
    "template", ["{nope}", "{key.__class__}", "{key[0]}", "{key!r}", "{key:>9}", "{}", "{0}", "{", "}"]
)
def test_a_format_that_names_anything_else_is_refused(template: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a field of a record|is not a format"):
        line_of(template, "")


def test_a_record_as_json() -> None:
    assert json.loads(json_line(delivered())) == {
        "dlsn": str(DLSN(4, 0, 17, 3)),
        "segment": "0.#epoch.4",
        "topic": "s.t.segment-0.epoch-4",
        "offset": 17,
        "timestamp_ms": 1_388_534_400_000,
        "transaction": str(T),
        "local_sequence": 3,
        "sequence_id": None,
        "transaction_id": None,
        "commit_position": None,
        "committed": True,
        "key": "k",
        "value": "v",
        "headers": [{"name": "a", "value": "1"}, {"name": "b", "value": None}],
    }


def test_json_of_a_plain_record_with_bytes_that_are_no_text() -> None:
    document = json.loads(json_line(delivered(headers=None, key=b"\xff\x00", value=None)))
    assert (document["transaction"], document["local_sequence"], document["headers"]) == (None, None, [])
    assert document["key_base64"] == "/wA="
    assert "key" not in document
    assert document["value"] is None
    assert document["dlsn"] == "4-0:17:0"


def test_a_foreign_header_of_our_name_makes_no_transaction() -> None:
    assert json.loads(json_line(delivered(headers=[(RECORD_HEADER, b"short")])))["transaction"] is None


@given(histories(), st.data())
def test_dividing_segments_gives_ranges_that_a_scale_accepts(history: EpochHistory, data: st.DataObject) -> None:
    active = history.active.segments
    low = data.draw(st.integers(0, len(active) - 1))
    high = data.draw(st.integers(low + 1, len(active)))
    count = data.draw(st.integers(1, 5))
    assume(active[high - 1].range.high - active[low].range.low > 1e-9)
    seal = tuple(item.id.number for item in active[low:high])
    ranges = divide(history.active, seal, count)
    assert len(ranges) == count
    check_partition(ranges, [item.range for item in active[low:high]])
    assert len(history.plan_scale(seal, ranges, 0).segments) == len(active) - (high - low) + count


def test_what_is_too_narrow_to_be_divided() -> None:
    thin = EpochHistory.create([KeyRange(0.0, 5e-324), KeyRange(5e-324, 1.0)], 0)
    with raises_code("invalid-ranges", match="is too narrow to be cut into 2 ranges"):
        divide(thin.active, (0,), 2)


FOUR = EpochHistory.create(even_ranges(4), 0)


@pytest.mark.parametrize(
    ("seal", "words"), [((0, 2), "do not lie side by side"), ((0, 9), "active are 0, 1, 2, 3"), ((9,), "not all of")]
)
def test_what_can_not_be_divided(seal: tuple[int, ...], words: str) -> None:
    with raises_code("invalid-ranges", match=words):
        divide(FOUR.active, seal, 2)


def test_a_history_as_a_table() -> None:
    history = EpochHistory.create(even_ranges(2), 0)
    history = history.with_records(history.plan_scale([0], [KeyRange(0.0, 0.5)], 1000))
    history = history.with_sealed_ends(1, {SegmentId.of(0, 0): 1234})
    history = history.with_records(*history.plan_rolling(0, 2000))
    cells = [
        [cell.strip() for cell in re.split(r" {2,}", line.strip())] for line in history_table(history).splitlines()
    ]
    assert cells == [
        ["EPOCH", "REFERS TO", "CAUSE", "PLANNED", "BEGAN", "ENDED"],
        ["0", "itself", "create", "1970-01-01 00:00:00Z", "0.#epoch.0 [0, 0.5)"],
        ["1.#epoch.0 [0.5, 1)"],
        ["1", "itself", "scale", "1970-01-01 00:00:01Z", "2.#epoch.1 [0, 0.5)", "0.#epoch.0 at 1,234"],
        ["2", "0", "rolling-transactions", "1970-01-01 00:00:02Z", "0.#epoch.2 [0, 0.5)", "2.#epoch.1 is being sealed"],
        ["1.#epoch.2 [0.5, 1)", "1.#epoch.0 is being sealed"],
        ["3", "1", "rolling-active", "1970-01-01 00:00:02Z", "2.#epoch.3 [0, 0.5)", "0.#epoch.2 is being sealed"],
        ["1.#epoch.3 [0.5, 1)", "1.#epoch.2 is being sealed"],
    ]


OWN = StreamConfig(name=StreamName("s", "own"), group=GroupName("s"), created_ms=0, buffer_topic_id="")
ADOPTED = replace(OWN, name=StreamName("s", "orders"), topic="orders", partitioner="murmur2", partitions=1)


def description(config: StreamConfig, fault: str = "", *, left: bool = False) -> str:
    history = EpochHistory.create(even_ranges(1), 0)
    if left:
        history = history.with_records(history.plan_scale([0], even_ranges(2), 0))
    found = StreamDescription(
        config=config,
        leader=None,
        epochs=1,
        first_epoch=0,
        active=history.active,
        reference_epoch=history.active.epoch,
        open_transactions=(),
        fault=StreamFault("it has 6 partitions", fault, "orders", 0) if fault else None,
        partitions={},
    )
    return description_text(found)


def test_a_stream_with_a_fault_is_in_error_wherever_it_is_shown() -> None:
    fault = StreamFault("its buffer is gone", "buffer-lost", "b", 0)
    _, own, adopted = stream_table([StreamPicture(OWN, error=fault), StreamPicture(ADOPTED)]).splitlines()
    assert "error buffer-lost" in own
    assert "active" not in own
    assert "active" in adopted
    assert "\nstate    error topic-deleted\n" in description(OWN, fault=TOPIC_DELETED)
    assert "\nstate    active\n" in description(OWN)


def test_an_adopted_topic_shows_where_streams_do() -> None:
    assert "TOPIC" not in stream_table([StreamPicture(OWN)])
    head, own, adopted = stream_table([StreamPicture(OWN), StreamPicture(ADOPTED)]).splitlines()
    assert head.endswith("ADOPTED TOPIC")
    assert own.split()[-1] == "-"
    assert adopted.split()[-1] == "orders"
    assert "\ntopic " not in description(OWN)
    assert "orders, 1 partition; keys by murmur2\n" in description(ADOPTED)
    assert "except what the topic's own settings let Kafka delete" in description(ADOPTED)
    assert "keys by murmur2; sealed, the stream has left it" in description(ADOPTED, left=True)
    assert "topic's own settings" not in description(ADOPTED, left=True)
    assert "its commits end as aborted: it has 6" in description(ADOPTED, TOPIC_DELETED)
    assert "its transactions wait: it has 6" in description(ADOPTED, TOPIC_CLOSED)


@pytest.mark.parametrize(
    ("code", "effect"),
    [
        (TOPIC_DELETED, "its commits end as aborted"),
        (TOPIC_RECREATED, "its commits end as aborted"),
        (TOPIC_CLOSED, "its transactions wait"),
        ("buffer-lost", "it is not led"),
    ],
)
def test_status_and_description_say_the_same_of_a_fault(code: str, effect: str) -> None:
    told = StreamPicture(ADOPTED, error=StreamFault("it has 6 partitions", code, "orders", 0)).fault
    assert told is not None
    assert told.what == f"{effect}: it has 6 partitions"
    assert told.what in description(ADOPTED, code)
