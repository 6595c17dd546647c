"""Container images: made once, never over somebody else's, with the contract of the official ones."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource
from docker.errors import ImageNotFound, NotFound
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import ExecWaitStrategy, LogMessageWaitStrategy

from integration_tests import images
from integration_tests.backends import engine as engines
from integration_tests.backends.choice import lacking
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.engine import engine, host, publishing_address
from integration_tests.container_health import health
from integration_tests.images import COORDINATOR, IN_USE, KAFKA, ZOOKEEPER, Provided, is_ours, look, provide
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import LocalEnvironmentError
from rollbridge.version import __version__

pytestmark = [pytest.mark.containers, pytest.mark.long]

SECOND_NS = 1_000_000_000
METRICS = "9464/tcp"


@pytest.fixture(scope="module")
def servers() -> Iterator[ContainerCluster]:
    """One broker and one ZooKeeper, for the tests of this module."""
    with ContainerCluster(kafka_settings={"num.partitions": "3"}) as started:
        yield started


@pytest.fixture
def name() -> Iterator[str]:
    """A name for an image of this test's own."""
    made = f"rollbridge-test/{uuid.uuid4().hex[:12]}:1"
    yield made
    with_name = [image.id for image in engine().images.list(made.partition(":")[0])]
    for image in with_name:
        engine().images.remove(image, force=True)


# -- making images ---------------------------------------------------------------------------------------------


def test_building_again_changes_nothing_and_tells_what_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = provide(), provide()
    assert [image.name for image in second] == list(IN_USE)
    assert {image.origin for image in second} == {"present"}
    assert [image.id for image in second] == [image.id for image in first]
    assert list(look().values()) == second
    for image in second:
        ours = is_ours(image.name, engine().images.get(image.name))
        assert (image.kind == "stand-in") is (ours and image.name in images.official())
    assert subprocess.run([sys.executable, "-m", images.__name__, "kafka"], cwd=images.ROOT).returncode == 0
    kind = first[0].kind
    assert kind in ("stand-in", "official", "other")
    assert str(second[0]) == f"{KAFKA}: {kind}, present, {second[0].id.partition(':')[2][:12]}"


