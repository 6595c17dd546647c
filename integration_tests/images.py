"""Make sure that the container images are there that tests and ``compose.yaml`` use: ``make images``.

An image that is present is used, and one that was not built here is never replaced. An official one that is missing is
pulled, by the digest that ``compose.yaml`` or ``Dockerfile`` has. What cannot be pulled is built: of Debian's packages,
of pinned jars and wheels, and of this checkout; no step of a build has a network. What was built here is built again
when its inputs have changed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docker.errors import APIError, BuildError, DockerException, ImageNotFound, NotFound
from docker.models.images import Image
from docker.utils.build import exclude_paths
from requests.exceptions import RequestException
from testcontainers.core.image import DockerImage

from integration_tests.backends.engine import connect
from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.version import __version__
from rollbridge_devcluster.jars import JarCache, default_cache

ROOT: Final = Path(__file__).parents[1]
DOCKERFILES: Final = Path(__file__).with_name("dockerfiles")

KAFKA: Final = "apache/kafka:4.2.0"
ZOOKEEPER: Final = "zookeeper:3.9.5"
PYTHON: Final = "python:3.11-slim"
COORDINATOR: Final = f"localhost/rollbridge/coordinator:{__version__}"
TOOLBOX: Final = f"localhost/rollbridge/toolbox:{__version__}"
"""Debian with network tools, for side containers in the network of another one; what is built stands on it."""
PROMETHEUS: Final = f"localhost/rollbridge/prometheus:{__version__}"
"""Debian's Prometheus, as installed on this machine; only ``compose.yaml``'s profile ``metrics`` uses it."""
IN_USE: Final = (KAFKA, ZOOKEEPER, COORDINATOR, TOOLBOX)
VARIABLES: Final = {KAFKA: "KAFKA_IMAGE", ZOOKEEPER: "ZOOKEEPER_IMAGE", PROMETHEUS: "PROMETHEUS_IMAGE"}
"""By which ``compose.yaml``, which names official images by digest, is told of others."""

LABEL: Final = "io.rollbridge.image"
"""The name under which an image was built here. What others make of it inherits the label, with another name."""
LABEL_INPUTS: Final = "io.rollbridge.inputs"
LABEL_STAGE: Final = "io.rollbridge.stage"
"""On what a build with several stages leaves without a name."""

DEBIAN: Final = "bookworm"
PACKAGES: Final = ("iproute2", "iptables", "openjdk-17-jre-headless", "procps", "python3-venv")
_LEFT_OUT: Final = ("doc", "info", "locale", "man")
_JARS: Final = {
    KAFKA: ("kafka/opt/libs", ("kafka", "kafka-image", "tools")),
    ZOOKEEPER: ("zookeeper/home/lib", ("zookeeper", "zookeeper-image")),
}
PULL_S: Final = 15
"""Longest silence of a registry before it counts as unreachable."""
_LINES_SHOWN: Final = 30


def official() -> dict[str, str]:
    """Return the digests of the official images, by name, as files for users have them."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("compose.yaml", "Dockerfile"))
    return dict(re.findall(r"(?<=[-=])(\w[\w./-]*:[\w.-]+)@(sha256:[0-9a-f]{64})", text))


@dataclass(frozen=True, slots=True)
class Provided:
    """An image that can be used."""

    name: str
    id: str
    origin: str
    """``present``, ``pulled`` or ``built``."""
    kind: str
    """``official``, ``stand-in``, ``built here`` or ``other``."""

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.origin}, {self.id.removeprefix('sha256:')[:12]}"


def is_ours(name: str, image: Image) -> bool:
    """Return whether the image that has this name was built here."""
    return bool(image.labels.get(LABEL) == name)


class Engine:
    """The images of the container engine."""

    def __init__(self) -> None:
        self._client = connect(silence_s=600)

    def find(self, name: str) -> Image | None:
        """Return the image of this name, if there is one."""
        try:
            return self._client.images.get(name)
        except ImageNotFound:
            return None

    def pull(self, name: str, digest: str) -> None:
        """Fetch the image of this digest, which the engine checks, and give it the name."""
        client = connect(silence_s=PULL_S)
        try:
            self.name(str(client.images.pull(name.rpartition(":")[0], tag=digest).id), name)
        finally:
            client.close()

    def build(self, context: Path, arguments: dict[str, str], labels: dict[str, str]) -> str:
        """Build an image without a name, and without a network; returns its id."""
        image = DockerImage(
            context, clean_up=False, network_mode="none", buildargs=arguments, labels=labels, forcerm=True
        )
        try:
            return str(image.build().get_wrapped_image().id)
        except BuildError as fault:
            said = "".join(str(event.get("stream", "")) for event in fault.build_log).splitlines()
            shown = "\n".join([*filter(str.strip, said)][-_LINES_SHOWN:])
            raise LocalEnvironmentError(f"the image cannot be built: {shown}\n{fault.msg}") from fault
        finally:
            image.get_docker_client().client.close()
            self._client.images.prune(filters={"dangling": True, "label": LABEL_STAGE})

    def name(self, image_id: str, name: str) -> None:
        """Let an image have this name, whichever had it before."""
        self._client.images.get(image_id).tag(*name.rsplit(":", 1), force=True)

    def forget(self, image_id: str) -> None:
        """Remove an image without a name, unless a container or another image needs it."""
        with suppress(APIError):
            self._client.images.remove(image_id)

    def run(self, name: str, *command: str) -> str:
        """Return what a program of an image prints."""
        said: bytes = self._client.containers.run(name, [*command], remove=True, network_mode="none")
        return said.decode().strip()

    def close(self) -> None:
        """End the connection."""
        self._client.close()


