"""A defect in the log of a process of ours fails the test during which it was logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.defects import DefectWatch
from rollbridge.base.logs import MARK


@pytest.mark.logs_defects
def test_a_log_below_the_folder_of_a_test_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "logs"
    folder.mkdir(parents=True)
    (folder / "coordinator-1.log").write_text(f"2026 ERROR rollbridge: {MARK}it has ended\nTraceback\n")


@pytest.mark.logs_defects
def test_a_line_is_reported_once_and_when_it_is_whole(tmp_path: Path) -> None:
    watch, log = DefectWatch(), tmp_path / "gateway.err"
    watch.add(tmp_path)
    with log.open("a", buffering=1) as file:
        file.write("ready\n")
        assert watch.found() == []
        file.write(f"{MARK}it has")
        file.flush()
        assert watch.found() == []
        file.write(" ended\nTraceback\n")
        assert watch.found() == [f"{log}: {MARK}it has ended\nTraceback\n"]
        assert watch.found() == []
