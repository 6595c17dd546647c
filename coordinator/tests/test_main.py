"""``python -m rollbridge_coordinator``: where its settings come from."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rollbridge_coordinator.__main__ as entry
from rollbridge.errors import AuthenticationError, ConfigError, KafkaUnavailableError, UnavailableError
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.interpreter import Hook
from rollbridge_coordinator.daemon import main
from rollbridge_coordinator.daemon.main import Arrival, tell_waits

SPARE_COLLECTOR = entry.spare_collector
ADDRESSES = ["--bootstrap-servers", "broker:9093", "--zookeeper", "zk:2181"]


@pytest.fixture(autouse=True)
def _own_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the command sets for its process ends with the test."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def _collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's collector works as before afterwards: the process is the tests' own, and a collection takes seconds."""
    monkeypatch.setattr(entry, "spare_collector", lambda: None)
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
    assert (settings.connection.bootstrap_servers, settings.connection.zookeeper) == ("broker:9093", "zk:2181")
    assert (settings.connection.zookeeper_root, settings.connection.kafka) == ("/other", {"security.protocol": "SSL"})


def test_the_collector_is_not_to_look_at_what_stays(
    seen: list[CoordinatorSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "spare_collector", SPARE_COLLECTOR)
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
    assert (settings.connection.bootstrap_servers, settings.name, settings.session_timeout_s) == ("b:1", "me", 2.5)
    assert (settings.limits.cache_bytes_max, settings.limits.lease_ms_max) == (2000, 5)


def test_every_faulty_limit_is_named(seen: list[CoordinatorSettings], tmp_path: Path) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text('[coordinator]\ncach_bytes_max = 1\nmerge_timeout_s = "soon"\n')
    result = CliRunner().invoke(entry.main, ADDRESSES, env={"ROLLBRIDGE_CONFIG": str(file)})
    assert result.exit_code == ConfigError.exit_code
    assert "coordinator.cach_bytes_max: is unknown; did you mean cache_bytes_max?" in result.output
    assert "coordinator.merge_timeout_s: 'soon' is not a number" in result.output
    wrong = {
        "ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX": "-1",
        "ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_SNAPSHOT_SEGMENT_SIZE": "9000000",
    }
    result = CliRunner().invoke(entry.main, ADDRESSES, env=wrong)
    assert "cache_bytes_max: -1 is not positive" in result.output
    assert "is no option, it is always 262144" in result.output
    assert seen == []


def test_settings_have_the_names_of_the_proposals(seen: list[CoordinatorSettings], tmp_path: Path) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text(
        "[coordinator]\ntransactionBufferSegmentedSnapshotEnabled = false\ntransactionMetaPersistTimeInHour = 4\n"
    )
    environment = {
        "ROLLBRIDGE_CONFIG": str(file),
        "ROLLBRIDGE_COORDINATOR_TRANSACTION_META_PERSIST_TIME_IN_HOUR": "7",
        "ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS": "127.0.0.1:9464",
    }
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert settings.leader.snapshots.transaction_buffer_segmented_snapshot_enabled is False
    assert settings.leader.transaction_meta_persist_time_in_hour == 7
    assert settings.leader.transaction_meta_persist_count == 100
    assert settings.metrics_address == "127.0.0.1:9464"


def test_windows_that_are_too_short_to_measure_are_refused(seen: list[CoordinatorSettings]) -> None:
    environment = {
        "ROLLBRIDGE_COORDINATOR_SCALING_WINDOW_MS": "150",
        "ROLLBRIDGE_COORDINATOR_SCALING_COOLDOWN_MS": "-1",
    }
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert "scaling_cooldown_ms" in result.output
    del environment["ROLLBRIDGE_COORDINATOR_SCALING_COOLDOWN_MS"]
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == ConfigError.exit_code
    assert "scaling_window_ms: '150' is not a whole number from 200 on" in result.output
    assert not seen
    environment["ROLLBRIDGE_COORDINATOR_SCALING_CHECK_MS"] = "4000"
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert "SCALING_CHECK_MS: is no option, it is always scaling_window_ms / 24" in result.output


def ended(run: str, *, is_serving: bool = True, more: str = "") -> subprocess.CompletedProcess[str]:
    """What becomes of a process whose coordinator does this."""
    program = f"""
import os, signal, threading
import rollbridge_coordinator.__main__ as entry
from rollbridge_coordinator.daemon import main as daemon

class Played:
    is_serving = {is_serving}
    def __init__(self, settings, hook):
        self.stopping = threading.Event()
    def run(self):
        {run}
    def stop(self):
        self.stopping.set()

entry.Daemon = Played
{more}
entry.main()
"""
    found = subprocess.run([sys.executable, "-c", program, *ADDRESSES], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found


STUCK = """os.kill(os.getpid(), signal.SIGTERM)
        while True:
            threading.Event().wait()"""


def test_whoever_does_not_answer_it_ends() -> None:
    """Asked to end while it waits for a server that never comes back."""
    assert "has delayed the stop of this coordinator" in ended(STUCK, more="daemon.END_AT_LATEST_S = 0.1").stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_finds_it_in_whatever_it_does(number: str) -> None:
    """It comes while the main thread holds the lock of the very event that tells it to end."""
    found = ended(
        f"""with self.stopping._cond:  # as at the beginning and at the end of its wait()
            os.kill(os.getpid(), signal.{number})
            for _ in range(1000):
                pass  # handlers run in the main thread, between two instructions
        self.stopping.wait()
        print("ended in good order")
        return True"""
    )
    assert "ended in good order" in found.stdout


def test_one_that_serves_nothing_yet_ends_at_once() -> None:
    """It waits for servers that may not be there for long, and has nothing to hand over."""
    ended(STUCK, is_serving=False)


# A coordinator that waits at its start for servers: what it says, and what ends it.


KAFKA = "Kafka at broker:9092"


class Pauses(threading.Event):
    """An event that makes time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0

    def wait(self, timeout: float | None = None) -> bool:
        """Let the pause pass."""
        assert timeout is not None
        self.now_s += timeout
        return self.is_set()


def failing(times: int, then: Callable[[], str] = lambda: "there") -> Callable[[], str]:
    """An attempt that fails at first."""
    left = iter(range(times))

    def attempt() -> str:
        if next(left, None) is None:
            return then()
        raise KafkaUnavailableError("no broker answers")

    return attempt


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


def waiting(pauses: Pauses, wait_s: float = main.FOR_EVER) -> Arrival:
    return Arrival(wait_s, pauses, lambda: pauses.now_s)


def test_servers_that_answer_at_once_are_not_spoken_of(pauses: Pauses, caplog: pytest.LogCaptureFixture) -> None:
    assert waiting(pauses).until(KAFKA, failing(0)) == "there"
    assert not caplog.records


def test_it_waits_and_says_so_once_and_then_each_minute(pauses: Pauses, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    present = waiting(pauses)
    seen: list[str] = []

    def found() -> str:
        seen.append(present.waits_for)
        return "there"

    assert present.until(KAFKA, failing(200, found)) == "there"
    took_s = pauses.now_s - 1_000
    assert took_s > 5 * main.TOLD_S
    *waits, answers = [record.getMessage() for record in caplog.records]
    assert took_s // main.TOLD_S <= len(waits) <= took_s // main.TOLD_S + 1
    assert waits[0].startswith("coordinator.waiting: waits for Kafka at broker:9092 since 0 s: no broker answers")
    assert 'coordinator.connected to="Kafka at broker:9092" waited_s=' in answers
    assert "waits for Kafka at broker:9092 since" in seen[0], "what /healthz shows meanwhile"
    assert present.waits_for == ""


@pytest.mark.parametrize("wait_s", [0, 30])
def test_the_last_error_is_told_when_the_time_is_up(pauses: Pauses, wait_s: float) -> None:
    with pytest.raises(UnavailableError, match="no broker answers"):
        waiting(pauses, wait_s).until(KAFKA, failing(10_000))
    assert wait_s <= pauses.now_s - 1_000 <= wait_s + main.PAUSE_MAX_S


def test_the_time_counts_for_all_servers_together(pauses: Pauses) -> None:
    present = waiting(pauses, 30)
    present.until("ZooKeeper", failing(5))
    with pytest.raises(UnavailableError):
        present.until(KAFKA, failing(10_000))
    assert pauses.now_s - 1_000 <= 30 + main.PAUSE_MAX_S


def test_whoever_is_to_end_waits_no_longer(pauses: Pauses) -> None:
    pauses.set()
    with pytest.raises(CancelledError, match="asked to end while it waited for Kafka"):
        waiting(pauses).until(KAFKA, failing(10_000))


def test_what_waiting_cannot_mend_ends_it_at_once(pauses: Pauses) -> None:
    def refused() -> str:
        raise AuthenticationError("refused our credentials")

    with pytest.raises(AuthenticationError):
        waiting(pauses).until(KAFKA, refused)
    assert pauses.now_s == 1_000


def run(environment: dict[str, str]) -> Result:
    """Start the daemon that does nothing."""
    return CliRunner().invoke(entry.main, ADDRESSES, env=environment)


class Leading:
    """A leader that waits."""

    def __init__(self) -> None:
        self.present: tuple[str, float] | None = None

    def waiting(self) -> tuple[str, float] | None:
        return self.present


def test_a_leader_that_waits_for_one_effect_says_so_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    leader, told, group = Leading(), dict[GroupName, float](), GroupName("sales")
    for seconds in (0.5, 1.9, 2.0, 3.9, 4.0, 7.9, 8.0, 15.9, 16.0):
        leader.present = ("CommitRound", seconds)
        tell_waits({group: leader}, told)
    lines = [item.getMessage().rpartition(" ")[2] for item in caplog.records]
    assert lines == ["waited_s=2", "waited_s=4", "waited_s=8", "waited_s=16"]
    leader.present = None
    tell_waits({group: leader}, told)
    assert told == {}, "the next one is told of after two seconds again"


def test_an_option_of_the_file_gives_way_to_the_environment_by_whatever_name(
    seen: list[CoordinatorSettings], tmp_path: Path
) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text("[coordinator]\nlate_commit_window_ms = 9\n")
    environment = {"ROLLBRIDGE_CONFIG": str(file), "ROLLBRIDGE_COORDINATOR_LINGER_MS_MAX": "5"}
    assert run(environment).exit_code == 0
    assert seen[0].leader.late_commit_window_ms == 5
    both = {**environment, "ROLLBRIDGE_COORDINATOR_LATE_COMMIT_WINDOW_MS": "7"}
    assert "linger_ms_max: is the former name of late_commit_window_ms" in run(both).output


def test_an_option_of_the_last_release_that_is_a_constant_is_refused_with_its_value(
    seen: list[CoordinatorSettings], tmp_path: Path
) -> None:
    file = tmp_path / "rollbridge.toml"
    file.write_text("[coordinator]\nrecord_after_ms = 9\n")
    refused = run({"ROLLBRIDGE_CONFIG": str(file), "ROLLBRIDGE_COORDINATOR_POLL_S": "1"})
    assert refused.exit_code == ConfigError.exit_code
    assert "coordinator.record_after_ms: is no option, it is always 500" in refused.output
    assert "ROLLBRIDGE_COORDINATOR_POLL_S: is no option, it is always 0.05" in refused.output
    assert not seen


def test_an_unknown_variable_is_refused_but_not_one_of_kubernetes(seen: list[CoordinatorSettings]) -> None:
    assert run({"ROLLBRIDGE_COORDINATOR_SERVICE_HOST": "10.0.0.1"}).exit_code == 0
    refused = run({"ROLLBRIDGE_COORDINATOR_ROUND_BYTS_MAX": "5"})
    assert refused.exit_code == ConfigError.exit_code
    assert "ROLLBRIDGE_COORDINATOR_ROUND_BYTS_MAX: is unknown; did you mean" in refused.output
    assert len(seen) == 1
