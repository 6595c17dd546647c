"""Paths in ZooKeeper, below the root path (``/rollbridge`` unless configured).

::

    /                                     cluster: which Kafka cluster the path belongs to
    /coordinators/NAME                    ephemeral, coordinator: one that is alive
    /counters/group                       next free number of a group, decimal; only coordinators write it
    /counters/transaction                 that of earlier versions, and of groups that have no number yet
    /scopes/SCOPE/streams/STREAM          stream: its configuration
    /scopes/SCOPE/streams/STREAM/epochs/E epoch: one record for each epoch
    /scopes/SCOPE/streams/STREAM/truncation  truncation: segments that were removed, epochs that were dropped
    /scopes/SCOPE/streams/STREAM/retention   retention: marks at which it may be truncated
    /scopes/SCOPE/former/STREAM#E.S.P     of a deleted stream: first epoch, sequence id and partition not used by it
    /scopes/SCOPE/streams/STREAM/late        late: records after the ends of its sealed segments
    /scopes/SCOPE/streams/STREAM/fault       stream_fault: reason why its transactions are not merged
    /topics/TOPIC                         name of the stream that has adopted a topic
    /groups/SCOPE.GROUP                   group
    /groups/SCOPE.GROUP/controller        controller epoch; every write of a leader checks its version
    /groups/SCOPE.GROUP/leader            ephemeral: name of the coordinator that leads
    /groups/SCOPE.GROUP/requests/R        ephemeral, request: an admin request, sequential
    /groups/SCOPE.GROUP/answers/R         answer to it
    /groups/SCOPE.GROUP/counter           next free count of the group's transactions, decimal; clients reserve blocks
    /groups/SCOPE.GROUP/marks             log_marks: where its commit log may be truncated
    /groups/SCOPE.GROUP/committing        committing: a rolling commit that is being carried out
    /groups/SCOPE.GROUP/merging/MERGE     merging: topics into which a large transaction is merged before they are read
    /groups/SCOPE.GROUP/outdated          why ZooKeeper is known to have been set back; keeps leaders away
    /groups/SCOPE.GROUP/scaling           scaling: a scale that is being carried out
    /groups/SCOPE.GROUP/scaling-waits     scaling_waits: streams that wait to be scaled by their load
    /groups/SCOPE.GROUP/suspended/WORK    scaling or committing: one that waits for native transactions of others
    /groups/SCOPE.GROUP/transactions/B/ID transaction: an open transaction that outlived a moment; B is a bucket
    /groups/SCOPE.GROUP/sessions/CLIENT   client_session: the newest session of a client name
    /groups/SCOPE.GROUP/parts/ID          its version is the highest part number given out for a transaction
    /gateways/live/NAME                   ephemeral: a gateway that is alive, and its ports
    /gateways/leases/LIFE                 ephemeral: written by a gateway again and again; it is over if that stops
    /gateways/ids/B/CLIENT                a transactional id of a gateway's producer, by its client name; B is a bucket
    /gateways/held/B/CLIENT               ephemeral: the gateway that serves it
    /cas/SCOPE.STREAM/SLOT                ephemeral: a conditional writer that is alive, and so its transactional ids

A ZooKeeper reply is limited to 1 MiB, hence the buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, TypeVar

from rollbridge.base.ids import TransactionId
from rollbridge.stream.names import GroupName, StreamName

Name = TypeVar("Name", GroupName, StreamName)

CLUSTER: Final = "/"
COORDINATORS: Final = "/coordinators"
TRANSACTION_COUNTER: Final = "/counters/transaction"
GROUP_NUMBERS: Final = "/counters/group"
SCOPES: Final = "/scopes"
GROUPS: Final = "/groups"
TOPICS: Final = "/topics"
CAS: Final = "/cas"
GATEWAYS: Final = "/gateways"
GATEWAYS_LIVE: Final = f"{GATEWAYS}/live"
GATEWAY_LEASES: Final = f"{GATEWAYS}/leases"
GATEWAY_IDS: Final = f"{GATEWAYS}/ids"
GATEWAY_HOLDERS: Final = f"{GATEWAYS}/held"

BUCKETS: Final = 64
GATEWAY_BUCKETS: Final = 256
"""A ZooKeeper reply is limited to 1 MiB, hence buckets: half a million transactional ids of 100 bytes."""
REQUEST_PREFIX: Final = "request-"


def coordinator(name: str) -> str:
    """Return the ephemeral node of a coordinator."""
    return f"{COORDINATORS}/{name}"


def gateway(name: str) -> str:
    """Return the ephemeral node of a gateway."""
    return f"{GATEWAYS_LIVE}/{name}"


def gateway_bucket(client: str) -> str:
    """Return the bucket of a transactional id, by its client name."""
    return f"{zlib.crc32(client.encode()) % GATEWAY_BUCKETS:02x}"


def gateway_id(client: str) -> str:
    """Return the node with what is on record of a transactional id."""
    return f"{GATEWAY_IDS}/{gateway_bucket(client)}/{client}"


def gateway_holder(client: str) -> str:
    """Return the ephemeral node of the gateway that serves a transactional id."""
    return f"{GATEWAY_HOLDERS}/{gateway_bucket(client)}/{client}"


def _below(parent: Callable[[Name], str], child: str) -> Callable[[Name], str]:
    return lambda name: f"{parent(name)}/{child}"


def streams(scope: str) -> str:
    """Return the parent of a scope's streams."""
    return f"{SCOPES}/{scope}/streams"


