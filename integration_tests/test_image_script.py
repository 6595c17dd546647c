"""When images are pulled, built and built again, and which are never touched: all that needs no engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, NotFound

from integration_tests import images
from integration_tests.images import COORDINATOR, KAFKA, LABEL, PYTHON, TOOLBOX, ZOOKEEPER, Provider
from rollbridge.errors import LocalEnvironmentError

ROOT = Path(__file__).parents[1]


class Shelf(images.Engine):
    """Images in memory, with a registry that may have some."""

    def __init__(self, *registry: str, reachable: bool = True) -> None:
        self.images: dict[str, Any] = {}
        self.registry = registry
        self.reachable = reachable
        self.asked: list[str] = []
        self.built: list[Any] = []
        self.forgotten: list[str] = []
        self.appears: dict[str, Any] = {}
        """Images that somebody else makes while one is built."""

    def find(self, name: str) -> Any:
        return self.images.get(name)

    def pull(self, name: str, digest: str) -> None:
        self.asked.append(name)
        if not self.reachable:
            raise APIError("no route")
        if name not in self.registry:
            raise NotFound("unknown")
        self.images[name] = image("pulled", digest=digest)

    def build(self, context: Path, arguments: Mapping[str, str], labels: Mapping[str, str]) -> str:
        self.built.append(image(f"built-{len(self.built)}", labels))
        self.images |= self.appears
        return str(self.built[-1].id)

    def name(self, image_id: str, name: str) -> None:
        self.images[name] = next(one for one in self.built if one.id == image_id)

    def forget(self, image_id: str) -> None:
        self.forgotten.append(image_id)

    def run(self, name: str, *command: str) -> str:
        return "3.11"

    def ensure(self, name: str, *, pull: bool = True, rebuild: bool = False) -> tuple[str, str, str]:
        found = Provider(self, pull=pull, rebuild=rebuild).ensure(name)
        return found.id, found.origin, found.kind

    @property
    def built_names(self) -> list[str]:
        return [one.labels[LABEL] for one in self.built]


def image(id_: str, labels: Mapping[str, str] | None = None, digest: str = "sha256:0") -> Any:
    """As Docker's library has it."""
    return SimpleNamespace(id=id_, labels=labels or {}, attrs={"RepoDigests": [f"name@{digest}"]})


