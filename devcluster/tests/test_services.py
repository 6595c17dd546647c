"""Coordinators and gateways of an embedded cluster: what they need, and what is made of their last words."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import processes
from rollbridge_devcluster.services import GatewayProcess, require_gateway, service_parts, services_of
from rollbridge_devcluster.state import Home, Wishes, decide, free_port

LISTENS = """
import asyncio
asyncio.run(asyncio.start_server(lambda reader, writer: None, "127.0.0.1", {port}))
"""


class Listener(GatewayProcess):
    """What only listens as a gateway does."""

    def command(self) -> list[str]:
        """Python code."""
        return [sys.executable, "-c", LISTENS.format(port=self.state.gateway_port)]


def test_a_gateway_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_gateway()
    monkeypatch.setitem(sys.modules, "rollbridge_gateway", None)
    with pytest.raises(LocalEnvironmentError, match=r"rollbridge_gateway is not installed.*pip install .*\[gateway\]"):
        require_gateway()


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [("psutil", ["reap", "/nowhere"]), ("jgo", ["tools", "kafka"])],
)
def test_a_package_that_is_missing_is_named_without_a_traceback(
    missing: str, arguments: list[str], tmp_path: Path
) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments!r}; import runpy; "
    run = "runpy.run_module('rollbridge_devcluster', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", hide + run],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == LocalEnvironmentError.exit_code, done.stderr
    assert re.fullmatch(
        rf"(Fetching .*\n)?rollbridge: {missing} is not installed; pip install .*\[local\].*\n", done.stderr
    )


def has_lost_port(fault: LocalEnvironmentError) -> bool:
    return bool(vars(fault)["has_lost_port"])


def test_a_gateway_that_has_lost_its_port_is_known_by_its_words(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.logs.mkdir()
    state = decide(home, None, Wishes(has_gateway=True, gateway_port=free_port(count=2)), ())
    node = Listener(home, state, "gateway")
    with socket.create_server(("127.0.0.1", state.gateway_port)):
        node.start()
        try:
            with pytest.raises(LocalEnvironmentError, match="address already in use", check=has_lost_port):
                node.await_answer()
        finally:
            processes.kill(processes.find(home.path).get("gateway", ()))


def test_a_gateway_comes_behind_the_coordinators(tmp_path: Path) -> None:
    state = decide(Home(tmp_path), None, Wishes(coordinators=2, has_gateway=True), ())
    assert service_parts(state) == ["coordinator-1", "coordinator-2", "gateway"]
    assert services_of(["gateway", "kafka", "kafka-format", "coordinator-1"]) == ["coordinator-1", "gateway"]
