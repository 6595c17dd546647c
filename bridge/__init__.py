"""rollbridge: rolling transactions on real Kafka topics.

::

    import bridge
    with bridge.connect("localhost:9092", zookeeper="localhost:2181") as b:
        b.admin.create_stream("sales/orders", segments=2)
        with b.transaction("sales/orders") as txn:
            txn.write("sales/orders", key=b"order-1", value=b"...")

Any Kafka client that reads with ``isolation.level=read_committed`` sees what is committed, in commit order, and never
waits for a transaction that is open.
"""

from bridge.admin import Admin, StreamDescription
from bridge.cas.future import CasFuture
from bridge.cas.writer import CasWriter
from bridge.client.futures import WriteFuture
from bridge.client.joint import JointTicket, JointTransaction, SharedClient
from bridge.client.options import ClientOptions
from bridge.client.results import CommitResult, Outcome, PartHandle
from bridge.client.resumed import ResumedTransaction
from bridge.client.transaction import AbortFuture, CommitFuture, Transaction
from bridge.client.writing import Part
from bridge.connection import Bridge, connect
from bridge.consumer import Consumer
from bridge.consumer_message import Message
from bridge.message import Batch, Record
from bridge.model.identifiers import SegmentId, TransactionId
from bridge.model.names import GroupName, StreamName
from bridge.model.position import LogPosition, ReadPosition
from bridge.model.sequence import DLSN
from bridge.model.sn import ANY, EMPTY, SN
from bridge.model.synchronizer import Codec
from bridge.model.token import Token
from bridge.producer import ProducedMessage, Producer
from bridge.reading import Reader
from bridge.synchronizer import Synchronizer
from bridge.transactions import CommittedTransaction, TransactionReader
from bridge.writer import PlainFuture, StreamWriter, WriterOptions

__all__ = [
    "ANY",
    "DLSN",
    "EMPTY",
    "SN",
    "AbortFuture",
    "Admin",
    "Batch",
    "Bridge",
    "CasFuture",
    "CasWriter",
    "ClientOptions",
    "Codec",
    "CommitFuture",
    "CommitResult",
    "CommittedTransaction",
    "Consumer",
    "GroupName",
    "JointTicket",
    "JointTransaction",
    "LogPosition",
    "Message",
    "Outcome",
    "Part",
    "PartHandle",
    "PlainFuture",
    "ProducedMessage",
    "Producer",
    "ReadPosition",
    "Reader",
    "Record",
    "ResumedTransaction",
    "SegmentId",
    "SharedClient",
    "StreamDescription",
    "StreamName",
    "StreamWriter",
    "Synchronizer",
    "Token",
    "Transaction",
    "TransactionId",
    "TransactionReader",
    "WriteFuture",
    "WriterOptions",
    "connect",
]
