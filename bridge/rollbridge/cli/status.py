"""Status of a cluster that is not run by rollbridge: its parts, and of groups and streams those with a fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import import_module

import click

from rollbridge.base.deadlines import answers_within
from rollbridge.base.text import printable
from rollbridge.cli.common import CliContext, ExitCode
from rollbridge.config import CONFIG_VARIABLE, ConnectionSettings
from rollbridge.doctor.gateway_facts import gateway_parts
from rollbridge.doctor.probes import RUNNING, ClusterStatus, PartStatus, kafka_cluster_id
from rollbridge.errors import ZooKeeperUnavailableError
from rollbridge.metadata.gateway_store import read_gateways
from rollbridge.metadata.gateways import is_gateway_label
from rollbridge.metadata.picture import ClusterPicture
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata, look_at_cluster

ANSWER_S = 5.0
"""Longest wait for ZooKeeper."""
NOT_ANSWERING = "not answering"


def cluster_status(settings: ConnectionSettings) -> ClusterStatus:
    """Return what of a cluster runs and answers, and what is wrong with what it serves."""
    cluster_id = kafka_cluster_id(settings.bootstrap_servers, security=settings.kafka)
    kafka = _part("kafka", RUNNING if cluster_id is not None else NOT_ANSWERING, settings.bootstrap_servers)
    known = list(zookeeper_parts(settings))
    return ClusterStatus(
        bootstrap_servers=settings.bootstrap_servers, zookeeper=settings.zookeeper, parts=(kafka, *known)
    )


def zookeeper_parts(settings: ConnectionSettings) -> Iterator[PartStatus]:
    """Yield ZooKeeper, and what it knows of: coordinators, gateways, and groups and streams with a fault."""
    session = ZooKeeperSession.of(settings)
    parts = [_part("zookeeper", NOT_ANSWERING, settings.zookeeper)]
    try:
        session.start(ANSWER_S)
        with answers_within(ANSWER_S):
            metadata = Metadata(session)
            found = _parts(look_at_cluster(metadata))
            parts = [_part("zookeeper", RUNNING, settings.zookeeper), *found, *_gateways(settings, metadata)]
    except ZooKeeperUnavailableError:
        pass
    finally:
        session.close()
    yield from parts


def _parts(picture: ClusterPicture) -> Iterator[PartStatus]:
    """Yield the coordinators, and groups and streams with a fault."""
    faults: dict[str, list[str]] = {}
    for fault in picture.faults():
        faults.setdefault(fault.label, []).append(fault.state)
    for name in picture.coordinators:
        yield _part(f"coordinator {name}", "; ".join(faults.pop(f"coordinator {name}", ())) or RUNNING)
    for label, states in faults.items():
        yield _part(label, "; ".join(states))


def _gateways(settings: ConnectionSettings, metadata: Metadata) -> Iterator[PartStatus]:
    gateways = list(read_gateways(metadata.session).values())
    yield from gateway_parts(gateways, settings.kafka)
    open_ones = (item for group in metadata.groups() for item in metadata.transactions(group))
    if not gateways and any(is_gateway_label(item.label) for item in open_ones):
        yield _part("gateway", "none is registered, and transactions that were begun through one are open")


def _part(name: str, state: str, address: str | None = None) -> PartStatus:
    return PartStatus(part=name, state=state, address=address)


# ``rollbridge status``: the parts of a cluster and whether they run.


_PART_COLUMNS = 14


@click.command()
@click.pass_obj
def status(context: CliContext) -> int:
    """Show what runs, and where; exit code 7 if not everything does, or a group or stream has a fault.

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
        return cluster_status(context.settings())
    # Imported by name: only this command needs the module that looks at processes.
    found: ClusterStatus = import_module("rollbridge_devcluster.command").look(context.home)
    if not any(part.part == "zookeeper" and part.state == RUNNING for part in found.parts):
        return found
    wrong = [part for part in zookeeper_parts(context.settings()) if part.state != RUNNING and " " in part.part]
    return replace(found, parts=(*found.parts, *wrong))  # what is not named there is known from its process


def _status_text(found: ClusterStatus) -> str:
    if not found.parts:
        return f"There is no cluster in {found.home}; `rollbridge up` starts one."
    lines = []
    width = max(_PART_COLUMNS, *(len(part.part) + 2 for part in found.parts))
    for part in found.parts:
        columns = (
            f"{printable(part.part):<{width}}",
            f"{printable(part.state):<14}",
            f"{printable(part.address or ''):<22}",
        )
        lines.append("".join(columns) + (f"process {part.pid}" if part.pid else ""))
        lines += [f"  {what:<14}{path}" for what, path in part.files.items()]
    if found.home and not found.ok:
        lines.append("`rollbridge up` starts what does not run.")
    return "\n".join(line.rstrip() for line in lines)
