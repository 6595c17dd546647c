"""Where records of each format are kept."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
