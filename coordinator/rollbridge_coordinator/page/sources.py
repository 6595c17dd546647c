"""Sources of the live page's answers: the board of this coordinator's leaders, ZooKeeper, Kafka and the doctor.

Everything here runs on threads of the page's server, or on the doctor's own, and never on a leader's. Answers are
reused for a moment, so that ten viewers cost as much as one; and there are no requests without viewers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final, Generic, TypeVar

from rollbridge.base.deadlines import Deadline, answers_within, wall_ms
from rollbridge.base.logs import log_defect
from rollbridge.config import ConnectionSettings
from rollbridge.doctor.checks import find, fold
from rollbridge.doctor.facts import Finding, gather
from rollbridge.errors import NotFoundError, RollbridgeError, StreamNotFoundError, UnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.kafka.metadata import LATEST, Isolation
from rollbridge.kafka.offsets import leader_bytes, list_offsets
from rollbridge.metadata import paths
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.gateway_store import read_gateways, read_holders, read_records
from rollbridge.metadata.gateways import GatewayRecord
from rollbridge.metadata.picture import GroupPicture
from rollbridge.metadata.records import Coordinator, Group, TransactionRecord
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata, look_at_cluster, look_at_groups, look_at_streams
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import GroupName, Partition, StreamName
from rollbridge.stream.picture import lineage_svg
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.page.cache import PageCache
from rollbridge_coordinator.page.documents import (
    VERSION,
    Document,
    LeadView,
    Measure,
    Overview,
    ProducerOrigin,
    clients_at_gateways,
    coordinator_entry,
    gateway_entry,
    glance_document,
    last_hour_document,
    lead_document,
    led_group_document,
    measured_places,
    newest_epochs,
    other_group_document,
    segment_loads,
    state_document,
    stream_document,
    waiting_entries,
    with_origins,
)
from rollbridge_coordinator.page.overview import LIVE_STREAMS_MAX

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

ANSWER_S: Final = 5.0
"""Longest time of all requests for one answer."""
KEPT_S: Final = 1.0
"""Time for which an answer of ZooKeeper is reused."""
LED_KEPT_S: Final = 0.5
"""Time for which the JSON of a leader's values is reused."""
SLOWLY_KEPT_S: Final = 5.0
"""Time for which a list is reused that takes many requests."""
MEASURED_S: Final = 5.0
"""Interval between measurements of a stream."""
RATE_MS_MAX: Final = 60_000
"""Longest period of a rate that still describes the present."""
BOARD_S: Final = 1.5
"""Longest wait for a leader without fresh values."""
KEPT_MAX: Final = 64
"""Answers of each kind that are kept."""
GATEWAYS_KEPT_S: Final = 2.0
"""Time for which the list of gateways is reused."""
GATEWAYS_SHOWN: Final = 100
"""Gateways in the overview."""
ORIGINS_S: Final = 1.5
"""Longest wait for ZooKeeper's records of the producers of transactions."""
GROUPS_SHOWN: Final = 200
"""Groups in the overview: first those that are led here."""
RECORDS_READ: Final = 1_000
"""Records that are read of open transactions of a group led elsewhere."""
DOCTOR_S: Final = 60.0
"""Shortest interval between runs of the doctor."""
DOCTOR_REST: Final = 50
"""The same, as a multiple of the duration of the last one: at most a fiftieth of a processor."""


