"""Prove of a stream that each committed record is where the commit log says, once: read everything, change nothing.

In this order, so that later commits cannot be taken for faults:

1. The ends of the segments, then the end of the commit log: records below the first are named below the second.
2. The buffers, as far as they are still there: the number of records of each part that have arrived.
3. The commit log, once: its runs in the stream's segments go, sorted by segment, into files of fixed entries, so that
   memory does not grow with the number of transactions.
4. The segments, one after the other, in parallel with these runs (:mod:`rollbridge.doctor.verification`).
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final

from xxhash import xxh64_intdigest

from rollbridge.base.ids import SegmentId
from rollbridge.buffer.frames import FrameHeader, FrameKind, PieceKey, unpack_bundle, unpack_header
from rollbridge.commitlog.control import ControlKind, ControlRecord, decode_control, peek_kind
from rollbridge.doctor.verification import (
    Discrepancies,
    DiscrepancyKind,
    Placed,
    SegmentCheck,
    VerificationTally,
)
from rollbridge.errors import CorruptDataError, NotFoundError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.committed import BatchStanding, judge, signed_batch
from rollbridge.kafka.fetch import RawStretch
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import FetchedBatches, check_crc
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition

FETCH_BYTES: Final = 8 << 20
SPILL_BYTES: Final = 32 << 20
"""Entries that wait in memory for their files, in bytes."""
ARRIVED_MAX: Final = 1_000_000
"""Transactions of which it is noted how much has arrived in the buffers; further ones are not compared with these."""
WAIT_MS: Final = 1_000
IDLE_MAX: Final = 30
"""Answers without anything decided after which the commit log is not waited for any longer."""
_BUCKETS: Final = 256
_ENTRY: Final = Struct(">QI16sI")
_READ_ENTRIES: Final = 4_096

Tell = Callable[[str, int], None]
"""Takes what is read, and how many offsets of it have been read just now."""


@dataclass(slots=True)
class StreamVerification:
    """Result of a verification.

    Attributes:
        transactions: Commits on the log that name records of the stream.
        log_start: First offset that the commit log still has.
    """

    findings: Discrepancies = field(default_factory=Discrepancies)
    tally: VerificationTally = field(default_factory=VerificationTally)
    segments: int = 0
    transactions: int = 0
    log_start: int = 0
    arrived: int = 0
    """Transactions whose counts were compared with the frames in the buffers."""


@dataclass(slots=True)
class Plan:
    """Ranges to be read, settled before anything is.

    Attributes:
        segments: Segments that are still there, with the first offset and the end of each.
        log: First offset and end of the commit log.
        buffers: The same of each partition of the buffer.
    """

    segments: dict[SegmentId, tuple[int, int]]
    log: tuple[int, int]
    buffers: dict[Partition, tuple[int, int]]

    @property
    def offsets(self) -> int:
        """Number of offsets to be read."""
        spans = [*self.segments.values(), self.log, *self.buffers.values()]
        return sum(end - first for first, end in spans)


def make_plan(kafka: KafkaClient, config: StreamConfig, history: EpochHistory) -> Plan:
    """Look up what there is; the segments first, see above.

    Raises:
        KafkaUnavailableError, NotAuthorizedError: nothing was read.
    """
    places = {segment: config.place(segment) for segment in history.stored()}
    there = kafka.topics.topic_ids({topic for topic, _ in places.values()})
    if config.topic and str(there.get(config.topic)) != config.topic_id:
        there.pop(config.topic, None)  # another topic of that name has no records of the stream
    places = {segment: place for segment, place in places.items() if place[0] in there}
    ends = kafka.offsets.end(places.values(), Isolation.READ_COMMITTED)
    firsts = kafka.offsets.first(places.values())
    segments = {}
    for segment, place in places.items():
        sealed = history.sealed_end(segment)
        end = ends[place] if sealed is None else min(sealed, ends[place])
        segments[segment] = (min(firsts[place], end), end)
    log = config.group.commit_log_topic
    span = kafka.offsets.first([log])[log], kafka.offsets.end([log])[log]
    buffers = [(config.buffer_topic, number) for number in range(config.buffer_partitions)]
    begins, stops = kafka.offsets.first(buffers), kafka.offsets.end(buffers)
    return Plan(segments, span, {place: (begins[place], stops[place]) for place in buffers})


class Verifier:
    """Reads what a plan names; for one thread, and for one stream."""

    def __init__(
        self, kafka: KafkaClient, config: StreamConfig, history: EpochHistory, plan: Plan, tell: Tell | None = None
    ) -> None:
        self._log = kafka.log()
        self._config = config
        self._history = history
        self._plan = plan
        self._tell = tell or (lambda what, offsets: None)
        self._found = StreamVerification(log_start=plan.log[0], segments=len(plan.segments))
        self._arrived: dict[bytes, tuple[int, Counter[int]]] = {}
        """Of transactions with a BEGIN frame in what is left of the buffers, its time and records by part."""

    def run(self) -> StreamVerification:
        """Read everything, and return what was found.

        Raises:
            KafkaUnavailableError, NotAuthorizedError: it could not be read to the end.
        """
        with tempfile.TemporaryDirectory(prefix="rollbridge-verify-") as folder:
            for place, (first, end) in self._plan.buffers.items():
                self._read_buffer(place, first, end)
            with Spill(Path(folder)) as spill:
                self._read_log(spill)
                for segment, (first, end) in self._plan.segments.items():
                    self._read_segment(segment, first, end, spill)
        return self._found

    # Buffers ----------------------------------------------------------------------------------------------------

    def _read_buffer(self, place: Partition, first: int, end: int) -> None:
        topic, partition = place
        last: dict[tuple[bytes, PieceKey], int] = {}
        mine: dict[bytes, tuple[int, Counter[int]]] = {}
        offset = first
        while offset < end:
            stretch = self._log.fetch(topic, offset, partition=partition, wait_ms=WAIT_MS, max_bytes=FETCH_BYTES)
            if stretch.start > offset:  # truncated meanwhile: what was begun before cannot be told
                last, mine = {}, {}
            for record in stretch.records:
                for frame in _frames(record.key, record.value):
                    known = mine.get(frame.transaction)
                    if frame.kind is FrameKind.BEGIN and known is None and len(mine) < ARRIVED_MAX:
                        mine[frame.transaction] = record.timestamp, Counter()
                    elif frame.kind is FrameKind.DATA and known is not None:
                        piece = frame.transaction, PieceKey(frame.part, 0, frame.segment)
                        if frame.first_count > last.get(piece, -1):
                            last[piece] = frame.first_count
                            known[1][frame.part] += frame.records
            offset = self._advance("buffers", offset, max(stretch.end, stretch.start), end)
        self._arrived |= mine

    # The commit log ---------------------------------------------------------------------------------------------

    def _read_log(self, spill: Spill) -> None:
        topic = self._config.group.commit_log_topic
        stream = str(self._config.name)
        offset, end = self._plan.log
        seen = [array("Q") for _ in range(_BUCKETS)]  # eight bytes for each transaction, sorted a bucket at a time
        idle = 0
        while offset < end:
            stretch = self._log.fetch(topic, offset, wait_ms=WAIT_MS, max_bytes=FETCH_BYTES)
            if stretch.start > offset:  # truncated meanwhile: as if it had begun there
                self._found.log_start = stretch.start
                spill.clear()
                for bucket in seen:
                    del bucket[:]
            for record in stretch.records:
                if record.offset >= end or peek_kind(record.value) is not ControlKind.COMMIT:
                    continue
                try:
                    control = decode_control(record.key, record.value)
                except CorruptDataError as fault:
                    self._found.findings.add(DiscrepancyKind.CORRUPT, f"{topic}@{record.offset}", str(fault))
                    continue
                if stream in control.placement:
                    self._take(control, f"{topic}@{record.offset}", stream, spill)
                    digest = xxh64_intdigest(control.transaction.bytes)
                    seen[digest % _BUCKETS].append(digest)
            reached = self._advance("commit log", offset, max(stretch.end, stretch.start), end)
            idle = idle + 1 if reached == offset else 0
            offset = reached
            if idle >= IDLE_MAX:
                break  # a leader has died in a round: neither its commits nor its records are decided
        self._found.transactions = sum(map(len, seen))
        self._look_for_two_commits(seen)

    def _take(self, control: ControlRecord, where: str, stream: str, spill: Spill) -> None:
        named = sum(control.counts().values())
        if named != control.records:
            text = f"transaction {control.transaction} has {control.records} records, and its places have {named}"
            self._found.findings.add(DiscrepancyKind.CORRUPT, where, text)
        raw = control.transaction.bytes
        written: Counter[int] = Counter()
        for segment, runs in control.placement[stream].items():
            for run in runs:
                written[run.part] += run.count
            if segment in self._plan.segments:
                for run in runs:
                    spill.add(segment, Placed(run.base_offset, run.count, raw, run.part))
            elif self._is_gone(segment):
                self._found.tally.elsewhere += sum(run.count for run in runs)
            else:
                text = f"transaction {control.transaction} has records in segment {segment}, which {stream} never had"
                self._found.findings.add(DiscrepancyKind.UNKNOWN_SEGMENT, where, text)
        begun_ms, arrived = self._arrived.get(raw, (0, None))
        # A BEGIN frame that came again, after the first one, may lie behind records that were truncated.
        if arrived is None or begun_ms > control.begun_ms:
            return
        self._found.arrived += 1
        for part, records in written.items():
            if records > arrived[part]:
                text = (
                    f"{records} records of part {part} of transaction {control.transaction} are committed, and "
                    f"{arrived[part]} have arrived in the buffer"
                )
                self._found.findings.add(DiscrepancyKind.NEVER_ARRIVED, where, text)

    def _is_gone(self, segment: SegmentId) -> bool:
        """Tell whether a segment was there once: of a former life, removed, or of an epoch that came since."""
        if segment.epoch < self._config.first_epoch or segment.epoch > self._history.active.epoch:
            return True
        return self._history.is_removed(segment) or segment in self._history.segments()

    def _look_for_two_commits(self, seen: Sequence[array[int]]) -> None:
        """Name the transactions of which the log tells twice; read again only if there may be any."""
        twice = {one for bucket in seen for one, other in pairwise(sorted(bucket)) if one == other}
        if not twice:
            return
        topic, (offset, end) = self._config.group.commit_log_topic, self._plan.log
        first: dict[bytes, int] = {}
        while offset < end:
            stretch = self._log.fetch(topic, offset, wait_ms=WAIT_MS, max_bytes=FETCH_BYTES)
            for record in stretch.records:
                key = record.key or b""
                if record.offset >= end or peek_kind(record.value) is not ControlKind.COMMIT:
                    continue
                if xxh64_intdigest(key) in twice and first.setdefault(key, record.offset) != record.offset:
                    text = f"a second commit of transaction {key.hex()}, whose first one is at {first[key]}"
                    self._found.findings.add(DiscrepancyKind.DOUBLED, f"{topic}@{record.offset}", text)
            offset = max(stretch.end, stretch.start)

    # Segments ---------------------------------------------------------------------------------------------------

    def _read_segment(self, segment: SegmentId, first: int, end: int, spill: Spill) -> None:
        topic, partition = self._config.place(segment)
        tally, findings = VerificationTally(), self._found.findings
        limits = self._config.limits if self._config.places.is_adopted(segment) else None
        is_compacted = limits is not None and limits.is_compacted
        check = SegmentCheck(
            f"{topic}-{partition}",
            spill.entries(segment),
            first,
            end,
            is_whole=self._is_log_whole(segment),
            is_compacted=is_compacted,
            findings=findings,
            tally=tally,
        )
        offset = first
        while offset < end:
            try:
                raw = self._log.fetch_raw(topic, offset, partition=partition, wait_ms=WAIT_MS, max_bytes=FETCH_BYTES)
            except NotFoundError:
                check.deleted_below(end)  # removed with its topic, meanwhile
                break
            except CorruptDataError as fault:  # it ends before that: an unclean election, a restored volume
                findings.add(DiscrepancyKind.CORRUPT, f"{topic}-{partition}@{offset}", str(fault))
                break
            if raw.start > offset:
                offset = raw.start
                check.deleted_below(offset)
            reached = self._examine(raw, offset, end, check, tally, topic, is_compacted=is_compacted)
            offset = self._advance("segments", offset, reached, end)
        check.finish()
        self._found.tally.add(tally)

    def _examine(
        self,
        raw: RawStretch,
        offset: int,
        end: int,
        check: SegmentCheck,
        tally: VerificationTally,
        topic: str,
        *,
        is_compacted: bool,
    ) -> int:
        """Check the batches of one answer from an offset on; return the offset behind them."""
        findings = self._found.findings
        for header, batch, standing in judge(FetchedBatches(raw.batches), raw.aborted):
            base, behind = header.base_offset, header.base_offset + header.last_offset_delta + 1
            if base >= end:
                return end
            if base > offset and not is_compacted:
                findings.add(
                    DiscrepancyKind.GAP, f"{topic}@{offset}", f"offsets {offset} to {base - 1} are in no batch"
                )
            offset = max(offset, behind)
            try:
                check_crc(header, batch)
                if standing is BatchStanding.COMMITTED:
                    found = signed_batch(header, batch)
                    for piece in found.pieces:
                        check.found(piece)
                    tally.plain += found.plain
                    tally.conditional += found.conditional
            except CorruptDataError as fault:
                findings.add(DiscrepancyKind.CORRUPT, f"{topic}@{base}", str(fault))
            tally.aborted_batches += standing is BatchStanding.ABORTED
        return offset

    def _is_log_whole(self, segment: SegmentId) -> bool:
        """Return True if the log holds all commits in a segment: an adopted topic may hold records of other streams."""
        config = self._config
        return self._found.log_start == 0 and not config.life_id and not config.places.is_adopted(segment)

    def _advance(self, what: str, offset: int, reached: int, end: int) -> int:
        """Report progress; return the offset to continue at, which may be the same if nothing is decided yet."""
        self._tell(what, max(min(reached, end) - offset, 0))
        return reached


class Spill:
    """Runs of the log by segment, in its order, in a file for each; small amounts stay in memory."""

    def __init__(self, folder: Path, bytes_max: int = SPILL_BYTES) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._waiting: dict[SegmentId, bytearray] = {}
        self._bytes = 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all runs."""
        self._waiting.clear()
        self._bytes = 0
        for path in self._folder.iterdir():
            path.unlink()

    def add(self, segment: SegmentId, placed: Placed) -> None:
        """Append a run."""
        self._waiting.setdefault(segment, bytearray()).extend(_ENTRY.pack(*placed))
        self._bytes += _ENTRY.size
        if self._bytes >= self._bytes_max:
            self._write()

    def entries(self, segment: SegmentId) -> Iterator[Placed]:
        """Iterate over a segment's runs, in the order in which they were added."""
        path = self._path(segment)
        if path.exists():
            with path.open("rb") as file:
                while block := file.read(_ENTRY.size * _READ_ENTRIES):
                    yield from map(Placed._make, _ENTRY.iter_unpack(block))
        yield from map(Placed._make, _ENTRY.iter_unpack(bytes(self._waiting.get(segment, b""))))

    def _write(self) -> None:
        for segment, entries in self._waiting.items():
            with self._path(segment).open("ab") as file:
                file.write(entries)
        self._waiting.clear()
        self._bytes = 0

    def _path(self, segment: SegmentId) -> Path:
        return self._folder / f"{segment.epoch}-{segment.number}"


def _frames(key: bytes | None, value: bytes | None) -> Collection[FrameHeader]:
    """Return the headers of the frames in a message of a buffer; none if it is none, or cannot be read."""
    header = unpack_header(key)
    if header is None:
        return ()
    if header.kind is not FrameKind.BUNDLE:
        return (header,)
    try:
        return [inner for inner, _, _ in unpack_bundle(header, value or b"")]
    except CorruptDataError:
        return ()


def verify(
    kafka: KafkaClient,
    config: StreamConfig,
    history: EpochHistory,
    *,
    planned: Callable[[Plan], object] | None = None,
    tell: Tell | None = None,
) -> StreamVerification:
    """Verify a stream; see the module.

    Args:
        config: The stream's settings.
        history: Its epochs, as they were read last.
        planned: Is told what is going to be read.
        tell: Is told of each piece that was read.

    Raises:
        KafkaUnavailableError, NotAuthorizedError: it could not be read to the end.
    """
    plan = make_plan(kafka, config, history)
    if planned is not None:
        planned(plan)
    return Verifier(kafka, config, history, plan, tell).run()
