"""``rollbridge up``, ``down`` and ``restart``: the cluster of processes on this machine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from rollbridge.cli.common import CliContext
from rollbridge.config import HOME_VARIABLE
from rollbridge.doctor.probes import ClusterStatus
from rollbridge.errors import NotFoundError
from rollbridge_devcluster.cluster import DevCluster
from rollbridge_devcluster.state import COORDINATOR_PREFIX, GATEWAY, KAFKA, ZOOKEEPER, Home, Wishes

_PORT = click.IntRange(1, 65535)


@click.command()
@click.option("--kafka-port", type=_PORT, help="Port for Kafka; a free one if left out.")
@click.option("--zookeeper-port", type=_PORT, help="Port for ZooKeeper; a free one if left out.")
@click.option("--kafka-heap", metavar="SIZE", help="Maximum heap size of Kafka, such as 512m.  [default: 1g]")
@click.option("--coordinators", type=click.IntRange(0, 16), help="Number of coordinators.  [default: 1]")
@click.option("--no-coordinator", is_flag=True, help="Short for --coordinators 0.")
@click.option("--gateway/--no-gateway", default=None, help="Whether there is a gateway, too.  [default: no]")
@click.option("--gateway-port", type=click.IntRange(1, 65534), help="Port for the gateway; it takes the next one, too.")
@click.option("--ephemeral", is_flag=True, help="Keep the data in a temporary directory that `down` removes.")
@click.pass_obj
def up(
    context: CliContext,
    kafka_port: int | None,
    zookeeper_port: int | None,
    kafka_heap: str | None,
    coordinators: int | None,
    no_coordinator: bool,
    gateway: bool | None,
    gateway_port: int | None,
    ephemeral: bool,
) -> None:
    """Start Kafka, ZooKeeper and a coordinator on this machine, and wait until they answer.

    Other commands find them without options. Running parts are kept, and dead ones are started again, so it is safe to
    repeat. Ports, data, the number of coordinators and the gateway are kept from one start to the next; --no-gateway
    stops the gateway, and a lower number of coordinators the last of them.
    """
    if no_coordinator and coordinators:
        raise click.UsageError("--no-coordinator and --coordinators exclude each other")
    if gateway_port is not None:
        if gateway is False:
            raise click.UsageError("--no-gateway and --gateway-port exclude each other")
        gateway = True
    began = time.monotonic()
    home = usual = Home(context.home)
    if ephemeral and context.named_home is None:
        home = Home(Path(tempfile.mkdtemp(prefix="rollbridge-")))
    wishes = Wishes(
        kafka_port=kafka_port,
        zookeeper_port=zookeeper_port,
        kafka_heap=kafka_heap,
        gateway_port=gateway_port,
        coordinators=0 if no_coordinator else coordinators,
        has_gateway=gateway,
        ephemeral=True if ephemeral else None,
    )
    started = DevCluster(home, report=context.tell).up(wishes)
    address = started.state.gateway if started.state.has_gateway else None
    document = {
        "home": str(home.path),
        "bootstrap_servers": started.state.bootstrap_servers,
        "zookeeper": started.state.zookeeper,
        "gateway": address,
        "ephemeral": started.state.ephemeral,
        "started": list(started.parts),
    }
    text = f"Kafka      {started.state.bootstrap_servers}\nZooKeeper  {started.state.zookeeper}\n"
    if address is not None:
        text += f"Gateway    {address}\n"
    if started.parts:
        text += f"Up after {time.monotonic() - began:.1f} s."
    else:
        text += "Everything was running already."
    if home != usual:
        text += f"\nFor other commands to find it: export {HOME_VARIABLE}={home.path}"
    context.answer(document, text)


def look(home: Path) -> ClusterStatus:
    """Return what of the cluster in a directory runs and answers, for ``rollbridge status``."""
    return DevCluster(Home(home)).status()


@click.command()
@click.pass_obj
def down(context: CliContext) -> None:
    """Stop the embedded cluster, in any state.

    Data is kept for the next `rollbridge up`, unless it was started with --ephemeral.
    """
    stopped = DevCluster(Home(context.home), report=context.tell).down()
    context.answer(
        {"home": str(context.home), "stopped": list(stopped)},
        "Everything is stopped." if stopped else f"Nothing was running in {context.home}.",
    )


@click.command()
@click.argument("part", metavar=f"{KAFKA}|{ZOOKEEPER}|{COORDINATOR_PREFIX}N|{GATEWAY}")
@click.pass_obj
def restart(context: CliContext, part: str) -> None:
    """Stop one part of the embedded cluster and start it again, on the same data and address."""
    cluster = DevCluster(Home(context.home), report=context.tell)
    if part not in (known := [each.part for each in cluster.status().parts]):
        raise NotFoundError(
            f"there is no {part} in {context.home}"
            + (f", only {', '.join(known)}" if known else "; `rollbridge up` starts a cluster")
        )
    cluster.node(part).stop()
    cluster.up(only=[part])
    context.answer({"restarted": part}, f"{part} answers again.")
