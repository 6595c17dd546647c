"""Expect an error by its code."""

from __future__ import annotations

import pytest

from rollbridge.errors import RollbridgeError, class_of


def raises_code(code: str, match: str | None = None) -> pytest.RaisesExc[RollbridgeError]:
    """Return a context that expects the error with this code, which may be a gateway's own, and a text that matches."""
    return pytest.raises(class_of(code) or RollbridgeError, match=match, check=lambda fault: fault.code == code)
