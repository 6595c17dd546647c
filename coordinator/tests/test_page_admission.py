"""Which requests the live page admits: names, origins, token, methods and sizes, and what actions may ask for."""

from __future__ import annotations

import json
from http import HTTPStatus
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, InvalidRequestError
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.daemon.main import page_url
from rollbridge_coordinator.page.admission import (
    ACTIONS,
    API,
    BODY_BYTES_MAX,
    ROUTES,
    WRONG_ADDRESSES_MAX,
    AbortRequest,
    Admitted,
    Dismissed,
    ExtendWish,
    Heading,
    Place,
    Rules,
    ScaleWish,
    WrongTokens,
    find_place,
    is_token,
    judge,
    read_wish,
)

TOKEN = "0123456789abcdef"
RULES = Rules.of("127.0.0.1", "machine-1", "https://ops.example/rollbridge/", TOKEN)
ABORT = f"{API}/actions/abort"
ID = str(TransactionId.of(3, 9))


def action(**headers: Any) -> Heading:
    """A request that acts, as the page sends it, but for the given headers."""
    given: dict[str, Any] = {
        "method": "POST",
        "target": ABORT,
        "host": "127.0.0.1:9465",
        "origin": "http://127.0.0.1:9465",
        "fetch_site": "same-origin",
        "authorization": f"Bearer {TOKEN}",
        "content_type": "application/json",
        "content_length": "50",
    }
    return Heading(**given | headers)


def refused(heading: Heading, rules: Rules = RULES) -> tuple[int, str]:
    """Why a request is refused."""
    verdict = judge(heading, rules)
    assert isinstance(verdict, Dismissed), verdict
    return verdict.status, verdict.code


def test_every_path_and_method_is_decided() -> None:
    for (pattern, place), method in product(ROUTES.items(), ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get")):
        heading = action(target=pattern.replace("*", "name"), method=method)
        verdict = judge(heading, RULES)
        if method in (("POST",) if place in ACTIONS else ("GET", "HEAD")):
            assert verdict == Admitted(place, ("name",) * pattern.count("*"))
        else:
            assert isinstance(verdict, Dismissed)
            assert verdict.status is HTTPStatus.METHOD_NOT_ALLOWED
            assert verdict.allow == (("POST",) if place in ACTIONS else ("GET", "HEAD"))
    assert set(Place) == set(ROUTES.values())


@pytest.mark.parametrize(
    "path", ["", "//", "/index.html", "/page.js/", f"{API}/groups/a", f"{API}/groups//b", "/../page.js", "http://x/"]
)
def test_other_paths_lead_nowhere(path: str) -> None:
    assert find_place(path) is None
    assert refused(action(target=path, method="GET"))[0] == 404


def test_names_in_a_path_may_be_encoded() -> None:
    assert find_place(f"{API}/streams/a%2Fb/c%20") == Admitted(Place.STREAM, ("a/b", "c "))
    assert judge(action(method="GET", target="/?token=x"), RULES) == Admitted(Place.PAGE)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:9465", True),
        ("127.0.0.1", True),
        ("10.1.2.3:80", True),
        ("[::1]:9465", True),
        ("localhost:9465", True),
        ("LOCALHOST", True),
        ("machine-1:9465", True),
        ("ops.example", True),
        ("ops.example:443", True),
        ("evil.example", False),
        ("evil.example:9465", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example@127.0.0.1", False),
        ("127.0.0.1/evil", False),
        ("127.0.0.1, evil.example", False),
        ("[::1", False),
        ("127.0.0.1:port", False),
        ("", False),
        (None, False),
    ],
)
def test_only_names_of_the_page_are_answered(host: str | None, is_ours: bool) -> None:
    verdict = judge(Heading(method="GET", target="/", host=host), RULES)
    assert verdict == Admitted(Place.PAGE) if is_ours else isinstance(verdict, Dismissed) and verdict.status == 403


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"authorization": None}, (401, "wrong-token")),
        ({"authorization": TOKEN}, (401, "wrong-token")),
        ({"authorization": f"Basic {TOKEN}"}, (401, "wrong-token")),
        ({"authorization": f"Bearer {TOKEN}x"}, (401, "wrong-token")),
        ({"authorization": f"Bearer {TOKEN}, Bearer {TOKEN}"}, (401, "wrong-token")),
        ({"authorization": None, "target": f"{ABORT}?token={TOKEN}"}, (401, "wrong-token")),
        ({"origin": "http://evil.example"}, (403, "wrong-origin")),
        ({"origin": "null"}, (403, "wrong-origin")),
        ({"origin": "http://127.0.0.1:9466"}, (403, "wrong-origin")),
        ({"origin": "http://127.0.0.1:9465.evil.example"}, (403, "wrong-origin")),
        ({"origin": "ftp://127.0.0.1:9465"}, (403, "wrong-origin")),
        ({"fetch_site": "cross-site"}, (403, "wrong-origin")),
        ({"fetch_site": "same-site"}, (403, "wrong-origin")),
        ({"host": "evil.example", "origin": "http://evil.example"}, (403, "wrong-host")),
        ({"content_type": None}, (415, "wrong-type")),
        ({"content_type": "text/plain"}, (415, "wrong-type")),
        ({"content_type": "application/x-www-form-urlencoded"}, (415, "wrong-type")),
        ({"content_length": None}, (411, "no-length")),
        ({"transfer_encoding": "chunked"}, (411, "no-length")),
        ({"content_length": "-1"}, (400, "wrong-length")),
        ({"content_length": "\u0663"}, (400, "wrong-length")),
        ({"content_length": "5, 5"}, (400, "wrong-length")),
        ({"content_length": str(BODY_BYTES_MAX + 1)}, (413, "too-large")),
        ({"content_length": "9" * 5_000}, (413, "too-large")),
    ],
)
def test_what_is_not_as_the_page_sends_it_does_not_act(headers: dict[str, Any], reason: tuple[int, str]) -> None:
    assert judge(action(), RULES) == Admitted(Place.ABORT)
    assert refused(action(**headers)) == reason


