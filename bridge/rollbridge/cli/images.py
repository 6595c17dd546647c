"""``rollbridge images``: the container images that tests and ``compose.yaml`` use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import click

from rollbridge.cli.context import CliContext
from rollbridge.cli.exit_codes import ExitCode
from rollbridge.cli.tables import table
from rollbridge.images import names
from rollbridge.images.provide import Provided, look, provide

SHORT: Final = {
    "kafka": names.KAFKA,
    "zookeeper": names.ZOOKEEPER,
    "coordinator": names.COORDINATOR,
    "toolbox": names.TOOLBOX,
    "python": names.PYTHON,
}
"""What may be asked for by name; without any, all that tests and ``compose.yaml`` use."""
VARIABLES: Final = {names.KAFKA: "KAFKA_IMAGE", names.ZOOKEEPER: "ZOOKEEPER_IMAGE"}
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
