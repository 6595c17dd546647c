"""Settings that hold for the tests of all packages, and in which order test processes take them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from rollbridge.base.logs import MARK

EXAMPLES = int(os.environ.get("EXAMPLES", "40"))
"""How many examples each property is tried with. The same ones each time, so that no run fails for what another commit
did; where a number is given, new ones are searched for."""

# Timing says nothing on a shared machine, so neither slow examples nor slow generation fail a test. The blob that
# repeats a failure is printed.
settings.register_profile(
    "rollbridge",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=EXAMPLES,
    derandomize="EXAMPLES" not in os.environ,
)
settings.load_profile("rollbridge")

# Images of containers tend to set this. Tests start hundreds of coordinators and clients, and each would compile all
# modules again: a third of the CPU time of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # and this process would rewrite the assertions of all tests again, each time

# A process that is ended because it hangs prints the stacks of all its threads first (integration_tests/patience.py).
os.environ["PYTHONFAULTHANDLER"] = "1"

# A shell that starts tests in the background has them ignore interrupts, and all that they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "integration_tests/test_hostile_clients.py",
    "integration_tests/test_poison.py",
    "integration_tests/test_consumer.py",
    "integration_tests/test_security.py",
    "integration_tests/test_gateway_librdkafka.py",
    "integration_tests/test_gateway_forgetting.py",
)
"""Files that take longest: test processes take them first, so that none is left with one of them at the end."""

SPARK = "integration_tests/test_spark"
"""How files begin that need Spark: one process takes them all, before everything else, so that there is one JVM."""

CONTAINERS = "integration_tests/containers/"
"""Where tests on containers are: one process takes them all, so that there is one cluster of them."""

SINGLY = (
    "coordinator/tests/test_simulation.py",
    "coordinator/tests/test_restored_simulation.py",
    "integration_tests/test_crash_points.py",
)
"""Files whose tests share nothing: they come last, test by test, wherever a process has nothing else to do."""

SECONDS = "TEST_SECONDS"
"""For how long tests are begun; the others are skipped. So a slow machine does as much as it comes to."""
TURN = "TEST_TURN"
"""A number that decides which files come first then, so that in the course of some runs all of them do. Those with
tests on containers are always first."""
_UNTIL = "ROLLBRIDGE_TESTS_UNTIL"


class _DefectHandler(logging.Handler):
    """Keeps what this process logs as a defect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(MARK):
            self.found.append(self.format(record))


_DEFECTS = _DefectHandler()


@pytest.fixture
def defects_elsewhere() -> Callable[[], list[str]]:
    """Return what other processes of ours have logged as defects since the last call; here there are none."""
    return list


@pytest.fixture(autouse=True)
def _no_defect(request: pytest.FixtureRequest, defects_elsewhere: Callable[[], list[str]]) -> Iterator[None]:
    """Fail a test during which a defect was logged; ``logs_defects`` is for those that provoke one."""
    root = logging.getLogger()
    root.addHandler(_DEFECTS)
    yield
    root.removeHandler(_DEFECTS)
    found = [*_DEFECTS.found, *defects_elsewhere()]
    _DEFECTS.found.clear()
    if request.node.get_closest_marker("logs_defects") is None:
        assert not found, "a defect was logged:\n" + "\n".join(found)
    else:
        assert found, "this test provokes no defect any more: take its mark away"


class _FailuresAtOnce:
    """Names a test that fails, and the first line of why, at once; all of it follows at the end of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            lines = report.longreprtext.splitlines()
            why = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")
            reporter.ensure_newline()
            reporter.write_line(f"{report.nodeid}: {why}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """The time of all test processes begins now, and the first one of them tells of failures."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_FailuresAtOnce(config))
    if os.environ.get(SECONDS):
        os.environ[_UNTIL] = str(time.time() + float(os.environ[SECONDS]))


def pytest_collection() -> None:
    """Collect without looking for garbage: of 12,000 tests nothing can go, and each look would take longer."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from now on, but not among the tests."""
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark those cases of a test as long that ``long_cases`` names."""
    case = getattr(item, "callspec", None)
    if case is not None and any(case.id in mark.args for mark in item.iter_markers("long_cases")):
        item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test for which there is no time left is skipped before anything is started for it."""
    if time.time() > float(os.environ.get(_UNTIL) or "inf"):
        pytest.skip(f"the {os.environ.get(SECONDS)} s of {SECONDS} are over")


def _rank(item: pytest.Item) -> int:
    """When the file of a test is taken: what needs no servers first, so that a mistake shows within a minute."""
    file = item.nodeid.partition("::")[0]
    if file in SINGLY:
        return 1002 + SINGLY.index(file)
    if not file.startswith("integration_tests/"):
        return -3
    if file.startswith(SPARK):
        return -2
    if file.startswith(CONTAINERS):
        return -1
    return LONGEST.index(file) if file in LONGEST else 1000


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files when several processes share them; one process alone keeps the usual order."""
    turn = os.environ.get(TURN)
    if turn:
        items.sort(key=lambda item: (not _is_contained(item), crc32(f"{turn} {_share(item.nodeid)}".encode())))
    elif os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=_rank)


def _is_contained(item: pytest.Item) -> bool:
    return item.get_closest_marker("containers") is not None


def _share(nodeid: str) -> str:
    """What one process takes at once, of which a test is part."""
    file = nodeid.partition("::")[0]
    for together in (SPARK, CONTAINERS):
        if file.startswith(together):
            return together
    return nodeid if file in SINGLY else file


class _Scheduling(LoadFileScheduling):
    """File by file, but for those whose tests are taken singly, and those that are taken together."""

    def _split_scope(self, nodeid: str) -> str:
        return _share(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """In place of ``--dist loadfile``, which by itself takes files with many tests first, however short these are."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _Scheduling(config, log)
