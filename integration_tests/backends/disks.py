"""Disks that stand still: a file system in a file, on a loop device, frozen with ``fsfreeze``.

Whatever writes there waits, with all the locks that it holds; whatever only reads goes on. A freeze ends by itself,
also if the process that began it is gone, and file systems of processes that are gone are taken away by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from integration_tests.backends.interface import Unsupported

SIZE_MIB: Final = 2048
"""Of a file system; only what is written takes room."""
_PREFIX: Final = "rollbridge-disk"


class Disk:
    """A mounted ext4 file system of its own."""

    def __init__(self, image: Path, path: Path) -> None:
        self._image = image
        self.path: Final = path

    @classmethod
    def mounted(cls, path: Path | None = None, size_mib: int = SIZE_MIB) -> Disk:
        """Make one and mount it at a directory that exists, or at one of its own.

        Raises:
            Unsupported: this machine cannot mount or freeze one; nothing is left behind.
        """
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        folder.chmod(0o755)
        image = folder / "image"
        where = path or folder / "mounted"
        where.mkdir(exist_ok=True)
        with image.open("wb") as file:
            os.truncate(file.fileno(), size_mib << 20)
        disk = cls(image, where)
        try:
            _run(["mkfs.ext4", "-q", "-F", str(image)])
            _run(["mount", "-o", "loop", str(image), str(where)])
            with disk.frozen():
                pass
        except Unsupported:
            disk.remove()
            raise
        return disk

    def remove(self) -> None:
        """Take it away with everything on it; whoever still uses it keeps it until then."""
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)
        shutil.rmtree(self._image.parent, ignore_errors=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let no write to it come to an end, for the length of a block."""
        _run(["fsfreeze", "-f", str(self.path)])
        try:
            yield
        finally:
            _run(["fsfreeze", "-u", str(self.path)])

    def stand_still(self, seconds: float) -> None:
        """Let no write to it come to an end for a while; return when it is over."""
        script = 'fsfreeze -f "$0" && sleep "$1"; fsfreeze -u "$0"'
        # In a session of its own, so that neither an interrupt nor the end of this process leaves it frozen.
        subprocess.run(["sh", "-c", script, str(self.path), f"{seconds:.3f}"], check=True, start_new_session=True)


def sweep() -> None:
    """Take away what processes have left that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        owner = re.match(rf"{_PREFIX}-(\d+)-", folder.name)
        if owner is None or psutil.pid_exists(int(owner[1])):
            continue
        for line in Path("/proc/mounts").read_text().splitlines():
            device, where, *_ = line.split(" ")
            if _image_of(device).startswith(f"{folder}/"):
                subprocess.run(["fsfreeze", "-u", where], check=False, capture_output=True)
                subprocess.run(["umount", "-l", where], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _image_of(device: str) -> str:
    """The file of a loop device; nothing for other devices."""
    backing = Path("/sys/block") / Path(device).name / "loop" / "backing_file"
    return backing.read_text().strip() if device.startswith("/dev/loop") and backing.exists() else ""


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as fault:
        raise Unsupported(f"file systems cannot be made here: {fault}") from None
    if done.returncode:
        raise Unsupported(f"{' '.join(command)}: {done.stderr.decode().strip()}")
