"""The adapter to Kafka: everything in this project that speaks to a broker goes through these modules.

Native transactions: ``appender`` (what callers use) with its ``states``, on ``pipeline`` (to leaders), ``coordination``
and ``group_offsets`` (to coordinators), ``codes`` (what answers mean), ``metadata`` (who leads what), ``wire`` and
``security`` (one connection), ``offsets`` (ends of partitions) and ``describe`` (one answer that kio cannot read).
Plain idempotent writes: ``idempotent``, with the same pipeline's requests. Record batches as values: ``batches``, with
``inflate``. Reading: ``fetch`` (one request), ``follower`` (partitions as they grow) with its ``fetch_plan``. Topics:
``topics`` and ``seal``. librdkafka: ``clients`` for its settings, ``translate`` for its errors. What can go wrong is in
``errors``.
"""

from __future__ import annotations

import sys


def _import_kio() -> None:
    """Import kio without hypothesis, with which it registers its types wherever there is one: half a second a start."""
    if "hypothesis" in sys.modules:
        return
    sys.modules["hypothesis"] = None  # type: ignore[assignment]  # Python's way to say that there is no such module
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]


_import_kio()
