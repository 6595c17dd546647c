"""The cause of a broken cluster is found from board, page and ``doctor`` alone, and what these say to do mends it.

The clusters are those of the exercise, :mod:`integration_tests.troubles`. Each test asks what an operator would look at
who has never seen the cluster, expects that it names the culprit, and does literally what the doctor prints.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.browser import CHROMIUM, DRIVER, await_text, browser
from integration_tests.coordinators import SESSION_TIMEOUT_S
from integration_tests.pages import ask_page, read_page
from integration_tests.patience import PATIENCE_S, end, eventually
from integration_tests.prometheus_server import JOB, Prometheus, panels
from integration_tests.troubles import (
    GUEST,
    LABEL,
    OLD_AFTER_S,
    OUTSIDER,
    PREFIX,
    ROOT,
    TROUBLES,
    Scene,
    Trouble,
    main,
)
from integration_tests.troubles import (
    JOB as DEAD_JOB,
)
from rollbridge.cli.common import ExitCode
from rollbridge_devcluster.__main__ import write_tools
from rollbridge_devcluster.state import LOOPBACK

T = TypeVar("T")
BY_NAME = {trouble.name: trouble for trouble in TROUBLES}
OF_ALL = {"quota", "no-coordinator", "no-gateway", "gateway-hangs"}
"""Findings that name no group."""

pytestmark = pytest.mark.slow


class Operator:
    """Whoever has a board, pages and the command line, and knows nothing else."""

    def __init__(self, scene: Scene, prometheus: Prometheus, tools: Path) -> None:
        self.scene = scene
        self.prometheus = prometheus
        self._tools = tools

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line as it was printed, to its end."""
        words = shlex.split(command)
        program, arguments = words[0], words[1:]
        if program == "rollbridge":
            words = self.scene.command(*arguments)
        else:
            words[0] = str(self._tools / program)
        environment = {**os.environ, **self.scene.environment}
        return subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def findings(self, old: str = f"{OLD_AFTER_S}s") -> dict[str, dict[str, Any]]:
        """What the doctor finds of this cluster's groups, by check; others share the brokers."""
        done = self.run(f"rollbridge --json doctor --old={old}")
        assert done.returncode in (ExitCode.OK, ExitCode.FINDINGS), done
        scope = self.scene.group.scope
        found = json.loads(done.stdout)["findings"]
        ours = [item for item in found if scope in item["what"] or item["check"] in OF_ALL]
        return {item["check"]: item for item in ours}

    def diagnosis(self, check: str, culprit: str) -> dict[str, Any]:
        """The finding of this name that names a culprit, once there is one."""

        def found() -> dict[str, Any] | None:
            item = self.findings().get(check, {"what": ""})
            return item if culprit in item["what"] else None

        return seen(found, f"the doctor finds {check} with {culprit}")

    @property
    def pages(self) -> list[str]:
        """The pages, that of the leader first, if it is known."""
        urls = list(self.scene.pages.values())
        return sorted(urls, key=lambda url: not read_page(url, f"groups/{self.scene.group}")["here"])

    def page(self) -> Any:
        """What the leader's page says of the group."""
        return read_page(self.pages[0], f"groups/{self.scene.group}")

    def page_findings(self) -> str:
        """What the doctor on a page finds, which looks when somebody does, and then once a minute at most."""
        found = read_page(self.pages[0], "doctor")["findings"]
        return "; ".join(f"{item['check']}: {item['what']}; {item['remedy']}" for item in found)

    def is_over(self, alert: str, *checks: str) -> None:
        """Wait until the alert has been resolved, the doctor finds none of this any more, and the load commits."""
        self.prometheus.await_calm(alert)
        eventually(lambda: not self.findings().keys() & {*checks}, f"the doctor finds none of {checks}")
        before = self.scene.load.committed
        eventually(lambda: self.scene.load.committed > before, "the load commits")


def seen(look: Callable[[], T | None], what: str) -> T:
    """What a look gives once it gives something."""
    found: list[T] = []

    def is_there() -> bool:
        item = look()
        if item:
            found.append(item)
        return bool(item)

    eventually(is_there, what)
    return found[0]


