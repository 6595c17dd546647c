"""Who a transactional producer is: client names of transactional ids, pairs of producer id and epoch, and their labels.

A transactional id is any text; a client name is 1 to 128 characters of ``[A-Za-z0-9._:@-]``. Ids that fit are names as
they are, so ``billing-7`` is client ``billing-7``. Other bytes become ``@`` and two hexadecimal digits, as ``@`` itself
does, and what is too long then is ``@h.`` with a hash: no escape begins like that, so names never meet.

A pair names a producer for as long as it lives; with transactions v2 it names one transaction. It stands in the label
of the transaction, where every gateway finds it. Producer ids have bit 62 set: brokers count theirs from 0 in blocks of
a thousand, so none of ours is ever one of theirs. Their last 16 bits are a hash of the transactional id: a producer id
of another one is told apart from one that is over, as by a broker.

Source: KIP-360 and KIP-890 for pairs; Kafka's ``TransactionMetadata`` for the exhaustion of epochs.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final, NamedTuple

from rollbridge.model import gateways
from rollbridge.model.errors import InvalidNameError
from rollbridge.model.names import check_client_name

EPOCH_MAX: Final = gateways.EPOCH_MAX
"""Highest epoch that is handed out; Kafka keeps 32,767 for fencing."""
NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
TRANSACTIONAL_ID_BYTES_MAX: Final = 32_767
"""Kafka's limit of a string."""
_OURS: Final = gateways.FIRST_PRODUCER_ID
_MARK: Final = (1 << 16) - 1
_RANDOM: Final = _OURS - 1 - _MARK
_NAME_MAX: Final = 128
_NAMES_KEPT: Final = 4_096
"""Of how many ids the name is remembered, as each request of a producer needs it."""
_HASHED: Final = "@h."
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")
_ESCAPE = re.compile(r"@([0-9a-f]{2})")
_DOTS: Final = frozenset((".", ".."))  # not names of nodes in ZooKeeper


class Pair(NamedTuple):
    """Producer id and epoch, as clients send them."""

    producer_id: int
    epoch: int

    @property
    def label(self) -> str:
        """Label of its transaction."""
        return f"{self.producer_id}.{self.epoch}"

    def __str__(self) -> str:
        return self.label


NOBODY: Final = Pair(NO_PRODUCER_ID, NO_EPOCH)
"""What a client sends that has no pair yet."""


def client_name(transactional_id: str) -> str:
    """Return the client name of a transactional id; different ids have different names.

    Raises:
        InvalidNameError: the id is empty, or longer than Kafka's strings.
    """
    if len(transactional_id) > _NAME_MAX:
        return _client_name(transactional_id)  # it may have 32 KiB, which nobody keeps
    return _known_name(transactional_id)


def _client_name(transactional_id: str) -> str:
    raw = transactional_id.encode("utf-8", "surrogatepass")
    if not 0 < len(raw) <= TRANSACTIONAL_ID_BYTES_MAX:
        raise InvalidNameError(
            f"a transactional id has 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes, not {len(raw)}; nothing was written"
        )
    if transactional_id in _DOTS:
        name = "".join(f"@{byte:02x}" for byte in raw)
    else:
        name = "".join(chr(byte) if byte in _PLAIN else f"@{byte:02x}" for byte in raw)
    if len(name) > _NAME_MAX:
        name = _HASHED + hashlib.blake2b(raw, digest_size=32).hexdigest()
    return check_client_name(name)


_known_name: Final = lru_cache(maxsize=_NAMES_KEPT)(_client_name)


def transactional_id(name: str) -> str | None:
    """Return the transactional id of a client name; None if it was hashed, or is the name of no id.

    Every other name is that of exactly one id, whoever has chosen it.
    """
    if name.startswith(_HASHED):
        return None
    found = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name).encode("latin-1", "replace")
    try:
        text = found.decode("utf-8", "surrogatepass")
        return text if client_name(text) == name else None
    except (ValueError, InvalidNameError):
        return None


def pair_of(label: str | None) -> Pair | None:
    """Return the pair that a label names; None if it is not one of a gateway's."""
    if label is None or not gateways.is_gateway_label(label):
        return None
    producer_id, _, epoch = label.partition(".")
    return Pair(int(producer_id), int(epoch))


def is_ours(producer_id: int) -> bool:
    """Return whether a producer id is one that gateways hand out; brokers hand out none of these."""
    return _OURS <= producer_id < _OURS << 1


def is_of(producer_id: int, transactional_id: str) -> bool:
    """Return whether gateways may have handed out a producer id for a transactional id."""
    return is_ours(producer_id) and producer_id & _MARK == _mark(transactional_id)


@lru_cache(maxsize=_NAMES_KEPT)
def _mark(transactional_id: str) -> int:
    raw = transactional_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=2).digest(), "big")


def first_pair(transactional_id: str, random: int, *, is_known: bool) -> Pair:
    """Return the pair of a producer that starts.

    Args:
        transactional_id: Its transactional id.
        random: At least 62 random bits.
        is_known: Whether the transactional id was used before. Epoch 0 says that it was not: Flink stops to probe for
            lingering transactions there.
    """
    return Pair(_OURS | random & _RANDOM | _mark(transactional_id), int(is_known))


def next_pair(pair: Pair, random: int) -> Pair:
    """Return the pair after this one: the next epoch, or another producer id if there is none."""
    if pair.epoch >= EPOCH_MAX:
        return Pair(_OURS | random & _RANDOM | pair.producer_id & _MARK, 1)
    return Pair(pair.producer_id, pair.epoch + 1)
