"""What a client that means harm writes: keys and values of frames, records, requests and nodes, from a seed.

Checksums are right wherever a wrong one would only hide what is behind it. Pure; ``integration_tests/hostile.py`` has
the client.
"""

from __future__ import annotations

import gzip
import json
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, Final

import rollbridge_schemas
from rollbridge.base.attribution import pack_run
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import HEADER, MAGIC, VERSION, FrameHeader, FrameKind, pack_bundle
from rollbridge.kafka.records import BatchBuilder, Compression, framed
from rollbridge.metadata.requests import RequestKind

Message = tuple[bytes | None, bytes | None]
"""Key and value."""
UNSIGNED: Final = (0, 1, 2, 127, 1_000, 65_535, 65_536, (1 << 23) - 1, 1 << 23, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SIGNED: Final = (-(1 << 31), -1, 0, 1, 2, 1_000, 65_536, (1 << 31) - 1)
LONGS: Final = (-(1 << 63), -1, 0, 1, 3, 60_000, 1 << 31, (1 << 40) - 1, 1 << 40, (1 << 63) - 1)
BOMB_BYTES: Final = 64 << 20
"""What a small frame becomes when it is decompressed."""
NEW_MAX: Final = 5
"""Streams that requests ask for; each has topics."""
CREATE_FIELDS: Final = ("segments", "ranges", "group", "buffer_partitions", "replication_factor", "record_bytes_max")
FORMER_KINDS: Final = ("move-stream", "take-stream")
"""Requests that clients and leaders of 0.2.0 know, and no later ones."""
OLD: Final = 1_000
"""Below are counters of transactions that were given out to the first clients."""
RANGES: Final[tuple[list[dict[str, float]], ...]] = (
    [],
    [{"low": 0.0, "high": 1.0}],
    [{"low": 0.0, "high": 0.0}],
    [{"low": -1.0, "high": 2.0}],
    [{"low": 0.0, "high": 0.7}, {"low": 0.5, "high": 1.0}],
    [{"low": number / 10_000, "high": (number + 1) / 10_000} for number in range(10_000)],
)
"""Of a scale or a new stream."""
NAMES: Final = ("", "/", "..", "a/b/c", "no such/stream", "\u0000", "\ud7ff" * 9, "x" * 5_000, "ünï", "rollbridge", "🂡")


class Content:
    """Everything of one seed.

    Args:
        choice: What decides.
        own: The stream to whose buffer it goes.
        others: Streams of others, of the same group and not.
        clients: Names of other clients.
        groups: Consumer groups of others.
        invents: Whether it names transactions whose ids nobody has given out yet.
    """

    def __init__(
        self,
        choice: random.Random,
        own: str,
        others: Sequence[str],
        clients: Sequence[str],
        groups: Sequence[str] = (),
        *,
        invents: bool = False,
    ) -> None:
        self._choice = choice
        self._invents = invents
        self._own, self._others, self._clients, self._groups = own, others, clients, groups
        self.seen: list[Message] = []
        """Real frames, to be changed and sent again."""
        self.ids: list[bytes] = []
        """Transactions, its own and those of others."""
        self._bomb = framed(gzip.compress(bytes(BOMB_BYTES), 1), codec=1, count=1, base_timestamp=1, max_timestamp=1)

    # -- frames ---------------------------------------------------------------------------------------------------

    def frame(self) -> Message:
        """One of any kind."""
        ways: list[Callable[[], Message]] = [
            self._noise,
            self._fields,
            self.begin,
            self.data,
            self.commit,
            self._abort,
            self._bundle,
            self.changed,
        ]
        return self._choice.choice(ways)()

    def id(self) -> bytes:
        """Of a transaction: one that there is, or any."""
        chance = self._choice.random()
        if chance < 0.6 and self.ids:
            return self._choice.choice(self.ids[-200:])
        return self.fresh_id()

    def fresh_id(self) -> bytes:
        """Of a transaction that nobody else has begun, perhaps."""
        if not self._invents:
            return TransactionId.of(self._choice.randrange(3), self._choice.randrange(1, OLD)).bytes
        chance = self._choice.random()
        if chance < 0.5:
            return TransactionId.of(0, self._choice.randrange(1 << 90)).bytes
        if chance < 0.8:
            return TransactionId.of(self._choice.randrange(65_536), self._choice.randrange(1 << 96)).bytes
        return self._choice.randbytes(16)

    def _noise(self) -> Message:
        sizes = (0, 1, 43, 44, 45, 300, 5_000)
        key = self._choice.randbytes(self._choice.choice(sizes)) if self._choice.random() < 0.8 else None
        value = self._choice.randbytes(self._choice.choice(sizes)) if self._choice.random() < 0.8 else None
        return key, value

    def _fields(self) -> Message:
        """Each field of the header for itself, and a value that need not fit."""
        key = HEADER.pack(
            MAGIC,
            self._choice.choice((0, VERSION, VERSION, VERSION, 2, 255)),
            self._choice.choice((0, 1, 2, 3, 4, 5, 6, 255)),
            self.id(),
            self._choice.choice(UNSIGNED),
            self._choice.choice(UNSIGNED),
            self._choice.choice([item & ((1 << 64) - 1) for item in LONGS]),
            self._choice.choice(UNSIGNED),
            self._choice.choice(UNSIGNED),
        )
        values = (self._begin_value, self._commit_value, self._batch, lambda: self._choice.randbytes(50), lambda: b"")
        return key, self._choice.choice(values)()

    def begin(self) -> Message:
        """A BEGIN frame that names whom and what it likes."""
        return FrameHeader(FrameKind.BEGIN, self.id()).pack(), self._begin_value()

    def data(self, transaction: bytes | None = None, part: int = 0) -> Message:
        """A DATA frame, right but for what is in it."""
        first, count = self._choice.choice((0, 1, 1_000, (1 << 40) - 1)), self._choice.choice((0, 1, 1, 1, 2, 1 << 31))
        return FrameHeader(FrameKind.DATA, transaction or self.id(), part, 0, first, count).pack(), self._batch()

    def commit(self, transaction: bytes | None = None) -> Message:
        """A COMMIT frame, with or without a number."""
        order = self._choice.choice(((0, 0, 0, 0), (1, 0, 1 << 24, 0), tuple(self._choice.choices(UNSIGNED, k=4))))
        segment, first, records, epoch = order
        header = FrameHeader(
            FrameKind.COMMIT, transaction or self.id(), 0, segment & 0x7FFF_FFFF, first, records, epoch
        )
        return header.pack(), self._commit_value()

    def _abort(self) -> Message:
        reason = self._choice.choice(("", "x", "y" * 100_000, "\u0000"))
        epoch = self._choice.choice(UNSIGNED)
        return (
            FrameHeader(FrameKind.ABORT, self.id(), client_epoch=epoch).pack(),
            rollbridge_schemas.codec("abort_frame").encode({"reason": reason}),
        )

    def _bundle(self) -> Message:
        frames = []
        for _ in range(self._choice.choice((1, 2, 50))):
            key, value = self._choice.choice((self.begin, self.data, self.commit, self._abort))()
            frames.append((key or b"", (value or b"")[:2_000]))
        key, value = pack_bundle(frames)
        chance = self._choice.random()
        if chance < 0.2:  # another number of frames than there are
            key = key[:36] + self._choice.choice((0, 1, 1 << 20, (1 << 32) - 1)).to_bytes(4, "big") + key[40:]
        elif chance < 0.3:  # a bundle in a bundle
            value = bytes([FrameKind.BUNDLE]) + value[1:]
        elif chance < 0.5:
            value = self._flipped(value)
        return key, value

    def changed(self) -> Message:
        """A frame that somebody has sent, again, or with something changed."""
        if not self.seen:
            return self._noise()
        key, value = self._choice.choice(self.seen)
        chance = self._choice.random()
        if chance < 0.2:
            return key, value
        if chance < 0.4 and key:
            if self._invents or len(key) < 20:
                return self._flipped(key), value
            return self._flipped(key[:4]) + key[4:20] + self._flipped(key[20:]), value
        if chance < 0.6 and value:
            return key, self._flipped(value)
        if chance < 0.75 and value:
            return key, value[: self._choice.randrange(len(value))]
        if chance < 0.9 and key:
            return key[:4] + self.id() + key[20:], value
        return key, self._choice.choice(self.seen)[1]

    def tiny(self, count: int) -> list[Message]:
        """Many small frames, of transactions that are new, and of one that is open."""
        one = self.id()
        batch = _batch_of(b"")
        value = self._begin_value()
        return [
            (FrameHeader(FrameKind.DATA, one, 1, 0, number, 1).pack(), batch)
            if number % 2
            else (
                FrameHeader(FrameKind.BEGIN, self.fresh_id()).pack(),
                value,
            )
            for number in range(count)
        ]

    def _begin_value(self) -> bytes:
        names = [self._own] * 6 + [*self._others, *NAMES]
        streams = [self._own, *self._choice.sample(names, self._choice.choice((0, 0, 0, 1, 2, 5)))]
        if self._choice.random() < 0.05:
            streams = [f"s/{number}" for number in range(1_100)]
        if self._choice.random() < 0.1:
            streams = []
        return _avro(
            "begin_frame",
            client_name=self._choice.choice([*self._clients, "mallory", *NAMES]),
            client_epoch=self._choice.choice(SIGNED),
            label=self._choice.choice([None, "", "l" * 1_000, "l" * 1_001, "\u0000"]),
            lease_ms=self._choice.choice((60_000, 60_000, 600_000, *LONGS)),
            streams=[{"stream": name, "reference_epoch": self._choice.choice((0, 0, 0, *SIGNED))} for name in streams],
            retain_ms=self._choice.choice(LONGS),
        )

    def _commit_value(self) -> bytes:
        entries = [
            {
                "part": self._choice.choice((0, 0, 1, *SIGNED)),
                "stream": self._choice.choice((0, 0, 1, *SIGNED)),
                "segment": self._choice.choice((0, 0, 1, *SIGNED)),
                "records": self._choice.choice((1, 1, 2, *LONGS)),
            }
            for _ in range(self._choice.choice((0, 1, 1, 2, 300)))
        ]
        offsets = self._offsets()
        details = self._details(sum(len(topic["partitions"]) for item in offsets for topic in item["topics"]))
        return _avro("commit_frame", entries=entries, offsets=offsets, conditions=self._conditions(), details=details)

    def _details(self, offsets: int) -> list[dict[str, Any]]:
        """What is committed beside so many offsets, mostly for as many as there are."""
        if self._choice.random() < 0.5:
            return []
        return [
            {
                "leader_epoch": self._choice.choice((-1, 0, 3, *SIGNED)),
                "metadata": self._choice.choice(("", "note", "\0", "m" * 4_096, "m" * 4_097, *NAMES)),
            }
            for _ in range(self._choice.choice((offsets, offsets, offsets, offsets + 1, 1, 300)))
        ]

    def _offsets(self) -> list[dict[str, Any]]:
        if self._choice.random() < 0.7:
            return []
        return [
            {
                "group": self._choice.choice([*self._groups, *NAMES, "g" * 1_001]),
                "generation": self._choice.choice(SIGNED),
                "member": self._choice.choice(NAMES),
                "instance": self._choice.choice([None, *NAMES]),
                "topics": [
                    {
                        "topic": self._choice.choice([*NAMES, "no-such-topic", "__consumer_offsets"]),
                        "partitions": [
                            {"partition": self._choice.choice(SIGNED), "offset": self._choice.choice(LONGS)}
                            for _ in range(self._choice.choice((1, 1, 50)))
                        ],
                    }
                ],
            }
        ]

    def _conditions(self) -> list[dict[str, Any]]:
        if self._choice.random() < 0.7:
            return []
        expected = ("empty", "any", "", "0-0:0:0", "0-0:999999999:0", "9-9:1:1", str(1 << 70), "💥", "sequence:-1")
        return [
            {
                "stream": self._choice.choice((0, 0, 1, *SIGNED)),
                "key": self._choice.choice((None, "", "00", "zz", "ab" * 5_000)),
                "scope": self._choice.choice(("segment", "key")),
                "expected": self._choice.choice(expected),
            }
            for _ in range(self._choice.choice((1, 1, 3, 200)))
        ]

    def _batch(self) -> bytes:
        """A record batch with a right checksum, mostly."""
        chance = self._choice.random()
        if chance < 0.25:
            return _batch_of(*(self._choice.randbytes(20) for _ in range(self._choice.choice((1, 2, 30)))))
        if chance < 0.4:  # nothing in it parses
            codec = self._choice.choice((0, 0, 1, 2, 3, 4, 5, 7))
            body = self._choice.randbytes(self._choice.choice((0, 1, 60, 3_000)))
            return framed(body, codec=codec, count=1, base_timestamp=1, max_timestamp=1)
        if chance < 0.55:  # another number of records than there are
            body = _batch_of(b"one", b"two")[61:]
            count = self._choice.choice((1, 3, 1_000, (1 << 31) - 1))
            return framed(body, codec=0, count=count, base_timestamp=1, max_timestamp=1)
        if chance < 0.65:
            return _batch_of(b"x", compression=self._choice.choice(list(Compression)[1:]))
        if chance < 0.7:
            return self._bomb
        if chance < 0.8:  # times of which brokers think nothing
            time = self._choice.choice(LONGS)
            return framed(_batch_of(b"x")[61:], codec=0, count=1, base_timestamp=time, max_timestamp=time)
        if chance < 0.9:
            return self._flipped(_batch_of(b"one", b"two"))
        return self._choice.randbytes(self._choice.choice((0, 12, 61, 100)))

    def _flipped(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(self._choice.choice((1, 1, 2, 8))):
            if changed:
                changed[self._choice.randrange(len(changed))] ^= 1 << self._choice.randrange(8)
        return bytes(changed)

    # -- records --------------------------------------------------------------------------------------------------

    def record(self) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """A record of a segment: key, value and headers, among them names of ours and names that are no text."""
        names = ("rollbridge", "rollbridge-late", "rollbridge-token", "\udcff\udcfe", "", "h" * 300)
        values = (None, b"", self._choice.randbytes(24), self._run(), self._run()[:-1])
        headers = [
            (self._choice.choice(names), self._choice.choice(values)) for _ in range(self._choice.choice((0, 1, 3)))
        ]
        key, value = self._noise()
        return key, value, headers

    def _run(self) -> bytes:
        """The header of a run of any length, which claims the records of others behind its own."""
        count = self._choice.choice((2, 3, 1_000, (1 << 31) - 1))
        steps = bytes(
            self._choice.choices(range(1, 256), k=self._choice.choice((0, 1, count - 1 if count < 5_000 else 7)))
        )
        return pack_run(TransactionId.of(0, self._choice.randrange(1, OLD)).bytes, 0, count, steps)

    # -- nodes ----------------------------------------------------------------------------------------------------

    def garbage(self) -> bytes:
        """The value of a node."""
        ways: list[Callable[[], bytes]] = [
            lambda: b"",
            lambda: self._choice.randbytes(100),
            lambda: self._choice.randbytes(900_000),
            lambda: b"[" * 200_000,
            lambda: b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
            lambda: b"9" * 10_000,
            lambda: b'{"epoch": ' + b"9" * 5_000 + b"}",
            lambda: b"NaN",
            lambda: b"null",
            lambda: b"\xff\xfe{}",
            lambda: b'"' + b"\\ud800" * 100 + b'"',
            lambda: json.dumps(self._any()).encode(),
        ]
        return self._choice.choice(ways)()

    def request(self, streams: Sequence[str]) -> bytes:
        """An admin request: of a known kind, mostly, with fields that no client of ours sends."""
        kinds = [item.value for item in RequestKind if item is not RequestKind.DELETE_STREAM]
        at = kinds.index(RequestKind.TRUNCATE_STREAM) + 1
        kind = self._choice.choice([*kinds[:at], *FORMER_KINDS, *kinds[at:]])
        if self._choice.random() < 0.1:
            kind = self._choice.choice(("", "delete-everything", "ü"))
        scope = self._own.partition("/")[0]
        harmless = [self._own, f"{scope}/no-such-stream", self._choice.choice(NAMES)]
        if kind in ("truncate-stream", "update-stream", "clear-snapshots", "rebuild-snapshots", "fence-client"):
            stream = self._choice.choice(harmless)  # who may use a group may truncate all its streams
        elif kind == RequestKind.CREATE_STREAM and self._choice.random() < 0.7:
            stream = f"{scope}/new-{self._choice.randrange(NEW_MAX)}"
        else:
            stream = self._choice.choice([*harmless, *streams])
        known = self._choice.choice(self.ids[-50:]) if self.ids else bytes(16)
        sound: dict[str, Any] = {
            "kind": kind,
            "stream": stream,
            "transaction": known.hex(),
            "segments": 1,
            "ranges": [],
            "seal": [],
            "group": "default",
            "buffer_partitions": 1,
            "replication_factor": -1,
            "record_bytes_max": 0,
            "reason": "",
            "client_name": "mallory",
            "created_ms": 1,
            "owner": "mallory",
            "owner_epoch": 1,
            "label": None,
            "cut": [],
        }
        odd: dict[str, Any] = {
            "transaction": self._choice.choice(("", "not-an-id")),
            "segments": self._choice.choice((20_000, *SIGNED)),
            "ranges": self._choice.choice(RANGES),
            "seal": self._choice.choice(([0], [0, 0], [-1], [7, 8, 9], list(range(5_000)))),
            "group": self._choice.choice(("bobs", *NAMES)),
            "buffer_partitions": self._choice.choice(SIGNED),
            "replication_factor": self._choice.choice((1, 9, *SIGNED)),
            "record_bytes_max": self._choice.choice(SIGNED),
            "reason": "r" * 50_000,
            "client_name": self._choice.choice([*self._clients, *NAMES]),
            "created_ms": self._choice.choice(LONGS),
            "owner": self._choice.choice(NAMES),
            "owner_epoch": self._choice.choice(SIGNED),
            "label": self._choice.choice(NAMES),
            "cut": self._choice.choice(
                ([{"segment": 0, "offset": 1 << 62}], [{"segment": item, "offset": item} for item in LONGS])
            ),
        }
        # What is wrong everywhere is refused at once; what is wrong in one place gets further.
        fields = CREATE_FIELDS if kind == RequestKind.CREATE_STREAM else sorted(odd)
        chosen = self._choice.sample(fields, self._choice.choice((0, 1, 1, 2, len(fields) // 2, len(fields))))
        datum = {**sound, **{name: odd[name] for name in chosen}}
        if self._choice.random() < 0.15:
            datum[self._choice.choice(sorted(datum))] = self._any()
        if self._choice.random() < 0.05:
            del datum[self._choice.choice(sorted(datum))]
        return json.dumps(datum).encode("utf-8", "surrogatepass")

    def name(self) -> str:
        """Of a node."""
        letters = string.ascii_letters + string.digits + "-_ .%$🂡"
        return "n" + "".join(self._choice.choices(letters, k=self._choice.choice((1, 10, 200))))

    def _any(self) -> Any:
        values: tuple[Any, ...] = (
            None,
            True,
            -1,
            1 << 70,
            1e400,
            "x",
            [],
            [[]],
            {},
            {"kind": 1},
            [1] * 10_000,
            "\ud800",
        )
        return self._choice.choice(values)


def _batch_of(*values: bytes, compression: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(1 << 20, compression)
    for value in values:
        builder.append(1, None, value)
    return builder.build()


def _avro(schema: str, **datum: Any) -> bytes:
    """Fields that Avro does not take at all are left to the changed copies."""
    return rollbridge_schemas.codec(schema).encode(datum)