def series(operator: Operator, title: str) -> list[tuple[dict[str, str], float]]:
    """What a panel of the board shows, below its first row: labels and values of all its lines."""
    [panel] = [panel for panel in panels("timeseries", "heatmap") if panel["title"] == title]
    return [item for target in panel["targets"] for item in operator.prometheus.series(target["expr"])]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Kafka's own commands, which the doctor names."""
    write_tools(tmp_path / "kafka")
    return tmp_path / "kafka"


@pytest.fixture
def on_call(
    cluster: AnyCluster, unique_name: Callable[[str], str], scope: str, tmp_path: Path, tools: Path
) -> Callable[[Trouble], Any]:
    """Makes a scene that is well, and an operator of it."""

    @contextmanager
    def make(trouble: Trouble) -> Iterator[Operator]:
        scene = Scene(cluster, f"/{unique_name('trouble')}", tmp_path, scope, trouble.names, trouble.gateways)
        with (
            scene,
            Prometheus(tmp_path / "prometheus", list(scene.metrics.values()), trouble.limits) as prometheus,
        ):
            eventually(
                lambda: prometheus.value("count(rollbridge_coordinator_info)") == len(trouble.names),
                "Prometheus has seen it while it was well",
            )
            if trouble.gateways:
                eventually(lambda: prometheus.value("sum(rollbridge_gateway_healthy)"), "the gateways as well")
            yield Operator(scene, prometheus, tools)

    return make


Make = Callable[[Trouble], Any]


def test_a_dead_job_that_holds_the_buffers(on_call: Make) -> None:
    trouble = BY_NAME["dead job"]
    with on_call(trouble) as operator, trouble.break_it(operator.scene):
        [named] = seen(
            lambda: re.findall(
                rf"The oldest open transaction is (\S+) of client ({DEAD_JOB}), labelled (.+?)\.",
                operator.prometheus.await_firing("OldTransaction", job=JOB, group=str(operator.scene.group))[
                    "description"
                ],
            ),
            "the alert names the job",
        )
        eventually(
            lambda: (
                DEAD_JOB in [labels["client"] for labels, _ in series(operator, "Oldest transaction of each group")]
            ),
            "the board names the client",
        )
        eventually(
            lambda: any(value > 0 for _, value in series(operator, "Buffer bytes held by open transactions")),
            "the board shows what it costs",
        )

        listed = operator.page()["transactions"]["oldest"][0]
        assert (listed["transaction"], listed["client"], listed["label"]) == named
        assert named[1:] == (DEAD_JOB, LABEL)

        found = operator.diagnosis("old-transaction", DEAD_JOB)
        assert f"transaction {named[0]} of client {DEAD_JOB}, labelled {LABEL}, has been open" in found["what"]
        assert str(operator.scene.stream) in found["what"]
        assert found["alerts"] == ["RollbridgeOldTransaction"]
        [command] = re.findall(r"rollbridge txn abort \S+?(?=;)", found["remedy"])
        done = operator.run(command)
        assert done.returncode == 0, done
        operator.is_over("OldTransaction", "old-transaction")


def test_a_quota_that_holds_a_leader_back(on_call: Make) -> None:
    trouble = BY_NAME["held back"]
    with on_call(trouble) as operator, trouble.break_it(operator.scene):
        stream = str(operator.scene.stream)
        operator.prometheus.await_firing("FoldLag", job=JOB, group=str(operator.scene.group), stream=stream)
        eventually(lambda: operator.prometheus.shown("Fold lag")[1] != "green", "the board's lag is not good")

        eventually(lambda: operator.page()["streams"][0]["lag_ms"] > 1_000, "the page shows the lag")
        slow = "Kafka slows client id rollbridge down (consumer_byte_rate=20000)"
        eventually(lambda: slow in operator.page_findings(), "the page's doctor says why")

        found = operator.diagnosis("quota", "client id rollbridge")
        assert found["alerts"] == ["RollbridgeFoldLag"]
        done = operator.run(found["remedy"])
        assert done.returncode == 0, done
        operator.is_over("FoldLag", "quota")


