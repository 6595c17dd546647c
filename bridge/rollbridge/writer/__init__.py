"""Plain writes: records that go straight to the active segments, idempotent and batched, and follow every scale.

======================  ==================================================================================
``lanes``               pure: which batch may be written where while segments are sealed and succeeded
``accumulator``         batches, the futures of their records, and the channel of each stream; options
``dispatch``            sending of batches to brokers, and the meaning of their answers
``engine``              the thread and lock shared by all writers, and searches of sealed segments
``writer``              the public object of the user
======================  ==================================================================================
"""

from rollbridge.writer.accumulator import PlainFuture, WriterOptions
from rollbridge.writer.writer import StreamWriter

__all__ = ["PlainFuture", "StreamWriter", "WriterOptions"]
