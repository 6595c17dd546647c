"""What images are made of, when they are made again, and which are never touched: all that needs no engine."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rollbridge.cli.main import main
from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import image_names as names
from rollbridge_devcluster import recipes
from rollbridge_devcluster.engine import Image, PullFailedError
from rollbridge_devcluster.images import ImageOrigin, Provider
from rollbridge_devcluster.recipes import Tree

ROOT = Path(__file__).parents[2]
LDD = """\
	linux-vdso.so.1 (0x00007f925d7c5000)
	libpython3.11.so.1.0 => /opt/python/lib/libpython3.11.so.1.0 (0x00007f925d000000)
	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f925d5cd000)
	libmissing.so.1 => not found
	/lib64/ld-linux-x86-64.so.2 (0x00007f925d7c7000)
/usr/bin/true:
	not a dynamic executable
"""


def members(tree: Tree) -> dict[str, tarfile.TarInfo]:
    return {member.name: member for member in tarfile.open(fileobj=io.BytesIO(packed(tree)))}


def packed(tree: Tree) -> bytes:
    target = io.BytesIO()
    tree.pack(target)
    return target.getvalue()


def test_libraries_are_those_that_ldd_found() -> None:
    assert recipes.libraries(LDD) == {
        "/opt/python/lib/libpython3.11.so.1.0",
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib64/ld-linux-x86-64.so.2",
    }


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("/bin/sh", "usr/bin/sh"),
        ("/lib64/ld.so", "usr/lib64/ld.so"),
        ("/usr/lib/a.so", "usr/lib/a.so"),
        ("/opt/lib/a.so", "opt/lib/a.so"),
        ("/library/a", "library/a"),
    ],
)
def test_directories_that_are_links_in_an_image_hold_nothing(here: str, there: str) -> None:
    assert recipes.in_image(here) == there


def test_a_program_needs_the_libraries_that_its_libraries_need() -> None:
    needed = recipes.needed_by([Path("/bin/sh"), ROOT / "README.md"])
    assert any(library.name.startswith("libc.so") for library in needed)
    assert all(library.is_absolute() for library in needed)


def test_a_tree_is_packed_the_same_each_time_and_belongs_to_root(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"x" * 1000)
    program.chmod(0o700)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "plain").write_text("p")
    (tmp_path / "dir" / "link").symlink_to(program)
    (tmp_path / "dir" / "dangling").symlink_to(tmp_path / "none")
    tree = Tree(links={"bin": "usr/bin"}, directories={"tmp": 0o1777})
    tree.add(program, "usr/bin/a")
    tree.add(program, "usr/bin/b")
    tree.add(tmp_path / "dir", "opt")
    tree.write("#!/bin/sh\n", "run", executable=True)
    found = members(tree)
    assert sorted(found) == ["bin", "opt/link", "opt/plain", "run", "tmp", "usr/bin/a", "usr/bin/b"]
    assert (found["opt/link"].isreg(), found["opt/link"].size) == (True, 1000)
    assert [found[name].linkname for name in ("bin", "usr/bin/a", "usr/bin/b")] == ["usr/bin", "opt/link", "opt/link"]
    assert found["usr/bin/a"].islnk(), "the same content is stored once"
    assert [oct(found[name].mode) for name in ("tmp", "run", "opt/plain")] == ["0o1777", "0o755", "0o644"]
    assert {(member.uid, member.gid, member.mtime) for member in found.values()} == {(0, 0, 0)}
    program.touch()
    assert packed(tree) == packed(tree)


def test_the_toolbox_is_a_root_file_system() -> None:
    tree = recipes.toolbox()
    found = members(tree)
    assert {"usr/bin/bash", "usr/bin/sleep", "etc/passwd", "tmp"} <= found.keys()
    assert found["lib64"].linkname == "usr/lib64"
    assert [name for name in found if name.startswith(("bin/", "lib/", "lib64/", "sbin/"))] == []


@pytest.mark.long
def test_the_python_of_an_image_has_neither_tests_nor_packages_of_this_machine() -> None:
    files = recipes.python().files
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert {f"usr/local/bin/{name}", f"usr/local/lib/{name}/os.py"} <= files.keys()
    assert any(path.endswith(".whl") and "/pip-" in path for path in files), "ensurepip's"
    assert [path for path in files if re.search("/(test|site-packages|dist-packages|__pycache__)/", path)] == []


def test_an_image_is_ours_only_under_the_name_under_which_we_built_it() -> None:
    built = {names.LABEL: names.KAFKA}
    assert names.is_stand_in(names.KAFKA, built)
    assert not names.is_ours(names.COORDINATOR, built), "it was made from ours and inherits the label"
    assert not names.is_ours(names.KAFKA, {})
    assert not names.is_stand_in(names.TOOLBOX, {names.LABEL: names.TOOLBOX})


def test_every_image_has_a_recipe_and_stands_on_one_that_has() -> None:
    assert names.OFFICIAL | set(names.IN_USE) <= recipes.RECIPES.keys()
    assert {recipe.base for recipe in recipes.RECIPES.values()} - {None} <= recipes.RECIPES.keys()


def test_the_dockerignore_lists_what_the_image_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == {*recipes.PROJECT_FILES, "wheels"}
    context = recipes.RECIPES[names.COORDINATOR].inputs()
    paths = {line.partition(" ")[0] for line in context}
    assert {"Dockerfile", "pyproject.toml", "requirements/coordinator.lock", "bridge/rollbridge/py.typed"} <= paths
    assert [path for path in paths if "/tests/" in path or "__pycache__" in path] == []


def test_the_tools_of_kafka_are_in_its_image() -> None:
    tools = {path.removeprefix("opt/bin/") for path in recipes.kafka_files().texts if path.startswith("opt/bin/")}
    assert {"kafka-topics.sh", "kafka-console-consumer.sh", "kafka-acls.sh", "kafka-run-class.sh"} <= tools


def test_files_for_users_name_the_images_that_are_built() -> None:
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    for name in (names.pinned(names.KAFKA), names.pinned(names.ZOOKEEPER), names.COORDINATOR):
        assert f":-{name}}}" in compose
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG PYTHON_IMAGE={names.pinned('python:3.11-slim')}\n" in dockerfile
    assert f"docker build -t {names.COORDINATOR} ." in dockerfile


class Shelf:
    """Images in memory, with a registry that may have some."""

    def __init__(self, registry: Mapping[str, str] | None = None, *, reachable: bool = True) -> None:
        self.images: dict[str, Image] = {}
        self.registry = registry or {}
        self.reachable = reachable
        self.asked: list[str] = []
        self.built: list[Image] = []
        self.forgotten: list[str] = []
        self.appears: tuple[str, Image] | None = None
        """An image that somebody else makes while one is built."""

    def find(self, name: str) -> Image | None:
        return self.images.get(name)

    def pull(self, name: str, digest: str, patience_s: float) -> None:
        assert names.pinned(name) == f"{name}@{digest}"
        self.asked.append(name)
        if not self.reachable:
            raise PullFailedError("no route", unreachable=True)
        if name not in self.registry:
            raise PullFailedError("unknown", unreachable=False)
        self.images[name] = Image(self.registry[name], {}, 1, frozenset({digest}))

    def build(self, context: Tree, arguments: Mapping[str, str], labels: Mapping[str, str]) -> str:
        self.built.append(Image(f"built-{len(self.built)}", labels, 1))
        if self.appears is not None:
            self.images[self.appears[0]] = self.appears[1]
        return self.built[-1].id

    def name(self, image_id: str, name: str) -> None:
        self.images[name] = next(image for image in self.built if image.id == image_id)

    def forget(self, image_id: str) -> None:
        self.forgotten.append(image_id)

    def forget_stages(self) -> None:
        """There are none."""

    def ensure(self, name: str, *, pull: bool = True, rebuild: bool = False) -> tuple[str, ImageOrigin, bool]:
        provided = Provider(self, pull=pull, rebuild=rebuild, report=str).ensure(name)
        return provided.id, provided.origin, provided.stand_in

    @property
    def built_names(self) -> list[str]:
        return [image.labels[names.LABEL] for image in self.built]


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the images depend on, by name; no recipe looks at this machine."""
    given = dict.fromkeys(recipes.RECIPES, "1")

    def changed(name: str) -> recipes.Recipe:
        def read() -> Iterator[str]:
            yield given[name]

        return replace(recipes.RECIPES[name], inputs=read, context=lambda _: Tree(), labels=dict)

    changed_recipes = {name: changed(name) for name in recipes.RECIPES}
    monkeypatch.setattr("rollbridge_devcluster.images.RECIPES", changed_recipes)
    return given


