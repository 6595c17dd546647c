"""``rollbridge doctor``, ``repair`` and ``snapshot``: check the cluster and rollbridge's own state, and mend it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import click

from rollbridge.base.deadlines import wall_ms
from rollbridge.base.text import printable
from rollbridge.buffer.snapshot_topic import BufferSnapshot, SnapshotReader
from rollbridge.cli import records as values
from rollbridge.cli.common import (
    CliContext,
    ExitCode,
    confirm,
    connected,
    counted,
    moment,
    table,
    zookeeper_session,
)
from rollbridge.client.admin import missing_scope
from rollbridge.client.connection import Bridge
from rollbridge.doctor.checks import find, fold
from rollbridge.doctor.facts import Severity, gather
from rollbridge.doctor.repair import (
    carry_out,
    gather_evidence,
    lost_groups,
    outdated_groups,
    read_group_nodes,
    read_journal,
    read_nodes,
    read_topics,
)
from rollbridge.errors import ConflictError, CorruptDataError, LocalEnvironmentError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata.journal import RepairStep, begin_log, plan
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.monitoring.runbook import DOCS, Alert, FindingNote, alerts_of, board, explained, plain_runbook, rules
from rollbridge.stream.names import GroupName, check_stream_or_topic, group_named


@click.command()
@click.option("--explain", metavar="NAME", help="Print the runbook of an alert or finding, and check nothing.")
@click.option(
    "--old",
    type=values.duration,
    default="12h",
    show_default=True,
    metavar="DURATION",
    help="Report transactions that have been open for so long.",
)
@click.pass_obj
def doctor(context: CliContext, explain: str | None, old: timedelta) -> ExitCode:
    """Check the cluster and rollbridge's own state, and print a remedy for each finding. Changes nothing.

    Exits with 0 if there are no findings, or only warnings, and with 9 if there is a problem. --explain needs no
    cluster: it prints what an alert means, where to look, what to do and what not to do.
    """
    if explain is not None:
        told = explained(explain)
        context.answer([_explanation(item) for item in told], "\n".join(map(plain_runbook, told)))
        return ExitCode.OK
    facts = gather(context.settings(), context.kafka())
    found = find(facts, old)
    document = {
        "looked_at": {
            "streams": len(facts.streams),
            "groups": len(facts.groups),
            "topics": len(facts.topics),
            "adopted_topics": len(facts.adopted),
            "gateways": len(facts.gateways),
            "open_zookeeper_nodes": len(facts.open_nodes),
        },
        "findings": [
            {
                **asdict(finding),
                "severity": finding.severity.name.lower(),
                "alerts": [alert.full_name for alert in alerts_of(finding.check)],
            }
            for finding in found
        ],
    }
    lines = [
        f"{finding.severity.name} {finding.check}: {printable(finding.what)}\n    to do: {printable(finding.remedy)}"
        + ("\n    more:  rollbridge doctor --explain " + finding.check if alerts_of(finding.check) else "")
        + (f"\n    and {counted(more, 'finding')} more of this kind, which --json lists" if more else "")
        for finding, more in fold(found)
    ]
    lines.append(
        f"{len(facts.brokers)} brokers, {len(facts.coordinators)} coordinators, {len(facts.groups)} groups, "
        f"{len(facts.streams)} streams and {len(facts.topics)} topics"
        + (f", {len(facts.adopted)} adopted topics" if facts.adopted else "")
        + (f", {counted(len(facts.gateways), 'gateway')}" if facts.gateways else "")
        + f": {len(found) or 'no'} findings"
    )
    if facts.open_nodes and not facts.is_guarded:
        lines.append("anyone who reaches ZooKeeper may change its nodes; docs/security.md says how to close them")
    context.answer(document, "\n".join(lines))
    return ExitCode.FINDINGS if any(finding.severity is Severity.PROBLEM for finding in found) else ExitCode.OK


def _explanation(alert: Alert | FindingNote) -> dict[str, Any]:
    """Return an alert with its runbook, or the note of a finding, as JSON."""
    if isinstance(alert, FindingNote):
        return {"finding": alert.check, "means": alert.means, "do": [alert.do]}
    return {
        "alert": alert.full_name,
        "severity": alert.severity,
        "expression": alert.expression,
        "for": alert.pending,
        "means": alert.means,
        "limits": alert.limits,
        "look": list(alert.look),
        "do": list(alert.do),
        "findings": [{"check": item.check, "case": item.case, "do": item.shown} for item in alert.findings],
        "do_not": alert.do_not,
    }


# ``rollbridge repair``


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.option("--force", is_flag=True, help="Repair even if no coordinator has found that ZooKeeper was set back.")
@click.option(
    "--commit-log",
    "group_name",
    metavar="SCOPE[/GROUP]",
    help="Restart the deleted commit log of this group; what is open in the group is lost.",
)
@click.pass_obj
def repair(context: CliContext, dry_run: bool, force: bool, group_name: str | None) -> ExitCode:
    """Repair ZooKeeper after it was restored from a backup. Run it with the coordinators' credentials.

    Counters are raised beyond all values given out since the backup, and lost state is written again, from the
    journals, commit logs and buffers in Kafka. Sessions of named clients end, and pending admin requests are dropped.
    The command may be run again after an interruption. See docs/backup-and-repair.md.

    With --commit-log it does nothing of this, but restarts a group whose commit log was deleted.
    """
    kafka = context.kafka()
    now_ms = wall_ms()
    with zookeeper_session(context) as session:
        if group_name is not None:
            return _begin_log(context, kafka, session, group_named(group_name), now_ms, dry_run)
        found = outdated_groups(session)
        if not found and not force:
            context.answer({"outdated": [], "steps": []}, "no coordinator has found that ZooKeeper was set back")
            return ExitCode.OK
        # All groups: they share the transaction counter, and a group without a leader has noticed nothing yet.
        topics = read_topics(kafka)
        names, nodes = Metadata(session).groups(), read_nodes(session)
        names += lost_groups(kafka, nodes, names, topics)
        steps = plan(nodes, gather_evidence(kafka, names, topics), now_ms)
        if not dry_run:
            carry_out(kafka, session, steps, context.tell)
    return _report(context, found, steps, dry_run)


def _begin_log(
    context: CliContext, kafka: KafkaClient, session: ZooKeeperSession, name: GroupName, now_ms: int, dry_run: bool
) -> ExitCode:
    topics = read_topics(kafka)
    journal = read_journal(kafka, name) if name.terminated_topic in topics else {}
    steps = begin_log(read_group_nodes(session, name), name, journal, topics, now_ms)
    if not dry_run:
        carry_out(kafka, session, steps, context.tell)
    return _report(context, [], steps, dry_run)


def _report(context: CliContext, found: Sequence[GroupName], steps: Sequence[RepairStep], dry_run: bool) -> ExitCode:
    document = {"outdated": [str(name) for name in found], "done": not dry_run, "steps": [item.what for item in steps]}
    head = "this would be done:" if dry_run else f"done, in {len(steps)} steps; coordinators lead again by themselves"
    context.answer(document, "\n".join([head, *(f"  {item.what}" for item in steps)] if dry_run else [head]))
    return ExitCode.OK


# ``rollbridge snapshot``


_STREAM = click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")


@click.group()
def snapshot() -> None:
    """List, describe, verify, rebuild and clear snapshots of transaction buffers.

    A snapshot lists the aborted transactions, and the offset from which a new leader must read a buffer.
    """


@snapshot.command("list")
@click.option("--scope", help="Show only streams of this scope.")
@click.pass_obj
def list_snapshots(context: CliContext, scope: str | None) -> None:
    """List the snapshots of all buffers, one line per partition."""
    with connected(context) as b:
        streams = b.admin.list_streams(scope)
        if scope is not None and not streams:
            _check_scope(b, scope)
    kafka = context.kafka()
    readers = {name: SnapshotReader(kafka, name) for name in {item.name.scope for item in streams}}
    found = [item for stream in streams for item in readers[stream.name.scope].of(stream)]
    rows = [
        (
            str(item.stream.name),
            str(item.partition[1]),
            item.format,
            str(item.aborted),
            str(len(item.snapshot.indexes) if item.snapshot else 0),
            str(item.tail),
            moment(item.snapshot.taken_ms) if item.snapshot else "-",
            "; ".join(item.faults) or "-",
        )
        for item in found
    ]
    heading = ("STREAM", "PARTITION", "FORMAT", "ABORTED", "SEGMENTS", "TAIL", "TAKEN", "FAULTS")
    text = table(heading, rows, right=("PARTITION", "ABORTED", "SEGMENTS", "TAIL")) if rows else "There are no streams."
    context.answer([_document(item) for item in found], text)


def _check_scope(b: Bridge, scope: str) -> None:
    known = {item.name.scope for item in b.admin.groups()} | {name.scope for name in b.admin.unreadable_groups()}
    if scope not in known:
        raise missing_scope(scope)


@snapshot.command()
@_STREAM
@click.pass_obj
def describe(context: CliContext, stream_name: str) -> None:
    """Show the snapshots of one stream, with their sealed segments."""
    _, found = _of(context, stream_name)
    context.answer([_document(item) for item in found], "\n\n".join(_text(item) for item in found))


@snapshot.command()
@_STREAM
@click.pass_obj
def verify(context: CliContext, stream_name: str) -> None:
    """Compare the snapshots of one stream with its buffer and the commit log, all read to their ends."""
    reader, found = _of(context, stream_name)
    results = [reader.verify(item) for item in found]
    documents = [
        {
            "topic": item.partition[0],
            "partition": item.partition[1],
            "aborted": item.aborted,
            "checked": item.checked,
            "faults": item.faults,
        }
        for item in results
    ]
    lines = [
        f"Partition {item.partition[1]}: {counted(item.aborted, 'aborted transaction')} listed, "
        f"{counted(item.checked, 'transaction')} looked up: {'; '.join(item.faults) or 'as it should be'}."
        for item in results
    ]
    context.answer(documents, "\n".join(lines))
    faults = sum(len(item.faults) for item in results)
    if faults:
        raise CorruptDataError(
            f"the snapshots of {stream_name} have {counted(faults, 'fault')}; nothing was changed: "
            "'rollbridge snapshot rebuild' replaces them"
        )


@snapshot.command()
@_STREAM
@click.pass_obj
def rebuild(context: CliContext, stream_name: str) -> None:
    """Rebuild the snapshots of one stream from its buffer and the commit log, and wait until that is done."""
    with connected(context) as b:
        b.admin.rebuild_snapshots(stream_name)
    context.answer({"stream": stream_name, "rebuilt": True}, f"Rebuilt the snapshots of {stream_name}.")


@snapshot.command()
@_STREAM
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def clear(context: CliContext, stream_name: str, yes: bool) -> None:
    """Delete the snapshots of one stream. Nothing is lost: the leader reads the buffer again."""
    check_stream_or_topic(stream_name)
    confirm(context, f"Clear the snapshots of {stream_name}?", yes, "all snapshots")
    with connected(context) as b:
        b.admin.clear_snapshots(stream_name)
    context.answer({"stream": stream_name, "cleared": True}, f"Cleared the snapshots of {stream_name}.")


def _of(context: CliContext, stream_name: str) -> tuple[SnapshotReader, list[BufferSnapshot]]:
    check_stream_or_topic(stream_name)
    with connected(context) as b:
        config = b.admin.describe(stream_name).config
    reader = SnapshotReader(context.kafka(), config.name.scope)
    return reader, list(reader.of(config))


def _document(item: BufferSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON."""
    topic, partition = item.partition
    document: dict[str, Any] = {
        "stream": str(item.stream.name),
        "topic": topic,
        "partition": partition,
        "format": item.format,
        "aborted": item.aborted,
        "tail": item.tail,
        "faults": list(item.faults),
    }
    known = item.snapshot
    if known is not None:
        document |= {
            "generation": known.generation,
            "controller_epoch": known.controller_epoch,
            "taken_ms": known.taken_ms,
            "position": known.position,
            "max_read_position": known.max_read_position,
            "commit_log_position": known.commit_log_position,
            "unsealed": len(known.aborts),
            "index_bytes": item.index_bytes,
            "ongoing": len(item.ongoing.transactions) if item.ongoing else 0,
            "replay_position": item.ongoing.replay_position if item.ongoing else known.max_read_position,
            "segments": [{name: getattr(index, name) for name in index.__slots__} for index in known.indexes],
        }
    return document


