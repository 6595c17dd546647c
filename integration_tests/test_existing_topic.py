"""The page on topics that exist: its commands run from top to bottom, and print what it says they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from integration_tests.backends.choice import new_cluster

PAGE = Path(__file__).parents[1] / "docs" / "existing-topics.md"
_BLOCK = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_S = 300


def script_of(page: str) -> tuple[str, list[str]]:
    """The commands of a page as one script, and the lines that it says they print."""
    commands, printed = [], []
    for language, text in _BLOCK.findall(page):
        if language == "text":
            printed += text.splitlines()
        else:
            commands.append(text if language == "bash" else f"python -c {shlex.quote(text)}\n")
    return "".join(commands), printed


def test_every_command_of_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    commands, printed = script_of(PAGE.read_text(encoding="utf-8"))
    assert len(printed) > 5
    with new_cluster() as cluster:
        coordinator = cluster.start_coordinator()
        addresses = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **addresses},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        cluster.stop_coordinator(coordinator)
    assert done.returncode == 0, done.stdout + done.stderr
    said = iter(line.strip() for line in done.stdout.splitlines())
    missing = [line for line in printed if line not in said]  # in this order; other programs say more in between
    assert not missing, done.stdout + done.stderr
    seen = (tmp_path / "dashboard.txt").read_text().splitlines()
    assert (seen.count("placed"), seen.count("shipped"), seen.count("imported")) == (1_000, 1, 1_000_000)
    assert seen.index("shipped") < seen.index("imported"), "of an open transaction nothing is seen"
