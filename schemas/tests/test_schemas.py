"""The schema files, their codecs, and the golden files that pin the encodings."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbridge_schemas
from rollbridge_schemas import NAMES, VERSION_FIELD, SchemaError, codec
from schemas.tests.avro import encode, encode_long
from schemas.tests.golden_files import GOLDEN


def schema_of(name: str) -> dict[str, Any]:
    text = resources.files(rollbridge_schemas).joinpath(f"{name}.avsc").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def golden_datum(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert loaded.pop(VERSION_FIELD) == codec(name).version
    return loaded


def golden_binary(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text(encoding="ascii"))


def records(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record type in a schema, with the way to it."""
    match schema:
        case {"type": "record", "fields": fields}:
            yield path, schema
            for field in fields:
                yield from records(field["type"], f"{path}.{field['name']}")
        case {"type": "array", "items": items}:
            yield from records(items, path)
        case list():
            for branch in schema:
                yield from records(branch, path)


def test_every_schema_file_is_listed() -> None:
    files = {item.name for item in resources.files(rollbridge_schemas).iterdir() if item.name.endswith(".avsc")}
    assert files == {f"{name}.avsc" for name in NAMES}
    assert list(NAMES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_record_and_every_field_has_a_doc(name: str) -> None:
    for path, record in records(schema_of(name), name):
        assert record["doc"].endswith("."), path
        assert record["namespace"] == "rollbridge"
        for field in record["fields"]:
            assert field["doc"].strip().endswith("."), f"{path}.{field['name']}"


def test_a_type_name_stands_for_one_type() -> None:
    seen: dict[str, str] = {}
    for name in NAMES:
        for path, record in records(schema_of(name), name):
            known = seen.setdefault(record["name"], json.dumps(record))
            assert known == json.dumps(record), path


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_record_shows_every_field(name: str) -> None:
    def check(schema: Any, value: Any, path: str) -> None:
        match schema:
            case {"type": "record", "fields": fields}:
                assert set(value) == {field["name"] for field in fields}, path
                for field in fields:
                    check(field["type"], value[field["name"]], f"{path}.{field['name']}")
            case {"type": "array", "items": items}:
                assert value, f"{path} is empty"
                for item in value:
                    check(items, item, path)
            case list():
                assert value is not None, path
                check(next(branch for branch in schema if branch != "null"), value, path)

    check(schema_of(name), golden_datum(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_golden_records_are_written_as_they_always_were(name: str) -> None:
    datum, binary = golden_datum(name), golden_binary(name)
    assert binary == encode(schema_of(name), datum), "the file does not follow Avro's specification"
    assert codec(name).encode(datum) == binary
    assert codec(name).to_json(datum) == (GOLDEN / f"{name}.json").read_bytes().rstrip(b"\n")


@pytest.mark.parametrize("name", NAMES)
def test_golden_records_are_read_as_they_always_were(name: str) -> None:
    assert codec(name).decode(golden_binary(name)) == golden_datum(name)
    assert codec(name).from_json((GOLDEN / f"{name}.json").read_bytes()) == golden_datum(name)


EARLIER = sorted(file.stem for file in (GOLDEN / "earlier").glob("*.hex"))
"""Golden records as earlier versions wrote them, ``NAME.N``."""


@pytest.mark.parametrize("file", EARLIER)
def test_what_an_earlier_version_wrote_is_read_with_the_defaults_of_what_was_added(file: str) -> None:
    name = file.partition(".")[0]
    datum = json.loads((GOLDEN / "earlier" / f"{file}.json").read_text(encoding="utf-8"))
    defaults = {field["name"]: field["default"] for field in schema_of(name)["fields"] if field.get("added")}
    raw = bytes.fromhex((GOLDEN / "earlier" / f"{file}.hex").read_text(encoding="ascii"))
    assert codec(name).decode(raw) == {**defaults, **datum}
    assert set(datum) < set(defaults | datum), "a version that lacks nothing is no earlier one"


@pytest.mark.parametrize("name", NAMES)
def test_added_fields_stand_at_the_end_and_earlier_records_without_them_are_kept(name: str) -> None:
    added = [bool(field.get("added")) for field in schema_of(name)["fields"]]
    assert added == sorted(added), "a record of an earlier version would end in the middle"
    versions = [file for file in EARLIER if file.partition(".")[0] == name]
    assert len(versions) == sum(added), "one golden record for each version before"


def ends_of_earlier_versions(name: str) -> set[int]:
    """Where the golden record would end if fields that were added later were missing."""
    fields, datum = schema_of(name)["fields"], golden_datum(name)
    sizes = [len(encode(field["type"], datum[field["name"]])) for field in fields]
    return {sum(sizes[:count]) for count, field in enumerate(fields) if field.get("added")}


def values_of(schema: Any) -> st.SearchStrategy[Any]:
    match schema:
        case list():
            return st.one_of([values_of(branch) for branch in schema])
        case {"type": "record", "fields": fields}:
            return st.fixed_dictionaries({field["name"]: values_of(field["type"]) for field in fields})
        case {"type": "array", "items": items}:
            return st.lists(values_of(items), max_size=3)
        case {"type": "enum", "symbols": symbols}:
            return st.sampled_from(symbols)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "null": st.none(),
        "boolean": st.booleans(),
        "int": st.integers(-(1 << 31), (1 << 31) - 1),
        "long": st.integers(-(1 << 63), (1 << 63) - 1),
        "double": st.floats(allow_nan=False),
        "string": st.text(max_size=20),
    }
    return simple[schema]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_record_round_trips_in_both_encodings(name: str, data: st.DataObject) -> None:
    datum = data.draw(values_of(schema_of(name)))
    before = copy.deepcopy(datum)
    assert codec(name).encode(datum) == encode(schema_of(name), datum)
    assert codec(name).decode(codec(name).encode(datum)) == datum
    assert codec(name).from_json(codec(name).to_json(datum)) == datum
    assert datum == before, "the caller's record is left alone"


@pytest.mark.parametrize("name", NAMES)
def test_fields_with_defaults_may_be_missing_and_the_others_may_not(name: str) -> None:
    for field in schema_of(name)["fields"]:
        datum = golden_datum(name)
        del datum[field["name"]]
        raw = json.dumps(datum).encode()
        if "default" in field:
            expected = {**datum, field["name"]: field["default"]}
            assert codec(name).from_json(raw) == expected
            assert codec(name).decode(codec(name).encode(datum)) == expected
            written = json.loads(codec(name).to_json(datum))
            assert written.pop(VERSION_FIELD) == (1 if "since" in field else codec(name).version)
            assert written == (datum if field.get("sparse") else expected)
        else:
            with pytest.raises(SchemaError, match=f"lacks '{field['name']}'"):
                codec(name).from_json(raw)
            with pytest.raises(SchemaError, match="not a record of schema"):
                codec(name).encode(datum)


def test_a_default_is_a_fresh_value_each_time() -> None:
    first = codec("request").from_json(b'{"kind": "k", "stream": "s", "created_ms": 0}')
    first["seal"].append(1)
    assert codec("request").from_json(b'{"kind": "k", "stream": "s", "created_ms": 0}')["seal"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_not_in_the_schema_is_dropped_on_reading_and_refused_on_writing(name: str) -> None:
    datum = {**golden_datum(name), "field_of_2030": 1}
    assert codec(name).from_json(json.dumps(datum).encode()) == golden_datum(name)
    with pytest.raises(SchemaError, match="has no field 'field_of_2030'"):
        codec(name).to_json(datum)


def test_a_missing_field_of_a_nested_record_is_named_with_its_place() -> None:
    with pytest.raises(SchemaError, match=r"schema scaling\.ranges lacks 'high'"):
        codec("scaling").from_json(json.dumps({**golden_datum("scaling"), "ranges": [{"low": 0}]}).encode())


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(name: str) -> None:
    whole = golden_binary(name)
    for size in set(range(len(whole))) - ends_of_earlier_versions(name):
        # A cut one is never taken for an earlier one with something behind it.
        with pytest.raises(SchemaError, match=f"{size} bytes are not a record of schema {name}"):
            codec(name).decode(whole[:size])
    text = (GOLDEN / f"{name}.json").read_bytes().rstrip(b"\n")
    for size in range(len(text)):
        with pytest.raises(SchemaError):
            codec(name).from_json(text[:size])


@pytest.mark.parametrize("name", NAMES)
@given(added=st.binary(min_size=1, max_size=40))
def test_what_a_newer_version_adds_at_the_end_is_passed_over(name: str, added: bytes) -> None:
    assert codec(name).decode(golden_binary(name) + added) == golden_datum(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ahead", [1, 2, 1 << 40])
def test_a_version_that_is_not_known_is_refused_and_says_what_to_do(name: str, ahead: int) -> None:
    known = codec(name).version
    raw = json.dumps({"field_of_2030": 1, VERSION_FIELD: known + ahead}).encode()
    said = rf"schema {name} has version {known + ahead}, .* knows {known} at most: upgrade"
    with pytest.raises(SchemaError, match=said, check=lambda fault: fault.is_newer):
        codec(name).from_json(raw)


def test_a_record_has_the_version_of_its_newest_field() -> None:
    datum = golden_datum("stream")
    assert json.loads(codec("stream").to_json(datum))[VERSION_FIELD] == 2
    assert json.loads(codec("stream").to_json({**datum, "buffer": ""}))[VERSION_FIELD] == 1


@pytest.mark.parametrize("version", ["0", "-1", "1.0", "true", '"1"', "null", "[]"])
def test_a_version_is_a_number_from_1_on(version: str) -> None:
    raw = b'{"version": %s, "kind": "x", "stream": "", "created_ms": 1}' % version.encode()
    with pytest.raises(SchemaError, match="its version is"):
        codec("request").from_json(raw)


@pytest.mark.parametrize("name", NAMES)
def test_every_changed_byte_gives_a_record_of_the_schema_or_an_error(name: str) -> None:
    whole = golden_binary(name)
    for place in range(len(whole)):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xFF, whole[place] ^ 0x40):
            raw = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                datum = codec(name).decode(raw)
            except SchemaError:
                continue
            assert set(datum) == set(golden_datum(name))


@pytest.mark.parametrize("name", NAMES)
@given(raw=st.binary(max_size=300))
def test_foreign_bytes_give_a_record_of_the_schema_or_an_error(name: str, raw: bytes) -> None:
    for read in (codec(name).decode, codec(name).from_json):
        try:
            datum = read(raw)
        except SchemaError:
            continue
        assert set(datum) == {field["name"] for field in schema_of(name)["fields"]}


HUGE = [encode_long(count) for count in (1 << 31, 1 << 40, (1 << 63) - 1, -1, -(1 << 40), -(1 << 63))]
TAKEN = {encode_long(-1), encode_long(-(1 << 63))}
"""Of a negative count a reader of Avro may take the size that follows, and its items; the decoder counts the lowest
number of all as none. What follows the zeros here is behind the record then."""


@pytest.mark.parametrize("count", HUGE, ids=lambda raw: raw.hex())
@pytest.mark.parametrize(
    ("name", "front"),
    [
        ("abort_frame", b""),
        ("commit_frame", b""),
        ("begin_frame", b"\0\0\0\0"),
        ("begin_frame", b""),
        ("committing", b""),
        ("scaling", b"\0\0\0"),
        ("control_record", b"\2\0\0\0\0\0\0\0\0"),
    ],
)
def test_a_huge_or_negative_count_takes_no_memory(name: str, front: bytes, count: bytes) -> None:
    codec(name)
    tracemalloc.start()
    try:
        with suppress(SchemaError) if count in TAKEN else pytest.raises(SchemaError):
            codec(name).decode(front + count + b"\0" * 64)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"kind": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"created_ms": ' + b"9" * 100_000 + b"}",
        b'{"created_ms": 1e999}',
        b'"' + b"x" * 1_000_000,
        b"\x00\xff",
        b"null",
        b"[]",
        b"3",
        b"NaN",
        b'{"a": 1, "a": 2}',
    ],
    ids=lambda raw: repr(raw[:14]),
)
@pytest.mark.parametrize("name", NAMES)
def test_deep_long_or_foreign_json_is_refused(name: str, raw: bytes) -> None:
    with pytest.raises(SchemaError):
        codec(name).from_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kind": "\\ud800", "stream": "", "created_ms": 1}',
        b'{"kind": "x\\uDFFF", "stream": "", "created_ms": 1}',
        b'{"\\udc00": 1, "kind": "x", "stream": "", "created_ms": 1}',
        b'{"kind": "\xed\xa0\x80", "stream": "", "created_ms": 1}',
        '{"kind": "x", "stream": "", "created_ms": 1}'.encode("utf-16"),
        '{"kind": "x", "stream": "", "created_ms": 1}'.encode("utf-8-sig"),
    ],
)
def test_text_that_could_not_be_written_again_is_refused(raw: bytes) -> None:
    with pytest.raises(SchemaError):
        codec("request").from_json(raw)
    assert (
        codec("request").from_json(b'{"kind": "\\ud83d\\ude00", "stream": "", "created_ms": 1}')["kind"] == "\U0001f600"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("epoch", {"epoch": True}),
        ("epoch", {"epoch": 1 << 31}),
        ("epoch", {"epoch": 1.5}),
        ("epoch", {"created_ms": 1 << 63}),
        ("epoch", {"segments": {}}),
        ("epoch", {"segments": [[]]}),
        ("epoch", {"segments": None}),
        ("epoch", {"sealed_ends": "x"}),
        ("stream", {"state": "SLEEPING"}),
        ("stream", {"name": None}),
        ("answer", {"ok": 1}),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, change: dict[str, Any]) -> None:
    datum = {**golden_datum(name), **change}
    with pytest.raises(SchemaError, match=f"a record does not fit schema {name}"):
        codec(name).from_json(json.dumps(datum).encode())
    with pytest.raises(SchemaError):
        codec(name).to_json(datum)


def test_an_unknown_schema_is_no_file() -> None:
    with pytest.raises(FileNotFoundError):
        codec("nonsense")


def test_a_sparse_field_is_written_only_if_it_says_something() -> None:
    datum = golden_datum("stream")
    assert json.loads(codec("stream").to_json(datum))["topic"] == "orders"
    assert "topic" not in json.loads(codec("stream").to_json({**datum, "topic": ""}))
    earlier = (GOLDEN / "earlier" / "stream.5.json").read_bytes().rstrip(b"\n")
    again = codec("stream").to_json(codec("stream").from_json(earlier))
    assert again == b'{"version": 1, ' + earlier[1:], "byte for byte, but for the version, which it did not have"
