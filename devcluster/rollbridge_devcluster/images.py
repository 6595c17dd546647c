"""Container images: make sure that they are there, for tests and ``compose.yaml``, and ``rollbridge images``.

What is present is used; what is not is pulled if it can be, and built if not.

Official images are pulled by digest, so that a tag which somebody moves brings nothing else.

An image that rollbridge has not built is never replaced, whatever is in it. One that it has built is built anew when
what it was built from has changed.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import click

from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.cli.tables import table
from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import image_names as names
from rollbridge_devcluster.engine import ContainerEngine, Image, PullFailedError
from rollbridge_devcluster.jars import default_cache
from rollbridge_devcluster.recipes import RECIPES, Tree, digest

PULL_S: Final = 15.0
"""How long a registry may be silent before it counts as unreachable."""


class ImageOrigin(StrEnum):
    """How an image came to be there."""

    PRESENT = "present"
    PULLED = "pulled"
    BUILT = "built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provided:
    """An image that can be used."""

    name: str
    id: str
    origin: ImageOrigin
    stand_in: bool
    """It has an official image's name and contract, but was built by rollbridge."""
    pinned: bool
    """It is the official image whose digest rollbridge knows."""
    size_bytes: int


def provide(
    wanted: Sequence[str] = names.IN_USE,
    *,
    pull: bool = True,
    rebuild: bool = False,
    report: Callable[[str], object] = lambda _: None,
) -> list[Provided]:
    """Make sure that these images are there, and say which they are.

    Args:
        wanted: Names of :mod:`rollbridge_devcluster.image_names`.
        pull: Whether a registry may be asked for what is missing.
        rebuild: Build anew what rollbridge has built before, even if nothing has changed.
        report: Is told, line by line, what takes time.

    Raises:
        LocalEnvironmentError: no engine answers, or an image can neither be pulled nor built; no image was replaced.
        ChecksumMismatchError: a jar is not the pinned one.
    """
    with ContainerEngine() as engine, _one_at_a_time(report):
        provider = Provider(engine, pull=pull, rebuild=rebuild, report=report)
        return [provider.ensure(name) for name in wanted]


def look(wanted: Sequence[str] = names.IN_USE) -> dict[str, Provided | None]:
    """Which of these images are there, by name; changes nothing.

    Raises:
        LocalEnvironmentError: no engine answers.
    """
    with ContainerEngine() as engine:
        found = {name: engine.find(name) for name in wanted}
    return {
        name: None if image is None else _provided(name, image, ImageOrigin.PRESENT) for name, image in found.items()
    }


class Store(Protocol):
    """Part of :class:`~rollbridge_devcluster.engine.ContainerEngine` that is used here, with the same promises."""

    def find(self, name: str) -> Image | None: ...
    def pull(self, name: str, digest: str, patience_s: float) -> None: ...
    def build(self, context: Tree, arguments: Mapping[str, str], labels: Mapping[str, str]) -> str: ...
    def name(self, image_id: str, name: str) -> None: ...
    def forget(self, image_id: str) -> None: ...
    def forget_stages(self) -> None: ...


class Provider:
    """One call of :func:`provide`."""

    def __init__(self, engine: Store, *, pull: bool, rebuild: bool, report: Callable[[str], object]) -> None:
        self._engine = engine
        self._pull = pull
        self._rebuild = rebuild
        self._report = report
        self._done: dict[str, Provided] = {}

    def ensure(self, name: str) -> Provided:
        """Make sure that this image is there, and what it stands on if it has to be built."""
        if name not in self._done:
            self._done[name] = self._ensure(name)
        return self._done[name]

    def _ensure(self, name: str) -> Provided:
        present = self._engine.find(name)
        if present is not None and not names.is_ours(name, present.labels):
            return _provided(name, present, ImageOrigin.PRESENT)
        if present is None and name in names.DIGESTS and self._pulled(name):
            return _provided(name, self._known(name), ImageOrigin.PULLED)
        if not self._rebuild and present is not None and present.labels.get(names.LABEL_INPUTS) == self._digest(name):
            return _provided(name, present, ImageOrigin.PRESENT)
        return self._build(name, present)

    def _digest(self, name: str) -> str:
        """Of everything that the image would be built from, that on which it stands included."""
        recipe = RECIPES[name]
        return digest(iter([self._base_digest(recipe.base), *recipe.inputs()]))

    def _base_digest(self, base: str | None) -> str:
        if base is None:
            return ""
        image = self._engine.find(base)
        if image is not None and not names.is_ours(base, image.labels):
            return image.id
        return self._digest(base)

    def _pulled(self, name: str) -> bool:
        if not self._pull:
            return False
        try:
            self._report(f"{name}: asking its registry")
            self._engine.pull(name, names.DIGESTS[name], PULL_S)
        except PullFailedError as fault:
            self._report(f"{name}: cannot be pulled, so a stand-in is built: {fault}")
            # Others would keep us waiting for as long.
            self._pull = not fault.unreachable
            return False
        return True

    def _build(self, name: str, replaced: Image | None) -> Provided:
        recipe = RECIPES[name]
        arguments = dict(recipe.arguments)
        if recipe.base is not None:
            self.ensure(recipe.base)
            arguments[recipe.base_argument] = recipe.base
        began = time.monotonic()
        # Not before its base is there: which one that is may depend on a registry.
        labels = {names.LABEL: name, names.LABEL_INPUTS: self._digest(name), **recipe.labels()}
        with tempfile.TemporaryDirectory(prefix="rollbridge-image-") as scratch:
            made = self._engine.build(recipe.context(Path(scratch)), arguments, labels)
        self._engine.forget_stages()
        meanwhile = self._engine.find(name)
        if meanwhile is not None and not names.is_ours(name, meanwhile.labels):
            self._engine.forget(made)
            return _provided(name, meanwhile, ImageOrigin.PRESENT)
        self._engine.name(made, name)
        if replaced is not None and replaced.id != made:
            self._engine.forget(replaced.id)
        built = _provided(name, self._known(name), ImageOrigin.BUILT)
        self._report(f"{name}: built in {time.monotonic() - began:.1f} s, {built.size_bytes / 1e6:.0f} MB")
        return built

    def _known(self, name: str) -> Image:
        image = self._engine.find(name)
        if image is None:
            raise LocalEnvironmentError(f"{name} was removed while it was looked at; try again")
        return image


