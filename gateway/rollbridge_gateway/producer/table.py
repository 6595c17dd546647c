"""The producer of one transactional id: every state and request, transactions v1 and v2, as one table.

With v1 a producer keeps its pair from one transaction to the next, so an end names no particular one. With v2 each end
is answered with the next pair: the pair names the transaction. Both may meet the same producer: Flink writes with v2
and commits what it recovers with v1.

A gateway that has just started knows a producer's state from what became of the transaction with its label
(:func:`found`), so every row here is met both by a gateway that has lived through it and by one that has not.

Differences from Kafka's coordinator: a transaction whose lease ran out is ``LOST``, not fenced. Its producer can
continue with the next one, since its pair was not taken away. And with v1 the abort of nothing is fine: librdkafka asks
for it after a refusal, and takes another one for fatal.

Source: Kafka's ``TransactionCoordinator.endTransaction`` and ``TransactionMetadata``; KIP-360, KIP-890, KIP-939.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple, assert_never

from rollbridge.base.errors import InvalidNameError
from rollbridge.metadata import gateways
from rollbridge.stream.names import check_client_name

# Identity of a transactional producer: client names of transactional ids, pairs of producer id and epoch, and labels.
#
# A transactional id is any text; a client name is 1 to 128 characters of ``[A-Za-z0-9._:@-]``. Ids that fit are names
# as they are, so ``billing-7`` is client ``billing-7``. Other bytes become ``@`` and two hexadecimal digits, as ``@``
# itself does, and what is too long then is ``@h.`` with a hash: no escape begins like that, so names never meet.
#
# A pair names a producer for as long as it lives; with transactions v2 it names one transaction. It is in the label of
# the transaction, where every gateway finds it. Producer ids have bit 62 set: brokers count theirs from 0 in blocks
# of a thousand, so none of ours is ever one of theirs. Their last 16 bits are a hash of the transactional id: a
# producer id of another one is told apart from one that is over, as by a broker.
#
# Source: KIP-360 and KIP-890 for pairs; Kafka's ``TransactionMetadata`` for the exhaustion of epochs.


EPOCH_MAX: Final = gateways.EPOCH_MAX
"""Highest epoch that is handed out; Kafka keeps 32,767 for fencing."""
NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
TRANSACTIONAL_ID_BYTES_MAX: Final = 32_767
"""Kafka's limit of a string."""
_OURS: Final = gateways.FIRST_PRODUCER_ID
_MARK: Final = (1 << 16) - 1
_RANDOM: Final = _OURS - 1 - _MARK
_NAME_MAX: Final = 128
_NAMES_KEPT: Final = 4_096
"""Number of ids whose names are cached, as each request of a producer needs its name."""
_HASHED: Final = "@h."
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")
_ESCAPE = re.compile(r"@([0-9a-f]{2})")
_DOTS: Final = frozenset((".", ".."))  # not names of nodes in ZooKeeper


class Pair(NamedTuple):
    """Producer id and epoch, as clients send them."""

    producer_id: int
    epoch: int

    @property
    def label(self) -> str:
        return f"{self.producer_id}.{self.epoch}"

    def __str__(self) -> str:
        return self.label


NOBODY: Final = Pair(NO_PRODUCER_ID, NO_EPOCH)
"""Pair in the requests of a client that has none yet."""


def client_name(transactional_id: str) -> str:
    """Return the client name of a transactional id; different ids have different names.

    Raises:
        InvalidNameError: the id is empty, or longer than Kafka's strings.
    """
    if len(transactional_id) > _NAME_MAX:
        return _client_name(transactional_id)  # it may have 32 KiB, which is not cached
    return _known_name(transactional_id)


def _client_name(transactional_id: str) -> str:
    raw = transactional_id.encode("utf-8", "surrogatepass")
    if not 0 < len(raw) <= TRANSACTIONAL_ID_BYTES_MAX:
        raise InvalidNameError(
            f"a transactional id has 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes, not {len(raw)}; nothing was written"
        )
    if transactional_id in _DOTS:
        name = "".join(f"@{byte:02x}" for byte in raw)
    else:
        name = "".join(chr(byte) if byte in _PLAIN else f"@{byte:02x}" for byte in raw)
    if len(name) > _NAME_MAX:
        name = _HASHED + hashlib.blake2b(raw, digest_size=32).hexdigest()
    return check_client_name(name)


