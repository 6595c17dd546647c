"""Options of the sources: everything that is wrong with them is named at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rollbridge.errors import InvalidRequestError
from rollbridge.model.names import StreamName
from rollbridge.model.position import parse_start
from rollbridge.spark.columns import COMMIT_POSITION, HEADERS, PREVIEW, TRANSACTION
from rollbridge.spark.settings import STREAM, OptionReader, SparkSettings, read_settings

STARTING: Final = "startingOffsets"
ENDING: Final = "endingOffsets"
MAX_RECORDS: Final = "maxRecordsPerTrigger"
MIN_PARTITIONS: Final = "minPartitions"
FAIL_ON_DATA_LOSS: Final = "failOnDataLoss"
ISOLATION: Final = "isolation"
INCLUDE_TRANSACTION: Final = "includeTransaction"
INCLUDE_COMMIT_POSITION: Final = "includeCommitPosition"

COMMITTED: Final = "read_committed"
UNCOMMITTED: Final = "read_uncommitted"

Kind = Literal["schema", "batch", "streaming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """What a source is to read, and how. It can be pickled."""

    shared: SparkSettings
    stream: StreamName
    start: str
    """What :func:`~rollbridge.model.position.parse_start` understands."""
    end: str
    max_records: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    preview: bool
    """Whether records of open transactions are read as well."""
    columns: tuple[str, ...]
    """Columns on request that the options ask for."""


def read_source(options: Mapping[str, str], kind: Kind) -> SourceSettings:
    """The settings in a source's options.

    Args:
        options: As Spark gives them.
        kind: What they are read for: not every option makes sense with every query, and defaults differ.

    Raises:
        ConfigError: some are missing, wrong or unknown; all are named.
    """
    reader = OptionReader(options)
    shared = read_settings(reader)
    start = reader.text(STARTING, "latest" if kind == "streaming" else "earliest")
    end = reader.text(ENDING, "latest")
    max_records = reader.number(MAX_RECORDS)
    min_partitions = reader.number(MIN_PARTITIONS)
    fail_on_data_loss = reader.flag(FAIL_ON_DATA_LOSS, True)
    preview = reader.choice(ISOLATION, (COMMITTED, UNCOMMITTED), COMMITTED) == UNCOMMITTED
    transaction = reader.flag(INCLUDE_TRANSACTION, False)
    position = reader.flag(INCLUDE_COMMIT_POSITION, False)
    faults = reader.faults
    if kind == "batch" and max_records is not None:
        faults.append(f"{MAX_RECORDS}: is for streaming queries; a batch ends at {ENDING}")
    if kind == "streaming" and options.get(ENDING.lower()):
        faults.append(f"{ENDING}: is for batches; a streaming query that is to end has trigger(availableNow=True)")
    if kind == "streaming" and preview:
        faults.append(f"{ISOLATION}: {UNCOMMITTED} is for batches: it previews what is open when it is read")
    if end == "earliest":
        faults.append(f"{ENDING}: nothing ends before the earliest record")
    stream: StreamName | None = None
    if shared is not None and len(shared.streams) > 1:
        faults.append(f"{STREAM}: a source reads one stream; make a source of each and unite them")
    elif shared is not None:
        stream = StreamName.parse(shared.streams[0])
        for name, text in ((STARTING, start), (ENDING, end)):
            try:
                parse_start(stream, text)
            except InvalidRequestError as exc:
                faults.append(f"{name}: {exc}")
    reader.finish()
    assert shared is not None  # its faults were raised
    assert stream is not None
    return SourceSettings(
        shared=shared,
        stream=stream,
        start=start,
        end=end,
        max_records=max_records,
        min_partitions=min_partitions,
        fail_on_data_loss=fail_on_data_loss,
        preview=preview,
        columns=(
            *(HEADERS if shared.include_headers else ()),
            *(TRANSACTION if transaction else ()),
            *(COMMIT_POSITION if position else ()),
            *(PREVIEW if preview else ()),
        ),
    )
