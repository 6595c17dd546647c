"""Streams with a history, for tests of readers."""

from __future__ import annotations

import rollbridge

KEYS = [b"k%d" % number for number in range(8)]


def write(b: rollbridge.Bridge, stream: str, value: bytes) -> None:
    """The same value for each key, in one transaction."""
    with b.transaction(stream) as txn:
        txn.write_all(stream, ((key, value) for key in KEYS))


def grow(b: rollbridge.Bridge, stream: str) -> list[bytes]:
    """Three scales and a rolling commit, an empty epoch among them; the values of each key in their order."""
    write(b, stream, b"before")
    late = b.begin(stream)
    late.write_all(stream, ((key, b"rolled") for key in KEYS))
    b.admin.scale(stream, seal=[0, 1], ranges=[(0.0, 0.3), (0.3, 1.0)])
    write(b, stream, b"scaled")
    b.admin.scale(stream, seal=[2, 3], ranges=[(0.0, 1.0)])
    b.admin.scale(stream, seal=[4], ranges=[(0.0, 0.5), (0.5, 1.0)])
    late.commit()
    write(b, stream, b"after")
    return [b"before", b"scaled", b"rolled", b"after"]


def grow_narrowly(b: rollbridge.Bridge, stream: str, late: int = 4) -> list[bytes]:
    """A scale of one segment of two, late commits, and one in between; the values of each key in their order."""
    write(b, stream, b"before")
    begun = [b.begin(stream) for _ in range(late)]
    for place, txn in enumerate(begun):
        txn.write_all(stream, ((key, b"late-%d" % place) for key in KEYS))
        txn.flush()
    b.admin.scale(stream, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
    write(b, stream, b"scaled")
    values = [b"before", b"scaled"]
    for place, txn in enumerate(begun):
        txn.commit()
        values.append(b"late-%d" % place)
        if place == late - 2:
            write(b, stream, b"between")
            values.append(b"between")
    return values
