"""What is wrong with a stream, a group or a coordinator. Pure; command line, doctor, page and health tell it from here.

What is an error on one surface is one on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rollbridge.model.changes import StreamFault
from rollbridge.model.records import Coordinator, StreamConfig

ERROR: Final = "error"
"""State of a stream with a fault, whatever else it does."""
TAKEOVER_MS: Final = 10_000
"""Duration beyond which a takeover is told of: nothing is committed meanwhile."""
NO_LEADER: Final = "nobody leads it, so nothing of it is committed"
NO_COORDINATOR: Final = "none is registered"


def stream_state(config: StreamConfig, fault: StreamFault | None) -> str:
    """Return the state of a stream."""
    return ERROR if fault is not None else config.state.value.lower()


def shown_state(config: StreamConfig, fault: StreamFault | None) -> str:
    """Return the state of a stream in words for people: with the code of its fault, if it has one."""
    return stream_state(config, fault) if fault is None else f"{ERROR} {fault.code}"


def group_fault(leader: str | None, taking_over_ms: int | None) -> str | None:
    """Return what is wrong with who leads a group; None if nothing is.

    Args:
        leader: The coordinator that leads it; None if none does.
        taking_over_ms: For how long its takeover has lasted; None if it serves.
    """
    if leader is None:
        return NO_LEADER
    if taking_over_ms is not None and taking_over_ms > TAKEOVER_MS:
        return f"coordinator {leader} has been taking it over for {taking_over_ms // 1000} s"
    return None


def coordinator_faults(record: Coordinator | None) -> Iterator[str]:
    """Yield what is wrong with a coordinator, as it says itself."""
    for broker in () if record is None else record.unreachable:
        yield f"cannot reach {broker}"
