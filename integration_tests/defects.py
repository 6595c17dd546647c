"""Defects in logs: every integration test and every history fails if a process of ours has logged one.

The tests' own process is watched by ``conftest.py``; this looks through the files into which the others write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollbridge.base.logs import MARK

_SUFFIXES: Final = (".log", ".err", ".out")
_DATA: Final = "data"
"""Folders of servers, whose segments are called logs, too."""
_SHOWN: Final = 3_000


class DefectWatch:
    """Reader of log files as they grow: what was seen is not reported again."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._sizes: dict[str, int] = {}
        self._found: list[str] = []

    def add(self, folder: Path) -> None:
        """Watch all files below a folder."""
        self._folders.add(folder)

    def remove(self, folder: Path) -> None:
        """Read the files a last time: they are about to go."""
        self._found += self._read(folder)
        self._folders.discard(folder)

    def found(self) -> list[str]:
        """Return the defects that were logged since the last call: the file, the line, and the stack below it."""
        for folder in self._folders:
            self._found += self._read(folder)
        found, self._found = self._found, []
        return found

    def _read(self, folder: Path) -> Iterator[str]:
        for path, size in _files(str(folder)):
            seen = self._sizes.get(path, 0)
            if size == seen:
                continue
            start = seen if seen < size else 0  # a file that has become shorter was begun again
            with open(path, "rb") as file:
                file.seek(start)
                said = file.read()
            whole = said[: said.rfind(b"\n") + 1]  # a line that is still being written is read the next time
            self._sizes[path] = start + len(whole)
            for line in whole.split(MARK.encode())[1:]:
                yield f"{path}: {MARK}{line.decode(errors='replace')[:_SHOWN]}"


def _files(folder: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # removed meanwhile, or not ours
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != _DATA:
                    yield from _files(entry.path)
            elif entry.name.endswith(_SUFFIXES) and entry.is_file(follow_symlinks=False):
                yield entry.path, entry.stat().st_size
        except OSError:
            continue


def defects_in(folder: Path) -> list[str]:
    """Return all defects that the files below a folder tell."""
    watch = DefectWatch()
    watch.add(folder)
    return watch.found()


WATCH: Final = DefectWatch()
"""That of this process's tests."""
