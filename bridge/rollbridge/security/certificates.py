"""When certificates run out. Pure but for reading their files.

Python's :mod:`ssl` tells that of a peer's certificate only, so what it takes is read here: of a certificate (RFC 5280)
the sequence ``[version] serial algorithm issuer validity ...``.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

WARNED_BEFORE: Final = timedelta(days=14)
"""How long before the end of a certificate it is told that somebody has to renew it."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_SHORT_TIME: Final = 0x17
"""With two digits of the year, for 1950 to 2049."""


def ends_of_validity(path: str) -> list[datetime]:
    """Return when the certificates of a file run out: first the server's own, then those of its authorities.

    A client need not mind one of an authority that has run out: it may know another way to one that it trusts.

    Raises:
        ValueError: there is none that can be read.
        OSError: the file cannot be read.
    """
    found = _PEM.findall(Path(path).read_text(encoding="ascii", errors="replace"))
    if not found:
        raise ValueError(f"{path} holds no certificate in PEM")
    try:
        return [_not_after(ssl.PEM_cert_to_DER_cert(pem)) for pem in found]
    except (IndexError, ValueError) as fault:
        raise ValueError(f"{path} holds a certificate that cannot be read") from fault


def _not_after(der: bytes) -> datetime:
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    kind, start, end = _element(der, at)
    for _ in range(4 if kind == _VERSION else 3):
        at = end
        _, start, end = _element(der, at)
    _, _, at = _element(der, start)  # notBefore
    kind, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    if kind == _SHORT_TIME:
        text = f"{'19' if text >= '50' else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of what is encoded at a place, and where its content begins and ends."""
    kind, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start], "big")
    return kind, start, start + size
