"""What a journal tells of a ZooKeeper that was set back, and what it must not take for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.metadata.journal import DELETED, deleted_by_hand, lost
from rollbridge.metadata.records import ControllerEpoch, Group, Truncation
from rollbridge.stream.config import Retention, StreamConfig, StreamState
from rollbridge.stream.late import LateNotes, LateSegment
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.positions import DeletedStream

GROUP, NAME = GroupName("sales", "main"), StreamName("sales", "orders")
CONFIG = StreamConfig(name=NAME, group=GROUP, created_ms=0, buffer_topic_id="id")
PATH, FORMER = paths.stream(NAME), DeletedStream(4, 77, 5)
GONE = {PATH: FORMER.node(NAME.stream).encode()}
S0, S1 = SegmentId.of(0, 0), SegmentId.of(1, 0)


def faults(
    journal: Mapping[str, bytes], nodes: Mapping[str, bytes], deleted_streams: tuple[str, ...] = ()
) -> list[str]:
    return lost(journal, nodes, deleted_streams, GROUP, 7)


def late(**looked_to: int) -> bytes:
    segments = {S0 if name == "s0" else S1: LateSegment(to, 1) for name, to in looked_to.items()}
    return LateNotes(segments).to_json()


def test_a_stream_that_was_deleted_is_not_given_back_by_a_backup() -> None:
    kept = (FORMER.node(NAME.stream),)
    assert faults(GONE, {PATH: CONFIG.to_json()}) == [f"stream {NAME} was deleted, ZooKeeper has it"]
    assert faults(GONE, {PATH: CONFIG.to_json()}, kept) == [f"stream {NAME} was deleted, ZooKeeper has it"]
    assert faults(GONE, {}, kept) == []
    assert faults(GONE, {PATH: replace(CONFIG, first_epoch=4).to_json()}, kept) == [], "created again, not noted yet"
    deleting = replace(CONFIG, state=StreamState.DELETING).to_json()
    assert faults(GONE, {PATH: deleting}, kept) == [], "its deletion is under way"


@pytest.mark.parametrize("there", [(), ("orders#3.77",), ("other#9.99",)])
def test_numbers_that_a_deleted_stream_has_used_are_not_given_out_again(there: tuple[str, ...]) -> None:
    assert faults(GONE, {}, there) == [f"ZooKeeper does not know which numbers deleted stream {NAME} has used"]


def test_numbers_are_known_by_a_floor_and_of_some_deletions_nothing_is_known() -> None:
    assert faults(GONE, {}, ("#9.100",)) == []
    assert faults({PATH: DELETED}, {PATH: CONFIG.to_json()}) == []


def test_settings_that_were_changed_since_the_backup_are_missed() -> None:
    longer = replace(CONFIG, retention=Retention(ms=30 * 86_400_000), revision=1)
    assert faults({PATH: longer.to_json()}, {PATH: CONFIG.to_json()}) == [
        f"the settings of stream {NAME} were changed, or segments prepared, or it was created again"
    ]
    assert faults({PATH: CONFIG.to_json()}, {PATH: longer.to_json()}) == [], "the journal follows, and may be behind"
    again = replace(CONFIG, first_epoch=4)
    assert faults({PATH: again.to_json()}, {PATH: replace(longer, revision=9).to_json()}) != []
    assert faults({PATH: replace(longer, revision=9).to_json()}, {PATH: again.to_json()}) == []


def test_segments_that_were_prepared_since_the_backup_are_missed_and_no_number_is_given_out_again() -> None:
    counted = replace(CONFIG, prepared=3)
    assert faults({PATH: counted.to_json()}, {PATH: CONFIG.to_json()}) != []
    assert faults({PATH: CONFIG.to_json()}, {PATH: counted.to_json()}) == [], "the journal follows, and may be behind"
    assert faults({PATH: counted.to_json()}, {PATH: replace(CONFIG, revision=1).to_json()}) == []


def test_late_records_that_were_forwarded_since_the_backup_are_missed() -> None:
    plain = {PATH: CONFIG.to_json()}
    journal = plain | {paths.late(NAME): late(s0=5)}
    missed = [f"late records of stream {NAME} were forwarded, of which ZooKeeper knows nothing"]
    assert faults(journal, plain) == missed
    assert faults(journal, plain | {paths.late(NAME): late(s0=4)}) == missed
    assert faults(journal, plain | {paths.late(NAME): late(s0=5)}) == []
    assert faults(journal, plain | {paths.late(NAME): late(s0=9)}) == []
    assert faults(plain, plain | {paths.late(NAME): late(s0=9)}) == []
    removed = {paths.truncation(NAME): Truncation(frozenset({S0})).to_json()}
    assert faults(journal, plain | removed) == [], "with a segment goes what was noted of it"
    both = plain | {paths.late(NAME): late(s0=5, s1=6)}
    assert faults(both, plain | {paths.late(NAME): late(s1=6)}) == faults(both, plain | {paths.late(NAME): late(s0=5)})
    assert faults(both, plain | {paths.late(NAME): late(s0=5)}) == missed


def test_of_more_late_records_than_fit_into_a_node_the_oldest_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbridge.stream.late.NOTED_MAX", 1)
    plain = {PATH: CONFIG.to_json()}
    both = plain | {paths.late(NAME): late(s0=5, s1=6)}
    assert faults(both, plain | {paths.late(NAME): late(s1=6)}) == []
    assert faults(both, plain | {paths.late(NAME): late(s0=5)}) != []


def test_a_number_that_the_group_had_is_missed_unless_a_repair_knows_of_it() -> None:
    path = paths.group(GROUP)
    had = {path: Group(GROUP, 0, number=7, former_numbers=(3,)).to_json()}
    lost_it = ["transactions of the group had ids of number 7, ZooKeeper knows 3"]
    assert faults(had, {path: Group(GROUP, 0, number=3).to_json()}) == lost_it
    assert faults(had, {}) != []
    assert faults(had, {path: Group(GROUP, 0, former_numbers=(3, 7)).to_json()}) == []
    assert faults(had, {path: Group(GROUP, 0, number=8).to_json()}) == []
    assert faults({}, had) == []


def test_values_of_counters_are_no_reason_to_say_that_something_was_lost() -> None:
    """Whoever may write them may set them back."""
    assert faults({paths.TRANSACTION_COUNTER: b"90"}, {paths.TRANSACTION_COUNTER: b"x"}) == []
    assert faults({paths.counter(GROUP): b"7 90 3 0 0"}, {}) == []


LED = {paths.controller(GROUP): ControllerEpoch(6, "", 0).to_json()}
WHOLE = {PATH: CONFIG.to_json(), paths.epoch(NAME, 0): b"{}", paths.truncation(NAME): b"{}", paths.late(NAME): b"{}"}


def given_back(journal: Mapping[str, bytes], nodes: Mapping[str, bytes], next_epoch: int = 7) -> set[str]:
    return set(deleted_by_hand(journal, nodes, GROUP, next_epoch))


def test_what_stood_in_zookeeper_when_a_leader_came_that_it_knows_was_deleted_by_hand() -> None:
    assert given_back(WHOLE | LED, {}) == WHOLE.keys() | {paths.epochs(NAME)}
    settings_changed = {path: WHOLE[path] for path in list(WHOLE)[1:]} | LED | {PATH: WHOLE[PATH]}
    assert given_back(settings_changed, {}) == WHOLE.keys() | {paths.epochs(NAME)}, "its first epoch is as old"
    for path in (paths.truncation(NAME), paths.late(NAME)):
        assert given_back(WHOLE | LED, {place: value for place, value in WHOLE.items() if place != path}) == {path}


def test_what_a_backup_may_have_lacked_is_not_given_back() -> None:
    assert given_back(LED | WHOLE, {}) == set(), "created since that leader came"
    assert given_back(WHOLE | LED, {}, next_epoch=6) == set(), "ZooKeeper does not know that leader"
    assert given_back(WHOLE, {}) == set()
    again = (
        {paths.epoch(NAME, 0): b"{}", paths.late(NAME): b"{}"} | LED | {PATH: replace(CONFIG, first_epoch=4).to_json()}
    )
    assert given_back(again, {}) == set(), "only a former life is as old"
    noted_since = {PATH: WHOLE[PATH]} | LED | {paths.late(NAME): b"{}"}
    assert given_back(noted_since, {PATH: WHOLE[PATH]}) == set()
    assert given_back({PATH: DELETED, paths.epoch(NAME, 0): b"{}"} | LED, {}) == set(), "deleted with a word"
    assert given_back({PATH: WHOLE[PATH]} | LED, {PATH: WHOLE[PATH]}) == set(), "nothing is missing"
