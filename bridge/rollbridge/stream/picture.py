"""Picture of an epoch history as SVG: epochs from left to right, the key space from bottom to top, a box per segment.

A box spans the epochs in which its segment is active, so a box that touches it on the right is a successor. Colours
give the cause of a segment. The picture brings its own background, for light and dark viewers, and is plain SVG 1.1
with CSS. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from rollbridge.base.ids import SegmentId
from rollbridge.base.text import printable
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.segment_graph import SegmentNode

_CLASS: Final = {
    EpochCause.CREATE: "create",
    EpochCause.SCALE: "scale",
    EpochCause.ROLLING_TRANSACTIONS: "rolled",
    EpochCause.ROLLING_ACTIVE: "again",
    EpochCause.GROWN: "create",
}
_LEGEND: Final = {
    EpochCause.CREATE: "created",
    EpochCause.SCALE: "scale",
    EpochCause.ROLLING_TRANSACTIONS: "rolling commit: holds the transactions",
    EpochCause.ROLLING_ACTIVE: "rolling commit: active again",
    EpochCause.GROWN: "partitions added",
}
_STYLE: Final = """
svg { font-family: system-ui, "DejaVu Sans", Verdana, sans-serif; font-size: 11px }
.paper { fill: #ffffff }
.title { font-size: 15px; font-weight: 600; fill: #1d2430 }
text { fill: #1d2430 }
.faint { fill: #667080 }
.epoch { font-weight: 600; font-size: 12px }
.grid { stroke: #d9dee5; stroke-width: 1 }
.link { stroke: #667080; stroke-width: 1.2; fill: none }
.head { fill: #667080 }
.box { stroke-width: 1.2 }
.create { fill: #d3e5f6; stroke: #2f6da8 }
.scale { fill: #d2eddf; stroke: #1d8557 }
.rolled { fill: #fde5bf; stroke: #b87503 }
.again { fill: #e9dbf3; stroke: #8250a8 }
.active { stroke-width: 2.4 }
.bar { fill: #1d2430; fill-opacity: .55 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14181f }
  .title, text { fill: #e7ebf1 }
  .faint { fill: #98a3b3 }
  .grid { stroke: #2b333e }
  .link { stroke: #98a3b3 }
  .head { fill: #98a3b3 }
  .bar { fill: #e7ebf1 }
  .create { fill: #1c3b58; stroke: #69a8e0 }
  .scale { fill: #17432f; stroke: #4fc08d }
  .rolled { fill: #57400f; stroke: #e8a93a }
  .again { fill: #402a54; stroke: #b98bdc }
}
"""

_LEFT: Final = 74.0
_RIGHT: Final = 24.0
_TOP: Final = 92.0
_BOTTOM: Final = 50.0
_CHARACTER: Final = 6.4
"""Width of a character at 11 px, in px, rounded up."""
_LINE: Final = 14.0
_HINT: Final = "thick frame: active; number: offset at which the segment ends"
_LOAD_HINT: Final = "; of active ones: offsets per second, bytes, a bar for the share"
_BAR: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales from epochs and keys to pixels."""

    column: float
    gap: float
    height: float
    first: int
    epochs: int

    @property
    def right(self) -> float:
        return _LEFT + self.column * self.epochs - self.gap

    def left_of(self, epoch: int) -> float:
        return _LEFT + self.column * (epoch - self.first)

    def right_of(self, epoch: int) -> float:
        return self.left_of(epoch + 1) - self.gap

    def last_of(self, node: SegmentNode) -> int:
        """Return the last epoch in which a segment is active."""
        return (self.first + self.epochs if node.successor_epoch is None else node.successor_epoch) - 1

    def y(self, position: float) -> float:
        return _TOP + self.height * (1.0 - position)


@dataclass(frozen=True, slots=True)
class DrawnLoad:
    """Measured load of an active segment.

    Attributes:
        per_s: Growth in offsets per second; None if unknown.
        bytes: Its size on the disk of its leader; None if unknown.
    """

    per_s: float | None
    bytes: int | None


def lineage_svg(history: EpochHistory, title: str, loads: Mapping[SegmentId, DrawnLoad] | None = None) -> str:
    """Draw the lineage of a stream's segments.

    Args:
        history: Its epochs; up to about fifty stay readable at full size.
        title: Heading, such as the name of the stream; any text.
        loads: Of active segments; drawn in the box of each, with a bar for its share of the rate.

    Returns:
        An SVG document. Every segment is one ``rect`` with the id ``segment-N-E`` and a tooltip with all details.
    """
    nodes = history.graph.nodes.values()
    scales = _scales(history)
    height = _TOP + scales.height + _BOTTOM
    legend, legend_right = _legend({record.cause for record in history.records}, height - 16)
    count = len(history.records)
    described = f"{count} epoch{'s' * (count != 1)}, {len(nodes)} segment{'s' * (len(nodes) != 1)}"
    if history.first:
        described += f"; those before epoch {history.first} have been dropped"
    loads = loads or {}
    subtitle = f"{described}  ·  {_HINT}{_LOAD_HINT if loads else ''}"
    width = max(scales.right, legend_right, 16 + len(subtitle) * _CHARACTER) + _RIGHT
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
        f'<title id="title">{_clean(title)}</title>',
        f'<desc id="description">Segments of the stream over its epochs: {described}.</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_n(width)}" height="{_n(height)}"/>',
        _text(16, 28, title, "title"),
        _text(16, 46, subtitle, "faint"),
        *_axes(history, scales),
        *(_box(node, history.record(node.first).cause, scales, loads) for node in nodes),
        *_bars(history, scales, loads),
        *(_arrow(node.first, shared, scales) for node in nodes for shared in node.predecessors.values()),
        *(label for node in nodes for label in _labels(node, scales, loads)),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scales(history: EpochHistory) -> _Scales:
    epochs = len(history.records)
    column = min(118.0, max(54.0, 1180.0 / epochs))
    narrowest = min(item.range.high - item.range.low for item in history.segments().values())
    # Leave room for two lines of text in the narrowest range, within reason.
    height = min(900.0, max(260.0, 2 * (_LINE + 2) / narrowest))
    return _Scales(column, gap=min(18.0, column * 0.2), height=height, first=history.first, epochs=epochs)


def _axes(history: EpochHistory, scales: _Scales) -> Iterator[str]:
    for position in _ticks(history, scales):
        y = scales.y(position)
        yield f'<line class="grid" x1="{_n(_LEFT - 6)}" y1="{_n(y)}" x2="{_n(scales.right)}" y2="{_n(y)}"/>'
        yield _text(_LEFT - 10, y + 4, f"{position:.4g}", "faint", anchor="end")
    yield _text(_LEFT - 10, _TOP - 28, "epoch", "faint", anchor="end")
    yield _text(_LEFT - 10, _TOP - 13, "refers to", "faint", anchor="end")
    for record in history.records:
        middle = (scales.left_of(record.epoch) + scales.right_of(record.epoch)) / 2
        yield f"<g><title>{_clean(_about_epoch(record))}</title>"
        yield _text(middle, _TOP - 28, str(record.epoch), "epoch", anchor="middle")
        own = record.reference_epoch == record.epoch
        yield _text(middle, _TOP - 13, "itself" if own else str(record.reference_epoch), "faint", anchor="middle")
        yield "</g>"


def _ticks(history: EpochHistory, scales: _Scales) -> list[float]:
    """Return the ends of ranges, those of the newest epoch first, whose labels do not overlap."""
    ends = [1.0, 0.0, *(item.range.low for record in reversed(history.records) for item in record.segments)]
    chosen: list[float] = []
    for end in ends:
        if all(abs(scales.y(end) - scales.y(other)) >= _LINE for other in chosen):
            chosen.append(end)
    return sorted(chosen)


def _box(node: SegmentNode, cause: EpochCause, scales: _Scales, loads: Mapping[SegmentId, DrawnLoad]) -> str:
    x, y = scales.left_of(node.first), scales.y(node.segment.range.high)
    last = scales.last_of(node)
    width = scales.right_of(last) - x
    height = scales.y(node.segment.range.low) - y
    inset = min(1.5, height / 4)
    names = f"box {_CLASS[cause]}" + (" active" if node.is_active else "")
    active = f"epoch {last}" if node.first == last else f"epochs {node.first} to {last}"
    about = f"segment {node.segment.id} holds {node.segment.range}, active in {active}, {cause}; {_end_of(node)}"
    if load := loads.get(node.segment.id):
        about += f"; {_rate(load.per_s)} offsets per second, {_bytes(load.bytes)} on disk"
    return (
        f'<rect id="segment-{node.segment.id.number}-{node.segment.id.epoch}" class="{names}" rx="3" '
        f'x="{_n(x)}" y="{_n(y + inset)}" width="{_n(width)}" height="{_n(height - 2 * inset)}">'
        f"<title>{_clean(about)}</title></rect>"
    )


def _bars(history: EpochHistory, scales: _Scales, loads: Mapping[SegmentId, DrawnLoad]) -> Iterator[str]:
    """Yield a bar at the right side of each active segment's box, as high as its share of the rate of all."""
    whole = sum(load.per_s or 0.0 for load in loads.values())
    for segment in history.active.segments:
        load = loads.get(segment.id)
        if not whole or load is None or not load.per_s:
            continue
        low = scales.y(segment.range.low) - 3
        height = (low - scales.y(segment.range.high) - 3) * load.per_s / whole
        x = scales.right_of(history.active.epoch) - _BAR - 2
        yield (
            f'<rect class="bar" x="{_n(x)}" y="{_n(low - height)}" width="{_n(_BAR)}" height="{_n(max(height, 0.5))}"/>'
        )


def _rate(per_s: float | None) -> str:
    """Return a rate in few characters."""
    if per_s is None:
        return "–"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:.3g}"


def _bytes(size: float | None) -> str:
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _load_texts(load: DrawnLoad | None) -> list[str]:
    """Return what is said of a load, the longest form first; nothing where nothing was measured."""
    if load is None or (load.per_s is None and load.bytes is None):
        return []
    rate, size = f"{_rate(load.per_s)}/s", _bytes(load.bytes)
    short = size.replace(" ", "").removesuffix("iB").removesuffix("B")
    return [f"{rate}, {size}", f"{rate} {size}", f"{rate} {short}", rate if load.per_s is not None else size]


def _labels(node: SegmentNode, scales: _Scales, loads: Mapping[SegmentId, DrawnLoad]) -> Iterator[str]:
    """Yield name and end of a segment, as far as they fit into its box."""
    width = scales.right_of(scales.last_of(node)) - scales.left_of(node.first)
    height = scales.y(node.segment.range.low) - scales.y(node.segment.range.high)
    middle = scales.left_of(node.first) + width / 2
    segment = node.segment.id
    name = _fitting([str(segment), f"{segment.number}.#{segment.epoch}", str(segment.number)], width)
    load = _fitting(_load_texts(loads.get(segment)), width - _BAR - 3)
    end = load or _fitting([_end_of(node), *_shorter_ends_of(node)], width)
    if name is None or height < _LINE:
        return
    y = (scales.y(node.segment.range.low) + scales.y(node.segment.range.high)) / 2 + 4
    if end is None or height < 2 * _LINE + 2:
        yield _text(middle, y, name, anchor="middle")
    else:
        yield _text(middle, y - 7, name, anchor="middle")
        yield _text(middle, y + 7, end, "faint", anchor="middle")


def _fitting(texts: Sequence[str], width: float) -> str | None:
    return next((text for text in texts if len(text) * _CHARACTER <= width - 4), None)


def _arrow(epoch: int, shared: KeyRange, scales: _Scales) -> str:
    y = scales.y((shared.low + shared.high) / 2)
    start, end = scales.right_of(epoch - 1) + 1.5, scales.left_of(epoch) - 1.5
    return (
        f'<path class="link" d="M{_n(start)} {_n(y)}H{_n(end - 3)}"/>'
        f'<path class="head" d="M{_n(end)} {_n(y)}l-5 -3v6z"/>'
    )


def _legend(causes: set[EpochCause], y: float) -> tuple[list[str], float]:
    """Return the legend of the colours, and the x coordinate of its right end."""
    x = _LEFT
    parts: list[str] = []
    for cause, words in _LEGEND.items():
        if cause in causes:
            parts.append(f'<rect class="{_CLASS[cause]}" rx="2" x="{_n(x)}" y="{_n(y - 9)}" width="14" height="11"/>')
            parts.append(_text(x + 20, y, words))
            x += 20 + len(words) * _CHARACTER + 12
    return parts, x - 12


def _about_epoch(record: EpochRecord) -> str:
    made = datetime.fromtimestamp(record.created_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    return f"epoch {record.epoch}: {record.cause}, refers to epoch {record.reference_epoch}, planned {made}"


def _end_of(node: SegmentNode) -> str:
    if node.is_active:
        return "active"
    return "being sealed" if node.sealed_end is None else f"ends at {node.sealed_end:,}"


def _shorter_ends_of(node: SegmentNode) -> list[str]:
    if node.sealed_end is None:
        return [] if node.is_active else ["sealing"]
    short = str(node.sealed_end)
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if node.sealed_end >= size:
            short = f"{node.sealed_end / size:.4g}{unit}"
            break
    return [f"end {short}", short]


def _text(x: float, y: float, text: str, names: str = "", anchor: str = "start") -> str:
    named = f" class={quoteattr(names)}" if names else ""
    return f'<text{named} x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{_clean(text)}</text>'


def _clean(text: str) -> str:
    return escape(printable(text))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
