"""``rollbridge up``, ``status``, ``restart`` and ``down`` with real servers, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer, TopicPartition

from integration_tests.kafka_tools import create_topic, produce, read_all
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.cli.common import ExitCode
from rollbridge.doctor import probes
from rollbridge.metadata.picture import NO_COORDINATOR
from rollbridge_devcluster import processes
from rollbridge_devcluster.state import free_port

FAST = ("--no-coordinator", "--kafka-heap", "300m")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON on standard output."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line, apart from progress, that an error is."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("rollbridge: ")]
        assert "Traceback" not in self.err
        return line


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs ``rollbridge`` in processes of their own, all with one home and without settings of the outside."""

    home: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ROLLBRIDGE_")}
        return inherited | {"ROLLBRIDGE_HOME": str(self.home)} | dict(self.environ)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rollbridge", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str) -> Answer:
        with self.popen(*arguments) as process:
            out, err = process.communicate(timeout=240)
        return Answer(process.returncode, out, err)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A home of its own; whatever a test leaves running there is stopped."""
    home = tmp_path / "home"
    yield Shell(home)
    for found in processes.find(home).values():
        processes.kill(found)


def parts(shell: Shell) -> dict[str, str]:
    return {part["part"]: part["state"] for part in shell("status", "--json").document["parts"]}


def only(found: Sequence[psutil.Process]) -> psutil.Process:
    (process,) = found
    return process


def test_the_life_of_a_cluster(shell: Shell) -> None:
    """Up, used, up again, broken, repaired, stopped, and up again with its data."""
    nothing = shell("status")
    assert nothing.code == ExitCode.UNAVAILABLE
    assert "rollbridge up" in nothing.out

    first = shell("up", *FAST, "--json")
    assert first.code == 0, first.err
    assert first.document["started"] == ["zookeeper", "kafka"]
    servers = first.document["bootstrap_servers"]
    status = shell("status", "--json")
    assert status.code == 0
    assert status.document["bootstrap_servers"] == servers
    assert status.document["zookeeper"] == first.document["zookeeper"]
    for part in status.document["parts"]:
        assert part["files"].keys() >= {"log", "configuration", "data"}, part
        assert all(Path(path).exists() for path in part["files"].values()), part
    shown = shell("status").out
    assert str(Path(shell.home) / "kafka" / "server.properties") in shown
    pids = {part["part"]: part["pid"] for part in status.document["parts"]}
    assert pids == {part: only(found).pid for part, found in processes.find(shell.home).items()}
    create_topic(servers, "kept")
    produce(servers, "kept", [b"1"])

    # Other commands find it by themselves; an existing cluster is looked at in the same way.
    named = shell("status", "--bootstrap-servers", servers, "--zookeeper", first.document["zookeeper"], "--json")
    assert named.code == ExitCode.UNAVAILABLE
    assert [part["state"] for part in named.document["parts"]] == ["running", "running", NO_COORDINATOR]

    again = shell("up")
    assert again.code == 0
    assert "running already" in again.out
    assert {part: only(found).pid for part, found in processes.find(shell.home).items()} == pids

    processes.kill(processes.find(shell.home)["kafka"])
    broken = shell("status", "--json")
    assert broken.code == ExitCode.UNAVAILABLE
    assert parts(shell) == {"kafka": "died", "zookeeper": "running"}
    repaired = shell("up", "--json")
    assert repaired.document["started"] == ["kafka"]
    assert repaired.document["bootstrap_servers"] == servers
    assert only(processes.find(shell.home)["zookeeper"]).pid == pids["zookeeper"]

    assert shell("restart", "zookeeper").code == 0
    assert only(processes.find(shell.home)["zookeeper"]).pid != pids["zookeeper"]
    unknown = shell("restart", "kafak")
    assert unknown.code == ExitCode.NOT_FOUND
    assert "only kafka, zookeeper" in unknown.error

    down = shell("down", "--json")
    assert down.code == 0
    assert sorted(down.document["stopped"]) == ["kafka", "zookeeper"]
    assert processes.find(shell.home) == {}
    assert parts(shell) == {"kafka": "stopped", "zookeeper": "stopped"}
    assert "Nothing was running" in shell("down").out

    later = shell("up", "--json")
    assert later.document["bootstrap_servers"] == servers
    assert read_all(servers, TopicPartition("kept", 0)) == [b"1"]
    # One part is dead and one is paused: nothing may be left all the same.
    processes.kill(processes.find(shell.home)["zookeeper"])
    processes.pause(only(processes.find(shell.home)["kafka"]))
    assert parts(shell) == {"kafka": "paused", "zookeeper": "died"}
    assert shell("down").code == 0
    assert processes.find(shell.home) == {}


def test_with_coordinators(shell: Shell) -> None:
    started = shell("up", "--coordinators", "2", "--kafka-heap", "300m", "--json")
    assert started.code == 0, started.err
    everything = {"kafka": "running", "zookeeper": "running", "coordinator-1": "running", "coordinator-2": "running"}
    assert parts(shell) == everything
    processes.kill(processes.find(shell.home)["coordinator-1"])
    assert parts(shell)["coordinator-1"] == "died"
    assert shell("up", "--json").document["started"] == ["coordinator-1"]
    assert shell("restart", "coordinator-2").code == 0
    assert parts(shell) == everything
    fewer = shell("up", "--coordinators", "1", "--json").document
    assert (fewer["started"], parts(shell)) == (
        [],
        {part: everything[part] for part in sorted({*everything} - {"coordinator-2"})},
    )
    assert shell("up", "--no-coordinator").code == 0
    assert parts(shell) == {"kafka": "running", "zookeeper": "running"}
    assert shell("down").code == 0
    assert processes.find(shell.home) == {}


def write_through(gateway: str, topic: str, values: Sequence[str]) -> None:
    """Write one transaction with a producer that knows nothing of rollbridge."""
    producer = Producer({"bootstrap.servers": gateway, "transactional.id": "plain", "transaction.timeout.ms": 900_000})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.commit_transaction(PATIENCE_S)


def test_with_a_gateway(shell: Shell) -> None:
    """Beside the rest, used, kept, killed, back at its address, and gone when it is not wanted any more."""
    started = shell("up", "--gateway", "--kafka-heap", "300m", "--json")
    assert started.code == 0, started.err
    assert started.document["started"][-1] == "gateway"
    gateway = started.document["gateway"]
    assert json.loads((shell.home / "cluster.json").read_text())["gateway"] == gateway
    running = {"kafka": "running", "zookeeper": "running", "coordinator-1": "running", "gateway": "running"}
    assert parts(shell) == running
    assert re.search(rf"^gateway +running +{gateway} ", shell("status").out, re.MULTILINE)
    assert shell("stream", "create", "sales/orders").code == 0
    write_through(gateway, "sales.orders", ["1", "2"])

    again = shell("up")
    assert "running already" in again.out
    assert f"Gateway    {gateway}\n" in again.out
    processes.kill(processes.find(shell.home)["gateway"])
    assert parts(shell)["gateway"] == "died"
    repaired = shell("up", "--json").document
    assert (repaired["started"], repaired["gateway"]) == (["gateway"], gateway)
    assert shell("restart", "gateway").code == 0
    write_through(gateway, "sales.orders", ["3"])
    assert sorted(shell("consume", "sales/orders", "--format", "{value}").out.split()) == ["1", "2", "3"]

    without = shell("up", "--no-gateway", "--json").document
    assert (without["started"], without["gateway"]) == ([], None)
    assert "gateway" not in processes.find(shell.home)
    assert parts(shell) == {part: state for part, state in running.items() if part != "gateway"}
    assert shell("up", "--json").document["gateway"] is None

    # One that dies at its start changes nothing for the rest, and is not asked for any more.
    wrong = Shell(shell.home, {"ROLLBRIDGE_GATEWAY_PARTITIONS": "0"})("up", "--gateway")
    assert wrong.code == ExitCode.ENVIRONMENT
    assert re.search(r"gateway ended while it was starting: .*partitions.*; more in ", wrong.error)
    assert parts(shell) == {part: state for part, state in running.items() if part != "gateway"}
    assert shell("up").code == 0

    assert shell("up", "--gateway", "--json").document["gateway"] == gateway, "it has the port that it had"
    down = shell("down", "--json")
    assert set(down.document["stopped"]) == running.keys()
    assert processes.find(shell.home) == {}


def test_an_ephemeral_cluster_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {key: value for key, value in shell.environment.items() if key != "ROLLBRIDGE_HOME"}
    environment["TMPDIR"] = str(temporary)
    up = subprocess.run(
        [sys.executable, "-m", "rollbridge", "up", "--ephemeral", *FAST],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told = re.search(r"export ROLLBRIDGE_HOME=(\S+)", up.stdout)
    assert told is not None
    own = Shell(Path(told[1]))
    assert own.home.parent == temporary
    assert set(processes.find(own.home)) == {"kafka", "zookeeper"}
    assert own("up", "--ephemeral", "--json").document["started"] == []
    assert own("down").code == 0
    assert processes.find(own.home) == {}
    assert list(temporary.iterdir()) == []
    assert not shell.home.exists()


def test_a_port_for_a_gateway_that_is_not_wanted_is_refused(shell: Shell) -> None:
    answer = shell("up", *FAST, "--no-gateway", "--gateway-port", "9192")
    assert answer.code == ExitCode.USAGE
    assert "--no-gateway and --gateway-port exclude each other" in answer.error


def test_no_jars_and_no_repository_is_one_clear_line(shell: Shell, tmp_path: Path) -> None:
    nowhere = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "ROLLBRIDGE_MAVEN_REPOSITORY": f"http://127.0.0.1:{free_port()}",
        "no_proxy": "127.0.0.1",
    }
    answer = Shell(shell.home, nowhere)("up", *FAST, "--json")
    assert answer.code == ExitCode.ENVIRONMENT
    error = json.loads(answer.err.splitlines()[-1])["error"]
    assert error["code"] == "environment"
    assert "check the network" in error["message"]
    assert processes.find(shell.home) == {}


def test_a_start_that_fails_half_way_stops_what_it_started(shell: Shell) -> None:
    data = shell.home / "kafka" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\nnode.id=99\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\n")
    answer = shell("up", *FAST)
    assert answer.code == ExitCode.ENVIRONMENT
    assert re.search(r"kafka ended while it was starting: .*99.*; more in ", answer.error)
    assert processes.find(shell.home) == {}
    assert parts(shell) == {"kafka": "stopped", "zookeeper": "stopped"}
    assert shell("down").code == 0


def test_a_start_that_was_killed_half_way_can_be_stopped_and_repeated(shell: Shell) -> None:
    with shell.popen("up", *FAST) as starting:
        eventually(lambda: processes.find(shell.home), "a part is started")
        starting.kill()
    assert processes.find(shell.home)
    assert shell("down").code == 0
    assert processes.find(shell.home) == {}
    assert shell("up", *FAST).code == 0
    assert shell("down").code == 0


def test_what_a_killed_start_left_running_is_waited_for_by_the_next(shell: Shell) -> None:
    with shell.popen("up", *FAST) as starting:
        eventually(lambda: "kafka" in processes.find(shell.home), "the broker is started")
        starting.kill()
    pid = only(processes.find(shell.home)["kafka"]).pid
    answer = shell("up", "--json")
    assert answer.code == 0, answer.err
    assert answer.document["started"] == []
    assert only(processes.find(shell.home)["kafka"]).pid == pid
    assert probes.kafka_cluster_id(answer.document["bootstrap_servers"]) is not None
    assert shell("down").code == 0


def test_ctrl_c_during_a_start_leaves_nothing(shell: Shell) -> None:
    with shell.popen("up", *FAST) as starting:
        eventually(lambda: processes.find(shell.home), "a part is started")
        starting.send_signal(signal.SIGINT)
        _, err = starting.communicate(timeout=240)
    assert starting.returncode == ExitCode.INTERRUPTED
    assert "rollbridge: interrupted" in err
    assert processes.find(shell.home) == {}


def test_starts_at_the_same_time_start_each_part_once(shell: Shell) -> None:
    starting = [shell.popen("up", *FAST, "--json") for _ in range(3)]
    answers = [(process.communicate(timeout=240), process.returncode) for process in starting]
    assert [code for _, code in answers] == [0, 0, 0]
    started = [part for (out, _), _ in answers for part in json.loads(out)["started"]]
    assert sorted(started) == ["kafka", "zookeeper"]
    assert {part: len(found) for part, found in processes.find(shell.home).items()} == {"kafka": 1, "zookeeper": 1}
    assert shell("down").code == 0


def test_an_unreadable_state_file_keeps_nothing_running(shell: Shell) -> None:
    assert shell("up", *FAST).code == 0
    (shell.home / "cluster.json").write_text("{")
    assert "cluster.json is not readable" in shell("status").error
    assert shell("down").code == 0
    assert processes.find(shell.home) == {}
