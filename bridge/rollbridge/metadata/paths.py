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
from typing import Final

from rollbridge.base.ids import TransactionId
from rollbridge.stream.names import GroupName, StreamName

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


def streams(scope: str) -> str:
    """Return the parent of a scope's streams."""
    return f"{SCOPES}/{scope}/streams"


def stream(name: StreamName) -> str:
    return f"{streams(name.scope)}/{name.stream}"


def epochs(name: StreamName) -> str:
    """Return the parent of a stream's epoch records."""
    return f"{stream(name)}/epochs"


def epoch(name: StreamName, number: int) -> str:
    """Return the node of an epoch record; names sort by epoch."""
    return f"{epochs(name)}/{number:010d}"


def truncation(name: StreamName) -> str:
    """Return the node that lists removed segments of a stream and keeps the foundation of dropped epochs."""
    return f"{stream(name)}/truncation"


def retention(name: StreamName) -> str:
    """Return the node of the marks at which a stream may be truncated."""
    return f"{stream(name)}/retention"


def deleted_streams(scope: str) -> str:
    """Return the parent of what is kept of a scope's deleted streams; see :mod:`rollbridge.stream.positions`."""
    return f"{SCOPES}/{scope}/former"


def late(name: StreamName) -> str:
    """Return the node of the records behind the ends of a stream's sealed segments."""
    return f"{stream(name)}/late"


def stream_fault(name: StreamName) -> str:
    """Return the node of a stream's fault; it exists while the stream's transactions cannot be merged."""
    return f"{stream(name)}/fault"


def adopted(topic: str) -> str:
    """Return the node that says which stream has adopted a topic."""
    return f"{TOPICS}/{topic}"


def cas_slots(name: StreamName) -> str:
    """Return the parent of the slots of a stream's conditional writers."""
    return f"{CAS}/{name.scope}.{name.stream}"


def group(name: GroupName) -> str:
    return f"{GROUPS}/{name.node}"


def controller(name: GroupName) -> str:
    """Return the node of a group's controller epoch."""
    return f"{group(name)}/controller"


def counter(name: GroupName) -> str:
    """Return the node of a group's transaction counter; see :mod:`rollbridge.base.ids`."""
    return f"{group(name)}/counter"


def log_marks(name: GroupName) -> str:
    """Return the node of the marks in a group's commit log."""
    return f"{group(name)}/marks"


def leader(name: GroupName) -> str:
    """Return the ephemeral node of a group's leader."""
    return f"{group(name)}/leader"


def requests(name: GroupName) -> str:
    """Return the parent of a group's admin requests."""
    return f"{group(name)}/requests"


def answers(name: GroupName) -> str:
    """Return the parent of the answers to a group's admin requests."""
    return f"{group(name)}/answers"


def committing(name: GroupName) -> str:
    """Return the node of the rolling commit that is being carried out."""
    return f"{group(name)}/committing"


def merging(name: GroupName) -> str:
    """Return the parent of the records of large transactions that are being merged in the background."""
    return f"{group(name)}/merging"


def scaling(name: GroupName) -> str:
    """Return the node of the scale that is being carried out."""
    return f"{group(name)}/scaling"


def scaling_waits(name: GroupName) -> str:
    """Return the node that says which streams wait to be scaled by their load, and for what."""
    return f"{group(name)}/scaling-waits"


def pending_changes(name: GroupName) -> str:
    """Return the parent of scales and rolling commits that wait, half done, for native transactions of others."""
    return f"{group(name)}/suspended"


def unreadable(name: GroupName) -> str:
    """Return the parent of changes that a leader could not read and has put aside; it is made for the first."""
    return f"{group(name)}/unreadable"


def outdated(name: GroupName) -> str:
    """Return the node that says why ZooKeeper was set back; it must be repaired before anybody leads."""
    return f"{group(name)}/outdated"


def transactions(name: GroupName) -> str:
    """Return the parent of the buckets of transaction records."""
    return f"{group(name)}/transactions"


def bucket(transaction: TransactionId) -> str:
    return f"{transaction.counter % BUCKETS:02x}"


def transaction(name: GroupName, identifier: TransactionId) -> str:
    """Return the record of an open transaction."""
    return f"{transactions(name)}/{bucket(identifier)}/{identifier}"


def parts_of(name: GroupName) -> str:
    """Return the parent of the part counters of a group's transactions."""
    return f"{group(name)}/parts"


def parts(name: GroupName, identifier: TransactionId) -> str:
    """Return the part counter of a transaction."""
    return f"{parts_of(name)}/{identifier}"


def sessions(name: GroupName) -> str:
    """Return the parent of the sessions of a group's clients."""
    return f"{group(name)}/sessions"


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
