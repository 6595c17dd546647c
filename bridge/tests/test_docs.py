"""Pages that follow from the code are up to date, and say so when they are not."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_up_to_date() -> None:
    generate = runpy.run_path(str(DOCS / "generate.py"))
    for path, text in generate["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `python docs/generate.py`"


def test_a_stale_page_is_noticed_and_written_anew(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    page = copy / "protocol-states.md"
    page.write_text(page.read_text(encoding="utf-8").replace("committing", "comitting"), encoding="utf-8")

    def generate(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(copy / "generate.py"), *arguments], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.strip()

    assert generate("--check") == (1, "stale: protocol-states.md")
    assert generate() == (0, "written: protocol-states.md")
    assert generate("--check") == (0, "")
    assert page.read_bytes() == (DOCS / "protocol-states.md").read_bytes()
