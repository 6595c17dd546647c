"""The vectors in ``schemas/vectors``, by which clients in other languages check themselves, are what our code writes.

A second decoder, written from docs/protocol.md alone ("Layouts"), reads frames and control records as well: so the page
says all that one has to know. It uses nothing of ours.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from bridge.tests.vector_files import READERS, ROOT, Sealed, Vector, header_of, vectors
from rollbridge.base.attribution import unpack_run
from rollbridge.base.ids import SegmentId, TransactionId, counter_of, local_sequence, split_counter
from rollbridge.base.sn import DLSN, SN, pack_transaction_id, unpack_transaction_id
from rollbridge.buffer.frames import (
    FrameKind,
    buffer_partition,
    decode_abort,
    decode_begin,
    decode_extend,
    decode_manifest,
    encode_abort,
    encode_extend,
    pack_bundle,
    unpack_bundle,
    unpack_header,
)
from rollbridge.buffer.replay import OngoingTransactions, ongoing_keys
from rollbridge.buffer.savepoints import decode_savepoint
from rollbridge.buffer.snapshots import Snapshot, SnapshotSegment
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import decode_control, has_reason, peek_kind
from rollbridge.commitlog.outcomes import (
    EndedTransactions,
    decode_terminated,
    encode_terminated,
    ended_key,
)
from rollbridge.metadata import paths
from rollbridge.stream.keyspace import key_hash, position_of_hash
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import DeletedStream, former_among
from rollbridge_schemas import NAMES, codec


def of(name: str, part: str | None = None) -> list[Any]:
    """The vectors of a file, or of a part of one, as parameters."""
    found = vectors(name)
    rows = found if part is None else found[part]
    return [pytest.param(row, id=f"{number}") for number, row in enumerate(rows)]


# Our code


ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "BEGIN": lambda value: decode_begin(value).encode(),
    "COMMIT": lambda value: decode_manifest(value).encode(),
    "ABORT": lambda value: encode_abort(decode_abort(value)),
    "EXTEND": lambda value: encode_extend(decode_extend(value)),
    "SAVEPOINT": lambda value: decode_savepoint(value).encode(),
}
SCHEMAS = {kind: f"{kind.lower()}_frame" for kind in ENCODED}


@pytest.mark.parametrize("vector", of("frames"))
def test_frames(vector: Vector) -> None:
    key, value, kind = bytes.fromhex(vector["key"]), bytes.fromhex(vector["value"]), vector["header"]["kind"]
    header = header_of(vector)
    assert header.pack() == key
    assert unpack_header(key) == header
    if kind in SCHEMAS:
        assert codec(SCHEMAS[kind]).decode(value) == vector["decoded"]
        assert ENCODED[kind](value) == value
    if "order" in vector:
        order = vector["order"]
        known = None if order is None else CommitOrder(**order)
        assert header.order == known
    if kind == "BUNDLE":
        frames = [(header_of(item).pack(), bytes.fromhex(item["value"])) for item in vector["frames"]]
        assert pack_bundle(frames) == (key, value)
        assert [(inner.pack(), content) for inner, _, content in unpack_bundle(header, value)] == frames
        assert [place for _, place, _ in unpack_bundle(header, value)] == [item["at"] for item in vector["frames"]]


def test_there_is_a_vector_of_each_kind_of_frame() -> None:
    assert {vector["header"]["kind"] for vector in vectors("frames")} == {kind.name for kind in FrameKind}


@pytest.mark.parametrize("vector", of("control_records"))
def test_control_records(vector: Vector) -> None:
    key, value, decoded = bytes.fromhex(vector["key"]), bytes.fromhex(vector["value"]), vector["decoded"]
    record = decode_control(key, value)
    assert str(record.transaction) == vector["transaction"]
    assert codec("control_record").decode(value if vector["version"] == 0 else value[1:]) == decoded
    assert record.encode_value() == (value if vector["version"] else b"\1" + value)
    assert (record.kind, record.reason, record.records) == (decoded["kind"], decoded["reason"], decoded["records"])
    assert peek_kind(value) is record.kind
    assert has_reason(value) == bool(record.reason)


@pytest.mark.parametrize("vector", of("terminated_transactions"))
def test_terminated_transactions(vector: Vector) -> None:
    value = bytes.fromhex(vector["value"])
    items, below = decode_terminated(value)
    assert ([str(item.transaction) for item in items], f"{below:024x}") == (
        vector["transactions"],
        vector["forgotten_below"],
    )
    assert encode_terminated([item.encode() for item in items], below) == value
    assert codec("terminated_transactions").decode(value[1:]) == vector["decoded"]
    assert decode_terminated(value[1:]) == (items, below), "as releases before 0.2.0 wrote it"


def keys_of(record: Sealed) -> tuple[bytes, ...]:
    match record:
        case OngoingTransactions():
            return ongoing_keys(record.partition)
        case EndedTransactions():
            return (ended_key(record.group),)
        case _:
            return (record.key,)


@pytest.mark.parametrize("vector", of("snapshots"))
def test_snapshots(vector: Vector) -> None:
    value = bytes.fromhex(vector["value"])
    record = READERS[vector["schema"]](value)
    assert record.encode() == value
    assert vector["key"].encode() in keys_of(record)
    assert codec(vector["schema"]).decode(value[5:]) == vector["decoded"]
    assert (value[0], value[1:5]) == (vector["version"], crc32(value[5:]).to_bytes(4, "big"))
    if isinstance(record, Snapshot | SnapshotSegment):
        assert [str(TransactionId.from_bytes(item)) for item in record.aborts] == vector["aborts"]


def test_there_is_a_vector_of_each_record_of_snapshots() -> None:
    assert {vector["schema"] for vector in vectors("snapshots")} == READERS.keys()


@pytest.mark.parametrize("vector", of("zookeeper"))
def test_nodes(vector: Vector) -> None:
    if vector["schema"] is not None:
        assert codec(vector["schema"]).to_json(codec(vector["schema"]).from_json(vector["value"].encode())) == (
            vector["value"].encode()
        )
    elif vector["value"].isdigit():
        assert vector["path"] in (paths.GROUP_NUMBERS, "/groups/sales.default/counter")
    elif "/former/" in vector["path"]:
        name = vector["path"].rpartition("/")[2]
        assert former_among([name], StreamName("sales", "orders")) == DeletedStream(5, 4_294_968_313, 12)
        assert DeletedStream(5, 4_294_968_313, 12).node("orders") == name


def test_there_is_a_vector_of_each_schema() -> None:
    seen = {vector["schema"] for name in ("zookeeper", "snapshots") for vector in vectors(name)} - {None}
    assert seen | {*SCHEMAS.values(), "control_record", "terminated_transactions"} == set(NAMES)


@pytest.mark.parametrize("vector", of("identifiers", "transactions"))
def test_transaction_ids(vector: Vector) -> None:
    number, count = vector["group_number"], vector["count"]
    made = TransactionId.of(vector["reference_epoch"], counter_of(number, count))
    assert (made.bytes.hex(), str(made)) == (vector["bytes"], vector["text"])
    assert split_counter(made.bytes) == (number, count)
    assert buffer_partition(made, vector["buffer_partitions"]) == vector["buffer_partition"]
    assert paths.bucket(made) == vector["bucket"]


@pytest.mark.parametrize("vector", of("identifiers", "segments"))
def test_segments(vector: Vector) -> None:
    segment = SegmentId.of(vector["number"], vector["epoch"])
    stream = StreamName("sales", "orders")
    assert int(segment) == vector["id"]
    assert SegmentId.from_int(vector["id"]) == segment
    assert (stream.segment_topic(segment), stream.qualified(segment)) == (vector["topic"], vector["qualified"])


@pytest.mark.parametrize("vector", of("identifiers", "local_sequences"))
def test_local_sequences(vector: Vector) -> None:
    assert local_sequence(vector["part"], vector["count"]) == vector["local_sequence"]


@pytest.mark.parametrize("vector", of("identifiers", "positions"))
def test_positions_of_keys(vector: Vector) -> None:
    value = key_hash(bytes.fromhex(vector["key"]))
    assert (f"{value:016x}", position_of_hash(value)) == (vector["xxh64_seed_42"], vector["position"])


@pytest.mark.parametrize("vector", of("identifiers", "sns"))
def test_sns(vector: Vector) -> None:
    sn = SN.parse(vector["text"])
    assert (str(sn), bytes(sn).hex()) == (vector["text"], vector["bytes"])
    assert SN.from_bytes(bytes.fromhex(vector["bytes"])) == sn
    assert sn.dlsn is None or DLSN.parse(str(sn.dlsn)) == sn.dlsn


@pytest.mark.parametrize("vector", of("identifiers", "transaction_id_headers"))
def test_headers_of_transaction_ids(vector: Vector) -> None:
    assert pack_transaction_id(vector["transaction_id"]).hex() == vector["value"]
    assert unpack_transaction_id(bytes.fromhex(vector["value"])) == vector["transaction_id"]


@pytest.mark.parametrize("vector", of("identifiers", "orders"))
def test_numbers_of_commits(vector: Vector) -> None:
    order = CommitOrder(vector["connection"], 0, vector["number"], vector["behind"])
    assert order.fields() == (vector["segment"], vector["first_count"], vector["records"])


# A decoder that knows nothing but what docs/protocol.md says under "Layouts".


class Stranger:
    """Reads bytes from the first to the last."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, size: int) -> bytes:
        assert self.place + size <= len(self.data), "the record ends within a field"
        found = self.data[self.place : self.place + size]
        self.place += size
        return found

    def number(self, size: int) -> int:
        """Of fixed size, big-endian, without a sign."""
        return int.from_bytes(self.take(size), "big")

    def leb128(self) -> int:
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return found

    def long(self) -> int:
        zigzag = self.leb128()
        return -(zigzag + 1) // 2 if zigzag & 1 else zigzag // 2

    def text(self) -> str:
        return self.take(self.long()).decode()

    def maybe(self, read: Callable[[], Any]) -> Any:
        branch = self.long()
        assert branch in (0, 1)
        return read() if branch else None

    def array(self, read: Callable[[], Any]) -> list[Any]:
        found = []
        while count := self.long():
            assert count > 0
            found += [read() for _ in range(count)]
        return found

    def record(self, **fields: Callable[[], Any]) -> dict[str, Any]:
        return {name: read() for name, read in fields.items()}


