"""Check a ``Host`` header against our servers' names, as protection from DNS rebinding. Pure."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

# Text of strangers (labels, client names, transactional ids, errors that quote them) as a line of a log or a terminal.
#
# Pure.


def printable(text: str) -> str:
    """Return the text with everything replaced that is not a visible character or a space.

    That is ends of lines, what begins escape sequences (ESC, C1 controls), and what turns the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def printable_lines(text: str) -> str:
    """Return the text with each of its lines printable; only line feeds end a line."""
    return "\n".join(printable(line) for line in text.split("\n"))


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
