"""What the engine makes of a container's health check."""

from __future__ import annotations

from docker.models.containers import Container


def health(container: Container) -> str:
    """``starting``, ``healthy`` or ``unhealthy``."""
    container.reload()
    return str(container.attrs["State"]["Health"]["Status"])