@pytest.mark.usefixtures("inputs")
def test_an_image_that_is_missing_is_pulled_if_it_can_be() -> None:
    shelf = Shelf({names.KAFKA: "official"})
    assert shelf.ensure(names.KAFKA) == ("official", ImageOrigin.PULLED, False)
    assert shelf.ensure(names.KAFKA) == ("official", ImageOrigin.PRESENT, False)
    assert shelf.asked == [names.KAFKA]
    assert not shelf.built


@pytest.mark.usefixtures("inputs")
def test_only_an_image_of_the_pinned_digest_counts_as_official() -> None:
    shelf = Shelf({names.KAFKA: "official"})
    shelf.images[names.ZOOKEEPER] = Image("another", {}, 1, frozenset({"sha256:0"}))
    provider = Provider(shelf, pull=True, rebuild=False, report=str)
    kinds = [provider.ensure(name) for name in (names.KAFKA, names.ZOOKEEPER, names.TOOLBOX)]
    assert [(image.stand_in, image.pinned) for image in kinds] == [(False, True), (False, False), (False, False)]


@pytest.mark.usefixtures("inputs")
def test_what_has_no_digest_is_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "DIGESTS", {})
    shelf = Shelf({names.KAFKA: "official"})
    assert shelf.ensure(names.KAFKA) == ("built-2", ImageOrigin.BUILT, True)
    assert shelf.asked == []


