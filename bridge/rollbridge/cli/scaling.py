"""Scaling by load on the command line: its options, and how a policy and a wait are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import click

from rollbridge.model.scaling import ScalingPolicy, ScalingWait

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option(
        "--scale-events-per-second",
        type=int,
        metavar="N",
        help="Split segments that take more records each second, and merge those that take few.",
    ),
    click.option("--scale-bytes-per-second", type=int, metavar="N", help="The same by bytes, as they stand on disk."),
    click.option("--min-segments", type=int, metavar="N", help="Fewest segments when scaled by load.  [default: 1]"),
    click.option("--max-segments", type=int, metavar="N", help="Most segments when scaled by load.  [default: 32]"),
)
NO_SCALING: Final = click.option("--no-scaling", is_flag=True, help="Scale by request only.")


def scaling_options(command: F) -> F:
    """Give a command the options of a scaling policy, as ``events``, ``bytes``, ``least`` and ``most`` of segments."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_policy(
    known: ScalingPolicy | None, events: int | None, size: int | None, least: int | None, most: int | None
) -> ScalingPolicy | None:
    """Return a policy with what was given, None if nothing was; what makes no sense is refused by who takes it.

    Args:
        known: The policy so far, of which the rest is taken.
        events: Records per second and segment; replaces bytes.
        size: Bytes per second and segment; replaces records.
        least: Fewest segments.
        most: Most segments.
    """
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


def wait_document(wait: ScalingWait | None) -> dict[str, Any] | None:
    """Return what a stream waits for as JSON."""
    return None if wait is None else {"reason": wait.reason, "since_ms": wait.since_ms}
