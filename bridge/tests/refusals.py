"""Expect an error by its code."""

from __future__ import annotations

import pytest

from rollbridge.errors import RollbridgeError, class_of


def raises_code(code: str, match: str | None = None) -> pytest.RaisesExc[RollbridgeError]:
    """Return a context that expects the error with this code, and a text that matches."""
    kind = class_of(code)
    assert kind is not None, code
    return pytest.raises(kind, match=match, check=lambda fault: fault.code == code)