def uuid(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


KINDS = {1: "BEGIN", 2: "DATA", 3: "COMMIT", 4: "ABORT", 5: "BUNDLE", 6: "EXTEND", 7: "SAVEPOINT"}


def begin(at: Stranger) -> dict[str, Any]:
    return at.record(
        client_name=at.text,
        client_epoch=at.long,
        label=lambda: at.maybe(at.text),
        lease_ms=at.long,
        streams=lambda: at.array(lambda: at.record(stream=at.text, reference_epoch=at.long)),
        retain_ms=at.long,
    )


def savepoint(at: Stranger) -> dict[str, Any]:
    head = at.record(number=at.long, whole=lambda: bool(at.number(1)))
    names = manifest(at)
    notes = at.record(notes=lambda: at.array(lambda: at.record(name=at.text, value=at.text)))
    return head | names | notes | details(at)


def details(at: Stranger) -> dict[str, Any]:
    return at.record(details=lambda: at.array(lambda: at.record(leader_epoch=at.long, metadata=at.text)))


def commit(at: Stranger) -> dict[str, Any]:
    return manifest(at) | details(at)


def manifest(at: Stranger) -> dict[str, Any]:
    scopes = ("segment", "key")
    return at.record(
        entries=lambda: at.array(lambda: at.record(part=at.long, stream=at.long, segment=at.long, records=at.long)),
        offsets=lambda: at.array(
            lambda: at.record(
                group=at.text,
                generation=at.long,
                member=at.text,
                instance=lambda: at.maybe(at.text),
                topics=lambda: at.array(
                    lambda: at.record(
                        topic=at.text,
                        partitions=lambda: at.array(lambda: at.record(partition=at.long, offset=at.long)),
                    )
                ),
            )
        ),
        conditions=lambda: at.array(
            lambda: at.record(
                stream=at.long, key=lambda: at.maybe(at.text), scope=lambda: scopes[at.long()], expected=at.text
            )
        ),
    )


VALUES: dict[str, Callable[[Stranger], dict[str, Any]]] = {
    "BEGIN": begin,
    "COMMIT": commit,
    "ABORT": lambda at: at.record(reason=at.text),
    "EXTEND": lambda at: at.record(lease_ms=at.long),
    "SAVEPOINT": savepoint,
}


def order_among_commits(said: dict[str, Any]) -> dict[str, int] | None:
    number = said["first_count"] & (1 << 40) - 1
    if said["kind"] not in ("COMMIT", "ABORT") or not number:
        return None
    connection = (said["first_count"] >> 40) * (1 << 31) + said["segment"]
    return {"connection": connection, "epoch": said["epoch"], "number": number, "behind": said["records"]}


def check_value(said: dict[str, Any], value: bytes, vector: Vector) -> None:
    """Compare what a frame of a bundle, or by itself, says with a vector."""
    if said["kind"] in VALUES:
        at = Stranger(value)
        assert VALUES[said["kind"]](at) == vector["decoded"]
        assert at.place == len(value)
    if said["kind"] == "DATA":
        # A Kafka record batch: length behind its first 12 bytes, magic 2, and the number of records at 57.
        assert int.from_bytes(value[8:12], "big") == len(value) - 12
        assert value[16] == 2
        assert int.from_bytes(value[57:61], "big") == said["records"]


@pytest.mark.parametrize("vector", of("frames"))
def test_a_stranger_reads_frames(vector: Vector) -> None:
    at = Stranger(bytes.fromhex(vector["key"]))
    magic, version = at.take(2), at.number(1)
    said: dict[str, Any] = {"kind": KINDS[at.number(1)], "transaction": uuid(at.take(16))}
    said |= {
        name: at.number(size)
        for name, size in (("part", 4), ("segment", 4), ("first_count", 8), ("records", 4), ("epoch", 4))
    }
    assert at.place == 44 == len(at.data)
    assert (magic, version) == (b"RB", 2 if said["kind"] == "SAVEPOINT" else 1)
    assert said == vector["header"]
    if "order" in vector:
        assert order_among_commits(said) == vector["order"]
    check_value(said, bytes.fromhex(vector["value"]), vector)
    if said["kind"] != "BUNDLE":
        return
    inside = Stranger(bytes.fromhex(vector["value"]))
    for expected in vector["frames"]:
        inner: dict[str, Any] = {"kind": KINDS[inside.number(1)], "transaction": said["transaction"]}
        inner |= {
            name: inside.number(size)
            for name, size in (("part", 4), ("segment", 4), ("first_count", 8), ("records", 4), ("epoch", 4))
        }
        size = inside.number(4)
        assert inside.place == expected["at"]
        assert (inner, inside.take(size).hex()) == (expected["header"], expected["value"])
    assert inside.place == len(inside.data)
    assert said["records"] == len(vector["frames"])


@pytest.mark.parametrize("vector", of("control_records"))
def test_a_stranger_reads_control_records(vector: Vector) -> None:
    assert uuid(bytes.fromhex(vector["key"])) == vector["transaction"]
    at = Stranger(bytes.fromhex(vector["value"]))
    if at.data[0] % 2 == 1:
        assert at.number(1) == 1, "version 1"
    kinds = ("BEGIN", "COMMIT", "ABORT")
    found = at.record(
        kind=lambda: kinds[at.long()],
        reason=at.text,
        client_name=at.text,
        label=lambda: at.maybe(at.text),
        records=at.long,
        bytes=at.long,
        begun_ms=at.long,
        decided_ms=at.long,
        controller_epoch=at.long,
        streams=lambda: at.array(
            lambda: at.record(
                stream=at.text,
                segments=lambda: at.array(
                    lambda: at.record(
                        segment=at.long,
                        runs=lambda: at.array(lambda: at.record(part=at.long, base_offset=at.long, count=at.long)),
                    )
                ),
            )
        ),
        refused=lambda: at.maybe(
            lambda: at.record(stream=at.text, key=lambda: at.maybe(at.text), expected=at.text, actual=at.text)
        ),
        order=lambda: at.maybe(lambda: at.record(connection=at.long, epoch=at.long, number=at.long)),
        prepared=lambda: at.array(lambda: at.record(stream=at.text, segment=at.long, number=at.long)),
    )
    assert found == vector["decoded"]
    assert at.place == len(at.data)


@pytest.mark.parametrize("vector", of("record_header"))
def test_a_stranger_reads_the_headers_of_records(vector: Vector) -> None:
    at = Stranger(bytes.fromhex(vector["header"]))
    assert uuid(at.take(16)) == vector["transaction"]
    sequences = [at.number(8)]
    if at.place < len(at.data):
        assert at.number(1) == 1
        count = at.leb128()
        steps = [at.leb128() for _ in range(count - 1)] if at.place < len(at.data) else [1] * (count - 1)
        for step in steps:
            sequences.append(sequences[-1] + step)
    assert sequences == vector["sequences"]
    assert list(unpack_run(at.data).sequences()) == sequences


@pytest.mark.parametrize("vector", of("identifiers", "sns"))
def test_a_stranger_reads_sns(vector: Vector) -> None:
    flags, segment, offset, local, transaction_id, sequence_id = struct.unpack(
        ">BQQQQQ", bytes.fromhex(vector["bytes"])
    )
    said = []
    if flags & 1:
        said.append(f"dlsn={segment >> 32}-{segment & 0xFFFFFFFF}:{offset}:{local}")
    if flags & 2:
        said.append(f"txid={transaction_id}")
    if flags & 4:
        said.append(f"seq={sequence_id}")
    assert ("empty" if flags & 8 else ",".join(said) or "any") == vector["text"]


def test_the_page_names_every_file_of_vectors() -> None:
    page = (ROOT.parent / "docs/protocol.md").read_text(encoding="utf-8")
    named = set(re.findall(r"schemas/vectors/([a-z_]+)\.json", page))
    assert named == {file.stem for file in (ROOT / "vectors").glob("*.json")}
