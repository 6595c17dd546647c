"""What is deployed with us: the locks, their licences, and the bill of materials that is made of them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOYED = ("client", "coordinator", "local", "demo")


def pinned(lock: str) -> set[str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z0-9_.-]+)(?:\[.*\])?==", text, re.MULTILINE))


@pytest.mark.parametrize("lock", DEPLOYED)
def test_nothing_that_is_deployed_is_under_a_gpl(lock: str) -> None:
    script = runpy.run_path(str(ROOT / "requirements/licences.py"))
    found = {name: licence for name, _, licence in script["licences"](ROOT / f"requirements/{lock}.lock")}
    assert {"click", "kio", "google-crc32c"} <= found.keys() <= pinned(lock)
    assert not {name: licence for name, licence in found.items() if re.search("GPL|GNU|unknown", licence)}
    assert "GPL" in script["licence_of"](distribution("crc32c")), "one that is would be noticed"


def test_the_bill_of_materials_names_what_is_pinned(tmp_path: Path) -> None:
    made = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(ROOT / "requirements/client.lock")]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True)
    bill = json.loads(made.read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert {part["name"] for part in bill["components"]} == pinned("client")


def test_nobody_is_told_to_fetch_names_that_are_not_ours() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/deploy/*"), ROOT / "compose.yaml"]
    files += [*ROOT.glob("bridge/rollbridge/**/*.py"), *ROOT.glob("devcluster/rollbridge_devcluster/**/*.py")]
    wrong = re.compile(r"(?<!Never `)pip install (?:--\S+ )*['\"]?rollbridge\b(?! @)|(?<![\w./])rollbridge/\w+:\S*\d")
    assert [(path.name, found[0]) for path in files for found in wrong.finditer(path.read_text(encoding="utf-8"))] == []
