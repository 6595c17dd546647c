"""A Flink job with an exactly-once sink as a process: it can be killed, and go on from its latest checkpoint.

``FlinkJob.java`` writes ``PREFIX-0``, ``PREFIX-1`` and so on into a topic, in a JVM that holds all of Flink.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final, Self

from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command

STRATEGIES: Final = ("POOLING", "INCREMENTING")
"""How its sink names transactions: from a pool, or a new name for each checkpoint and subtask."""
_PROGRAM: Final = Path(__file__).with_name("FlinkJob.java")
OPENED: Final = ("--add-opens=java.base/java.util=ALL-UNNAMED", "--add-opens=java.base/java.lang=ALL-UNNAMED")
"""Options that a JVM with Flink in it needs."""


class FlinkJob:
    """One life of a job. Ends with its ``with`` block, at once."""

    def __init__(self, folder: Path, **given: object) -> None:
        """Start it; arguments as in the head of ``FlinkJob.java``, without ``checkpoints``, which are in the folder."""
        folder.mkdir(exist_ok=True)
        life = len(list(folder.glob("flink-*.log")))
        self._log, self._told = folder / f"flink-{life}.log", folder / f"flink-{life}.out"
        wanted = {"checkpoints": folder / "checkpoints", **given}
        arguments = [f"{name}={value}" for name, value in wanted.items() if value is not None]
        command = program_command(_PROGRAM, JarCache.default().ensure("flink"), heap="700m", options=OPENED)
        with self._log.open("wb") as log, self._told.open("wb") as told:
            self.process = subprocess.Popen([*command, *arguments], stdout=told, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _words(self) -> list[str]:
        return [line.split()[0] for line in self._told.read_text().splitlines() if line.strip()]

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints of this life of which the job was told that they are complete."""
        return self._words().count("checkpoint")

    @property
    def failed(self) -> bool:
        """True if it has thrown the exception that ``fail_at`` asked for."""
        return "failed" in self._words()

    @property
    def alive(self) -> bool:
        """True if it still runs."""
        return self.process.poll() is None

    def finish(self, timeout_s: float) -> None:
        """Wait until it has written everything.

        Raises:
            subprocess.TimeoutExpired: it has not, in time.
            RuntimeError: it has failed.
        """
        code = self.process.wait(timeout_s)
        if code or "done" not in self._words():
            raise RuntimeError(f"the job ended with {code}: {self._log.read_text(errors='replace')[-12_000:]}")

    def kill(self) -> None:
        """SIGKILL it; harmless once it is gone."""
        self.process.kill()
        self.process.wait()


def latest_checkpoint(folder: Path) -> Path:
    """Return the folder of the latest complete checkpoint of the job in a folder, of any life.

    Raises:
        RuntimeError: there is none.
    """
    found = sorted(folder.glob("checkpoints/*/chk-*/_metadata"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise RuntimeError(f"no checkpoint in {folder} is complete")
    return found[-1].parent