def _provided(name: str, image: Image, origin: ImageOrigin) -> Provided:
    stand_in = names.is_stand_in(name, image.labels)
    pinned = names.DIGESTS.get(name) in image.digests
    return Provided(
        name=name, id=image.id, origin=origin, stand_in=stand_in, pinned=pinned, size_bytes=image.size_bytes
    )


@contextmanager
def _one_at_a_time(report: Callable[[str], object]) -> Iterator[None]:
    """Processes that start together build once."""
    directory = default_cache()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / "images.lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as fault:
        raise LocalEnvironmentError(f"the cache {directory} cannot be written: {fault}") from fault
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that builds images")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- rollbridge images --------------------------------------------------------------------------------------

SHORT: Final = {
    "kafka": names.KAFKA,
    "zookeeper": names.ZOOKEEPER,
    "coordinator": names.COORDINATOR,
    "toolbox": names.TOOLBOX,
    "python": names.PYTHON,
    "prometheus": names.PROMETHEUS,
}
"""What may be asked for by name; without any, all that tests and ``compose.yaml`` use."""
VARIABLES: Final = {
    names.KAFKA: "KAFKA_IMAGE",
    names.ZOOKEEPER: "ZOOKEEPER_IMAGE",
    names.PROMETHEUS: "PROMETHEUS_IMAGE",
}
"""By which ``compose.yaml``, which names official images by digest, is told of others."""
_NAMES = click.argument("wanted", nargs=-1, type=click.Choice(list(SHORT)), metavar="[NAME]...")


@click.group()
def images() -> None:
    """Container images of Kafka, ZooKeeper and the coordinator."""


@images.command()
@_NAMES
@click.option("--no-pull", is_flag=True, help="Ask no registry for what is missing.")
@click.option("--rebuild", is_flag=True, help="Build anew what was built here, even if nothing has changed.")
@click.pass_obj
def build(context: CliContext, wanted: Sequence[str], no_pull: bool, rebuild: bool) -> None:
    """Make sure that the images are there: kafka, zookeeper, coordinator and toolbox, or those that are named.

    What is present is used. Official images that are missing are pulled, by digest; where that is not possible,
    stand-ins of the same name and contract are built from pinned jars and from files of this machine. An image that was
    not built here is never replaced.
    """
    provided = provide(_names(wanted), pull=not no_pull, rebuild=rebuild, report=context.tell)
    others = [f"{VARIABLES[image.name]}={image.name}" for image in provided if _is_for_compose(image)]
    if others:
        context.tell(f"compose.yaml names the official images; for it to use these, set {' '.join(others)}")
    _answer(context, provided)


@images.command(name="list")
@_NAMES
@click.pass_obj
def list_images(context: CliContext, wanted: Sequence[str]) -> ExitCode:
    """Show which of the images are there, and which of them are official; exit code 3 if one is missing."""
    found = look(_names(wanted))
    present = [image for image in found.values() if image is not None]
    _answer(context, present, [name for name, image in found.items() if image is None])
    return ExitCode.OK if len(present) == len(found) else ExitCode.NOT_FOUND


def _is_for_compose(image: Provided) -> bool:
    return image.name in VARIABLES and not image.pinned


def _names(wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(SHORT[word] for word in wanted)) or names.IN_USE


def _answer(context: CliContext, present: Sequence[Provided], missing: Sequence[str] = ()) -> None:
    rows: list[tuple[str, ...]] = [
        (
            image.name,
            image.origin,
            _kind(image),
            f"{image.size_bytes / 1e6:.0f} MB",
            image.id.removeprefix("sha256:")[:12],
        )
        for image in present
    ]
    rows += [(name, "missing", "", "", "") for name in missing]
    context.answer(
        {"images": [asdict(image) for image in present], "missing": list(missing)},
        table(("IMAGE", "ORIGIN", "KIND", "SIZE", "ID"), rows, right=("SIZE",)),
    )


def _kind(image: Provided) -> str:
    if image.name not in names.OFFICIAL:
        return "rollbridge"
    if image.stand_in:
        return "stand-in"
    return "official" if image.pinned else "other"
