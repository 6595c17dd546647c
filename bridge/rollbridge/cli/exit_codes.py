"""What the exit code of ``rollbridge`` says; stable, so that scripts can rely on it.

Every error of ``rollbridge.errors`` carries its own; this is the list of them all.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CONFLICT = 5
    OUTCOME_UNKNOWN = 6
    UNAVAILABLE = 7
    ENVIRONMENT = 8
    FINDINGS = 9
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "an error that nobody foresaw, or data that is not what it claims to be",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.NOT_FOUND: "what the command names does not exist; nothing was written",
    ExitCode.REFUSED: "the request or a setting can never be right as it is; nothing was written",
    ExitCode.CONFLICT: "the state is not what the request assumes; it wrote nothing",
    ExitCode.OUTCOME_UNKNOWN: "it may have happened or not; ask again with the id in the message",
    ExitCode.UNAVAILABLE: "Kafka, ZooKeeper or the coordinator does not answer; try again later",
    ExitCode.ENVIRONMENT: "this machine lacks something: Java, a free port, space on disk",
    ExitCode.FINDINGS: "the doctor found a problem; it says what to do",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}
