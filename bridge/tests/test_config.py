"""Settings: their checks, and which place wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollbridge.config import ConnectionSettings, load_settings
from rollbridge.errors import ConfigError
from rollbridge_devcluster.state import ClusterState, Home, Ports

BOTH = {"bootstrap_servers": "flag:9092", "zookeeper": "flag:2181"}


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A directory without an embedded cluster."""
    return tmp_path / "nowhere"


@pytest.fixture
def embedded(tmp_path: Path) -> Callable[[bool], Path]:
    """Makes the directory of an embedded cluster that runs or not."""

    def make(running: bool) -> Path:
        ports = Ports(kafka=1111, kafka_controller=2222, zookeeper=3333)
        home = Home(tmp_path / f"embedded-{running}")
        home.path.mkdir()
        home.save(ClusterState(kafka_cluster_id="x" * 22, ports=ports, coordinators=1, running=running))
        return home.path

    return make


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ConnectionSettings(**{**BOTH, **settings})  # type: ignore[arg-type]
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_embedded(tmp_path: Path, embedded: Callable[[bool], Path]) -> None:
    home = embedded(True)
    file = write(
        tmp_path / "config.toml",
        'bootstrap_servers = "file:1"\nzookeeper = "file:2"\nzookeeper_root = "/file"\nclient_name = "file"\n',
    )
    environ = {
        "ROLLBRIDGE_BOOTSTRAP_SERVERS": "env:1",
        "ROLLBRIDGE_ZOOKEEPER": "env:2",
        "ROLLBRIDGE_ZOOKEEPER_ROOT": "/env",
    }
    assert load_settings({"zookeeper": None}, home=home, environ={}).bootstrap_servers == "127.0.0.1:1111"
    assert load_settings(home=home, environ={}).zookeeper == "127.0.0.1:3333"
    assert load_settings(config_file=file, home=home, environ={}).zookeeper == "file:2"
    everything = load_settings({"bootstrap_servers": "flag:1"}, config_file=file, home=home, environ=environ)
    assert everything == ConnectionSettings(
        bootstrap_servers="flag:1", zookeeper="env:2", zookeeper_root="/env", client_name="file"
    )


def test_file_and_home_are_also_named_by_environment(tmp_path: Path, embedded: Callable[[bool], Path]) -> None:
    file = write(tmp_path / "config.toml", 'bootstrap_servers = ["a:1", "b:2"]\nzookeeper = "z:3,y"\n')
    named = load_settings(environ={"ROLLBRIDGE_CONFIG": str(file)})
    assert (named.bootstrap_servers, named.zookeeper) == ("a:1,b:2", "z:3,y")
    assert load_settings(environ={"ROLLBRIDGE_HOME": str(embedded(True))}).zookeeper == "127.0.0.1:3333"


def test_half_an_address_is_not_completed_from_the_embedded_cluster(embedded: Callable[[bool], Path]) -> None:
    with pytest.raises(ConfigError, match=r"zookeeper: not set, but bootstrap_servers is .by the command line"):
        load_settings({"bootstrap_servers": "flag:1"}, home=embedded(True), environ={})


