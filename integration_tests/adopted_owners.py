"""Coordinators that look at adopted topics often."""

from __future__ import annotations

FAST = {
    "log.retention.check.interval.ms": "200",
    "log.initial.task.delay.ms": "200",
    "log.segment.delete.delay.ms": "0",
}
