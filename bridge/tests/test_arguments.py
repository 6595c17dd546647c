"""What public calls make of wrong arguments."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy
import pytest

import rollbridge
from rollbridge.base.arguments import (
    CheckedParameters,
    as_bytes,
    as_headers,
    as_record,
    as_timestamp,
    as_transaction_id,
    check_fields,
    checked,
    checked_call,
    from_fault_on,
)
from rollbridge.base.deadlines import Timeout, as_seconds, as_timedelta
from rollbridge.base.ids import TransactionId
from rollbridge.errors import InvalidRequestError

FOR_EACH_RECORD = {"write", "put_batch"}
"""They check by themselves; see test_client_refusals of the integration tests."""
INTERNAL = {"exception", "ask_again", "cut_older", "is_prompt", "lane", "wait_and_tell", "settle"}
"""Nobody's, but ``exception``, which passes its time-out on to ``result``."""
VALUES = {"SN", "DLSN", "Batch", "GroupName", "StreamName", "Message", "Record", "SegmentId"}
"""Objects that rollbridge makes, and those that keep to confluent-kafka's own checks."""


@checked(but=["left_alone"], leave=["own"])
class Example:
    def text(self, name: str, *rest: str, kind: Literal["a", "b"] = "a", **others: Any) -> object:
        return name, rest, kind, others

    def wait(self, timeout: Timeout = None, count: int = 1, share: float = 0.0) -> object:
        return timeout, count, share

    def data(self, key: bytes | None, notes: Mapping[str, bytes] | None = None) -> object:
        return key, notes

    def many(self, ids: Iterable[TransactionId | str], call: Callable[[], object] | None = None) -> object:
        return ids, call

    def span(self, length: timedelta, places: Sequence[tuple[str, int]] = ()) -> object:
        return length, places

    def says_it_better(self, own: int) -> object:
        return own

    def flag(self, wanted: bool) -> object:
        return (wanted,)

    def left_alone(self, name: str) -> object:
        return name


def refusal(call: Callable[..., object], *args: object, **options: object) -> str:
    with pytest.raises(TypeError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_what_fits_is_passed_on() -> None:
    example = Example()
    assert example.text("n", "r", kind="b", other=1) == ("n", ("r",), "b", {"other": 1})
    assert example.wait(3, 2, 1) == (3, 2, 1)
    assert example.wait(timedelta(1), count=True.__int__()) == (timedelta(1), 1, 0.0)
    assert example.data(None, {"a": b"x"}) == (None, {"a": b"x"})
    assert example.many(["x", TransactionId(1)], dict)
    assert example.many(iter("x"))
    assert example.span(timedelta(1), [("a", 1)])
    assert example.left_alone(7) == 7  # type: ignore[arg-type]
    assert example.says_it_better("x") == "x"  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [bytearray(b"k"), memoryview(b"k")])
def test_buffers_are_taken_as_bytes(buffer: Any) -> None:
    assert Example().data(buffer) == (b"k", None)
    assert Example().data(key=buffer) == (b"k", None)
    assert as_bytes("key", buffer) == b"k"


def test_what_means_the_same_is_taken() -> None:
    example: Any = Example()
    number, share = numpy.int64(3), numpy.float32(0.5)
    assert example.wait(number, number, share) == (3.0, 3, 0.5)
    assert [type(item) for item in example.wait(number, number, Decimal("0.5"))] == [float, int, float]
    assert example.wait(Fraction(1, 2), True.__index__()) == (0.5, 1, 0.0)
    assert example.flag(0) == (False,)
    assert example.flag(numpy.int32(1)) == (True,)
    assert example.data(array("B", [107]), {"a": bytearray(b"x")}) == (b"k", {"a": bytearray(b"x")})
    assert example.span(timedelta(1), {"a": 1}.items())[1] == [("a", 1)]
    assert example.span(timedelta(1), (pair for pair in [["a", 1]]))[1] == [["a", 1]]
    assert refusal(example.span, timedelta(1), {"a": 1}).startswith("places must be Sequence of tuple, not dict of str")
    assert "not ndarray" in refusal(example.text, numpy.zeros(2))
    assert as_bytes("value", numpy.frombuffer(b"ab", dtype="u1")) == b"ab"
    assert as_timestamp(number) == 3
    assert as_transaction_id(numpy.uint8(7)) == 7


