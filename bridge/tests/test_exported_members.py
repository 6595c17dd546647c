"""The public names of the package: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import inspect

import pytest

import rollbridge

PUBLIC = {
    "ANY",
    "AbortFuture",
    "Admin",
    "ArrivedTransaction",
    "Batch",
    "Bridge",
    "CasFuture",
    "CasWriter",
    "Client",
    "ClientOptions",
    "Codec",
    "CommitFuture",
    "CommitResult",
    "CommittedTransaction",
    "Consumer",
    "DLSN",
    "EMPTY",
    "GroupName",
    "CooperativeTicket",
    "CooperativeTransaction",
    "LogPosition",
    "Message",
    "Outcome",
    "Part",
    "PartHandle",
    "SN",
    "ReadPosition",
    "Reader",
    "Record",
    "ResumedTransaction",
    "Savepoint",
    "SavepointFuture",
    "ScalingPolicy",
    "SegmentId",
    "SharedClient",
    "StreamDescription",
    "StreamName",
    "Token",
    "PlainFuture",
    "StreamWriter",
    "Synchronizer",
    "Transaction",
    "TransactionId",
    "TransactionReader",
    "TransactionStory",
    "WriteFuture",
    "WriterOptions",
    "connect",
}


def test_the_public_names_are_these() -> None:
    assert set(rollbridge.__all__) == PUBLIC


WRITER = {"flush", "id", "number", "records", "streams", "write", "write_all"}
OWNER = WRITER | {
    "abort", "abort_async", "commit", "commit_async", "expect", "extend", "label", "result", "rollback_to", "savepoint",
    "savepoint_async", "send_offsets",
}  # fmt: skip


@pytest.mark.parametrize(
    ("writer", "names"),
    [
        (rollbridge.Transaction, OWNER),
        (rollbridge.ResumedTransaction, OWNER | {"earlier_records", "last_savepoint"}),
        (rollbridge.Part, WRITER | {"check_parts", "finish"}),
    ],
)
def test_whoever_writes_a_transaction_sees_these_names(writer: type, names: set[str]) -> None:
    assert {name for name in dir(writer) if not name.startswith("_")} == names


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        assert getattr(rollbridge, name).__doc__, f"bridge.{name} has no docstring"


def test_whatever_reads_goes_on_for_ever_by_default_as_a_kafka_consumer_does() -> None:
    readers = rollbridge.Bridge.reader, rollbridge.Bridge.transactions, rollbridge.Reader, rollbridge.TransactionReader
    assert [inspect.signature(reader).parameters["follow"].default for reader in readers] == [True] * 4


WRITERS = {name: item for name in sorted(PUBLIC) if hasattr(item := getattr(rollbridge, name), "write_all")}


def test_these_write() -> None:
    assert set(WRITERS) == {"CasWriter", "Part", "ResumedTransaction", "StreamWriter", "Transaction"}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_whatever_writes_takes_the_same_arguments_in_the_same_order(writer: type) -> None:
    shared = ["key", "value", "headers", "timestamp"]
    where = ["stream"] if "stream" in inspect.signature(writer.write).parameters else []  # type: ignore[attr-defined]
    for write in (getattr(writer, name) for name in ("write", "write_async") if hasattr(writer, name)):
        parameters = inspect.signature(write).parameters
        positional = [name for name, of in parameters.items() if of.kind is of.POSITIONAL_OR_KEYWORD]
        assert positional == ["self", *where, "key", "value"]
        assert [name for name in parameters if name in shared] == shared
        assert [parameters[name].default for name in shared] == [None, None, (), None]
    many = inspect.signature(writer.write_all).parameters.values()  # type: ignore[attr-defined]
    assert [of.name for of in many if of.kind is of.POSITIONAL_OR_KEYWORD] == ["self", *where, "records"]


@pytest.mark.parametrize("name", ["JointTicket", "JointTransaction"])
def test_a_former_name_is_found_with_a_warning(name: str) -> None:
    present = name.replace("Joint", "Cooperative")
    with pytest.warns(FutureWarning, match=f"rollbridge.{name} is called {present} now"):
        assert getattr(rollbridge, name) is getattr(rollbridge, present)