def test_a_last_coordinator_that_hangs(on_call: Make, tmp_path: Path) -> None:
    trouble = BY_NAME["hanging"]
    [name] = trouble.names
    with on_call(trouble) as operator, ExitStack() as stack, trouble.break_it(operator.scene):
        scene = operator.scene
        operator.prometheus.await_firing("NoCoordinator", job=JOB)
        operator.prometheus.await_firing("CoordinatorDown", job=JOB, instance=scene.metrics[name])
        assert operator.prometheus.shown("Groups without leader") == (-1, "red")

        with pytest.raises(TimeoutError):
            ask_page(scene.pages[name], "/api/v1/overview", timeout_s=2 * SESSION_TIMEOUT_S)
        assert scene.processes[name].poll() is None, "its process is there"

        found = operator.diagnosis("no-coordinator", f"none is registered; {name} led the groups last")
        assert found["alerts"] == ["RollbridgeNoCoordinator"]
        [command] = re.findall(r"rollbridge coordinator$", found["remedy"])
        log = tmp_path / "second.log"
        settings = {f"{PREFIX}METRICS_ADDRESS": f"{LOOPBACK}:0", f"{PREFIX}NAME": "second"}
        scene.environment.update(settings)
        second = scene.start(scene.command(*command.split()[1:]), log)
        stack.callback(end, second, log)
        eventually(lambda: not operator.findings().keys() & {"no-coordinator", "no-leader"}, "a second one leads")
        before = scene.load.committed
        eventually(lambda: scene.load.committed > before, "what has waited is committed")
        os.kill(scene.processes[name].pid, signal.SIGCONT)
        operator.is_over("NoCoordinator", "no-coordinator", "no-leader")


def test_a_topic_that_somebody_has_changed(on_call: Make) -> None:
    trouble = BY_NAME["compacted"]
    with on_call(trouble) as operator, trouble.break_it(operator.scene):
        stream, topic = str(operator.scene.stream), operator.scene.segment_topic
        said = operator.prometheus.await_firing(
            "StreamInError", job=JOB, group=str(operator.scene.group), stream=stream
        )
        assert stream in said["summary"]
        eventually(lambda: operator.prometheus.shown("Streams in error") == (1, "red"), "the board is red")

        fault = seen(lambda: operator.page()["streams"][0]["fault"], "the page shows the fault")
        assert fault["topic"] == topic
        assert "cleanup.policy" in fault["reason"]

        operator.diagnosis("stream-error", topic)
        found = operator.diagnosis("retention", f"topic {topic} by itself, after a change by hand: cleanup.policy=")
        assert "RollbridgeStreamInError" in found["alerts"]
        done = operator.run(found["remedy"])
        assert done.returncode == 0, done
        operator.is_over("StreamInError", "retention", "stream-error")


def test_a_program_that_writes_into_a_buffer(on_call: Make, tmp_path: Path) -> None:
    trouble = BY_NAME["outsider"]
    with on_call(trouble) as operator, trouble.break_it(operator.scene):
        buffer = operator.scene.buffer_topic
        operator.prometheus.await_firing("FramesDropped", job=JOB, group=str(operator.scene.group), reason="foreign")
        eventually(
            lambda: (
                ("foreign", True)
                in [(labels["reason"], value > 0) for labels, value in series(operator, "Dropped frames")]
            ),
            "the board shows what is dropped",
        )

        shown = seen(lambda: operator.page()["foreign"], "the page shows it")
        assert shown["topic"] == buffer
        assert json.loads(shown["value"])["app"] == OUTSIDER
        if CHROMIUM and DRIVER:
            with browser(tmp_path / "profile") as driver:
                driver.get(f"{operator.pages[0]}#/group/{operator.scene.group}")
                await_text(driver, "#foreign", buffer)
                await_text(driver, "#foreign", OUTSIDER)

        found = operator.diagnosis("foreign-messages", buffer)
        [program] = re.findall(r'"app": "([^"]+)"', found["what"])
        assert found["alerts"] == ["RollbridgeFramesDropped"]
        assert found["remedy"].startswith("stop the program that writes this")
        operator.scene.processes[program].terminate()
        operator.is_over("FramesDropped", "foreign-messages")


