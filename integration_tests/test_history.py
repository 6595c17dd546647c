"""Short histories of a whole cluster under faults; `make soak` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.history import gateway_run
from integration_tests.history.run import running
from integration_tests.history.trial import KAFKA_SETTINGS
from integration_tests.three_brokers import ThreeBrokers

WINDOWS = {
    1: ("kill a coordinator", "scale", "kill the broker", "pause a client", "pause ZooKeeper"),
    2: ("pause a coordinator", "kill a client", "kill ZooKeeper", "scale", "pause the broker"),
    3: ("truncate a stream", "a log loses its end", "strangers write any bytes", "keep a stream for a second"),
    4: (
        "make an adopted topic anew while a client of it stands still",
        "add partitions to an adopted topic",
        "make an adopted topic anew while a coordinator stands still",
        "release an adopted topic and adopt it again",
    ),
}
"""By seed: what is broken, one after the other."""


@pytest.mark.parametrize("seed", WINDOWS)
def test_no_promise_is_broken_under_faults(seed: int, tmp_path: Path) -> None:
    with running(seed, tmp_path) as run:
        for fault in WINDOWS[seed]:
            run.window(fault, broken_s=3)
        run.end().demand()


CUTS = {
    8: ("cut a broker off from the others", "cut a broker off from clients"),
    9: ("cut a broker off from the others and clients", "pause a broker", "kill a broker"),
}
"""By seed: what is broken, one after the other, where there are three brokers."""


@pytest.mark.parametrize("seed", CUTS)
def test_no_promise_is_broken_while_brokers_are_cut_off(seed: int, tmp_path: Path) -> None:
    with ThreeBrokers(kafka_settings=KAFKA_SETTINGS) as brokers, running(seed, tmp_path, brokers) as run:
        for fault in CUTS[seed]:
            run.window(fault, broken_s=3)
        assert not run.end().found, "\n".join(run.report.lines())


GATEWAYS = {
    5: ("kill a gateway", "pause all gateways but one", "cut a gateway off from ZooKeeper", "kill a producer"),
    6: ("kill all gateways", "hang up on a gateway's clients", "cut a gateway off from the broker", "stop a gateway"),
    7: (
        "release an adopted topic and adopt it again",
        "make a topic with the name of a stream",
        "add partitions to an adopted topic",
    ),
}
"""By seed: what is broken, one after the other, under producers that write through gateways."""


@pytest.mark.parametrize("seed", GATEWAYS)
def test_no_promise_is_broken_through_gateways(seed: int, tmp_path: Path) -> None:
    with gateway_run.running(seed, tmp_path) as run:
        for fault in GATEWAYS[seed]:
            run.window(fault)
        run.end().demand_of_gateways()
