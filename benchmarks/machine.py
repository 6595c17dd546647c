"""What a run ran on, and how much else the machine was doing meanwhile."""

from __future__ import annotations

import itertools
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

import confluent_kafka
import psutil

from rollbridge_devcluster import processes
from rollbridge_devcluster.jars import LOCK_FILE


def describe() -> dict[str, str]:
    """Hardware and versions, in words."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} logical cores",
        "memory": f"{psutil.virtual_memory().total / 1024**3:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "confluent-kafka": f"{confluent_kafka.version()}, librdkafka {confluent_kafka.libversion()[0]}",
        "Kafka": _pinned("kafka_2.13"),
        "ZooKeeper": _pinned("zookeeper"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _pinned(artifact: str) -> str:
    found = re.search(rf"/{re.escape(artifact)}-([\w.]+)\.jar$", LOCK_FILE.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"


@dataclass(frozen=True, slots=True)
class Busy:
    """CPU seconds used so far: by everybody, and by the processes of the benchmark."""

    everybody_s: float
    ours_s: float
    at: float

    @classmethod
    def now(cls, home: Path) -> Busy:
        """Look; ``home`` is the embedded cluster's."""
        total = psutil.cpu_times()
        idle = total.idle + getattr(total, "iowait", 0.0)
        own = psutil.Process()
        members = {own, *own.children(recursive=True)}  # Spark is one of the children
        members.update(itertools.chain.from_iterable(processes.find(home).values()))
        return cls(sum(total[:8]) - idle, sum(map(_used_s, members)), time.monotonic())

    def share_of_others(self, before: Busy) -> float:
        """Which part of the machine's CPU time others have used since then."""
        available = (self.at - before.at) * (os.cpu_count() or 1)
        used = (self.everybody_s - before.everybody_s) - (self.ours_s - before.ours_s)
        return max(used, 0.0) / available


def _used_s(process: psutil.Process) -> float:
    """What a process has used, and those of its children that have ended."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0
