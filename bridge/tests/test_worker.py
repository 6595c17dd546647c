"""What Spark's workers leave out of their collections of garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from rollbridge.spark import worker as garbage


@pytest.fixture(autouse=True)
def afterwards_all_is_collected_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_modules", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_worker_keeps_what_is_there_until_it_loads_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    garbage.keep_what_stays()
    kept = gc.get_freeze_count()
    assert kept > 10_000
    later = [[] for _ in range(1_000)]  # type: ignore[var-annotated]
    garbage.keep_what_stays()
    assert 0 < gc.get_freeze_count() <= kept, "fewer, if something of what was kept has gone meanwhile"
    monkeypatch.setitem(sys.modules, "one more", ModuleType("one more"))
    garbage.keep_what_stays()
    assert gc.get_freeze_count() > kept + len(later) // 2


def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    garbage.keep_what_stays()
    assert gc.get_freeze_count() == 0