def test_a_last_gateway_that_hangs(on_call: Make, tmp_path: Path) -> None:
    trouble = BY_NAME["hanging gateway"]
    [name] = trouble.gateways
    with on_call(trouble) as operator, ExitStack() as stack, trouble.break_it(operator.scene):
        scene = operator.scene
        gateway, guest = scene.gateways[name], scene.guest
        assert guest is not None
        said = operator.prometheus.await_firing("NoGateway", job=JOB)
        assert said["runbook_url"].endswith("#rollbridgenogateway")
        operator.prometheus.await_firing("GatewayDown", job=JOB, instance=scene.metrics[name])
        eventually(lambda: not series(operator, "Requests at gateways"), "the board's lines end")
        assert "NoCoordinator" not in operator.prometheus.firing()

        def listed() -> dict[str, Any] | None:
            found = [item for item in operator.page()["transactions"]["oldest"] if item["transactional_id"] == GUEST]
            return found[0] if found and found[0]["gateway"] == "" else None

        shown = seen(listed, "the page says that nobody serves the producer")
        eventually(lambda: read_page(operator.pages[0], "overview")["gateways"] == [], "the page lists none any more")

        if CHROMIUM and DRIVER:
            with browser(tmp_path / "profile") as driver:
                driver.get(f"{operator.pages[0]}#/group/{operator.scene.group}")
                await_text(driver, "#oldest", f"{GUEST}, no gateway serves it")

        found = operator.diagnosis("no-gateway", f"{shown['transaction']} of transactional id {GUEST}")
        assert f"last begun with at gateway {name}" in found["what"]
        assert found["alerts"] == ["RollbridgeNoGateway"]
        before = guest.committed

        # "if the process of NAME is still there, it hangs and has its ports: end it with kill -9"
        [ended] = re.findall(r"if the process of (\S+) is still there.*kill -9", found["remedy"])
        scene.gateways[ended].kill()
        # "Then start one, at the address that clients know"
        [command] = re.findall(r"rollbridge gateway$", found["remedy"])
        where = [
            argument for argument in gateway.command if argument.startswith(("--listen=", "--name=", "--metrics="))
        ]
        log = tmp_path / "second.log"
        second = scene.start(scene.command(*command.split()[1:], *where), log)
        stack.callback(end, second, log)
        eventually(lambda: guest.committed > before, "the producer commits what it had open, and goes on")
        operator.is_over("NoGateway", "no-gateway")
        operator.prometheus.await_calm("GatewayDown")


def test_the_exercise_lists_numbers_and_hides_causes(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    assert told().split() == [str(number + 1) for number in range(len(TROUBLES))]
    assert all(trouble.cause in told("--tell") for trouble in TROUBLES)
    assert told("2", "--tell") == f"2  {TROUBLES[1].cause}\n"


def test_the_exercise_says_where_to_look_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "said"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.troubles", "5"], stdout=file, stderr=file, cwd=ROOT
        )
    try:
        eventually(lambda: process.poll() is not None or "Find the cause" in output.read_text(), "it is broken")
        said = output.read_text()
        assert process.poll() is None, said
        assert OUTSIDER not in said
        [page, *_] = re.findall(r"page of \w+ +(\S+)", said)
        assert read_page(page, "overview")["groups"]
        [doctor] = re.findall(r"^ +doctor +(\S.*)$", said, re.MULTILINE)

        def names_the_cause() -> bool:
            done = subprocess.run(shlex.split(doctor), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            return OUTSIDER in done.stdout

        eventually(names_the_cause, "the doctor names the cause")
        [folder] = {Path(path).parent for path in re.findall(r"board.* (/\S+)$", said, re.MULTILINE)}
        assert (folder / "rollbridge-board.json").is_file()
    finally:
        assert end(process) == 0, output.read_text()
    assert not folder.exists()
