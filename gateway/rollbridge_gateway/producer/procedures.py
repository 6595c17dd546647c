"""Procedures of a gateway for each request about a transaction: generators of effects, without any I/O.

They are written as :mod:`rollbridge.base.effects` says, and return the answer. The shell
(:mod:`rollbridge_gateway.producer.writes`) carries effects out on rollbridge's client and ZooKeeper; the simulation
carries them out on a model, and lets gateway and producer die before and after each.

A procedure runs while its gateway holds the id, and no other procedure of this id runs. It may end anywhere; then the
:class:`IdState` is dropped, and the next gateway that serves the id starts from the records: the entry, the outcome of
the label, and the last savepoint of an open transaction.

A gateway may stall between any two effects, and continue when another one has long served the id. Each effect that
changes something therefore fails then, whatever this gateway believes: by the version of the entry, which each holder
raises, or by the session of the client name, which only the holder may begin. Such a failure is never told to a
producer as a refusal: only the entry on record says that a pair is over.

Order of durable steps:

* A pair is on record before its producer learns it, so that an older one is refused by every gateway from then on.
* What an older producer left open is aborted before the new one gets its answer.
* Records and offsets count from the savepoint behind them on, which has the records' sequence numbers, and are
  acknowledged only then.
* An end is decided before it is answered; asked for again, by any client with the pair, it is the same.

Tour of a gateway request, stop 4 of 5: see docs/tour.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

from rollbridge.base.effects import Effect, Steps
from rollbridge.base.errors import GROUP_MISMATCH, PortableError
from rollbridge.errors import InvalidRequestError, NotFoundError
from rollbridge_gateway.producer.table import (
    ABORTED_BY_PRODUCER,
    EPOCH_MAX,
    NOBODY,
    OF_STEP,
    UNACKNOWLEDGED,
    Entry,
    KafkaFault,
    KnownEnd,
    Pair,
    PairEnd,
    Previous,
    ProducerPhase,
    ProducerState,
    Request,
    Step,
    first_pair,
    found,
    is_of,
    pair_of,
)
from rollbridge_gateway.protocol.sequences import Sequences, SequenceVerdict, TopicPartition

T = TypeVar("T")
TIMEOUT_UNBOUNDED: Final = -1
DAY_MS: Final = 24 * 3_600_000
JAVA_MAX: Final = (1 << 31) - 1
"""Largest ``transaction.timeout.ms``, which means: as long as is allowed."""


# Refusals, which are answers


class RefusedError(PortableError):
    """A request gets an answer and nothing else: nothing was changed by it, and its id is served on.

    Attributes:
        fault: What the client is told.
    """

    def __init__(self, why: KafkaFault | Step, text: str = "") -> None:
        super().__init__(text)
        self.fault = OF_STEP.get(why, KafkaFault.UNFORESEEN) if isinstance(why, Step) else why


class LostTransactionError(PortableError):
    """An effect found that the outcome of the transaction will never be known, or that it was aborted by others."""

    def __init__(self, why: str, *, by_others: bool = False) -> None:
        super().__init__(why)
        self.by_others = by_others


# Effects


@dataclass(frozen=True, slots=True)
class WriteEntry(Effect[None]):
    """Replace the entry of the id; durable when it returns. The holder alone writes it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class FenceOthers(Effect[Sequence[tuple[str, str]]]):
    """Begin a session of the client name in all groups that know it, which fences all other sessions of that name.

    Returns the open transactions of the name as (id, label), once no earlier request is in flight.
    """


@dataclass(frozen=True, slots=True)
class AbortLeft(Effect[None]):
    """Abort a transaction that an older producer left open; one that has ended meanwhile is left as it is."""

    transaction: str


@dataclass(frozen=True, slots=True)
class FindLabel(Effect[tuple[KnownEnd, str, str]]):
    """Ask for the outcome of the newest transaction with a label.

    Returns (:class:`KnownEnd`, reason, transaction id), as it is once no earlier request is in flight.
    """

    label: str


@dataclass(frozen=True, slots=True)
class Resume(Effect[Mapping[str, bytes] | None]):
    """Take over an open transaction at its last savepoint; what came behind it does not count.

    Returns the notes of that savepoint; None if there is none, and then nothing of the transaction was acknowledged.
    """

    transaction: str