@pytest.mark.usefixtures("inputs")
def test_an_image_that_can_not_be_pulled_is_built_with_what_it_stands_on() -> None:
    shelf = Shelf()
    assert shelf.ensure(names.ZOOKEEPER) == ("built-2", ImageOrigin.BUILT, True)
    assert shelf.built_names == [names.TOOLBOX, names.JAVA, names.ZOOKEEPER]
    assert shelf.ensure(names.KAFKA) == ("built-3", ImageOrigin.BUILT, True)
    assert shelf.ensure(names.ZOOKEEPER) == ("built-2", ImageOrigin.PRESENT, True)
    assert shelf.asked == [names.ZOOKEEPER, names.KAFKA], "never for what only we have"


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("reachable", [True, False])
def test_a_registry_that_is_silent_is_asked_once(reachable: bool) -> None:
    shelf = Shelf(reachable=reachable)
    provider = Provider(shelf, pull=True, rebuild=False, report=str)
    for name in (names.KAFKA, names.ZOOKEEPER):
        assert provider.ensure(name).stand_in
    assert shelf.asked == ([names.KAFKA, names.ZOOKEEPER] if reachable else [names.KAFKA])


@pytest.mark.usefixtures("inputs")
def test_no_registry_is_asked_if_that_is_not_wanted() -> None:
    shelf = Shelf({names.KAFKA: "official"})
    assert shelf.ensure(names.KAFKA, pull=False) == ("built-2", ImageOrigin.BUILT, True)
    assert shelf.asked == []


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("name", [names.KAFKA, names.COORDINATOR, names.TOOLBOX])
@pytest.mark.parametrize("labels", [{}, {names.LABEL: "another/image:1", names.LABEL_INPUTS: "1"}])
@pytest.mark.parametrize("rebuild", [True, False])
def test_an_image_of_somebody_else_is_used_as_it_is(name: str, labels: dict[str, str], rebuild: bool) -> None:
    shelf = Shelf()
    shelf.images[name] = Image("foreign", labels, 1)
    assert shelf.ensure(name, rebuild=rebuild) == ("foreign", ImageOrigin.PRESENT, False)
    assert shelf.images[name].id == "foreign"
    assert not shelf.built


