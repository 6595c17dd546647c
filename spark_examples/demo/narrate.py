"""How the demo talks: lines with the elapsed time, a table at the end, and checks that are collected, not forgotten."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

_MOST_DIFFERENCES = 5


class Story:
    """Tells what happens, and remembers what was found wrong."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._began_s = time.monotonic()
        self.differences: list[str] = []

    @property
    def elapsed_s(self) -> float:
        """Since the beginning of the story."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """Tell one thing."""
        self._console.print(f"{self.elapsed_s:6.1f} s  {text}", markup=False)

    def note(self, text: str) -> None:
        """Tell something that belongs to no moment."""
        self._console.print(text, markup=False)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table."""
        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(table)

    def conclude(self) -> bool:
        """Say whether everything agreed; returns that."""
        if self.differences:
            self._console.print("\nDIFFERENT:", style="bold red")
            for difference in self.differences:
                self._console.print(f"  - {difference}", markup=False)
        else:
            self._console.print("\nall counts agree", style="bold green")
        return not self.differences

    def check_equal(self, what: str, found: object, expected: object) -> bool:
        """Note a difference unless both are equal; returns whether they are."""
        if found != expected:
            self.differences.append(f"{what}: {found} instead of {expected}")
        return found == expected

    def check_within(self, what: str, found: int, low: int, high: int) -> bool:
        """Note a difference unless ``low <= found <= high``; returns whether it holds."""
        if not low <= found <= high:
            self.differences.append(f"{what}: {found} instead of {low} to {high}")
        return low <= found <= high

    def check_same_counts(self, what: str, found: Mapping[str, int], expected: Mapping[str, int]) -> bool:
        """Note the entries in which two counts differ; returns whether there are none."""
        wrong = sorted(name for name in {*found, *expected} if found.get(name, 0) != expected.get(name, 0))
        if wrong:
            shown = ", ".join(
                f"{name} {found.get(name, 0)} instead of {expected.get(name, 0)}" for name in wrong[:_MOST_DIFFERENCES]
            )
            self.differences.append(f"{what}: {len(wrong)} differ: {shown}")
        return not wrong


def duration(seconds: float) -> str:
    """A duration with the unit that suits it."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