def test_what_does_not_fit_is_named() -> None:
    example: Any = Example()
    assert refusal(example.text, 7) == "name must be str, not int; nothing was done"
    assert refusal(example.text, "n", b"r") == "rest must be str, not bytes; nothing was done"
    assert refusal(example.text, "n", kind=1) == "kind must be 'a' or 'b', not int; nothing was done"
    assert refusal(example.wait, "3") == (
        "timeout must be seconds as a number or a timedelta or None, not str; nothing was done"
    )
    assert refusal(example.wait, True).endswith("not bool; nothing was done")
    assert refusal(example.wait, 1, 1.0) == "count must be int, not float; nothing was done"
    assert refusal(example.wait, 1, 1, "x") == "share must be a number, not str; nothing was done"
    assert refusal(example.data, "k") == "key must be bytes or None, not str: use key.encode(); nothing was done"
    assert refusal(example.data, None, {"a": 1}).startswith("notes must be Mapping of str to bytes or None, not dict")
    assert refusal(example.many, "x").startswith("ids must be Iterable of TransactionId or str, not str")
    assert refusal(example.many, [1]) == (
        "ids must be Iterable of TransactionId or str, not list of int; nothing was done"
    )
    assert refusal(example.many, ["x"], 3) == "call must be callable or None, not int; nothing was done"
    assert refusal(example.span, 3) == "length must be timedelta, not int; nothing was done"


def test_options_are_checked_with_their_types() -> None:
    assert refusal(lambda: rollbridge.ClientOptions(linger_s="1")) == (  # type: ignore[arg-type]
        "linger_s must be a number, not str; nothing was done"
    )
    assert refusal(lambda: rollbridge.WriterOptions(batch_bytes=1.5)).startswith(  # type: ignore[arg-type]
        "batch_bytes must be int"
    )
    check_fields(rollbridge.WriterOptions(linger_s=1))


def public_methods() -> Iterator[tuple[str, Callable[..., object]]]:
    for name in rollbridge.__all__:
        owner = getattr(rollbridge, name)
        if not inspect.isclass(owner) or name in VALUES:
            continue
        for method, function in inspect.getmembers(owner, inspect.isfunction):
            if not method.startswith("_") and method not in FOR_EACH_RECORD | INTERNAL:
                yield f"{name}.{method}", function
    yield "connect", rollbridge.connect


METHODS = {name: function for name, function in public_methods() if len(inspect.signature(function).parameters) > 1}


@pytest.mark.parametrize("name", METHODS)
def test_every_public_call_checks_its_arguments(name: str) -> None:
    rules = CheckedParameters(inspect.unwrap(METHODS[name]), leave=["expected", "key", "sn", "start"])
    assert inspect.unwrap(METHODS[name]) is not METHODS[name], "it looks at nothing"
    for rule in (*rules.named.values(), *filter(None, [rules.rest])):
        if rule.limits:
            assert " must be " in refusal(rule.take, object())


def test_records_are_pairs_of_bytes() -> None:
    assert as_record([bytearray(b"k"), None]) == (b"k", None)
    assert refusal(as_record, 1) == "a record must be a pair of key and value, not 1; it was not written"
    assert refusal(as_record, (b"k", b"v", b"x")).startswith("a record must be a pair of key and value, not (b'k'")
    assert refusal(as_record, (b"k", "v")) == (
        "value must be bytes or None, not str: use value.encode(); the record was not written"
    )


def test_a_fault_that_is_not_the_records_is_raised_again() -> None:
    fault = TypeError("a defect")
    assert refusal(lambda: list(from_fault_on([(b"k", b"v")], fault))) == "a defect"
    assert list(from_fault_on([(bytearray(b"k"), b"v"), (b"x", None)], fault)) == [(b"k", b"v"), (b"x", None)]


@pytest.mark.parametrize(
    "wrong", [7, "text", {"a": b"x"}, ["ab"], [("a",)], [(1, b"x")], [("a", "x")], [("a", b"x", 1)]], ids=repr
)
def test_headers_are_pairs_of_a_name_and_a_value(wrong: object) -> None:
    assert "header" in refusal(as_headers, wrong)
    assert as_headers([("a", None), ["b", bytearray(b"x")]]) == [("a", None), ("b", b"x")]


def test_times_are_whole_milliseconds_since_1970() -> None:
    assert as_timestamp(0) == 0
    assert refusal(as_timestamp, 1.5).startswith("timestamp must be int (milliseconds since 1970) or None, not float")
    for wrong, said in ((-1, "before 1970"), (1 << 63, "more than 64 bits")):
        with pytest.raises(InvalidRequestError, match=said):
            as_timestamp(wrong)


def test_no_number_is_no_time() -> None:
    with pytest.raises(InvalidRequestError, match="must be positive or 0, not nan"):
        as_seconds(float("nan"), 1.0)


def test_durations_are_seconds_or_timedeltas() -> None:
    assert as_timedelta(90) == as_timedelta(timedelta(seconds=90)) == timedelta(seconds=90)
    assert as_timedelta(float("inf")) == timedelta.max


def test_a_function_keeps_its_name_and_signature() -> None:
    @checked_call
    def example(name: str) -> str:
        """Do it."""
        return name

    assert (example.__name__, example.__doc__) == ("example", "Do it.")
    assert str(inspect.signature(example)) == "(name: 'str') -> 'str'"