@pytest.fixture(autouse=True)
def inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What the images depend on, by name; nothing is collected, fetched or installed."""
    given = dict.fromkeys((*images.IN_USE, images.PROMETHEUS), "1")

    @contextmanager
    def context(self: Provider, name: str, base: object) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "content").write_text(given[name])
        yield folder

    wheels = tmp_path / "fetched"
    wheels.mkdir()
    monkeypatch.setattr(Provider, "context", context)
    monkeypatch.setattr(images, "_make_root", Path.touch)
    monkeypatch.setattr(images, "_wheels", lambda lock, version: wheels)
    monkeypatch.setattr(shutil, "copytree", lambda source, target: None)
    return given


def test_files_for_users_name_the_images_that_are_used_by_digest() -> None:
    assert {KAFKA, ZOOKEEPER, PYTHON} <= images.official().keys()
    assert f":-{COORDINATOR}}}" in (ROOT / "compose.yaml").read_text(encoding="utf-8")
    assert f"docker build -t {COORDINATOR} ." in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_coordinators_image_is_made_of_the_checkout_without_tests() -> None:
    paths = images.checkout()
    assert {"Dockerfile", "pyproject.toml", "requirements/coordinator.lock", "bridge/rollbridge/py.typed"} <= set(paths)
    assert [path for path in paths if "/tests/" in path or "__pycache__" in path] == []
    assert {path.partition("/")[0] for path in paths} >= {"bridge", "coordinator", "devcluster", "gateway", "schemas"}


def test_a_digest_tells_content_place_mode_and_base(tmp_path: Path) -> None:
    def known(base: str) -> str:
        return images.digest(tmp_path, images.Provided("base", base, "present", "other"))

    (tmp_path / "a").write_text("1")
    found = [known("1"), known("2")]
    (tmp_path / "a").chmod(0o755)
    found.append(known("1"))
    (tmp_path / "a").write_text("2")
    found.append(known("1"))
    (tmp_path / "a").rename(tmp_path / "b")
    found.append(known("1"))
    assert len(set(found)) == 5
    (tmp_path / "b").touch()
    assert known("1") == found[-1]


def test_an_image_that_is_missing_is_pulled_if_it_can_be() -> None:
    shelf = Shelf(KAFKA)
    assert shelf.ensure(KAFKA) == ("pulled", "pulled", "official")
    assert shelf.ensure(KAFKA) == ("pulled", "present", "official")
    assert shelf.asked == [KAFKA]
    assert not shelf.built


def test_only_an_image_of_the_pinned_digest_counts_as_official() -> None:
    shelf = Shelf(KAFKA)
    shelf.images[ZOOKEEPER] = image("another")
    assert [shelf.ensure(name)[2] for name in (KAFKA, ZOOKEEPER, TOOLBOX)] == ["official", "other", "built here"]


def test_what_has_no_digest_is_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "official", dict)
    shelf = Shelf(KAFKA)
    assert shelf.ensure(KAFKA)[:2] == ("built-1", "built")
    assert shelf.asked == []


def test_an_image_that_can_not_be_pulled_is_built_with_what_it_stands_on() -> None:
    shelf = Shelf()
    assert shelf.ensure(ZOOKEEPER) == ("built-1", "built", "stand-in")
    assert shelf.built_names == [TOOLBOX, ZOOKEEPER]
    assert shelf.ensure(KAFKA) == ("built-2", "built", "stand-in")
    assert shelf.ensure(ZOOKEEPER) == ("built-1", "present", "stand-in")
    assert shelf.asked == [ZOOKEEPER, KAFKA], "never for what only we have"


@pytest.mark.parametrize("reachable", [True, False])
def test_a_registry_that_is_silent_is_asked_once(reachable: bool) -> None:
    shelf = Shelf(reachable=reachable)
    provider = Provider(shelf)
    for name in (KAFKA, ZOOKEEPER):
        assert provider.ensure(name).kind == "stand-in"
    assert shelf.asked == ([KAFKA, ZOOKEEPER] if reachable else [KAFKA])


def test_no_registry_is_asked_if_that_is_not_wanted() -> None:
    shelf = Shelf(KAFKA)
    assert shelf.ensure(KAFKA, pull=False) == ("built-1", "built", "stand-in")
    assert shelf.asked == []


def test_an_image_that_somebody_else_makes_meanwhile_is_kept() -> None:
    shelf = Shelf()
    shelf.appears = {TOOLBOX: image("foreign")}
    assert shelf.ensure(TOOLBOX) == ("foreign", "present", "other")
    assert shelf.images[TOOLBOX].id == "foreign"
    assert shelf.forgotten == ["built-0"]


def test_an_image_is_built_again_when_anything_below_it_has_changed(inputs: dict[str, str]) -> None:
    shelf = Shelf()
    shelf.ensure(KAFKA)
    inputs[ZOOKEEPER] = "2"
    assert shelf.ensure(KAFKA) == ("built-1", "present", "stand-in")
    inputs[TOOLBOX] = "2"
    assert shelf.ensure(KAFKA) == ("built-3", "built", "stand-in")
    assert shelf.built_names[2:] == [TOOLBOX, KAFKA]
    assert shelf.forgotten == ["built-0", "built-1"]


def test_the_coordinator_is_built_again_on_another_python() -> None:
    shelf = Shelf()
    assert shelf.ensure(COORDINATOR) == ("built-1", "built", "built here")
    assert shelf.built_names == [TOOLBOX, COORDINATOR]
    shelf.images[PYTHON] = image("official-1")
    assert shelf.ensure(COORDINATOR) == ("built-2", "built", "built here")
    assert shelf.ensure(COORDINATOR) == ("built-2", "present", "built here")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [([], LocalEnvironmentError.exit_code, "make images: no container engine answers: "), (["spark"], 2, "spark")],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none"}
    command = [sys.executable, "-m", "integration_tests.images", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