def test_a_program_that_is_no_browser_may_act_and_so_may_the_page_behind_a_proxy() -> None:
    assert judge(action(origin=None, fetch_site=None), RULES) == Admitted(Place.ABORT)
    assert judge(action(origin="https://ops.example"), RULES) == Admitted(Place.ABORT), "the proxy says its own host"
    assert judge(action(host="ops.example", origin="https://ops.example"), RULES) == Admitted(Place.ABORT)
    assert judge(action(content_type="Application/JSON; charset=utf-8"), RULES) == Admitted(Place.ABORT)


def test_without_a_token_nothing_acts() -> None:
    rules = Rules.of("127.0.0.1", "machine-1", "", "")
    assert refused(action(), rules) == (403, "read-only")
    assert refused(action(authorization="Bearer "), rules) == (403, "read-only")
    assert judge(action(method="GET", target="/"), rules) == Admitted(Place.PAGE)


@given(st.text())
def test_only_the_token_is_the_token(given_token: str) -> None:
    assert is_token(f"Bearer {given_token}", TOKEN) is (given_token.strip() == TOKEN)
    assert not is_token(f"Bearer {given_token}", "")
    assert not is_token(None, TOKEN)


def body(**wish: Any) -> bytes:
    """The body of a request."""
    return json.dumps(wish).encode()


def test_wishes_are_read() -> None:
    assert read_wish(Place.CHECK, b"") is None
    assert read_wish(Place.ABORT, body(transaction=ID)) == AbortRequest(ID, "admin")
    assert read_wish(Place.ABORT, body(transaction=ID, reason="why")) == AbortRequest(ID, "why")
    assert read_wish(Place.EXTEND, body(transaction=ID, lease_ms=5)) == ExtendWish(ID, 5)
    assert read_wish(Place.SCALE, body(stream="s/a", seal=[2, 3], into=1)) == ScaleWish("s/a", (2, 3), 1)


