"""Plain writes: records that go straight to the active segments, idempotent and batched, and follow every scale.

======================  ==================================================================================
``lanes``               pure: what is written where, and when, while segments are sealed and succeeded
``batch``               a record batch on its way, and the futures of its records
``channel``             one stream as a connection writes it: routing, open batches, re-routing
``engine``              the I/O: requests under way, answers, lost connections, sealed segments looked up
``writer``              what the user holds
``options``             sizes, delays and limits
======================  ==================================================================================
"""

from bridge.writer.batch import PlainFuture
from bridge.writer.options import WriterOptions
from bridge.writer.writer import StreamWriter

__all__ = ["PlainFuture", "StreamWriter", "WriterOptions"]
