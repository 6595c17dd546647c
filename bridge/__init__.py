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

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.admin import Admin, StreamDescription
    from bridge.cas.future import CasFuture
    from bridge.cas.writer import CasWriter
    from bridge.client.futures import WriteFuture
    from bridge.client.joint import JointTicket, JointTransaction
    from bridge.client.options import ClientOptions
    from bridge.client.results import CommitResult, Outcome, PartHandle, TransactionStory
    from bridge.client.resumed import ResumedTransaction
    from bridge.client.shared import SharedClient
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

# They are imported when they are first used: Spark starts several processes for each query, which need few of them.
_NAMES = {
    "bridge.admin": "Admin StreamDescription",
    "bridge.cas.future": "CasFuture",
    "bridge.cas.writer": "CasWriter",
    "bridge.client.futures": "WriteFuture",
    "bridge.client.joint": "JointTicket JointTransaction",
    "bridge.client.options": "ClientOptions",
    "bridge.client.results": "CommitResult Outcome PartHandle TransactionStory",
    "bridge.client.resumed": "ResumedTransaction",
    "bridge.client.shared": "SharedClient",
    "bridge.client.transaction": "AbortFuture CommitFuture Transaction",
    "bridge.client.writing": "Part",
    "bridge.connection": "Bridge connect",
    "bridge.consumer": "Consumer",
    "bridge.consumer_message": "Message",
    "bridge.message": "Batch Record",
    "bridge.model.identifiers": "SegmentId TransactionId",
    "bridge.model.names": "GroupName StreamName",
    "bridge.model.position": "LogPosition ReadPosition",
    "bridge.model.sequence": "DLSN",
    "bridge.model.sn": "ANY EMPTY SN",
    "bridge.model.synchronizer": "Codec",
    "bridge.model.token": "Token",
    "bridge.producer": "ProducedMessage Producer",
    "bridge.reading": "Reader",
    "bridge.synchronizer": "Synchronizer",
    "bridge.transactions": "CommittedTransaction TransactionReader",
    "bridge.writer": "PlainFuture StreamWriter WriterOptions",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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
    "TransactionStory",
    "WriteFuture",
    "WriterOptions",
    "connect",
]


def __getattr__(name: str) -> object:
    """A public name, or a module of the package."""
    home = _HOMES.get(name)
    if home is not None:
        value = globals()[name] = getattr(import_module(home), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