_known_name: Final = lru_cache(maxsize=_NAMES_KEPT)(_client_name)


def transactional_id(name: str) -> str | None:
    """Return the transactional id of a client name; None if it was hashed, or is the name of no id.

    Every other name is that of exactly one id, whatever client uses it.
    """
    if name.startswith(_HASHED):
        return None
    found = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name).encode("latin-1", "replace")
    try:
        text = found.decode("utf-8", "surrogatepass")
        return text if client_name(text) == name else None
    except (ValueError, InvalidNameError):
        return None


def pair_of(label: str | None) -> Pair | None:
    """Return the pair that a label names; None if it is not one of a gateway's."""
    if label is None or not gateways.is_gateway_label(label):
        return None
    producer_id, _, epoch = label.partition(".")
    return Pair(int(producer_id), int(epoch))


def is_ours(producer_id: int) -> bool:
    """Return whether a producer id is one that gateways hand out; brokers hand out none of these."""
    return _OURS <= producer_id < _OURS << 1


def is_of(producer_id: int, transactional_id: str) -> bool:
    """Return whether gateways may have handed out a producer id for a transactional id."""
    return is_ours(producer_id) and producer_id & _MARK == _mark(transactional_id)


@lru_cache(maxsize=_NAMES_KEPT)
def _mark(transactional_id: str) -> int:
    raw = transactional_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=2).digest(), "big")


def first_pair(transactional_id: str, random: int, *, is_known: bool) -> Pair:
    """Return the pair of a producer that starts.

    Args:
        random: At least 62 random bits.
        is_known: True if the transactional id was used before. Epoch 0 says that it was not: Flink stops to probe
            for lingering transactions there.
    """
    return Pair(_OURS | random & _RANDOM | _mark(transactional_id), int(is_known))


def next_pair(pair: Pair, random: int) -> Pair:
    """Return the pair after this one: the next epoch, or another producer id if there is none."""
    if pair.epoch >= EPOCH_MAX:
        return Pair(_OURS | random & _RANDOM | pair.producer_id & _MARK, 1)
    return Pair(pair.producer_id, pair.epoch + 1)


ABORTED_BY_PRODUCER: Final = "its producer asked for it"
"""Reason of an abort that a producer has asked for; the label's outcome carries it to other gateways."""

UNACKNOWLEDGED: Final = "nothing of it was acknowledged"
"""Reason of the abort of a transaction without a savepoint: for its producer it has not begun."""


class ProducerPhase(Enum):
    """State of the transaction of a producer's pair."""

    EMPTY = "empty"
    """There was none."""
    OPEN = "open"
    COMMITTING = "committing"
    """Its commit was asked for; the answer is not known here."""
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """As its producer asked."""
    LOST = "lost"
    """Aborted otherwise: its lease ran out, or an operator did it."""


class Request(Enum):
    """Requests of producers."""

    ADD = "add"
    """AddPartitionsToTxn, AddOffsetsToTxn."""
    WRITE_V1 = "write v1"
    """Produce up to v11, TxnOffsetCommit up to v4: what they name was added before."""
    WRITE_V2 = "write v2"
    """Produce v12, TxnOffsetCommit v5: they add what they name."""
    COMMIT_V1 = "commit v1"
    ABORT_V1 = "abort v1"
    COMMIT_V2 = "commit v2"
    ABORT_V2 = "abort v2"
    RENEW = "renew"
    """InitProducerId with a pair (KIP-360)."""


class KafkaFault(Enum):
    """Fault, before it becomes the code of a version."""

    NONE = "none"
    UNFORESEEN = "unforeseen"
    AWAY = "away"
    """A server does not answer, or another gateway holds the id: look for it, and ask again."""
    BUSY = "busy"
    """It is being carried out: ask again."""
    SLOW = "slow"
    """Not known to be written in time: send the same again."""
    FENCED = "fenced"
    STALE_EPOCH = "stale epoch"
    UNKNOWN_PRODUCER = "unknown producer"
    INVALID_STATE = "invalid state"
    ABORTABLE = "abortable"
    NO_TOPIC = "no topic"
    NOT_ADOPTED = "not adopted"
    """The topic is there, but takes no rolling transactions."""
    TOO_LARGE = "too large"
    METADATA_TOO_LARGE = "metadata too large"
    TIMEOUT = "timeout"
    TIMESTAMP = "timestamp"
    CORRUPT = "corrupt"
    INVALID_RECORD = "invalid record"
    GAP = "gap"
    INVALID_REQUEST = "invalid request"
    DENIED = "denied"
    NOWHERE = "nowhere"
    """Which group's transaction it is will be known once the producer writes: ask again."""


