"""A process that shares a list with others: it appends its own entries, and notes which it was told are in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import rollbridge

KEY = b"list"
Entries = list[str]


def share(b: rollbridge.Bridge, stream: str) -> rollbridge.Synchronizer[Entries, str]:
    """The list, as bytes of JSON; an entry that comes twice is refused by everybody."""
    return b.synchronizer(
        stream,
        KEY,
        [],
        append,
        states=rollbridge.Codec.json(),
        updates=rollbridge.Codec.json(),
        transaction_timeout=2,
    )


def append(entries: Entries, entry: str) -> Entries:
    """Apply an update."""
    if entry in entries:
        raise ValueError(f"{entry} came twice")
    return [*entries, entry]


def unless_there(entry: str) -> Callable[[Entries], list[str] | None]:
    """A generator of the update that appends an entry."""
    return lambda entries: None if entry in entries else [entry]


def work(
    bootstrap_servers: str, zookeeper: str, zookeeper_root: str, stream: str, name: str, count: int, out: Path
) -> None:
    """Append ``count`` entries, some without a condition, and compact and truncate now and then."""
    options = rollbridge.ClientOptions(session_timeout_s=1.0)
    with (
        out.open("w", buffering=1) as notes,
        rollbridge.connect(
            bootstrap_servers, zookeeper=zookeeper, zookeeper_root=zookeeper_root, client_name=name, options=options
        ) as b,
        share(b, stream) as shared,
    ):
        for number in range(count):
            entry = f"{name}-{number}"
            notes.write(f"asked {entry}\n")
            if number % 5 == 4:
                shared.update_unconditionally([entry])
            else:
                shared.update(unless_there(entry))
            notes.write(f"told {entry}\n")
            if number % 8 == 7:
                shared.compact(truncate=True)
