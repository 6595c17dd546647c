"""How a connection behaves: sizes, delays and limits, each with its unit, default and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rollbridge.config import KIB, MIB, positive_faults
from rollbridge.errors import ConfigError
from rollbridge.kafka.batches import Compression, compression_faults
from rollbridge.model.frames import FRAME_BYTES_DEFAULT

GIB: Final = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a connection; checked on construction.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    compression: str = "none"
    """Codec of the frames: none, gzip, snappy, lz4 or zstd. It stays as it is all the way to the segment."""
    frame_bytes: int = FRAME_BYTES_DEFAULT
    """Bytes of a frame before compression, 16 KiB to 1 MiB; larger ones cost less each record, and more memory."""
    linger_s: float = 1.0
    """How long records of an idle open transaction may wait in this process before they are sent."""
    buffer_bytes: int = 64 * MIB
    """How much may wait for the brokers in this process; beyond it writers wait. At least 4 MiB."""
    backpressure_timeout_s: float = 60.0
    """How long a writer waits for room before it gets a ``BackpressureError``."""
    connect_timeout_s: float = 15.0
    """How long connecting may take."""
    commit_timeout_s: float = 120.0
    """How long a commit, an abort or a flush waits unless it is told otherwise. A merge takes about 3 s per GB."""
    admin_timeout_s: float = 30.0
    """How long an admin request waits for its answer."""
    session_timeout_s: float = 10.0
    """After how long without contact ZooKeeper ends the session; nothing of a client's hangs on it."""
    lease: timedelta = timedelta(hours=24)
    """How long a transaction may stay open unless its begin says otherwise; no pings are needed."""
    lease_max: timedelta = timedelta(days=7)
    """The longest lease that may be asked for; coordinators have a limit of their own, with the same default."""
    transaction_bytes_max: int = 16 * GIB
    """Largest transaction that is written; coordinators abort larger ones. A merge stalls readers for its length."""
    open_transactions_max: int = 100_000
    """Most transactions that this connection keeps open at once."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ConfigError("; ".join(faults))

    @property
    def codec(self) -> Compression:
        """The codec's number."""
        return Compression.named(self.compression)

    def _faults(self) -> Iterable[str]:
        yield from compression_faults(self.compression)
        if not 16 * KIB <= self.frame_bytes <= MIB:
            yield f"frame_bytes: {self.frame_bytes} is not in {16 * KIB}..{MIB}"
        if self.buffer_bytes < 4 * MIB:
            yield f"buffer_bytes: {self.buffer_bytes} is less than {4 * MIB}"
        yield from positive_faults(
            self,
            "linger_s",
            "backpressure_timeout_s",
            "connect_timeout_s",
            "commit_timeout_s",
            "admin_timeout_s",
            "session_timeout_s",
            "transaction_bytes_max",
            "open_transactions_max",
        )
        if not timedelta(0) < self.lease <= self.lease_max:
            yield f"lease: {self.lease} is not positive, or longer than lease_max, {self.lease_max}"
