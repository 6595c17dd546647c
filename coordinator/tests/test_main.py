"""``python -m rollbridge_coordinator``: where its settings come from."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import rollbridge_coordinator.__main__ as entry
from rollbridge.errors import ConfigError
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.shell.interpreter import Hook

ADDRESSES = ["--bootstrap-servers", "broker:9093", "--zookeeper", "zk:2181"]


@pytest.fixture(autouse=True)
def _own_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the command sets for its process ends with the test."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Python's collector works as before afterwards: the process is the tests' own."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[CoordinatorSettings]:
    """Settings with which a daemon was made; it does nothing else."""
    made: list[CoordinatorSettings] = []

    class Idle:
        def __init__(self, settings: CoordinatorSettings, hook: Hook | None) -> None:
            assert hook is None
            made.append(settings)

        def run(self) -> bool:
            """There is nothing to do."""
            return True

        def stop(self) -> None:
            """There is nothing to stop."""

    monkeypatch.setattr(entry, "Daemon", Idle)
    monkeypatch.setattr(entry, "end_on_signals", lambda stop, is_serving: None)
    return made


def test_security_comes_from_the_environment(seen: list[CoordinatorSettings]) -> None:
    environment = {"ROLLBRIDGE_KAFKA_SECURITY_PROTOCOL": "SSL", "ROLLBRIDGE_ZOOKEEPER_ROOT": "/other"}
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.bootstrap_servers, settings.zookeeper) == ("broker:9093", "zk:2181")
    assert (settings.zookeeper_root, settings.security) == ("/other", {"security.protocol": "SSL"})


def test_the_collector_is_not_to_look_at_what_stays(seen: list[CoordinatorSettings]) -> None:
    gc.unfreeze()
    assert CliRunner().invoke(entry.main, ADDRESSES).exit_code == 0
    assert seen
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] == entry.YOUNG_MAX


def test_a_faulty_setting_is_one_line_and_no_daemon(seen: list[CoordinatorSettings]) -> None:
    result = CliRunner().invoke(entry.main, ADDRESSES, env={"ROLLBRIDGE_KAFKA_SECURITY_PROTOCOL": "SLL"})
    assert result.exit_code == ConfigError.exit_code
    assert "kafka.security.protocol" in result.output
    assert seen == []


def test_limits_come_from_the_environment_over_the_file(seen: list[CoordinatorSettings], tmp_path: Path) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text(
        'bootstrap_servers = "b:1"\nzookeeper = "z:1"\n'
        "[coordinator]\ncache_bytes_max = 1000\nlease_ms_max = 5\nsession_timeout_s = 2.5\n"
    )
    environment = {"ROLLBRIDGE_CONFIG": str(file), "ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX": "2000"}
    result = CliRunner().invoke(entry.main, ["--name", "me"], env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.bootstrap_servers, settings.name, settings.session_timeout_s) == ("b:1", "me", 2.5)
    assert (settings.limits.cache_bytes_max, settings.limits.lease_ms_max) == (2000, 5)


def test_every_faulty_limit_is_named(seen: list[CoordinatorSettings], tmp_path: Path) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text('[coordinator]\ncach_bytes_max = 1\npoll_s = "soon"\n')
    result = CliRunner().invoke(entry.main, ADDRESSES, env={"ROLLBRIDGE_CONFIG": str(file)})
    assert result.exit_code == ConfigError.exit_code
    assert "coordinator.cach_bytes_max: is unknown; did you mean cache_bytes_max?" in result.output
    assert "coordinator.poll_s: 'soon' is not a number" in result.output
    negative = {"ROLLBRIDGE_COORDINATOR_ROUND_BYTES_MAX": "-1"}
    result = CliRunner().invoke(entry.main, ADDRESSES, env=negative)
    assert "round_bytes_max: -1 is not positive" in result.output
    assert seen == []


def test_snapshot_settings_have_the_names_of_the_proposal(seen: list[CoordinatorSettings], tmp_path: Path) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text(
        "[coordinator]\ntransactionBufferSnapshotSegmentSize = 4096\n"
        "transaction_buffer_snapshot_min_time_in_millis = 7\ntransactionBufferSegmentedSnapshotEnabled = true\n"
    )
    environment = {
        "ROLLBRIDGE_CONFIG": str(file),
        "ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_SEGMENTED_SNAPSHOT_ENABLED": "False",
        "ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS": "127.0.0.1:9464",
    }
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    snapshots = settings.leader.snapshots
    assert snapshots.transaction_buffer_snapshot_segment_size == 4096
    assert snapshots.transaction_buffer_snapshot_min_time_in_millis == 7
    assert snapshots.transaction_buffer_snapshot_max_transaction_count == 1_000
    assert snapshots.transaction_buffer_segmented_snapshot_enabled is False
    assert settings.metrics_address == "127.0.0.1:9464"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SEGMENT_SIZE", "1000", "1000 is not in 1024..8388608"),
        ("SEGMENT_SIZE", "9000000", "9000000 is not in 1024..8388608"),
        ("MAX_TRANSACTION_COUNT", "0", "0 is not positive"),
        ("MIN_TIME_IN_MILLIS", "soon", "'soon' is not a number"),
    ],
)
def test_faulty_snapshot_settings_are_named(seen: list[CoordinatorSettings], name: str, value: str, words: str) -> None:
    environment = {f"ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_SNAPSHOT_{name}": value}
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert words in result.output
    assert not seen


def test_windows_that_are_too_short_to_measure_are_refused(seen: list[CoordinatorSettings]) -> None:
    environment = {
        "ROLLBRIDGE_COORDINATOR_SCALING_WINDOW_MS": "9000",
        "ROLLBRIDGE_COORDINATOR_SCALING_PARTS_MAX": "1",
    }
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert "scaling_parts_max" in result.output
    del environment["ROLLBRIDGE_COORDINATOR_SCALING_PARTS_MAX"]
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert "9000 is less than twice scaling_check_ms, 5000" in result.output
    assert not seen
    environment["ROLLBRIDGE_COORDINATOR_SCALING_CHECK_MS"] = "4000"
    CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert seen[0].leader.scaling.scaling_window_ms == 9_000


def test_a_switch_is_true_or_false(seen: list[CoordinatorSettings]) -> None:
    environment = {"ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_SEGMENTED_SNAPSHOT_ENABLED": "maybe"}
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert "'maybe' is not true or false" in result.output
    assert not seen


def test_whoever_does_not_answer_it_ends() -> None:
    """Asked to end while it waits for a server that never comes back."""
    program = """
