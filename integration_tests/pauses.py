"""Leaders that are paused."""

from __future__ import annotations

import subprocess
from pathlib import Path


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has stopped itself."""
    return Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
