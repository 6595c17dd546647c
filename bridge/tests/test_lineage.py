"""The lineage and its picture: every segment once, in its place, with its links, and safe to open."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given

from bridge.tests.strategies import histories
from rollbridge.base.ids import SegmentId
from rollbridge.stream.epochs import EpochCause, EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.picture import DrawnLoad, lineage_svg

SVG = "{http://www.w3.org/2000/svg}"


@given(histories())
def test_nodes_agree_with_the_epochs(history: EpochHistory) -> None:
    nodes = history.graph.nodes
    assert nodes.keys() == {item.id for record in history.records for item in record.segments}
    for segment, node in nodes.items():
        assert node.segment.id == segment
        present = [record.epoch for record in history.records if node.segment in record.segments]
        after = history.next_epoch if node.successor_epoch is None else node.successor_epoch
        assert present == list(range(node.first, after))
        assert node.is_active == (segment in history.active.segment_ids)
        ends = {} if node.is_active else history.record(after).sealed_ends or {}
        assert node.sealed_end == ends.get(segment) == history.sealed_end(segment)


@given(histories())
def test_a_partition_number_names_one_segment_for_good(history: EpochHistory) -> None:
    numbers = history.graph.partitions
    assert sorted(numbers.values()) == list(range(len(numbers)))
    assert [numbers[item.id] for item in history.records[0].segments] == list(range(len(history.records[0].segments)))
    for epoch in range(1, history.next_epoch):
        before = history.before(epoch).graph.partitions
        assert before == {segment: number for segment, number in numbers.items() if segment in before}


def boxes(svg: str) -> dict[str, ElementTree.Element]:
    found = [item for item in ElementTree.fromstring(svg).iter(f"{SVG}rect") if "id" in item.attrib]
    assert len({item.attrib["id"] for item in found}) == len(found)
    return {item.attrib["id"]: item for item in found}


def name_of(segment: SegmentId) -> str:
    return f"segment-{segment.number}-{segment.epoch}"


@given(histories())
def test_every_segment_is_drawn_once_with_a_tooltip_that_names_it(history: EpochHistory) -> None:
    drawn = boxes(lineage_svg(history, "s/t"))
    assert drawn.keys() == {name_of(segment) for segment in history.segments()}
    for segment, item in history.segments().items():
        tooltip = drawn[name_of(segment)].findtext(f"{SVG}title") or ""
        assert tooltip.startswith(f"segment {segment} holds {item.range},")
        end = history.sealed_end(segment)
        assert tooltip.endswith("active" if end is None else f"ends at {end:,}")


@given(histories())
def test_boxes_stay_inside_the_picture_and_apart(history: EpochHistory) -> None:
    root = ElementTree.fromstring(lineage_svg(history, "s/t"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    places = [
        (float(box.attrib["x"]), float(box.attrib["y"]), float(box.attrib["width"]), float(box.attrib["height"]))
        for box in root.iter(f"{SVG}rect")
        if "id" in box.attrib
    ]
    for place, (x, y, w, h) in enumerate(places):
        assert 0 <= x < x + w <= width
        assert 0 <= y <= y + h <= height
        for a, b, c, d in places[:place]:
            assert x >= a + c or a >= x + w or y >= b + d or b >= y + h


@given(histories())
def test_one_arrow_for_each_link(history: EpochHistory) -> None:
    arrows = list(ElementTree.fromstring(lineage_svg(history, "t")).iter(f"{SVG}path"))
    assert len([item for item in arrows if item.attrib["class"] == "head"]) == sum(
        len(node.predecessors) for node in history.graph.nodes.values()
    )


@pytest.mark.parametrize(
    "title", ["a/b", '<script>alert("x")</script>', "&amp;", "]]>", "'\"", "\x00\x07\ud800", "東京/注文", ""]
)
def test_any_title_is_shown_as_text(title: str) -> None:
    svg = lineage_svg(EpochHistory.create(even_ranges(2), 0), title)
    root = ElementTree.fromstring(svg.encode())
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in title)
    assert (root.findtext(f"{SVG}title") or "") == shown
    assert not list(root.iter(f"{SVG}script"))


def test_colours_say_why_a_segment_was_made() -> None:
    history = EpochHistory.create(even_ranges(2), 0)
    history = history.with_records(history.plan_scale([0], [KeyRange(0.0, 0.5)], 1))
    history = history.with_records(*history.plan_rolling(0, 2))
    drawn = boxes(lineage_svg(history, "s/t"))
    assert {name: box.attrib["class"] for name, box in drawn.items()} == {
        "segment-0-0": "box create",
        "segment-1-0": "box create",
        "segment-2-1": "box scale",
        "segment-0-2": "box rolled",
        "segment-1-2": "box rolled",
        "segment-1-3": "box again active",
        "segment-2-3": "box again active",
    }


def texts_of(svg: str) -> list[str]:
    return [item.text or "" for item in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_what_active_segments_have_to_carry_stands_in_their_boxes() -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    history = history.with_records(history.plan_scale([0], even_ranges(4), 1)).with_sealed_ends(
        1, {SegmentId.of(0, 0): 9}
    )
    first, second, third, fourth = (item.id for item in history.active.segments)
    loads = {
        first: DrawnLoad(1234.5, 3_456_789),
        second: DrawnLoad(411.5, None),
        third: DrawnLoad(None, 120),
        fourth: DrawnLoad(None, None),
    }
    svg = lineage_svg(history, "s/t", loads)
    assert {"1.23k/s 3.3M", "412/s, –", "–/s, 120 B", "active", "ends at 9"} <= set(texts_of(svg))
    tooltip = boxes(svg)[name_of(first)].findtext(f"{SVG}title") or ""
    assert tooltip.endswith("active; 1.23k offsets per second, 3.3 MiB on disk")
    bars = [item for item in ElementTree.fromstring(svg).iter(f"{SVG}rect") if item.attrib["class"] == "bar"]
    heights = [float(item.attrib["height"]) for item in bars]
    assert len(heights) == 2, "what does not grow, or is not known, has none"
    assert heights[0] / heights[1] == pytest.approx(3, rel=0.01)


@given(histories())
def test_without_loads_the_picture_says_nothing_of_them(history: EpochHistory) -> None:
    svg = lineage_svg(history, "s/t")
    assert 'class="bar"' not in svg
    assert not any("/s" in text for text in texts_of(svg)[1:])


def test_the_picture_brings_its_own_background_for_light_and_dark_viewers() -> None:
    svg = lineage_svg(EpochHistory.create(even_ranges(2), 0), "s/t")
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    for name in ("paper", *("create", "scale", "rolled", "again")):
        assert re.search(rf"\.{name} {{ fill: #", light)
        assert re.search(rf"\.{name} {{ fill: #", dark)
    assert '<rect class="paper"' in svg


def test_labels_fit_into_narrow_columns() -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    for number in range(60):
        history = history.with_records(history.plan_scale([number], even_ranges(1), number))
        history = history.with_sealed_ends(number + 1, {SegmentId.of(number, number): 123_456_789_012})
    root = ElementTree.fromstring(lineage_svg(history, "s/t"))
    texts = [item.text or "" for item in root.iter(f"{SVG}text")]
    assert "59.#59" in texts
    assert "123.5G" in texts
    assert float(root.attrib["width"]) < 60 * 60


def test_an_epoch_says_when_and_why_it_was_made() -> None:
    history = EpochHistory.create(even_ranges(1), 1_388_534_400_000)
    titles = [item.text for item in ElementTree.fromstring(lineage_svg(history, "s/t")).iter(f"{SVG}title")]
    assert f"epoch 0: {EpochCause.CREATE}, refers to epoch 0, planned 2014-01-01 00:00:00+00:00" in titles