import os, signal, threading
import rollbridge_coordinator.__main__ as entry
from rollbridge_coordinator.shell import daemon

class Stuck:
    is_serving = True
    def __init__(self, settings, hook):
        pass
    def run(self):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            threading.Event().wait()
    def stop(self):
        pass

entry.Daemon, daemon.END_AT_LATEST_S = Stuck, 0.1
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", program, *ADDRESSES], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "has kept this coordinator from ending" in ended.stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_finds_it_in_whatever_it_does(number: str) -> None:
    """It comes while the main thread holds the lock of the very event that tells it to end."""
    program = f"""
import os, signal, threading
import rollbridge_coordinator.__main__ as entry

class Waiting:
    is_serving = True
    def __init__(self, settings, hook):
        self.stopping = threading.Event()
    def run(self):
        with self.stopping._cond:  # as at the beginning and at the end of its wait()
            os.kill(os.getpid(), signal.{number})
            for _ in range(1000):
                pass  # handlers run in the main thread, between two instructions
        self.stopping.wait()
        print("ended in good order")
        return True
    def stop(self):
        self.stopping.set()

entry.Daemon = Waiting
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", program, *ADDRESSES], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "ended in good order" in ended.stdout


def test_one_that_serves_nothing_yet_ends_at_once() -> None:
    """It waits for servers that may not be there for long, and has nothing to hand over."""
    program = """
import os, signal, threading
import rollbridge_coordinator.__main__ as entry

class Starting:
    is_serving = False
    def __init__(self, settings, hook):
        pass
    def run(self):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            threading.Event().wait()
    def stop(self):
        pass

entry.Daemon = Starting
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", program, *ADDRESSES], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
