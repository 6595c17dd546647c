"""Run for long, with random faults, and print a report: ``make soak MINUTES=30``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from integration_tests.backends.choice import Backend
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.engine import descriptions, prepare
from integration_tests.backends.interface import AnyCluster, Unsupported
from integration_tests.backends.local import LocalCluster
from integration_tests.history.run import running

WINDOWS_PER_RUN = 12
"""Then the history is checked and another one is begun, with the next seed, on servers of its own."""


def main() -> int:
    """0 if nothing was found, 1 if something was, 2 if there is no container engine for what was asked for."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; the last history is finished")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first history; printed otherwise")
    parser.add_argument("--keep", type=Path, default=None, help="directory for what clients noted; gone otherwise")
    parser.add_argument(
        "--backend",
        choices=[Backend.LOCAL, Backend.DOCKER],
        default=Backend.LOCAL,
        help="local: one broker and one ZooKeeper as processes; docker: three of each in containers",
    )
    arguments = parser.parse_args()
    if arguments.backend == Backend.DOCKER:
        try:
            prepare()
        except Unsupported as exc:
            print(f"make soak: {exc}", file=sys.stderr)
            return 2
        print("\n".join(f"- {line}" for line in descriptions()), end="\n\n", flush=True)
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    deadline = time.monotonic() + arguments.minutes * 60
    findings = 0
    while time.monotonic() < deadline:
        folder = Path(tempfile.mkdtemp(prefix=f"history-{seed}-", dir=arguments.keep))
        with ExitStack() as ending:
            docker = arguments.backend == Backend.DOCKER
            servers: AnyCluster = ContainerCluster(brokers=3, zookeepers=3) if docker else LocalCluster()
            run = ending.enter_context(running(seed, folder, ending.enter_context(servers)))
            for _ in range(WINDOWS_PER_RUN):
                if time.monotonic() < deadline:
                    run.window(run.random_fault(), broken_s=5)
            report = run.end()
        if arguments.keep is None:
            shutil.rmtree(folder)
        print("\n".join(report.lines()), end="\n\n", flush=True)
        findings += len(report.found)
        seed += 1
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
