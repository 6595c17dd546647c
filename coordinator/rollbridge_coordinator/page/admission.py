"""Admission of requests by the live page, from their first line and headers, and the content of actions.

Everyone who reaches the page's address can read it; its token permits actions. Three checks keep others out:

- **Names.** The ``Host`` must be an address, or a name of this page. A site whose name is made to lead here (DNS
  rebinding) sends its own.
- **Origins.** An action must come from the page itself, if it comes from a browser. The token is in a header that no
  form and no link can send, and no browser adds by itself.
- **The token**, compared in constant time. It is never part of an address, which ends in logs and histories.

Pure.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from rollbridge.base.ids import TransactionId
from rollbridge.base.text import is_own_host
from rollbridge.errors import InvalidRequestError

BODY_BYTES_MAX: Final = 4096
"""Limit of an action's body."""
JSON_TYPE: Final = "application/json"
WRONG_MAX: Final = 10
WRONG_S: Final = 60.0
"""Time without a wrong token after which the count of an address is reset."""
WRONG_DELAY_S: Final = 1.0
WRONG_ADDRESSES_MAX: Final = 1_000
API: Final = "/api/v1"


# Routes


class Place(Enum):
    """Target of a request."""

    PAGE = "page"
    STYLE = "style"
    SCRIPT = "script"
    OVERVIEW = "overview"
    STATE = "state"
    GROUP = "group"
    LAST_HOUR = "last hour"
    STREAM = "stream"
    LINEAGE = "lineage"
    DOCTOR = "doctor"
    CHECK = "check"
    ABORT = "abort"
    EXTEND = "extend"
    SCALE = "scale"


ROUTES: Final[Mapping[str, Place]] = {
    "/": Place.PAGE,
    "/page.css": Place.STYLE,
    "/page.js": Place.SCRIPT,
    f"{API}/overview": Place.OVERVIEW,
    f"{API}/state.json": Place.STATE,
    f"{API}/groups/*/*": Place.GROUP,
    f"{API}/groups/*/*/last-hour": Place.LAST_HOUR,
    f"{API}/streams/*/*": Place.STREAM,
    f"{API}/streams/*/*/lineage.svg": Place.LINEAGE,
    f"{API}/doctor": Place.DOCTOR,
    f"{API}/actions/check": Place.CHECK,
    f"{API}/actions/abort": Place.ABORT,
    f"{API}/actions/extend": Place.EXTEND,
    f"{API}/actions/scale": Place.SCALE,
}
"""Paths; a star represents one name, percent-encoded if needed."""
ACTIONS: Final = frozenset({Place.CHECK, Place.ABORT, Place.EXTEND, Place.SCALE})
"""Targets that take POST, and a token. All others take GET and HEAD."""
READING: Final = ("GET", "HEAD")
ACTING: Final = ("POST",)


class Admitted(NamedTuple):
    """An admitted request: its target, and the names in its path."""

    place: Place
    names: tuple[str, ...] = ()


class Dismissed(NamedTuple):
    """A request that is refused.

    Attributes:
        status: Reason, as HTTP status.
        code: Reason, as stable name.
        message: Reason, for people.
        allow: Permitted methods, if the method was wrong.
    """

    status: HTTPStatus
    code: str
    message: str
    allow: tuple[str, ...] = ()


def find_place(path: str) -> Admitted | None:
    """Return the target of a path; None if there is none."""
    parts = path.split("/")
    for pattern, place in ROUTES.items():
        wanted = pattern.split("/")
        if len(wanted) == len(parts) and all(one in ("*", other) for one, other in zip(wanted, parts, strict=True)):
            names = [unquote(other) for one, other in zip(wanted, parts, strict=True) if one == "*"]
            return Admitted(place, tuple(names)) if all(names) else None
    return None


# Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """First line and headers of a request; a missing header is None."""

    method: str
    target: str
    host: str | None = None
    origin: str | None = None
    fetch_site: str | None = None
    authorization: str | None = None
    content_type: str | None = None
    content_length: str | None = None
    transfer_encoding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of admission.

    Attributes:
        names: Host names of the page, in lower case.
        origins: Origins of the page in addition to its host: that of a proxy.
        token: Token of actions; empty permits none.
    """

    names: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    token: str = ""

    @classmethod
    def of(cls, host: str, machine: str, url: str, token: str) -> Rules:
        """Return the rules of a page.

        Args:
            host: Address or name that it is bound to.
            url: URL at which operators reach it, if different.
        """
        names = {"localhost", host.lower(), machine.lower()}
        origins = set()
        if url:
            parts = urlsplit(url)
            names.add((parts.hostname or "").lower())
            origins.add(f"{parts.scheme}://{parts.netloc}".lower())
        return cls(names=frozenset(names - {""}), origins=frozenset(origins), token=token)


def judge(heading: Heading, rules: Rules) -> Admitted | Dismissed:
    """Decide on a request."""
    host = (heading.host or "").lower()
    if not is_own_host(host, rules.names):
        return Dismissed(
            HTTPStatus.FORBIDDEN,
            "wrong-host",
            "this page has another name: use its address, or set page_url to its name; nothing was done",
        )
    found = find_place(heading.target.partition("?")[0])
    if found is None:
        return Dismissed(HTTPStatus.NOT_FOUND, "not-found", f"no such path; begin at {API}/overview")
    allowed = ACTING if found.place in ACTIONS else READING
    if heading.method not in allowed:
        return Dismissed(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "wrong-method",
            f"it takes {' and '.join(allowed)} only; nothing was done",
            allowed,
        )
    if found.place not in ACTIONS:
        return found
    return _refusal(heading, host, rules) or found


def _refusal(heading: Heading, host: str, rules: Rules) -> Dismissed | None:
    """Return why a request must not act; None if it may."""
    if not rules.token:
        return Dismissed(
            HTTPStatus.FORBIDDEN, "read-only", "this page has no page_token, and only shows; nothing was done"
        )
    if not _is_same_origin(heading, host, rules):
        return Dismissed(HTTPStatus.FORBIDDEN, "wrong-origin", "the request comes from another site; nothing was done")
    if not is_token(heading.authorization, rules.token):
        return Dismissed(HTTPStatus.UNAUTHORIZED, "wrong-token", "the token is missing or wrong; nothing was done")
    kind = (heading.content_type or "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        return Dismissed(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "wrong-type", f"{JSON_TYPE} is expected; nothing was done")
    length = heading.content_length
    if length is None or heading.transfer_encoding is not None:
        return Dismissed(HTTPStatus.LENGTH_REQUIRED, "no-length", "it needs a Content-Length; nothing was done")
    if not (length.isascii() and length.isdigit()):
        return Dismissed(HTTPStatus.BAD_REQUEST, "wrong-length", "its Content-Length is no number; nothing was done")
    if len(length) > 9 or int(length) > BODY_BYTES_MAX:
        return Dismissed(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "too-large",
            f"it has more than {BODY_BYTES_MAX} bytes; nothing was done",
        )
    return None


def is_token(authorization: str | None, token: str) -> bool:
    """Return True if an ``Authorization`` header holds the token; takes the same time for any difference."""
    scheme, _, given = (authorization or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return same and scheme.lower() == "bearer" and bool(token)


class WrongTokens:
    """Wrong tokens by client address. After ten, one more is checked each second.

    A delayed client holds no thread: the answer comes at once. Threads that count at the same moment may lose one
    count.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float]] = {}

    def delay_s(self, address: str, now_s: float) -> float:
        """Return the time for which no token of an address is checked."""
        count, last_s = self._of.get(address, (0, 0.0))
        return max(0.0, last_s + WRONG_DELAY_S - now_s) if count >= WRONG_MAX else 0.0

    def note(self, address: str, now_s: float) -> None:
        """Count a wrong one."""
        count, last_s = self._of.pop(address, (0, now_s))
        self._of[address] = (1 if now_s - last_s >= WRONG_S else count + 1, now_s)
        if len(self._of) > WRONG_ADDRESSES_MAX:
            self._of.pop(next(iter(self._of)), None)


