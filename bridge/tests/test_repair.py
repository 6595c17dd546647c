"""The plan of a repair: what counts up is raised, what was lost is written again, and it can be stopped anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from rollbridge.base.ids import SHARED_MAX, Epoch, SegmentId, TransactionId
from rollbridge.errors import CorruptDataError, InvalidRequestError, NotFoundError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import CommittingTransactions, EpochTransition, Roll
from rollbridge.metadata.client_sessions import ClientSession
from rollbridge.metadata.journal import (
    COUNTER_JUMP,
    LOG_BEGINS,
    VERSION_JUMP,
    GroupEvidence,
    RepairStep,
    begin_log,
    highest_number,
    plan,
)
from rollbridge.metadata.records import (
    ControllerEpoch,
    CreateNode,
    DeleteNode,
    Group,
    NodeOperation,
    SetNode,
    Truncation,
    bytes_of,
)
from rollbridge.stream.config import Retention, StreamConfig
from rollbridge.stream.epochs import EpochCause, EpochRecord, TruncatedHistory
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.late import Forwarding, LateNotes, LateSegment
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.segment_graph import Segment

GROUP = GroupName("sales", "main")
STREAM, YOUNG, GONE = (StreamName("sales", name) for name in ("orders", "young", "gone"))
OPEN = TransactionId.of(0, 70)
NOW_MS = 6_000_000


class Tree:
    """ZooKeeper's nodes with their versions; like it, a multi is carried out whole or raises KeyError."""

    def __init__(self, nodes: Mapping[str, bytes]) -> None:
        self.values = dict(nodes)
        self.versions = dict.fromkeys(nodes, 0)

    def multi(self, batch: Iterable[NodeOperation]) -> None:
        for item in batch:
            if isinstance(item, CreateNode):
                parent = item.path.rpartition("/")[0]
                if item.path in self.values or parent not in self.values:
                    raise KeyError(item.path)
                self.values[item.path], self.versions[item.path] = item.value, 0
            elif isinstance(item, SetNode):
                self.versions[item.path] += 1
                self.values[item.path] = item.value
            elif isinstance(item, DeleteNode):
                if any(path.startswith(f"{item.path}/") for path in self.values):
                    raise KeyError(item.path)
                del self.values[item.path], self.versions[item.path]

    def below(self, path: str) -> dict[str, bytes]:
        return {item: value for item, value in self.values.items() if item == path or item.startswith(f"{path}/")}


def with_parents(nodes: Mapping[str, bytes]) -> dict[str, bytes]:
    found = {"": b""}
    for path in nodes:
        parts = path.split("/")
        found |= {"/".join(parts[:count]): b"" for count in range(2, len(parts))}
    return found | dict(nodes)


def epoch(number: int, *, first: int = 0, sealed: bool = True) -> bytes:
    segments = (Segment(SegmentId.of(number - first, number), KeyRange(0.0, 1.0)),)
    ends = {SegmentId.of(number - first - 1, number - 1): 5} if number > first else {}
    cause = EpochCause.SCALE if number > first else EpochCause.CREATE
    return EpochRecord(Epoch(number), Epoch(number), segments, cause, 0, ends if sealed else None).to_json()


def stream(name: StreamName, numbers: Iterable[int], *, first: int = 0, identity: str = "id") -> dict[str, bytes]:
    config = StreamConfig(name=name, group=GROUP, created_ms=0, buffer_topic_id=identity, first_epoch=first)
    records = {paths.epoch(name, number): epoch(number, first=first) for number in numbers}
    return {paths.stream(name): config.to_json(), paths.epochs(name): b""} | records


def journaled(nodes: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: value for path, value in nodes.items() if not path.endswith("/epochs")}


def controller(number: int) -> dict[str, bytes]:
    return {paths.controller(GROUP): ControllerEpoch(number, "a", 0).to_json()}


