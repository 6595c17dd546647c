"""``python -m coordinator``: where its settings come from."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import coordinator.__main__ as entry
from bridge.errors import ConfigError
from coordinator.config import CoordinatorSettings

ADDRESSES = ["--bootstrap-servers", "broker:9093", "--zookeeper", "zk:2181"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[CoordinatorSettings]:
    """Settings with which a daemon was made; it does nothing else."""
    made: list[CoordinatorSettings] = []

    class Idle:
        def __init__(self, settings: CoordinatorSettings) -> None:
            made.append(settings)

        def run(self) -> None:
            """There is nothing to do."""

        def stop(self) -> None:
            """There is nothing to stop."""

    monkeypatch.setattr(entry, "Daemon", Idle)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return made


def test_security_comes_from_the_environment(seen: list[CoordinatorSettings]) -> None:
    environment = {"ROLLBRIDGE_KAFKA_SECURITY_PROTOCOL": "SSL", "ROLLBRIDGE_ZOOKEEPER_ROOT": "/other"}
    result = CliRunner().invoke(entry.main, ADDRESSES, env=environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.bootstrap_servers, settings.zookeeper) == ("broker:9093", "zk:2181")
    assert (settings.zookeeper_root, settings.security) == ("/other", {"security.protocol": "SSL"})


def test_a_faulty_setting_is_one_line_and_no_daemon(seen: list[CoordinatorSettings]) -> None:
    result = CliRunner().invoke(entry.main, ADDRESSES, env={"ROLLBRIDGE_KAFKA_SECURITY_PROTOCOL": "SLL"})
    assert result.exit_code == ConfigError.exit_code
    assert "kafka.security.protocol" in result.output
    assert seen == []
