"""What an import costs a program that may not need us in the end: a command-line tool, a test, a Spark worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row

_TIMES: Final = 5
_PEER: Final = "import confluent_kafka"
_CONNECT: Final = "from rollbridge import connect"


def experiment(*, rounds: int) -> Experiment:
    """Processor time of processes that import and end, less that of one that imports nothing."""
    return Experiment(
        name="imports",
        rounds=rounds,
        sides={OURS: _importing("import rollbridge"), _PEER: _importing(_PEER), _CONNECT: _importing(_CONNECT)},
        rows=[
            Row(
                name="imports",
                title="processor time of `import rollbridge`, beside `import confluent_kafka`; bar: 3x",
                metric="milliseconds",
                unit="ms",
                better=Better.LESS,
                bar=3.0,
                peers=(_PEER,),
            ),
            Row(
                name="imports-connect",
                title="the same of `from rollbridge import connect`, which loads all that a client needs",
                metric="milliseconds",
                unit="ms",
                better=Better.LESS,
                ours=_CONNECT,
                peers=(_PEER,),
            ),
        ],
    )


def _importing(statement: str) -> Callable[[], Measured]:
    def measure() -> Measured:
        spent_s = min(_cpu_s(statement) for _ in range(_TIMES)) - min(_cpu_s("pass") for _ in range(_TIMES))
        return {"milliseconds": max(spent_s, 0.0001) * 1_000}

    return measure


def _cpu_s(statement: str) -> float:
    """User and system time of one process."""
    process = subprocess.Popen([sys.executable, "-c", statement])
    _, status, spent = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{statement!r} failed")
    return spent.ru_utime + spent.ru_stime
