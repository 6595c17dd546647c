"""Kafka's transactional producer in Java, as a process that does what it is told.

``Producer.java`` takes a word a line, and answers each with a line; see its head.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from integration_tests.patience import PATIENCE_S, await_exit
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.programs import program_command
from rollbridge_devcluster.state import KAFKA

_PROGRAM: Final = Path(__file__).with_name("Producer.java")
NEWEST: Final = "newest"
"""Kafka's client of the broker's own version, 4.2."""
OLDER: Final = "3.9"
"""Kafka's client before 4.0, which knows the first version of transactions only."""
CLIENTS: Final = (NEWEST, OLDER)


class JavaError(Exception):
    """An exception of the program. ``kind`` is the simple name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def jars_of(client: str) -> list[Path]:
    """Return the jars of a version of Kafka's client, with codecs and a log."""
    jars = JarCache.default()
    if client == NEWEST:
        return jars.ensure(KAFKA)
    others = [path for path in jars.ensure(KAFKA) if not path.name.startswith("kafka")]
    return [*jars.ensure("clients-3.9"), *others]


class JavaProducer:
    """Kafka's transactional producer in Java. Ends with its ``with`` block, at once."""

    def __init__(
        self,
        servers: str,
        transactional_id: str | None,
        log: Path,
        *,
        client: str = NEWEST,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Start the process; ``settings`` are those of the producer, as Kafka names them."""
        wanted: dict[str, object] = {
            "bootstrap.servers": servers,
            "linger.ms": 5,
            "max.block.ms": int(PATIENCE_S * 1000),
            "delivery.timeout.ms": int(PATIENCE_S * 1000),
            "request.timeout.ms": 60_000,
            "transaction.timeout.ms": 600_000,
            **({} if transactional_id is None else {"transactional.id": transactional_id}),
            **(settings or {}),
        }
        self._log = log.open("ab")
        arguments = [f"{name}={value}" for name, value in wanted.items()]
        self.process = subprocess.Popen(
            [*program_command(_PROGRAM, jars_of(client)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def do(self, *words: object) -> str:
        """Have it do something, and return what it says.

        Raises:
            JavaError: it threw an exception.
        """
        self.ask(*words)
        return self._answer()

    def ask(self, *words: object) -> None:
        """Have it do something; :meth:`answer` waits for what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Return what it says to the earliest :meth:`ask` that was not answered; raises as :meth:`do`."""
        return self._answer()

    def write(self, topic: str, first: int, end: int, *partition: int) -> None:
        """Send records from one number up to another, and wait until they are acknowledged."""
        self.do("send", topic, first, end, *partition)
        assert self.do("await") == str(end - first)

    def kill(self) -> None:
        """SIGKILL it; harmless once it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        await_exit(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip("\n")
        kind, _, rest = line.partition(" ")
        if kind == "error":
            raise JavaError(*rest.split(" ", 1))
        assert kind == "ok", f"the program ended, or said {line!r}"
        return rest
