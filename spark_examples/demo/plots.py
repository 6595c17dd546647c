"""What examples and the demo draw: PNG files, with nothing on a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER: Final = Path("plots")
"""Where they go, from the working directory."""
_INCHES: Final = (9.0, 5.0)
_DPI: Final = 120

Curve = Sequence[tuple[float, float]]
"""Points (time in seconds, count) in order."""


def save_bars(file: Path, title: str, label: str, bars: Mapping[str, float], marks: Mapping[str, float]) -> None:
    """Bars, longest first, with a mark where each of them ought to end."""
    figure, axes = _canvas(title)
    names = sorted(bars, key=lambda name: bars[name])
    axes.barh(names, [bars[name] for name in names], color="tab:blue", label="read from the stream")
    places = [marks[name] for name in names]
    axes.plot(places, names, "D", color="black", markerfacecolor="white", label="computed from the file")
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    _save(figure, file)


def save_curves(file: Path, title: str, label: str, curves: Mapping[str, Curve]) -> None:
    """Counts that grow in steps, over one axis of time; the counts in logarithms, so that small ones can be seen."""
    figure, axes = _canvas(title)
    for name, curve in curves.items():
        axes.step([at for at, _ in curve], [count for _, count in curve], where="post", label=name, linewidth=2)
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    _save(figure, file)


def _canvas(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    click.echo(f"  plot: {file}")
