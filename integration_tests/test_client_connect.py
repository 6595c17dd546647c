"""How a client finds its cluster and names itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.backends.interface import AnyCluster
from rollbridge.errors import ConfigError


def test_the_environment_says_where_and_the_process_who(
    cluster: AnyCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLBRIDGE_BOOTSTRAP_SERVERS", cluster.bootstrap_servers)
    monkeypatch.setenv("ROLLBRIDGE_ZOOKEEPER", cluster.zookeeper)
    monkeypatch.setenv("ROLLBRIDGE_ZOOKEEPER_ROOT", root)
    with rollbridge.connect() as client:
        assert client.settings.bootstrap_servers == cluster.bootstrap_servers
        assert client.client_name.endswith(f"-{os.getpid()}")
        with raises_code("nothing-served", match=root):
            client.admin.list_streams()
    with rollbridge.connect(client_name="rollbridge") as named:
        assert named.client_name == "rollbridge"


def test_a_file_says_where_and_arguments_come_first(
    cluster: AnyCluster, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLBRIDGE_BOOTSTRAP_SERVERS", raising=False)
    file = tmp_path / "rollbridge.toml"
    file.write_text(
        f'bootstrap_servers = "{cluster.bootstrap_servers}"\nzookeeper = "127.0.0.1:1"\nclient_name = "from-file"\n'
    )
    with rollbridge.connect(zookeeper=cluster.zookeeper, zookeeper_root=root, config_file=file) as client:
        assert client.client_name == "from-file"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"client_name": "a name"}, "client_name"),
        ({"kafka": {"plugin.library.paths": "/somewhere/evil.so"}}, "plugin.library.paths"),
        ({"kafka": {"enable.idempotence": "false"}}, "enable.idempotence"),
        ({"zookeeper_root": "rollbridge"}, "zookeeper_root"),
        ({"bootstrap_servers": "nowhere"}, "bootstrap_servers"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_reached(
    cluster: AnyCluster, arguments: dict[str, object], named: str
) -> None:
    whole = {"bootstrap_servers": cluster.bootstrap_servers, "zookeeper": cluster.zookeeper, **arguments}
    with pytest.raises(ConfigError, match=named):
        rollbridge.connect(**whole)  # type: ignore[arg-type]


def test_closing_twice_does_nothing(cluster: AnyCluster, root: str) -> None:
    client = rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root)
    client.close()
    client.close()
