"""The mutants of ``make mutants``: what is changed, where that is written, and that the checkout stays as it is."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from integration_tests import mutants
from integration_tests.mutants import ROOT, ROWS, copied, mutants_of, named_tests, passes, survivors

CODE = '''"""Über."""
class C:
    def f(self, x, y):
        if x < y:  # ä
            raise ValueError(x)
        self.last = x + 1
        return [i for i in y if i and x], f"{x if y else 1}"
'''
TEST = """from bridge.code import C

def test_{name}():
    assert {claim}
"""
CHANGES = {
    ("x < y", "(not (x < y))"),
    ("x < y", "(x <= y)"),
    ("raise ValueError(x)", "pass"),
    ("self.last = x + 1", "pass"),
    ("x + 1", "(x)"),
    ("i and x", "(not (i and x))"),
    ("i and x", "(i)"),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of one file, one guarantee and its tests."""
    root = tmp_path / "checkout"
    (root / "bridge/tests").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "bridge/code.py").write_text(CODE, encoding="utf-8")
    (root / "bridge/tests/test_it.py").write_text(TEST.format(name="it", claim="C().f(2, [])[0] == []"))
    (root / "docs/guarantees.md").write_text("| 7 | It is so. | `bridge/tests/test_it.py::test_it` |\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def test_each_change_is_made_where_it_stands(checkout: Path) -> None:
    found = mutants_of(checkout, "bridge/code.py: C.f")
    assert {(it.old, it.new) for it in found} == CHANGES
    for mutant in found:
        before = mutant.apply(checkout)
        after = (checkout / mutant.file).read_bytes()
        ast.parse(after)
        end = mutant.start + len(mutant.new.encode())
        assert after[mutant.start : end].decode() == mutant.new
        assert after[: mutant.start] + mutant.old.encode() + after[end:] == CODE.encode() == before
        (checkout / mutant.file).write_bytes(before)


def test_survivors_are_those_that_the_tests_of_the_row_do_not_notice(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, test = checkout / "bridge/code.py", checkout / "bridge/tests/test_it.py"
    code.write_text("def f(x):\n    if x > 1:\n        x += 1\n    return x\n")
    test.write_text("from bridge.code import f\n\ndef test_it():\n    assert f(0) == 0\n")
    monkeypatch.setattr(mutants, "ROWS", {7: ("bridge/code.py: f",)})
    kept = code.read_bytes()
    copy = copied(checkout, tmp_path / "copy")
    found = {str(it) for _, it in survivors(copy, [7], 9, 1)}
    assert found == {"bridge/code.py f: `x > 1` → `(x >= 1)`", "bridge/code.py f: `x += 1` → `pass`"}
    assert code.read_bytes() == kept == (copy / "bridge/code.py").read_bytes()
    test.write_text("def test_it():\n    raise AssertionError\n")
    with pytest.raises(RuntimeError, match="row 7: its tests fail as it is"):
        list(survivors(copied(checkout, copy), [7], 9, 1))


def test_tests_that_take_too_long_have_noticed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "bridge/tests/test_it.py").write_text("import time\n\ndef test_it():\n    time.sleep(600)\n")
    monkeypatch.setattr(mutants, "TESTS_S", 1.0)
    assert not passes(checkout, ["bridge/tests/test_it.py::test_it"])


@pytest.mark.parametrize("number", ROWS)
def test_rows_name_code_that_is_there_and_tests(number: int) -> None:
    assert all(mutants_of(ROOT, place) for place in ROWS[number])
    assert named_tests(ROOT, number)
