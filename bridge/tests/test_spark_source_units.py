"""The source's options and offsets: everything wrong is named, and a checkpoint says whose it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import group_names, longs, segment_ids, stream_names
from rollbridge.errors import ConfigError, InvalidRequestError
from rollbridge.spark.planning import LogOffset, StreamOffset
from rollbridge.spark.settings import Kind, read_log_settings, read_source
from rollbridge.stream.names import GroupName
from rollbridge.stream.positions import LogPosition, ReadPosition

NEEDED = {"kafka.bootstrap.servers": "localhost:9092", "zookeeper": "localhost:2181", "stream": "sales/orders"}

stream_offsets = st.builds(
    StreamOffset,
    st.text(),
    st.text(),
    st.builds(ReadPosition, stream_names, st.dictionaries(segment_ids, longs, min_size=1)),
    st.none() | longs,
)
log_offsets = st.builds(LogOffset, st.text(), st.text(), st.builds(LogPosition, group_names, longs))


@given(stream_offsets)
def test_an_offset_of_a_stream_survives_its_checkpoint(offset: StreamOffset) -> None:
    assert StreamOffset.of_json(offset.as_json()) == offset
    offset.check_same(offset)


@given(log_offsets)
def test_an_offset_of_a_commit_log_survives_its_checkpoint(offset: LogOffset) -> None:
    assert LogOffset.of_json(offset.as_json()) == offset
    offset.check_same(offset)


def at(cluster: str = "c", stream_id: str = "i", position: str = "sales/orders@0-0:5") -> StreamOffset:
    return StreamOffset(cluster, stream_id, ReadPosition.parse(position))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (at(position="sales/other@0-0:5"), r"belongs to stream sales/other, not to sales/orders.*checkpointLocation"),
        (at(cluster="d"), r"belongs to Kafka cluster d, but the brokers are those of cluster c.*checkpointLocation"),
        (at(stream_id="j"), r"sales/orders was deleted and created again.*checkpointLocation"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(other: StreamOffset, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        other.check_same(at())


def test_a_checkpoint_of_another_commit_log_is_refused() -> None:
    here = LogOffset("c", "i", LogPosition(GroupName("sales", "default"), 7))
    for other, what in (
        (LogOffset("c", "i", LogPosition(GroupName("sales", "more"), 7)), "commit log of sales/more, not to that of"),
        (LogOffset("d", "i", here.position), "belongs to Kafka cluster d"),
        (LogOffset("c", "j", here.position), "is another one than when the checkpoint was written"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            other.check_same(here)


@pytest.mark.parametrize("found", [{}, {"0": 17}, {"cluster": "c", "streamId": "i", "position": "nothing"}])
def test_a_checkpoint_of_another_source_is_refused(found: Mapping[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        StreamOffset.of_json(found)
    with pytest.raises(InvalidRequestError):
        LogOffset.of_json(found)


def test_defaults_are_those_of_sparks_own_source() -> None:
    batch, streaming = read_source(NEEDED, "batch"), read_source(NEEDED, "streaming")
    assert (batch.start, batch.end, streaming.start) == ("earliest", "latest", "latest")
    assert (batch.fail_on_data_loss, batch.preview, batch.columns, batch.max_records) == (True, False, (), None)
    assert batch.stream == "sales/orders"


def test_an_adopted_topic_is_named_by_either_option() -> None:
    servers = {name: value for name, value in NEEDED.items() if name != "stream"}
    for option in ("stream", "topic"):
        # Whose position it is, only ZooKeeper knows.
        given = {**servers, option: "shop.orders", "startingoffsets": "shop/all@0-3:17"}
        assert read_source(given, "batch").stream == "shop.orders"
    assert read_log_settings({**servers, "topic": "a,b"}, "batch").shared.names == ("a", "b")
    assert read_log_settings({**NEEDED, "topic": "a"}, "batch").shared.names == ("sales/orders", "a")


def test_all_that_is_missing_or_wrong_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_source({"startingofsets": "earliest", "maxrecordspertrigger": "0", "isolation": "serializable"}, "schema")
    for name in ("stream", "kafka.bootstrap.servers", "zookeeper"):
        assert f"{name}: is missing" in str(caught.value)
    assert "startingofsets: is unknown; did you mean startingOffsets?" in str(caught.value)
    with pytest.raises(ConfigError, match="quickack: is no option, it is always true"):
        read_source({**NEEDED, "quickAck": "false"}, "batch")
    assert "maxRecordsPerTrigger: '0'" in str(caught.value)
    assert "isolation: 'serializable' is not one of read_committed, read_uncommitted" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"stream": "sales/orders,sales/payments"}, "batch", "a source reads one stream"),
        ({"topic": "orders"}, "batch", "a source reads one stream"),
        ({"topic": "sales/orders"}, "batch", "topic: 'sales/orders' is not the name of a topic"),
        ({"stream": "orders", "topic": "orders"}, "batch", "topic: orders is among stream as well"),
        ({"stream": "", "topic": "orders", "startingoffsets": "orders@0-0:5"}, "batch", "is not a stream name"),
        ({"stream": "", "topic": "orders", "startingoffsets": "soon"}, "batch", "'soon' is not a place to begin at"),
        ({"startingoffsets": "yesterday"}, "batch", "startingOffsets: 'yesterday' is not a place to begin at"),
        ({"startingoffsets": "sales/other@0-0:5"}, "batch", "startingOffsets: the position .* belongs to sales/other"),
        ({"endingoffsets": "earliest"}, "batch", "endingOffsets: nothing ends before the earliest"),
        ({"endingoffsets": "latest"}, "streaming", "endingOffsets: is for batches"),
        ({"maxrecordspertrigger": "5"}, "batch", "maxRecordsPerTrigger: is for streaming queries"),
        ({"isolation": "read_uncommitted"}, "streaming", "isolation: .* is for batches"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Mapping[str, str], kind: Kind, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_source({**NEEDED, **options}, kind)


def test_transactions_are_those_of_a_group_or_of_a_streams_group() -> None:
    servers = {name: value for name, value in NEEDED.items() if name != "stream"}
    assert read_log_settings({**servers, "group": "sales/default"}, "batch").group == GroupName("sales", "default")
    assert read_log_settings(NEEDED, "batch").group is None
    with pytest.raises(ConfigError, match="group: is missing, or stream or topic to take the group of"):
        read_log_settings(servers, "batch")
    with pytest.raises(ConfigError, match="startingOffsets: 'nowhere' is not a position in a commit log"):
        read_log_settings({**NEEDED, "startingoffsets": "nowhere"}, "streaming")
    with pytest.raises(ConfigError, match="endingOffsets: is for batches"):
        read_log_settings({**NEEDED, "endingoffsets": "latest"}, "streaming")
