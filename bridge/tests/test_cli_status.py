"""What ``rollbridge status`` says of parts that are there, and have a fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import rollbridge.cli.status as command
from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.doctor.probes import RUNNING, ClusterStatus, PartStatus

FAULT = "it has not been able to send frames\nfor 40 s"


def test_what_a_gateway_of_the_embedded_cluster_says_of_itself_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROLLBRIDGE_BOOTSTRAP_SERVERS", "ROLLBRIDGE_ZOOKEEPER", "ROLLBRIDGE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    processes = tuple(PartStatus(part=part, state=RUNNING) for part in ("kafka", "zookeeper", "gateway"))
    known = (
        PartStatus(part="coordinator", state="none is registered"),  # its process is told of, where there is one
        PartStatus(part="coordinator 1", state=RUNNING),
        PartStatus(part="gateway g-1", state=FAULT),
    )
    found = ClusterStatus(bootstrap_servers="k:1", zookeeper="z:1", parts=processes)
    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(look=lambda home: found))
    monkeypatch.setattr(command, "zookeeper_parts", lambda settings: known)
    monkeypatch.setattr(CliContext, "settings", lambda self: None)
    context = CliContext(named_home=tmp_path)
    done = CliRunner().invoke(command.status, obj=context, standalone_mode=False)
    assert done.return_value == ExitCode.UNAVAILABLE
    assert [line.split("  ")[0] for line in done.output.splitlines()] == [
        "kafka",
        "zookeeper",
        "gateway",
        "gateway g-1",
    ]
    assert "send frames\N{REPLACEMENT CHARACTER}for 40 s" in done.output
