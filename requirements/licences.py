"""``python requirements/licences.py LOCK``: print name, version and licence of each package that a lock pins.

The licence is what the package says of itself. One that is for other systems, and so not installed, is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def licences(lock: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and licence of each package."""
    for name in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==", lock.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield name, found.version, licence_of(found)


def licence_of(found: Distribution) -> str:
    """Return the licence, by the newest of the fields that say it."""
    about = found.metadata
    classified = [
        item.rpartition(" :: ")[2] for item in about.get_all("Classifier", []) if item.startswith("License ::")
    ]
    whole = (about.get("License") or "unknown").strip()
    return about.get("License-Expression") or " AND ".join(classified) or whole.splitlines()[0]


if __name__ == "__main__":
    for row in licences(Path(sys.argv[1])):
        print(*row, sep="\t")