@pytest.fixture
def steps(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Dockerfile of the image of this name."""

    usual = images.Provider.context

    @contextmanager
    def context(self: images.Provider, wanted: str, base: Provided | None) -> Iterator[Path]:
        if wanted == name:
            yield tmp_path
            return
        with usual(self, wanted, base) as folder:
            yield folder

    monkeypatch.setattr(images.Provider, "context", context)
    return tmp_path / "Dockerfile"


def test_an_image_is_made_without_network_and_again_only_when_its_inputs_change(name: str, steps: Path) -> None:
    steps.write_text('ARG BASE\nFROM ${BASE}\nCOPY content /\nRUN test "$(cd /sys/class/net && echo *)" = lo\n')
    content = steps.with_name("content")
    content.write_text("1")

    def ensure(*, rebuild: bool = False) -> Provided:
        (provided,) = provide([name], rebuild=rebuild)
        assert engine().images.get(name).id == provided.id
        return provided

    first = ensure()
    assert first.origin == "built"
    assert is_ours(name, engine().images.get(name))
    assert ensure() == ensure()
    assert ensure().id == first.id
    content.write_text("2")
    second = ensure()
    assert (second.origin, second.id != first.id) == ("built", True)
    with pytest.raises(ImageNotFound):
        engine().images.get(first.id)
    # Somebody makes an image of the same name, out of ours.
    container = engine().containers.create(second.id, ["true"], labels=engines.labels(name))
    try:
        foreign = container.commit(*name.split(":"), changes=f"LABEL {images.LABEL}=")
    finally:
        container.remove(v=True)
    content.write_text("3")
    assert ensure(rebuild=True) == Provided(name, str(foreign.id), "present", "other")


class Registry(BaseHTTPRequestHandler):
    """A registry with one image of no layers, which it gives to whoever asks, whatever he asks for."""

    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
    ).encode()
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(config),
                "digest": f"sha256:{hashlib.sha256(config).hexdigest()}",
            },
            "layers": [],
        }
    ).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def do_GET(self) -> None:
        content, kind = b"{}", "application/json"
        if "/manifests/" in self.path:
            content, kind = self.manifest, self.kind
        elif "/blobs/" in self.path:
            content, kind = self.config, "application/octet-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def registry() -> Iterator[str]:
    """A name for an image in a registry that only the engine of this machine reaches."""
    if not engine().api.base_url.startswith("http+docker://"):
        pytest.skip("the engine is on another machine")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    name = f"localhost:{server.server_address[1]}/rollbridge-test:1"
    try:
        yield name
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for image in engine().images.list(name.rpartition(":")[0]):
            engine().images.remove(image.id, force=True)


def test_what_is_pulled_has_the_digest_or_is_not_taken(registry: str) -> None:
    docker = images.Engine()
    with closing(docker):
        with pytest.raises(NotFound):
            docker.pull(registry, f"sha256:{'0' * 64}")
        assert docker.find(registry) is None
        docker.pull(registry, Registry.digest)
        found = docker.find(registry)
        assert found is not None
        assert f"{registry.rpartition(':')[0]}@{Registry.digest}" in found.attrs["RepoDigests"]


def test_a_step_that_fails_says_so_and_replaces_nothing(name: str, steps: Path) -> None:
    steps.write_text("ARG BASE\nFROM ${BASE}\nRUN echo not like this; exit 3\n")
    with pytest.raises(
        LocalEnvironmentError, match=r"(?s)cannot be built: .*not like this\n.*returned a non-zero code: 3"
    ):
        provide([name])
    with pytest.raises(ImageNotFound):
        engine().images.get(name)


# -- the contract of the official images -----------------------------------------------------------------------


def process_of(container: Container) -> dict[str, str]:
    """What the kernel says of the container's first process."""
    read = container.exec_run(["cat", "/proc/1/status"])
    assert read.exit_code == 0, read.output
    return dict(re.findall(r"^(\w+):\s+(.*)$", read.output.decode(), re.MULTILINE))


def test_zookeeper_is_set_by_its_variables(servers: ContainerCluster) -> None:
    container = servers.node("zookeeper").container
    status = process_of(container)
    assert (status["Name"], status["Uid"].split()[0]) == ("java", "1000")
    said = container.exec_run(["cat", "/conf/zoo.cfg", "/data/myid"]).output.decode().splitlines()
    assert {"tickTime=500", "initLimit=20", "admin.enableServer=false", "maxSessionTimeout=60000"} <= set(said)
    assert {"dataDir=/data", "preAllocSize=4096", "server.1=0.0.0.0:2888:3888;2181"} <= set(said)
    assert said[-1] == "1"
    status_of_server = container.exec_run(["zkServer.sh", "status"])
    assert (status_of_server.exit_code, b"standalone" in status_of_server.output) == (0, True)
    config = container.image.attrs["Config"]
    assert set(config["ExposedPorts"]) >= {"2181/tcp", "2888/tcp", "3888/tcp", "8080/tcp"}
    assert set(config["Volumes"]) >= {"/data", "/datalog", "/logs"}
    assert config["Entrypoint"] == ["/docker-entrypoint.sh"]


def test_kafka_is_set_by_its_variables(servers: ContainerCluster) -> None:
    container = servers.node("kafka").container
    status = process_of(container)
    assert (status["Name"], status["Uid"].split()[0]) == ("java", "1000")
    broker = ConfigResource(ConfigResource.Type.BROKER, "1")
    admin = AdminClient({"bootstrap.servers": servers.bootstrap_servers})
    found = admin.describe_configs([broker])[broker].result(120)
    assert found["num.partitions"].value == "3"
    assert found["log.dirs"].value.startswith("/var/lib/kafka/data/")
    config = container.image.attrs["Config"]
    assert "9092/tcp" in config["ExposedPorts"]
    assert set(config["Volumes"]) >= {"/etc/kafka/secrets", "/var/lib/kafka/data", "/mnt/shared/config"}
    assert (config["User"], config["Cmd"]) == ("appuser", ["/etc/kafka/docker/run"])


def test_kafka_talks_to_its_own_tools_and_to_kcat(servers: ContainerCluster, unique_name: Callable[[str], str]) -> None:
    topic = unique_name("tools")

    def tool(name: str, *arguments: str) -> str:
        command = [f"/opt/kafka/bin/{name}", "--bootstrap-server", servers.bootstrap_servers_inside, *arguments]
        said = servers.run(KAFKA, command)
        assert said.code == 0, said
        return said.out.decode()

    assert topic in tool("kafka-topics.sh", "--create", "--topic", topic)
    if shutil.which("kcat") is None:
        lacking("kcat is not installed (Debian: kcat)")
    kcat = ["kcat", "-q", "-b", servers.bootstrap_servers, "-t", topic]
    subprocess.run([*kcat, "-P", "-p", "0"], input=b"one\ntwo\n", timeout=180, check=True)
    assert (
        subprocess.run([*kcat, "-C", "-p", "0", "-e"], capture_output=True, timeout=180, check=True).stdout
        == b"one\ntwo\n"
    )
    assert tool("kafka-get-offsets.sh", "--topic", topic, "--partitions", "0").split() == [f"{topic}:0:2"]


@pytest.mark.long
def test_servers_start_without_any_setting(servers: ContainerCluster) -> None:
    started = LogMessageWaitStrategy("Kafka Server started").with_startup_timeout(int(PATIENCE_S))
    serves = ExecWaitStrategy(["zkServer.sh", "status"]).with_startup_timeout(int(PATIENCE_S))
    with (
        servers.beside(KAFKA).waiting_for(started) as kafka,
        servers.beside(ZOOKEEPER).waiting_for(serves) as zookeeper,
    ):
        for container in (kafka, zookeeper):
            assert ended(container) == 143, "ended by SIGTERM, as a JVM says it"


def ended(container: DockerContainer) -> int:
    """The exit code of a container that is asked to end."""
    container.get_wrapped_container().stop(timeout=30)
    return container.wait()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"KAFKA_PROCESS_ROLES": "controller", "KAFKA_ADVERTISED_LISTENERS": "A://:1"}, "not supported on a KRaft"),
        ({"KAFKA_ADVERTISED_LISTENERS": "SSL://k:1"}, "KAFKA_SSL_KEYSTORE_FILENAME environment variable not set"),
        (
            {"KAFKA_ADVERTISED_LISTENERS": "SSL://k:1", "KAFKA_SSL_KEYSTORE_FILENAME": "store"},
            "/etc/kafka/secrets/store file does not exist",
        ),
        ({"KAFKA_ADVERTISED_LISTENERS": "SASL_PLAINTEXT://k:1"}, "KAFKA_OPTS environment variable not set"),
        ({"KAFKA_PROCESS_ROLES": "broker"}, "node.id"),
    ],
)
def test_kafka_ends_and_says_which_setting_is_wrong(
    servers: ContainerCluster, variables: Mapping[str, str], words: str
) -> None:
    said = servers.run(KAFKA, [], environment=variables)
    assert said.code == 1
    assert words in (said.out + said.err).decode()