class Provider:
    """Provides images, each once."""

    def __init__(
        self, engine: Engine, *, pull: bool = True, rebuild: bool = False, report: Callable[[str], object] = str
    ) -> None:
        """Note what is wanted.

        Args:
            engine: Where images are.
            pull: Whether a registry may be asked.
            rebuild: Build again what was built here, even if nothing has changed.
            report: Called with a line about whatever takes time.
        """
        self._engine = engine
        self._pull = pull
        self._rebuild = rebuild
        self._report = report
        self._official = official()
        self._done: dict[str, Provided] = {}

    def ensure(self, name: str) -> Provided:
        """Make sure that this image is there, and what it stands on if it has to be built."""
        if name not in self._done:
            self._done[name] = self._ensure(name)
        return self._done[name]

    def look(self, name: str, origin: str = "present") -> Provided | None:
        """Return the image if it is there."""
        image = self._engine.find(name)
        if image is None:
            return None
        if is_ours(name, image):
            kind = "stand-in" if name in self._official else "built here"
        else:
            digests = [str(found).partition("@")[2] for found in image.attrs.get("RepoDigests") or ()]
            kind = "official" if self._official.get(name) in digests else "other"
        return Provided(name, str(image.id), origin, kind)

    def _ensure(self, name: str) -> Provided:
        present = self._engine.find(name)
        if present is None and self._pulled(name):
            return self._known(name, "pulled")
        if present is not None and not is_ours(name, present):
            return self._known(name, "present")
        base = self._base(name)
        with self.context(name, base) as folder:
            inputs = digest(folder, base)
            if present is not None and present.labels.get(LABEL_INPUTS) == inputs and not self._rebuild:
                return self._known(name, "present")
            return self._build(name, folder, base, inputs, present)

    def _pulled(self, name: str) -> bool:
        if not self._pull or name not in self._official:
            return False
        try:
            self._report(f"{name}: asking its registry")
            self._engine.pull(name, self._official[name])
        except (DockerException, RequestException) as fault:
            self._report(f"{name}: cannot be pulled: {fault}")
            # If it is not the image that lacks, others would keep us waiting for as long.
            self._pull = isinstance(fault, NotFound)
            return False
        return True

    def _base(self, name: str) -> Provided | None:
        if name == TOOLBOX:
            return None
        if name == COORDINATOR and (self._engine.find(PYTHON) is not None or self._pulled(PYTHON)):
            return self._known(PYTHON, "present")
        return self.ensure(TOOLBOX)

    @contextmanager
    def context(self, name: str, base: Provided | None) -> Iterator[Path]:
        """Collect what an image is built from, as far as its digest depends on it."""
        # In the cache, so that jars need not be copied.
        with tempfile.TemporaryDirectory(prefix="image-", dir=default_cache()) as scratch:
            folder = Path(scratch)
            if name == COORDINATOR:
                for path in checkout():
                    _copy(ROOT / path, folder / path)
            else:
                kind = re.split("[/:]", name)[-2]
                shutil.copytree(DOCKERFILES / kind, folder, dirs_exist_ok=True)
            if name in _JARS:
                target, sets = _JARS[name]
                for jar in JarCache.default().ensure(*sets):
                    place = folder / target.partition("/")[2] / jar.name
                    place.parent.mkdir(exist_ok=True)
                    place.hardlink_to(jar)
            if name == PROMETHEUS:
                for program in ("prometheus", "promtool"):
                    _copy(_installed(program), folder / program)
            yield folder

    def _build(self, name: str, folder: Path, base: Provided | None, inputs: str, replaced: Image | None) -> Provided:
        began = time.monotonic()
        arguments = {"BASE": base.name} if base else {}
        if name == TOOLBOX:
            _make_root(folder / "rootfs.tar")
        elif name == COORDINATOR:
            assert base is not None
            version = self._engine.run(base.name, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
            shutil.copytree(_wheels(folder / "requirements" / "coordinator.lock", version), folder / "wheels")
            arguments = {"PYTHON_IMAGE": base.name, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"}
        made = self._engine.build(folder, arguments, {LABEL: name, LABEL_INPUTS: inputs})
        meanwhile = self._engine.find(name)
        if meanwhile is not None and not is_ours(name, meanwhile):
            self._engine.forget(made)
            return self._known(name, "present")
        self._engine.name(made, name)
        if replaced is not None and replaced.id != made:
            self._engine.forget(str(replaced.id))
        self._report(f"{name}: built in {time.monotonic() - began:.1f} s")
        return self._known(name, "built")

    def _known(self, name: str, origin: str) -> Provided:
        found = self.look(name, origin)
        if found is None:
            raise LocalEnvironmentError(f"{name} was removed while it was looked at; try again")
        return found


def provide(
    wanted: Sequence[str] = IN_USE,
    *,
    pull: bool = True,
    rebuild: bool = False,
    report: Callable[[str], object] = str,
) -> list[Provided]:
    """Make sure that these images are there, each once, as :class:`Provider` does.

    Raises:
        LocalEnvironmentError: no engine answers, or an image can neither be pulled nor built; no image was replaced.
    """
    with _one_at_a_time(), _engine() as engine:
        provider = Provider(engine, pull=pull, rebuild=rebuild, report=report)
        return [provider.ensure(name) for name in wanted]


def look(wanted: Sequence[str] = IN_USE) -> dict[str, Provided | None]:
    """Return which of these images are there, by name; changes nothing."""
    with _engine() as engine:
        return {name: Provider(engine).look(name) for name in wanted}


@contextmanager
def _engine() -> Iterator[Engine]:
    engine = Engine()
    try:
        yield engine
    except (DockerException, RequestException) as fault:
        raise LocalEnvironmentError(f"the container engine refuses: {fault}") from fault
    finally:
        engine.close()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes that start together build once."""
    default_cache().mkdir(parents=True, exist_ok=True)
    with open(default_cache() / "images.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def checkout() -> list[str]:
    """Return the files of this checkout that make the coordinator's image, as ``.dockerignore`` says."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    found = exclude_paths(str(ROOT), [line for line in patterns if line and not line.startswith("#")], "Dockerfile")
    return sorted(path for path in found if (ROOT / path).is_file() and not path.startswith("wheels"))


def digest(folder: Path, base: Provided | None) -> str:
    """Return one word for the files of a context, the base, and what this module adds."""
    whole = hashlib.sha256(repr((base and base.id, DEBIAN, PACKAGES, _LEFT_OUT)).encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole.update(f"\n{path.relative_to(folder)} {path.stat().st_mode:o} ".encode())
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:32]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _installed(program: str) -> Path:
    found = shutil.which(program)
    if found is None:
        raise LocalEnvironmentError(f"{program} is not installed (on Debian: apt install {program}); no image was made")
    return Path(found)


def _run(what: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalEnvironmentError(f"{what}: {done.stderr.strip()}")


def _make_root(archive: Path) -> None:
    """Install Debian's packages into an archive."""
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT]
    # Java's package has links in there.
    hook = '--essential-hook=mkdir -p "$1/usr/share/man/man1"'
    command = [str(_installed("mmdebstrap")), "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    _run("Debian cannot be installed into an image", *command, *without, hook, DEBIAN, str(archive))


def _wheels(lock: Path, version: str) -> Path:
    """Return a directory with all wheels of a lock file, fetched once; pip checks their hashes, here and in a build."""
    key = hashlib.sha256(version.encode() + lock.read_bytes()).hexdigest()[:16]
    wheels = default_cache() / "wheels" / key
    if not wheels.exists():
        with tempfile.TemporaryDirectory(dir=default_cache()) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--python-version", version, "--only-binary", ":all:", "--require-hashes", "-r", str(lock)]
            _run(f"the wheels of {lock.name} cannot be fetched", *command, "--dest", f"{scratch}/wheels")
            wheels.parent.mkdir(exist_ok=True)
            Path(scratch, "wheels").rename(wheels)
    return wheels


def main() -> int:
    """Provide images and say which they are; returns the exit code."""
    short = {re.split("[/:]", name)[-2]: name for name in (*IN_USE, PROMETHEUS)}
    parser = argparse.ArgumentParser(prog="make images", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(short)}; default: all but the last")
    parser.add_argument("--no-pull", action="store_true", help="ask no registry")
    parser.add_argument("--rebuild", action="store_true", help="build again what was built here")
    asked = parser.parse_args()
    if unknown := set(asked.names) - short.keys():
        parser.error(f"no such image: {', '.join(sorted(unknown))}; nothing was done")
    try:
        wanted = [short[name] for name in asked.names] or IN_USE
        found = provide(wanted, pull=not asked.no_pull, rebuild=asked.rebuild, report=print)
    except RollbridgeError as fault:
        print(f"make images: {fault}", file=sys.stderr)
        return fault.exit_code
    print(*found, sep="\n")
    others = [f"{VARIABLES[one.name]}={one.name}" for one in found if one.name in VARIABLES and one.kind != "official"]
    if others:
        print(f"compose.yaml names the official images; for it to use these, set {' '.join(others)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
