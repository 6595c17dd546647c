"""The sink with crash points: ``format("rollbridge-crashing")``, the driver of which dies or stands still at one.

The points are ``before-commit``, ``inside-commit`` (the transaction is committed, and neither Spark's checkpoint nor
the session's record says so) and ``after-commit``, each with ``:n`` for the n-th micro-batch (default 0). The option
``crash.at`` kills the JVM of the driver and the process that commits; ``pause.at`` stops that process, as SIGSTOP does,
and a SIGCONT to the number in the file ``paused`` lets it go on.

Spark's processes import this module by name, so it must be on their ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import psutil
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from rollbridge.client.cooperative import SharedClient
from rollbridge.spark.datasource import RollbridgeSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

FORMAT: Final = "rollbridge-crashing"
CRASH: Final = "crash.at"
PAUSE: Final = "pause.at"
PAUSED: Final = "paused"
_FORM: Final = re.compile(r"((?:before|inside|after)-commit)(?::([0-9]+))?")


class CrashingSource(RollbridgeSource):
    """As the format ``rollbridge``, but for its sink."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink with the points that the options name."""
        points = {name: self.options.pop(name) for name in (CRASH, PAUSE, PAUSED) if name in self.options}
        return _CrashingSink(super().streamWriter(schema, overwrite), points)


class _CrashingSink(DataSourceStreamArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    def __init__(self, sink: DataSourceStreamArrowWriter, points: Mapping[str, str]) -> None:
        self._sink = sink
        self._points = points

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with (
            patch.object(SharedClient, "commit", self._before("before-commit", batchId, SharedClient.commit)),
            patch.object(
                SharedClient, "note_committed", self._before("inside-commit", batchId, SharedClient.note_committed)
            ),
        ):
            self._sink.commit(messages, batchId)
        self._reach("after-commit", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.abort(messages, batchId)

    def _before(self, point: str, batch: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached_first(*arguments: Any, **named: Any) -> Any:
            self._reach(point, batch)
            return call(*arguments, **named)

        return reached_first

    def _reach(self, point: str, batch: int) -> None:
        if self._is_named(PAUSE, point, batch):
            Path(self._points[PAUSED]).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._is_named(CRASH, point, batch):
            for parent in psutil.Process().parents():
                if parent.name() == "java":
                    parent.kill()
                    parent.wait()
                    break
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_named(self, option: str, point: str, batch: int) -> bool:
        text = self._points.get(option)
        if text is None:
            return False
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{option}={text!r}: before-commit, inside-commit or after-commit, and :n is expected")
        return match[1] == point and int(match[2] or 0) == batch
