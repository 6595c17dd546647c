"""Set up the log's targets and formats, for commands and coordinators; never for the library.

Text is for people; JSON, one object a line, for log collectors. Lines of libraries take the same path: librdkafka's
come from loggers whose names end in ``librdkafka``, Python's warnings from ``py.warnings``. An exception that ends a
thread is logged, too. A file that was moved, as by ``logrotate``, is opened again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from logging.handlers import WatchedFileHandler
from pathlib import Path
from textwrap import indent
from typing import Any, Final

from rollbridge.base.text import printable, printable_lines
from rollbridge.errors import ConfigError

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


_PLACE: Final = re.compile(r'(=?)("?)%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])("?)')
_BARE: Final = re.compile(r'[^\s"=\\]+')


@lru_cache(1_000)
def _places(message: str) -> list[tuple[str, str]]:
    """Return the parts of a message: a text, and the place of an argument behind it; the last has none."""
    parts, end = [], 0
    for found in _PLACE.finditer(message):
        is_pair = bool(found[1]) and found[2] == found[3] and "%%" not in found[0]
        place = found[0].strip('="') if is_pair else found[0]
        parts.append((message[end : found.start()] + ("=" if is_pair else ""), f"={place}" if is_pair else place))
        end = found.end()
    return [*parts, (message[end:], "")]


def event_text(message: str, args: object) -> str:
    """Return the text of a line: a value of ``key=value`` that is not one plain word is quoted as JSON quotes it.

    So a line can be taken apart, whatever strangers have put into its values.
    """
    if not isinstance(args, tuple) or not args:
        return message % args if args else message
    text, left = "", iter(args)
    for before, place in _places(message):
        text += before
        if not place:
            continue
        if "%%" in place:
            text += place.replace("%%", "%")
        elif place.startswith("="):
            value = place.removeprefix("=").replace("r", "s") % (next(left),)
            text += (
                value if _BARE.fullmatch(value) and not value.endswith(":") else json.dumps(value, ensure_ascii=False)
            )
        else:
            text += place % (next(left),)
    return text


class TextFormatter(logging.Formatter):
    """One line for each message, whatever strangers have put into it; a traceback is indented, and looks like none."""

    def format(self, record: logging.LogRecord) -> str:
        line = copy(record)
        line.msg, line.args = event_text(str(record.msg), record.args), None
        return super().format(line)

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
            "message": event_text(str(record.msg), record.args),
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
        # logrotate may send this signal, which would end the process; a moved file is noticed without it.
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def is_json() -> bool:
    """Return whether lines are JSON, for callers that need a machine's format."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def take_all(logger: logging.Logger) -> None:
    """Have warnings, and exceptions that end a thread or this program, logged instead of printed."""
    logging.captureWarnings(True)

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is not SystemExit and ended.exc_value is not None:
            name = "unknown" if ended.thread is None else ended.thread.name
            log_defect(logger, "thread.ended thread=%r", name, fault=ended.exc_value)

    threading.excepthook = thread_ended


# Defects: errors that the code does not foresee. One kind of log line tells them, to tests and operators alike.


MARK: Final = "defect: "
"""Beginning of the message of every such line, and of no other."""


def log_defect(logger: logging.Logger, what: str, *args: object, fault: BaseException | None = None) -> None:
    """Log an error that the code does not foresee, with its stack: the present one, or ``fault``."""
    logger.error("%s%s", MARK, event_text(what, args), exc_info=True if fault is None else fault, stacklevel=2)


# Rate-limited logging: one line per cause, minute and client.
#
# librdkafka logs up to 22 times a second that a broker cannot be reached, and every retry of ours would too. The first
# line passes; the next one after a minute carries the number of those left out.


INTERVAL_S: Final = 60.0
_CAUSES_MAX: Final = 1_000
# Numbers that differ from line to line: offsets, durations, counts. Numbers behind a letter or a sign belong to a name:
# a topic, an address, a client of the library ("rdkafka#consumer-2").
_FIGURES: Final = re.compile(r"(?:(?<=[\s(=])|^)\d+(?:\.\d+)?")
_HISTORY: Final = re.compile(r"\(after .*\)")


@dataclass(slots=True)
class _Cause:
    since: float
    left_out: int = 0


class Limiter(logging.Filter):
    """Logging filter that passes one line per cause and ``interval_s`` seconds. Thread-safe."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._causes: dict[tuple[str, int, str], _Cause] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to pass a line; append the number of those left out before it."""
        if record.levelno < logging.INFO:
            return True
        text = event_text(str(record.msg), record.args)
        cause = record.name, record.levelno, _FIGURES.sub("#", _HISTORY.sub("", text))
        now = self._clock()
        with self._lock:
            known = self._causes.get(cause)
            if known is not None and now - known.since < self._interval_s:
                known.left_out += 1
                return False
            if len(self._causes) >= _CAUSES_MAX:
                self._forget(now)
            self._causes[cause] = _Cause(now)
        if known is not None and known.left_out:
            record.msg = "%s (%d lines like this were left out in the last %.0f s)"
            record.args = (text, known.left_out, now - known.since)
        return True

    def _forget(self, now: float) -> None:
        """Drop the causes not logged lately, or all if they are still too many."""
        self._causes = {key: item for key, item in self._causes.items() if now - item.since < self._interval_s}
        if len(self._causes) >= _CAUSES_MAX:
            self._causes.clear()


LIMITER: Final = Limiter()


def limited(logger: logging.Logger) -> logging.Logger:
    """Rate-limit a logger and return it."""
    logger.addFilter(LIMITER)  # adding it again changes nothing
    return logger


def limited_child(logger: logging.Logger) -> logging.Logger:
    """Return a rate-limited child of a logger, for librdkafka, leaving the caller's logger unchanged."""
    return limited(logger.getChild("librdkafka"))
