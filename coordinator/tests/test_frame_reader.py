"""The parts of the shell that need no broker: joining frames, control batches, sharing of groups."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge.commitlog.control import ControlKind, ControlRecord, decode_control
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, CorruptDataError
from rollbridge.kafka.records import BatchBuilder, LogRecord, parse_header, read_records
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core.frame_reader import BATCH_BYTES_MAX, FrameFeed, control_batches, highest_orders
from rollbridge_coordinator.daemon.succession import first_choice


def frame(number: int, values: list[bytes], cached: bool) -> tuple[FrameRef, bytes]:
    builder = BatchBuilder(1 << 20)
    for value in values:
        assert builder.append(1, b"k", value, [("n", b"%d" % number)])
    batch = builder.build()
    ref = FrameRef(("buffer", 0), number, PieceKey(0, 0, 0), 0, len(values), len(batch), batch if cached else None)
    return ref, batch


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.lists(st.sampled_from([b"", b"small", b"m" * 9_000, b"L" * 40_000]), min_size=1, max_size=4),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(min_value=0, max_value=3),
)
def test_joined_frames_keep_their_order_and_every_offset_is_right(
    rows: list[tuple[str, list[bytes], bool]], in_vain: int
) -> None:
    """Also if a transactional id was locked when the first batches had been made."""
    made = [(topic, *frame(number, values, cached)) for number, (topic, values, cached) in enumerate(rows)]
    raw = {ref.offset: batch for _, ref, batch in made}
    feed = FrameFeed([((topic, 0), ref) for topic, ref, _ in made], lambda ref: raw[ref.offset])
    logs: dict[str, list[tuple[bytes | None, bytes | None]]] = {}
    bases = []
    list(islice(feed.batches(), in_vain))
    for topic, _, batch in feed.batches():
        log = logs.setdefault(topic, [])
        bases.append(len(log))
        log.extend((record.headers[0][1], record.value) for record in read_records(batch))
    offsets = feed.offsets(bases)
    expected: Counter[str] = Counter()
    for (topic, values, _), number, offset in zip(rows, range(len(rows)), offsets, strict=True):
        assert offset == expected[topic]
        expected[topic] += len(values)
        assert logs[topic][offset : offset + len(values)] == [(b"%d" % number, value) for value in values]


def test_frames_are_joined_to_what_an_adopted_topic_takes() -> None:
    refs = [((topic, 0), frame(number, [b"v" * 100] * 10, True)[0]) for number in range(50) for topic in ("t", "u")]
    feed = FrameFeed(refs, lambda _: b"", {"t": 5_000})
    made: dict[str, list[bytes]] = {}
    for topic, _, batch in feed.batches():
        made.setdefault(topic, []).append(batch)
    assert len(made["u"]) == 1
    assert len(made["t"]) > 1
    assert max(map(len, made["t"])) <= 5_000
    assert sum(parse_header(batch).record_count for batch in made["t"]) == 500


def test_batches_get_the_time_of_the_commit_in_topics_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbridge_coordinator.core.frame_reader.wall_time", lambda: 5e9)
    sizes = [b"v" * 100] * 10, [b"L" * 40_000]
    refs = [
        ((topic, 0), frame(number, values, True)[0]) for number, values in enumerate(sizes * 2) for topic in ("t", "u")
    ]
    latest: dict[str, set[int]] = {}
    for topic, _, batch in FrameFeed(refs, lambda _: b"", {}, {"t"}).batches():
        latest.setdefault(topic, set()).add(max(record.timestamp for record in read_records(batch)))
    assert latest["t"] == {5_000_000_000_000}
    assert 5_000_000_000_000 not in latest["u"]


def control(number: int, reason: str = "") -> ControlRecord:
    return ControlRecord(TransactionId.of(0, number), ControlKind.ABORT, "c", 1, 2, 3, reason=reason)


@given(st.lists(st.sampled_from([0, 10, 200_000, 600_000]), max_size=8))
def test_control_records_are_batched_in_order(sizes: list[int]) -> None:
    records = [control(number, "r" * size) for number, size in enumerate(sizes)]
    batches, places = control_batches(records)
    found = [list(read_records(batch)) for batch in batches]
    assert sum(map(len, found)) == len(records)
    for record, (batch, delta) in zip(records, places, strict=True):
        message = found[batch][delta]
        assert decode_control(message.key, message.value) == record
    for raw, rows in zip(batches, found, strict=True):
        assert len(raw) <= BATCH_BYTES_MAX or len(rows) == 1


def test_groups_are_shared_evenly_and_few_move_when_a_coordinator_goes() -> None:
    groups = [GroupName("sales", f"g{number}") for number in range(300)]
    names = ["one", "two", "three"]
    before = {group: first_choice(group, names) for group in groups}
    counts = Counter(before.values())
    assert min(counts[name] for name in names) > 60
    after = {group: first_choice(group, ["one", "two"]) for group in groups}
    assert all(after[group] == before[group] for group in groups if before[group] != "three")
    assert first_choice(groups[0], []) is None


def test_settings_name_every_fault_at_once() -> None:
    with pytest.raises(ConfigError, match=r"session_timeout_s: 0.*merge_timeout_s: -1.*slash"):
        CoordinatorSettings(
            connection=ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1"),
            name="a/b",
            session_timeout_s=0,
            merge_timeout_s=-1,
        )


def test_records_of_a_newer_release_keep_no_leader_from_reading_the_orders_of_the_others() -> None:
    def commit(number: int) -> LogRecord:
        record = ControlRecord(TransactionId.of(0, number), ControlKind.COMMIT, "c", 0, 0, 1, order=((7, 0), number))
        return LogRecord(number, 0, record.transaction.bytes, record.encode_value(), [])

    newer = commit(9)
    read = [commit(3), newer._replace(value=b"\3" + (newer.value or b"")[1:]), commit(2)]
    assert highest_orders(read) == {(7, 0): 3}
    with pytest.raises(CorruptDataError):
        highest_orders([newer._replace(value=b"\1\x40")])