@pytest.mark.usefixtures("inputs")
def test_an_image_that_somebody_else_makes_meanwhile_is_kept() -> None:
    shelf = Shelf()
    shelf.appears = (names.TOOLBOX, Image("foreign", {}, 1))
    assert shelf.ensure(names.TOOLBOX) == ("foreign", ImageOrigin.PRESENT, False)
    assert shelf.images[names.TOOLBOX].id == "foreign"
    assert shelf.forgotten == ["built-0"]


def test_an_image_is_built_again_when_anything_below_it_has_changed(inputs: dict[str, str]) -> None:
    shelf = Shelf()
    shelf.ensure(names.KAFKA)
    inputs[names.PYTHON] = "2"
    assert shelf.ensure(names.KAFKA) == ("built-2", ImageOrigin.PRESENT, True)
    inputs[names.TOOLBOX] = "2"
    assert shelf.ensure(names.KAFKA) == ("built-5", ImageOrigin.BUILT, True)
    assert shelf.built_names[3:] == [names.TOOLBOX, names.JAVA, names.KAFKA]
    assert shelf.forgotten == ["built-0", "built-1", "built-2"]


@pytest.mark.usefixtures("inputs")
def test_an_image_stays_when_only_what_it_stands_on_was_removed() -> None:
    shelf = Shelf()
    shelf.ensure(names.KAFKA)
    del shelf.images[names.JAVA]
    assert shelf.ensure(names.KAFKA) == ("built-2", ImageOrigin.PRESENT, True)


@pytest.mark.usefixtures("inputs")
def test_the_coordinator_is_built_again_on_another_python() -> None:
    shelf = Shelf()
    assert shelf.ensure(names.COORDINATOR) == ("built-2", ImageOrigin.BUILT, False)
    shelf.images[names.PYTHON] = Image("official-1", {}, 1)
    assert shelf.ensure(names.COORDINATOR) == ("built-3", ImageOrigin.BUILT, False)
    assert shelf.ensure(names.COORDINATOR) == ("built-3", ImageOrigin.PRESENT, False)


@pytest.mark.usefixtures("inputs")
def test_images_of_ours_are_built_again_if_that_is_wanted() -> None:
    shelf = Shelf()
    shelf.ensure(names.TOOLBOX)
    assert shelf.ensure(names.TOOLBOX, rebuild=True) == ("built-1", ImageOrigin.BUILT, False)


def test_without_an_engine_one_line_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none"}
    command = [sys.executable, "-m", "rollbridge", "images", "build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == LocalEnvironmentError.exit_code
    assert done.stderr.startswith("rollbridge: no Docker engine answers: ")
    assert done.stderr.count("\n") == 1


def test_without_dockers_library_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    monkeypatch.delitem(sys.modules, "rollbridge_devcluster.engine")
    with pytest.raises(LocalEnvironmentError, match=r"pip install '\./rollbridge-\S+\.whl\[containers\]'"):
        importlib.import_module("rollbridge_devcluster.engine")


def test_an_image_that_nobody_knows_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "build", "spark"]) == 2
    assert "'spark' is not one of 'kafka', 'zookeeper', 'coordinator', 'toolbox', 'python'" in capsys.readouterr().err