@dataclass(frozen=True, slots=True)
class BeginTransaction(Effect[None]):
    """Begin a transaction; its BEGIN has reached the brokers when the next :class:`Save` has."""

    stream: str
    label: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Carry(Effect[None]):
    """Write a batch, all of it or nothing.

    Errors that say that nothing was written leave the transaction usable; any other makes the id be dropped here.
    """

    batch: Any


@dataclass(frozen=True, slots=True)
class AddOffsets(Effect[None]):
    """Add offsets of a consumer group, to be committed with the transaction."""

    offsets: GroupCommit


@dataclass(frozen=True, slots=True)
class Save(Effect[object]):
    """Put a savepoint behind everything so far. Returns a ticket to wait with, outside of the procedure."""

    notes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Finish(Effect[None]):
    """Commit or abort the open transaction, and wait until that is decided.

    Raises :class:`LostByOthersError` if it is aborted and a commit was asked for, :class:`RefusedError` if it is
    committed and an abort was.
    """

    commit: bool
    reason: str = ABORTED_BY_PRODUCER


class OffsetToCommit(NamedTuple):
    """An offset, the leader epoch that its reader knew or -1, and the text that is committed with it."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """Offsets of one consumer group, and who of it commits them; see ``rollbridge.stream.group_offsets``."""

    group: str
    offsets: Mapping[TopicPartition, OffsetToCommit]
    generation: int = -1
    member: str = ""
    instance: str | None = None

    def joined(self, later: GroupCommit) -> GroupCommit:
        """Return these, with those that the same group gave later."""
        return replace(later, offsets={**self.offsets, **later.offsets})


class Incoming(NamedTuple):
    """Batch of a Produce request.

    Attributes:
        where: Topic and partition that its producer named.
        stream: Stream that the topic stands for.
        pair: Pair in its header.
        first: First sequence number.
        records: Number of records.
        batch: What :class:`Carry` is given.
    """

    where: TopicPartition
    stream: str
    pair: Pair
    first: int
    records: int
    batch: Any = None


@dataclass(slots=True)
class IdState:
    """A transactional id as the gateway that holds it knows it.

    Attributes:
        entry: What is on record; None if the id is new.
        producer: Its producer; None until a request with a pair has come.
        sequences: What was taken of each partition.
        fresh_ms: Age of the entry from which on the begin or end of a transaction writes it again.
        has_records: True if something was written here in the open transaction.
        has_offsets: True if offsets were sent here in the open transaction.
    """

    entry: Entry | None = None
    producer: ProducerState | None = None
    sequences: Sequences = field(default_factory=Sequences)
    fresh_ms: int = DAY_MS
    has_records: bool = False
    has_offsets: bool = False

    @property
    def lease_ms(self) -> int:
        """Lease of its transactions; -1 for as long as is allowed."""
        return TIMEOUT_UNBOUNDED if self.entry is None else self.entry.timeout_ms


@dataclass(frozen=True, slots=True)
class StartedProducer:
    """Answer to InitProducerId: the pair, and that of a prepared transaction that was kept (KIP-939)."""

    pair: Pair
    ongoing: Pair = NOBODY


class Written(NamedTuple):
    """Answer to a Produce request: of each batch its error or None, and the ticket to wait with, if any."""

    faults: Sequence[Exception | None]
    ticket: Any


# InitProducerId


def start(
    held: IdState,
    transactional_id: str,
    timeout_ms: int,
    random: int,
    now_ms: int,
    *,
    keep: bool = False,
    former: Pair | None = None,
) -> Steps[StartedProducer]:
    """Hand out a pair to a producer that starts: fence those before it, and abort what they left open.

    Args:
        random: 62 random bits.
        now_ms: Time, ms since 1970.
        keep: Leave open what was prepared, for this producer to end.
        former: Pair that the producer has from before the id was forgotten; it may ask with it again.
    """
    entry = held.entry
    pair = first_pair(transactional_id, random, is_known=entry is not None)
    fresh = Entry(
        transactional_id,
        pair,
        TIMEOUT_UNBOUNDED if timeout_ms >= JAVA_MAX else timeout_ms,
        previous=None if former is None else Previous(former, PairEnd.RENEWED),
        home="" if entry is None else entry.home,
        written_ms=now_ms,
    )
    held.producer = None
    yield from _record(held, fresh)
    left = yield from FenceOthers()
    kept: Pair | None = None
    for transaction, label in left:
        of = pair_of(label)
        if keep and of is not None and kept is None:
            kept = of
        else:
            yield from AbortLeft(transaction)
    if kept is not None:
        yield from _record(held, replace(fresh, kept=kept))
    _forget_transaction(held)
    held.sequences = Sequences()
    if kept is None:
        held.producer = ProducerState(pair, previous=fresh.previous)
    return StartedProducer(pair, NOBODY if kept is None else kept)


def renew(held: IdState, pair: Pair, random: int, now_ms: int) -> Steps[StartedProducer]:
    """Hand out the next pair to a producer that has one (KIP-360); what it has open is aborted."""
    producer, step = yield from _decide(held, Request.RENEW, pair)
    if step is Step.DONE:
        return StartedProducer(producer.pair)
    if step is Step.ABORT_RENEW:
        yield from _finish(held, commit=False)
    elif step is not Step.RENEW:
        raise _refusal(step, producer, pair)
    yield from _renew(held, PairEnd.RENEWED, random, now_ms)
    assert held.producer is not None
    return StartedProducer(held.producer.pair)


def come_back(
    held: IdState, transactional_id: str, timeout_ms: int, pair: Pair, random: int, now_ms: int
) -> Steps[StartedProducer]:
    """Hand out the next pair to a producer that has one; another one if its id was forgotten, as brokers do."""
    if held.entry is None:
        return (yield from start(held, transactional_id, timeout_ms, random, now_ms, former=pair))
    return (yield from renew(held, pair, random, now_ms))


# Writing


def add(
    held: IdState, pair: Pair, stream: str, now_ms: int, *, is_home: bool = False, is_sure: bool = True
) -> Steps[Any]:
    """Have a transaction open before its first record (AddPartitionsToTxn, AddOffsetsToTxn); return a ticket.

    Args:
        stream: A stream that it will write to, or may begin with; empty if there is none.
        is_home: True to take ``stream`` only if the producer has not written to another one before.
        is_sure: True to take ``stream`` though it may not be of the group that will be written to.
    """
    yield from _open(held, Request.ADD, pair, stream, now_ms, is_home=is_home, is_sure=is_sure)
    return (yield from _save(held))


def write(held: IdState, pair: Pair, batches: Sequence[Incoming], now_ms: int, *, v2: bool) -> Steps[Written]:
    """Write the batches of one Produce request, each once; all that were taken are behind one savepoint."""
    request = Request.WRITE_V2 if v2 else Request.WRITE_V1
    _, step = yield from _decide(held, request, pair)
    if step not in (Step.BEGIN, Step.GO) and batches and all(_is_repeated(held, item, v2=v2) for item in batches):
        return Written([None] * len(batches), None)  # of a transaction that has ended: its answers were lost
    yield from _open(held, request, pair, batches[0].stream if batches else "", now_ms)
    faults: list[Exception | None] = []
    home = ""
    for item in batches:
        fault: Exception | None = None
        try:
            yield from _take(held, item, v2=v2)
        except NothingWrittenError as refused:
            fault = refused
            if getattr(refused.__cause__, "code", "") == GROUP_MISMATCH and not held.has_records:
                home = item.stream
        faults.append(fault)
    ticket = yield from _save(held)
    if home and held.entry is not None and held.entry.home != home:
        # It has begun elsewhere with offsets alone: its next attempt does not.
        yield from _record(held, replace(held.entry, home=home, written_ms=now_ms))
    return Written(faults, ticket)


class NothingWrittenError(PortableError):
    """A batch was refused; nothing of it was written, and the others are none the worse. Its cause says why.

    Attributes:
        fault: What the client is told, unless the cause says it.
    """

    def __init__(self, why: str, fault: KafkaFault = KafkaFault.INVALID_RECORD) -> None:
        super().__init__(why)
        self.fault = fault


def _take(held: IdState, item: Incoming, *, v2: bool) -> Steps[None]:
    producer = held.producer
    assert producer is not None
    if item.pair != producer.pair:
        raise NothingWrittenError(
            f"the batch is of {item.pair}, and the producer is {producer.pair}", KafkaFault.STALE_EPOCH
        )
    match held.sequences.judge(item.where, item.pair.epoch, item.first, item.records, v2=v2):
        case SequenceVerdict.DUPLICATE:
            return
        case SequenceVerdict.GAP:
            seen = held.sequences.seen.get(item.where)
            last = seen.batches[-1].last if seen is not None and seen.batches else None
            raise NothingWrittenError(
                f"{item.where[0]}, partition {item.where[1]}: {item.first} does not follow {last}, the last taken",
                KafkaFault.GAP,
            )
        case SequenceVerdict.NEW:
            yield from Carry(item.batch)
            held.has_records = True
            held.sequences.take(item.where, item.pair.epoch, item.first, item.records)


def _is_repeated(held: IdState, item: Incoming, *, v2: bool) -> bool:
    if held.producer is None or item.pair.producer_id != held.producer.pair.producer_id:
        return False
    verdict = held.sequences.judge(item.where, item.pair.epoch, item.first, item.records, v2=v2)
    return verdict is SequenceVerdict.DUPLICATE


def send_offsets(
    held: IdState, pair: Pair, offsets: GroupCommit, stream: str, now_ms: int, *, v2: bool, is_sure: bool = True
) -> Steps[Any]:
    """Commit a consumer group's offsets with the transaction; return a ticket.

    Args:
        stream: A stream to begin the transaction with if nothing else is known; empty if there is none.
        v2: True if the request adds what it names.
        is_sure: True to take ``stream`` though it may not be of the group that will be written to.
    """
    request = Request.WRITE_V2 if v2 else Request.WRITE_V1
    yield from _open(held, request, pair, stream, now_ms, is_home=True, is_sure=is_sure)
    yield from AddOffsets(offsets)
    held.has_offsets = True
    return (yield from _save(held))


# Ending


def end(
    held: IdState, pair: Pair, random: int, now_ms: int, *, commit: bool, v2: bool, is_recovery: bool = False
) -> Steps[Pair]:
    """Commit or abort; return the pair to continue with.

    Args:
        random: 62 random bits.
        v2: True if each transaction has an epoch of its own.
        is_recovery: True if the request may be Flink's, which commits what a former process has written. It asks
            again for ever if it is told to abort.
    """
    if commit:
        request = Request.COMMIT_V2 if v2 else Request.COMMIT_V1
    else:
        request = Request.ABORT_V2 if v2 else Request.ABORT_V1
    producer, step = yield from _decide(held, request, pair)
    if step in (Step.COMMIT, Step.ABORT):
        if held.entry is not None and _is_old(held, now_ms):
            yield from _record(held, replace(held.entry, written_ms=now_ms))
        yield from _finish(held, commit=commit, is_recovery=is_recovery)
    elif step is Step.DONE:
        if producer.state is ProducerPhase.LOST and pair == producer.pair:
            held.producer = producer.ended(commit=False)
        return producer.pair
    elif step is not Step.RENEW:
        raise _refusal(Step.INVALID if step is Step.ABORTABLE and is_recovery else step, producer, pair)
    if v2:
        yield from _renew(held, PairEnd.COMMIT if commit else PairEnd.ABORT, random, now_ms)
    assert held.producer is not None
    return held.producer.pair


def _finish(held: IdState, *, commit: bool, is_recovery: bool = False) -> Steps[None]:
    producer = held.producer
    assert producer is not None
    lost = Step.INVALID if is_recovery and not held.has_offsets else Step.ABORTABLE
    held.producer = producer.asked(commit=commit)
    try:
        yield from Finish(commit)
    except LostTransactionError as fault:
        # Its label would be answered by the transaction before it, as with v1 all of a pair have one.
        held.producer = producer.lost()
        _forget_transaction(held)
        why = f"transaction {producer.label} was aborted by others: {fault}" if fault.by_others else str(fault)
        raise RefusedError(lost, why) from None
    except (InvalidRequestError, NotFoundError):
        held.producer = producer  # nothing was asked for
        raise
    except RefusedError:
        held.producer = producer.ended(commit=not commit)  # an operator has ended it otherwise
        _forget_transaction(held)
        raise
    held.producer = producer.ended(commit=commit)
    _forget_transaction(held)


# Rest


def settle(held: IdState) -> Steps[None]:
    """Record the newest pair if only this gateway may know it for longer than outcomes are remembered.

    For an id that was unused for long, before this gateway lets go of it.
    """
    producer, entry = held.producer, held.entry
    if producer is None or entry is None or producer.pair == entry.pair or producer.kept is not None:
        return
    if producer.state in (ProducerPhase.EMPTY, ProducerPhase.COMMITTED, ProducerPhase.ABORTED):
        yield from _record(held, replace(entry, pair=producer.pair, previous=producer.previous))


# Shared


def _decide(held: IdState, request: Request, pair: Pair) -> Steps[tuple[ProducerState, Step]]:
    """Return the producer and what to do, having looked the pair up if this gateway has not served it before."""
    producer = held.producer
    if producer is None or (producer.decide(request, pair) is Step.STALE and _may_be_later(producer, pair)):
        producer = yield from _look_up(held, pair)
    step = producer.decide(request, pair)
    if step is Step.STALE and request is not Request.RENEW and held.entry is not None:
        _check_handed_out(held.entry, pair)
    return producer, step


def _check_handed_out(entry: Entry, pair: Pair) -> None:
    if not is_of(pair.producer_id, entry.transactional_id):
        raise RefusedError(KafkaFault.UNKNOWN_PRODUCER, f"{pair} was never handed out for this transactional id")


def _may_be_later(producer: ProducerState, pair: Pair) -> bool:
    """Return whether a pair that is not the one known here may have been handed out since, by another gateway."""
    return pair.producer_id == producer.pair.producer_id and pair.epoch > producer.pair.epoch


def _look_up(held: IdState, pair: Pair) -> Steps[ProducerState]:
    entry = held.entry
    if entry is None:
        raise RefusedError(
            KafkaFault.UNKNOWN_PRODUCER,
            f"no producer was started for this transactional id, or it was not used for so long that it is forgotten, "
            f"so {pair} is none",
        )
    newest = entry.pair
    if entry.previous is not None and pair == entry.previous.pair:
        # It may have been asked for that was answered with the newest pair, by which the producer is known from now on.
        held.producer, _ = yield from _find(held, newest, entry.previous)
        return held.producer
    if pair.producer_id != newest.producer_id or pair.epoch < newest.epoch:
        _check_handed_out(entry, pair)
        raise RefusedError(Step.STALE, f"{pair} is over: {newest} is the newest producer of this transactional id")
    previous = entry.previous
    if pair != newest:
        before = Pair(pair.producer_id, pair.epoch - 1)
        known, _, _ = yield from FindLabel(before.label)
        previous = _previous(before, known)
        if previous is None and (yield from FindLabel(pair.label))[0] is KnownEnd.NONE:
            if held.producer is not None and held.producer.pair.producer_id == pair.producer_id:
                yield from _record(held, entry)  # fails if another gateway has held the id since it was known here
                raise RefusedError(Step.STALE, f"{pair} was not handed out yet: {held.producer.pair} is the newest")
            raise RefusedError(
                KafkaFault.UNKNOWN_PRODUCER, f"{pair} was handed out by no gateway, as far as is remembered"
            )
    producer, _ = yield from _find(held, pair, previous)
    has_ended = producer.state in (ProducerPhase.COMMITTED, ProducerPhase.ABORTED, ProducerPhase.LOST)
    if has_ended and producer.kept is None and pair.epoch < EPOCH_MAX:
        # With v2 its end may have been answered, and the next pair be in use: then this request comes late. So it may
        # where the lease had run out before the producer asked for an abort, which was answered like any other.
        following = Pair(pair.producer_id, pair.epoch + 1)
        known, _, _ = yield from FindLabel(following.label)
        if known is not KnownEnd.NONE:
            end = PairEnd.COMMIT if producer.state is ProducerPhase.COMMITTED else PairEnd.ABORT
            producer, _ = yield from _find(held, following, Previous(pair, end))
    held.producer = producer
    return producer


def _previous(before: Pair, known: KnownEnd) -> Previous | None:
    match known:
        case KnownEnd.COMMITTED:
            return Previous(before, PairEnd.COMMIT)
        case KnownEnd.ABORTED:
            return Previous(before, PairEnd.ABORT)
        case _:
            return None


def _find(held: IdState, pair: Pair, previous: Previous | None) -> Steps[tuple[ProducerState, bool]]:
    """Return the producer of a pair by the outcome of its label, and whether there is any; take over what is open."""
    entry, kept = held.entry, None
    assert entry is not None
    known, reason, transaction = yield from FindLabel(pair.label)
    if known is KnownEnd.NONE and entry.kept is not None and pair == entry.pair:
        kept = entry.kept
        known, reason, transaction = yield from FindLabel(kept.label)
        if known is KnownEnd.NONE:
            kept = None
    _forget_transaction(held)
    held.sequences = Sequences()
    if known is KnownEnd.OPEN:
        notes = yield from Resume(transaction)
        if notes is None:
            # Its gateway has died before anything was acknowledged: the producer sends all of it again. Or it has
            # ended since, with what was acknowledged. One whose outcome is lost has not begun for the producer, either.
            with suppress(RefusedError, LostTransactionError):
                yield from Finish(commit=False, reason=UNACKNOWLEDGED)
            known, reason, _ = yield from FindLabel((kept or pair).label)
        else:
            held.sequences = Sequences.restored(notes)
    return found(pair, known, reason, previous, kept), known is not KnownEnd.NONE


def _open(
    held: IdState,
    request: Request,
    pair: Pair,
    stream: str,
    now_ms: int,
    *,
    is_home: bool = False,
    is_sure: bool = True,
) -> Steps[None]:
    """Have a transaction open for a request that writes."""
    producer, step = yield from _decide(held, request, pair)
    if step is Step.BEGIN:
        entry = held.entry
        assert entry is not None
        if not stream or is_home:
            if not entry.home and not (stream and is_sure):
                raise RefusedError(
                    KafkaFault.NOWHERE,
                    "offsets alone, and nothing was ever written with this transactional id: of which group of streams "
                    "the transaction is cannot be told; write first",
                )
            stream = entry.home or stream
        if stream != entry.home or _is_old(held, now_ms):
            yield from _record(held, replace(entry, home=stream, written_ms=now_ms))
        _forget_transaction(held)
        yield from BeginTransaction(stream, pair.label, held.lease_ms)
        held.producer = producer.begun()
    elif step is not Step.GO:
        raise _refusal(step, producer, pair)


def _save(held: IdState) -> Steps[Any]:
    return (yield from Save(held.sequences.notes()))


def _renew(held: IdState, end: PairEnd, random: int, now_ms: int) -> Steps[None]:
    """Hand out the next pair. It is put on record where no outcome of a label tells other gateways of it."""
    producer, entry = held.producer, held.entry
    assert producer is not None
    assert entry is not None
    fresh = producer.renewed(end, random)
    follows = producer.state in (ProducerPhase.COMMITTED, ProducerPhase.ABORTED) and producer.kept is None
    if end is PairEnd.RENEWED or not follows or fresh.pair.producer_id != producer.pair.producer_id:
        record = replace(entry, pair=fresh.pair, previous=fresh.previous, kept=None, written_ms=now_ms)
        yield from _record(held, record)
    held.producer = fresh
    if end is PairEnd.RENEWED:
        held.sequences = Sequences()


def _is_old(held: IdState, now_ms: int) -> bool:
    """Return whether the entry has to be written again to show that its id is in use."""
    return held.entry is not None and not 0 <= now_ms - held.entry.written_ms < held.fresh_ms


def _record(held: IdState, entry: Entry) -> Steps[None]:
    yield from WriteEntry(entry)
    held.entry = entry


def _forget_transaction(held: IdState) -> None:
    held.has_records = held.has_offsets = False


def _refusal(step: Step, producer: ProducerState, pair: Pair) -> RefusedError:
    return RefusedError(step, f"producer {producer.pair} is {producer.state.value}, and {pair} asks")