BACKUP = with_parents(
    stream(STREAM, [0, 1])
    | stream(GONE, [0], identity="gone-id")
    | controller(7)
    | {
        paths.TRANSACTION_COUNTER: b"50",
        paths.session(GROUP, "app"): ClientSession("app", 3, 0).to_json(),
        f"{paths.sessions(GROUP)}": b"",
        paths.parts(GROUP, OPEN): b"",
        f"{paths.requests(GROUP)}/request-1": b"{}",
        f"{paths.transactions(GROUP)}/00/old": b"{}",
        paths.deleted_streams("sales"): b"",
    }
)
REMOVED = Truncation(frozenset({SegmentId.of(0, 0)})).to_json()
JOURNAL = (
    journaled(stream(STREAM, [0, 1, 2, 3]) | stream(YOUNG, [0, 1]) | controller(19))
    | {paths.truncation(STREAM): REMOVED, paths.TRANSACTION_COUNTER: b"90"}
    | {paths.stream(GONE): b"gone#4.77"}
)
EVIDENCE = GroupEvidence(
    name=GROUP,
    journal=JOURNAL,
    counter=120,
    ongoing=[OPEN, TransactionId.of(0, 119)],
    sessions={"app": 9, "other": 2, "unnamed": 0},
    topics={STREAM.buffer_topic(): "id", STREAM.segment_topic(SegmentId.of(3, 3)): "s"},
)


def repaired(nodes: Mapping[str, bytes], evidence: GroupEvidence = EVIDENCE) -> Tree:
    tree = Tree(nodes)
    for batch in batches(plan(tree.values, [evidence], NOW_MS)):
        tree.multi(batch)
    return tree


def batches(steps: Iterable[RepairStep]) -> list[tuple[NodeOperation, ...]]:
    return [batch for step in steps for batch in step.batches]