class Step(Enum):
    """Answer to a request: what to do about it."""

    BEGIN = "begin"
    """Begin a transaction under the pair's label, and carry the request out in it."""
    GO = "go"
    """Carry it out in the open transaction."""
    COMMIT = "commit"
    """Ask for the commit, or for its answer again."""
    ABORT = "abort"
    RENEW = "renew"
    """Hand out the next pair; nothing is open."""
    ABORT_RENEW = "abort, renew"
    """Abort what is open, then hand out the next pair."""
    DONE = "done"
    """It has happened: answer as then."""
    WAIT = "wait"
    """CONCURRENT_TRANSACTIONS: ask again."""
    INVALID = "invalid"
    """INVALID_TXN_STATE; nothing is changed."""
    ABORTABLE = "abortable"
    """The producer can only abort: TRANSACTION_ABORTABLE, where the version knows it."""
    STALE = "stale"
    """The pair is over: PRODUCER_FENCED or INVALID_PRODUCER_EPOCH."""


OF_STEP: Final[Mapping[Step, KafkaFault]] = {
    Step.WAIT: KafkaFault.BUSY,
    Step.INVALID: KafkaFault.INVALID_STATE,
    Step.ABORTABLE: KafkaFault.ABORTABLE,
    Step.STALE: KafkaFault.FENCED,
}


_S, _R = ProducerPhase, Request

TABLE: Final[Mapping[tuple[ProducerPhase, Request], Step]] = {
    (_S.EMPTY, _R.ADD): Step.BEGIN,
    (_S.EMPTY, _R.WRITE_V1): Step.ABORTABLE,
    (_S.EMPTY, _R.WRITE_V2): Step.BEGIN,
    (_S.EMPTY, _R.COMMIT_V1): Step.INVALID,
    (_S.EMPTY, _R.ABORT_V1): Step.DONE,
    (_S.EMPTY, _R.COMMIT_V2): Step.INVALID,
    (_S.EMPTY, _R.ABORT_V2): Step.RENEW,
    (_S.EMPTY, _R.RENEW): Step.RENEW,
    (_S.OPEN, _R.ADD): Step.GO,
    (_S.OPEN, _R.WRITE_V1): Step.GO,
    (_S.OPEN, _R.WRITE_V2): Step.GO,
    (_S.OPEN, _R.COMMIT_V1): Step.COMMIT,
    (_S.OPEN, _R.ABORT_V1): Step.ABORT,
    (_S.OPEN, _R.COMMIT_V2): Step.COMMIT,
    (_S.OPEN, _R.ABORT_V2): Step.ABORT,
    (_S.OPEN, _R.RENEW): Step.ABORT_RENEW,
    (_S.COMMITTING, _R.ADD): Step.WAIT,
    (_S.COMMITTING, _R.WRITE_V1): Step.INVALID,
    (_S.COMMITTING, _R.WRITE_V2): Step.WAIT,
    (_S.COMMITTING, _R.COMMIT_V1): Step.COMMIT,
    (_S.COMMITTING, _R.ABORT_V1): Step.INVALID,
    (_S.COMMITTING, _R.COMMIT_V2): Step.COMMIT,
    (_S.COMMITTING, _R.ABORT_V2): Step.INVALID,
    (_S.COMMITTING, _R.RENEW): Step.WAIT,
    (_S.ABORTING, _R.ADD): Step.WAIT,
    (_S.ABORTING, _R.WRITE_V1): Step.INVALID,
    (_S.ABORTING, _R.WRITE_V2): Step.WAIT,
    (_S.ABORTING, _R.COMMIT_V1): Step.INVALID,
    (_S.ABORTING, _R.ABORT_V1): Step.ABORT,
    (_S.ABORTING, _R.COMMIT_V2): Step.INVALID,
    (_S.ABORTING, _R.ABORT_V2): Step.ABORT,
    (_S.ABORTING, _R.RENEW): Step.ABORT_RENEW,
    # With v1 the next transaction has the same pair. With v2 the end was answered with the next one.
    (_S.COMMITTED, _R.ADD): Step.BEGIN,
    (_S.COMMITTED, _R.WRITE_V1): Step.ABORTABLE,
    (_S.COMMITTED, _R.WRITE_V2): Step.STALE,
    (_S.COMMITTED, _R.COMMIT_V1): Step.DONE,
    (_S.COMMITTED, _R.ABORT_V1): Step.INVALID,
    (_S.COMMITTED, _R.COMMIT_V2): Step.RENEW,
    (_S.COMMITTED, _R.ABORT_V2): Step.INVALID,
    (_S.COMMITTED, _R.RENEW): Step.RENEW,
    (_S.ABORTED, _R.ADD): Step.BEGIN,
    (_S.ABORTED, _R.WRITE_V1): Step.ABORTABLE,
    (_S.ABORTED, _R.WRITE_V2): Step.STALE,
    (_S.ABORTED, _R.COMMIT_V1): Step.INVALID,
    (_S.ABORTED, _R.ABORT_V1): Step.DONE,
    (_S.ABORTED, _R.COMMIT_V2): Step.INVALID,
    (_S.ABORTED, _R.ABORT_V2): Step.RENEW,
    (_S.ABORTED, _R.RENEW): Step.RENEW,
    (_S.LOST, _R.ADD): Step.ABORTABLE,
    (_S.LOST, _R.WRITE_V1): Step.ABORTABLE,
    (_S.LOST, _R.WRITE_V2): Step.ABORTABLE,
    (_S.LOST, _R.COMMIT_V1): Step.ABORTABLE,
    (_S.LOST, _R.ABORT_V1): Step.DONE,
    (_S.LOST, _R.COMMIT_V2): Step.ABORTABLE,
    (_S.LOST, _R.ABORT_V2): Step.RENEW,
    (_S.LOST, _R.RENEW): Step.RENEW,
}


