"""A tree of files for an image, and the tar archive of it. The same tree always gives the same bytes."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

_EXECUTABLE: Final = 0o755
_PLAIN: Final = 0o644


@dataclass(slots=True)
class Tree:
    """What goes where; paths in the image have no leading slash. What is added twice counts once, as it was last."""

    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Content and mode."""
    links: dict[str, str] = field(default_factory=dict)
    directories: dict[str, int] = field(default_factory=dict)
    """Mode. Directories that files stand in need not be named."""

    def add(self, source: Path, path: str) -> None:
        """A file, or a directory with all that is in it; symbolic links are followed."""
        if not source.is_dir():
            self.files[path] = source
            return
        for directory, _, names in os.walk(source, followlinks=True):
            inside = PurePosixPath(path) / Path(directory).relative_to(source)
            for name in names:
                if (Path(directory) / name).exists():
                    self.files[str(inside / name)] = Path(directory) / name

    def write(self, text: str, path: str, *, executable: bool = False) -> None:
        """A file with this content."""
        self.texts[path] = (text, _EXECUTABLE if executable else _PLAIN)

    def pack(self, target: BinaryIO) -> None:
        """Write the archive. Everything belongs to root; a file that stands at several places is stored once."""
        with tarfile.open(fileobj=target, mode="w") as tar:
            for path, mode in sorted(self.directories.items()):
                tar.addfile(_member(path, tarfile.DIRTYPE, mode))
            for path, link in sorted(self.links.items()):
                tar.addfile(_member(path, tarfile.SYMTYPE, 0o777, link))
            for path, (text, mode) in sorted(self.texts.items()):
                content = text.encode()
                member = _member(path, tarfile.REGTYPE, mode)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            stored: dict[Path, str] = {}
            for path, source in sorted(self.files.items()):
                self._pack_file(tar, path, source.resolve(), stored)

    @staticmethod
    def _pack_file(tar: tarfile.TarFile, path: str, source: Path, stored: dict[Path, str]) -> None:
        executable = os.access(source, os.X_OK) or ".so" in source.name
        mode = _EXECUTABLE if executable else _PLAIN
        if source in stored:
            tar.addfile(_member(path, tarfile.LNKTYPE, mode, stored[source]))
            return
        stored[source] = path
        with source.open("rb") as file:
            member = _member(path, tarfile.REGTYPE, mode)
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)


def _member(path: str, kind: bytes, mode: int, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type = kind
    member.mode = mode
    member.linkname = link
    return member
