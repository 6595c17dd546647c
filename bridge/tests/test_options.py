"""Tables of options: what is parsed, what is refused, and that all of it is told at once."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollbridge.base.options import (
    Option,
    by_present_names,
    faults_of,
    function,
    keys_of,
    nearest,
    option,
    table_of,
    unknown,
    unknown_variables,
    values_of,
    words,
)
from rollbridge.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One of each kind."""

    name: str
    delay_s: float = 1.5
    count: int | None = option(None, low=1)
    size: int = option(8, key="buffer.size", aliases=("buffer.bytes",), low=4, high=16)
    hours: int = option(24, high=168)
    quick: bool = True
    codec: int = option(0, choices={"none": 0, "Zstd": 4})
    mode: str = option("safe", choices=("safe",), why="nothing else is")
    streams: tuple[str, ...] = option((), convert=words)
    on_end: object = option(None, convert=function)
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """Settings of which one had another name in the last release."""

    window_ms: int = option(200, low=0, former=("linger_ms",))


def test_a_former_name_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[str] = []
    assert by_present_names({"linger_ms": "7", "x": "1"}, "file", faults, Renamed) == {"window_ms": "7", "x": "1"}
    assert "option.renamed former=linger_ms option=window_ms source=file" in caplog.text
    caplog.clear()
    assert by_present_names({"window_ms": "8"}, "file", faults, Renamed) == {"window_ms": "8"}
    assert (faults, caplog.text) == ([], "")


def test_an_option_that_is_given_by_both_names_is_refused() -> None:
    faults: list[str] = []
    by_present_names({"linger_ms": "7", "window_ms": "8"}, "environment", faults, Renamed)
    assert faults == [
        "linger_ms: is the former name of window_ms, and the environment gives both; give window_ms alone"
    ]


def test_unknown_variables_are_named_but_not_those_of_kubernetes() -> None:
    given = {"X_WINDW_MS": "1", "X_WINDOW_MS": "2", "X_EMPTY": "", "Y_OTHER": "3", "X_SERVICE_HOST": "10.0.0.1"}
    given |= {"X_PORT": "tcp://10.0.0.1:1", "X_PORT_1_TCP_ADDR": "10.0.0.1", "X_METRICS_SERVICE_PORT_HTTP": "1"}
    assert list(unknown_variables(given, "X_", {"X_WINDOW_MS"})) == [
        "X_WINDW_MS: is unknown; did you mean X_WINDOW_MS?"
    ]


def read(**given: Any) -> tuple[dict[str, Any], list[str]]:
    faults: list[str] = []
    dotted = {key.replace("__", "."): value for key, value in given.items()}
    return values_of(Settings, {"name": "x", **dotted}, faults), faults


def test_a_table_follows_from_the_fields() -> None:
    rows = {row.name: row for row in table_of(Settings)}
    assert "others" not in rows
    assert (rows["name"].needed, rows["delay_s"].needed, rows["delay_s"].default) == (True, False, 1.5)
    assert rows["delay_s"] == Option(name="delay_s", key="delay_s", kind="float", default=1.5)
    assert {"name", "buffer.size", "buffer.bytes"} < keys_of(Settings)


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("delay_s", "0.25", 0.25),
        ("delay_s", 2, 2.0),
        ("count", "3", 3),
        ("size", 4.0, 4),
        ("hours", "168", 168),
        ("quick", "False", False),
        ("quick", True, True),
        ("codec", "zSTD", 4),
        ("streams", "a, b,,c", ("a", "b", "c")),
        ("streams", ["a", " b"], ("a", "b")),
        ("on_end", print, print),
        ("name", 7, "7"),
    ],
)
def test_values_are_made_of_what_is_given(key: str, given: object, value: object) -> None:
    key, name = ("buffer.size", "size") if key == "size" else (key, key)
    values, faults = read(**{key: given})
    assert (values[name], faults) == (value, [])


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"delay_s": "soon"}, "delay_s: 'soon' is not a number"),
        ({"delay_s": "nan"}, "delay_s: 'nan' is not a number"),
        ({"delay_s": 0}, "delay_s: 0.0 is not positive"),
        ({"count": "0"}, "count: '0' is not a whole number from 1 on"),
        ({"count": "1.5"}, "count: '1.5' is not a whole number from 1 on"),
        ({"buffer__size": 3}, "buffer.size: 3 is not in 4..16"),
        ({"buffer__bytes": 17}, "buffer.size: 17 is not in 4..16"),
        ({"hours": "169"}, "hours: 169 is more than 168"),
        ({"hours": "-1"}, "hours: -1 is not positive"),
        ({"quick": "perhaps"}, "quick: 'perhaps' is not true or false"),
        ({"codec": "zip"}, "codec: 'zip' is not one of none, Zstd"),
        ({"mode": "fast"}, "mode: 'fast' is not possible: nothing else is"),
        ({"on_end": "print"}, "on_end: cannot be called"),
        ({"name": None}, "name: is missing"),
    ],
)
def test_what_is_wrong_is_named_and_has_its_default(given: dict[str, object], fault: str) -> None:
    values, faults = read(**given)
    assert faults == [fault]
    assert values == ({"name": None} if fault.startswith("name") else {"name": "x"})


def test_a_key_wins_over_its_other_names() -> None:
    assert read(buffer__size=5, buffer__bytes=6)[0]["size"] == 5
    assert read(buffer__size=None, buffer__bytes=6)[0]["size"] == 6


def test_settings_that_were_made_are_checked_all_at_once() -> None:
    wrong = Settings(name="x", delay_s=-1, count=0, size=1, hours=200, codec=3)
    assert [fault.partition(":")[0] for fault in faults_of(wrong)] == [
        "delay_s",
        "count",
        "buffer.size",
        "hours",
        "codec",
    ]
    with pytest.raises(ConfigError, match=r"delay_s: .*; count: .*; codec: ") as refused:
        ConfigError.raise_for(faults_of(wrong))
    assert len(refused.value.faults) == 5
    ConfigError.raise_for(faults_of(Settings(name="x")))


def test_a_secret_shows_nowhere() -> None:
    def check(text: str) -> None:
        raise ValueError(f"{text} is too short")

    @dataclass(frozen=True)
    class Secrets:
        password: str = option("", secret=True, check=check)

    assert "hush" not in repr(Secrets("hush"))
    assert list(faults_of(Secrets("hush"))) == ["password: is not possible"]


def test_unknown_keys_are_told_with_what_may_have_been_meant() -> None:
    assert list(unknown({"delays": 1, "name": 2, "xyz": 3}, keys_of(Settings))) == [
        "delays: is unknown; did you mean delay_s?",
        "xyz: is unknown",
    ]
    assert nearest("startingofset", ["startingOffsets"]) == "; did you mean startingOffsets?"


def test_a_table_in_a_page_is_written_anew() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    table = generate["option_table"]("writer")
    assert "| `linger_s` | number | 0.005 s | 0 s to 900 s | Seconds that a record waits for others" in table
    stale = "<!-- options: writer -->\n\n| stale |\n\n<!-- end of options -->\n"
    assert generate["_with_options"](stale) == stale.replace("| stale |\n", table)


def test_every_option_says_what_it_does() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for name in generate["OPTIONS"]:
        for line in generate["option_table"](name).splitlines()[2:]:
            assert len(line.split(" | ")[-1]) > 10, line
