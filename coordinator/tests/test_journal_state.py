"""What a leader still has to append to its journal."""

from __future__ import annotations

from coordinator.tests.makers import GROUP, Bench
from rollbridge.metadata import paths
from rollbridge.stream.names import StreamName

NAME = StreamName("a", "s")


def test_what_else_is_appended_hides_nothing_of_streams_that_is_not() -> None:
    group = Bench({str(NAME): 1}).group
    whole = {paths.stream(NAME), paths.epoch(NAME, 0)}
    group.journal.adopt({paths.counter(GROUP): b"1"})
    assert group.journal.changes(group.streams, {}, ()).keys() == whole
    group.journal.adopt(group.journal.changes(group.streams, {}, ()))
    group.journal.saw(group.streams, {})
    assert group.journal.changes(group.streams, {}, ()) == {}
    assert group.journal.nodes.keys() == whole | {paths.counter(GROUP)}
