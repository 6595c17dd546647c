"""Processes that stand still. Their threads do so one after the other: on a busy machine, some work on for a while."""

from __future__ import annotations

import subprocess

import psutil

from rollbridge_devcluster import processes


def pause(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """SIGSTOP a process, and return when none of its threads runs any more."""
    processes.pause(psutil.Process(process.pid))


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has stopped itself."""
    return processes.stands_still(process.pid)
