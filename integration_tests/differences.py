"""What may differ between the answers of a broker and those of a gateway: one table, each row with its reason.

Answers are taken to pieces, and each field is compared. From the rows that users meet ``docs/gateway.md`` has the table
in its section *What is different*: ``python -m integration_tests.differences`` writes it, and a test fails when it is
stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollbridge.kafka.records import FetchedBatches, read_records
from rollbridge_gateway.protocol.versions import Api

BY_HAND: Final = "by hand"
"""Session of requests that no client sends."""


class Difference(NamedTuple):
    """A field of an answer that is another one at a gateway.

    Attributes:
        session, what: Who has asked, and what for, where that has a name.
        api: Name of the request.
        field: Path of the field, without numbers.
        broker, gateway: Its values.
    """

    session: str
    what: str
    api: str
    field: str
    broker: str
    gateway: str


@dataclass(frozen=True)
class Allowed:
    """A row: patterns of what may differ, with ``|`` between several, and why.

    Attributes:
        api, field, broker, gateway, what: Patterns of those fields of a :class:`Difference`.
        why: The reason, a sentence of the page if ``asked`` is given.
        met_by: Session in which it has to be met, so that no row stands here for nothing.
        asked: What the page says that was asked for, if users meet it.
    """

    api: str
    field: str
    broker: str
    gateway: str
    why: str
    what: str = "*"
    met_by: str = BY_HAND
    asked: str = ""

    def covers(self, found: Difference) -> bool:
        """Return whether a difference is of this row."""
        mine = (self.what, self.api, self.field, self.broker, self.gateway)
        return all(
            any(fnmatch(value, one) for one in patterns.split("|"))
            for patterns, value in zip(mine, found[1:], strict=True)
        )


_CODE: Final = "*error_code"
ALLOWED: Final[Sequence[Allowed]] = (
    # What is each server's own
    Allowed(
        "METADATA|DESCRIBE_CLUSTER|FIND_COORDINATOR",
        "*host|*port|*node_id|brokers.rack",
        "*",
        "*",
        "Clients find brokers at a gateway's address. It is one more broker, which coordinates transactions.",
    ),
    Allowed(
        "INIT_PRODUCER_ID|END_TXN",
        "producer_id|producer_epoch",
        "*",
        "*",
        "Each server counts its own; each InitProducerId of a gateway begins with another producer id.",
    ),
    Allowed(
        "API_VERSIONS",
        "api_keys.*|supported_features.*|finalized_features*",
        "*",
        "*",
        "It offers what it serves, and tells the version of transactions alone.",
        met_by="librdkafka",
    ),
    Allowed("*", "*topic_id", "*", "*", "They are two topics.", met_by="librdkafka"),
    Allowed("11", "*member_id|leader", "*", "*", "Brokers draw them.", met_by="librdkafka"),
    Allowed("FETCH", "session_id", "*", "*", "Brokers draw them.", met_by="java 3.9"),
    Allowed("FIND_COORDINATOR", "*error_message", "NONE|", "None", "It is no error.", met_by="librdkafka"),
    Allowed(
        "FETCH",
        "*high_watermark|*last_stable_offset|*aborted_transactions.*|*records",
        "*",
        "*",
        "What is aborted never comes into the topic, and what is committed comes in one piece.",
        met_by="librdkafka",
    ),
    Allowed(
        "DESCRIBE_TRANSACTIONS|DESCRIBE_PRODUCERS|LIST_TRANSACTIONS",
        "*producer_id|*transaction_start_time|*active_producers.*",
        "*",
        "*",
        "They are two transactions; where one begins in a topic is known at its commit.",
        met_by="tools",
    ),
    Allowed(
        "LIST_TRANSACTIONS",
        "transaction_states.*",
        "*",
        "absent",
        "None is listed at a gateway's own address: who asks all brokers hears of each once.",
        met_by="tools",
    ),
    # Answers to what is right
    Allowed(
        "PRODUCE",
        "*base_offset|*log_start_offset",
        "*",
        "-1",
        "The offset of a record is known at the commit: `RecordMetadata` has no offset.",
        asked="a record is written",
    ),
    Allowed("PRODUCE", "*log_append_time", "*", "None", "When a record is appended is known at the commit."),
    Allowed(
        "INIT_PRODUCER_ID",
        _CODE,
        "invalid_transaction_timeout",
        "none",
        "It is the lease of transactions that block no reader: up to seven days.",
        "time-out of 960 s*",
        asked="a `transaction.timeout.ms` of more than 15 minutes",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "message_too_large",
        "none",
        "It is written in smaller ones, if its records are small enough.",
        "batch: too large, of small records*",
        asked="a batch is larger than the topic's `max.message.bytes`",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "invalid_timestamp",
        "none",
        "A stream with key ranges has no limits of times, unlike a topic.",
        "time *, ranges*",
        asked="a record of a stream with key ranges is of more than an hour ahead",
    ),
    Allowed(
        "END_TXN",
        _CODE,
        "invalid_txn_state",
        "none",
        "librdkafka asks for it after a refusal, and takes another refusal for fatal.",
        "abort*, v1|commit, then abort, v1",
        asked="an abort without a transaction, with transactions v1",
    ),
    Allowed(
        "TXN_OFFSET_COMMIT",
        _CODE,
        "transaction_abortable",
        "none",
        "AddOffsetsToTxn says nothing that the offsets do not say.",
        "offsets that were not added*",
        asked="offsets of a group that was not added, with transactions v1",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "invalid_producer_epoch",
        "none",
        "The answer to it may have been lost. Nothing is written twice.",
        "*, then *, v2",
        asked="a batch is sent again behind the end of its transaction",
    ),
    # Answers to what is wrong
    Allowed("PRODUCE", "*error_message|*record_errors.*", "*", "*", "Texts of errors are rollbridge's own."),
    Allowed(
        "PRODUCE|ADD_PARTITIONS_TO_TXN",
        _CODE,
        "unknown_topic_or_partition",
        "invalid_topic_exception",
        "Clients ask again and again for a topic that is not there; this one they do not.",
        "unknown topic*|topic without a name*|internal topic*",
        asked="a topic that does not exist, or is internal",
    ),
    Allowed(
        "TXN_OFFSET_COMMIT",
        _CODE,
        "none",
        "invalid_request",
        "No record has such an offset, and no consumer could continue from it.",
        "offsets below 0*",
        asked="an offset below 0 is to be committed",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "none",
        "invalid_timestamp",
        "Only brokers set the time of an append; they write over that of a producer.",
        "batch: time of an append*",
        asked="a batch has the time of an append",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "none",
        "invalid_record|invalid_producer_id_mapping",
        "A broker looks at the transactional id or at the producer of a batch, and not at whether they fit.",
        "no pair*|another's producer id*",
        asked="a batch of another transaction, or of no producer",
    ),
    Allowed(
        "PRODUCE",
        _CODE,
        "invalid_txn_state|unknown_server_error|corrupt_message|unsupported_compression_type",
        "invalid_record",
        "It is refused, whatever is the matter with it.",
        "batch: not transactional*|batch: unknown codec*|batch: no *|batch: magic 3*|batch: shorter than it is*",
        asked="a batch is damaged, or not transactional",
    ),
    Allowed(
        "INIT_PRODUCER_ID",
        _CODE,
        "none",
        "producer_fenced",
        "A broker counts its epochs up until it fits, as it aborts what is open.",
        "epoch too high, within*",
    ),
)


PAGE: Final = Path(__file__).parents[1] / "docs" / "gateway.md"
_MARK: Final = re.compile(r"(<!-- differences -->\n\n).*(\n<!-- end of differences -->\n)", re.DOTALL)


def with_table(text: str) -> str:
    """Return the page with the table as it should be."""
    rows = [("where", "a broker", "a gateway", "why"), ("---",) * 4]
    rows += [(row.asked, _said(row, row.broker), _said(row, row.gateway), row.why) for row in ALLOWED if row.asked]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _MARK.sub(lambda mark: f"{mark[1]}{table}{mark[2]}", text)


def _said(row: Allowed, values: str) -> str:
    if row.field == _CODE:
        return ", ".join("taken" if value == "none" else f"`{value.upper()}`" for value in values.split("|"))
    return "its offset" if values == "*" else f"`{values}`"


def judge(session: str, found: Iterable[Difference]) -> list[str]:
    """Return what is wrong with the differences of a session: those that no row allows, and rows that were not met."""
    met: set[Allowed] = set()
    faults: dict[str, None] = {}
    for item in found:
        rows = [row for row in ALLOWED if row.covers(item)]
        met.update(rows)
        if not rows:
            faults[f"{item.what}: {item.api} {item.field}: {item.broker} at the broker, {item.gateway} here"] = None
    return [*faults, *(f"never met: {row}" for row in ALLOWED if row.met_by == session and row not in met)]


def compared(
    session: str, what: str, api: int, broker: Any, gateway: Any, names: tuple[Mapping[str, str], Mapping[str, str]]
) -> Iterator[Difference]:
    """Return the differences between two answers to the same request.

    Args:
        session: Who has asked.
        what: What for.
        api: Key of the request.
        broker, gateway: The answers.
        names: What names of theirs stand for, at the broker and here.
    """
    theirs, ours = (dict(_fields("", item, known)) for item, known in zip((broker, gateway), names, strict=True))
    for path in dict.fromkeys((*theirs, *ours)):
        values = theirs.get(path, "absent"), ours.get(path, "absent")
        if values[0] != values[1]:
            yield Difference(
                session, what, _name(api), ".".join(part for part in path if not part.startswith("[")), *values
            )


def _name(api: int) -> str:
    return Api(api).name if api in set(Api) else str(api)


_KEYS: Final = ("name", "index", "partition_index", "api_key", "transactional_id", "group_id", "key", "node_id")
_LISTED: Final = ("topics", "groups", "transaction_states")
"""Fields that may list what others have."""
SHARED: Final = "PREFIX"
"""What names of a session begin with, whatever they begin with at the broker and here."""


def _fields(name: str, value: Any, names: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    if is_dataclass(value):
        for field in fields(value):
            for path, found in _fields(field.name, getattr(value, field.name), names):
                yield (name, *path) if name else path, found
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            place = next((_plain(getattr(item, key), names) for key in _KEYS if hasattr(item, key)), str(number))
            if name not in _LISTED or place.startswith(SHARED):
                for path, found in _fields("", item, names):
                    yield (name, f"[{place}]", *path), found
    elif name == "records" and value:
        batches = [batch for header, batch in FetchedBatches(bytes(value)) if not header.is_control]
        yield (name,), _plain([(item.key, item.value) for batch in batches for item in read_records(batch)], names)
    else:
        yield (name,) if name else (), _plain(value, names)


def _plain(value: Any, names: Mapping[str, str]) -> str:
    found = value.name if isinstance(value, Enum) else str(value)
    for mine, shared in names.items():
        found = found.replace(mine, shared)
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
