"""The HTTP server of the live page: has a request judged, and sends the answer.

What is admitted is decided in :mod:`rollbridge_coordinator.state.admission`, and answers come from
:mod:`rollbridge_coordinator.shell.page_sources` and :mod:`rollbridge_coordinator.shell.page_actions`. Bounds for who
asks are those of :mod:`rollbridge.serving.http_service`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Final, Protocol

from rollbridge.calls import Deadline
from rollbridge.defects import log_defect
from rollbridge.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.kafka.ratelimit import limited
from rollbridge.serving.http_service import BoundedHandler, BoundHttpServer, HttpService, network_of
from rollbridge_coordinator.state.admission import (
    JSON_TYPE,
    Admitted,
    Dismissed,
    Heading,
    Place,
    Rules,
    Wish,
    WrongTokens,
    judge,
    read_wish,
)
from rollbridge_coordinator.state.documents import Document, error_document

logger = logging.getLogger(__name__)
guesses = limited(logger.getChild("guesses"))

PASSED_OVER_S: Final = 1.0
PASSED_OVER_BYTES: Final = 256 * 1024
"""For how long, and how much, is read of what a refused client goes on to send."""

ASSETS: Final[Mapping[Place, tuple[str, str]]] = {
    Place.PAGE: ("index.html", "text/html; charset=utf-8"),
    Place.STYLE: ("page.css", "text/css; charset=utf-8"),
    Place.SCRIPT: ("page.js", "text/javascript; charset=utf-8"),
}
"""Files of the page, with their types."""
SVG: Final = "image/svg+xml; charset=utf-8"

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of all answers: nothing is executed or loaded that is not the page's own, and nothing is kept."""
PICTURE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""Of a picture, which has its styles in itself, and nothing else."""


TOO_MANY_TOKENS: Final = Dismissed(
    HTTPStatus.TOO_MANY_REQUESTS,
    "too-many-tokens",
    "there were too many wrong tokens from this address, so this one was not looked at; nothing was done",
)


class Sources(Protocol):
    """Where answers come from."""

    def overview(self) -> Document:
        """Return the overview."""

    def group(self, text: str) -> Document:
        """Return all about a group."""

    def last_hour(self, text: str) -> Document:
        """Return its last hour."""

    def stream(self, text: str) -> Document:
        """Return all about a stream."""

    def lineage(self, text: str) -> str:
        """Return the picture of its epochs."""

    def doctor(self) -> Document:
        """Return what the doctor has found."""


class Actions(Protocol):
    """What carries out actions."""

    def carry_out(self, wish: Wish, asker: str) -> Document:
        """Carry one out, and return what was done."""


class PageServer(HttpService):
    """Server of the live page, which answers from its own threads while it is entered."""

    def __init__(self, host: str, port: int, rules: Rules, sources: Sources, actions: Actions) -> None:
        """Bind the address; entering the server begins to answer.

        Raises:
            LocalEnvironmentError: the address cannot be used.
        """
        super().__init__(
            lambda: _PageHttpServer(host, port, rules, sources, actions),
            what=f"the page cannot be served at {host}:{port}",
            title="live page",
            thread="page",
        )


def load_assets() -> dict[Place, tuple[bytes, str]]:
    """Return the files of the page, with their types."""
    folder = files("rollbridge_coordinator") / "page"
    return {place: ((folder / name).read_bytes(), kind) for place, (name, kind) in ASSETS.items()}


class _PageHttpServer(BoundHttpServer):
    def __init__(self, host: str, port: int, rules: Rules, sources: Sources, actions: Actions) -> None:
        self.rules = rules
        self.wrong_tokens = WrongTokens()
        self.sources = sources
        self.actions = actions
        self.assets = load_assets()
        super().__init__(host, port, _PageHandler)


class _PageHandler(BoundedHandler):
    server: _PageHttpServer

    def _handle(self) -> None:
        heading = Heading(
            method=self.command,
            target=self.path,
            host=self._one("Host"),
            origin=self._one("Origin"),
            fetch_site=self._one("Sec-Fetch-Site"),
            authorization=self._one("Authorization"),
            content_type=self._one("Content-Type"),
            content_length=self._one("Content-Length"),
            transfer_encoding=self._one("Transfer-Encoding"),
        )
        address, now_s = network_of(str(self.client_address[0])), time.monotonic()
        delay_s = self.server.wrong_tokens.delay_s(address, now_s) if heading.authorization else 0.0
        verdict = TOO_MANY_TOKENS if delay_s else judge(heading, self.server.rules)
        if isinstance(verdict, Dismissed):
            if verdict.code == "wrong-token":
                self.server.wrong_tokens.note(address, now_s)
                guesses.warning("page.wrong-token address='%s': it asked to act, with a wrong token or none", address)
            extra = {"Allow": ", ".join(verdict.allow)} if verdict.allow else {}
            if delay_s:
                extra["Retry-After"] = str(math.ceil(delay_s))
            if verdict.status is HTTPStatus.UNAUTHORIZED:
                extra["WWW-Authenticate"] = "Bearer"
            self._say(verdict.status, error_document(verdict.code, verdict.message), extra)
            if heading.content_length or heading.transfer_encoding:
                self._pass_over()
            return
        try:
            self._answer(verdict)
        except RollbridgeError as fault:
            self._say(status_of(fault), error_document(fault.code, str(fault)))
        except TimeoutError:
            self._say(HTTPStatus.REQUEST_TIMEOUT, error_document("too-slow", "the body has not come; nothing was done"))
        except OSError:
            raise  # the connection
        except Exception:
            log_defect(logger, "the page cannot answer %r", self.path)
            message = "a defect of the coordinator; its log has more"
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, error_document("defect", message))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = _handle

    def _answer(self, wanted: Admitted) -> None:
        sources, name = self.server.sources, "/".join(wanted.names)
        match wanted.place:
            case Place.PAGE | Place.STYLE | Place.SCRIPT:
                self._send(HTTPStatus.OK, *self.server.assets[wanted.place], {})
            case Place.OVERVIEW:
                self._say(HTTPStatus.OK, sources.overview())
            case Place.GROUP:
                self._say(HTTPStatus.OK, sources.group(name))
            case Place.LAST_HOUR:
                self._say(HTTPStatus.OK, sources.last_hour(name))
            case Place.STREAM:
                self._say(HTTPStatus.OK, sources.stream(name))
            case Place.LINEAGE:
                policy = {"Content-Security-Policy": PICTURE_POLICY}
                self._send(HTTPStatus.OK, sources.lineage(name).encode(), SVG, policy)
            case Place.DOCTOR:
                self._say(HTTPStatus.OK, sources.doctor())
            case Place.CHECK | Place.ABORT | Place.EXTEND | Place.SCALE:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                if len(body) < length:
                    raise InvalidRequestError("the body ends before its Content-Length; nothing was done")
                wish = read_wish(wanted.place, body)
                self._say(HTTPStatus.OK, self.server.actions.carry_out(wish, str(self.client_address[0])))

    def _pass_over(self) -> None:
        """Read what else the client sends, within bounds: closed at once, the connection would lose the answer."""
        deadline, passed = Deadline(PASSED_OVER_S), 0
        with contextlib.suppress(OSError), self.place.waiting():
            self.connection.shutdown(socket.SHUT_WR)
            while passed < PASSED_OVER_BYTES and not deadline.passed():
                self.connection.settimeout(deadline.left())
                part = self.connection.recv(65_536)
                if not part:
                    break
                passed += len(part)

    def _one(self, name: str) -> str | None:
        """Return a header; what stands there twice is what nobody sends in good faith, and fits no rule."""
        found = self.headers.get_all(name)
        return None if not found else ", ".join(found)

    def _say(self, status: HTTPStatus, document: Document, extra: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        self._send(status, body, JSON_TYPE, extra or {})

    def _send(self, status: HTTPStatus, body: bytes, kind: str, extra: Mapping[str, str]) -> None:
        self.send(status, body, kind, {**HEADERS, **extra})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request that can be judged; called by the base class."""
        status = HTTPStatus(code)
        self._say(status, error_document("bad-request", status.phrase.lower()))
        self._pass_over()


def status_of(fault: RollbridgeError) -> HTTPStatus:
    """Return the status that says the same as an error: whether anything was done, and whether to try again."""
    match fault:
        case NotFoundError():
            return HTTPStatus.NOT_FOUND
        case InvalidRequestError():
            return HTTPStatus.BAD_REQUEST
        case ConflictError():
            return HTTPStatus.CONFLICT
        case UnavailableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case OutcomeUnknownError() | UnknownWriteError():
            return HTTPStatus.GATEWAY_TIMEOUT
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR
