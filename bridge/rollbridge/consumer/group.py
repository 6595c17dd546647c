"""One member of a consumer group: which of its segments may be read, and the commits that open and close them.

:mod:`rollbridge.stream.reading` decides; this module carries the decisions out. An assigned segment stays paused
until it may be read. It is *opened* by a commit of the offset at which it begins, then resumed. Once all of it has been
handed out and committed, its sealed end is committed, which lets the owners of its successors open those.

Everything runs on the thread that polls, without locks. Questions to brokers and ZooKeeper run as
:class:`.BackgroundCall` on background threads, whose answers a later poll takes in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer

from rollbridge.base.deadlines import BackgroundCall
from rollbridge.base.ids import SegmentId
from rollbridge.base.logs import limited
from rollbridge.consumer.adopted import BREAKING
from rollbridge.consumer.records import PlacesOf
from rollbridge.errors import (
    ConflictError,
    InvalidNameError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    RollbridgeError,
    StreamNotFoundError,
    StreamRecreatedError,
    UnavailableError,
)
from rollbridge.kafka.errors import kafka_error, translate
from rollbridge.kafka.groups import CommittedOffset, GroupOffsetStore
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import (
    Partition,
    PlaceIndex,
    SegmentPlaces,
    StreamName,
    parse_segment_topic,
    show_partition,
)
from rollbridge.stream.reading import (
    Reset,
    SegmentStanding,
    SegmentVerdict,
    check_streams,
    decide,
    decide_plain,
    ignored,
    mark_of,
    wanted,
)

logger = limited(logging.getLogger(__name__))

ReloadHistory = Callable[[StreamName, Callable[[], None], EpochHistory | None], EpochHistory]
"""Loader of a stream's epochs, given a callback for when there may be more, and the epochs known so far, if any."""

_ASK_S: Final = 0.1
"""Interval between reads of the group's commits while a segment waits for them; backs off to ``_ASK_MAX_S``."""
_ASK_MAX_S: Final = 1.0
_FIRST_S: Final = 2.0
"""Time that a subscription waits for the group's commits; brokers may not be there yet."""
_ENDS_S: Final = 0.2
_AT_ONCE_S: Final = 0.02
"""Time that the polling thread waits for an answer; a slower one is taken in by a later poll."""
_REREAD_S: Final = 10.0
"""Time that a refused commit waits for the epochs that explain the refusal."""
_BACKGROUND_S: Final = 5.0
"""Timeout of a question on a background thread, after which it is asked again."""
_RESEND_S: Final = 10.0
"""Time after which an unanswered commit is sent again, unchanged."""
_REMIND_S: Final = 30.0
_BEHIND: Final = -1


class Phase(Enum):
    """Reading state of an assigned segment."""

    WAITING = auto()
    OPEN = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Owned:
    """Segment assigned to this member.

    Attributes:
        place: Where it lies.
        stream, segment: What it is; None if it is a partition of a plain topic, which is read and committed likewise,
            but continues nothing.
        next: Offset behind the last record handed out, or the one at which the segment was begun.
        handled: Offset below which everything counts as processed, as far as the application has told.
        committed: Offset that the group is known to have committed.
        sent: Largest offset for which a commit was sent.
        asked: Largest offset of a commit by the application that was refused, as by a rebalance.
        end: Offset at which there was nothing more to read.
        override: Start offset chosen by the application.
        by_hand: True if the application has assigned it, so that it waits for no other segment.
    """

    place: Partition
    stream: StreamName | None
    segment: SegmentId | None
    phase: Phase = Phase.WAITING
    next: int = _BEHIND
    handled: int = _BEHIND
    committed: int = _BEHIND
    sent: int = _BEHIND
    asked: int = _BEHIND
    end: int = _BEHIND
    override: int | None = None
    paused: bool = False
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """Answer to a question for the group's commits.

    Attributes:
        everything: True if all commits were asked for, False if those of relevant segments.
        found: The commits.
        begins: Where segments begin that are to be begun at their end, or at the first record that a topic still has.
        age: Number of commits sent or confirmed when the question was asked; a larger one by now makes it stale.
        marks: Stream and metadata of each commit that tells which streams the group reads, of all commits.
    """

    everything: bool
    found: list[CommittedOffset]
    begins: Mapping[Partition, int]
    age: int
    marks: list[tuple[str, str]]


