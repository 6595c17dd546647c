"""How plain writes behave: sizes, delays and limits, each with its unit, default and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollbridge.config import KIB, MIB, positive_faults
from rollbridge.errors import ConfigError
from rollbridge.kafka.batches import Compression, compression_faults
from rollbridge.model.frames import FRAME_BYTES_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Options of plain writes; checked on construction.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    linger_s: float = 0.005
    """How long a record waits for others to share its batch; 0 sends it as soon as nothing else is under way."""
    batch_bytes: int = FRAME_BYTES_DEFAULT
    """Largest batch before compression, 1 KiB to 1 MiB; larger ones cost less each record."""
    compression: str = "none"
    """Codec of the batches: none, gzip, snappy, lz4 or zstd."""
    buffer_bytes: int = 64 * MIB
    """How much may wait for the brokers; beyond it writers wait. At least 4 MiB."""
    block_s: float = 60.0
    """How long a writer waits for room before it gets a ``BackpressureError``."""
    delivery_timeout_s: float = 300.0
    """How long a record may stay without an answer before it fails; as librdkafka's ``message.timeout.ms``."""
    request_timeout_s: float = 30.0
    """How long the answer to one request may take before its connection is given up."""
    in_flight_max: int = 5
    """Most requests under way to one broker, 1 to 5: brokers recognise the last five batches of a producer."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ConfigError("; ".join(faults))

    @property
    def codec(self) -> Compression:
        """The codec's number."""
        return Compression.named(self.compression)

    def _faults(self) -> Iterable[str]:
        yield from compression_faults(self.compression)
        if not KIB <= self.batch_bytes <= MIB:
            yield f"batch_bytes: {self.batch_bytes} is not in {KIB}..{MIB}"
        if self.buffer_bytes < 4 * MIB:
            yield f"buffer_bytes: {self.buffer_bytes} is less than {4 * MIB}"
        if not 0 <= self.linger_s <= 900:
            yield f"linger_s: {self.linger_s} is not in 0..900"
        if not 1 <= self.in_flight_max <= 5:
            yield f"in_flight_max: {self.in_flight_max} is not in 1..5"
        yield from positive_faults(self, "block_s", "delivery_timeout_s", "request_timeout_s")