class KeptAnswers(Generic[K, V]):
    """Answers by key that are reused for a while. If several threads request the same one, one makes it."""

    def __init__(self, keep_s: float) -> None:
        """Reuse answers for so long."""
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._slots: OrderedDict[K, _Slot[V]] = OrderedDict()

    def get(self, key: K, make: Callable[[V | None], V]) -> V:
        """Return the answer; ``make`` gets the one before, and its errors are not kept."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot()
                if len(self._slots) > KEPT_MAX:
                    self._slots.popitem(last=False)
            self._slots.move_to_end(key)
        with slot.lock:
            if slot.value is None or time.monotonic() >= slot.until_s:
                slot.value = make(slot.value)
                slot.until_s = time.monotonic() + self._keep_s
            return slot.value


class _Slot(Generic[V]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.until_s = 0.0
        self.value: V | None = None


class PageSources:
    """Documents of the live page; safe to use from several threads."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        kafka: KafkaClient,
        board: PageCache,
        session: ZooKeeperSession,
        coordinators: Callable[[], Mapping[str, Coordinator]],
        faults: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare; there are no requests before the first viewer.

        Args:
            board: Board of its leaders.
            coordinators: Returns the records of the live coordinators, by name.
            faults: Returns the reasons that keep this one from leading.
        """
        self._settings = settings
        self._board = board
        self._metadata = Metadata(session)
        self._session = session
        self._coordinators = coordinators
        self._faults = faults
        self._leads: KeptAnswers[None, Sequence[LeadView]] = KeptAnswers(KEPT_S)
        self._state: KeptAnswers[None, Document] = KeptAnswers(SLOWLY_KEPT_S)
        self._led: KeptAnswers[GroupName, Document] = KeptAnswers(LED_KEPT_S)
        self._others: KeptAnswers[GroupName, Document] = KeptAnswers(SLOWLY_KEPT_S)
        self._streams: KeptAnswers[StreamName, _KnownStream] = KeptAnswers(KEPT_S)
        self._measures: KeptAnswers[StreamName, tuple[Measure | None, Measure]] = KeptAnswers(MEASURED_S)
        self._gateways: KeptAnswers[None, Mapping[int, GatewayRecord]] = KeptAnswers(GATEWAYS_KEPT_S)
        self._pictures: KeptAnswers[StreamName, tuple[_Drawn, str]] = KeptAnswers(0.0)
        self._kafka = kafka.named(client_name(settings.name))
        self._doctor = DoctorVisits(lambda: find(gather(connection_of(settings), kafka)))

    def close(self) -> None:
        self._kafka.close()

    # Documents

    def overview(self) -> Document:
        """Return the known coordinators and groups, also before this one has reached its servers."""
        self._board.look()
        settings, faults = self._settings, list(self._faults())
        known = self._coordinators()
        try:
            leads, fault = self._leads.get(None, lambda _: self._read_leads()), ""
        except RollbridgeError as missing:
            leads, fault = (), str(missing)
        try:
            gateways = sorted(self._known_gateways().values(), key=lambda item: item.name)
        except RollbridgeError as missing:
            gateways, fault = [], fault or str(missing)
        now_ms = wall_ms()
        return {
            "version": VERSION,
            "now_ms": now_ms,
            "coordinator": {
                "name": settings.name,
                "release": known[settings.name].release if settings.name in known else None,
                "healthy": not faults,
                "faults": faults,
                "zookeeper_connected": self._session.is_connected,
                "actions": bool(settings.page_token),
            },
            "coordinators": [
                {**coordinator_entry(name, item), "here": name == settings.name} for name, item in sorted(known.items())
            ],
            "gateways": [gateway_entry(item) for item in gateways[:GATEWAYS_SHOWN]],
            "gateways_not_listed": max(len(gateways) - GATEWAYS_SHOWN, 0),
            "fault": fault or None,
            "groups": self._groups(leads, now_ms),
            "groups_not_listed": max(len(leads) - GROUPS_SHOWN, 0),
        }

    def _groups(self, leads: Sequence[LeadView], now_ms: int) -> list[Document]:
        here = sum(lead.is_here for lead in leads[:GROUPS_SHOWN])
        return [
            {
                **lead_document(lead, now_ms),
                **glance_document(self._overview(lead, now_ms, patience_s=BOARD_S / max(here, 1))),
            }
            for lead in leads[:GROUPS_SHOWN]
        ]

    def state(self) -> Document:
        """Return all that is known at one moment, of the whole cluster.

        Raises:
            UnavailableError: ZooKeeper does not answer.
        """
        self._board.look()
        return self._state.get(None, lambda _: self._read_state())

    def _read_state(self) -> Document:
        self._require_session()
        with answers_within(ANSWER_S):
            picture = look_at_cluster(self._metadata)
        leads = [self._lead_view(item) for item in picture.groups]
        groups = self._groups(leads, picture.now_ms)  # which waits for leaders' values, for all of them together
        led = {lead.group: self._board.sheets(lead.group, 0.0) for lead in leads if lead.is_here}
        waiting = {name: waiting_entries(sheets.latest) for name, sheets in led.items() if sheets is not None}
        return state_document(picture, groups, waiting)

    def group(self, text: str) -> Document:
        """Return a group.

        Raises:
            NotFoundError: there is none of this name.
            UnavailableError: it is led elsewhere, and ZooKeeper does not answer.
        """
        self._board.look()
        name = GroupName.parse(text)
        lead = self._lead_of(name)
        if str(name) in self._board.led() and (found := self._led.get(name, lambda _: self._led_group(name, lead))):
            return found
        return self._others.get(name, lambda _: self._read_group(name, lead))

    def last_hour(self, text: str) -> Document:
        """Return the last hour of a group, as far as it was led here."""
        self._board.look()
        name = GroupName.parse(text)
        now_ms = wall_ms()
        return last_hour_document(str(name), self._board.last_hour(str(name), now_ms), now_ms)

    def stream(self, text: str) -> Document:
        """Return a stream.

        Raises:
            NotFoundError: there is none of this name.
            UnavailableError: ZooKeeper does not answer.
        """
        self._board.look()
        name = StreamName.parse(text)
        known = self._stream(name)
        return stream_document(known.config, known.history, known.fault, self._measures_of(name, known), wall_ms())

    def lineage(self, text: str) -> str:
        """Return the picture of a stream's newest epochs, with rates and sizes, SVG; errors as for :meth:`stream`."""
        self._board.look()
        name = StreamName.parse(text)
        known = self._stream(name)
        measures = self._measures_of(name, known)
        drawn = known.history, measures

        def draw(before: tuple[_Drawn, str] | None) -> tuple[_Drawn, str]:
            if before is not None and before[0] == drawn:
                return before
            loads = segment_loads(known.config, known.history, measures)
            return drawn, lineage_svg(newest_epochs(known.history), str(name), loads)

        return self._pictures.get(name, draw)[1]

    def doctor(self) -> Document:
        """Return the doctor's findings, and run it again if the last run was a minute ago."""
        self._board.look()
        return self._doctor.look()

    # What they are made of

    def _led_group(self, name: GroupName, lead: LeadView) -> Document:
        """Return a group that is led here; nothing if its leader has published nothing yet."""
        sheets = self._board.sheets(str(name), BOARD_S)
        if sheets is None:
            return {}
        overview = Overview(live=sheets.latest, minute=self._board.last_minute(str(name), sheets.latest.at_ms))
        return self._told_of_producers(led_group_document(lead, overview, sheets.earlier))

    def _known_gateways(self) -> Mapping[int, GatewayRecord]:
        return self._gateways.get(None, lambda _: self._read_gateways())

    def _read_gateways(self) -> Mapping[int, GatewayRecord]:
        self._require_session()
        with answers_within(ANSWER_S):
            return read_gateways(self._session)

    def _told_of_producers(self, group: Document) -> Document:
        """Add ZooKeeper's facts about producers at gateways to the document of a group, if it answers."""
        clients = clients_at_gateways(group)
        if not clients or not self._session.is_connected:
            return group
        try:
            gateways = self._known_gateways()
            with answers_within(ORIGINS_S):
                records, held = read_records(self._session, clients), read_holders(self._session, clients, gateways)
        except RollbridgeError as missing:
            logger.debug('page.producers-unknown reason="%s"', missing)
            return group
        origins = {
            client: ProducerOrigin(
                records[client].transactional_id if client in records else None,
                (held[client].gateway or held[client].said) if client in held else "",
            )
            for client in clients
        }
        return with_origins(group, origins)

    def _overview(self, lead: LeadView, now_ms: int, patience_s: float) -> Overview | None:
        sheets = self._board.sheets(lead.group, patience_s) if lead.is_here else None
        if sheets is None:
            return None
        return Overview(live=sheets.latest, minute=self._board.last_minute(lead.group, now_ms))

    def _require_session(self) -> None:
        """Check that ZooKeeper has answered at all: a call on a session that never began would block."""
        if self._session.session_id is None:
            raise UnavailableError("this coordinator has not reached ZooKeeper yet; try again in a moment")

    def _read_leads(self) -> Sequence[LeadView]:
        self._require_session()
        with answers_within(ANSWER_S):
            names = self._metadata.groups()
            led = self._board.led()
            names.sort(key=lambda name: (str(name) not in led, str(name)))
            found = look_at_groups(self._metadata, names[:GROUPS_SHOWN])
        others = (GroupPicture(Group(name, 0)) for name in names[GROUPS_SHOWN:])
        return [self._lead_view(item) for item in (*found, *others)]

    def _lead_of(self, name: GroupName) -> LeadView:
        for lead in self._leads.get(None, lambda _: self._read_leads())[:GROUPS_SHOWN]:
            if lead.group == str(name):
                return lead
        with answers_within(ANSWER_S):
            found = look_at_groups(self._metadata, [name])
        if not found:
            raise NotFoundError(f"there is no transaction group {name}: no stream was ever created in it")
        return self._lead_view(found[0])

    def _lead_view(self, picture: GroupPicture) -> LeadView:
        known = self._coordinators().get(picture.leader or "")
        return LeadView(
            picture=picture,
            page=None if known is None else known.page or None,
            is_here=picture.leader == self._settings.name,
        )

    def _read_group(self, name: GroupName, lead: LeadView) -> Document:
        self._require_session()
        with answers_within(ANSWER_S):
            every = [item for item in look_at_streams(self._metadata, name.scope)[0] if item.config.group == name]
            shown = sorted(every, key=lambda item: item.error is None)[:LIVE_STREAMS_MAX]
            records, count = self._records(name)
        return self._told_of_producers(other_group_document(lead, shown, len(every), records, count, wall_ms()))

    def _records(self, name: GroupName) -> tuple[Sequence[TransactionRecord], int]:
        """Return records of open transactions, oldest first, and the number of all; of many only those of low ids.

        Ids are given out in order, so these are about the oldest.
        """
        buckets = [f"{paths.transactions(name)}/{number:02x}" for number in range(paths.BUCKETS)]
        children = zip(buckets, self._session.children_many(buckets), strict=True)
        found = sorted((node, f"{bucket}/{node}") for bucket, nodes in children for node in nodes)
        nodes = self._session.get_many([path for _, path in found[:RECORDS_READ]])
        records = [TransactionRecord.from_json(node.value) for node in nodes if node is not None]
        return sorted(records, key=lambda record: (record.begun_ms, record.id)), len(found)

    def _stream(self, name: StreamName) -> _KnownStream:
        return self._streams.get(name, lambda before: self._read_stream(name, before))

    def _read_stream(self, name: StreamName, before: _KnownStream | None) -> _KnownStream:
        self._require_session()
        with answers_within(ANSWER_S):
            config = self._metadata.stream(name)
            history = None if config is None else self._metadata.history(name, known=_known_epochs(before, config))
            if config is None or history is None:
                raise StreamNotFoundError(f"stream {name} does not exist")
            return _KnownStream(config, history, self._metadata.stream_fault(name))

    def _measures_of(self, name: StreamName, known: _KnownStream) -> tuple[Measure | None, Measure]:
        return self._measures.get(name, lambda before: self._measure(known, before))

    def _measure(
        self, known: _KnownStream, before: tuple[Measure | None, Measure] | None
    ) -> tuple[Measure | None, Measure]:
        """Ask Kafka for ends and sizes of the active segments. Refusals become part of the result."""
        places = list(measured_places(known.config, known.history).values())
        ends: Mapping[Partition, int] = {}
        sizes: Mapping[Partition, int] = {}
        fault = ""
        at_ms = wall_ms()
        try:
            deadline = Deadline(ANSWER_S)
            with self._kafka.borrow(deadline) as cluster:
                ends = list_offsets(cluster, places, LATEST, Isolation.READ_UNCOMMITTED, "read the end", deadline)
                at_ms = wall_ms()
                sizes = leader_bytes(cluster, places)
        except NotAuthorizedError as refused:
            fault = f"sizes are not known: {refused}" if ends else str(refused)
        except RollbridgeError as missing:
            fault = str(missing)
        last = Measure(at_ms, ends, sizes, fault)
        earlier = None if before is None or last.at_ms - before[1].at_ms > RATE_MS_MAX else before[1]
        return earlier, last


