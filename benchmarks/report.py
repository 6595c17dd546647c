"""The results as a table on the terminal, as JSON, and as the page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Better, Result

RESULTS: Final = Path(__file__).parent / "results"
PUBLISHED: Final = RESULTS / "published.json"
PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- results: written by `python -m benchmarks --publish` -->"
END: Final = "<!-- end of results -->"

_DIGITS_BELOW: Final = 100
_MEASURED: Final = "Measured on"


def as_json(results: Sequence[Result], machine: Mapping[str, str], run: Mapping[str, object]) -> dict[str, Any]:
    """Everything measured."""
    today = datetime.now(UTC).date().isoformat()
    return {
        "date": today,
        "machine": dict(machine),
        "run": dict(run),
        "rows": [
            {
                "name": result.row.name,
                "date": today,
                "title": result.row.title,
                "unit": result.row.unit,
                "better": result.row.better.value,
                "bar": result.row.bar,
                "ours": result.ours,
                "peer": result.peer,
                "theirs": result.theirs,
                "others": dict(result.others),
                "ratios": result.ratios,
                "compared": result.compared,
                "reached": result.reached,
            }
            for result in results
        ],
    }


def store(data: Mapping[str, Any], path: Path) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def show(results: Sequence[Result], console: Console) -> None:
    """The table on the terminal."""
    table = Table("what", "rollbridge", "native", "ratio", "range", "bar", "", show_lines=True)
    for result in results:
        mark = {True: "[green]reached", False: "[red]missed", None: ""}[result.reached]
        table.add_row(*_cells(result), mark)
    console.print(table)


def markdown(results: Sequence[Result]) -> str:
    """The table of the documentation."""
    lines = [
        "| what | rollbridge | native | ratio | range over the rounds | demanded | |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        mark = {True: "reached", False: "**missed**", None: ""}[result.reached]
        lines.append(f"| {' | '.join((*_cells(result), mark))} |")
    return "\n".join(lines)


def publish(results: Sequence[Result], data: Mapping[str, Any]) -> None:
    """Put table and machine into the page, between its marks, and keep the JSON beside."""
    store(data, PUBLISHED)
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        raise ValueError(f"{PAGE} lacks the marks {BEGIN} and {END}")
    facts = [f"- {name}: {value}" for name, value in {**data["machine"], **data["run"]}.items()]
    parts = (BEGIN, _dates(data["rows"]), markdown(results), "\n".join(facts), END)
    PAGE.write_text(head + "\n\n".join(parts) + tail, encoding="utf-8")


def publish_again(results: Sequence[Result], data: Mapping[str, Any]) -> None:
    """Replace these rows only, in the page and in the JSON beside it; a new one stands behind the one before it."""
    known = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    # Titles like "the same, p99" are there more than once, but the table has the order of the JSON.
    first = next(number for number, text in enumerate(lines) if text.startswith("|---")) + 1
    names = [item["name"] for item in known["rows"]]
    place = len(names) - 1
    for result, row, line in zip(results, data["rows"], markdown(results).splitlines()[2:], strict=True):
        if result.row.name in names:
            place = names.index(result.row.name)
            known["rows"][place] = row
            lines[first + place] = line
        else:
            place += 1
            known["rows"].insert(place, row)
            lines.insert(first + place, line)
            names.insert(place, result.row.name)
    store(known, PUBLISHED)
    lines[next(number for number, text in enumerate(lines) if text.startswith(_MEASURED))] = _dates(known["rows"])
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _dates(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence that says when the rows were measured."""
    *others, last = sorted({row["date"] for row in rows})
    if not others:
        return f"{_MEASURED} {last}."
    where = f"`benchmarks/results/{PUBLISHED.name}` has the date of each row"
    return f"{_MEASURED} {', '.join(others)} and {last}; {where}."


def _cells(result: Result) -> tuple[str, ...]:
    row = result.row
    theirs = result.theirs_median
    native = "" if theirs is None else f"{_figure(theirs)} {row.unit} ({(result.peer or '').removeprefix('native, ')})"
    if result.ratio is not None:
        spread, suffix = result.ratios, "×"
    else:
        spread, suffix = result.ours, ""
    bar = ""
    if row.bar is not None:
        sign = "≥" if row.better is Better.MORE else "≤"
        bar = f"{sign} {row.bar:g}{suffix or f' {row.unit}'}"
    return (
        row.title,
        f"{_figure(result.ours_median)} {row.unit}",
        native.replace(" (native)", ""),
        "" if result.ratio is None else f"{result.ratio:.2f}×",
        "" if len(spread) < 2 else f"{_figure(min(spread))}–{_figure(max(spread))}{suffix}",
        bar,
    )


def _figure(value: float) -> str:
    """Three digits, or whole numbers with separators."""
    return f"{value:,.0f}" if abs(value) >= _DIGITS_BELOW else f"{value:.3g}"
