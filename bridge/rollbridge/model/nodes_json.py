"""Reading what stands in a ZooKeeper node: whatever is wrong with it is corrupt data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import rollbridge_schemas
from rollbridge.model.errors import CorruptDataError, InvalidRequestError


@contextmanager
def reading(schema: str, raw: bytes) -> Iterator[rollbridge_schemas.Datum]:
    """The datum in ``raw``; whatever its schema or the values built from it refuse is corrupt data."""
    try:
        yield rollbridge_schemas.codec(schema).from_json(raw)
    except (InvalidRequestError, ValueError) as fault:
        raise CorruptDataError(f"a ZooKeeper node does not hold a record of schema {schema}: {fault}") from fault
