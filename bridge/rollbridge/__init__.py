"""rollbridge: rolling transactions on real Kafka topics.

::

    import rollbridge
    with rollbridge.connect("localhost:9092", zookeeper="localhost:2181") as b:
        b.admin.create_stream("sales/orders", segments=2)
        with b.transaction("sales/orders") as txn:
            txn.write("sales/orders", key=b"order-1", value=b"...")

Any Kafka client that reads with ``isolation.level=read_committed`` sees what is committed, in commit order, and never
waits for a transaction that is open.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rollbridge.version import __version__ as __version__

if TYPE_CHECKING:
    from rollbridge.base.ids import SegmentId, TransactionId
    from rollbridge.base.sn import ANY, DLSN, EMPTY, SN, Token
    from rollbridge.cas.request import CasFuture
    from rollbridge.cas.shared_state import Codec
    from rollbridge.cas.synchronizer import Synchronizer
    from rollbridge.cas.writer import CasWriter
    from rollbridge.client.admin import Admin, StreamDescription
    from rollbridge.client.client import Client
    from rollbridge.client.connection import Bridge, connect
    from rollbridge.client.cooperative import CooperativeTicket, CooperativeTransaction, SharedClient
    from rollbridge.client.futures import WriteFuture
    from rollbridge.client.outcomes import ArrivedTransaction, Outcome, TransactionStory
    from rollbridge.client.recovery import ResumedTransaction
    from rollbridge.client.results import CommitResult, PartHandle, Savepoint
    from rollbridge.client.savepoints import SavepointFuture
    from rollbridge.client.transaction import AbortFuture, CommitFuture, Part, Transaction
    from rollbridge.config import ClientOptions
    from rollbridge.consumer.consumer import Consumer
    from rollbridge.consumer.fetched_ranges import Batch
    from rollbridge.consumer.reader import Reader
    from rollbridge.consumer.records import Message, Record
    from rollbridge.consumer.transactions import CommittedTransaction, TransactionReader
    from rollbridge.stream.names import GroupName, StreamName
    from rollbridge.stream.positions import LogPosition, ReadPosition
    from rollbridge.stream.scaling import ScalingPolicy
    from rollbridge.writer import PlainFuture, StreamWriter, WriterOptions

# They are imported when they are first used: Spark starts several processes for each query, which need few of them.
_NAMES = {
    "rollbridge.base.ids": "SegmentId TransactionId",
    "rollbridge.base.sn": "ANY DLSN EMPTY SN Token",
    "rollbridge.cas.request": "CasFuture",
    "rollbridge.cas.shared_state": "Codec",
    "rollbridge.cas.synchronizer": "Synchronizer",
    "rollbridge.cas.writer": "CasWriter",
    "rollbridge.client.admin": "Admin StreamDescription",
    "rollbridge.client.client": "Client",
    "rollbridge.client.connection": "Bridge connect",
    "rollbridge.client.cooperative": "CooperativeTicket CooperativeTransaction SharedClient",
    "rollbridge.client.futures": "WriteFuture",
    "rollbridge.client.outcomes": "ArrivedTransaction Outcome TransactionStory",
    "rollbridge.client.recovery": "ResumedTransaction",
    "rollbridge.client.results": "CommitResult PartHandle Savepoint",
    "rollbridge.client.savepoints": "SavepointFuture",
    "rollbridge.client.transaction": "AbortFuture CommitFuture Part Transaction",
    "rollbridge.config": "ClientOptions",
    "rollbridge.consumer.consumer": "Consumer",
    "rollbridge.consumer.fetched_ranges": "Batch",
    "rollbridge.consumer.reader": "Reader",
    "rollbridge.consumer.records": "Message Record",
    "rollbridge.consumer.transactions": "CommittedTransaction TransactionReader",
    "rollbridge.stream.names": "GroupName StreamName",
    "rollbridge.stream.positions": "LogPosition ReadPosition",
    "rollbridge.stream.scaling": "ScalingPolicy",
    "rollbridge.writer": "PlainFuture StreamWriter WriterOptions",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

_FORMER = {"JointTransaction": "CooperativeTransaction", "JointTicket": "CooperativeTicket"}
"""Names of the last release."""

__all__ = [
    "ANY",
    "DLSN",
    "EMPTY",
    "SN",
    "AbortFuture",
    "Admin",
    "ArrivedTransaction",
    "Batch",
    "Bridge",
    "CasFuture",
    "CasWriter",
    "Client",
    "ClientOptions",
    "Codec",
    "CommitFuture",
    "CommitResult",
    "CommittedTransaction",
    "Consumer",
    "CooperativeTicket",
    "CooperativeTransaction",
    "GroupName",
    "LogPosition",
    "Message",
    "Outcome",
    "Part",
    "PartHandle",
    "PlainFuture",
    "ReadPosition",
    "Reader",
    "Record",
    "ResumedTransaction",
    "Savepoint",
    "SavepointFuture",
    "ScalingPolicy",
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
    """Return a public name, or a module of the package."""
    home = _HOMES.get(name)
    if home is not None:
        value = globals()[name] = getattr(import_module(home), name)
        return value
    if name in _FORMER:
        warnings.warn(f"rollbridge.{name} is called {_FORMER[name]} now", FutureWarning, stacklevel=2)
        return __getattr__(_FORMER[name])
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
