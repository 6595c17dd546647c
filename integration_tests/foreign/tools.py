"""Kafka's own command-line tools, as ``bin/kafka-*.sh`` of a distribution starts them, in one virtual machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final, NamedTuple, Self

from integration_tests.patience import await_exit
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command

_PROGRAM: Final = Path(__file__).with_name("Tools.java")


class Said(NamedTuple):
    """Exit code of a tool, and what it has printed."""

    code: int
    text: str


class KafkaTools:
    """Runs tools one after the other; ends with its ``with`` block."""

    def __init__(self, log: Path) -> None:
        """Start it; ``log`` is for what no tool has printed."""
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            program_command(_PROGRAM, JarCache.default().ensure("kafka", "tools", quiet=True)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def run(self, program: str, *arguments: str) -> Said:
        """Run a tool, by its class, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join((program, *arguments)).encode() + b"\n")
        self._process.stdin.flush()
        head = self._process.stdout.readline().split()
        assert len(head) == 2, Path(self._log.name).read_text()[-3000:]
        return Said(int(head[0]), self._process.stdout.read(int(head[1])).decode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await_exit(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
