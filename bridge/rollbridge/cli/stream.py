"""``rollbridge stream``: create, list, describe, change, scale, truncate and delete streams, and show their history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from rollbridge.base.ids import SegmentId
from rollbridge.cli.common import CliContext, confirm, connected, counted, moment, table
from rollbridge.cli.records import duration, key_range, segment_numbers, size
from rollbridge.cli.txn import STORY_S, transaction_document, transaction_table
from rollbridge.client.admin import StreamDescription
from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.picture import StreamPicture, shown_state, stream_state
from rollbridge.metadata.requests import WaitRow
from rollbridge.stream.config import FOREVER, HeaderForm, RecordTimes, Retention, StreamConfig
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange, Partitioner, cut_evenly, wrong_ranges
from rollbridge.stream.names import DEFAULT_GROUP, SegmentPlaces, StreamName, check_stream_or_topic
from rollbridge.stream.picture import lineage_svg
from rollbridge.stream.positions import parse_start
from rollbridge.stream.scaling import ScalingPolicy
from rollbridge.stream.segment_graph import Segment

# Retention on the command line, of streams and of commit logs: its options, and how it is told.


NONE: Final = "none"


def _time_or_none(text: str) -> timedelta | None:
    return None if text == NONE else duration(text)


def _size_or_none(text: str) -> int | None:
    return None if text == NONE else size(text)


RETENTION_TIME = click.option(
    "--retention-time", type=_time_or_none, default=None, metavar="TIME", help="Keep records this long, such as 7d."
)
RETENTION_BYTES = click.option(
    "--retention-bytes", type=_size_or_none, default=None, metavar="SIZE", help="Keep this many bytes, such as 10GiB."
)
RETENTION_GROUP = click.option(
    "--retention-group",
    "retention_groups",
    multiple=True,
    metavar="GROUP",
    help="Delete nothing that this consumer group has not read.",
)


def retention_text(retention: Retention) -> str:
    """Describe a retention in a few words."""
    limits = []
    if retention.ms != FOREVER:
        limits.append(f"records for {str(timedelta(milliseconds=retention.ms)).removesuffix(', 0:00:00')}")
    if retention.bytes != FOREVER:
        limits.append(f"{retention.bytes:,} bytes")
    text = " or ".join(limits) if limits else "all records"
    if retention.groups:
        text += f"; waits for {counted(len(retention.groups), 'group')}: {', '.join(retention.groups)}"
    return text


def retention_document(retention: Retention) -> dict[str, Any]:
    """Return a retention as JSON."""
    return {
        "time_ms": None if retention.ms == FOREVER else retention.ms,
        "bytes": None if retention.bytes == FOREVER else retention.bytes,
        "groups": list(retention.groups),
    }


def given_options(context: click.Context) -> dict[str, Any]:
    """Return those of the command's options that were given, by their names; ``none`` for consumer groups is none."""
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    return {**given, "retention_groups": ()} if given.get("retention_groups") == (NONE,) else given


# Scaling by load on the command line: its options, and how a policy and a wait are told.


F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option(
        "--scale-events-per-second",
        type=int,
        metavar="N",
        help="Split segments that take more records each second, and merge those that take few.",
    ),
    click.option("--scale-bytes-per-second", type=int, metavar="N", help="The same by bytes, as stored on disk."),
    click.option("--min-segments", type=int, metavar="N", help="Fewest segments when scaled by load.  [default: 1]"),
    click.option("--max-segments", type=int, metavar="N", help="Most segments when scaled by load.  [default: 32]"),
)
NO_SCALING: Final = click.option("--no-scaling", is_flag=True, help="Scale by request only.")


POLICY_OPTIONS: Final = ("scale_events_per_second", "scale_bytes_per_second", "min_segments", "max_segments")


