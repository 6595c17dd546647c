"""The examples of conditional writes, as whoever has typed ``make up`` runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from integration_tests.clients import Site
from spark_examples.demo.common import StuckError, check, finish, play, start


@pytest.mark.parametrize(
    ("example", "arguments", "checks"),
    [("box_office", ["--seats=80"], 3), ("copy_file", ["--lines=400"], 1), ("one_writer", [], 2)],
)
def test_an_example_does_what_it_says(site: Site, example: str, arguments: list[str], checks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"spark_examples.demo.{example}", *arguments],
        env={**os.environ, **site.environment()},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok: ") == checks, done.stdout
    assert "WRONG" not in done.stdout


def test_an_example_whose_check_fails_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        play(lambda: all([check("water is wet", True), check("fire is cold", False)]))
    assert ended.value.code == 1
    assert capsys.readouterr().out == "  ok: water is wet\n  WRONG: fire is cold\n"


def test_a_process_that_fails_ends_its_example() -> None:
    with pytest.raises(StuckError, match="the processes end: a process ended with 3"):
        finish([start(sys.exit, 3), start(sys.exit, 0)])


def test_an_example_that_reaches_nobody_says_so() -> None:
    environment = {"ROLLBRIDGE_BOOTSTRAP_SERVERS": "127.0.0.1:1", "ROLLBRIDGE_ZOOKEEPER": "127.0.0.1:bad"}
    done = subprocess.run(
        [sys.executable, "-m", "spark_examples.demo.one_writer"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr.startswith("config: zookeeper:")