@pytest.mark.parametrize(
    ("place", "raw", "what"),
    [
        (Place.ABORT, b"{", "not JSON"),
        (Place.ABORT, b"[" * 4_000, "not JSON"),
        (Place.ABORT, b"\xff", "not JSON"),
        (Place.ABORT, b"[]", "no.* JSON object"),
        (Place.CHECK, body(more=1), "'more' is unknown"),
        (Place.ABORT, body(), "transaction is missing"),
        (Place.ABORT, body(transaction=5), "an id is expected"),
        (Place.ABORT, body(transaction="x"), "x"),
        (Place.ABORT, body(transaction=ID, reason="a\nb"), "reason"),
        (Place.ABORT, body(transaction=ID, reason="x" * 201), "reason"),
        (Place.ABORT, body(transaction=ID, reason={}, extra=1), "'extra' is unknown"),
        (Place.EXTEND, body(transaction=ID), "lease_ms is missing"),
        (Place.EXTEND, body(transaction=ID, lease_ms=0), "lease_ms: a whole number from 1"),
        (Place.EXTEND, body(transaction=ID, lease_ms=True), "lease_ms"),
        (Place.EXTEND, body(transaction=ID, lease_ms=1.5), "lease_ms"),
        (Place.EXTEND, b'{"transaction": "%b", "lease_ms": NaN}' % ID.encode(), "lease_ms"),
        (Place.SCALE, body(stream="s/a", seal=[], into=2), "at least one"),
        (Place.SCALE, body(stream="s/a", seal="0", into=2), "at least one"),
        (Place.SCALE, body(stream="s/a", seal=[-1], into=2), "seal: a whole number"),
        (Place.SCALE, body(stream="s/a", seal=[0], into=0), "into: a whole number"),
        (Place.SCALE, body(stream=1, seal=[0], into=2), "stream: a name"),
    ],
)
def test_what_is_no_wish_says_so_and_that_nothing_was_done(place: Place, raw: bytes, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        read_wish(place, raw)


def test_after_ten_wrong_tokens_an_address_waits_and_no_other() -> None:
    wrong = WrongTokens()
    for moment in range(10):
        assert wrong.delay_s("a", moment) == 0
        wrong.note("a", moment)
    assert wrong.delay_s("a", 9.25) == 0.75
    assert wrong.delay_s("a", 10) == 0
    assert wrong.delay_s("b", 9.25) == 0
    wrong.note("a", 10)
    assert wrong.delay_s("a", 10.5) == 0.5, "each more"
    wrong.note("a", 70)
    assert wrong.delay_s("a", 70.1) == 0, "a quiet minute"
    for number in range(WRONG_ADDRESSES_MAX):
        wrong.note(f"c{number}", 71)
    assert len(wrong._of) == WRONG_ADDRESSES_MAX


def settings(**given: Any) -> CoordinatorSettings:
    """Settings of a coordinator."""
    return CoordinatorSettings(
        connection=ConnectionSettings(bootstrap_servers="b:1", zookeeper="z:1"), name="c", **given
    )


def test_a_page_is_off_and_read_only_unless_somebody_says_otherwise() -> None:
    assert settings().page_endpoint is None
    assert settings().page_token == ""
    given = settings(page_address="[::1]:0", page_url="https://ops.example/r/", page_token=TOKEN)
    assert given.page_endpoint == ("::1", 0)
    assert TOKEN not in repr(given)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"page_address": "9465"}, "page_address: '9465' is not HOST:PORT"),
        ({"page_url": "ops.example"}, "page_url"),
        ({"page_url": "javascript:alert(1)"}, "page_url"),
        ({"page_url": "https://user@ops.example/"}, "page_url"),
        ({"page_url": "https://ops.example/?a=b"}, "page_url"),
        ({"page_token": "short"}, "page_token: is not possible"),
        ({"page_token": "0123456789 abcdef"}, "page_token: is not possible"),
        ({"page_token": "0123456789abcdé0"}, "page_token: is not possible"),
        ({"page_token": "abcde" * 8}, "page_token: is not possible"),
        ({"page_address": "h:1", "metrics_address": "h:1"}, "metrics are served at h:1"),
    ],
)
def test_settings_of_a_page_that_make_no_sense_are_refused(given: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as refusal:
        settings(**given)
    assert "page_token" not in given or given["page_token"] not in str(refusal.value)


@pytest.mark.parametrize(
    ("host", "local", "url"),
    [
        ("127.0.0.1", "10.0.0.7", ""),
        ("::1", "10.0.0.7", ""),
        ("localhost", "10.0.0.7", ""),
        ("0.0.0.0", "10.0.0.7", "http://10.0.0.7:80/"),
        ("::", "fd00::7", "http://[fd00::7]:80/"),
        ("0.0.0.0", None, ""),
        ("10.0.0.8", "10.0.0.7", "http://10.0.0.8:80/"),
        ("ops-1", None, "http://ops-1:80/"),
    ],
)
def test_others_are_told_where_a_page_is_if_they_reach_it(host: str, local: str | None, url: str) -> None:
    assert page_url(host, 80, local) == url
