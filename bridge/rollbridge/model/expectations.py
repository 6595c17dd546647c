"""What callers may pass to a conditional writer, and what it means."""

from __future__ import annotations

from rollbridge.model.cas import Scope
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.sequence import DLSN
from rollbridge.model.sn import SN

Expected = SN | DLSN
"""An SN with any of its members, or a DLSN alone. Not a number alone: it might be either of two ids."""


def as_sn(expected: object) -> SN:
    """The SN that a caller expects.

    Raises:
        InvalidRequestError: it is none. A number alone is one of them: DistributedLog's proposal means a transaction id
            by it, and a writer that numbers its records would not notice a condition on another number.
    """
    match expected:
        case SN():
            return expected
        case DLSN():
            return SN(dlsn=expected)
        case bool():
            pass
        case int():
            raise InvalidRequestError(
                f"{expected} alone does not say which id it is: say SN(sequence_id={expected}) for the sequence id "
                f"that a tail or a write told, or SN(transaction_id={expected}) for the number that the writer gave "
                "the record; nothing was written"
            )
    raise InvalidRequestError(
        f"{expected!r} is nothing to expect: an SN, a DLSN, ANY, EMPTY, or the future of a conditional "
        "write is; nothing was written"
    )


def as_scope(scope: Scope | str) -> Scope:
    """The scope of a condition.

    Raises:
        InvalidRequestError: there is no such scope.
    """
    try:
        return Scope(scope)
    except ValueError:
        raise InvalidRequestError(f"{scope!r} is no scope: segment or key is; nothing was written") from None
