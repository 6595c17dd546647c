"""The graph of segments against a slow, obvious version, and that it grows as it would be made anew."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import SegmentId
from rollbridge.stream.epochs import EpochHistory, without_epochs
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.segment_graph import SegmentGraph

A = SegmentId.of(0, 0)


def cells(history: EpochHistory) -> list[KeyRange]:
    """The parts of the key space that no segment of any epoch divides."""
    bounds = {item.range.low for record in history.records for item in record.segments}
    return [KeyRange(low, high) for low, high in pairwise([*sorted(bounds), 1.0])]


def path(history: EpochHistory, position: float) -> list[SegmentId]:
    """The segments of a position, oldest first: one look into every epoch."""
    held = [next(item.id for item in record.segments if position in item.range) for record in history.records]
    return list(dict.fromkeys(held))


def anew(history: EpochHistory) -> SegmentGraph:
    """The graph of the same epochs, made in one go."""
    return EpochHistory(history.records, history.removed, history.foundation).graph


def same(one: SegmentGraph, other: SegmentGraph) -> bool:
    return one == other and list(one.nodes) == list(other.nodes) and one.sequence_bases == other.sequence_bases


@given(histories())
def test_edges_and_the_keys_they_share(history: EpochHistory) -> None:
    edges: defaultdict[tuple[SegmentId, SegmentId], list[KeyRange]] = defaultdict(list)
    for cell in cells(history):
        for before, after in pairwise(path(history, cell.low)):
            edges[before, after].append(cell)
    shared = {edge: KeyRange(parts[0].low, parts[-1].high) for edge, parts in edges.items()}
    nodes = history.graph.nodes.values()
    assert {(item, node.segment.id): keys for node in nodes for item, keys in node.predecessors.items()} == shared
    assert {(node.segment.id, item): keys for node in nodes for item, keys in node.successors.items()} == shared
    for node in nodes:
        for neighbours in (node.predecessors, node.successors):
            assert list(neighbours.values()) == sorted(neighbours.values())


@given(histories(), st.data())
def test_what_is_before_and_after_some_segments(history: EpochHistory, data: st.DataObject) -> None:
    before: dict[SegmentId, set[SegmentId]] = {segment: set() for segment in history.graph.nodes}
    for cell in cells(history):
        for older, newer in pairwise(path(history, cell.low)):
            before[newer] |= {older}
    while True:  # until nothing changes: whatever is before what is before
        more = {item: own.union(*(before[other] for other in own)) for item, own in before.items()}
        if more == before:
            break
        before.update(more)
    graph = history.graph
    chosen = data.draw(st.sets(st.sampled_from(list(graph.nodes))))
    assert graph.ancestors(chosen) == set[SegmentId]().union(*(before[item] for item in chosen))
    assert graph.descendants(chosen) == {item for item, own in before.items() if own & chosen}
    for one in graph.nodes.values():
        for other in graph.nodes.values():
            on_one_key = one.segment.range.overlaps(other.segment.range)
            assert one.segment.precedes(other.segment) == (on_one_key and one.segment.id in before[other.segment.id])


@given(histories(), st.data())
def test_a_walk_stops_where_it_is_told_to(history: EpochHistory, data: st.DataObject) -> None:
    graph = history.graph
    segments = st.sampled_from(list(graph.nodes))
    chosen, stops = data.draw(st.sets(segments)), data.draw(st.sets(segments))
    found = graph.ancestors(chosen, stop=stops.__contains__)
    whole = found.union(*(graph.ancestors([item]) for item in found & stops))
    assert whole == graph.ancestors(chosen)
    for item in found:
        assert any(after in chosen or (after in found and after not in stops) for after in graph.successors(item))


@given(histories())
def test_the_lineage_of_a_key(history: EpochHistory) -> None:
    for cell in cells(history):
        along = history.graph.key_lineage(history.active.segment_at(cell.low).id, cell.low)
        assert [node.segment.id for node in along] == path(history, cell.low)[::-1]


@given(histories())
def test_the_order_is_topological_and_roots_are_the_first_epoch(history: EpochHistory) -> None:
    seen: set[SegmentId] = set()
    for segment, node in history.graph.nodes.items():
        assert seen.issuperset(node.predecessors)
        assert (not node.predecessors) == (node.first == history.first)
        assert (not node.successors) == node.is_active
        seen.add(segment)


@given(histories())
def test_a_graph_that_grew_is_the_same_as_one_made_anew(history: EpochHistory) -> None:
    grown = history.before(1)
    assert same(grown.graph, anew(grown))
    for record in history.records[1:]:
        grown = grown.with_records(replace(record, sealed_ends=None))
        assert same(grown.graph, anew(grown))
        assert all(grown.graph.nodes[item.id].is_sealing for item in grown.ended_with(record.epoch))
        if record.sealed_ends is not None:
            grown = grown.with_sealed_ends(record.epoch, record.sealed_ends)
            assert same(grown.graph, anew(grown))
    assert same(grown.graph, history.graph)


@given(histories())
def test_several_epochs_at_once_and_ends_that_come_in_another_order(history: EpochHistory) -> None:
    grown = history.before(1)
    assert grown.graph.nodes
    grown = grown.with_records(*(replace(record, sealed_ends=None) for record in history.records[1:]))
    for record in reversed(history.records[1:]):
        grown = grown.with_sealed_ends(record.epoch, record.sealed_ends or {})
    assert same(grown.graph, history.graph)


@given(histories(), st.data())
def test_without_its_oldest_epochs_the_rest_of_the_graph_stays(history: EpochHistory, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, history.active.epoch))
    kept = without_epochs(history, first)
    assert kept.graph.nodes.keys() == {item.id for record in history.records[first:] for item in record.segments}
    for segment, node in kept.graph.nodes.items():
        whole = history.graph.nodes[segment]
        assert node.first == max(whole.first, first)
        assert node.predecessors == (whole.predecessors if whole.first > first else {})
        assert node == replace(whole, first=node.first, predecessors=node.predecessors)
        assert kept.graph.sequence_bases[segment] == history.graph.sequence_bases[segment]


def test_a_history_has_one_graph_and_removal_leaves_it_as_it_is() -> None:
    history = EpochHistory.create(even_ranges(2), 0)
    assert history.graph is history.graph
    assert history.with_removed([A]).graph is history.graph
    assert history.before(7).graph is history.graph


def test_what_no_epoch_has_is_refused() -> None:
    graph = EpochHistory.create(even_ranges(2), 0).graph
    for walk in (graph.node, graph.predecessors, graph.successors):
        with pytest.raises(InvalidRequestError, match="is not in the history"):
            walk(SegmentId.of(2, 0))
    for reach in (graph.ancestors, graph.descendants):
        with pytest.raises(InvalidRequestError, match="is not in the history"):
            reach([SegmentId.of(2, 0)])
