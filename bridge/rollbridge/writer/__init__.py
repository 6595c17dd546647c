"""Plain writes: records that go straight to the active segments, idempotent and batched, and follow every scale."""

from rollbridge.config import WriterOptions
from rollbridge.writer.accumulator import PlainFuture
from rollbridge.writer.writer import StreamWriter

__all__ = ["PlainFuture", "StreamWriter", "WriterOptions"]
