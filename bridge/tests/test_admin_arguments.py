"""Numbers that users give in admin requests: each is refused before anything is stored, however large it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from bridge.tests.admin_makers import ORDERS, Sent, make_admin
from rollbridge.cli.common import ExitCode
from rollbridge.cli.main import main
from rollbridge.client.admin import Admin
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.scaling import RATE_MAX, ScalingPolicy

NUMBERS = (1 << 31, 99_999_999_999, 1 << 63, 1 << 70, -99_999_999_999, -(1 << 70))


NEEDED: dict[str, dict[str, Any]] = {
    "create_stream": {"stream": str(ORDERS)},
    "adopt_topic": {"topic": "orders", "partitioner": "murmur2", "check": False},
    "scale": {"stream": str(ORDERS), "seal": [0], "ranges": [(0.0, 1.0)]},
    "update_stream": {"stream": str(ORDERS)},
    "update_group": {"group": "sales"},
}
"""Methods that take numbers, with what they cannot do without."""


def taking_numbers() -> Iterator[tuple[str, str, Any]]:
    """Yield each method of the public calls with a parameter that is a whole number, or several."""
    for method, member in vars(Admin).items():
        if method.startswith("_") or not inspect.isfunction(member):
            continue
        for name, parameter in inspect.signature(member).parameters.items():
            hint = str(parameter.annotation)
            if "Iterable[int]" in hint:
                yield method, name, lambda number: [number]
            elif hint.startswith("int"):
                yield method, name, lambda number: number


CASES = list(taking_numbers())


def test_all_methods_that_take_numbers_are_known() -> None:
    assert {method for method, *_ in CASES} == NEEDED.keys()
    assert ("create_stream", "record_bytes_max") in [case[:2] for case in CASES]
    with pytest.raises(Sent):
        make_admin().create_stream(str(ORDERS), record_bytes_max=1 << 20, buffer_partitions=3, replication_factor=-1)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("method", "name", "made"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_no_number_is_too_large_to_be_refused_in_words(method: str, name: str, made: Any, number: int) -> None:
    call = getattr(make_admin(), method)
    try:
        with pytest.raises(InvalidRequestError):
            call(**NEEDED[method] | {name: made(number)})
    except Sent:
        assert name == "retention_bytes", "64 bits"
        assert 0 < number < 1 << 63


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["events_per_second", "bytes_per_second", "min_segments", "max_segments"])
def test_no_number_of_a_policy_is_either(name: str, number: int) -> None:
    policy = ScalingPolicy(**({} if "per_second" in name else {"events_per_second": 1}) | {name: number})
    for call in (make_admin().create_stream, make_admin().update_stream):
        try:
            with pytest.raises(InvalidRequestError):
                call(str(ORDERS), scaling=policy)
        except Sent:
            assert 0 < number <= RATE_MAX


@pytest.mark.parametrize("arguments", [["--group", "", "--max-records", "1"], ["--group", "", "--follow"]])
def test_a_member_of_no_group_is_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consume", str(ORDERS), *arguments]) == ExitCode.USAGE
    assert "--group is not empty" in capsys.readouterr().err
