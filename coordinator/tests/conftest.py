"""What the tests of the coordinator share."""

from __future__ import annotations

import pytest

from coordinator.tests.sim_expiry import epoch_of
from rollbridge.stream.epochs import EpochRecord


@pytest.fixture(autouse=True)
def _parsing_epochs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders read all epochs of a stream at each of the many takeovers; parsing them takes a third of a simulation."""
    monkeypatch.setattr(EpochRecord, "from_json", epoch_of)
