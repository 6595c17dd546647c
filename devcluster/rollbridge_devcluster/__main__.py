"""``python -m rollbridge_devcluster prepare|tools|reap``: what the Makefile, docs and ephemeral clusters call.

``prepare [SET ...]`` checks that there is a Java and fetches sets of jars (default: those of the servers), so that
later starts need not. ``tools DIRECTORY`` puts Kafka's own command-line programs there, such as
``kafka-console-consumer.sh``, for machines without a distribution of Kafka. ``reap DIRECTORY`` is the watcher of
``rollbridge_devcluster.reaper``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.version import what_brings
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER

TOOLS: Final = {
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-producer-perf-test.sh": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
}
"""Programs of a distribution of Kafka, and the classes that their scripts run."""


def write_tools(directory: Path) -> None:
    """Write a script for each of :data:`TOOLS`, which runs it from the jars of the cache.

    Raises:
        LocalEnvironmentError: there is no Java, or jars cannot be fetched.
    """
    jars = os.pathsep.join(map(str, JarCache.default().ensure(KAFKA, "tools")))
    java = [find_java().executable, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", jars]
    directory.mkdir(parents=True, exist_ok=True)
    for name, program in TOOLS.items():
        path = directory / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join([*java, program])} "$@"\n', encoding="utf-8")
        path.chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    """Run one of them; returns the exit code."""
    try:
        return _run(arguments)
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        fault: RollbridgeError = LocalEnvironmentError(f"{package} is not installed; {what_brings('local')}")
    except RollbridgeError as exc:
        fault = exc
    print(f"rollbridge: {fault}", file=sys.stderr)
    return fault.exit_code


def _run(arguments: Sequence[str]) -> int:
    match arguments:
        case ["prepare", *sets]:
            find_java()
            JarCache.default().ensure(*(sets or (KAFKA, ZOOKEEPER)))
            return 0
        case ["tools", directory]:
            write_tools(Path(directory))
            return 0
        case ["reap", directory]:
            # By name, for it needs psutil, which is there with the extra `local` only.
            import_module("rollbridge_devcluster.reaper").end_home(directory)
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