def test_what_counts_up_is_raised_above_everything_that_was_seen() -> None:
    tree = repaired(BACKUP)
    assert int(tree.values[paths.TRANSACTION_COUNTER]) == 121 + COUNTER_JUMP
    assert ControllerEpoch.from_json(tree.values[paths.controller(GROUP)]).epoch == 19 + VERSION_JUMP
    assert tree.versions[paths.controller(GROUP)] >= 19 + VERSION_JUMP - 7, "a leader of before knows its version"
    for item in EVIDENCE.ongoing:
        assert tree.versions[paths.parts(GROUP, item)] >= VERSION_JUMP
    known = {path: ClientSession.from_json(value) for path, value in tree.below(paths.sessions(GROUP)).items() if value}
    assert {item.client_name for item in known.values()} == {"app", "other"}
    assert all(item.epoch > max(9, NOW_MS // 60_000) for item in known.values())


@pytest.mark.parametrize(
    ("zookeeper", "journal", "seen", "expected"), [(50, 90, 20, 90), (50, 40, -1, 50), (0, 0, 120, 121)]
)
def test_the_counter_goes_on_from_the_highest_that_anybody_knows(
    zookeeper: int, journal: int, seen: int, expected: int
) -> None:
    nodes = BACKUP | {paths.TRANSACTION_COUNTER: b"%d" % zookeeper}
    evidence = replace(EVIDENCE, counter=seen, journal={**JOURNAL, paths.TRANSACTION_COUNTER: b"%d" % journal})
    assert int(repaired(nodes, evidence).values[paths.TRANSACTION_COUNTER]) == expected + COUNTER_JUMP


def test_streams_are_exactly_what_the_journal_says() -> None:
    tree = repaired(BACKUP)
    for name in (STREAM, YOUNG):
        below = journaled(tree.below(paths.stream(name)))
        assert below == {path: value for path, value in JOURNAL.items() if path.startswith(paths.stream(name))}
    assert not tree.below(paths.stream(GONE)), "it was deleted after the backup"
    assert f"{paths.deleted_streams('sales')}/gone#4.77" in tree.values


def test_the_count_of_prepared_segments_is_restored() -> None:
    counted = replace(StreamConfig.from_json(JOURNAL[paths.stream(STREAM)]), prepared=3).to_json()
    tree = repaired(BACKUP, replace(EVIDENCE, journal={**JOURNAL, paths.stream(STREAM): counted}))
    assert tree.values[paths.stream(STREAM)] == counted


def test_what_zookeeper_has_newer_than_a_journal_whose_leader_has_died_stays() -> None:
    """Only counters were set back, and that is what the repair is for."""
    config = StreamConfig.from_json(JOURNAL[paths.stream(STREAM)])
    foundation = TruncatedHistory(Epoch(1), 0, (5,), ends=(5,))
    notes = LateNotes({SegmentId.of(1, 1): LateSegment(9, 2)}, revision=4)
    newer = {
        paths.stream(STREAM): replace(config, retention=Retention(ms=9), revision=1).to_json(),
        paths.epoch(STREAM, 4): epoch(4),
        paths.truncation(STREAM): Truncation(frozenset({SegmentId.of(1, 1)}), foundation=foundation).to_json(),
        paths.late(STREAM): replace(notes, revision=5).to_json(),
    }
    journal = {
        **JOURNAL,
        paths.epoch(STREAM, 3): epoch(3, sealed=False),
        paths.late(STREAM): notes.to_json(),
    }
    nodes = BACKUP | stream(STREAM, [1, 2, 3]) | newer
    del nodes[paths.epoch(STREAM, 0)]  # it was dropped, as the foundation says
    evidence = replace(EVIDENCE, journal=journal)
    assert repaired(nodes, evidence).below(paths.stream(STREAM)) == Tree(nodes).below(paths.stream(STREAM))
    begun = replace(notes, forwarding=Forwarding(SegmentId.of(1, 1), 9, 10, {SegmentId.of(4, 4): 0}), revision=6)
    lost = repaired(nodes, replace(evidence, journal={**journal, paths.late(STREAM): begun.to_json()}))
    assert lost.values[paths.late(STREAM)] == begun.to_json(), "its copies may have been committed"


def test_a_life_that_the_journal_does_not_know_yet_stays_as_it_is() -> None:
    nodes = BACKUP | stream(STREAM, [6, 7], first=6, identity="new") | {paths.late(STREAM): LateNotes().to_json()}
    for number in (0, 1):
        del nodes[paths.epoch(STREAM, number)]
    assert repaired(nodes).below(paths.stream(STREAM)) == Tree(nodes).below(paths.stream(STREAM))


def test_a_deletion_that_is_not_done_is_left_to_the_leader() -> None:
    evidence = replace(EVIDENCE, topics={**EVIDENCE.topics, GONE.buffer_topic(): "gone-id"})
    assert repaired(BACKUP, evidence).below(paths.stream(GONE)) == Tree(BACKUP).below(paths.stream(GONE))


def test_epochs_that_were_dropped_after_the_backup_go() -> None:
    journal = {path: value for path, value in JOURNAL.items() if path != paths.epoch(STREAM, 0)}
    assert paths.epoch(STREAM, 0) in repaired(BACKUP, replace(EVIDENCE, journal=journal)).values, (
        "it says nothing of it"
    )
    journal[paths.truncation(STREAM)] = Truncation(foundation=TruncatedHistory(Epoch(1), 0, (5,), ends=(5,))).to_json()
    assert paths.epoch(STREAM, 0) not in repaired(BACKUP, replace(EVIDENCE, journal=journal)).values


def test_nothing_of_a_former_life_is_left_in_a_stream_that_was_created_again() -> None:
    old = {paths.truncation(STREAM): REMOVED, paths.retention(STREAM): b"{}", f"{paths.stream(STREAM)}/late": b"{}"}
    journal = journaled(stream(STREAM, [6, 7], first=6, identity="new"))
    evidence = replace(EVIDENCE, journal=journal, topics={})
    assert journaled(repaired(BACKUP | old, evidence).below(paths.stream(STREAM))) == journal
    kept = repaired(BACKUP | old).below(paths.stream(STREAM))
    assert paths.retention(STREAM) in kept, "it is the same life"


def test_what_was_finished_since_is_not_finished_again_and_what_was_not_is() -> None:
    scaling, committing = paths.scaling(GROUP), paths.committing(GROUP)
    for new, is_done in ((2, True), (3, True), (4, False)):
        scale = EpochTransition(STREAM, "request-1", new, (1,), (KeyRange(0.0, 1.0),), 0, 7)
        roll = CommittingTransactions((OPEN,), (Roll(str(STREAM), 0, 1, new - 1, new),), 0, 7)
        assert (scaling not in repaired(BACKUP | {scaling: scale.to_json()}).values) is is_done
        assert (committing not in repaired(BACKUP | {committing: roll.to_json()}).values) is is_done
    unsealed = replace(EVIDENCE, journal={**JOURNAL, paths.epoch(STREAM, 3): epoch(3, sealed=False)})
    roll = CommittingTransactions((OPEN,), (Roll(str(STREAM), 0, 1, 2, 3),), 0, 7)
    assert committing in repaired(BACKUP | {committing: roll.to_json()}, unsealed).values, "its ends are not known"


def deleted(steps: list[RepairStep]) -> dict[str, str]:
    """The topics that a repair deletes."""
    return {topic: identity for step in steps for topic, identity in step.topics.items()}


def test_records_of_transactions_and_requests_of_before_go() -> None:
    values = repaired(BACKUP).values
    assert f"{paths.requests(GROUP)}/request-1" not in values
    assert f"{paths.transactions(GROUP)}/00/old" not in values


def test_records_of_an_epoch_that_nobody_has_written_down_are_refused_unless_it_is_being_made() -> None:
    topics = {**EVIDENCE.topics, STREAM.segment_topic(SegmentId.of(4, 4)): "s"}
    evidence = replace(EVIDENCE, topics=topics)
    with pytest.raises(CorruptDataError, match=r"whose key ranges are not on record.*later backup"):
        plan(BACKUP, [evidence], NOW_MS)
    scale = EpochTransition(STREAM, "request-1", 4, (1,), (KeyRange(0.0, 1.0),), 0, 7)
    assert deleted(plan(BACKUP | {paths.scaling(GROUP): scale.to_json()}, [evidence], NOW_MS)) == {}


def test_empty_topics_of_an_interrupted_scale_are_deleted_while_nobody_leads() -> None:
    ids = [SegmentId.of(2, 2), SegmentId.of(4, 4), SegmentId.of(5, 4)]
    older, one, other = map(STREAM.segment_topic, ids)
    topics = {**EVIDENCE.topics, older: "o", one: "s", other: "t"}
    steps = plan(BACKUP, [replace(EVIDENCE, topics=topics, unwritten=[older, one, other])], NOW_MS)
    assert deleted(steps) == {one: "s", other: "t"}, "none that an epoch describes"
    place = next(place for place, step in enumerate(steps) if step.topics)
    published = BACKUP | {paths.epoch(STREAM, 4): epoch(4)}
    assert deleted(plan(published, [replace(EVIDENCE, topics=topics)], NOW_MS)) == {}, "a leader is at work"
    assert any("keep coordinators from leading" in step.what for step in steps[:place])
    with pytest.raises(CorruptDataError, match=f"{other} holds records"):
        plan(BACKUP, [replace(EVIDENCE, topics=topics, unwritten=[one])], NOW_MS)


def test_leaders_are_kept_away_from_the_first_step_to_the_last() -> None:
    tree = Tree(BACKUP)
    steps = batches(plan(BACKUP, [EVIDENCE], NOW_MS))
    for number, batch in enumerate(steps):
        tree.multi(batch)
        assert (paths.outdated(GROUP) in tree.values) == (number < len(steps) - 1)


def test_it_can_be_stopped_anywhere_and_run_again() -> None:
    nodes = BACKUP | {f"{paths.stream(GONE)}/late": b"{}", paths.outdated(GROUP): b"found"}
    whole = repaired(nodes)
    count = len(batches(plan(nodes, [EVIDENCE], NOW_MS)))
    assert count > 10
    for stop in range(count):
        tree = Tree(nodes)
        for batch in batches(plan(nodes, [EVIDENCE], NOW_MS))[:stop]:
            tree.multi(batch)
        for batch in batches(plan(tree.values, [EVIDENCE], NOW_MS)):
            tree.multi(batch)
        assert _lasting(tree) == _lasting(whole)
        assert int(tree.values[paths.TRANSACTION_COUNTER]) >= int(whole.values[paths.TRANSACTION_COUNTER])
        raised = ControllerEpoch.from_json(tree.values[paths.controller(GROUP)]).epoch
        assert raised >= 19 + VERSION_JUMP


def test_run_again_after_its_end_it_only_raises_numbers() -> None:
    once = repaired(BACKUP)
    twice = repaired(once.values)
    assert _lasting(twice) == _lasting(once)
    assert int(twice.values[paths.TRANSACTION_COUNTER]) == int(once.values[paths.TRANSACTION_COUNTER]) + COUNTER_JUMP


def _lasting(tree: Tree) -> dict[str, bytes]:
    """Everything but the values of what counts up."""
    counting = (paths.TRANSACTION_COUNTER, paths.controller(GROUP), paths.sessions(GROUP))
    return {path: b"" if path.startswith(counting) else value for path, value in tree.values.items()}


def test_a_group_that_was_created_after_the_backup_is_made_and_led_only_in_the_end() -> None:
    name, other = GroupName("fresh", "late"), StreamName("fresh", "orders")
    record = Group(name, 5, "log-id", "outcomes-id").to_json()
    config = StreamConfig(name=other, group=name, created_ms=0, buffer_topic_id="b", retention=Retention(ms=9))
    noted = LateNotes({SegmentId.of(0, 0): LateSegment(9, 2)}).to_json()
    journal = {
        paths.CLUSTER: b"cluster",
        paths.group(name): record,
        paths.controller(name): ControllerEpoch(3, "", 0).to_json(),
        paths.stream(other): config.to_json(),
        paths.epoch(other, 0): epoch(0),
        paths.late(other): noted,
    }
    evidence = GroupEvidence(name=name, journal=journal, counter=200, ongoing=[OPEN], sessions={"app": 1})
    tree = Tree(BACKUP)
    steps = batches(plan(BACKUP, [EVIDENCE, evidence], NOW_MS))
    for stop, batch in enumerate(steps):
        tree.multi(batch)
        if paths.group(name) in tree.values:
            assert (paths.outdated(name) in tree.values) == (stop < len(steps) - 1), "nobody may lead it in between"
    assert tree.values[paths.group(name)] == record
    assert set(paths.group_skeleton(name)) <= tree.values.keys()
    assert journaled(tree.below(paths.stream(other))) == {
        path: value for path, value in journal.items() if path.startswith("/scopes")
    }
    assert ControllerEpoch.from_json(tree.values[paths.controller(name)]).epoch == 3 + VERSION_JUMP
    assert int(tree.values[paths.TRANSACTION_COUNTER]) == 201 + COUNTER_JUMP
    begun_anew = Tree({**BACKUP, paths.group(name): Group(name, 99).to_json()} | with_parents({}))
    for path in paths.group_skeleton(name):
        begun_anew.values.setdefault(path, b"")
    for batch in batches(plan(begun_anew.values, [EVIDENCE, evidence], NOW_MS)):
        begun_anew.multi(batch)
    assert begun_anew.values[paths.group(name)] == record, "a client has made it anew, with nothing in it"


TOPIC, OTHER = "shop.orders", "shop.returns"
SHOP, RENAMED = StreamName("sales", "shop_orders"), StreamName("sales", "renamed")


def adopted(name: StreamName, topic: str = TOPIC, *, topic_id: str = "topic-id") -> dict[str, bytes]:
    """The nodes of a stream that has adopted a topic, without its entry in the index."""
    config = StreamConfig(name=name, group=GROUP, created_ms=0, buffer_topic_id="buffer-id", topic=topic)
    config = replace(config, topic_id=topic_id, partitioner="murmur2", partitions=1)
    return {paths.stream(name): config.to_json(), paths.epochs(name): b"", paths.epoch(name, 0): epoch(0)}


def indexed(topics: Mapping[str, StreamName]) -> dict[str, bytes]:
    return {paths.TOPICS: b"", **{paths.adopted(topic): str(name).encode() for topic, name in topics.items()}}


def released(name: StreamName) -> dict[str, bytes]:
    return {paths.stream(name): f"{name.stream}#4.77.1".encode()}


@pytest.mark.parametrize("has_index", [True, False])
def test_an_adoption_that_was_lost_is_written_again_with_its_entry_in_the_index(has_index: bool) -> None:
    evidence = replace(EVIDENCE, journal=JOURNAL | journaled(adopted(SHOP)), topics={**EVIDENCE.topics, TOPIC: "t"})
    nodes = BACKUP | (indexed({}) if has_index else {})
    tree = repaired(nodes, evidence)
    assert journaled(tree.below(paths.stream(SHOP))) == journaled(adopted(SHOP))
    assert tree.below(paths.TOPICS) == indexed({TOPIC: SHOP})
    assert deleted(plan(nodes, [evidence], NOW_MS)) == {}, "no topic is touched"
    for stop in range(len(batches(plan(nodes, [evidence], NOW_MS)))):
        again = Tree(nodes)
        for batch in batches(plan(nodes, [evidence], NOW_MS))[:stop]:
            again.multi(batch)
        for batch in batches(plan(again.values, [evidence], NOW_MS)):
            again.multi(batch)
        assert _lasting(again) == _lasting(tree)


def test_a_release_that_was_lost_leaves_nothing_of_the_stream_and_nothing_else_goes() -> None:
    nodes = BACKUP | with_parents(adopted(SHOP)) | BACKUP | indexed({TOPIC: SHOP, OTHER: RENAMED})
    evidence = replace(EVIDENCE, journal=JOURNAL | released(SHOP), topics={**EVIDENCE.topics, TOPIC: "topic-id"})
    tree = repaired(nodes, evidence)
    assert not tree.below(paths.stream(SHOP))
    assert tree.below(paths.TOPICS) == indexed({}), "of the other one, no stream is known to anybody"
    assert deleted(plan(nodes, [evidence], NOW_MS)) == {}
    under_way = replace(evidence, topics={**evidence.topics, SHOP.buffer_topic(): "buffer-id"})
    tree = repaired(nodes, under_way)
    assert tree.below(paths.stream(SHOP)), "a leader has yet to release it"
    assert tree.below(paths.TOPICS) == indexed({TOPIC: SHOP})


def test_a_topic_that_another_stream_has_adopted_since_is_that_ones() -> None:
    nodes = BACKUP | with_parents(adopted(SHOP)) | BACKUP | indexed({TOPIC: SHOP})
    journal = JOURNAL | released(SHOP) | journaled(adopted(RENAMED))
    topics = {**EVIDENCE.topics, TOPIC: "topic-id"}
    tree = repaired(nodes, replace(EVIDENCE, journal=journal, topics=topics))
    assert tree.below(paths.TOPICS) == indexed({TOPIC: RENAMED})
    for identity, owner in (("topic-id", RENAMED), ("older", SHOP)):
        both = JOURNAL | journaled(adopted(RENAMED, topic_id="topic-id") | adopted(SHOP, topic_id="older"))
        tree = repaired(nodes, replace(EVIDENCE, journal=both, topics={**topics, TOPIC: identity}))
        assert tree.below(paths.TOPICS) == indexed({TOPIC: owner}), "who knows the topic as it is"


def test_an_adopted_topic_is_never_taken_for_that_of_an_interrupted_scale() -> None:
    lookalike = STREAM.segment_topic(SegmentId.of(4, 4))
    topics = {**EVIDENCE.topics, TOPIC: "t", lookalike: "l"}
    journal = JOURNAL | journaled(adopted(SHOP, lookalike))
    evidence = replace(EVIDENCE, journal=journal, topics=topics, unwritten=[TOPIC, lookalike])
    assert evidence.undescribed() == []
    assert deleted(plan(BACKUP, [evidence], NOW_MS)) == {}


def test_each_step_fits_into_what_zookeeper_takes_at_once() -> None:
    long = StreamName("s" * 100, "t" * 100)
    wide = tuple(
        Segment(SegmentId.of(number, 9), KeyRange(number / 3000, (number + 1) / 3000)) for number in range(3000)
    )
    records = {
        paths.epoch(long, number): EpochRecord(
            Epoch(number), Epoch(number), wide, EpochCause.SCALE, 0, {item.id: 5 for item in wide}
        ).to_json()
        for number in range(1, 12)
    }
    config = StreamConfig(name=long, group=GroupName("s" * 100, "g" * 100), created_ms=0, buffer_topic_id="b")
    journal = {paths.stream(long): config.to_json(), **records}
    ongoing = [TransactionId.of(0, number) for number in range(3)]
    evidence = GroupEvidence(name=config.group, journal=journal, ongoing=ongoing)
    found = batches(
        plan(with_parents({paths.group(config.group): Group(config.group, 0).to_json()}), [evidence], NOW_MS)
    )
    assert max(sum(map(bytes_of, batch)) for batch in found) <= 1_000_000
    assert len(found) > 10


def test_groups_are_numbered_anew_beyond_all_that_any_ever_had() -> None:
    known = Group(GROUP, 1, "log", "outcomes", 3, (2,), 50, 90)
    later = replace(known, number=7, former_numbers=(2, 3), counter_floor=800, counter_ceiling=900)
    nodes = BACKUP | {paths.group(GROUP): known.to_json(), paths.GROUP_NUMBERS: b"5"}
    evidence = replace(EVIDENCE, journal=JOURNAL | {paths.group(GROUP): later.to_json()})
    tree = repaired(nodes, evidence)
    assert int(tree.values[paths.GROUP_NUMBERS]) == 8
    found = Group.from_json(tree.values[paths.group(GROUP)])
    assert found == replace(known, number=0, former_numbers=(2, 3, 7), counter_floor=800)
    assert highest_number(tree.values[paths.group(GROUP)]) == 7, "a journal that knows of 7 has lost nothing"
    assert repaired(tree.values, evidence).values[paths.GROUP_NUMBERS] == b"8"


@pytest.mark.parametrize("raw", [b"", b"x", b"-1", b"9" * 5_000, str(1 << 96).encode()])
def test_whatever_stands_in_the_counters_is_no_reason_not_to_repair(raw: bytes) -> None:
    nodes = BACKUP | {paths.TRANSACTION_COUNTER: raw, paths.GROUP_NUMBERS: raw}
    tree = repaired(nodes)
    assert int(tree.values[paths.TRANSACTION_COUNTER]) == 121 + COUNTER_JUMP
    assert int(tree.values[paths.GROUP_NUMBERS]) == 1
    forged = replace(EVIDENCE, counter=(1 << 96) - 1, journal={**JOURNAL, paths.TRANSACTION_COUNTER: raw})
    assert int(repaired(nodes, forged).values[paths.TRANSACTION_COUNTER]) <= SHARED_MAX


LOG = GROUP.commit_log_topic
LED = with_parents(
    stream(STREAM, [0, 1])
    | stream(GONE, [0], identity="gone-id")
    | controller(7)
    | {
        paths.group(GROUP): Group(GROUP, 0, commit_log_topic_id="log", terminated_topic_id="ended", number=3).to_json(),
        paths.log_marks(GROUP): b"{}",
        f"{paths.transactions(GROUP)}/00/old": b"{}",
        paths.session(GROUP, "app"): ClientSession("app", 3, 0).to_json(),
    }
)
TOPICS = {STREAM.buffer_topic(): "id", LOG: "another", GROUP.terminated_topic: "ended"}


def begun(
    nodes: Mapping[str, bytes], topics: Mapping[str, str], journal: Mapping[str, bytes] | None = None
) -> list[RepairStep]:
    return begin_log(nodes, GROUP, journal or {}, topics, NOW_MS)


def test_a_log_is_begun_anew_for_one_group_and_only_if_it_is_gone() -> None:
    steps = begun(LED, TOPICS)
    assert {topic: identity for step in steps for topic, identity in step.topics.items()} == {
        STREAM.buffer_topic(): "id",
        LOG: "another",
    }, "the outcomes that are remembered by client name stay"
    tree = Tree(LED)
    for step in steps:
        for batch in step.batches:
            tree.multi(batch)
    group = Group.from_json(tree.values[paths.group(GROUP)])
    assert (group.commit_log_topic_id, group.terminated_topic_id, group.number) == ("", "", 3)
    for name, identity in ((STREAM, "id"), (GONE, "gone-id")):
        config = StreamConfig.from_json(tree.values[paths.stream(name)])
        assert (config.buffer_topic_id, config.identity, config.revision) == ("", identity, 1)
    assert paths.log_marks(GROUP) not in tree.values
    assert f"{paths.transactions(GROUP)}/00/old" not in tree.values
    assert paths.session(GROUP, "app") in tree.values
    assert paths.outdated(GROUP) not in tree.values
    assert ControllerEpoch.from_json(tree.values[paths.controller(GROUP)]).epoch > 7
    assert begun(tree.values, {}), "it can be run again"
    with pytest.raises(InvalidRequestError, match="is the one that ZooKeeper names"):
        begun(LED, TOPICS | {LOG: "log"})
    with pytest.raises(NotFoundError, match="there is no transaction group"):
        begun({}, TOPICS)
    with pytest.raises(InvalidRequestError, match="ZooKeeper was set back"):
        begun(LED | {paths.outdated(GROUP): b"set back"}, TOPICS)
    journaled = {paths.group(GROUP): Group(GROUP, 0, commit_log_topic_id="another").to_json()}
    with pytest.raises(InvalidRequestError, match="ZooKeeper was set back"):
        begun(LED, TOPICS, journaled)


def test_a_repair_restores_the_log_that_was_begun_anew_since_the_backup() -> None:
    journal = dict(LED)
    journal[paths.group(GROUP)] = Group(GROUP, 0, commit_log_topic_id="another", number=3).to_json()
    evidence = GroupEvidence(name=GROUP, journal=journal, topics=TOPICS)
    restored = LED | with_parents({paths.TRANSACTION_COUNTER: b"0", paths.GROUP_NUMBERS: b"0"})
    assert Group.from_json(repaired(restored, evidence).values[paths.group(GROUP)]).commit_log_topic_id == "another"
    evidence = replace(evidence, topics=TOPICS | {LOG: "log"})
    assert Group.from_json(repaired(restored, evidence).values[paths.group(GROUP)]).commit_log_topic_id == "log"


def test_no_repair_goes_over_a_log_that_is_half_begun() -> None:
    half = LED | {paths.outdated(GROUP): LOG_BEGINS}
    with pytest.raises(InvalidRequestError, match="repair --commit-log sales/main"):
        plan(half, [GroupEvidence(name=GROUP, journal={}, topics=TOPICS)], NOW_MS)


@pytest.mark.parametrize("steps_done", range(8))
def test_beginning_a_log_anew_can_be_interrupted_and_run_again(steps_done: int) -> None:
    tree, topics = Tree(LED), dict(TOPICS)
    for done in (steps_done, None):
        for step in begun(tree.values, topics)[:done]:
            for topic in step.topics:
                del topics[topic]
            for batch in step.batches:
                tree.multi(batch)
    assert StreamConfig.from_json(tree.values[paths.stream(STREAM)]).identity == "id"
    assert Group.from_json(tree.values[paths.group(GROUP)]).commit_log_topic_id == ""
    assert paths.outdated(GROUP) not in tree.values
    assert topics == {GROUP.terminated_topic: "ended"}


def test_a_stream_whose_node_cannot_be_read_is_as_the_journal_has_it() -> None:
    damaged = LED | {paths.stream(STREAM): b"garbage"}
    with pytest.raises(CorruptDataError):
        begun(damaged, TOPICS)
    steps = begun(damaged, TOPICS, {paths.stream(STREAM): LED[paths.stream(STREAM)]})
    assert STREAM.buffer_topic() in {topic for step in steps for topic in step.topics}
