"""The figures of the house on a small one: each is exactly right, and a check fails when it has to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.house import CEILINGS, IDEAS, judge, lower_ceilings, main, measure, read_ceilings
from integration_tests.tracer import Step, Tracer, trip_of, within

SHELL = '''"""Two lines
of a docstring."""

# a comment
from rollbridge.model import Fences

TEXT = """
# no comment
"""


class ReaderOptions:
    KEYS: ClassVar = 3
    linger_s: float = 0.5
    """An attribute's docstring."""
    topics: int = 1


class RequestKind(StrEnum):
    CREATE = "create"
    DELETE = "delete"


def open_all():
    first = Cluster[str](KafkaClient.of(settings))
    second = kafka.Producer({})

    # why
    return first, second


def _lag():
    """Return nothing."""
    return None
'''
MODEL = "class Fences:\n    pass\n\n\nclass ClientFencedError(Exception):\n    pass\n"
FIGURES = {
    "lines of the product": 34 + 6,
    "files of the product": 2,
    "lines of tests": 1 + 2 + 3,
    "lines of code": 17 + 4,
    "lines of docstrings": 4,
    "lines of comments": 2,
    "functions": 2,
    "functions of at most three lines, %": 50,
    "modules of the longest chain": 2,
    "places that construct a Kafka client object": 3,
    "options": 2,
    "exception classes": 1,
    "kinds of requests over znodes": 2,
    "sentence markers of the product": 0,
    "sentence markers of docs": 0,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with two modules and three files of tests."""
    for name, text in {
        "bridge/rollbridge/shell.py": SHELL,
        "bridge/rollbridge/model.py": MODEL,
        "bridge/tests/deep/test_one.py": "1\n",
        "integration_tests/test_two.py": "1\n2\n",
        "conftest.py": "1\n2\n3\n",
        CEILINGS: '# why\n"options" = 2\n"exception classes" = 1\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_figure_is_exactly_right(root: Path) -> None:
    house = measure(root)
    assert house.figures == FIGURES
    assert house.chain == ["rollbridge.shell", "rollbridge.model"]
    assert [place.split()[1] for place in house.clients] == ["Cluster", "Producer", "KafkaClient"]
    assert house.ideas["fencing"] == {"rollbridge.model": ["Fences", "ClientFencedError"]}
    assert house.counts["files for fencing"] == 1


def test_markers_are_counted_in_sentences_and_not_in_code(root: Path) -> None:
    text = '"""Whether it stands."""\n\nbeside = anew = 1  # nobody asks\nTOLD = "it goes on"\n'
    (root / "bridge/rollbridge/words.py").write_text(text)
    (root / "docs").mkdir()
    (root / "docs/page.md").write_text("Whoever is looked at.\n")
    (root / "CHANGELOG.md").write_text("nobody\n")
    figures = measure(root).figures
    assert figures["sentence markers of the product"] == 4
    assert figures["sentence markers of docs"] == 2


def test_an_idea_is_counted_wherever_its_definitions_are(root: Path) -> None:
    package = root / "bridge/rollbridge/elsewhere"
    package.mkdir()
    (root / "bridge/rollbridge/model.py").rename(package / "fences.py")
    assert measure(root).ideas["fencing"] == {"rollbridge.elsewhere.fences": ["Fences", "ClientFencedError"]}


def test_a_figure_above_its_ceiling_is_a_fault() -> None:
    faults, lower = judge({"options": 3, "functions": 9}, {"options": 2})
    what_to_do = f"Take something away; if it has to grow, raise the ceiling in {CEILINGS} and say why in the commit"
    assert faults == [f"options: 3, and the ceiling is 2. {what_to_do}"]
    assert lower == []


def test_a_figure_well_below_its_ceiling_is_told() -> None:
    assert judge({"lines": 990}, {"lines": 1000}) == ([], [])
    faults, lower = judge({"lines": 989}, {"lines": 1000})
    assert faults == []
    assert lower == ["lines: 989, and the ceiling is 1,000. Lower it: make house ARGS=--lower"]


def test_an_idea_without_definitions_and_a_ceiling_without_figure_are_faults() -> None:
    faults, _ = judge({"files for fencing": 0}, {"files for fencing": 13, "rooms": 4})
    assert [fault.split(":")[0] for fault in faults] == [
        f"{CEILINGS} has a ceiling for 'rooms', which is no figure",
        "files for fencing",
    ]


def test_check_fails_when_a_file_is_added(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for idea in set(IDEAS) - {"fencing"}:
        monkeypatch.delitem(IDEAS, idea)
    assert main(["--check"], root) == 0
    assert capsys.readouterr().err == ""
    (root / "bridge/rollbridge/more.py").write_text("class LostError(Exception):\n    pass\n")
    assert main(["--check"], root) == 1
    assert capsys.readouterr().err.startswith("exception classes: 2, and the ceiling is 1. ")


def test_ceilings_are_lowered_and_never_raised(root: Path) -> None:
    lower_ceilings(root, {"options": 1, "exception classes": 5})
    assert read_ceilings(root) == {"options": 1, "exception classes": 1}
    assert (root / CEILINGS).read_text().startswith("# why\n")


def outer() -> int:
    """Come through a generator and an expression."""
    return sum(number for number in numbers())


def numbers() -> Iterator[int]:
    """Yield two numbers."""
    yield inner()
    yield inner()


def inner() -> int:
    """Return a number."""
    return 1


def test_a_tracer_counts_calls_and_no_resumptions() -> None:
    tracer = Tracer([__name__.partition(".")[0]])
    before = sys.getprofile()
    with tracer.installed(), tracer.recording() as threads:
        outer()
    assert sys.getprofile() is before
    steps = threads[threading.current_thread().name]
    (call,) = within(steps, "outer")
    assert trip_of(call).calls == 4
    assert trip_of(call).modules == {__name__}
    assert len(within(steps, "numbers")) == 1
    assert len(within(steps, "inner")) == 2


def test_returns_to_a_module_are_counted() -> None:
    def enter(frame: int, module: str) -> Step:
        return Step(frame, module, "f", True, True)

    def leave(frame: int, module: str) -> Step:
        return Step(frame, module, "f", False, True)

    trip = trip_of(
        [
            enter(1, "a"),
            enter(2, "b"),
            leave(2, "b"),
            enter(3, "a"),
            leave(3, "a"),
            enter(4, "b"),
            leave(4, "b"),
            leave(1, "a"),
        ]
    )
    assert (trip.calls, trip.modules, trip.returns) == (4, frozenset("ab"), 3)
