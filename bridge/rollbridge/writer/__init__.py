"""Plain writes: records that go straight to the active segments, idempotent and batched, and follow every scale.

======================  ==================================================================================
``lanes``               pure: what is written where, and when, while segments are sealed and succeeded
``batch``               a record batch on its way, and the futures of its records
``channel``             one stream as a connection writes it: routing, open batches, re-routing
``dispatch``            what goes to which broker, and what the answers mean
``searches``            sealed segments looked up where an answer was lost
``engine``              what is shared, and the thread that looks after it
``writer``              what the user holds
``options``             sizes, delays and limits
======================  ==================================================================================
"""

from rollbridge.writer.accumulator import PlainFuture, WriterOptions
from rollbridge.writer.writer import StreamWriter

__all__ = ["PlainFuture", "StreamWriter", "WriterOptions"]
