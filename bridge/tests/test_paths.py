"""Where things stand in ZooKeeper: no two things at one path, names sort, buckets spread."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import group_names, stream_names, transaction_ids
from rollbridge.base.ids import TransactionId
from rollbridge.metadata import paths
from rollbridge.stream.names import GroupName, StreamName

STREAM, GROUP = StreamName("sales", "orders"), GroupName("sales", "eu")


def test_paths_as_documented() -> None:
    t = TransactionId.of(0, 64 + 10)
    assert paths.stream(STREAM) == "/scopes/sales/streams/orders"
    assert paths.epoch(STREAM, 7) == "/scopes/sales/streams/orders/epochs/0000000007"
    assert paths.group(GROUP) == "/groups/sales.eu"
    assert paths.transaction(GROUP, t) == f"/groups/sales.eu/transactions/0a/{t}"
    assert paths.parts(GROUP, t) == f"/groups/sales.eu/parts/{t}"
    assert paths.coordinator("c-1") == "/coordinators/c-1"


def test_every_path_is_in_the_documentation_of_the_module() -> None:
    shown = set(re.findall(r"^    (/\S*)", paths.__doc__ or "", re.MULTILINE))
    t = TransactionId.of(0, 10)
    made = {
        paths.CLUSTER,
        paths.TRANSACTION_COUNTER,
        paths.GROUP_NUMBERS,
        paths.coordinator("NAME"),
        f"{paths.cas_slots(StreamName('SCOPE', 'STREAM'))}/SLOT",
        paths.adopted("TOPIC"),
        paths.stream(StreamName("SCOPE", "STREAM")),
        paths.epoch(StreamName("SCOPE", "STREAM"), 7).replace("0000000007", "E"),
        paths.truncation(StreamName("SCOPE", "STREAM")),
        paths.retention(StreamName("SCOPE", "STREAM")),
        paths.stream_fault(StreamName("SCOPE", "STREAM")),
        paths.late(StreamName("SCOPE", "STREAM")),
        f"{paths.deleted_streams('SCOPE')}/STREAM#E.S.P",
        f"{paths.GATEWAYS_LIVE}/NAME",
        f"{paths.GATEWAY_LEASES}/LIFE",
        f"{paths.GATEWAY_IDS}/B/CLIENT",
        f"{paths.GATEWAY_HOLDERS}/B/CLIENT",
    }
    group = GroupName("SCOPE", "GROUP")
    made |= {node(group) for node in (paths.group, paths.controller, paths.leader, paths.committing, paths.scaling)}
    made |= {paths.counter(group), paths.outdated(group), f"{paths.deleted_streams('SCOPE')}/STREAM#E.S.P"}
    made |= {paths.log_marks(group), paths.scaling_waits(group)}
    made |= {f"{paths.pending_changes(group)}/WORK", f"{paths.merging(group)}/MERGE"}
    made |= {f"{paths.requests(group)}/R", f"{paths.answers(group)}/R"}
    made.add(paths.session(group, "CLIENT"))
    made |= {paths.transaction(group, t).replace(f"0a/{t}", "B/ID"), paths.parts(group, t).replace(str(t), "ID")}
    assert made == shown


@given(st.sets(st.integers(0, (1 << 31) - 1)))
def test_epoch_nodes_sort_by_epoch(numbers: set[int]) -> None:
    nodes = [paths.epoch(STREAM, number) for number in sorted(numbers)]
    assert sorted(nodes) == nodes


@given(stream_names, stream_names, group_names, group_names)
def test_different_streams_and_groups_have_different_paths(
    stream: StreamName, other_stream: StreamName, group: GroupName, other_group: GroupName
) -> None:
    assert (paths.stream(stream) == paths.stream(other_stream)) == (stream == other_stream)
    assert (paths.group(group) == paths.group(other_group)) == (group == other_group)


@given(group_names, transaction_ids)
def test_a_transaction_has_a_bucket_of_the_skeleton(group: GroupName, transaction: TransactionId) -> None:
    bucket = paths.transaction(group, transaction).rsplit("/", 1)[0]
    assert bucket in paths.group_skeleton(group)


def test_consecutive_transactions_spread_evenly_over_the_buckets() -> None:
    counts = Counter(paths.bucket(TransactionId.of(0, counter)) for counter in range(paths.BUCKETS * 10))
    assert set(counts.values()) == {10}
    assert len(counts) == paths.BUCKETS


def test_the_skeleton_lists_parents_first_and_nothing_twice() -> None:
    skeleton = paths.group_skeleton(GROUP)
    assert len(set(skeleton)) == len(skeleton)
    for place, path in enumerate(skeleton):
        parent = path.rsplit("/", 1)[0]
        assert parent == paths.group(GROUP) or parent in skeleton[:place]
