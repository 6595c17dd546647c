"""Versions of records in Kafka: which a reader knows, and what it says of those that it does not.

A record carries its version in front of its Avro::

    control records, terminated transactions       snapshots, ongoing and ended transactions
    +---------+------+---------- - - -             +---------+--------+------+---------- - - -
    | version | kind | rest of the Avro            | version | CRC-32 | Avro
    +---------+------+---------- - - -             +---------+--------+------+---------- - - -
    0         1      2                             0         1        5

    version  of a control record, or of terminated transactions: an odd byte, 1 for version 1, 3 for version 2 and
             so on up to 127
             of a snapshot: 1 for version 1, 2 for version 2

Before 0.2.0, control records and terminated transactions had no version; Avro begins there with a number that is not
negative, which Avro writes as an even byte, so they are told apart, and are read as ever. Frames carry theirs in the
key (:mod:`rollbridge.model.frames`), JSON in a field (:mod:`rollbridge_schemas`).

The rule of all of them is in docs/protocol.md, "Versions and compatibility".
"""

from __future__ import annotations

from typing import Final

import rollbridge_schemas
from rollbridge.model.errors import CorruptDataError, NewerFormatError

FRONT: Final = b"\1"
"""What stands in front of a control record, and of terminated transactions: version 1."""
_KNOWN: Final = 1
_VERSION_BITS: Final = 0x81


def is_version(first: int) -> bool:
    """Return whether the first byte of a control record, or of terminated transactions, is a version, of any number."""
    return first & _VERSION_BITS == 1


def content_of(what: str, value: bytes) -> bytes:
    """Return the Avro of a control record, or of terminated transactions, without the version in front of it.

    Raises:
        NewerFormatError: it is of a version that is not known here; ``what`` says of what.
    """
    front = value[:1]
    if front == FRONT:
        return value[1:]
    if front and is_version(front[0]):
        version = (front[0] + 1) // 2
        raise NewerFormatError(str(rollbridge_schemas.NewerVersionError(what, version, _KNOWN)))
    return value


def unreadable(what: str, fault: Exception) -> CorruptDataError:
    """Return the error for a record that does not decode; it says if a newer release wrote it."""
    kind = NewerFormatError if isinstance(fault, rollbridge_schemas.NewerVersionError) else CorruptDataError
    return kind(f"{what}: {fault}")
