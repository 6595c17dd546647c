"""Every format that rollbridge writes, and what each reader of today does with what a newer release would write.

Two things may come: an *addition*, which says nothing that readers of today have to know, and a *newer version*, which
they would misunderstand. The rule is in docs/protocol.md, "Versions and compatibility"; here stands what it comes to.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest

import rollbridge
from bridge.tests.buffers import Buffer, check_batch
from bridge.tests.vector_files import READERS, header_of, vectors
from rollbridge.base.attribution import unpack_run
from rollbridge.base.errors import RollbridgeError
from rollbridge.base.ids import CounterCheckpoint
from rollbridge.base.mapper import NodeRecord, content_of
from rollbridge.base.sn import DLSN, SN, SN_BYTES, unpack_transaction_id
from rollbridge.buffer import frames
from rollbridge.buffer.frames import FrameHeader, FrameKind, decode_begin, decode_manifest
from rollbridge.buffer.savepoints import decode_savepoint
from rollbridge.buffer.snapshots import choose
from rollbridge.buffer.table import Rejection, State
from rollbridge.cas.shared_state import MARK_HEADER, entry_of
from rollbridge.client.futures import Completion
from rollbridge.commitlog.control import ControlKind, decode_control, peek_kind
from rollbridge.commitlog.outcomes import decode_terminated
from rollbridge.errors import CorruptDataError, InvalidRequestError, NewerFormatError, TransactionAbortedError
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import DeletedStream, former_among
from rollbridge_schemas import NAMES, codec
from schemas.tests.golden_files import GOLDEN

ADDED = b"\x02\x06abc"
"""What a newer release might write behind the last field that is known today."""


@dataclass(frozen=True)
class Format:
    """A format: how it is read, something of it, and what a newer release would make of that.

    ``addition`` must read as ``today``, where a format has room for any; ``newer`` must be refused with ``error``.
    """

    name: str
    read: Callable[[Any], object]
    today: Any
    addition: Any
    newer: Any
    error: type[RollbridgeError] = NewerFormatError


def in_json(schema: str) -> tuple[bytes, bytes, bytes]:
    """A node's golden record, one with a field more, and one of a version that is not known."""
    today = (GOLDEN / f"{schema}.json").read_bytes().rstrip(b"\n")
    datum = json.loads(today)
    return (
        today,
        json.dumps({**datum, "field_of_2030": {"a": [1]}}).encode(),
        json.dumps({"field_of_2030": 1, "version": codec(schema).version + 1}).encode(),
    )


ROOMS_OF_RECORDS = tuple(f"rollbridge.{room}." for room in ("base", "stream", "commitlog", "buffer", "metadata"))
for module in pkgutil.walk_packages(rollbridge.__path__, "rollbridge."):
    if module.name.startswith(ROOMS_OF_RECORDS):
        import_module(module.name)


def node_classes(base: type[Any] = NodeRecord) -> Iterator[type[NodeRecord]]:
    for cls in base.__subclasses__():
        yield from node_classes(cls)
        if cls.__module__.startswith(ROOMS_OF_RECORDS):
            yield cls


NODES = {cls.SCHEMA: cls for cls in node_classes()}


def first(name: str, *, of: str | None = None, where: str | None = None) -> bytes:
    """The value of the first vector of a file, or of the first one of a kind or schema."""
    for vector in vectors(name):
        if of in (None, vector.get("header", {}).get("kind")) and where in (None, vector.get("schema")):
            return bytes.fromhex(vector["value"])
    raise AssertionError(name)


def sealed(schema: str) -> Format:
    today = first("snapshots", where=schema)
    return Format(schema, READERS[schema], today, None, b"\2" + today[1:])


def value_of_frame(kind: str, read: Callable[[bytes], object]) -> Format:
    """Their version is that of the frame, see below."""
    today = first("frames", of=kind)
    return Format(f"{kind} frame", read, today, today + ADDED, None)


def entry(mark: bytes) -> object:
    return entry_of(SN(DLSN(0, 0, 7)), b"{}", [(MARK_HEADER, mark)])


