"""Short histories of a whole cluster under faults; `make soak` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.history.run import running

WINDOWS = {
    1: ("kill a coordinator", "scale", "kill the broker"),
    2: ("pause a coordinator", "kill a client", "kill ZooKeeper"),
    3: ("scale", "pause the broker", "pause a client", "pause ZooKeeper"),
}
"""By seed: what is broken, one after the other."""


@pytest.mark.parametrize("seed", WINDOWS)
def test_no_promise_is_broken_under_faults(seed: int, tmp_path: Path) -> None:
    with running(seed, tmp_path) as run:
        for fault in WINDOWS[seed]:
            run.window(fault, broken_s=3)
        report = run.end()
    text = "\n".join(report.lines())
    assert not report.found, text
    assert report.answers["transaction commit: ok"] > 100, text
    assert report.answers["plain commit: ok"] > 50, text
    assert report.answers["conditional commit: ok"] > 10, text
    assert report.epochs > 2 or "scale" not in WINDOWS[seed], text
