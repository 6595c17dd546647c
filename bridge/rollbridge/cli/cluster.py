"""Commands for the embedded cluster, and the one that runs a coordinator against any cluster."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click

from bridge.cli.context import CliContext
from bridge.cli.exit_codes import ExitCode
from bridge.config import CONFIG_VARIABLE
from bridge.embedded.cluster import Cluster
from bridge.embedded.plan import Wishes
from bridge.embedded.servers import COORDINATOR_PREFIX, KAFKA, ZOOKEEPER
from bridge.embedded.state import HOME_VARIABLE, Home
from bridge.embedded.status import ClusterStatus, embedded_status, existing_status
from bridge.errors import NotFoundError

_PORT = click.IntRange(1, 65535)


@click.command()
@click.option("--kafka-port", type=_PORT, help="Port for Kafka; a free one if left out.")
@click.option("--zookeeper-port", type=_PORT, help="Port for ZooKeeper; a free one if left out.")
@click.option("--kafka-heap", metavar="SIZE", help="Most memory for Kafka's heap, such as 512m.  [default: 1g]")
@click.option("--coordinators", type=click.IntRange(0, 16), help="How many coordinators.  [default: 1]")
@click.option("--no-coordinator", is_flag=True, help="Short for --coordinators 0.")
@click.option("--ephemeral", is_flag=True, help="Keep the data in a temporary directory that `down` removes.")
@click.pass_obj
def up(
    context: CliContext,
    kafka_port: int | None,
    zookeeper_port: int | None,
    kafka_heap: str | None,
    coordinators: int | None,
    no_coordinator: bool,
    ephemeral: bool,
) -> None:
    """Start Kafka, ZooKeeper and a coordinator on this machine, and wait until they answer.

    Other commands find them by themselves. What runs already is left alone, and what has died is started again, so it
    does no harm to repeat this. Ports, data and the number of coordinators are kept from one time to the next.
    """
    if no_coordinator and coordinators:
        raise click.UsageError("--no-coordinator and --coordinators exclude each other")
    began = time.monotonic()
    home = context.home
    if ephemeral and context.named_home is None:
        home = Home(Path(tempfile.mkdtemp(prefix="rollbridge-")))
    wishes = Wishes(
        kafka_port=kafka_port,
        zookeeper_port=zookeeper_port,
        kafka_heap=kafka_heap,
        coordinators=0 if no_coordinator else coordinators,
        ephemeral=True if ephemeral else None,
    )
    started = Cluster(home, report=context.tell).up(wishes)
    document = {
        "home": str(home.path),
        "bootstrap_servers": started.state.bootstrap_servers,
        "zookeeper": started.state.zookeeper,
        "ephemeral": started.state.ephemeral,
        "started": list(started.parts),
    }
    text = f"Kafka      {started.state.bootstrap_servers}\nZooKeeper  {started.state.zookeeper}\n"
    if started.parts:
        text += f"Up after {time.monotonic() - began:.1f} s."
    else:
        text += "Everything was running already."
    if home != context.home:
        text += f"\nFor other commands to find it: export {HOME_VARIABLE}={home.path}"
    context.answer(document, text)


@click.command()
@click.pass_obj
def down(context: CliContext) -> None:
    """Stop the embedded cluster, whatever state it is in.

    Data is kept for the next `rollbridge up`, unless it was started with --ephemeral.
    """
    stopped = Cluster(context.home, report=context.tell).down()
    context.answer(
        {"home": str(context.home.path), "stopped": list(stopped)},
        "Everything is stopped." if stopped else f"Nothing was running in {context.home.path}.",
    )


@click.command()
@click.argument("part", metavar=f"{KAFKA}|{ZOOKEEPER}|{COORDINATOR_PREFIX}N")
@click.pass_obj
def restart(context: CliContext, part: str) -> None:
    """Stop one part of the embedded cluster and start it again, on the same data and address."""
    status = embedded_status(context.home)
    if part not in (known := [each.part for each in status.parts]):
        raise NotFoundError(
            f"there is no {part} in {context.home.path}"
            + (f", only {', '.join(known)}" if known else "; `rollbridge up` starts a cluster")
        )
    cluster = Cluster(context.home, report=context.tell)
    cluster.stop_part(part)
    cluster.up(only=[part])
    context.answer({"restarted": part}, f"{part} answers again.")


@click.command()
@click.pass_obj
def status(context: CliContext) -> int:
    """Show what runs, and where; exit code 7 if not everything does.

    Looks at the embedded cluster unless another one is named.
    """
    found = _look(context)
    document = asdict(found) | {"ok": found.ok}
    context.answer(document, _status_text(found))
    return ExitCode.OK if found.ok else ExitCode.UNAVAILABLE


def _look(context: CliContext) -> ClusterStatus:
    named = (*context.flags.values(), context.config_file, os.environ.get(CONFIG_VARIABLE))
    named += tuple(os.environ.get(f"ROLLBRIDGE_{key}") for key in ("BOOTSTRAP_SERVERS", "ZOOKEEPER"))
    if any(named):
        settings = context.settings()
        return existing_status(
            settings.bootstrap_servers,
            settings.zookeeper,
            settings.zookeeper_root,
            kafka_security=settings.kafka,
            zookeeper_security=settings.zookeeper_security,
        )
    return embedded_status(context.home)


def _status_text(found: ClusterStatus) -> str:
    if not found.parts:
        return f"There is no cluster in {found.home}; `rollbridge up` starts one."
    lines = []
    for part in found.parts:
        columns = (f"{part.part:<14}", f"{part.state:<14}", f"{part.address or '':<22}")
        lines.append("".join(columns) + (f"process {part.pid}" if part.pid else ""))
    if found.home and not found.ok:
        lines.append(f"Logs are in {Path(found.home) / 'logs'}; `rollbridge up` starts what does not run.")
    return "\n".join(line.rstrip() for line in lines)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def coordinator(context: CliContext, arguments: tuple[str, ...]) -> int:
    """Run a coordinator in the foreground; it ends in good order on SIGTERM and Ctrl-C.

    Other arguments go to `python -m coordinator`.
    """
    # By name, as bridge may not import the coordinator: the daemon is built on the library, not the reverse.
    if not {"-h", "--help"} & set(arguments):
        settings = context.settings()
        arguments = (
            "--bootstrap-servers",
            settings.bootstrap_servers,
            "--zookeeper",
            settings.zookeeper,
            "--zookeeper-root",
            settings.zookeeper_root,
            *arguments,
        )
    if context.config_file is not None:
        # For what has no option of its own: security, which must not stand on a command line that others can see.
        os.environ[CONFIG_VARIABLE] = str(context.config_file)
    # By name: the coordinator is built on this package, not the other way round.
    entry = importlib.import_module("coordinator.__main__")
    try:
        entry.main(args=arguments, prog_name="rollbridge coordinator")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return ExitCode.OK