CONTROL = first("control_records")
KEY = bytes.fromhex(vectors("control_records")[0]["key"])
TERMINATED = first("terminated_transactions")
RUN = bytes.fromhex(vectors("record_header")[1]["header"])
FORMATS = [
    *(Format(f"node {schema}", cls.from_json, *in_json(schema)) for schema, cls in sorted(NODES.items())),
    value_of_frame("BEGIN", decode_begin),
    value_of_frame("COMMIT", decode_manifest),
    value_of_frame("ABORT", frames.decode_abort),
    value_of_frame("EXTEND", frames.decode_extend),
    value_of_frame("SAVEPOINT", decode_savepoint),
    Format("control record", partial(decode_control, KEY), CONTROL, CONTROL + ADDED, b"\3" + CONTROL[1:]),
    Format("terminated transactions", decode_terminated, TERMINATED, TERMINATED + ADDED, b"\3" + TERMINATED[1:]),
    *map(sealed, sorted(READERS)),
    Format("synchronizer", entry, b"1 snapshot", None, b"2 snapshot of what"),
    Format(
        "node former",
        lambda name: former_among([name], StreamName("s", "orders")),
        "orders#5.100.12",
        "orders#5.100.12.9",
        None,
    ),
    Format("journal of counters", CounterCheckpoint.from_text, b"7 42 3 9 2", b"7 42 3 9 2 1", None),
    # Of these there will be no other form: it would get another name.
    Format("header rollbridge-txid", unpack_transaction_id, bytes(8), None, bytes(9), InvalidRequestError),
    Format("SN in bytes", SN.from_bytes, bytes(SN_BYTES), None, b"\x10" + bytes(SN_BYTES - 1), InvalidRequestError),
    Format("SN in text", SN.parse, "seq=1", None, "seq=1,v=2", InvalidRequestError),
]


def test_every_schema_is_of_a_format_in_the_table() -> None:
    binary = {"begin_frame", "commit_frame", "abort_frame", "extend_frame", "savepoint_frame"}
    binary |= {"control_record", "terminated_transactions"}
    assert NODES.keys() | READERS.keys() | binary == set(NAMES)
    assert not NODES.keys() & (READERS.keys() | binary)
    newer = {name: codec(name).version for name in NAMES if codec(name).version > 1}
    assert newer == {"stream": 2}, "a new version needs rows of its own here, and in the page"


@pytest.mark.parametrize("item", [item for item in FORMATS if item.addition is not None], ids=lambda item: item.name)
def test_an_addition_reads_as_what_is_known_of_it(item: Format) -> None:
    assert item.read(item.addition) == item.read(item.today)


@pytest.mark.parametrize("item", [item for item in FORMATS if item.newer is not None], ids=lambda item: item.name)
def test_a_newer_version_is_refused_and_the_error_says_why(item: Format) -> None:
    item.read(item.today)
    with pytest.raises(item.error) as caught:
        item.read(item.newer)
    assert caught.value.code in ("newer-format", "invalid-request")
    if item.error is NewerFormatError:
        assert re.search("knows [12] at most|knows 1|unknown", str(caught.value))


@pytest.mark.parametrize(("front", "version"), [(b"\3", 2), (b"\5", 3)])
def test_the_error_names_the_version_that_is_not_known(front: bytes, version: int) -> None:
    with pytest.raises(NewerFormatError, match=rf"version {version}\b.*knows 1"):
        content_of("a record", front)


def test_snapshots_of_a_newer_release_are_passed_over_and_named() -> None:
    newer = b"\2" + first("snapshots", where="snapshot_indexes")[1:]
    today = READERS["snapshot_indexes"](first("snapshots", where="snapshot_indexes"))
    choice = choose([newer], today.partition, today.topic_id, 1 << 40, 1 << 40)  # type: ignore[union-attr]
    assert choice.record is None
    assert "has version 2" in choice.faults[0]


# Control records


@pytest.mark.parametrize("version", [3, 5, 127])
def test_whoever_needs_the_kind_alone_reads_control_records_of_any_version(version: int) -> None:
    for vector in vectors("control_records"):
        value = bytes.fromhex(vector["value"])
        if vector["version"]:
            newer = bytes([version]) + value[1:2] + b"whatever comes"
            assert peek_kind(newer) is ControlKind(vector["decoded"]["kind"])
            assert peek_kind(bytes([version])) is None


def test_an_outcome_of_a_newer_version_tells_a_commit_and_says_that_the_rest_is_not_known() -> None:
    [commit, abort] = (
        next(bytes.fromhex(item["value"]) for item in vectors("control_records") if item["decoded"]["kind"] == kind)
        for kind in ("COMMIT", "ABORT")
    )
    done = Completion(KEY)
    done.settle(b"\3" + commit[1:], 17)
    assert done.error() is None
    with pytest.raises(NewerFormatError, match="upgrade"):
        _ = done.record
    refused = Completion(KEY)
    refused.settle(b"\3" + abort[1:], 18)
    with pytest.raises(NewerFormatError, match="upgrade"):
        refused.error()


def test_an_outcome_of_an_earlier_release_is_read() -> None:
    [old] = (item for item in vectors("control_records") if item["version"] == 0)
    done = Completion(KEY, client_name="somebody else")
    assert done.is_of_another(bytes.fromhex(old["value"]))
    done.settle(bytes.fromhex(old["value"]), 3)
    assert isinstance(done.error(), TransactionAbortedError)


