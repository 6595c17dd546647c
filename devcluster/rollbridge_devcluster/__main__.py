"""``python -m rollbridge_devcluster prepare|reap``: what the Makefile and ephemeral clusters call.

``prepare [SET ...]`` checks that there is a Java and fetches sets of jars (default: those of the servers), so that
later starts need not. ``reap home|session NAME`` is the watcher of ``rollbridge_devcluster.reaper``, and ``reap stale``
removes from the container engine what such watchers had no time for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from rollbridge.errors import RollbridgeError
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.reaper import REAPERS, reap_when_orphaned
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER


def main(arguments: Sequence[str]) -> int:
    """Run one of them; returns the exit code."""
    match arguments:
        case ["prepare", *sets]:
            try:
                find_java()
                JarCache.default().ensure(*(sets or (KAFKA, ZOOKEEPER)))
            except RollbridgeError as exc:
                print(f"rollbridge: {exc}", file=sys.stderr)
                return exc.exit_code
            return 0
        case ["reap", "stale"]:
            removed = import_module("rollbridge_devcluster.engine").remove_stale()
            print(f"removed {removed} containers, networks and volumes of processes that are gone")
            return 0
        case ["reap", kind, name] if kind in REAPERS:
            reap_when_orphaned(kind, name)
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