_Drawn = tuple[EpochHistory, tuple[Measure | None, Measure]]
"""Inputs of a picture."""


class _KnownStream:
    """A stream as in ZooKeeper."""

    def __init__(self, config: StreamConfig, history: EpochHistory, fault: StreamFault | None) -> None:
        self.config = config
        self.history = history
        self.fault = fault


def _known_epochs(before: _KnownStream | None, config: StreamConfig) -> EpochHistory | None:
    is_same = before is not None and before.config.created_ms == config.created_ms
    return before.history if before is not None and is_same else None


# The doctor


class DoctorVisits:
    """Runs of the doctor, each on a thread of its own, at most once a minute, and only for viewers."""

    def __init__(
        self,
        examine: Callable[[], Iterable[Finding]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``examine`` returns the findings."""
        self._examine = examine
        self._clock = clock
        self._lock = threading.Lock()
        self._is_looking = False
        self._next_s = float("-inf")
        self._found: Document = {"looked_ms": None, "took_ms": None, "fault": None, "findings": []}

    def look(self) -> Document:
        """Return the last findings, and begin the next run if it is due."""
        with self._lock:
            if not self._is_looking and self._clock() >= self._next_s:
                self._is_looking = True
                threading.Thread(target=self._look, name="page-doctor", daemon=True).start()
            return {"version": VERSION, "now_ms": wall_ms(), "looking": self._is_looking, **self._found}

    def _look(self) -> None:
        began_s, fault = self._clock(), None
        findings: list[Finding] = []
        try:
            findings = list(self._examine())
        except RollbridgeError as missing:
            fault = {"code": missing.code, "message": str(missing)}
        except Exception as defect:
            log_defect(logger, "doctor.failed")
            fault = {"code": "defect", "message": f"{type(defect).__name__}; the log has more"}
        ended_s = self._clock()
        found: Document = {
            "looked_ms": wall_ms(),
            "took_ms": round((ended_s - began_s) * 1000),
            "fault": fault,
            "findings": [
                {**asdict(item), "severity": item.severity.name.lower(), "more": more} for item, more in fold(findings)
            ],
        }
        with self._lock:
            self._found = found
            self._is_looking = False
            self._next_s = ended_s + max(DOCTOR_S, DOCTOR_REST * (ended_s - began_s))


# Connections


def connection_of(settings: CoordinatorSettings) -> ConnectionSettings:
    """Return settings by which the coordinator's own credentials connect as a client."""
    return replace(settings.connection, client_name=client_name(settings.name))


def client_name(coordinator: str) -> str:
    """Return the client name of a coordinator's page in requests and logs."""
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._:@-") else "_" for letter in coordinator
    )
    return f"page:{kept}"[:128]
