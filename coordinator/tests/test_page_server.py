"""The server of the live page: its answers and headers, its files, and that nobody can keep it busy."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import pytest

from coordinator.tests.makers import Bench, view_of
from rollbridge.base.text import printable
from rollbridge.config import ConnectionSettings
from rollbridge.doctor.facts import Finding, warning
from rollbridge.errors import (
    AuthenticationError,
    ConflictError,
    KafkaUnavailableError,
    LocalEnvironmentError,
    RollbridgeError,
    StreamNotFoundError,
    UnknownWriteError,
)
from rollbridge.observe import http_service
from rollbridge.observe.http_service import PER_ADDRESS_MAX, REQUEST_BYTES_MAX
from rollbridge_coordinator.page import server as page
from rollbridge_coordinator.page.admission import BODY_BYTES_MAX, AbortRequest, Place, Rules, Wish
from rollbridge_coordinator.page.cache import RATES_S, WATCHED_S, PageCache, PageSheet
from rollbridge_coordinator.page.documents import Document
from rollbridge_coordinator.page.overview import live_group
from rollbridge_coordinator.page.server import ASSETS, PageServer, load_assets
from rollbridge_coordinator.page.sources import DOCTOR_REST, DoctorVisits, KeptAnswers, client_name

TOKEN = "0123456789abcdef"
PAGE_BYTES_MAX = 100_000
ID = "00000000-0000-0001-0000-000000000001"


class Answers:
    """Sources and actions that say what they are told to, and remember what they were asked for."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.asked: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()

    def _answer(self, what: Any) -> Document:
        self.asked.append(what)
        self.gate.wait(60)
        if self.fault is not None:
            raise self.fault
        return {"version": 1, "asked": str(what)}

    def overview(self) -> Document:
        """What was asked."""
        return self._answer("overview")

    def state(self) -> Document:
        """What was asked."""
        return self._answer("state")

    def group(self, text: str) -> Document:
        """What was asked."""
        return self._answer(text)

    last_hour = stream = group

    def lineage(self, text: str) -> str:
        """What was asked."""
        self._answer(text)
        return "<svg/>"

    def doctor(self) -> Document:
        """What was asked."""
        return self._answer("doctor")

    def carry_out(self, wish: Wish, asker: str) -> Document:
        """What was asked."""
        return self._answer((wish, asker))


@pytest.fixture
def answers() -> Answers:
    """What the server asks."""
    return Answers()


@pytest.fixture
def port(answers: Answers) -> Iterator[int]:
    """The port of a server."""
    rules = Rules.of("127.0.0.1", "machine", "", TOKEN)
    with PageServer("127.0.0.1", 0, rules, cast(Any, answers), cast(Any, answers)) as server:
        yield server.port


