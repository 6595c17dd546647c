"""Where the lines of a program's log go, and in which form: for commands and coordinators, never for the library.

Text is for people; JSON, one object in each line, for whatever collects logs. What libraries write goes the same way:
librdkafka's lines come from loggers whose names end in ``librdkafka``, Python's warnings from ``py.warnings``, and an
exception that ends a thread is a line, too.

A file is opened anew when somebody has moved it, as ``logrotate`` does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from rollbridge.defects import log_defect
from rollbridge.errors import ConfigError
from rollbridge.model.text import printable, printable_lines

TEXT: Final = "text"
JSON: Final = "json"
FORMATS: Final = (TEXT, JSON)

FORMAT_VARIABLE: Final = "ROLLBRIDGE_LOG_FORMAT"
FILE_VARIABLE: Final = "ROLLBRIDGE_LOG_FILE"

SERVICE_FORMAT: Final = "%(asctime)s %(levelname)-7s %(threadName)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutput:
    """Where lines go, and how they look."""

    format: str = TEXT
    """``text`` or ``json``."""
    file: str = ""
    """The file; standard error if empty."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"log_format: {self.format!r} is not one of {', '.join(FORMATS)}")

    @classmethod
    def of(cls, given: Mapping[str, str | None], environ: Mapping[str, str] | None = None) -> LogOutput:
        """Return settings from options and environment variables; options win.

        Args:
            given: Options by name, without ``log_``; None where not given.
            environ: The environment; that of this process by default.

        Raises:
            ConfigError: some are wrong; all of them are named.
        """
        environ = os.environ if environ is None else environ
        return cls(
            format=given.get("format") or environ.get(FORMAT_VARIABLE) or TEXT,
            file=given.get("file") or environ.get(FILE_VARIABLE) or "",
        )


class TextFormatter(logging.Formatter):
    """One line for each message, whatever strangers have put into it; a traceback is indented, and looks like none."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _set_in(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _set_in(super().formatStack(stack_info))


def _set_in(text: str) -> str:
    return indent(printable_lines(text), "  ")


class JsonFormatter(logging.Formatter):
    """One JSON object in one line: time in UTC, level, logger, thread, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def handler_of(settings: LogOutput, text_format: str) -> logging.Handler:
    """Return the handler for a program's root logger.

    Raises:
        ConfigError: the file cannot be written.
    """
    handler = _destination(settings)
    handler.setFormatter(JsonFormatter() if settings.format == JSON else TextFormatter(text_format))
    return handler


def _destination(settings: LogOutput) -> logging.Handler:
    if not settings.file:
        return logging.StreamHandler(sys.stderr)
    path = Path(settings.file).expanduser()
    try:
        return WatchedFileHandler(path, encoding="utf-8")
    except OSError as fault:
        raise ConfigError(f"log_file: {path} cannot be written ({fault}); nothing was done") from fault


def set_up_service_log(logger: logging.Logger, level: str, given: Mapping[str, str | None]) -> None:
    """Send the lines of a service where options and environment say, unless the command line has done so before.

    Args:
        logger: Takes what libraries write and what ends a thread.
        level: Name of the lowest level that is written, in any case.
        given: Options of the command line, as :meth:`LogOutput.of` takes them.

    Raises:
        ConfigError: an option is wrong, or the file cannot be written.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(handler_of(LogOutput.of(given), SERVICE_FORMAT))
    # The command line's level suits short commands.
    root.setLevel(level.upper())
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    take_all(logger)
    if any(isinstance(handler, logging.FileHandler) for handler in root.handlers):
        # Whoever moves the file may say so by this signal, which would end the process; a moved file is noticed anyway.
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def is_json() -> bool:
    """Return whether lines are JSON, for somebody who understands nothing else."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def take_all(logger: logging.Logger) -> None:
    """Have warnings, and exceptions that end a thread or this program, logged instead of printed."""
    logging.captureWarnings(True)

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is not SystemExit and ended.exc_value is not None:
            name = "a thread" if ended.thread is None else f"thread {ended.thread.name}"
            log_defect(logger, "%s has ended", name, fault=ended.exc_value)

    threading.excepthook = thread_ended