def scaling_options(command: F) -> F:
    """Give a command the options of a scaling policy, for :func:`take_policy`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_policy(given: dict[str, Any], known: ScalingPolicy | None = None) -> ScalingPolicy | None:
    """Take the options of a policy out of those given, and return it, None without any of them.

    What makes no sense is refused by who takes it; ``known`` is the policy so far, of which the rest is taken. Records
    and bytes per second replace each other.
    """
    events, size, least, most = (given.pop(name, None) for name in POLICY_OPTIONS)
    if events is None and size is None and least is None and most is None:
        return None
    policy = known or ScalingPolicy()
    if events is not None or size is not None:
        policy = replace(policy, events_per_second=events or 0, bytes_per_second=size or 0)
    if policy.is_fixed and events is None and size is None:
        raise click.UsageError("--min-segments and --max-segments go with a rate, which the stream has not got yet")
    return replace(
        policy,
        min_segments=policy.min_segments if least is None else least,
        max_segments=policy.max_segments if most is None else most,
    )


def scaling_text(policy: ScalingPolicy | None) -> str:
    """Describe a policy in a few words."""
    return str(policy or ScalingPolicy())


def scaling_document(policy: ScalingPolicy | None) -> dict[str, Any] | None:
    """Return a policy as JSON."""
    if policy is None:
        return None
    return {
        "events_per_second": policy.events_per_second or None,
        "bytes_per_second": policy.bytes_per_second or None,
        "min_segments": policy.min_segments,
        "max_segments": policy.max_segments,
    }


_STREAM = click.argument("stream_name", metavar="SCOPE/STREAM|TOPIC")
_GROUP = click.option(
    "--group",
    help=f"Transaction group within the scope, in which the stream stays.  [default: {DEFAULT_GROUP}]",
)
_BUFFER_PARTITIONS = click.option(
    "--buffer-partitions",
    type=click.IntRange(1),
    metavar="N",
    help="Partitions of the transaction buffer.  [default: 1]",
)


_HEADERS = click.option(
    "--headers",
    type=click.Choice([form.value for form in HeaderForm]),
    help="Records of its transactions that name their writer: the first of each batch, or each.  "
    f"[default: {HeaderForm.FIRST.value}]",
)


_TIMESTAMPS = click.option(
    "--timestamps",
    type=click.Choice([times.value for times in RecordTimes]),
    help="Timestamps of its transactions' records, from which Kafka's retention counts: their writer's, or "
    f"that of the commit.  [default: {RecordTimes.WRITER.value}]",
)


@click.group()
def stream() -> None:
    """Create, list, describe, change, scale, truncate and delete streams."""


@stream.command()
@click.argument("stream_name", metavar="SCOPE/STREAM")
@click.option("--segments", type=int, metavar="N", help="Number of segments of the same size.  [default: 1]")
@click.option("--range", "ranges", type=key_range, multiple=True, metavar="LOW:HIGH", help="Key range of one segment.")
@_GROUP
@_BUFFER_PARTITIONS
@click.option(
    "--replication-factor",
    type=int,
    metavar="N",
    help="Replication factor of its topics.  [default: the broker's]",
)
@click.option(
    "--record-bytes-max",
    type=click.IntRange(0),
    metavar="N",
    help="Maximum size of a record in bytes.  [default: 1000000]",
)
@_HEADERS
@_TIMESTAMPS
@RETENTION_TIME
@RETENTION_BYTES
@RETENTION_GROUP
@scaling_options
@click.option("--if-not-exists", is_flag=True, help="Leave a stream that exists with these settings as it is.")
@click.pass_obj
def create(context: CliContext, /, stream_name: str, *, if_not_exists: bool, **given: Any) -> None:
    """Create a stream, with --segments of equal size or with each --range given.

    With --scale-events-per-second or --scale-bytes-per-second it follows its load by itself.

    With --if-not-exists an existing stream is left and shown as it is, if it has the settings that are given; otherwise
    the error names each difference. Segments are compared with those that it began with.
    """
    if given["segments"] is not None and given["ranges"]:
        raise click.UsageError("--segments and --range exclude each other")
    given["ranges"] = given["ranges"] or None
    policy = take_policy(given)
    with connected(context) as b:
        b.admin.create_stream(stream_name, **given, scaling=policy, exist_ok=if_not_exists)
        found, places = b.admin.history(stream_name), b.admin.places(stream_name)
    active, numbers = found.active, found.graph.partitions
    size = counted(len(active.segments), "segment")
    text = f"{stream_name} exists, with {size}." if if_not_exists else f"Created {stream_name} with {size}."
    context.answer(
        {"stream": stream_name, **_epoch_document(places, active, numbers)},
        f"{text}\n{_segment_table(active, numbers)}",
    )


@stream.command()
@click.argument("topic", metavar="TOPIC")
@click.option("--stream", "stream_name", metavar="SCOPE/STREAM", help="Name of the stream.  [default: topics/TOPIC]")
@click.option(
    "--partitioner",
    metavar="NAME",
    help="Rule of the topic's producers: murmur2 (Java), consistent (librdkafka) or fnv1a (Sarama).  [default: the one "
    "that explains where the newest keys are]",
)
@click.option("--unchecked", is_flag=True, help="Take the partitioner although keys are elsewhere.")
@_GROUP
@_BUFFER_PARTITIONS
@click.option(
    "--replication-factor",
    type=int,
    metavar="N",
    help="Replication factor of the buffer.  [default: the broker's]",
)
@_HEADERS
@_TIMESTAMPS
@click.option(
    "--if-not-exists", is_flag=True, help="Leave a topic that the stream has adopted with these settings as it is."
)
@click.pass_obj
def adopt(
    context: CliContext, /, topic: str, *, stream_name: str | None, unchecked: bool, if_not_exists: bool, **given: Any
) -> None:
    """Make a stream of a topic that exists, with its records. Nothing of the topic is changed.

    Its producers and consumers continue as before. `rollbridge stream release` makes it a plain topic again.
    """
    if unchecked and given["partitioner"] is None:
        raise click.UsageError("--unchecked needs --partitioner")
    with connected(context) as b:
        found = b.admin.adopt_topic(topic, stream=stream_name, check=not unchecked, exist_ok=if_not_exists, **given)
    config = found.config
    text = f"Stream {config.name} is topic {topic} with its {counted(config.partitions, 'partition')}."
    if found.fit is None:
        why = ""
    elif found.fit.keys:
        why = (
            f", as {found.fit}"
            if found.fit.matches[Partitioner(config.partitioner)] < found.fit.keys
            else (f", where all of {counted(found.fit.keys, 'key')} in a sample are")
        )
    else:
        why = ", Java's; the topic has no keys yet" if given["partitioner"] is None else "; the topic has no keys yet"
    context.answer(_config_document(config), f"{text}\nKeys go where {config.partitioner} puts them{why}.")


@stream.command()
@click.argument("topic", metavar="TOPIC")
@click.option("--if-exists", is_flag=True, help="Do nothing if no stream has adopted it.")
@click.pass_obj
def release(context: CliContext, topic: str, if_exists: bool) -> None:
    """Make an adopted topic a plain one again. It keeps its records; its stream is gone then."""
    with connected(context) as b:
        released = b.admin.release_topic(topic, missing_ok=if_exists)
    text = f"Topic {topic} is a plain topic." if released else f"No stream has adopted {topic}; nothing was done."
    context.answer({"topic": topic, "released": released}, text)


@stream.command("list")
@click.option("--scope", help="Show only streams of this scope.")
@click.pass_obj
def list_streams(context: CliContext, scope: str | None) -> None:
    """List streams."""
    with connected(context) as b:
        found, unreadable = b.admin.look_at_streams(scope)
    for name, why in unreadable.items():
        context.tell(f"stream {name} is left out, its settings cannot be read: {why}")
    context.answer([_config_document(item.config, item.error) for item in found], stream_table(found))


def stream_table(streams: Sequence[StreamPicture]) -> str:
    """Return a table of streams, with the topics that they have adopted, if any."""
    if not streams:
        return "There are no streams."
    rows = [
        (
            str(item.config.name),
            item.config.group.group,
            moment(item.config.created_ms),
            shown_state(item.config, item.error),
            item.config.topic or "-",
        )
        for item in streams
    ]
    head = ("STREAM", "GROUP", "CREATED", "STATE", "ADOPTED TOPIC")
    columns = len(head) if any(item.config.topic for item in streams) else -1
    return table(head[:columns], [row[:columns] for row in rows])


@stream.command()
@_STREAM
@click.pass_obj
def describe(context: CliContext, stream_name: str) -> None:
    """Show the current state of a stream: its segments, its open transactions, and what it waits for."""
    waits, why = tuple[WaitRow, ...](), "no coordinator leads its group"
    with connected(context) as b:
        found = b.admin.describe(stream_name)
        if found.leader is not None:
            try:
                waits, why = b.admin.waits(stream_name, timeout_s=STORY_S), ""
            except RollbridgeError as fault:
                why = str(fault)
    document = {
        **_description_document(found),
        "waits": [row.document() for row in waits],
        "waits_unknown": why or None,
    }
    context.answer(document, description_text(found, waits, why))


@stream.command()
@_STREAM
@click.option(
    "--seal", type=segment_numbers, required=True, metavar="N,...", help="Numbers of the segments to replace."
)
@click.option(
    "--range", "ranges", type=key_range, multiple=True, metavar="LOW:HIGH", help="Key range of a new segment."
)
@click.option("--into", type=click.IntRange(1), metavar="COUNT", help="Split the sealed ranges into COUNT even ones.")
@click.option(
    "--abort-foreign", is_flag=True, help="Abort native transactions of others that are open on the segments to seal."
)
@click.option(
    "--leave-topic",
    is_flag=True,
    help="Seal the whole adopted topic, and continue in topics of the stream's own.",
)
@click.pass_obj
def scale(
    context: CliContext,
    stream_name: str,
    seal: tuple[int, ...],
    ranges: tuple[tuple[float, float], ...],
    into: int | None,
    abort_foreign: bool,
    leave_topic: bool,
) -> None:
    """Replace active segments by new ones; open transactions continue undisturbed.

    The new ranges, given by --range or made by --into, must cover exactly the ranges of the sealed segments.

    The command waits a while for native transactions that other Kafka clients have open on the segments, and names
    those that do not end. --abort-foreign aborts them: the coordinator needs Write on their transactional ids, and
    ClusterAction on the cluster for hanging ones.
    """
    if bool(ranges) == (into is not None):
        raise click.UsageError("give either --range, once for each new segment, or --into")
    with connected(context) as b:
        wanted = [KeyRange(low, high) for low, high in ranges]
        if into is not None:
            wanted = divide(b.admin.history(stream_name).active, seal, into)
        record = b.admin.scale(
            stream_name, seal=seal, ranges=wanted, abort_foreign=abort_foreign, leave_topic=leave_topic
        )
        numbers, places = b.admin.history(stream_name).graph.partitions, b.admin.places(stream_name)
    context.answer(
        {"stream": stream_name, **_epoch_document(places, record, numbers)},
        f"Epoch {record.epoch} of {stream_name}:\n{_segment_table(record, numbers)}",
    )


@stream.command()
@_STREAM
@RETENTION_TIME
@RETENTION_BYTES
@RETENTION_GROUP
@click.option(
    "--headers",
    type=click.Choice([form.value for form in HeaderForm]),
    help="Records of later transactions that name their writer: the first of each batch, or each.",
)
@click.option(
    "--timestamps",
    type=click.Choice([times.value for times in RecordTimes]),
    help="Timestamps of the records of transactions that are committed later: their writer's, or the commit's.",
)
@scaling_options
@NO_SCALING
@click.pass_context
def update(click_context: click.Context, /, stream_name: str, no_scaling: bool, **_: Any) -> None:
    """Change retention, headers, times or scaling by load of a stream.

    Options left out stay as they are; none removes a limit. Both limits are minimums: records beyond either of them
    are deleted. Give --retention-group once for each group, or with none.
    """
    given = given_options(click_context)
    del given["stream_name"]
    given.pop("no_scaling", None)
    is_scaled = not given.keys().isdisjoint(POLICY_OPTIONS)
    if is_scaled and no_scaling:
        raise click.UsageError("--no-scaling and the options of a scaling policy exclude each other")
    if not given and not no_scaling:
        raise click.UsageError(
            "say what to change: --retention-time, --retention-bytes, --retention-group, --headers, "
            "--timestamps, --scale-events-per-second, --scale-bytes-per-second, --min-segments, --max-segments or "
            "--no-scaling"
        )
    context: CliContext = click_context.obj
    with connected(context) as b:
        if is_scaled or no_scaling:
            given["scaling"] = None if no_scaling else take_policy(given, b.admin.describe(stream_name).config.scaling)
        config = b.admin.update_stream(stream_name, **given)
    context.answer(
        _config_document(config),
        f"{stream_name}: {retention_text(config.retention)}; a header on {_HEADERS_OF[config.headers]}; "
        f"times of the {config.timestamps.value}; "
        f"scaled {scaling_text(config.scaling)}.",
    )


@stream.command()
@_STREAM
@click.option(
    "--before",
    required=True,
    metavar="POSITION|TIME",
    help="A reader's position, DLSN, SN or time; latest deletes all that can be read.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def truncate(context: CliContext, stream_name: str, before: str, yes: bool) -> None:
    """Delete the records before a position or time: the oldest ones of every key.

    Times are compared with the timestamps of records. Segments of which nothing is left are removed.
    """
    if "/" in check_stream_or_topic(stream_name):
        parse_start(StreamName.parse(stream_name), before)
    confirm(context, f"Delete the records of {stream_name} before {before}?", yes, "records")
    with connected(context) as b:
        begin = b.admin.truncate(stream_name, before)
    context.answer({"stream": stream_name, "begins": str(begin)}, f"{stream_name} begins at {begin} now.")


@stream.command()
@_STREAM
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--if-exists", is_flag=True, help="Do nothing if it does not exist.")
@click.pass_obj
def delete(context: CliContext, stream_name: str, yes: bool, if_exists: bool) -> None:
    """Delete a stream with all its topics and records."""
    check_stream_or_topic(stream_name)
    confirm(context, f"Delete {stream_name} with all its records?", yes, "all records")
    with connected(context) as b:
        deleted = b.admin.delete_stream(stream_name, missing_ok=if_exists)
    text = f"Deleted {stream_name}." if deleted else f"There was no stream {stream_name}; nothing was done."
    context.answer({"stream": stream_name, "deleted": deleted}, text)


@stream.command()
@_STREAM
@click.option("--svg", metavar="FILE", help="Draw the lineage of the segments into this file; - is standard output.")
@click.pass_obj
def history(context: CliContext, stream_name: str, svg: str | None) -> None:
    """Show the epochs of a stream: their causes and references, and the segments that began and ended with each.

    The oldest epochs are dropped once nothing of them is left; the first one shown lists all its segments.
    """
    if svg == "-" and context.json:
        raise click.UsageError("--svg - and --json both write to standard output")
    with connected(context) as b:
        found, places = b.admin.history(stream_name), b.admin.places(stream_name)
    if svg is not None:
        picture = lineage_svg(found, stream_name)
        if svg == "-":
            click.echo(picture, nl=False)
            return
        try:
            Path(svg).write_text(picture, encoding="utf-8")
        except OSError as exc:
            raise LocalEnvironmentError(f"cannot write the picture to {svg}: {exc.strerror}") from exc
    document: dict[str, Any] = {
        "stream": stream_name,
        "first_epoch": found.first,
        "epochs": [_epoch_document(places, record, found.graph.partitions) for record in found.records],
        "removed": [str(segment) for segment in sorted(found.removed)],
    }
    text = history_table(found)
    if svg is not None:
        document["svg"] = svg
        text += f"\nThe picture is in {svg}."
    context.answer(document, text)


def divide(active: EpochRecord, seal: tuple[int, ...], count: int) -> list[KeyRange]:
    """Return even ranges that cover exactly the ranges of the named segments, which must be adjacent.

    Raises:
        InvalidRequestError: A number is not active, there is a gap between the segments, or they are too narrow.
    """
    sealed = sorted(item.range for item in active.segments if item.id.number in seal)
    if len(sealed) < len(set(seal)):
        numbers = ", ".join(str(item.id.number) for item in active.segments)
        raise wrong_ranges(f"not all of {seal} are active segments; active are {numbers}; nothing was written")
    return cut_evenly(sealed, count)


def history_table(found: EpochHistory) -> str:
    """Return a table with one row per epoch and a line for each segment that began or ended with it.

    The reasons of scales by load follow below it, if there are any.
    """
    rows: list[tuple[str, ...]] = []
    for record in found.records:
        own = record.reference_epoch == record.epoch
        about = (
            str(record.epoch),
            "itself" if own else str(record.reference_epoch),
            f"{record.cause.value}, by load" if record.reason else record.cause.value,
            moment(record.created_ms),
        )
        began = [f"{item.id} {item.range}" for item in found.began_with(record.epoch)]
        ended = [
            f"{item.id} {_end(record, item)}{', removed' if item.id in found.removed else ''}"
            for item in found.ended_with(record.epoch)
        ]
        for place, (one, other) in enumerate(zip_longest(began, ended, fillvalue="")):
            rows.append((*(about if place == 0 else ("", "", "", "")), one, other))
    text = table(("EPOCH", "REFERS TO", "CAUSE", "PLANNED", "BEGAN", "ENDED"), rows, right=("EPOCH",))
    if found.first:
        text += f"\n{_dropped(found.first)}."
    reasons = [f"epoch {record.epoch}: {record.reason}" for record in found.records if record.reason]
    return "\n".join([text, "", "Scaled by load:", *reasons]) if reasons else text


def _dropped(first: int) -> str:
    return "epoch 0 was dropped" if first == 1 else f"epochs 0 to {first - 1} were dropped"


def _end(record: EpochRecord, segment: Segment) -> str:
    end = None if record.sealed_ends is None else record.sealed_ends.get(segment.id)
    return "is being sealed" if end is None else f"at {end:,}"


def _segment_table(record: EpochRecord, partitions: Mapping[SegmentId, int]) -> str:
    rows = [
        (str(item.id.number), str(item.id.epoch), str(partitions.get(item.id, "")), str(item.range))
        for item in record.segments
    ]
    return table(("SEGMENT", "EPOCH", "PARTITION", "KEYS"), rows, right=("SEGMENT", "EPOCH", "PARTITION"))


_HEADERS_OF: Final = {HeaderForm.EACH: "each record", HeaderForm.FIRST: "the first record of each batch"}


def description_text(found: StreamDescription, waits: Sequence[WaitRow] = (), waits_unknown: str = "") -> str:
    """Return a description for people to read."""
    config = found.config
    what_it_keeps = retention_text(config.retention)
    if _is_on_topic(found):
        what_it_keeps += ", except what the topic's own settings let Kafka delete"
    about = (
        ("stream", str(config.name)),
        ("group", f"{config.group}, led by {found.leader or 'no coordinator at present'}"),
        ("state", shown_state(config, found.fault)),
        ("created", moment(config.created_ms)),
        ("epoch", f"{found.active.epoch}, refers to {found.reference_epoch}; {_epochs_so_far(found)}"),
        *([("topic", _about_topic(found))] if config.topic else []),
        ("buffer", f"{config.buffer_topic}, {counted(config.buffer_partitions, 'partition')}"),
        ("limits", f"records of up to {config.record_bytes_max:,} bytes"),
        ("headers", f"on {_HEADERS_OF[config.headers]}"),
        ("times", f"of the {config.timestamps.value}"),
        ("keeps", what_it_keeps),
        ("scaled", scaling_text(config.scaling)),
    )
    lines = [f"{name:<9}{value}" for name, value in about]
    if found.fault is not None:
        lines += [f"ERROR    since {moment(found.fault.since_ms)} {found.fault.effect}: {found.fault.reason}"]
    lines += [f"WAITS    {_wait_text(row)}" for row in waits]
    if waits_unknown:
        lines.append(f"WAITS    are not known: {waits_unknown}")
    lines += ["", _segment_table(found.active, found.partitions), ""]
    if found.open_transactions:
        lines.append(transaction_table(found.open_transactions))
    else:
        lines.append("No open transaction has outlived half a second.")
    return "\n".join(lines)


def _wait_text(row: WaitRow) -> str:
    since = f"since {moment(row.since_ms)} " if row.since_ms else ""
    what = f"{row.kind} {row.name}".rstrip()
    return f"{since}{what} ({row.cause}): {'; '.join(row.reasons) or 'more late commits'}"


def _is_on_topic(found: StreamDescription) -> bool:
    return found.config.is_on_topic(found.active)


def _about_topic(found: StreamDescription) -> str:
    config = found.config
    text = f"{config.topic}, {counted(config.partitions, 'partition')}; keys by {config.partitioner}"
    return text if _is_on_topic(found) else f"{text}; sealed, the stream has left it for topics of its own"


def _epochs_so_far(found: StreamDescription) -> str:
    text = f"{counted(found.epochs, 'epoch')} so far"
    return f"{text}, {_dropped(found.first_epoch)}" if found.first_epoch else text


def _config_document(config: StreamConfig, fault: StreamFault | None = None) -> dict[str, Any]:
    return {
        "stream": str(config.name),
        "group": str(config.group),
        "state": stream_state(config, fault),
        "error": None
        if fault is None
        else {"code": fault.code, "reason": fault.reason, "topic": fault.topic or None, "since_ms": fault.since_ms},
        "created_ms": config.created_ms,
        "topic": config.topic or None,
        "partitioner": config.partitioner or None,
        "buffer_topic": config.buffer_topic,
        "buffer_partitions": config.buffer_partitions,
        "replication_factor": config.replication_factor,
        "record_bytes_max": config.record_bytes_max,
        "headers": config.headers.value,
        "timestamps": config.timestamps.value,
        "retention": retention_document(config.retention),
        "scaling": scaling_document(config.scaling),
    }


def _description_document(found: StreamDescription) -> dict[str, Any]:
    return {
        **_config_document(found.config, found.fault),
        "leader": found.leader,
        "epochs": found.epochs,
        "first_epoch": found.first_epoch,
        "active": _epoch_document(found.config.places, found.active, found.partitions),
        "open_transactions": [transaction_document(record) for record in found.open_transactions],
    }


def _epoch_document(places: SegmentPlaces, record: EpochRecord, partitions: Mapping[SegmentId, int]) -> dict[str, Any]:
    ends = record.sealed_ends
    return {
        "epoch": record.epoch,
        "reference_epoch": record.reference_epoch,
        "cause": record.cause.value,
        "reason": record.reason or None,
        "created_ms": record.created_ms,
        "segments": [
            {
                "segment": str(item.id),
                "number": item.id.number,
                "epoch": item.id.epoch,
                "partition": partitions.get(item.id),
                "low": item.range.low,
                "high": item.range.high,
                "topic": places.of(item.id)[0],
                "topic_partition": places.of(item.id)[1],
            }
            for item in record.segments
        ],
        "sealed_ends": None if ends is None else {str(segment): end for segment, end in sorted(ends.items())},
    }