def _text(item: BufferSnapshot) -> str:
    lines: Iterable[str]
    known = item.snapshot
    about = [
        ("partition", f"{item.partition[0]}-{item.partition[1]}"),
        ("format", item.format),
        ("aborted", str(item.aborted)),
        ("tail", counted(item.tail, "message")),
    ]
    if known is not None:
        about += [
            (
                "taken",
                f"{moment(known.taken_ms)}, generation {known.generation}, controller epoch {known.controller_epoch}",
            ),
            (
                "positions",
                f"folded {known.position}, max read {known.max_read_position}, commit log {known.commit_log_position}",
            ),
            ("unsealed", f"{len(known.aborts)}, {item.index_bytes} bytes with the index"),
        ]
    if item.ongoing is not None:
        transactions, replay = len(item.ongoing.transactions), item.ongoing.replay_position
        about.append(("ongoing", f"{counted(transactions, 'transaction')} written down, read again from {replay}"))
    lines = [f"{name:<11}{value}" for name, value in [*about, *(("fault", text) for text in item.faults)]]
    if known is not None and known.indexes:
        rows = [
            (
                str(index.sequence_id),
                str(index.aborts),
                str(index.first_position),
                str(index.max_read_position),
                str(index.persistent_position),
            )
            for index in known.indexes
        ]
        heading = ("SEGMENT", "ABORTED", "FROM", "TO", "OFFSET")
        lines = [*lines, "", table(heading, rows, right=heading)]
    return "\n".join(lines)


# ``rollbridge monitoring``: alert rules, and a board


RULES_FILE: Final = "rollbridge-rules.yaml"
BOARD_FILE: Final = "rollbridge-board.json"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--docs", default=DOCS, show_default=True, help="Address of the runbook to which alerts link.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there with other content.")
@click.pass_obj
def monitoring(context: CliContext, directory: Path, docs: str, overwrite: bool) -> None:
    """Write alert rules for Prometheus and a board for Grafana into a directory. Needs no cluster.

    Files that have been changed by hand are not replaced without --overwrite, and then nothing is written.
    """
    texts = {directory / RULES_FILE: rules(docs), directory / BOARD_FILE: board()}
    try:
        others = [path for path, text in texts.items() if path.exists() and path.read_text(encoding="utf-8") != text]
        if others and not overwrite:
            raise ConflictError(
                f"{', '.join(map(str, others))}: there, with other content; nothing was written; "
                "--overwrite replaces it"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            draft = path.with_name(f".{path.name}.draft")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    except OSError as exc:
        raise LocalEnvironmentError(f"{directory} cannot be written to: {exc}") from exc
    context.answer({"written": [str(path) for path in texts]}, "\n".join(f"Wrote {path}." for path in texts))
