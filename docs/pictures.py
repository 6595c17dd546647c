"""Draw the pictures of README and docs: architecture, rolling commit, and the states of a transaction.

``python docs/pictures.py`` writes them; with ``--check`` it only says which are stale, and exits with 1 if any is. A
test does the same. The pictures bring their own background, for light and for dark viewers, and are plain SVG 1.1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from rollbridge.buffer.table import DECISIONS, Move, State

HERE: Final = Path(__file__).parent
_LINE: Final = 17
"""Pixels from one line of text to the next."""
_STYLE: Final = """\
svg { font-family: system-ui, "Segoe UI", "DejaVu Sans", Verdana, sans-serif; font-size: 12px }
.paper { fill: #ffffff }
text { fill: #1d2430 }
.name { font-size: 13px; font-weight: 600 }
.title { font-size: 15px; font-weight: 600 }
.faint { fill: #5d6778 }
.code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; font-size: 11px }
.box { stroke-width: 1.4 }
.ground { fill: #f4f6f9; stroke: #cfd6df }
.round { fill: none; stroke: #b87503; stroke-width: 1.6; stroke-dasharray: 6 4 }
.rule { stroke: #cfd6df; stroke-width: 1 }
.now { stroke: #b87503; stroke-width: 1.4; stroke-dasharray: 5 4 }
.plain { fill: #eceff3; stroke: #8b96a5 }
.blue { fill: #d3e5f6; stroke: #2f6da8 }
.green { fill: #d2eddf; stroke: #1d8557 }
.amber { fill: #fde5bf; stroke: #b87503 }
.purple { fill: #e9dbf3; stroke: #8250a8 }
.arrow { stroke: #5d6778; stroke-width: 1.6; fill: none }
.head { fill: #5d6778 }
.number { fill: #5d6778 }
.digit { fill: #ffffff; font-size: 11px; font-weight: 600 }
.dot { fill: #8b96a5 }
.mark { fill: #b87503 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14181f }
  text { fill: #e7ebf1 }
  .faint { fill: #9aa5b5 }
  .ground { fill: #1b212a; stroke: #38424f }
  .round { stroke: #e8a93a }
  .rule { stroke: #38424f }
  .now { stroke: #e8a93a }
  .plain { fill: #2a323d; stroke: #7c8896 }
  .blue { fill: #1c3b58; stroke: #69a8e0 }
  .green { fill: #17432f; stroke: #4fc08d }
  .amber { fill: #57400f; stroke: #e8a93a }
  .purple { fill: #402a54; stroke: #b98bdc }
  .arrow { stroke: #9aa5b5 }
  .head { fill: #9aa5b5 }
  .number { fill: #9aa5b5 }
  .digit { fill: #14181f }
  .dot { fill: #7c8896 }
  .mark { fill: #e8a93a }
}
"""


@dataclass(slots=True)
class Picture:
    """An SVG that is drawn from the back to the front; lengths are pixels.

    Attributes:
        width, height: Of the whole.
        title: What it shows, for those who cannot see it.
    """

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, look: str, corner: float = 7) -> None:
        """Draw a rectangle with round corners."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" class="box {look}"/>'
        )

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "start") -> None:
        """Write a line; ``y`` is its base line, ``anchor`` is start, middle or end."""
        looks = f' class="{look}"' if look else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{looks}>{escape(words)}</text>')

    def card(self, x: float, y: float, width: float, height: float, look: str, name: str, *lines: str) -> None:
        """Draw a box with a name and lines in its middle; a line in backticks is set as code."""
        self.box(x, y, width, height, look)
        base = y + height / 2 - _LINE * len(lines) / 2 + 4
        self.text(x + width / 2, base, name, "name", "middle")
        for place, line in enumerate(lines, 1):
            code = line.startswith("`")
            self.text(x + width / 2, base + _LINE * place, line.strip("`"), "code" if code else "faint", "middle")

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """Draw a line through points, with a head at its end, or at both."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#tail)"' if both else ""
        self._parts.append(f'<path d="{path}" class="arrow"{start} marker-end="url(#head)"/>')

    def rule(self, x1: float, y1: float, x2: float, y2: float, look: str = "rule") -> None:
        """Draw a thin line."""
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{look}"/>')

    def step(self, x: float, y: float, number: int) -> None:
        """Draw a number in a disc."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" class="number"/>')
        self.text(x, y + 4, str(number), "digit", "middle")

    def dot(self, x: float, y: float, look: str = "dot", radius: float = 3.5) -> None:
        """Draw a disc: a record."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{look}"/>')

    def svg(self) -> str:
        """Return the whole file."""
        head = (
            '<marker id="{id}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="{orient}"><path d="M0 0.8 L10 5 L0 9.2 z" class="head"/></marker>'
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{_STYLE}</style>",
                "<defs>" + head.format(id="head", orient="auto"),
                head.format(id="tail", orient="auto-start-reverse") + "</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="10" class="paper"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def architecture() -> Picture:
    """Clients, Kafka's topics, coordinators and ZooKeeper, and the way of a transaction through them."""
    picture = Picture(1000, 500, "The architecture of rollbridge: clients, topics, coordinators, ZooKeeper, readers")
    # Kafka, and what stands in it.
    picture.box(240, 150, 500, 270, "ground", 12)
    picture.text(262, 402, "Apache Kafka", "title")
    picture.card(262, 200, 160, 84, "amber", "Buffer topics", "frames of transactions", "that are open")
    picture.box(546, 188, 180, 218, "round", 12)
    picture.card(560, 200, 152, 62, "purple", "Commit log", "outcomes, in order")
    picture.box(560, 278, 152, 92, "blue")
    picture.text(636, 299, "Segment topics", "name", "middle")
    for place, share in enumerate((0.25, 0.25, 0.5)):
        left = 572 + 128 * sum((0.25, 0.25, 0.5)[:place])
        picture.box(left + 1, 309, 128 * share - 2, 22, "paper blue", 3)
    picture.text(636, 350, "one for each key range", "faint", "middle")
    picture.text(636, 393, "one native transaction", "faint", "middle")
    # Coordinators and ZooKeeper above it.
    picture.box(412, 26, 172, 82, "green")
    picture.card(404, 34, 172, 82, "green", "Coordinators", "one leads each group,", "the others stand by")
    picture.card(800, 34, 176, 82, "plain", "ZooKeeper", "streams and epochs,", "who leads, requests")
    picture.arrow((584, 75), (800, 75), both=True)
    # Clients on the left, readers on the right.
    picture.card(24, 200, 166, 84, "plain", "Transactions", "`b.begin()`", "`Producer, Spark sink`")
    picture.card(24, 314, 166, 84, "plain", "Direct writes", "`b.writer()`", "`b.cas_writer()`")
    picture.card(800, 190, 176, 84, "plain", "Whole transactions", "`b.transactions()`", "`b.outcome()`")
    picture.card(
        800, 304, 176, 94, "plain", "Any Kafka client", "read_committed", "`b.reader(), Consumer`", "`Spark source`"
    )
    # The way of a transaction.
    picture.arrow((190, 242), (262, 242))
    picture.step(215, 226, 1)
    picture.arrow((342, 200), (342, 75), (404, 75))
    picture.step(324, 126, 2)
    picture.arrow((490, 116), (490, 231), (546, 231))
    picture.step(508, 135, 3)
    picture.arrow((190, 356), (560, 356))
    picture.text(375, 349, "conditional and plain records", "faint", "middle")
    picture.arrow((712, 232), (800, 232))
    picture.arrow((712, 350), (800, 350))
    picture.step(770, 334, 4)
    legend = (
        (24, 452, 1, "A client writes frames to a buffer, for days if it likes."),
        (24, 480, 2, "The leader follows the buffers and decides."),
        (470, 452, 3, "It merges what is committed, in one native transaction."),
        (470, 480, 4, "Readers see all of it, and have never waited for it."),
    )
    for x, y, number, words in legend:
        picture.step(x + 9, y - 4, number)
        picture.text(x + 26, y, words)
    return picture


_TOP: Final = 176
_BOTTOM: Final = 396
"""Where the key space ends and begins in the picture of a rolling commit."""


def _segment(
    picture: Picture, x: float, until: float, low: float, high: float, look: str, name: str, records: int
) -> None:
    """Draw a segment over the time in which it is active, with some plain records in it."""
    unit = _BOTTOM - _TOP
    top, height = _BOTTOM - unit * high, unit * (high - low)
    picture.box(x + 2, top + 2, until - x - 4, height - 4, look, 5)
    picture.text(x + 12, top + 20, name, "name")
    for place in range(records):
        picture.dot(x + 16 + (until - x - 34) * (place + 0.5) / records, top + height - 14)


def rolling_commit() -> Picture:
    """A transaction that began in epoch 0 is committed after a scale; time runs from left to right."""
    picture = Picture(1000, 512, "A rolling commit: a transaction of epoch 0 is committed after the stream was scaled")
    picture.text(24, 34, "A transaction outlives a scale, and is rolled into the stream's history", "title")
    start, scaled, rolled, again, end = 110, 350, 590, 740, 976
    # The buffer, in which nobody who reads the stream looks.
    picture.text(24, 84, "buffer", "name")
    picture.text(24, 101, "topic", "name")
    picture.box(start, 62, rolled - start + 4, 48, "amber")
    frames = ((176, "BEGIN"), (262, "DATA"), (320, ""), (400, "DATA"), (462, ""), (552, "COMMIT"))
    for x, words in frames:
        picture.dot(x, 94, "mark", 4.5)
        if words:
            picture.text(x, 82, words, "code", "middle")
    # The stream: its epochs, and its segments in the key space.
    epochs = (
        (start, scaled, "epoch 0", "created"),
        (scaled, rolled, "epoch 1", "segment 0 is split"),
        (rolled, again, "epoch 2", "shaped like epoch 0"),
        (again, end, "epoch 3", "shaped like epoch 1, active"),
    )
    for left, right, name, why in epochs:
        picture.text((left + right) / 2, 146, name, "name", "middle")
        picture.text((left + right) / 2, 163, why, "faint", "middle")
        picture.rule(left, 132, left, _BOTTOM)
    picture.text(24, _TOP + 12, "keys", "name")
    for share, words in ((1.0, "1"), (0.5, "0.5"), (0.25, "0.25"), (0.0, "0")):
        picture.text(start - 12, _BOTTOM - (_BOTTOM - _TOP) * share + 4, words, "faint", "end")
    _segment(picture, start, rolled, 0.5, 1.0, "blue", "1.#epoch.0", 7)
    _segment(picture, start, scaled, 0.0, 0.5, "blue", "0.#epoch.0", 4)
    _segment(picture, scaled, rolled, 0.25, 0.5, "green", "3.#epoch.1", 3)
    _segment(picture, scaled, rolled, 0.0, 0.25, "green", "2.#epoch.1", 3)
    _segment(picture, rolled, again, 0.5, 1.0, "amber", "1.#epoch.2", 0)
    _segment(picture, rolled, again, 0.0, 0.5, "amber", "0.#epoch.2", 0)
    for x, y in ((636, 246), (665, 246), (694, 246), (650, 356), (680, 356)):
        picture.dot(x, y, "mark", 4.5)
    _segment(picture, again, end, 0.5, 1.0, "purple", "1.#epoch.3", 3)
    _segment(picture, again, end, 0.25, 0.5, "purple", "3.#epoch.3", 3)
    _segment(picture, again, end, 0.0, 0.25, "purple", "2.#epoch.3", 3)
    # The commit brings the records over, in one native transaction.
    picture.arrow((rolled + 4, 86), (665, 86), (665, 126))
    picture.text(676, 82, "one native transaction brings", "faint")
    picture.text(676, 99, "its records into epoch 2", "faint")
    picture.arrow((start, 418), (end, 418))
    picture.text(start, 440, "time", "faint")
    picture.dot(24 + 5, 467, "dot")
    picture.text(44, 471, "plain and conditional records, and small transactions: they go on all the while")
    picture.dot(24 + 5, 489, "mark", 4.5)
    picture.text(
        44, 493, "records of the transaction: invisible until its commit, then between what came before and after"
    )
    return picture


_STATES: Final = {
    State.UNKNOWN: (24, 30, "plain"),
    State.OPEN: (228, 30, "amber"),
    State.COMMITTING: (484, 30, "blue"),
    State.COMMITTED: (732, 30, "green"),
    State.ABORTING: (484, 160, "blue"),
    State.ABORTED: (732, 160, "purple"),
}
"""Where the box of each state stands, and how it looks."""
_STATE_SIZE: Final = (120, 50)


def transaction_states() -> Picture:
    """The states of a transaction, with the events that lead from one to another: all changes of the table."""
    picture = Picture(876, 240, "The states of a transaction: unknown, open, committing, committed, aborting, aborted")
    width, height = _STATE_SIZE
    for state, (x, y, look) in _STATES.items():
        picture.card(x, y, width, height, look, state.value)
    changes: dict[tuple[State, State], list[str]] = {}
    for state, rows in DECISIONS.items():
        for event, row in rows.items():
            if isinstance(row, Move):
                changes.setdefault((state, row.to), []).append(event.value)
    for (begin, end), events in changes.items():
        (x1, y1, _), (x2, y2, _) = _STATES[begin], _STATES[end]
        middle, words = x1 + width / 2, ", ".join(events)
        if y1 == y2:
            picture.arrow((x1 + width, y1 + height / 2), (x2, y2 + height / 2))
            picture.text((x1 + width + x2) / 2, y1 + height / 2 - 8, words, "faint", "middle")
        elif x1 == x2:
            picture.arrow((middle, y1 + height), (middle, y2))
            picture.text(middle + 10, (y1 + height + y2) / 2 + 4, words, "faint")
        else:
            picture.arrow((middle, y1 + height), (middle, y2 + height / 2), (x2, y2 + height / 2))
            picture.text((middle + x2) / 2, y2 + height / 2 - 8, words, "faint", "middle")
    return picture


def pictures() -> dict[Path, str]:
    """Every picture, by its file."""
    return {
        HERE / "architecture.svg": architecture().svg(),
        HERE / "rolling-commit.svg": rolling_commit().svg(),
        HERE / "transaction-states.svg": transaction_states().svg(),
    }


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    stale = [path for path, text in pictures().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(pictures()[path], encoding="utf-8")
    if stale:
        print(("stale" if "--check" in arguments else "written") + f": {', '.join(path.name for path in stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
