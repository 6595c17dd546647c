"""A Flink job with an exactly-once sink as a process: it can be killed, and go on from its latest checkpoint.

``FlinkJob.java`` writes ``PREFIX-0``, ``PREFIX-1`` and so on into a topic, in a JVM that holds all of Flink.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from threading import Thread
from typing import Final, Self

from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command

STRATEGIES: Final = ("POOLING", "INCREMENTING")
"""How its sink names transactions: from a pool, or a new name for each checkpoint and subtask."""
_PROGRAM: Final = Path(__file__).with_name("FlinkJob.java")
OPENED: Final = ("--add-opens=java.base/java.util=ALL-UNNAMED", "--add-opens=java.base/java.lang=ALL-UNNAMED")
"""Options that a JVM with Flink in it needs."""


class FlinkJob:
    """One life of a job. Ends with its ``with`` block, at once.

    Attributes:
        checkpoints: How many checkpoints of this life the job was told to be complete.
        failed: Whether it has thrown the exception that ``fail_at`` asked for.
    """

    def __init__(self, folder: Path, **given: object) -> None:
        """Start it; arguments as in the head of ``FlinkJob.java``, without ``checkpoints``, which are in the folder."""
        folder.mkdir(exist_ok=True)
        self._checkpoints = folder / "checkpoints"
        self.checkpoints = 0
        self.failed = self.done = False
        self.log = folder / f"flink-{len(list(folder.glob('flink-*.log')))}.log"
        wanted = {"checkpoints": self._checkpoints, **given}
        arguments = [f"{name}={value}" for name, value in wanted.items() if value is not None]
        jars = JarCache.default().ensure("flink")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program_command(_PROGRAM, jars, heap="700m", options=OPENED), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reading = Thread(target=self._read)
        self._reading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word = line.split()[0] if line.strip() else ""
            self.checkpoints += word == "checkpoint"
            self.failed |= word == "failed"
            self.done |= word == "done"

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def finish(self, timeout_s: float) -> None:
        """Wait until it has written everything.

        Raises:
            subprocess.TimeoutExpired: it has not, in time.
            RuntimeError: it has failed.
        """
        code = self.process.wait(timeout_s)
        self._reading.join()
        if code or not self.done:
            raise RuntimeError(f"the job ended with {code}: {self.said()}")

    def kill(self) -> None:
        """SIGKILL it; harmless once it is gone."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def latest_checkpoint(self) -> Path:
        """Return the folder of the latest complete checkpoint on disk, of any life."""
        return self.latest(self._checkpoints.parent)

    @staticmethod
    def latest(folder: Path) -> Path:
        """Return the folder of the latest complete checkpoint of the job in a folder.

        Raises:
            RuntimeError: there is none.
        """
        found = sorted(folder.glob("checkpoints/*/chk-*/_metadata"), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            raise RuntimeError(f"no checkpoint in {folder} is complete")
        return found[-1].parent

    def said(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")[-12_000:]
