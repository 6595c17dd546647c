"""Where the live page has its answers from: the board of this coordinator's leaders, ZooKeeper, Kafka and the doctor.

Everything here runs on threads of the page's server, or on the doctor's own, and never on a leader's. Answers are used
again for a moment, so that ten who look cost what one does; and nothing is asked while nobody looks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, Generic, TypeVar

from rollbridge.calls import Deadline, answers_within
from rollbridge.config import ConnectionSettings
from rollbridge.defects import log_defect
from rollbridge.doctor.checks import find, fold
from rollbridge.doctor.facts import Finding, gather
from rollbridge.errors import NotFoundError, RollbridgeError, StreamNotFoundError, UnavailableError
from rollbridge.kafka.errors import NotAuthorizedError
from rollbridge.kafka.metadata import Clusters, Isolation
from rollbridge.kafka.offsets import LATEST, leader_bytes, list_offsets
from rollbridge.model import paths
from rollbridge.model.changes import StreamFault
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.gateways import GatewayRecord
from rollbridge.model.health import coordinator_faults
from rollbridge.model.names import GroupName, Partition, StreamName
from rollbridge.model.picture import lineage_svg
from rollbridge.model.records import Coordinator, StreamConfig, TransactionRecord
from rollbridge.zookeeper.gateways import read_gateways, read_holders, read_records
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.shell.page_board import PageBoard
from rollbridge_coordinator.state.documents import (
    VERSION,
    Document,
    Glance,
    LeadView,
    Measure,
    ProducerOrigin,
    clients_at_gateways,
    gateway_entry,
    glance_document,
    last_hour_document,
    lead_document,
    led_group_document,
    measured_places,
    newest_epochs,
    other_group_document,
    segment_loads,
    stream_document,
    with_origins,
)
from rollbridge_coordinator.state.live import LIVE_STREAMS_MAX

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

ANSWER_S: Final = 5.0
"""Longest time of all requests for one answer."""
KEPT_S: Final = 1.0
"""For how long an answer of ZooKeeper is used again."""
LED_KEPT_S: Final = 0.5
"""For how long what a leader has put up is used again as it was written down."""
SLOWLY_KEPT_S: Final = 5.0
"""For how long a list that takes many requests is."""
MEASURED_S: Final = 5.0
"""Between two measures of a stream."""
RATE_MS_MAX: Final = 60_000
"""A rate over a longer time says nothing of now."""
BOARD_S: Final = 1.5
"""How long a leader is waited for that has put up nothing fresh."""
KEPT_MAX: Final = 64
"""Answers of each kind that are kept."""
GATEWAYS_KEPT_S: Final = 2.0
"""For how long the list of gateways is."""
GATEWAYS_SHOWN: Final = 100
"""Gateways in the overview."""
ORIGINS_S: Final = 1.5
"""How long ZooKeeper is waited for that says which producers transactions are of."""
GROUPS_SHOWN: Final = 200
"""Groups in the overview: first those that are led here."""
RECORDS_READ: Final = 1_000
"""Records of open transactions of a group that is led elsewhere which are read."""
DOCTOR_S: Final = 60.0
"""Between two looks of the doctor, at least."""
DOCTOR_REST: Final = 50
"""The same, as a multiple of how long the last one took: the page takes a fiftieth of a processor for it, at most."""


class KeptAnswers(Generic[K, V]):
    """Answers by key that are used again for a while. Of threads that ask for the same one, one makes it."""

    def __init__(self, keep_s: float) -> None:
        """Keep answers for so long."""
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._slots: OrderedDict[K, _Slot[V]] = OrderedDict()

    def get(self, key: K, make: Callable[[V | None], V]) -> V:
        """Return the answer; ``make`` gets the one before, and what it raises is not kept."""
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
        board: PageBoard,
        session: ZooKeeperSession,
        coordinators: Callable[[], Mapping[str, Coordinator]],
        faults: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare; nothing is asked before somebody looks.

        Args:
            settings: Settings of the coordinator.
            board: What its leaders show.
            session: Its ZooKeeper session.
            coordinators: Returns what the live coordinators say of themselves, by name.
            faults: Returns what keeps this one from leading.
        """
        self._settings = settings
        self._board = board
        self._metadata = Metadata(session)
        self._session = session
        self._coordinators = coordinators
        self._faults = faults
        self._leads: KeptAnswers[None, Sequence[LeadView]] = KeptAnswers(KEPT_S)
        self._led: KeptAnswers[GroupName, Document] = KeptAnswers(LED_KEPT_S)
        self._others: KeptAnswers[GroupName, Document] = KeptAnswers(SLOWLY_KEPT_S)
        self._streams: KeptAnswers[StreamName, _KnownStream] = KeptAnswers(KEPT_S)
        self._measures: KeptAnswers[StreamName, tuple[Measure | None, Measure]] = KeptAnswers(MEASURED_S)
        self._gateways: KeptAnswers[None, Mapping[int, GatewayRecord]] = KeptAnswers(GATEWAYS_KEPT_S)
        self._pictures: KeptAnswers[StreamName, tuple[_Drawn, str]] = KeptAnswers(0.0)
        self._clusters = Clusters(
            settings.bootstrap_servers, security=settings.security, client_id=client_name(settings.name)
        )
        self._doctor = DoctorVisits(connection_of(settings))

    def close(self) -> None:
        """Close the connections to Kafka."""
        self._clusters.close()

    # Documents

    def overview(self) -> Document:
        """Return the coordinators and groups, as far as they are known: also before this one has arrived."""
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
        now_ms = _now_ms()
        here = sum(lead.is_here for lead in leads[:GROUPS_SHOWN])
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
                {
                    "name": name,
                    "release": item.release or None,
                    "page": item.page or None,
                    "here": name == settings.name,
                    "faults": list(coordinator_faults(item)),
                }
                for name, item in sorted(known.items())
            ],
            "gateways": [gateway_entry(item) for item in gateways[:GATEWAYS_SHOWN]],
            "gateways_not_listed": max(len(gateways) - GATEWAYS_SHOWN, 0),
            "fault": fault or None,
            "groups": [
                {
                    **lead_document(lead, now_ms),
                    **glance_document(self._glance(lead, now_ms, patience_s=BOARD_S / max(here, 1))),
                }
                for lead in leads[:GROUPS_SHOWN]
            ],
            "groups_not_listed": max(len(leads) - GROUPS_SHOWN, 0),
        }

    def group(self, text: str) -> Document:
        """Return all about a group.

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
        """Return the last hour of a group; nothing of what other coordinators have led."""
        self._board.look()
        name = GroupName.parse(text)
        now_ms = _now_ms()
        return last_hour_document(str(name), self._board.last_hour(str(name), now_ms), now_ms)

    def stream(self, text: str) -> Document:
        """Return all about a stream.

        Raises:
            NotFoundError: there is none of this name.
            UnavailableError: ZooKeeper does not answer.
        """
        self._board.look()
        name = StreamName.parse(text)
        known = self._stream(name)
        return stream_document(known.config, known.history, known.fault, self._measures_of(name, known), _now_ms())

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
        """Return what the doctor has found, and have it look again if that was a minute ago."""
        self._board.look()
        return self._doctor.look()

    # What they are made of

    def _led_group(self, name: GroupName, lead: LeadView) -> Document:
        """Return all about a group that is led here; nothing if its leader has put up nothing yet."""
        sheets = self._board.sheets(str(name), BOARD_S)
        if sheets is None:
            return {}
        glance = Glance(live=sheets.latest, minute=self._board.last_minute(str(name), sheets.latest.at_ms))
        return self._told_of_producers(led_group_document(lead, glance, sheets.earlier))

    def _known_gateways(self) -> Mapping[int, GatewayRecord]:
        """Return the registered gateways, by their sessions."""
        return self._gateways.get(None, lambda _: self._read_gateways())

    def _read_gateways(self) -> Mapping[int, GatewayRecord]:
        self._require_session()
        with answers_within(ANSWER_S):
            return read_gateways(self._session)

    def _told_of_producers(self, group: Document) -> Document:
        """Return the document of a group with what ZooKeeper knows of producers at gateways, if it answers."""
        clients = clients_at_gateways(group)
        if not clients or not self._session.is_connected:
            return group
        try:
            gateways = self._known_gateways()
            with answers_within(ORIGINS_S):
                records, held = read_records(self._session, clients), read_holders(self._session, clients, gateways)
        except RollbridgeError as missing:
            logger.debug("producers at gateways are not known now: %s", missing)
            return group
        origins = {
            client: ProducerOrigin(
                records[client].transactional_id if client in records else None,
                (held[client].gateway or held[client].said) if client in held else "",
            )
            for client in clients
        }
        return with_origins(group, origins)

    def _glance(self, lead: LeadView, now_ms: int, patience_s: float) -> Glance | None:
        sheets = self._board.sheets(lead.group, patience_s) if lead.is_here else None
        if sheets is None:
            return None
        return Glance(live=sheets.latest, minute=self._board.last_minute(lead.group, now_ms))

    def _require_session(self) -> None:
        """Check that ZooKeeper has answered at all: a session that was never begun keeps whoever asks waiting."""
        if self._session.session_id is None:
            raise UnavailableError("this coordinator has not reached ZooKeeper yet; look again in a moment")

    def _read_leads(self) -> Sequence[LeadView]:
        self._require_session()
        with answers_within(ANSWER_S):
            names = self._metadata.groups()
            led = self._board.led()
            names.sort(key=lambda name: (str(name) not in led, str(name)))
            shown = names[:GROUPS_SHOWN]
            nodes = self._session.get_many([paths.leader(name) for name in shown])
        found = []
        for name, node in zip(shown, nodes, strict=True):
            if node is None:
                found.append(LeadView(group=str(name)))
                continue
            since_ms = node.modified_ms if node.version else node.created_ms
            found.append(self._lead_view(name, node.value.decode(errors="replace"), since_ms, node.version > 0))
        return [*found, *(LeadView(group=str(name)) for name in names[GROUPS_SHOWN:])]

    def _lead_of(self, name: GroupName) -> LeadView:
        for lead in self._leads.get(None, lambda _: self._read_leads())[:GROUPS_SHOWN]:
            if lead.group == str(name):
                return lead
        with answers_within(ANSWER_S):
            if self._metadata.group(name) is None:
                raise NotFoundError(f"there is no transaction group {name}: no stream was ever created in it")
            known = self._metadata.lead(name)
        if known is None:
            return LeadView(group=str(name))
        return self._lead_view(name, known.name, known.since_ms, known.is_serving)

    def _lead_view(self, name: GroupName, leader: str, since_ms: int, is_serving: bool) -> LeadView:
        known = self._coordinators().get(leader)
        return LeadView(
            group=str(name),
            leader=leader,
            since_ms=since_ms,
            is_serving=is_serving,
            page=None if known is None else known.page or None,
            is_here=leader == self._settings.name,
        )

    def _read_group(self, name: GroupName, lead: LeadView) -> Document:
        self._require_session()
        with answers_within(ANSWER_S):
            every = [item for item in self._metadata.streams(name.scope) if item.group == name]
            faults = self._metadata.stream_faults([item.name for item in every])
            shown = sorted(every, key=lambda item: item.name not in faults)[:LIVE_STREAMS_MAX]
            records, count = self._records(name)
        streams = [(item, faults.get(item.name)) for item in shown]
        return self._told_of_producers(other_group_document(lead, streams, len(every), records, count, _now_ms()))

    def _records(self, name: GroupName) -> tuple[Sequence[TransactionRecord], int]:
        """Return records of open transactions, oldest first, and how many there are; of many only those of low ids.

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
        """Ask Kafka where the active segments end and how large they are. What it refuses is said, and no error."""
        places = list(measured_places(known.config, known.history).values())
        ends: Mapping[Partition, int] = {}
        sizes: Mapping[Partition, int] = {}
        fault = ""
        at_ms = _now_ms()
        try:
            deadline = Deadline(ANSWER_S)
            with self._clusters.borrow(deadline) as cluster:
                ends = list_offsets(cluster, places, LATEST, Isolation.READ_UNCOMMITTED, "read the end", deadline)
                at_ms = _now_ms()
                sizes = leader_bytes(cluster, places)
        except NotAuthorizedError as refused:
            fault = f"sizes are not known: {refused}" if ends else str(refused)
        except RollbridgeError as missing:
            fault = str(missing)
        last = Measure(at_ms, ends, sizes, fault)
        earlier = None if before is None or last.at_ms - before[1].at_ms > RATE_MS_MAX else before[1]
        return earlier, last


