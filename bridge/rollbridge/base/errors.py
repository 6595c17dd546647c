"""The errors that pure code raises, and what others are derived from; :mod:`rollbridge.errors` has the whole tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

E = TypeVar("E", bound=BaseException)

# Codes that are compared
GROUP_MISMATCH: Final = "group-mismatch"
INVALID_RANGES: Final = "invalid-ranges"
INVALID_STATE: Final = "invalid-state"
INVALID_TRANSITION: Final = "invalid-transition"
NOTHING_SERVED: Final = "nothing-served"


class PortableError(Exception):
    """Exception that pickle and copy restore with all its attributes, whatever its constructor takes.

    Python calls the constructor again with ``args``. A constructor that takes anything else by name would fail in the
    process that waits for the result: a process pool breaks, or hangs, instead of telling what happened.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the same error again."""
        return _restored, (type(self), self.args, vars(self).copy())


def _restored(kind: type[E], args: tuple[object, ...], attributes: Mapping[str, Any]) -> E:
    error = kind.__new__(kind, *args)  # which sets ``args``
    vars(error).update(attributes)
    return error


class RollbridgeError(PortableError):
    """Base of all errors of this package.

    Attributes:
        code: Stable name of what happened, narrower than the class where that has several ``codes``.
        codes: Codes of this class besides its own.
        resource: What of Kafka it is about, such as ``topic orders``; empty where that is not one thing.
    """

    code: str = "error"
    codes: ClassVar[tuple[str, ...]] = ("zookeeper-outdated",)
    exit_code: ClassVar[int] = 1
    resource: str = ""

    def __init__(self, message: str = "", *, code: str = "", **data: object) -> None:
        """Take the text, one of the ``codes`` if it is not the class's own, and what else programs may read."""
        super().__init__(message)
        if code:
            self.code = code
        vars(self).update(data)


class InvalidRequestError(RollbridgeError):
    """The request can never succeed as it is; nothing was written."""

    code = "invalid-request"
    codes: ClassVar[tuple[str, ...]] = tuple(
        f"{GROUP_MISMATCH} {INVALID_RANGES} invalid-timeout offset-metadata-too-large row-refused unsupported-broker "
        "wrong-cluster".split()
    )
    exit_code = 4


class InvalidNameError(InvalidRequestError):
    """A name that Kafka, ZooKeeper or the naming scheme cannot carry; nothing was written."""

    code = "invalid-name"


class NotFoundError(RollbridgeError):
    """Raised if the request names something that does not exist; nothing was written."""

    code = "not-found"
    codes: ClassVar[tuple[str, ...]] = (NOTHING_SERVED,)
    exit_code = 3


class TruncatedError(NotFoundError):
    """Raised if the records at which reading should begin or continue were deleted; none of them was returned."""

    code = "truncated"


class ConflictError(RollbridgeError):
    """The state is not what the request assumes; this request wrote nothing."""

    code = "conflict"
    codes: ClassVar[tuple[str, ...]] = tuple(
        f"{INVALID_STATE} {INVALID_TRANSITION} replay-differs rolled-back stream-busy topic-mismatch".split()
    )
    exit_code = 5


class StreamRecreatedError(ConflictError):
    """Raised if the stream was deleted and created again, so positions and ids of its predecessor are void.

    Nothing was written, and no record of one incarnation was returned as the other's. Start again with the new stream.
    """

    code = "stream-recreated"


class UnavailableError(RollbridgeError):
    """A part of the system does not answer; nothing is known to have been written; try again later."""

    code = "unavailable"
    codes: ClassVar[tuple[str, ...]] = ("seal-timeout",)
    exit_code = 7


class CorruptDataError(RollbridgeError):
    """Bytes that are not what they claim to be; the message says where they were found."""

    code = "corrupt-data"
    exit_code = 1


class NewerFormatError(CorruptDataError):
    """A record of a version that this release does not know; nothing was written on its account.

    A newer release wrote it: upgrade this one, see docs/upgrading.md.
    """

    code = "newer-format"