@pytest.mark.parametrize("exists", [True, False])
def test_no_cluster_at_all_says_how_to_get_one(exists: bool, embedded: Callable[[bool], Path], nowhere: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollbridge up.*--bootstrap-servers.*ROLLBRIDGE_ZOOKEEPER"):
        load_settings(home=embedded(False) if exists else nowhere, environ={})


def test_all_faults_are_reported_at_once_with_their_origin(tmp_path: Path, nowhere: Path) -> None:
    file = write(
        tmp_path / "config.toml",
        'zookeper = "z:1"\nclient_name = 7\n[kafka]\nsecurity.protocl = "SSL"\nplugin.library.paths = "/evil.so"\n',
    )
    environ = {"ROLLBRIDGE_BOOTSTRAP_SERVER": "a:1", "ROLLBRIDGE_KAFKA_DEBUG": "all"}
    with pytest.raises(ConfigError) as caught:
        load_settings({"bootstrap_servers": "nonsense"}, config_file=file, home=nowhere, environ=environ)
    text = str(caught.value)
    for expected in (
        f"zookeper (in {file}): is unknown; did you mean zookeeper?",
        "client_name (in ",
        "kafka.security.protocl: is not a security setting that may be passed on; did you mean security.protocol?",
        "kafka.plugin.library.paths: is not a security setting",
        "ROLLBRIDGE_BOOTSTRAP_SERVER: is unknown; did you mean ROLLBRIDGE_BOOTSTRAP_SERVERS?",
        "ROLLBRIDGE_KAFKA_DEBUG: is not a security setting",
        "zookeeper: not set, but bootstrap_servers is",
        "bootstrap_servers: 'nonsense' is not host:port",
    ):
        assert expected in text


def test_variables_of_others_with_our_prefix_are_left_alone(nowhere: Path) -> None:
    environ = {"ROLLBRIDGE_MAVEN_REPOSITORY": "y", "ROLLBRIDGE_HOME": str(nowhere)}
    assert load_settings(BOTH, environ=environ).zookeeper == "flag:2181"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a = ", "not readable as TOML"), ('kafka = "x"', "a table is expected"), ("bootstrap_servers = [1]", "text")],
)
def test_broken_files_are_named(text: str, expected: str, tmp_path: Path, nowhere: Path) -> None:
    file = write(tmp_path / "config.toml", text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_settings(BOTH, config_file=file, home=nowhere, environ={})
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(nowhere: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(BOTH, environ={"ROLLBRIDGE_CONFIG": str(nowhere)})


def test_security_comes_from_file_and_environment_and_is_not_shown(tmp_path: Path, nowhere: Path) -> None:
    file = write(
        tmp_path / "config.toml",
        '[kafka]\nsecurity.protocol = "SASL_SSL"\nsasl.mechanism = "PLAIN"\n"sasl.username" = "me"\n'
        'sasl.password = "from-file"\n',
    )
    settings = load_settings(
        BOTH, config_file=file, home=nowhere, environ={"ROLLBRIDGE_KAFKA_SASL_PASSWORD": "from-environment"}
    )
    assert settings.kafka == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": "from-environment",
    }
    assert "from-environment" not in repr(settings)


def test_faulty_security_is_named_without_its_secrets() -> None:
    text = complaint(kafka={"security.protocol": "SASL_SSL", "sasl.password": "hush", "sasl.mechanism": "XYZ"})
    assert "kafka.sasl.mechanism" in text
    assert "kafka.sasl.username" in text
    assert "hush" not in text


@pytest.mark.parametrize(
    "key", ["plugin.library.paths", "ssl.engine.location", "ssl.providers", "sasl.kerberos.kinit.cmd", "acks"]
)
def test_settings_that_load_code_or_undo_guarantees_do_not_pass(key: str) -> None:
    assert f"kafka.{key}: is not a security setting" in complaint(kafka={key: "x"})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("bootstrap_servers", ["", "host", "host:", "host:0", "host:65536", "a:1,,b:2", "http://a:1", "a:b"]),
        ("zookeeper", ["", "a:0", "a,,b", "a:1/", "a:1/x//y", "/x"]),
        ("zookeeper_root", ["", "/", "x", "/x/", "//x", "/x/../y", "/x y"]),
        ("client_name", ["", "a b", "x" * 129]),
    ],
)
def test_what_is_wrong_is_named_with_its_key(key: str, values: list[str]) -> None:
    for value in values:
        assert complaint(**{key: value}).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("servers", "zookeeper"),
    [("[::1]:9092", "[::1]:2181"), ("a:1, b:2", "a,b:2,c/chroot/below"), ("10.0.0.1:9092", "zk_1.example-x:1")],
)
def test_good_addresses(servers: str, zookeeper: str) -> None:
    ConnectionSettings(bootstrap_servers=servers, zookeeper=zookeeper)
