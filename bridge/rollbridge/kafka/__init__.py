"""Kafka adapter: everything in this project that speaks to a broker goes through these modules.

- ``client``: the one object of a process, of whose pool of connections all others are made.
- Native transactions: ``appender`` (the API and its state tables) on ``transactions`` and ``dispatch`` (requests to
  leaders), and ``groups`` (group coordinator).
- Cluster: ``connection`` (one socket), ``metadata`` (leaders, coordinators, the pool), ``offsets`` (of partitions).
- Record batches: ``records``, the one codec, ``columns``, the same with NumPy, and ``committed`` for what a
  ``read_committed`` reader sees of them and who wrote it.
- Reading: ``fetch`` (one request), ``follower`` (partitions as they grow, or up to an end) with its ``fetch_plan``.
- Topics: ``topics`` and ``seal``.
- librdkafka: ``clients`` for its settings. Its errors, and all others, are in ``errors``.
"""

from __future__ import annotations

import sys


def _import_kio() -> None:
    """Import kio without hypothesis.

    kio registers its types with hypothesis wherever that is installed, which costs half a second at every start.
    """
    if "hypothesis" in sys.modules:
        return
    sys.modules["hypothesis"] = None  # type: ignore[assignment]  # makes `import hypothesis` raise ModuleNotFoundError
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]


_import_kio()
