"""DLSNs and the record header: round trips, order, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories, segment_ids, transaction_ids
from rollbridge.errors import InvalidRequestError
from rollbridge.model.attribution import HEADER_VALUE_BYTES, pack_record_header, unpack_record_header
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId, TransactionId
from rollbridge.model.sn import DLSN

offsets = st.integers(0, (1 << 63) - 1)


@given(segment_ids, offsets, offsets)
def test_a_dlsn_reads_back_from_its_text(segment: SegmentId, offset: int, local: int) -> None:
    dlsn = DLSN.of(segment, offset, local)
    assert DLSN.parse(str(dlsn)) == dlsn
    assert dlsn.segment == segment


def test_text_of_a_dlsn() -> None:
    assert str(DLSN(epoch=4, number=0, offset=17, local_sequence=3)) == "4-0:17:3"


@pytest.mark.parametrize(
    "text",
    ["", "4-0:17", "4-0:17:3:1", "4:17:3", "-4-0:17:3", "4-0:-17:3", " 4-0:17:3", "4-0:1_7:3", "+4-0:17:3", "٤-0:1:1"],
)
def test_text_that_is_no_dlsn_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="such as 4-0:17:3"):
        DLSN.parse(text)


@given(histories(), st.floats(0.0, 1.0, exclude_max=True), st.data())
def test_dlsns_of_one_key_sort_in_the_order_of_its_records(
    history: EpochHistory, position: float, data: st.DataObject
) -> None:
    written: list[DLSN] = []
    for record in history.records:
        segment = record.segment_at(position).id
        if not written or written[-1].segment != segment:
            count = data.draw(st.integers(0, 2))
            written.extend(DLSN.of(segment, offset) for offset in range(count))
    assert written == sorted(written)


def test_the_record_header_is_16_bytes_of_id_and_8_of_local_sequence() -> None:
    value = pack_record_header(TransactionId.of(1, 42), 258)
    assert value.hex() == "0001000000000000000000000000002a" + "0000000000000102"


@given(transaction_ids, st.integers(0, (1 << 63) - 1))
def test_the_record_header_round_trips(transaction: TransactionId, local: int) -> None:
    assert unpack_record_header(pack_record_header(transaction, local)) == (transaction, local)


def test_a_header_with_a_foreign_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        unpack_record_header(b"\xff" * HEADER_VALUE_BYTES)
