"""Run for long, with random faults, and print a report: ``make soak MINUTES=30``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from integration_tests.backends.choice import Backend, descriptions
from integration_tests.backends.container_nodes import prepare
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.interface import AnyCluster, Unsupported
from integration_tests.backends.local import LocalCluster
from integration_tests.history import gateway_run
from integration_tests.history.events import Fault
from integration_tests.history.report import Report, put_section, summary
from integration_tests.history.run import Run, running
from integration_tests.history.trial import KAFKA_SETTINGS, WINDOWS
from integration_tests.three_brokers import ThreeBrokers

SECTIONS: Final = {Backend.LOCAL: "processes", Backend.DOCKER: "containers"}
"""Where the summary of each backend stands in docs/soak.md."""
GATEWAYS: Final = "gateways"
CUTS: Final = "cuts"


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
    parser.add_argument(
        "--cuts",
        action="store_true",
        help="three brokers as processes, any of which is cut off from the others and from clients, too; for root",
    )
    parser.add_argument(
        "--gateways",
        action="store_true",
        help="write through gateways alone, and break these; only on processes",
    )
    parser.add_argument(
        "--report", type=Path, default=None, help="put a summary into this document, in the section of the backend"
    )
    arguments = parser.parse_args()
    if arguments.report is not None and not arguments.report.is_file():
        parser.error(f"{arguments.report} is no document; nothing was run")
    if arguments.gateways and arguments.backend != Backend.LOCAL:
        parser.error("gateways run on processes only; nothing was run")
    if arguments.cuts and (arguments.gateways or arguments.backend != Backend.LOCAL):
        parser.error("--cuts goes with processes alone; nothing was run")
    if arguments.backend == Backend.DOCKER:
        try:
            prepare()
        except Unsupported as exc:
            print(f"make soak: {exc}", file=sys.stderr)
            return 2
        print("\n".join(f"- {line}" for line in descriptions()), end="\n\n", flush=True)
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    deadline = time.monotonic() + arguments.minutes * 60
    reports: list[Report] = []
    # Each history is checked before the next one is begun, with the next seed, on servers of its own.
    while time.monotonic() < deadline:
        folder = Path(tempfile.mkdtemp(prefix=f"history-{seed}-", dir=arguments.keep))
        report = one(servers_of(arguments), seed, folder, deadline, gateways=arguments.gateways)
        if arguments.keep is None and not report.found:
            shutil.rmtree(folder)
        print("\n".join(report.lines()), end="\n\n", flush=True)
        reports.append(report)
        seed += 1
    command = f"make soak MINUTES={arguments.minutes:g}"
    command += ' ARGS="--backend docker"' if arguments.backend == Backend.DOCKER else ""
    command += ' ARGS="--gateways"' if arguments.gateways else ""
    command += ' ARGS="--cuts"' if arguments.cuts else ""
    lines = list(summary(reports, command))
    print("\n".join(lines), flush=True)
    if arguments.report is not None:
        section = GATEWAYS if arguments.gateways else CUTS if arguments.cuts else SECTIONS[arguments.backend]
        put_section(arguments.report, section, lines)
    return 1 if any(report.found for report in reports) else 0


def servers_of(arguments: argparse.Namespace) -> AnyCluster:
    """Return the servers of one history, which do not run yet."""
    if arguments.backend == Backend.DOCKER:
        return ContainerCluster(brokers=3, zookeepers=3, stalling=True)
    if arguments.cuts:
        return ThreeBrokers(kafka_settings=KAFKA_SETTINGS)
    return LocalCluster(kafka_settings=KAFKA_SETTINGS, stalling=True)


def one(servers: AnyCluster, seed: int, folder: Path, deadline: float, *, gateways: bool = False) -> Report:
    """One history; one that does not come to its end is a finding."""
    run: Run | gateway_run.GatewayRun | None = None
    try:
        with ExitStack() as ending:
            ending.enter_context(servers)
            try:
                if gateways:
                    run = ending.enter_context(gateway_run.running(seed, folder, servers))
                else:
                    run = ending.enter_context(running(seed, folder, servers))
                for _ in range(WINDOWS):
                    if time.monotonic() < deadline:
                        run.window(run.random_fault(), broken_s=gateway_run.BROKEN_S if gateways else 5)
                return run.end()
            except Exception:
                servers.keep_logs(folder / "servers")
                raise
    except Exception as fault:
        traceback.print_exc()
        report = Report(seed, "servers of its own") if run is None else run.report
        report.found.append(Fault("no end", f"seed {seed}, {folder}: {type(fault).__name__}: {fault}"))
        return report


if __name__ == "__main__":
    sys.exit(main())
