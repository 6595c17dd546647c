"""A Prometheus of one test: Debian's, with the rules that are shipped, hurried; it scrapes every second."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from integration_tests.backends.choice import lacking
from integration_tests.patience import end, eventually
from rollbridge.monitoring.runbook import board, rules
from rollbridge_devcluster.state import LOOPBACK, free_port

JOB: Final = "rollbridge"
_CONFIG: Final = {
    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
    "rule_files": ["rules.yaml"],
    "scrape_configs": [
        {"job_name": JOB, "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}]},
    ],
}
_SHOWN: Final = {"$__rate_interval": "30s", "$job": ".*", "$group": ".*", "$stream": ".*"}
"""What Grafana puts in place of variables of the board."""
_PENDING: Final = re.compile(r"^( +for: )\w+$", re.MULTILINE)


def hurried(limits: Mapping[str, str]) -> str:
    """Return the rules that are shipped with everything pending for a second, and some limits replaced.

    Raises:
        AssertionError: a limit does not stand there exactly once, so the rules are others by now.
    """
    text = _PENDING.sub(r"\g<1>1s", rules())
    for limit, other in limits.items():
        assert text.count(limit) == 1, f"{limit!r} stands in the rules {text.count(limit)} times"
        text = text.replace(limit, other)
    return text


def panels(*kinds: str) -> list[dict[str, Any]]:
    """Return the panels of the board of these types. Those of type ``stat`` are the numbers of the first row."""
    return [panel for panel in json.loads(board())["panels"] if panel["type"] in kinds]


class Prometheus:
    """A server that runs while it is entered."""

    def __init__(self, folder: Path, targets: Sequence[str], limits: Mapping[str, str]) -> None:
        """Prepare.

        Args:
            folder: Where it keeps everything; made if it is not there.
            targets: ``HOST:PORT`` of coordinators, whether or not they are there yet.
            limits: Texts of the rules and what stands in place of them.
        """
        program = shutil.which("prometheus")
        if program is None:
            lacking("no Prometheus is installed (Debian: prometheus)")
        folder.mkdir(exist_ok=True)
        self._program = program
        self._folder = folder
        self._address = f"{LOOPBACK}:{free_port()}"
        self._log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(json.dumps(_CONFIG))  # JSON is YAML
        (folder / "rules.yaml").write_text(hurried(limits))
        (folder / "targets.json").write_text(json.dumps([{"targets": list(targets)}]))

    def __enter__(self) -> Self:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=output,
                stderr=output,
            )
        try:
            eventually(self._is_ready, "Prometheus is ready")
        except BaseException:
            end(self._process, self._log)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self._process, self._log)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}", timeout=60) as answer:
            return json.load(answer)["data"]

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """Return the alerts that fire, by name without its prefix: their ``labels`` and ``annotations``."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self._ask("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"].removeprefix("Rollbridge"), []).append(alert)
        return found

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{self._address}/"

    def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an expression now, in which variables of the board stand for everything."""
        for name, value in _SHOWN.items():
            query = query.replace(name, value)
        found = self._ask(f"query?query={quote(query)}")["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def shown(self, title: str) -> tuple[float | None, str]:
        """Return the value of a number on the board, and the colour in which it stands there; none without a value."""
        [panel] = [panel for panel in panels("stat") if panel["title"] == title]
        found = self.series(panel["targets"][0]["expr"])
        if not found:
            return None, ""
        value = found[0][1]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        return value, [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]

    def value(self, query: str) -> float | None:
        """Return the value of an expression now; None if it has none, and the first if it has several."""
        found = self._ask(f"query?query={quote(query)}")["result"]
        return float(found[0]["value"][1]) if found else None

    def await_firing(self, name: str, **labels: str) -> dict[str, str]:
        """Wait until an alert with these labels fires, and return its annotations."""
        said: list[dict[str, str]] = []

        def fires() -> bool:
            said[:] = [
                alert["annotations"]
                for alert in self.firing().get(name, ())
                if labels.items() <= alert["labels"].items()
            ]
            return bool(said)

        eventually(fires, f"{name} fires for {labels}")
        return said[0]

    def await_calm(self, name: str) -> None:
        """Wait until no alert of this name fires."""
        eventually(lambda: name not in self.firing(), f"{name} does not fire any more")