class PairEnd(Enum):
    """Cause of a pair's end."""

    COMMIT = "commit"
    ABORT = "abort"
    RENEWED = "renewed"


class Previous(NamedTuple):
    """The pair before a producer's, of which an answer may have been lost."""

    pair: Pair
    end: PairEnd


_REPEATS: Final[Mapping[tuple[PairEnd, Request], Step]] = {
    (PairEnd.COMMIT, _R.COMMIT_V2): Step.DONE,
    (PairEnd.COMMIT, _R.ABORT_V2): Step.INVALID,
    (PairEnd.COMMIT, _R.RENEW): Step.DONE,
    (PairEnd.ABORT, _R.COMMIT_V2): Step.INVALID,
    (PairEnd.ABORT, _R.ABORT_V2): Step.DONE,
    (PairEnd.ABORT, _R.RENEW): Step.DONE,
    (PairEnd.RENEWED, _R.RENEW): Step.DONE,
}
"""Requests with the previous pair that are not simply stale: their answers were lost."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A producer as a gateway knows it.

    Attributes:
        pair: The last one that was handed out.
        state: Of the transaction under ``label``.
        previous: The pair before it, if that is known.
        kept: Pair in the label of a transaction that a former producer had prepared (KIP-939); None for its own.
    """

    pair: Pair
    state: ProducerPhase = ProducerPhase.EMPTY
    previous: Previous | None = None
    kept: Pair | None = None

    @property
    def label(self) -> str:
        """Label of its present transaction."""
        return (self.kept or self.pair).label

    def decide(self, request: Request, pair: Pair) -> Step:
        """Return what to do about a request that carries a pair."""
        if pair == self.pair:
            return TABLE[self.state, request]
        if self.previous is not None and pair == self.previous.pair:
            return _REPEATS.get((self.previous.end, request), Step.STALE)
        return Step.STALE

    def begun(self) -> ProducerState:
        """Return the producer with a transaction of its own open."""
        return replace(self, state=ProducerPhase.OPEN, kept=None)

    def asked(self, *, commit: bool) -> ProducerState:
        """Return the producer once an end was asked for."""
        return replace(self, state=ProducerPhase.COMMITTING if commit else ProducerPhase.ABORTING)

    def ended(self, *, commit: bool) -> ProducerState:
        """Return the producer whose transaction has ended as it asked; the pair stays, as with v1."""
        return replace(self, state=ProducerPhase.COMMITTED if commit else ProducerPhase.ABORTED)

    def renewed(self, end: PairEnd, random: int) -> ProducerState:
        """Return the producer with the next pair, and nothing under it.

        Args:
            end: What it was that the next pair answers.
            random: For another producer id, once the epochs are used up.
        """
        return ProducerState(next_pair(self.pair, random), ProducerPhase.EMPTY, Previous(self.pair, end))

    def lost(self) -> ProducerState:
        """Return the producer whose transaction was aborted by its lease or an operator."""
        return replace(self, state=ProducerPhase.LOST)


