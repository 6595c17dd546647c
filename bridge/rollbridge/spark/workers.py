"""Whether this process is one of Spark's Python workers, which live on from call to call."""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Whether Spark calls this process more than once, as it says by a variable of the environment."""
    return "SPARK_REUSE_WORKER" in os.environ
