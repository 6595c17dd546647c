"""Requests that a transactional producer should not send, by hand, and some that it may.

Each is sent to a broker, whose topics are plain, and to a gateway, whose topics are adopted, or one of a stream with
key ranges; see ``test_gateway_differential.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from kio.schema.errors import ErrorCode

from bridge.tests.batch_makers import INT_MAX, record
from gateway.tests.claims import batch
from integration_tests.patience import eventually
from integration_tests.replaying import Line, Said
from rollbridge_gateway.producer.table import NOBODY, Pair
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

HOUR_MS: Final = 3_600_000
KINDS: Final[Mapping[str, tuple[int, Mapping[str, str]]]] = {
    "main": (2, {}),
    "compacted": (1, {"cleanup.policy": "compact"}),
    "small": (1, {"max.message.bytes": "2000"}),
    "timed": (1, {"message.timestamp.before.max.ms": str(HOUR_MS)}),
    "append": (1, {"message.timestamp.type": "LogAppendTime"}),
    "ranges": (8, {}),
}
"""Topics: their partitions and settings. The last one is a stream with key ranges at the gateway."""


def records_of(count: int, after_ms: Mapping[int, int] = MappingProxyType({})) -> bytes:
    """Return records of a batch, some of them so long after its first time."""
    return b"".join(record(number, key=b"k", after_ms=after_ms.get(number, 0)) for number in range(count))


class Dialogue:
    """What was asked of one side, and what it said."""

    def __init__(self, address: tuple[str, int], prefix: str, topics: Mapping[str, str]) -> None:
        self.line = Line(address)
        self.prefix = prefix
        self.topics = topics
        self.now_ms = int(time.time() * 1000)
        self.said: list[Said] = []

    def ask(self, what: str, api: Api, version: int, values: Mapping[str, Any], *, is_answered: bool = True) -> Any:
        request = wire.write_request(api, version, 7, f"{self.prefix}.client", values)
        answer = self.line.ask(api, version, request, is_answered=is_answered)
        self.said.append(Said(what, api, answer))
        return answer


class Hand:
    """A transactional producer by hand, of transactions v1 or v2."""

    def __init__(self, dialogue: Dialogue, what: str, *, v2: bool, name: str | None = None) -> None:
        self._dialogue = dialogue
        self.what = f"{what}, v{1 + v2}"
        self.v2 = v2
        self.name = f"{dialogue.prefix}.{self.what}" if name is None else name
        self.pair = NOBODY

    def init(self, timeout: timedelta = timedelta(minutes=10), pair: Pair = NOBODY) -> Hand:
        answer = self._ask(
            Api.INIT_PRODUCER_ID,
            5 if self.v2 else 4,
            {**self._of(pair), "transaction_timeout": timeout},
        )
        if answer.error_code is ErrorCode.none:
            self.pair = Pair(int(answer.producer_id), int(answer.producer_epoch))
        return self

    def add(self, topic: str = "main", *partitions: int, pair: Pair | None = None) -> Hand:
        values = {
            **{f"v3_and_below_{key}": value for key, value in self._of(pair).items()},
            "v3_and_below_topics": [{"name": self._named(topic), "partitions": partitions or (0,)}],
        }
        self._ask(Api.ADD_PARTITIONS_TO_TXN, 3, values)
        return self

    def write(
        self,
        records: bytes | None = None,
        topic: str = "main",
        partition: int = 0,
        *,
        count: int = 1,
        acks: int = -1,
        pair: Pair | None = None,
        made: bytes | None = None,
        **given: Any,
    ) -> Hand:
        """Write a batch at sequence number 0 unless it says otherwise, or the batches that were made."""
        content = record(0, key=b"k") if records is None else records
        if made is None:
            made = batch(self.pair if pair is None else pair, content, count, **{"sequence": 0, **given})
        values = {
            "transactional_id": self.name,
            "acks": acks,
            "timeout": timedelta(seconds=30),
            "topic_data": [{"name": self._named(topic), "partition_data": [{"index": partition, "records": made}]}],
        }
        self._ask(Api.PRODUCE, 12 if self.v2 else 11, values, is_answered=acks != 0)
        return self

    def add_offsets(self, group: str | None = None, pair: Pair | None = None) -> Hand:
        self._ask(Api.ADD_OFFSETS_TO_TXN, 4, {**self._of(pair), "group_id": self._group(group)})
        return self

    def offsets(
        self,
        topic: str = "main",
        *places: tuple[int, int],
        group: str | None = None,
        pair: Pair | None = None,
        **given: Any,
    ) -> Hand:
        parts = [{"partition_index": at, "committed_offset": offset} for at, offset in places or ((0, 5),)]
        topics = [{"name": self._named(topic), "partitions": parts}]
        values = {"generation_id": -1, **given, **self._of(pair), "group_id": self._group(group), "topics": topics}
        self._ask(Api.TXN_OFFSET_COMMIT, 5 if self.v2 else 4, values)
        return self

    def end(self, *, commit: bool = True, pair: Pair | None = None, follows: bool = True) -> Hand:
        answer = self._ask(Api.END_TXN, 5 if self.v2 else 4, {**self._of(pair), "committed": commit})
        if self.v2 and follows and answer.error_code is ErrorCode.none:
            self.pair = Pair(int(answer.producer_id), int(answer.producer_epoch))
        return self

    def await_markers(self) -> Hand:
        """Wait until a broker has written the markers of what has ended, from which on its partitions know of that."""
        request = wire.write_request(Api.DESCRIBE_TRANSACTIONS, 0, 7, None, {"transactional_ids": [self.name]})

        def is_written() -> bool:
            [state] = self._dialogue.line.ask(Api.DESCRIBE_TRANSACTIONS, 0, request).transaction_states
            return not state.transaction_state.startswith("Prepare")

        eventually(is_written, "the markers are written")
        return self

    def begin(self) -> Hand:
        """Have a transaction open, with a record in it."""
        return self.init().opened()

    def opened(self) -> Hand:
        if not self.v2:
            self.add("main", 0, 1)
        return self.write()

    def _of(self, pair: Pair | None) -> dict[str, Any]:
        producer_id, epoch = self.pair if pair is None else pair
        return {"transactional_id": self.name, "producer_id": producer_id, "producer_epoch": epoch}

    def _named(self, topic: str) -> str:
        return self._dialogue.topics.get(topic, f"{self._dialogue.prefix}.{topic}")

    def _group(self, group: str | None) -> str:
        return f"{self._dialogue.prefix}.group" if group is None else group

    def _ask(self, api: Api, version: int, values: Mapping[str, Any], *, is_answered: bool = True) -> Any:
        return self._dialogue.ask(self.what, api, version, values, is_answered=is_answered)


def ask_wrongly(dialogue: Dialogue) -> None:
    """Ask one side for everything."""
    for key_type in (0, 1):
        values = {"key_type": key_type, "coordinator_keys": [f"{dialogue.prefix}.group"]}
        dialogue.ask("where coordinators are", Api.FIND_COORDINATOR, 4, values)
    for name in ("", " "):
        dialogue.ask("a blank name", Api.FIND_COORDINATOR, 4, {"key_type": 1, "coordinator_keys": [name]})
        begun = {"transaction_timeout_ms": 60_000, "producer_id": -1, "producer_epoch": -1}
        dialogue.ask("a blank name", Api.INIT_PRODUCER_ID, 4, {"transactional_id": name, **begun})
    for v2 in (False, True):
        _pairs(dialogue, v2=v2)
        _names(dialogue, v2=v2)
        _offsets(dialogue, v2=v2)
        _ends(dialogue, v2=v2)
        _batches(dialogue, v2=v2)
        _times(dialogue, v2=v2)
    for api, version in ((Api.PRODUCE, 99), (Api.END_TXN, 6), (Api.INIT_PRODUCER_ID, 7), (Api.API_VERSIONS, 99)):
        request = wire.write_request(api, 3, 7, None, {})
        request = request[:2] + version.to_bytes(2, "big") + request[4:]
        answer = dialogue.line.ask(api, 0, request)
        dialogue.said.append(Said(f"version {version}", api, getattr(answer, "error_code", answer)))


def _each(hand: Hand, pair: Pair) -> None:
    """Ask for everything with a pair."""
    hand.add(pair=pair).write(pair=pair, sequence=1).add_offsets(pair=pair).offsets(pair=pair)
    hand.end(pair=pair, follows=False).end(commit=False, pair=pair, follows=False)
    hand.init(pair=pair)


def _pairs(dialogue: Dialogue, *, v2: bool) -> None:
    def hand(what: str) -> Hand:
        return Hand(dialogue, what, v2=v2)

    other = hand("another producer").begin()
    for is_open in (True, False):
        state = "within" if is_open else "outside"
        for what in ("another's producer id", "next producer id", "epoch too high", "epoch too low", "no pair"):
            producer = hand(f"{what}, {state}").init().init()
            if is_open:
                producer.opened()
            pid, epoch = producer.pair
            wrong = {
                "another's producer id": other.pair,
                "next producer id": Pair(pid + 1, epoch),
                "epoch too high": Pair(pid, epoch + 1),
                "epoch too low": Pair(pid, epoch - 1),
                "no pair": NOBODY,
            }[what]
            _each(producer, wrong)
            producer.init()  # which ends what is open
            for half in (Pair(pid, -1), Pair(-1, epoch)):
                producer.init(pair=half)
    fenced = hand("fenced by another").begin()
    pair = fenced.pair
    fenced.init()
    _each(fenced, pair)
    other.init()
    _each(hand("unknown transactional id"), Pair(3, 0))
    for timeout in (timedelta(0), timedelta(milliseconds=-1), timedelta(minutes=16), timedelta(days=8)):
        hand(f"time-out of {timeout.total_seconds():g} s").init(timeout)


def _names(dialogue: Dialogue, *, v2: bool) -> None:
    def hand(what: str, name: str | None = None) -> Hand:
        return Hand(dialogue, what, v2=v2, name=name)

    empty = hand("empty transactional id", "").init()
    _each(empty, Pair(3, 0))
    for topic, partitions in (("main", 2), ("ranges", 8)):
        for partition in (partitions, 99, -1):
            producer = hand(f"partition {partition} of {topic}").init()
            producer.add(topic, 0, partition).add(topic, partition).write(topic=topic, partition=partition)
            producer.add(topic, 0).write(topic=topic).write(topic=topic, partition=partition).end()
    hand("unknown topic").init().add("none").write(topic="none").end()
    hand("topic without a name").init().add("").write(topic="").end()
    hand("internal topic").init().add("__consumer_offsets").write(topic="__consumer_offsets").end()


def _offsets(dialogue: Dialogue, *, v2: bool) -> None:
    def hand(what: str) -> Hand:
        producer = Hand(dialogue, what, v2=v2).begin()
        return producer if v2 else producer.add_offsets()

    hand("offsets of partition 99").offsets("main", (0, 1), (99, 1)).end()
    hand("offsets of partition -1").offsets("main", (-1, 1)).end()
    hand("offsets of an unknown topic").offsets("none").end()
    hand("offsets below 0").offsets("main", (0, -1)).offsets("main", (0, -5)).end()
    hand("empty group").add_offsets("").offsets(group="").end()
    hand("unknown member").offsets(generation_id=1, member_id="ghost").offsets(member_id="ghost").end()
    hand("wrong generation").offsets(generation_id=7).end()
    hand("unknown static member").offsets(group_instance_id="one", member_id="ghost", generation_id=1).end()
    parts = [{"partition_index": 0, "committed_offset": 1, "committed_metadata": "x" * 5_000}]
    producer = hand("metadata too large")
    producer.offsets(topics=[{"name": dialogue.topics["main"], "partitions": parts}]).end()
    if not v2:
        Hand(dialogue, "offsets that were not added", v2=False).begin().offsets().end()


def _ends(dialogue: Dialogue, *, v2: bool) -> None:
    names = {True: "commit", False: "abort"}
    for first in (True, False):
        for second in (True, False):
            producer = Hand(dialogue, f"{names[first]}, then {names[second]}", v2=v2).begin()
            pair = producer.pair
            producer.end(commit=first, pair=pair)
            if v2:
                producer.await_markers().write(pair=pair)
            producer.end(commit=second, pair=pair, follows=False)
            _each(producer, pair)
            producer.end(commit=second)
            producer.opened().end()
        Hand(dialogue, f"{names[first]} without begin", v2=v2).init().end(commit=first).opened().end()
        Hand(dialogue, f"{names[first]} of what was only added", v2=v2).init().add().end(commit=first).opened().end()
    Hand(dialogue, "records that were not added", v2=v2).init().write().end()


def _batches(dialogue: Dialogue, *, v2: bool) -> None:
    producer = Hand(dialogue, "acks", v2=v2).begin()
    for acks in (0, 1, 2, -2):
        producer.what = f"acks {acks}"
        producer.write(acks=acks, partition=1, sequence=0 if acks == 0 else 1)
    producer.what = "the record behind acks 0 and 1"
    producer.write(partition=1, sequence=2).end()
    one, two = records_of(1), records_of(2)
    claimed: Mapping[str, Mapping[str, Any]] = {
        "count too high": {"records": two, "count": 3},
        "count too low": {"records": two, "count": 1},
        "count none": {"records": b"", "count": 0, "last": 0},
        "count below zero": {"count": -1, "last": 0},
        "count of all": {"count": INT_MAX},
        "last offset too high": {"last": 4},
        "last offset below zero": {"last": -2},
        "record too long": {"records": record(0, size=99)},
        "record too short": {"records": record(0, size=3)},
        "record of no size": {"records": record(0, size=-1)},
        "headers that are not there": {"records": record(0, headers=4)},
        "headers below zero": {"records": record(0, headers=-1)},
        "bytes behind": {"records": one + b"\0\0\0"},
        "no sequence": {"sequence": -1},
        "sequence gap": {"sequence": 7},
        "not transactional": {"attributes": 0},
        "control": {"attributes": 0x30},
        "time of an append": {"attributes": 0x18},
        "unknown codec": {"attributes": 0x17},
        "no gzip": {"attributes": 0x11},
        "no zstd": {"attributes": 0x14},
        "checksum": {"crc": 1},
        "magic 1": {"magic": 1},
        "magic 3": {"magic": 3},
        "base offset": {"base_offset": 7},
        "longer than it is": {"length": 400},
        "shorter than it is": {"length": 50},
        "no key": {"topic": "compacted", "records": record(0)},
        "too large": {"topic": "small", "records": record(0, b"v" * 3_000)},
        "too large, of small records": {"topic": "small", "records": records_of(300), "count": 300},
        "no bytes": {"made": b""},
        "two batches": {"made": batch(producer.pair, one, 1) * 2},
    }
    producer = Hand(dialogue, "batches", v2=v2).begin()
    if not v2:
        producer.add("compacted").add("small")
    for what, given in claimed.items():
        producer.what = f"batch: {what}, v{1 + v2}"
        producer.write(**{"sequence": 1, **({"sequence": 0} if "topic" in given else {}), **given})
    producer.what = f"batches in order, v{1 + v2}"
    for sequence in (1, 2, 3, 4, 5, 6, 6, 5, 2, 1, 0, 9, 7):
        producer.write(sequence=sequence)
    producer.end()
    producer = Hand(dialogue, "first batch of a partition", v2=v2).begin()
    for sequence in (5, 6, 0):
        producer.write(partition=1, sequence=sequence)
    producer.end()


def _times(dialogue: Dialogue, *, v2: bool) -> None:
    now_ms = dialogue.now_ms
    producer = Hand(dialogue, "times", v2=v2).begin()
    if not v2:
        producer.add("timed").add("append").add("ranges")
    sequences = dict.fromkeys(("main", "timed", "append", "ranges"), 0) | {"main": 1}
    for topic in sequences:
        for what, (base, after, last) in {
            "now": (0, 0, 0),
            "ahead": (2, 0, 2),
            "behind": (-2, 0, -2),
            "one ahead": (0, 2, 2),
            "one ahead, untold": (0, 2, 0),
            "one behind": (0, -2, 0),
            "last untold": (0, 0, -2),
            "last told ahead": (0, 0, 2),
        }.items():
            records = records_of(3, {1: after * HOUR_MS})
            times = now_ms + base * HOUR_MS, now_ms + last * HOUR_MS
            producer.what = f"time {what}, {topic}, v{1 + v2}"
            producer.write(records, topic, count=3, times=times, sequence=sequences[topic])
            if dialogue.said[-1].answer.responses[0].partition_responses[0].error_code is ErrorCode.none:
                sequences[topic] += 3
    producer.end()