def _is_same_origin(heading: Heading, host: str, rules: Rules) -> bool:
    """Return True if a browser says that the page itself has sent a request, or if it is not from a browser."""
    if heading.fetch_site not in (None, "same-origin"):
        return False
    if heading.origin is None:
        return True
    origin = heading.origin.lower()
    return origin in rules.origins or origin in (f"http://{host}", f"https://{host}")


# What an action asks for

REASON_CHARACTERS_MAX: Final = 200
LEASE_MS_MAX: Final = 366 * 24 * 60 * 60 * 1000
INTO_MAX: Final = 1_000


class AbortRequest(NamedTuple):
    """Abort a transaction."""

    transaction: str
    reason: str


class ExtendWish(NamedTuple):
    """Let a transaction stay open for a time from now on."""

    transaction: str
    lease_ms: int


class ScaleWish(NamedTuple):
    """Seal segments, by their numbers, and split their ranges into so many even ones."""

    stream: str
    seal: tuple[int, ...]
    into: int


Wish = AbortRequest | ExtendWish | ScaleWish | None


def read_wish(place: Place, body: bytes) -> Wish:
    """Return the action in the body of an admitted request; None if it only checks its token.

    Raises:
        InvalidRequestError: it is invalid, field by field.
    """
    try:
        given = json.loads(body or b"{}")
    except (ValueError, RecursionError) as fault:
        raise InvalidRequestError("the body is not JSON; nothing was done") from fault
    if not isinstance(given, dict):
        raise InvalidRequestError("the body is not a JSON object; nothing was done")
    match place:
        case Place.ABORT:
            _expect(given, {"transaction"}, {"reason"})
            reason = given.get("reason") or "admin"
            if not isinstance(reason, str) or len(reason) > REASON_CHARACTERS_MAX or not reason.isprintable():
                raise InvalidRequestError(
                    f"reason: a line of at most {REASON_CHARACTERS_MAX} characters is expected; nothing was done"
                )
            return AbortRequest(_transaction(given), reason)
        case Place.EXTEND:
            _expect(given, {"transaction", "lease_ms"})
            return ExtendWish(_transaction(given), _whole("lease_ms", given["lease_ms"], 1, LEASE_MS_MAX))
        case Place.SCALE:
            _expect(given, {"stream", "seal", "into"})
            seal, stream = given["seal"], given["stream"]
            if not isinstance(stream, str) or not isinstance(seal, list) or not seal:
                raise InvalidRequestError(
                    "stream: a name, and seal: numbers of segments, at least one, are expected; nothing was done"
                )
            numbers = tuple(_whole("seal", number, 0, 2**31 - 1) for number in seal)
            return ScaleWish(stream, numbers, _whole("into", given["into"], 1, INTO_MAX))
        case _:
            _expect(given, set())
            return None


def _expect(given: Mapping[str, Any], needed: set[str], possible: set[str] | None = None) -> None:
    missing = sorted(needed - given.keys())
    unknown = sorted(given.keys() - needed - (possible or set()))
    if missing or unknown:
        said = [*(f"{key} is missing" for key in missing), *(f"{key!r} is unknown" for key in unknown)]
        raise InvalidRequestError(f"{', '.join(said)}; nothing was done")


def _transaction(given: Mapping[str, Any]) -> str:
    if not isinstance(given["transaction"], str):
        raise InvalidRequestError("transaction: an id is expected; nothing was done")
    return str(TransactionId.parse(given["transaction"]))


def _whole(key: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{key}: a whole number from {low} to {high} is expected; nothing was done")
    return value
