"""A worker of Kafka Connect as a process, with exactly-once sources: its producer commits records and offsets together.

The connector is Kafka's own for files, each line of which is a record, or one of a plugin (:func:`make_plugin`). Where
the worker writes to may be another address than that where it keeps its own topics.
"""

from __future__ import annotations

import http
import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import rollbridge
from integration_tests.clients import adopt
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import await_exit, eventually
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.programs import compile_program
from rollbridge_devcluster.state import KAFKA

BOUNDARIES_OF_WORKERS: Final = ("poll", "interval")
"""Values of ``transaction.boundary`` with which a worker says what a transaction holds; with the third, ``connector``,
its connector does."""
FILE_SOURCE: Final = "org.apache.kafka.connect.file.FileStreamSourceConnector"
_SERVICES: Final = "META-INF/services/org.apache.kafka.connect.source.SourceConnector"


def make_plugin(folder: Path, source: Path, jars: Sequence[Path] = ()) -> dict[str, object]:
    """Make a plugin of a source connector in Java, with jars of its own that no other one sees.

    Args:
        folder: Where plugins are.
        source: The program, named after the connector's class.
        jars: What it needs beyond Kafka Connect.

    Returns:
        Settings of a worker that finds it.
    """
    plugin = folder / source.stem
    plugin.mkdir(parents=True)
    for jar in jars:
        (plugin / jar.name).symlink_to(jar)
    classes = compile_program(source, [*JarCache.default().ensure("connect"), *jars])
    with zipfile.ZipFile(plugin / f"{source.stem}.jar", "w") as made:
        for path in classes.glob("*.class"):
            made.write(path, path.name)
        made.writestr(_SERVICES, source.stem)
    return {"plugin.path": str(folder)}


def adopt_topics_of_worker(client: rollbridge.Bridge, group: str) -> None:
    """Make what a worker writes in transactions beside records: source offsets and its configuration."""
    for topic in (f"{group}-offsets", f"{group}-configs"):
        create_topic(client.settings.bootstrap_servers, topic, 1, {"cleanup.policy": "compact"})
        adopt(client, topic)


class ConnectWorker:
    """One worker of a group of its own. Ends with its ``with`` block, at once.

    Attributes:
        group: Its ``group.id``; its topics are named ``GROUP-configs``, ``GROUP-status`` and ``GROUP-offsets``.
    """

    def __init__(self, servers: str, group: str, folder: Path, settings: Mapping[str, object] | None = None) -> None:
        """Start it; ``settings`` are those of a worker, as Kafka names them."""
        folder.mkdir(exist_ok=True)
        self.group = group
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        wanted: dict[str, object] = {
            "bootstrap.servers": servers,
            "group.id": group,
            "listeners": self._url,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "exactly.once.source.support": "enabled",
            "config.storage.topic": f"{group}-configs",
            "status.storage.topic": f"{group}-status",
            "offset.storage.topic": f"{group}-offsets",
            "config.storage.replication.factor": 1,
            "status.storage.replication.factor": 1,
            "status.storage.partitions": 1,
            "offset.storage.replication.factor": 1,
            "offset.storage.partitions": 1,
            "offset.flush.interval.ms": 500,
            "plugin.discovery": "service_load",
            **(settings or {}),
        }
        properties = folder / "worker.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
        self._log = folder / f"connect-{len(list(folder.glob('connect-*.log')))}.log"
        cache = JarCache.default()
        logging = [path for path in cache.ensure(KAFKA) if path.name.startswith("log4j")]
        jars = os.pathsep.join(map(str, [*cache.ensure("connect"), *logging]))
        tuning = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx400m", "-Dlog4j2.level=WARN"]
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        with self._log.open("wb") as log:
            command = [find_java().executable, *tuning, "-cp", jars, main, str(properties)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL it; harmless once it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        await_exit(self.process)

    def source(self, name: str, file: Path, topic: str, **settings: object) -> None:
        """Have the lines of a file written into a topic, exactly once; returns when the task runs."""
        others = {key.replace("_", "."): value for key, value in settings.items()}
        self.connector(name, FILE_SOURCE, {"file": file, "topic": topic, **others})

    def connector(self, name: str, kind: str, settings: Mapping[str, object]) -> None:
        """Have a connector write, exactly once; returns when its task runs.

        Raises:
            ValueError: it, or the worker, refuses the settings.
        """
        config = {
            "connector.class": kind,
            "tasks.max": "1",
            "exactly.once.support": "required",
            **{key: str(value) for key, value in settings.items()},
        }
        eventually(lambda: self._send("PUT", f"/connectors/{name}/config", config), f"connector {name} is taken")
        eventually(lambda: self.states(name) == ["RUNNING"], f"the task of {name} runs")

    def states(self, name: str) -> list[str]:
        """Return the states of a connector's tasks; none as long as it is not known."""
        found = self._get(f"/connectors/{name}/status")
        return [] if found is None else [task["state"] for task in found["tasks"]]

    def failure(self, name: str) -> str:
        """Return why the only task of a connector has failed, and nothing as long as it has not."""
        found = self._get(f"/connectors/{name}/status")
        return "" if found is None else "".join(task.get("trace", "") for task in found["tasks"])

    def restart(self, name: str) -> None:
        """Have the only task of a connector begin again; returns when it runs."""
        path = f"/connectors/{name}/tasks/0/restart"
        eventually(lambda: self._send("POST", path, {}), f"the task of {name} restarts")
        eventually(lambda: self.states(name) == ["RUNNING"], f"the task of {name} runs")

    def offsets(self, name: str) -> list[Mapping[str, Any]]:
        """Return the source offsets of a connector that are committed, one of each partition of its source."""
        found = self._get(f"/connectors/{name}/offsets")
        return [] if found is None else [item["offset"] for item in found["offsets"]]

    def said(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")[-12_000:]

    def _send(self, method: str, path: str, document: object) -> bool:
        body = json.dumps(document).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        return self._ask(request) is not None

    def _get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self._url + path))

    def _ask(self, request: urllib.request.Request) -> Any:
        assert self.process.poll() is None, self.said()
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as refused:
            with refused:
                said = refused.read().decode(errors="replace")
            if refused.code == http.HTTPStatus.BAD_REQUEST:
                raise ValueError(said) from None
            return None  # it does not know of it yet, or rebalances
        except OSError:
            return None  # it does not listen yet
