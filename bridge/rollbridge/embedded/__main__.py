"""``python -m rollbridge.embedded prepare|reap``: what the Makefile and ``EmbeddedCluster`` call.

``prepare [SET ...]`` checks that there is a Java and fetches sets of jars (default: those of the servers), so that
later starts need not. ``reap HOME`` is the watcher of ``rollbridge.embedded.reaper``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rollbridge.embedded.jars import JarCache
from rollbridge.embedded.java import find_java
from rollbridge.embedded.reaper import reap_when_orphaned
from rollbridge.embedded.servers import KAFKA, ZOOKEEPER
from rollbridge.errors import RollbridgeError


def main(arguments: Sequence[str]) -> int:
    """Run one of the two; returns the exit code."""
    match arguments:
        case ["prepare", *sets]:
            try:
                find_java()
                JarCache.default().ensure(*(sets or (KAFKA, ZOOKEEPER)))
            except RollbridgeError as exc:
                print(f"rollbridge: {exc}", file=sys.stderr)
                return exc.exit_code
            return 0
        case ["reap", home]:
            reap_when_orphaned(Path(home))
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