def stream(name: StreamName) -> str:
    return f"{streams(name.scope)}/{name.stream}"


epochs: Final = _below(stream, "epochs")
"""Parent of a stream's epoch records."""


def epoch(name: StreamName, number: int) -> str:
    """Return the node of an epoch record; names sort by epoch."""
    return f"{epochs(name)}/{number:010d}"


truncation: Final = _below(stream, "truncation")
"""Node that lists removed segments of a stream and keeps the foundation of dropped epochs."""
retention: Final = _below(stream, "retention")
"""Node of the marks at which a stream may be truncated."""


def deleted_streams(scope: str) -> str:
    """Return the parent of what is kept of a scope's deleted streams; see :mod:`rollbridge.stream.positions`."""
    return f"{SCOPES}/{scope}/former"


late: Final = _below(stream, "late")
"""Node of the records behind the ends of a stream's sealed segments."""
stream_fault: Final = _below(stream, "fault")
"""Node of a stream's fault; it exists while the stream's transactions cannot be merged."""


def adopted(topic: str) -> str:
    """Return the node that says which stream has adopted a topic."""
    return f"{TOPICS}/{topic}"


def cas_slots(name: StreamName) -> str:
    """Return the parent of the slots of a stream's conditional writers."""
    return f"{CAS}/{name.scope}.{name.stream}"


def group(name: GroupName) -> str:
    return f"{GROUPS}/{name.node}"


controller: Final = _below(group, "controller")
"""Node of a group's controller epoch."""
counter: Final = _below(group, "counter")
"""Node of a group's transaction counter; see :mod:`rollbridge.base.ids`."""
log_marks: Final = _below(group, "marks")
"""Node of the marks in a group's commit log."""
leader: Final = _below(group, "leader")
"""Ephemeral node of a group's leader."""
requests: Final = _below(group, "requests")
"""Parent of a group's admin requests."""
answers: Final = _below(group, "answers")
"""Parent of the answers to a group's admin requests."""
committing: Final = _below(group, "committing")
"""Node of the rolling commit that is being carried out."""
merging: Final = _below(group, "merging")
"""Parent of the records of large transactions that are being merged in the background."""
scaling: Final = _below(group, "scaling")
"""Node of the scale that is being carried out."""
scaling_waits: Final = _below(group, "scaling-waits")
"""Node that says which streams wait to be scaled by their load, and for what."""
pending_changes: Final = _below(group, "suspended")
"""Parent of scales and rolling commits that wait, half done, for native transactions of others."""
unreadable: Final = _below(group, "unreadable")
"""Parent of changes that a leader could not read and has put aside; it is made for the first."""
outdated: Final = _below(group, "outdated")
"""Node that says why ZooKeeper was set back; it must be repaired before anybody leads."""
transactions: Final = _below(group, "transactions")
"""Parent of the buckets of transaction records."""


def bucket(transaction: TransactionId) -> str:
    return f"{transaction.counter % BUCKETS:02x}"


def transaction(name: GroupName, identifier: TransactionId) -> str:
    """Return the record of an open transaction."""
    return f"{transactions(name)}/{bucket(identifier)}/{identifier}"


parts_of: Final = _below(group, "parts")
"""Parent of the part counters of a group's transactions."""


def parts(name: GroupName, identifier: TransactionId) -> str:
    """Return the part counter of a transaction."""
    return f"{parts_of(name)}/{identifier}"


sessions: Final = _below(group, "sessions")
"""Parent of the sessions of a group's clients."""


def session(name: GroupName, client: str) -> str:
    """Return the node of the newest session of a client name."""
    return f"{sessions(name)}/{client}"


def group_skeleton(name: GroupName) -> tuple[str, ...]:
    """Return the persistent children that every group has, parents first."""
    return (
        requests(name),
        answers(name),
        counter(name),
        merging(name),
        parts_of(name),
        sessions(name),
        pending_changes(name),
        transactions(name),
        *(f"{transactions(name)}/{number:02x}" for number in range(BUCKETS)),
    )