# -- the coordinator's image, which is the gateway's as well ---------------------------------------------------


@contextmanager
def service(
    servers: ContainerCluster,
    root: str,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Container]:
    """A coordinator, or what else ``command`` says, as hardened as in compose.yaml.

    Its health check is the image's own, only more often.
    """
    environment = {
        **servers.connection_inside(root),
        "ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": "2",
        **(environment or {}),
    }
    # Without a start period: 0 would be the image's own.
    check = {"interval": SECOND_NS // 2, "timeout": 5 * SECOND_NS, "retries": 1, "start_period": SECOND_NS // 1000}
    hardened = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]}
    described = servers.beside(COORDINATOR, command, healthcheck=check, **hardened).with_tmpfs_mount("/tmp")
    cast("dict[str, tuple[str, None]]", described.ports)[METRICS] = (publishing_address(), None)
    with described.with_envs(**environment) as container:
        yield container.get_wrapped_container()


def said(container: Container) -> str:
    """What the health check has said last."""
    container.reload()
    return "".join(result["Output"] for result in container.attrs["State"]["Health"]["Log"][-1:])


def get(port: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host(), int(port), timeout=120)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.mark.long
def test_a_coordinator_is_healthy_only_while_it_could_lead(
    servers: ContainerCluster, unique_name: Callable[[str], str]
) -> None:
    root, stream = f"/{unique_name('image')}", f"{unique_name('image')}/orders"
    with service(servers, root) as container:
        eventually(lambda: health(container) == "healthy", f"it is healthy: {container.logs()!r}")
        assert container.exec_run(["sh", "-c", "id -u; id -un"]).output.split() == [b"10001", b"rollbridge"]
        port = container.attrs["NetworkSettings"]["Ports"][METRICS][0]["HostPort"]

        def without_kafka() -> None:
            with servers.paused("kafka"):
                eventually(lambda: get(port, "/healthz")[0] == 503, "it is not healthy without Kafka")
                assert "Kafka does not answer" in get(port, "/healthz")[1]
            eventually(lambda: health(container) == "healthy", "it is healthy again")

        without_kafka()  # while it leads nothing
        created = container.exec_run(["rollbridge", "stream", "create", stream])
        assert created.exit_code == 0, created.output
        eventually(lambda: "rollbridge_coordinator_groups_led 1.0\n" in get(port, "/metrics")[1], "it leads")
        status, text = get(port, "/metrics")
        assert status == 200
        assert "rollbridge_coordinator_healthy 1.0\n" in text
        assert text.count("# TYPE rollbridge_txn_tb_snapshot_segment_total gauge\n") == 1

        with servers.paused("zookeeper"):
            eventually(lambda: health(container) == "unhealthy", "it is not healthy without ZooKeeper")
            assert get(port, "/healthz") == (503, "not connected to ZooKeeper\n")
        eventually(lambda: health(container) == "healthy", "it is healthy again")
        without_kafka()

        container.stop(timeout=30)
        assert container.wait()["StatusCode"] == 0
        assert b"Traceback" not in container.logs()


