"""Whether a ``Host`` header names a server of ours, or a site that leads here by DNS rebinding. Pure."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return whether a ``Host`` is an address, which no site has for a name, or one of these names in small letters."""
    try:
        parts = urlsplit(f"//{host.lower()}")
        name, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if "@" in host or "/" in host:
        return False
    if name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