class Membership:
    """Segments of one member. Not thread-safe; used by the thread that polls.

    Brokers and ZooKeeper are queried on background threads, so that a poll keeps its timeout however long they take to
    answer. Commits that open or close a segment are sent asynchronously; a later poll reports their outcome.
    """

    def __init__(
        self,
        consumer: KafkaConsumer,
        group_id: str,
        reset: Reset,
        commits: GroupOffsetStore,
        offsets: LogOffsets,
        load: ReloadHistory,
        places_of: PlacesOf,
        *,
        auto_commit: bool,
    ) -> None:
        self._auto_commit = auto_commit
        self._consumer = consumer
        self._group_id = group_id
        self._reset = reset
        self._commits = commits
        self._offsets = offsets
        self._load = load
        self._places_of = places_of
        self._places: dict[StreamName, SegmentPlaces] = {}
        # Set by ZooKeeper's watches, on a thread of the session; everything else is used by the polling thread only.
        self._changed = threading.Event()
        self._committed: dict[StreamName, dict[SegmentId, int]] = {}
        self._verdicts: dict[StreamName, dict[SegmentId, SegmentVerdict]] = {}
        self._sealed: dict[Partition, int | None] = {}
        self._mark = ""
        self._marked: frozenset[StreamName] = frozenset()
        """Streams whose commits carry the mark: those that have adopted no topic."""
        self._ask_all = False
        self._ask_at = self._ends_at = 0.0
        self._ask_every_s = _ASK_S
        self._waiting_since = 0.0
        self._load_at = 0.0
        self._loading: BackgroundCall[tuple[dict[StreamName, EpochHistory], set[str]]] = BackgroundCall(
            "rollbridge-epochs"
        )
        self._missing: set[str] = set()
        """Topics of segments that brokers do not know. Until they do, or the segments are removed, epochs are read."""
        self._begun = self._loading_for = 0
        """Number of times that streams were taken up: so far, and when the epochs were asked for last."""
        self._asking: BackgroundCall[_Asked] = BackgroundCall("rollbridge-commits")
        self._age = 0
        self._begins: dict[Partition, int] = {}
        self._plain_commits: dict[Partition, int] = {}
        """Committed offsets of the group in assigned plain topics; ``_BEHIND`` for none."""
        self._sending: dict[Partition, tuple[int, float]] = {}
        self._fault: Exception | None = None
        self._broken: RollbridgeError | None = None
        """The error that every call raises until the streams are subscribed to again."""
        self._open_ends: frozenset[Partition] = frozenset()
        """Segments that were read to their end while some of their successors have not been begun."""
        self._given: dict[Partition, int] = {}
        """Offsets up to which segments were handed out that were given up since."""
        self.histories: dict[StreamName, EpochHistory] = {}
        self.known: dict[StreamName, EpochHistory] = {}
        """Epochs of every stream that was ever read."""
        self.owned: dict[Partition, Owned] = {}
        self.index: Final = PlaceIndex()
        """Streams and segments of partitions, of all streams that were ever read."""
        self.names: Final[dict[StreamName, str]] = {}
        """Streams that the application knows by the topic that they have adopted."""
        self.plain: Final[set[str]] = set()
        """Topics that no stream has adopted, and patterns of such."""
        self.shared: Final[set[str]] = set()
        """Topics with several partitions: adopted and plain ones."""

    # Streams and topics ----------------------------------------------------------------------------------------

    def begin(self, streams: Iterable[StreamName], plain: Iterable[str] = (), *, at_once: bool = True) -> list[str]:
        """Take up the streams and plain topics of the group; return the topics to subscribe to.

        Asks for the group's commits ``at_once``, or with the next :meth:`step`. If it raises, nothing has changed.

        Raises:
            ConflictError: The group reads other streams.
            StreamNotFoundError, ZooKeeperUnavailableError, NotAuthorizedError.
            KafkaUnavailableError: No broker tells whether an adopted topic is the one that was adopted.
        """
        names = list(dict.fromkeys(streams))
        # A refusal comes before anything is changed: a member continues with what it has.
        histories = {name: self._load(name, self._changed.set, None) for name in names}
        for name in names:
            self.learn_places(name)
        # Native consumers of an adopted topic share its commits, and know no marks.
        marked = frozenset(name for name in names if not self._places[name].topic)
        asked = self._first_commits(marked) if at_once else None
        if asked is not None:
            check_streams(self._group_id, map(str, marked), asked.marks)
        self._age += 1
        if self._broken is not None:  # offsets so far may be those of other records
            self._given.clear()
            places = list(self.owned)
            self._consumer.pause([TopicPartition(*place) for place in places])
            self.assigned(places)
        self._broken = None
        self._begun += 1
        self.leave()
        self.histories = histories
        self.plain.update(plain)
        self._marked = marked
        self._mark = mark_of(map(str, marked)) if marked else ""
        for topic in self.plain:
            self.index.adopted.pop(topic, None)
        for item in self.owned.values():
            item.stream, item.segment = self.what(item.place)
            if item.stream is None and item.phase is Phase.DONE:
                item.phase = Phase.WAITING  # the topic was released, and takes records again
        self._adopt()
        if asked is not None:
            self._take_in(asked)
        else:
            self._ask_all, self._ask_at = True, 0.0
        return self.topics()

    def leave(self) -> None:
        """Follow no stream and no plain topic any more."""
        self.histories = {}
        for known in (self.plain, self._verdicts, self._committed, self._sealed):
            known.clear()
        self._marked, self._mark = frozenset(), ""
        self._ask_all = False

    def _first_commits(self, marked: frozenset[StreamName]) -> _Asked | None:
        """Return what the group has committed; None if brokers do not answer soon: a later poll asks again.

        Raises:
            NotAuthorizedError.
        """
        age = self._age

        def ask() -> _Asked:
            found = self._commits.read(timeout_s=_BACKGROUND_S)
            return _Asked(True, found, {}, age, self._marks(found, marked))

        asking: BackgroundCall[_Asked] = BackgroundCall("rollbridge-commits")
        asking.begin(ask)
        try:
            if asking.wait(_FIRST_S):
                return asking.take()
            why: object = f"no answer within {_FIRST_S:g} s"
        except UnavailableError as fault:
            why = fault
        logger.info("consumer.commits_unread group=%s: a poll will read them: %s", self._group_id, why)
        return None

    def topics(self) -> list[str]:
        """Return the plain topics, and those of the segments that are still wanted."""
        segments = {
            self.place_of(name, segment)[0]
            for name, history in self.histories.items()
            for segment in wanted(history, self._committed.get(name, {}), self._verdicts[name])
        }
        return sorted(segments | self.plain)

    def learn_places(self, stream: StreamName) -> None:
        """Look up where the segments of a stream lie."""
        places = self._places[stream] = self._places_of(stream)
        self.index.add(places)
        if places.topic:
            self.shared.add(places.topic)

    def places(self, stream: StreamName) -> SegmentPlaces:
        """Return where the segments of a stream lie."""
        if stream not in self._places:
            self.learn_places(stream)
        return self._places[stream]

    def place_of(self, stream: StreamName, segment: SegmentId) -> Partition:
        """Return where a segment of a stream that was read lies."""
        return self._places[stream].of(segment)

    def what(self, place: Partition) -> tuple[StreamName, SegmentId] | tuple[None, None]:
        """Return the stream and segment that a partition is; None and None if it is one of a plain topic.

        A pattern may match the topics of streams, too; they are read as by a native consumer, unless the streams were
        subscribed to as well.
        """
        found = self._find(place)
        has_patterns = any(topic.startswith("^") for topic in self.plain)
        if found is not None and (found[0] in self.histories or not (has_patterns or place[0] in self.plain)):
            return found
        self.shared.add(place[0])
        return None, None

    def _find(self, place: Partition) -> tuple[StreamName, SegmentId] | None:
        """Return the stream and segment that a partition is; None if it is none."""
        try:
            return self.index.find(place)
        except InvalidNameError:
            return None

    def refresh(self) -> bool:
        """Read the epochs again if there may be more, or an end is missing; return True if there are new segments.

        A slow answer is taken in by a later call.

        Raises:
            StreamNotFoundError: A stream was deleted.
            StreamRecreatedError: A stream was deleted and created again, or the topic that it has adopted.
            ConflictError, TruncatedError: An adopted topic was created again, or deleted.
        """
        return self._refresh(_AT_ONCE_S)

    def _refresh(self, wait_s: float) -> bool:
        if self._broken is not None and self.histories:
            raise self._broken
        if self._loading.under_way:
            return self._loaded()
        now = time.monotonic()
        pending = False
        if now - self._ends_at >= _ENDS_S:
            self._ends_at = now
            pending = any(
                node.is_sealing for history in self.histories.values() for node in history.graph.nodes.values()
            )
        if not self.histories or now < self._load_at or not (self._changed.is_set() or pending or self._missing):
            return False
        tell = self._changed.set if self._changed.is_set() else _nothing
        self._changed.clear()
        known, missing = dict(self.histories), set(self._missing)
        self._loading_for = self._begun

        def load() -> tuple[dict[StreamName, EpochHistory], set[str]]:
            found = {name: self._load(name, tell, history) for name, history in known.items()}
            return found, set(self._offsets.present(missing) if missing else ())

        self._loading.begin(load)
        self._loading.wait(wait_s)
        return self._loaded()

    def _loaded(self) -> bool:
        """Adopt the epochs that were read; return True if there are new segments."""
        before = self._sealed.keys()
        try:
            taken = self._loading.take()
        except StreamNotFoundError:
            self._changed.set()  # raised again by the next call
            raise
        except BREAKING as fault:
            if self._loading_for != self._begun:
                self._changed.set()  # the subscription has changed meanwhile
                return False
            self._broken = fault
            raise
        except UnavailableError as fault:
            logger.warning("consumer.epochs_unread: retrying: %s", fault)
            self._changed.set()
            self._load_at = time.monotonic() + _ASK_MAX_S
            return False
        if taken is None:
            return False
        found, there = taken
        if found.keys() != self.histories.keys():
            self._changed.set()  # the subscription has changed meanwhile
            return False
        for name, known in self.histories.items():
            if found[name].is_outdated(known):
                logger.warning("consumer.epochs_lost stream=%s: ZooKeeper holds fewer than before; reading again", name)
                self._changed.set()
                self._load_at = time.monotonic() + _ASK_MAX_S
                return False
            if not found[name].is_later(known):
                self._broken = StreamRecreatedError(
                    f"stream {name} was deleted and created again while group {self._group_id} was reading it; nothing "
                    "of the one that there is now was handed out: subscribe again, or begin with a new consumer"
                )
                raise self._broken
        self.histories = found
        self._adopt()
        self._ask_at = 0.0
        stored = {self.place_of(name, item)[0] for name, history in found.items() for item in history.stored()}
        self._missing = (self._missing - there) & stored
        if self._missing:
            self._load_at = time.monotonic() + _ASK_MAX_S
        return not self._sealed.keys() <= before

    def recheck(self, missing: str = "") -> None:
        """Read the epochs again with the next :meth:`refresh`; again and again while this topic is ``missing``."""
        self._changed.set()
        if missing:
            self._missing.add(missing)

    def reread(self) -> bool:
        """Read the epochs again and wait up to ``_REREAD_S`` for them; return True if there are new segments.

        Raises:
            StreamNotFoundError, StreamRecreatedError: As :meth:`refresh`.
        """
        self._loading.wait(_REREAD_S)  # an answer in flight may predate the reason for this call
        found = self._loading.under_way and self._loaded()
        self.recheck()
        self._load_at = 0.0
        return self._refresh(_REREAD_S) or found

    def _adopt(self) -> None:
        self._sealed = {}
        for name, history in self.histories.items():
            nodes = history.graph.nodes.items()
            self._sealed |= {self.place_of(name, segment): node.sealed_end for segment, node in nodes}
        self.known |= self.histories
        for item in self.owned.values():
            if item.phase is Phase.DONE:
                continue
            now = None if item.stream is None else self.histories.get(item.stream)
            if now is None or item.segment is None:
                continue
            if now.is_former(item.segment):
                item.phase = Phase.DONE  # the stream was created again, so Kafka will revoke the topic
            elif now.is_removed(item.segment):
                item.phase = Phase.DONE
                where = show_partition(item.place)
                logger.warning("consumer.segment_removed segment=%s group=%s: not fully read", where, self._group_id)
        self._decide()

    def _decide(self) -> None:
        for name, history in self.histories.items():
            self._verdicts[name] = decide(history, self._committed.get(name, {}), self._reset)
        self._find_open_ends()

    def _find_open_ends(self) -> None:
        if any(item.phase is Phase.DONE for item in self.owned.values()):
            self._open_ends = frozenset(
                self.place_of(name, segment)
                for name, history in self.histories.items()
                for segment in wanted(history, self._committed.get(name, {}), self._verdicts[name])
                if self._verdicts[name][segment].standing is SegmentStanding.DONE
            )

    def without_removed(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Return the places whose segments were not removed, as of the epochs last seen."""
        return [place for place in places if not self._is_removed((place.topic, place.partition))]

    def _is_removed(self, place: Partition) -> bool:
        found = self._find(place)
        return found is not None and found[0] in self.histories and self.histories[found[0]].is_removed(found[1])

    # Assignment ------------------------------------------------------------------------------------------------

    def take(self, items: Iterable[Owned]) -> None:
        """Own segments that were assigned by hand."""
        for item in items:
            self.owned[item.place] = item
            self._plain_commits.pop(item.place, None)
            self._begins.pop(item.place, None)
        self._age += 1
        self._ask_at = 0.0

    def assigned(self, places: Iterable[Partition]) -> None:
        """Add segments that were just assigned and are paused."""
        for place in places:
            self.owned[place] = Owned(place, *self.what(place))
        self._ask_all = True
        self._ask_at = 0.0
        self._waiting_since = time.monotonic()

    def revoked(self, places: Iterable[Partition]) -> None:
        """Remove segments, remembering how far they were handed out."""
        for place in places:
            item = self.owned.pop(place, None)
            if item is not None:
                self._given[place] = max(item.next, item.end, self._given.get(place, _BEHIND))
            self._sending.pop(place, None)
            self._begins.pop(place, None)
            self._plain_commits.pop(place, None)

    def rewind(self) -> None:
        """Have everything that was not handed out fetched again.

        Raises:
            KafkaException: From confluent-kafka's consumer.
        """
        for item in self.owned.values():
            offset = item.next if item.next >= 0 else item.override
            if item.phase is Phase.OPEN and offset is not None:
                self._consumer.seek(TopicPartition(*item.place, offset))

    # What may be read ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Commit the ends of segments that were read, and open those that may be read. Called between messages.

        Raises:
            ConflictError: The group reads other streams.
            KafkaException: The group has committed nothing and ``auto.offset.reset`` is ``error``.
        """
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        self._finish()
        now = time.monotonic()
        if not self._asking.under_way:
            due = self._ask_all or any(self._is_pending(item) for item in self.owned.values())
            if not due or now < self._ask_at:
                return
            self._ask(everything=self._ask_all)
            self._asking.wait(_AT_ONCE_S)
        try:
            asked = self._asking.take()
        except UnavailableError as fault:
            logger.info("consumer.commits_unread group=%s: retrying: %s", self._group_id, fault)
            self._ask_at = now + _ASK_MAX_S
            return
        if asked is None:
            return
        if asked.age != self._age:
            self._ask_at = 0.0  # commits sent meanwhile may be newer than the answer
            return
        self._take_in(asked)
        if asked.everything:
            self._ask_all = False
        before = sum(item.phase is Phase.WAITING for item in self.owned.values())
        self._open()
        self._find_open_ends()
        self._finish()
        moved = before != sum(item.phase is Phase.WAITING for item in self.owned.values())
        self._ask_every_s = _ASK_S if moved else min(self._ask_every_s * 1.5, _ASK_MAX_S)
        self._ask_at = 0.0 if any(self._wanted_begins()) else now + self._ask_every_s
        self._remind(now)

    def reached(self, place: Partition, offset: int) -> None:
        """Record that there was nothing more to read at an offset."""
        item = self.owned.get(place)
        if item is not None:
            item.end = max(item.end, offset)

    def is_late(self, place: Partition, offset: int) -> bool:
        """Return True if an offset is at or behind the sealed end of its segment."""
        sealed = self._sealed.get(place)
        return sealed is not None and offset >= sealed

    def _is_pending(self, item: Owned) -> bool:
        if item.phase is Phase.OPEN:
            return self._end_of(item) is not None
        # A late commit of another member may take an end back for as long as successors wait for it.
        return item.phase is Phase.WAITING or item.place in self._open_ends or self._is_taken_back(item)

    def _is_taken_back(self, item: Owned) -> bool:
        """Return True if the group had read a segment to its end and a later commit took the offset back."""
        verdict = self._verdict(item)
        return (
            item.phase is Phase.DONE
            and verdict is not None
            and verdict.standing is SegmentStanding.READ
            and self._sealed.get(item.place) is not None
        )

    def _end_of(self, item: Owned) -> int | None:
        """Return the sealed end of a segment that was handed out completely; None if it was not."""
        sealed = self._sealed.get(item.place)
        return sealed if sealed is not None and max(item.end, item.next) >= sealed else None

    def _ask(self, *, everything: bool) -> None:
        """Start reading the group's commits: all of them, or those of segments that are not done."""
        places = None
        if not everything:
            places = {
                self.place_of(name, segment)
                for name, verdicts in self._verdicts.items()
                for segment, verdict in verdicts.items()
                if verdict.standing is not SegmentStanding.DONE
            } | self._open_ends
            places |= {at for at, item in self.owned.items() if self._is_plain(item) and item.phase is Phase.WAITING}
        oldest, newest = self._wanted_begins()
        age, marked = self._age, self._marked

        def ask() -> _Asked:
            found = self._commits.read(places, timeout_s=_BACKGROUND_S)
            marks = self._marks(found, marked) if everything else []
            isolation = Isolation.READ_COMMITTED
            begins = _of_each_topic(newest, lambda at: self._offsets.end(at, isolation, timeout_s=_BACKGROUND_S))
            begins |= _of_each_topic(oldest, lambda at: self._offsets.first(at, timeout_s=_BACKGROUND_S))
            return _Asked(everything, found, begins, age, marks)

        self._asking.begin(ask)

    def _wanted_begins(self) -> tuple[list[Partition], list[Partition]]:
        """Return the segments that begin at their first record, and at their end, whose offset is not known yet."""
        waiting = [item for item in self.owned.values() if item.phase is Phase.WAITING]
        unknown = [item for item in waiting if item.place not in self._begins]
        verdicts = [(item, verdict) for item in unknown if (verdict := self._verdict(item)) is not None]
        oldest = [item.place for item, verdict in verdicts if self._begins_late(item, verdict)]
        return oldest, [item.place for item, verdict in verdicts if verdict.standing is SegmentStanding.READ_NEW]

    def _begins_late(self, item: Owned, verdict: SegmentVerdict) -> bool:
        """Return True if the first offset is not 0: the owner of the topic deletes, and natives resume from commits."""
        begins = verdict.standing is SegmentStanding.READ and not verdict.offset and item.committed < 0
        return begins and item.place[0] in self.shared

    def _verdict(self, item: Owned) -> SegmentVerdict | None:
        """Return what is known of an assigned segment or plain partition; None if that is nothing yet."""
        if item.stream is not None and item.segment is not None and not self._is_plain(item):
            return self._verdicts.get(item.stream, {}).get(item.segment)
        committed = self._plain_commits.get(item.place)
        return None if committed is None else decide_plain(committed, self._reset)

    def _take_in(self, asked: _Asked) -> None:
        """Adopt the group's commits and decide again."""
        if asked.everything:
            self._committed = {name: {} for name in self.histories}
            check_streams(self._group_id, map(str, self._marked), asked.marks)
        self._begins.update(asked.begins)
        for item in asked.found:
            self._note((item.topic, item.partition), item.offset)
        for place, owned in self.owned.items():
            if self._is_plain(owned):
                self._plain_commits.setdefault(place, _BEHIND)
        self._decide()
        if asked.everything:
            self._warn_of_ignored()

    def _warn_of_ignored(self) -> None:
        for name, history in self.histories.items():
            for segment, end in ignored(history, self._committed[name]).items():
                logger.warning(
                    "consumer.offset_ignored group=%s partition=%s offset=%d end=%d: the group has commits in segments "
                    "that continue this one, so it counts as read to its end; to read a stream again, delete the "
                    "offsets of the group",
                    *(self._group_id, show_partition(self.place_of(name, segment))),
                    *(self._committed[name][segment], end),
                )

    def _marks(self, commits: Iterable[CommittedOffset], marked: frozenset[StreamName]) -> list[tuple[str, str]]:
        """Return stream and metadata of the commits in streams that have adopted no topic. Runs in the background.

        Of topics, adopted and plain ones, members may read different ones, as native consumers do. Which streams have
        adopted one is asked here: what this member happens to know of them decides nothing.
        """
        if not marked:
            return []  # this member reads topics only
        found: dict[StreamName, list[str]] = {}
        for item in commits:
            with suppress(InvalidNameError):
                found.setdefault(parse_segment_topic(item.topic)[0], []).append(item.metadata)
        own = [name for name in found if name in marked or not self._places_of(name).topic]
        return [(str(name), metadata) for name in own for metadata in found[name]]

    @staticmethod
    def _is_plain(item: Owned) -> bool:
        """Return True for a partition that continues nothing: of a plain topic, or assigned by hand."""
        return item.stream is None or item.by_hand

    def _note(self, place: Partition, offset: int) -> None:
        item = self.owned.get(place)
        if item is not None and self._is_plain(item):
            self._plain_commits[place] = offset
        elif place in self._sealed:
            stream, segment = self.index.find(place)
            self._committed.setdefault(stream, {})[segment] = offset
        else:
            return
        if item is not None:
            item.committed = offset

    def _open(self) -> None:
        """Open the segments that may be read."""
        ready: dict[Partition, int] = {}
        for item in self.owned.values():
            verdict = self._verdict(item)
            if item.phase is not Phase.WAITING or verdict is None:
                continue
            match verdict.standing:
                case SegmentStanding.DONE:
                    item.phase = Phase.DONE
                case SegmentStanding.READ if not self._begins_late(item, verdict):
                    ready[item.place] = verdict.offset
                case SegmentStanding.READ | SegmentStanding.READ_NEW:
                    if item.place in self._begins:
                        ready[item.place] = self._begins[item.place]
                case SegmentStanding.NO_OFFSET:
                    why = f"no committed offset for {show_partition(item.place)}"
                    raise KafkaException(KafkaError(KafkaError._AUTO_OFFSET_RESET, why))
                case SegmentStanding.WAITS:
                    continue
            if item.override is not None and item.place in ready:
                ready[item.place] = item.override
        fresh = {
            place: offset
            for place, offset in ready.items()
            if self.owned[place].committed < 0 and not self._is_plain(self.owned[place])
        }
        if fresh:
            self._send(fresh)
        for place, offset in ready.items():
            if place not in fresh:
                self._start(self.owned[place], offset)

    def _start(self, item: Owned, offset: int) -> None:
        place = TopicPartition(*item.place, offset)
        try:
            self._consumer.seek(place)
            if not item.paused:
                self._consumer.resume([place])
        except KafkaException as exc:
            # The consumer may not be ready right after an assignment; the next step tries again.
            logger.debug("consumer.open_retried stream=%s segment=%s: %s", item.stream, item.segment, exc)
            self._ask_at = 0.0
            return
        item.phase = Phase.OPEN
        item.next = item.handled = item.sent = offset
        item.asked = _BEHIND
        item.end = _BEHIND
        where = show_partition(item.place)
        logger.info("consumer.opened group=%s partition=%s offset=%d", self._group_id, where, offset)

    def _finish(self) -> None:
        """Commit the ends of segments that were handed out and committed completely."""
        ends: dict[Partition, int] = {}
        taken_back: dict[Partition, int] = {}
        for item in self.owned.values():
            if self._is_taken_back(item):
                taken_back[item.place] = self._sealed[item.place] or 0
            sealed = self._end_of(item) if item.phase is Phase.OPEN else None
            processed = max(item.committed, item.asked, item.handled if self._auto_commit else _BEHIND)
            if sealed is not None and processed >= min(item.next, sealed):
                ends[item.place] = sealed
        missing = {place: end for place, end in ends.items() if self.owned[place].committed < end}
        if missing or taken_back:
            self._send(missing | taken_back)
        ends = {place: end for place, end in ends.items() if place not in missing}
        for place in ends:
            item = self.owned[place]
            item.phase = Phase.DONE
            self._consumer.pause([TopicPartition(*place)])
            logger.info("consumer.finished group=%s partition=%s", self._group_id, show_partition(place))
        if ends:
            self._find_open_ends()
            self._ask_at = 0.0
            self._ask_every_s = _ASK_S

    def _remind(self, now: float) -> None:
        """Warn about segments whose manual commit is missing and keeps successors waiting."""
        if now - self._waiting_since < _REMIND_S:
            return
        self._waiting_since = now
        for item in self.owned.values():
            if item.phase is Phase.OPEN and self._end_of(item) is not None:
                logger.warning(
                    "consumer.commit_missing stream=%s segment=%s offset=%d group=%s: the segment was handed out to "
                    "its end, and its successors wait for that commit",
                    *(item.stream, item.segment, item.next, self._group_id),
                )

    # Commits ---------------------------------------------------------------------------------------------------

    def is_over(self, place: Partition) -> bool:
        """Return True if the group is known here to have read a segment to its end; nothing is committed in it then.

        Returns False for a removed segment: Kafka knows whether its stream was created again.
        """
        item = self.owned.get(place)
        if item is not None and item.phase is Phase.OPEN:
            return False  # as after a seek: the segment is read once more
        verdict = self._verdict_of(place)
        return verdict is not None and verdict.standing is SegmentStanding.DONE and not self._is_removed(place)

    def fault_of(self, place: Partition) -> RollbridgeError | None:
        """Return why a partition may hold other records by now than those that were handed out; None if it does not."""
        return self._broken if place[0] in self.shared else None

    def _verdict_of(self, place: Partition) -> SegmentVerdict | None:
        found = self._find(place)
        return None if found is None else self._verdicts.get(found[0], {}).get(found[1])

    def check_commit(self, place: Partition, offset: int) -> None:
        """Refuse an offset that would count records as read that no member can have read.

        Raises:
            InvalidRequestError: The segment waits for its predecessors, or fewer records of it were handed out.
            ConflictError, TruncatedError: Something is wrong with the adopted topic, see :meth:`refresh`.
        """
        if (fault := self.fault_of(place)) is not None:
            raise fault
        verdict = self._verdict_of(place)
        if verdict is None:
            return  # manually assigned, or of another stream: no order to keep
        stream, segment = self.index.find(place)
        if verdict.standing is SegmentStanding.WAITS:
            names = ", ".join(map(str, verdict.after))
            raise InvalidRequestError(
                f"segment {segment} of {stream} continues {names}, which group {self._group_id} has not read to the "
                f"end, so nothing of it was handed out; a commit in it would skip them; nothing was committed"
            )
        # In a segment that another member owns by now, what was handed out before may still be committed, and no more:
        # brokers take commits of this member until they notice that its session has timed out.
        given = max(self._given.get(place, _BEHIND), self._committed.get(stream, {}).get(segment, _BEHIND))
        item = self.owned.get(place)
        if item is not None:
            given = max(given, item.next, item.end)
        if offset > given:
            up_to = f"up to {given}" if given >= 0 else "which is nothing"
            raise InvalidRequestError(
                f"offset {offset} of segment {segment} of {stream} is behind what was handed out, {up_to}; to skip "
                "records, seek there first; nothing was committed"
            )

    def position(self, place: Partition) -> int:
        """Return the offset at which reading of a segment continues; OFFSET_INVALID if it was not begun."""
        item = self.owned.get(place)
        if item is None or item.next < 0:
            return OFFSET_INVALID
        sealed = self._sealed.get(place)
        is_over = item.phase is Phase.DONE and sealed is not None
        return max(item.next, (sealed if is_over else self._end_of(item)) or 0)

    def rounded(self, place: Partition, offset: int, note: str = "") -> TopicPartition:
        """Return the commit for an offset, rounded up to the sealed end if there are no records in between.

        ``note`` is the application's metadata, for which topics that are not of our own have room.
        """
        item = self.owned.get(place)
        if item is not None and item.phase is Phase.OPEN and offset >= item.next:
            offset = max(offset, self._end_of(item) or 0)
        return TopicPartition(*place, offset, metadata=note if place[0] in self.shared else self._mark)

    def _send(self, offsets: Mapping[Partition, int]) -> None:
        """Send commits that open or close segments; a later poll reports the outcome."""
        now = time.monotonic()
        due = {}
        for place, offset in offsets.items():
            sent, sent_at = self._sending.get(place, (_BEHIND, 0.0))
            if sent != offset or now - sent_at > _RESEND_S:
                due[place] = offset
                self._sending[place] = offset, now
        if not due:
            return
        self._age += 1
        try:
            places = [self.rounded(place, offset) for place, offset in due.items()]
            self._consumer.commit(offsets=places, asynchronous=True)
        except KafkaException as exc:
            for place in due:
                self._sending.pop(place, None)
            fault = self._judged(exc)
            if fault is not None:
                raise fault from exc

    def sent(self, error: KafkaError | None, partitions: Iterable[TopicPartition]) -> bool:
        """Process the outcome of a commit; return True if all of it opens or closes segments."""
        own = True
        for item in partitions:
            if self._sending.pop((item.topic, item.partition), (_BEHIND, 0.0))[0] < 0:
                own = False
        self._ask_at = min(self._ask_at, time.monotonic() + (0.0 if error is None else _ASK_S))
        fault = None if error is None else self._judged(KafkaException(error))
        if own:
            self._fault = self._fault or fault
        elif error is not None and fault is None:
            # No later commit makes up for that of a sealed segment's last record, so its end is committed in its place.
            for item in partitions:
                if (known := self.owned.get((item.topic, item.partition))) is not None:
                    known.asked = max(known.asked, item.offset)
        return own

    def _judged(self, exc: KafkaException) -> Exception | None:
        """Return the error of a failed commit; None if the commit has to be repeated."""
        error = kafka_error(exc)
        fault = translate(exc, f"commit offsets of group {self._group_id}")
        if isinstance(fault, NotFoundError):
            self.recheck()  # raises in the next refresh if a stream is gone
        if isinstance(fault, KafkaUnavailableError | ConflictError | NotFoundError) or _is_rebalance(error):
            logger.info("consumer.commit_repeated group=%s: %s", self._group_id, fault)
            return None
        return fault

    def noted(self, places: Iterable[TopicPartition]) -> None:
        """Record commits that the group coordinator has confirmed."""
        changed = False
        self._age += 1
        for place in places:
            if place.error is None and place.offset >= 0:
                self._note((place.topic, place.partition), place.offset)
                changed = True
        if changed:
            self._decide()


def _is_rebalance(error: KafkaError | None) -> bool:
    return error is not None and error.code() in (
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._STATE,
    )


def _of_each_topic(
    places: list[Partition], look: Callable[[list[Partition]], Mapping[Partition, int]]
) -> dict[Partition, int]:
    """Return the offsets of partitions, leaving out topics that do not exist (yet)."""
    found: dict[Partition, int] = {}
    for topic in dict.fromkeys(topic for topic, _ in places):
        try:
            found |= look([place for place in places if place[0] == topic])
        except NotFoundError as fault:
            logger.info("consumer.offsets_unknown: a poll retries: %s", fault)
    return found


def _nothing() -> None:
    """Ignore the change."""
