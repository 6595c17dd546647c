"""The public names of the package: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import inspect

import rollbridge

PUBLIC = {
    "ANY",
    "AbortFuture",
    "Admin",
    "Batch",
    "Bridge",
    "CasFuture",
    "CasWriter",
    "ClientOptions",
    "Codec",
    "CommitFuture",
    "CommitResult",
    "CommittedTransaction",
    "Consumer",
    "DLSN",
    "EMPTY",
    "GroupName",
    "JointTicket",
    "JointTransaction",
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
    "SegmentId",
    "SharedClient",
    "StreamDescription",
    "StreamName",
    "Token",
    "PlainFuture",
    "ProducedMessage",
    "Producer",
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


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        assert getattr(rollbridge, name).__doc__, f"bridge.{name} has no docstring"


def test_whatever_reads_goes_on_for_ever_by_default_as_a_kafka_consumer_does() -> None:
    readers = rollbridge.Bridge.reader, rollbridge.Bridge.transactions, rollbridge.Reader, rollbridge.TransactionReader
    assert [inspect.signature(reader).parameters["follow"].default for reader in readers] == [True] * 4