_Drawn = tuple[EpochHistory, tuple[Measure | None, Measure]]
"""Of what a picture was made."""


class _KnownStream:
    """A stream as ZooKeeper knows it."""

    def __init__(self, config: StreamConfig, history: EpochHistory, fault: StreamFault | None) -> None:
        self.config = config
        self.history = history
        self.fault = fault


def _known_epochs(before: _KnownStream | None, config: StreamConfig) -> EpochHistory | None:
    """Return the epochs that were read before, if they are of this life of the stream."""
    is_same = before is not None and before.config.created_ms == config.created_ms
    return before.history if before is not None and is_same else None


# The doctor


class DoctorVisits:
    """Looks of the doctor, each on a thread of its own, at most once a minute, and only while somebody asks."""

    def __init__(
        self,
        settings: ConnectionSettings,
        examine: Callable[[ConnectionSettings], Iterable[Finding]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``examine`` returns the findings, those of ``rollbridge doctor`` if left out."""
        self._settings = settings
        self._examine = examine or _examine
        self._clock = clock
        self._lock = threading.Lock()
        self._is_looking = False
        self._next_s = float("-inf")
        self._found: Document = {"looked_ms": None, "took_ms": None, "fault": None, "findings": []}

    def look(self) -> Document:
        """Return what was found last, and begin to look again if it is time."""
        with self._lock:
            if not self._is_looking and self._clock() >= self._next_s:
                self._is_looking = True
                threading.Thread(target=self._look, name="page-doctor", daemon=True).start()
            return {"version": VERSION, "now_ms": _now_ms(), "looking": self._is_looking, **self._found}

    def _look(self) -> None:
        began_s, fault = self._clock(), None
        findings: list[Finding] = []
        try:
            findings = list(self._examine(self._settings))
        except RollbridgeError as missing:
            fault = {"code": missing.code, "message": str(missing)}
        except Exception as defect:
            log_defect(logger, "the doctor failed")
            fault = {"code": "defect", "message": f"{type(defect).__name__}; the log has more"}
        ended_s = self._clock()
        found: Document = {
            "looked_ms": _now_ms(),
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


def _examine(settings: ConnectionSettings) -> Iterable[Finding]:
    return find(gather(settings))


# Connections


def connection_of(settings: CoordinatorSettings) -> ConnectionSettings:
    """Return how the coordinator's own credentials connect as a client."""
    return ConnectionSettings(
        bootstrap_servers=settings.bootstrap_servers,
        zookeeper=settings.zookeeper,
        zookeeper_root=settings.zookeeper_root,
        client_name=client_name(settings.name),
        kafka=settings.security,
        zookeeper_security=settings.zookeeper_security,
    )


def client_name(coordinator: str) -> str:
    """Return the client name of a coordinator's page, as it stands in requests and logs."""
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._:@-") else "_" for letter in coordinator
    )
    return f"page:{kept}"[:128]


def _now_ms() -> int:
    return int(time.time() * 1000)
