"""Run for long, with random faults, and print a report: ``make soak MINUTES=30``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from integration_tests.history.run import running

WINDOWS_PER_RUN = 12
"""Then the history is checked and another one is begun, with the next seed, on servers of its own."""


def main() -> int:
    """0 if nothing was found, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; the last history is finished")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first history; printed otherwise")
    parser.add_argument("--keep", type=Path, default=None, help="directory for what clients noted; gone otherwise")
    arguments = parser.parse_args()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    deadline = time.monotonic() + arguments.minutes * 60
    findings = 0
    while time.monotonic() < deadline:
        folder = Path(tempfile.mkdtemp(prefix=f"history-{seed}-", dir=arguments.keep))
        with running(seed, folder) as run:
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