def ask(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def act(port: int, body: bytes, action: str = "abort", **headers: str) -> tuple[int, Any]:
    """Status and document that an action gets."""
    given = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json", **headers}
    status, _, answer = ask(port, f"/api/v1/actions/{action}", "POST", body, **given)
    return status, json.loads(answer)


def raw(port: int, *parts: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while more := connection.recv(65_536):
            received += more
        return received


def test_all_answers_say_that_nothing_else_is_executed_and_nothing_kept(port: int, answers: Answers) -> None:
    paths = ("/", "/page.js", "/page.css", "/api/v1/overview", "/api/v1/doctor", "/nothing", "/api/v1/streams/a/b")
    for path in paths:
        _, headers, _ = ask(port, path)
        policy = str(headers["Content-Security-Policy"])
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Access-Control-Allow-Origin"] is None
    _, headers, picture = ask(port, "/api/v1/streams/a/b/lineage.svg")
    assert headers["Content-Type"] == "image/svg+xml; charset=utf-8"
    assert headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'; sandbox"
    assert picture == b"<svg/>"
    assert answers.asked == ["overview", "doctor", "a/b", "a/b"]


def test_methods_and_paths_that_there_are_not_are_refused_as_http_says(port: int, answers: Answers) -> None:
    status, headers, body = ask(port, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask(port, "/")[2])
    assert raw(port, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n").endswith(b"\r\n\r\n")
    assert ask(port, "/nothing")[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = ask(port, "/api/v1/overview", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, headers, _ = ask(port, "/api/v1/actions/abort")
    assert (status, headers["Allow"]) == (405, "POST")
    assert ask(port, "/", "BREW")[0] == 501
    assert answers.asked == []


def test_requests_that_are_none_are_refused(port: int) -> None:
    assert b" 400 " in raw(port, b"GET / / HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b" 431 " in raw(port, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b" 431 " in raw(port, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n").splitlines()[0]
    assert b" 403 " in raw(port, b"GET / HTTP/1.1\r\n\r\n").splitlines()[0], "it has no Host"
    assert b" 403 " in raw(port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n").splitlines()[0]


def test_an_action_needs_the_token_and_is_carried_out_once(port: int, answers: Answers) -> None:
    wish = json.dumps({"transaction": ID}).encode()
    status, headers, _ = ask(port, "/api/v1/actions/abort", "POST", wish, Content_Type="application/json")
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert act(port, wish, Authorization="Bearer wrong")[0] == 401
    assert act(port, wish, Origin="http://evil.example")[0] == 403
    assert act(port, wish, Host="evil.example")[0] == 403
    assert act(port, b"{}")[0] == 400
    assert act(port, b"x" * (BODY_BYTES_MAX + 1))[0] == 413
    assert answers.asked == []
    assert act(port, wish, Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert answers.asked == [(AbortRequest(ID, "admin"), "127.0.0.1")]


def test_guesses_are_one_line_and_after_ten_are_not_looked_at(
    port: int, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    wish = json.dumps({"transaction": ID}).encode()
    assert [act(port, wish, Authorization="Bearer wrong")[0] for _ in range(10)] == [401] * 10
    given = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
    status, headers, body = ask(port, "/api/v1/actions/abort", "POST", wish, **given)
    assert (status, headers["Retry-After"], json.loads(body)["error"]["code"]) == (429, "1", "too-many-tokens")
    assert answers.asked == []
    assert len([item for item in caplog.messages if "page.wrong-token address='127.0.0.1'" in item]) <= 1
    assert ask(port, "/")[0] == 200, "who only looks waits for nothing"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (StreamNotFoundError("stream a/b does not exist"), 404, "stream-not-found"),
        (ConflictError("it waits", code="stream-busy"), 409, "stream-busy"),
        (AuthenticationError("no"), 400, "authentication-failed"),
        (KafkaUnavailableError("no broker answers"), 503, "kafka-unavailable"),
        (UnknownWriteError("it may have been done"), 504, "unknown-write"),
        (LocalEnvironmentError("no disk"), 500, "local-environment"),
        pytest.param(ValueError("<b>"), 500, "defect", marks=pytest.mark.logs_defects),
    ],
)
def test_errors_are_told_with_their_code_and_text(
    port: int, answers: Answers, fault: Exception, status: int, code: str
) -> None:
    answers.fault = fault
    found, headers, body = ask(port, "/api/v1/streams/a/b")
    document = json.loads(body)
    assert (found, headers["Content-Type"]) == (status, "application/json")
    if isinstance(fault, RollbridgeError):
        assert document["error"] == {"code": fault.code, "message": str(fault)}
    else:
        assert document["error"]["code"] == code
        assert "<b>" not in document["error"]["message"], "details are for the log"


def test_what_somebody_calls_himself_is_no_markup_in_json(port: int, answers: Answers) -> None:
    _, headers, body = ask(port, "/api/v1/streams/%3Cscript%3E/%E2%80%A8")
    assert headers["Content-Type"] == "application/json"
    assert body.isascii()
    assert json.loads(body)["asked"] == "<script>/\u2028"


def test_who_is_refused_and_says_on_takes_nobodys_place(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PASSED_OVER_S", 3_600.0)
    refused = b"POST /api/v1/actions/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with ExitStack() as held:
        for _ in range(PER_ADDRESS_MAX):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(refused)
            while connection.recv(65_536):
                pass  # the answer, and its end: from here on the rest of the body is passed over
        assert ask(port, "/api/v1/overview")[0] == 200


def test_a_client_that_sends_bytes_one_by_one_has_no_more_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_service, "REQUEST_S", 0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.settimeout(0.05)
        sent = 0
        while True:
            try:
                connection.sendall(b"G" if not sent else b"E")
                sent += 1
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert sent < 200, "each byte begins no time of its own"


def test_a_request_without_end_is_cut_off(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        sent = 0
        try:
            while sent < 100 * REQUEST_BYTES_MAX:
                connection.sendall(b"X-Filler: " + b"x" * 1_000 + b"\r\n")
                sent += 1_012
        except OSError:
            pass
        assert sent < 100 * REQUEST_BYTES_MAX, "it is not read to its end"


def test_the_page_is_small_and_complete_and_loads_nothing_from_elsewhere() -> None:
    found = load_assets()
    assert found.keys() == ASSETS.keys()
    assert sum(len(content) for content, _ in found.values()) < PAGE_BYTES_MAX
    text = {kind.partition(";")[0]: content.decode() for content, kind in found.values()}
    page, script, style = text["text/html"], text["text/javascript"], text["text/css"]
    assert re.findall(r'(?:src|href)="(?!#)([^"]*)"', page) == ["page.css", "page.js", "api/v1/overview"]
    assert not re.search(r"\son\w+=|style=|<script>|<style", page), "its policy would stop that"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
    assert re.findall(r"https?://[^\s\"`]+", script + style + page) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in style
    assert "@import" not in style
    for wanted in ("prefers-color-scheme: dark", "prefers-reduced-motion: reduce", ":focus-visible"):
        assert wanted in style
    asked = set(re.findall(r'by\("([\w-]+)"\)|fill\("([\w-]+)"', script))
    assert {one or other for one, other in asked} <= set(re.findall(r'id="([\w-]+)"', page))


def test_an_address_that_can_not_be_used_is_refused(port: int, answers: Answers) -> None:
    with pytest.raises(LocalEnvironmentError, match="the page cannot be served"):
        PageServer("127.0.0.1", port, Rules(), cast(Any, answers), cast(Any, answers))


# The board


class Hands:
    """A clock whose hands are set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now_s


def test_leaders_put_up_nothing_while_nobody_looks() -> None:
    hands = Hands()
    board, bench = PageCache(hands), Bench({"sales/orders": 1})
    seen: list[int] = []

    def view(now_ms: int) -> Any:
        seen.append(now_ms)
        return view_of(bench.group, now_ms)

    PageSheet(board, "sales/default").write(bench.group, view, 5_000)
    assert seen == []
    assert board.sheets("sales/default", 0) is None
    assert board.led() == {"sales/default"}
    assert board.last_minute("sales/default", 5_000) is not None, "what was counted is noted all the same"
    board.look()
    PageSheet(board, "sales/default").write(bench.group, view, 6_000)
    assert seen == [6_000]
    found = board.sheets("sales/default", 0)
    assert found is not None
    assert (found.latest.at_ms, found.earlier) == (6_000, None)
    hands.now_s += WATCHED_S
    assert not board.is_watched
    PageSheet(board, "sales/default").write(bench.group, view, 7_000)
    assert seen == [6_000]
    PageSheet(None, "sales/default").write(bench.group, view, 8_000)
    assert seen == [6_000]


def test_a_sheet_is_put_up_once_a_second() -> None:
    board, bench = PageCache(), Bench({"sales/orders": 1})
    board.look()
    sheet, seen = PageSheet(board, "sales/default"), []

    def view(now_ms: int) -> Any:
        seen.append(now_ms)
        return view_of(bench.group, now_ms)

    for now_ms in range(5_000, 5_500):
        sheet.write(bench.group, view, now_ms)
    assert 1 <= len(seen) < 5
    sheet.remove()
    assert board.led() == set()
    assert board.sheets("sales/default", 0) is None
    sheet.write(bench.group, view, 9_000)
    assert seen[-1] == 9_000, "a new term shows itself at once"


def test_rates_are_of_the_last_seconds() -> None:
    hands = Hands()
    board, bench = PageCache(hands), Bench({"sales/orders": 1})
    for second in range(60):
        hands.now_s = 1_000.0 + second
        board.put(live_group(bench.group, view_of(bench.group, 5_000 + 1_000 * second), None))
    found = board.sheets("sales/default", 0)
    assert found is not None
    assert found.earlier is not None
    assert found.latest.at_ms - found.earlier.at_ms == RATES_S * 1_000


def test_whoever_looks_first_waits_for_the_leader() -> None:
    board, bench = PageCache(), Bench({"sales/orders": 1})
    sheet = PageSheet(board, "sales/default")
    sheet.write(bench.group, lambda now_ms: view_of(bench.group, now_ms), 5_000)
    found: list[Any] = []
    looking = threading.Event()

    def look() -> None:
        board.look()
        looking.set()
        found.append(board.sheets("sales/default", 60))

    thread = threading.Thread(target=look)
    thread.start()
    assert looking.wait(60)
    sheet.write(bench.group, lambda now_ms: view_of(bench.group, now_ms), 6_000)
    thread.join(60)
    assert found[0].latest.at_ms == 6_000
    assert board.sheets("sales/other", 60) is None, "nobody waits for a group that is not led here"


# Sources


def test_of_those_who_ask_at_once_one_makes_the_answer() -> None:
    kept: KeptAnswers[str, int] = KeptAnswers(60)
    made: list[str] = []
    begun = threading.Event()

    def make(_: int | None) -> int:
        made.append("x")
        begun.wait(60)
        return len(made)

    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(kept.get("a", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join(60)
    assert (found, made) == ([1] * 4, ["x"])
    assert kept.get("b", lambda before: 7 if before is None else 0) == 7


def test_an_answer_that_failed_is_not_kept() -> None:
    kept: KeptAnswers[str, int] = KeptAnswers(60)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda _: 1 // 0)
    assert kept.get("a", lambda _: 2) == 2
    for number in range(1_000):
        kept.get(str(number), lambda _: 3)
    assert len(kept._slots) <= 64


@pytest.mark.logs_defects
def test_the_doctor_looks_once_a_minute_and_only_if_somebody_asks() -> None:
    hands, looks = Hands(), threading.Semaphore(0)
    outcomes: list[list[Finding] | Exception] = [
        [warning("standby", "only one coordinator runs", "start another one")],
        KafkaUnavailableError("no broker answers"),
        ValueError("a defect"),
    ]

    def examine() -> list[Finding]:
        looks.acquire(timeout=60)
        found = outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    visits = DoctorVisits(examine, hands)
    assert len(outcomes) == 3
    assert visits.look()["looked_ms"] is None
    assert visits.look()["looking"] is True
    found = _after_look(visits, looks)
    assert found["findings"] == [
        {
            "severity": "warning",
            "check": "standby",
            "what": "only one coordinator runs",
            "remedy": "start another one",
            "more": 0,
        }
    ]
    hands.now_s += 59
    assert visits.look()["looking"] is False
    hands.now_s += 2
    assert visits.look()["looking"] is True
    hands.now_s += 10
    assert _after_look(visits, looks)["fault"] == {"code": KafkaUnavailableError.code, "message": "no broker answers"}
    hands.now_s += 10 * DOCTOR_REST - 1
    assert visits.look()["looking"] is False, "one that takes long looks rarely"
    hands.now_s += 2
    visits.look()
    assert _after_look(visits, looks)["fault"]["code"] == "defect"


def _after_look(visits: DoctorVisits, looks: threading.Semaphore) -> Document:
    """What is known once the look that is under way is over."""
    looks.release()
    for thread in threading.enumerate():
        if thread.name == "page-doctor":
            thread.join(60)
    return visits.look()


def test_requests_of_a_page_have_a_name_that_a_client_may_have() -> None:
    assert client_name("host-1-77") == "page:host-1-77"
    for name in ("é b", "x" * 500):
        ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1", client_name=client_name(name))


@pytest.mark.logs_defects
def test_a_defect_of_the_page_ends_no_lead(caplog: pytest.LogCaptureFixture) -> None:
    board, bench = PageCache(), Bench({"sales/orders": 1})
    board.look()
    sheet = PageSheet(board, "sales/default")
    for _ in range(3):
        sheet.write(bench.group, lambda _: 1 // 0, 5_000)  # type: ignore[arg-type, return-value]
    assert len([item for item in caplog.records if "page.term-hidden " in item.message]) == 1
    assert board.led() == set()
    sheet.remove()
    sheet.write(bench.group, lambda now_ms: view_of(bench.group, now_ms), 6_000)
    assert board.sheets("sales/default", 0) is not None, "the next term shows itself"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_replaces_what_logs_replace() -> None:
    script = load_assets()[Place.SCRIPT][0].decode()
    line = next(line for line in script.splitlines() if line.startswith("const printable"))
    hidden = [
        chr(code) for code in range(sys.maxunicode) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp")
    ]
    given = [*hidden, "\u202eon\u2066", "東京/a b", "<b>"]
    program = f"{line}; console.log(JSON.stringify(JSON.parse({json.dumps(json.dumps(given))}).map(printable)))"
    done = subprocess.run(["node", "-e", program], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [printable(text) for text in given]