def test_a_coordinator_that_finds_no_servers_is_not_healthy_and_ends_when_told_to(servers: ContainerCluster) -> None:
    nowhere = {"ROLLBRIDGE_ZOOKEEPER": f"{servers.node('kafka').part}:1"}
    with service(servers, "/nowhere", environment=nowhere) as container:
        eventually(lambda: said(container) == "not connected to ZooKeeper\n", "it waits for ZooKeeper")
        assert health(container) == "unhealthy"
        container.stop(timeout=30)
        assert container.wait()["StatusCode"] == 0


@pytest.mark.long
def test_a_gateway_is_healthy_only_while_it_has_its_lease(
    servers: ContainerCluster, unique_name: Callable[[str], str]
) -> None:
    root = f"/{unique_name('image')}"
    with service(servers, root) as leader:
        eventually(lambda: health(leader) == "healthy", f"the coordinator is healthy: {leader.logs()!r}")
        with service(servers, root, command=["gateway", "--listen", "0.0.0.0:9192"]) as container:
            eventually(lambda: health(container) == "healthy", f"it is healthy: {container.logs()!r}")
            port = container.attrs["NetworkSettings"]["Ports"][METRICS][0]["HostPort"]
            status, text = get(port, "/metrics")
            assert status == 200
            assert "rollbridge_gateway_connections 0.0\n" in text
            with servers.paused("zookeeper"):
                eventually(lambda: health(container) == "unhealthy", "it is not healthy without ZooKeeper")
                assert get(port, "/healthz") == (503, "its lease in ZooKeeper has run out\n")
            eventually(lambda: health(container) == "healthy", "it is healthy again")
            container.stop(timeout=30)
            assert container.wait()["StatusCode"] == 0
            assert b"Traceback" not in container.logs()


@pytest.mark.long
def test_the_same_image_is_the_clients(servers: ContainerCluster, unique_name: Callable[[str], str]) -> None:
    root = f"/{unique_name('image')}"
    assert servers.run(COORDINATOR, ["--version"]).out.decode().split()[-1] == __version__
    with service(servers, root) as leader:
        eventually(lambda: health(leader) == "healthy", f"the coordinator is healthy: {leader.logs()!r}")
        status = servers.run(COORDINATOR, ["status", "--json"], environment=servers.connection_inside(root))
    assert json.loads(status.out)["ok"] is True, status.out
    nobody = servers.run(COORDINATOR, ["coordinator"])
    assert nobody.code == 4
    assert b"no cluster is named" in nobody.err