# Frames: their version stands in the key, behind the magic, and all that is known of a newer one is whose it is


def newer(header: FrameHeader, version: int = 2) -> bytes:
    """The key of a frame of a newer version, of any length from the transaction id on."""
    packed = header.pack()
    return packed[:2] + bytes([version]) + packed[3:20] + b"something else"


@pytest.mark.parametrize("kind", [*map(int, FrameKind), 7, 255])
def test_a_frame_of_a_newer_version_has_its_open_transaction_refused_and_is_counted(kind: int) -> None:
    buffer = Buffer()
    transaction, other = buffer.begin(1), buffer.begin(2)
    key = newer(FrameHeader(FrameKind.DATA, transaction))
    buffer.raw(key[:3] + bytes([kind]) + key[4:], b"whatever")
    item = buffer.fold.open[transaction]
    assert item.state is State.ABORTING
    assert "frames of version 2, and its coordinator knows 1" in item.reason
    assert buffer.fold.open[other].state is State.OPEN
    assert buffer.fold.rejected == {Rejection.NEWER: 1}


def test_one_that_is_decided_stays_so_and_one_that_never_began_is_only_counted() -> None:
    buffer = Buffer()
    transaction = buffer.begin(1)
    buffer.commit(transaction, {})
    buffer.raw(newer(FrameHeader(FrameKind.ABORT, transaction)), b"")
    assert buffer.fold.open[transaction].state is State.COMMITTING
    buffer.raw(newer(FrameHeader(FrameKind.BEGIN, bytes(15) + b"\7")), b"", "s/b")
    assert buffer.fold.rejected == {Rejection.NEWER: 2}
    assert len(buffer.fold.open) == 1


@pytest.mark.parametrize("key", [b"RB\2", b"RB\2\1" + bytes(15), b"XY\2\1" + bytes(16), b"RB\0\1" + bytes(16), None])
def test_what_names_no_transaction_is_no_frame(key: bytes | None) -> None:
    buffer = Buffer()
    transaction = buffer.begin(1)
    buffer.raw(key, b"")
    assert buffer.fold.rejected == {Rejection.FOREIGN: 1}
    assert buffer.fold.open[transaction].state is State.OPEN


def test_a_kind_that_is_not_known_is_counted_and_in_a_bundle_it_refuses_the_transaction() -> None:
    buffer = Buffer()
    transaction = buffer.begin(1)
    packed = FrameHeader(FrameKind.EXTEND, transaction).pack()
    buffer.raw(packed[:3] + b"\7" + packed[4:], b"")
    assert buffer.fold.rejected == {Rejection.FOREIGN: 1}
    assert buffer.fold.open[transaction].state is State.OPEN
    key, value = frames.pack_bundle([(packed[:3] + b"\7" + packed[4:], b"")])
    buffer.raw(key, value)
    assert buffer.fold.open[transaction].state is State.ABORTING


def test_frames_with_additions_are_folded_as_those_of_today() -> None:
    """Additions in the values of a whole transaction; the vectors' streams are sales/orders and sales/payments."""
    buffer = Buffer()
    made = {vector["header"]["kind"]: vector for vector in reversed(vectors("frames"))}
    for kind in ("BEGIN", "EXTEND", "COMMIT"):
        header, value = header_of(made[kind]), bytes.fromhex(made[kind]["value"])
        buffer.raw(header.pack(), value + ADDED, "sales/orders")
    [item] = buffer.fold.open.values()
    assert not buffer.fold.rejected
    assert (item.state, len(item.manifest.pieces if item.manifest else ())) == (State.COMMITTING, 2)
    assert check_batch(b"1|", 1) is None


# Headers of records


def test_the_header_of_a_run_of_a_newer_version_tells_who_wrote_its_first_record() -> None:
    known = unpack_run(RUN)
    run = unpack_run(RUN[:24] + b"\2" + b"whatever")
    assert (run.transaction, run.first, run.records) == (known.transaction, known.first, 1)


def test_numbers_behind_those_that_are_known_of_a_deleted_stream_leave_these_as_they_are() -> None:
    assert former_among(["orders#5.100.12.9.x"], StreamName("s", "orders")) == DeletedStream(5, 100, 12)
    assert former_among(["orders#5.x.12"], StreamName("s", "orders")) == DeletedStream()


def test_an_error_of_a_newer_format_is_one_of_corrupt_data_to_programs_that_do_not_know_it() -> None:
    assert issubclass(NewerFormatError, CorruptDataError)
    assert (NewerFormatError.code, NewerFormatError.exit_code) == ("newer-format", CorruptDataError.exit_code)
