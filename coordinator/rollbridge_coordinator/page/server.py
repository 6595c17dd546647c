"""The HTTP server of the live page: has a request judged, and sends the answer.

:mod:`rollbridge_coordinator.page.admission` admits requests, and :mod:`rollbridge_coordinator.page.sources` and
:class:`PageActions` answer them. Limits of clients are those of :mod:`rollbridge.observe.http_service`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from http import HTTPStatus
from importlib.resources import files
from typing import Final

from rollbridge.base.deadlines import Deadline
from rollbridge.base.logs import limited, log_defect
from rollbridge.client.connection import Bridge
from rollbridge.config import ClientOptions, ConnectionSettings
from rollbridge.errors import (
    BackpressureError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.observe.http_service import BoundedHandler, BoundHttpServer, HttpService, network_of
from rollbridge.stream.keyspace import cut_evenly, wrong_ranges
from rollbridge_coordinator.page.admission import (
    JSON_TYPE,
    AbortRequest,
    Admitted,
    Dismissed,
    ExtendWish,
    Heading,
    Place,
    Rules,
    ScaleWish,
    Wish,
    WrongTokens,
    judge,
    read_wish,
)
from rollbridge_coordinator.page.documents import VERSION, Document, error_document
from rollbridge_coordinator.page.sources import PageSources

logger = logging.getLogger(__name__)
guesses = limited(logger.getChild("guesses"))

PASSED_OVER_S: Final = 1.0
PASSED_OVER_BYTES: Final = 256 * 1024
"""Bounds, in seconds and bytes, of reading what a refused client still sends."""

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
"""Headers of all answers: only the page's own content is executed or loaded, and nothing is cached."""
PICTURE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""Policy of a picture, which has its styles inline, and nothing else."""


TOO_MANY_TOKENS: Final = Dismissed(
    HTTPStatus.TOO_MANY_REQUESTS,
    "too-many-tokens",
    "there were too many wrong tokens from this address, so this one was not checked; nothing was done",
)


class PageServer(HttpService):
    """Server of the live page, which answers from its own threads while it is entered."""

    def __init__(self, host: str, port: int, rules: Rules, sources: PageSources, actions: PageActions) -> None:
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
    folder = files("rollbridge_coordinator") / "page"
    return {place: ((folder / name).read_bytes(), kind) for place, (name, kind) in ASSETS.items()}


class _PageHttpServer(BoundHttpServer):
    def __init__(self, host: str, port: int, rules: Rules, sources: PageSources, actions: PageActions) -> None:
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
            log_defect(logger, "page.failed path=%r", self.path)
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
            case Place.STATE:
                self._say(HTTPStatus.OK, sources.state())
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
        """Read what else the client sends, within bounds: if closed at once, the connection would lose the answer."""
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
        """Return a header; a repeated one is malicious, and fits no rule."""
        found = self.headers.get_all(name)
        return None if not found else ", ".join(found)

    def _say(self, status: HTTPStatus, document: Document, extra: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        self._send(status, body, JSON_TYPE, extra or {})

    def _send(self, status: HTTPStatus, body: bytes, kind: str, extra: Mapping[str, str]) -> None:
        self.send(status, body, kind, {**HEADERS, **extra})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse an unparseable request; called by the base class."""
        status = HTTPStatus(code)
        self._say(status, error_document("bad-request", status.phrase.lower()))
        self._pass_over()


def status_of(fault: RollbridgeError) -> HTTPStatus:
    """Return the status equivalent to an error: whether anything was done, and whether to try again."""
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


# Actions of the live page, for holders of its token: abort, extend, scale, by the same requests as the command line.
#
# Each uses a connection of its own, as a client does: through ZooKeeper, or the buffers, to the leading coordinator. So
# every coordinator's page works the same, and a leader treats these requests as any others.


AT_ONCE: Final = 2
"""Actions that are carried out at a time; each takes a connection and a thread of the server."""
CONNECT_S: Final = 10.0
ANSWER_S: Final = 30.0
"""Longest wait for an answer."""


class PageActions:
    """Actions of the live page; safe to use from several threads."""

    def __init__(
        self, settings: ConnectionSettings, connect: Callable[[ConnectionSettings, ClientOptions], Bridge] = Bridge
    ) -> None:
        """Prepare; the actions have the rights of the coordinator with these ``settings``."""
        self._settings = settings
        self._connect = connect
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._options = ClientOptions(connect_timeout_s=CONNECT_S, admin_timeout_s=ANSWER_S)

    def carry_out(self, wish: Wish, asker: str) -> Document:
        """Carry out an action, and return the result.

        Args:
            asker: Address of the client, for the log.

        Raises:
            RollbridgeError: as the command of the same name does; the message says whether anything was done.
        """
        if wish is None:
            return {"version": VERSION, "done": "The token is right."}
        if not self._turns.acquire(blocking=False):
            raise BackpressureError(f"{AT_ONCE} actions are under way; nothing was done, try again when they are over")
        try:
            logger.info('page.action address=%s action="%s"', asker, wish)
            with self._connect(self._settings, self._options) as bridge:
                done = _carry_out(bridge, wish)
        except Exception as fault:
            logger.info('page.action-failed address=%s action="%s" reason="%s"', asker, wish, fault)
            raise
        finally:
            self._turns.release()
        logger.info('page.action-done address=%s result="%s"', asker, done["done"])
        return {"version": VERSION, **done}


def _carry_out(bridge: Bridge, wish: AbortRequest | ExtendWish | ScaleWish) -> Document:
    match wish:
        case AbortRequest(transaction, reason):
            bridge.admin.abort_transaction(transaction, reason=reason)
            return {"done": f"Aborted {transaction}.", "transaction": transaction}
        case ExtendWish(transaction, lease_ms):
            end = bridge.extend(transaction, timedelta(milliseconds=lease_ms), timeout=ANSWER_S)
            ends_ms = int(end.timestamp() * 1000)
            text = end.strftime("%Y-%m-%d %H:%M:%SZ")
            done = f"Transaction {transaction} may stay open until {text}."
            return {"done": done, "transaction": transaction, "lease_ends_ms": ends_ms}
        case ScaleWish(stream, seal, into):
            active = bridge.admin.history(stream).active
            sealed = [item.range for item in active.segments if item.id.number in seal]
            if len(sealed) < len(set(seal)):
                numbers = ", ".join(str(item.id.number) for item in active.segments)
                raise wrong_ranges(
                    f"not all of {list(seal)} are active segments; active are {numbers}; nothing was written"
                )
            record = bridge.admin.scale(stream, seal=seal, ranges=cut_evenly(sealed, into))
            done = f"{stream} is in epoch {record.epoch} now, with {len(record.segments)} active segments."
            return {"done": done, "stream": stream, "epoch": int(record.epoch)}
