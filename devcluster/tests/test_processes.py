"""Processes that carry the mark are found and ended; all others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbridge_devcluster import processes

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
OBEDIENT = "import time; print('ready', flush=True); time.sleep(60)"

Start = Callable[[Path, str, str], psutil.Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python code as a part of the cluster in a directory, and waits until it says that it is ready."""
    started: list[psutil.Process] = []

    def start(home: Path, part: str, code: str) -> psutil.Process:
        home.mkdir(exist_ok=True)
        output = tmp_path / f"{home.name}-{part}-{len(started)}.out"
        process = processes.spawn([sys.executable, "-c", code], home=home, part=part, output=output)
        started.append(process)
        deadline = time.monotonic() + 120
        while "ready" not in output.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield start
    processes.kill(started)


def test_only_processes_with_the_mark_of_this_home_are_found(start: Start, tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "ours-too"
    first, second = start(ours, "a", OBEDIENT), start(ours, "b", OBEDIENT)
    stranger = start(other, "a", OBEDIENT)
    unmarked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = processes.find(ours)
        assert {part: [p.pid for p in some] for part, some in found.items()} == {"a": [first.pid], "b": [second.pid]}
        processes.kill([first, second])
        assert processes.find(ours) == {}
        assert processes.is_alive(stranger)
        assert unmarked.poll() is None
    finally:
        unmarked.kill()
        unmarked.wait()


def test_the_mark_does_not_depend_on_how_the_home_is_spelt(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "home", "a", OBEDIENT)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    for spelling in (Path("home"), tmp_path / "link", tmp_path / "x" / ".." / "home"):
        assert list(processes.find(spelling)) == ["a"]


def test_a_process_that_ends_when_asked_ended_by_itself(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path / "home", "a", OBEDIENT)
    assert processes.stop([process], 20) is True
    assert not processes.is_alive(process)
    assert processes.exit_code(process.pid) == -signal.SIGTERM


def test_a_process_that_does_not_listen_is_killed(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path / "home", "a", STUBBORN)
    assert processes.stop([process], 0.05) is False
    assert processes.exit_code(process.pid) == -signal.SIGKILL


def test_a_paused_process_ends_when_asked(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path / "home", "a", OBEDIENT)
    processes.send(process, signal.SIGSTOP)
    assert processes.stop([process], 20) is True


def test_signals_to_a_process_that_is_gone_do_nothing(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path / "home", "a", OBEDIENT)
    processes.kill([process])
    processes.send(process, signal.SIGTERM)
    assert processes.stop([process], 0) is True
    assert processes.find(tmp_path / "home") == {}


def test_this_process_is_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from pathlib import Path; from rollbridge_devcluster import processes; import sys;"
        "print(processes.find(Path(sys.argv[1])))"
    )
    environment = {**os.environ, processes.MARK: f"a@{tmp_path.resolve()}"}
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "{}"


def test_settings_of_another_cluster_are_not_inherited(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLBRIDGE_KAFKA_SASL_PASSWORD", "hush")
    monkeypatch.setenv("ROLLBRIDGE_CONFIG", "/elsewhere.toml")
    monkeypatch.setenv("ROLLBRIDGE_ZOOKEEPER_ROOT", "/elsewhere")
    monkeypatch.setenv("ROLLBRIDGE_TEST_OTHER", "stays")
    environment = start(tmp_path / "home", "a", OBEDIENT).environ()
    assert {key for key in environment if key.startswith("ROLLBRIDGE_")} >= {"ROLLBRIDGE_TEST_OTHER", processes.MARK}
    assert not {"ROLLBRIDGE_KAFKA_SASL_PASSWORD", "ROLLBRIDGE_CONFIG", "ROLLBRIDGE_ZOOKEEPER_ROOT"} & set(environment)


def test_an_interrupt_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = start(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.run(
            [sys.executable, "-c", OBEDIENT], home=tmp_path, part="a", output=tmp_path / "out", timeout_seconds=60
        )
    assert processes.find(tmp_path) == {}