class KnownEnd(Enum):
    """Known outcome of a label, wherever its transaction was begun."""

    NONE = "none"
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


def found(
    pair: Pair, known: KnownEnd, reason: str, previous: Previous | None = None, kept: Pair | None = None
) -> ProducerState:
    """Return the producer of a pair that this gateway has not served before.

    Args:
        pair: The pair, which is not over.
        known: Outcome of the transaction with its label.
        reason: Why it was aborted.
        kept: Pair whose label it was, if it is not that of ``pair``.
    """
    match known:
        case KnownEnd.NONE:
            state = ProducerPhase.EMPTY
        case KnownEnd.OPEN:
            state = ProducerPhase.OPEN
        case KnownEnd.COMMITTED:
            state = ProducerPhase.COMMITTED
        case KnownEnd.ABORTED if reason == UNACKNOWLEDGED:
            state = ProducerPhase.EMPTY
        case KnownEnd.ABORTED:
            state = ProducerPhase.ABORTED if reason == ABORTED_BY_PRODUCER else ProducerPhase.LOST
        case _:
            assert_never(known)
    return ProducerState(pair, state, previous, kept)


# What is on record of a transactional id: the newest pair, and what no transaction says about its producer.
#
# One small node in ZooKeeper for each id. It is written when a pair is handed out by InitProducerId, not by each
# transaction: with transactions v2 the epochs above the one on record follow from the labels of the transactions that
# have ended under them.


@dataclass(frozen=True, slots=True)
class Entry:
    """A transactional id on record.

    Attributes:
        transactional_id: As its producer spells it; its client name may be a hash.
        pair: Lowest pair that is not over. With transactions v2 later epochs may have been handed out.
        timeout_ms: Its ``transaction.timeout.ms``: the lease of its transactions; -1 for as long as is allowed.
        previous: The pair before ``pair``, if a request with it may come again.
        kept: Pair of a prepared transaction that was left open for ``pair`` to end (KIP-939).
        home: A stream of the group that it wrote to last, for transactions of offsets alone; empty if there is none.
        written_ms: When this was written, ms since 1970.
    """

    transactional_id: str
    pair: Pair
    timeout_ms: int
    previous: Previous | None = None
    kept: Pair | None = None
    home: str = ""
    written_ms: int = 0

    def encode(self, gateway: str = "") -> bytes:
        """Return the value of its node; ``gateway`` is the name of the writer, for operators."""
        document: dict[str, Any] = {
            "id": self.transactional_id,
            "pair": list(self.pair),
            "timeout_ms": self.timeout_ms,
            "home": self.home,
            "written_ms": self.written_ms,
            "gateway": gateway,
        }
        if self.previous is not None:
            document["previous"] = [*self.previous.pair, self.previous.end.value]
        if self.kept is not None:
            document["kept"] = list(self.kept)
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, value: bytes) -> Entry:
        """Return what a node says; fields of later versions are skipped.

        Raises:
            ValueError: it is none.
        """
        try:
            said = json.loads(value)
            previous, kept = said.get("previous"), said.get("kept")
            return cls(
                transactional_id=str(said["id"]),
                pair=_pair(said["pair"]),
                timeout_ms=int(said["timeout_ms"]),
                previous=None if previous is None else Previous(_pair(previous[:2]), PairEnd(previous[2])),
                kept=None if kept is None else _pair(kept),
                home=str(said.get("home", "")),
                written_ms=int(said.get("written_ms", 0)),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as fault:
            raise ValueError(f"not an entry of a transactional id: {fault!r}") from fault


def _pair(said: list[int]) -> Pair:
    producer_id, epoch = said
    return Pair(int(producer_id), int(epoch))
