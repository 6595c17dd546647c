"""Coordinators with a live page, and what is asked of it over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from integration_tests.coordinators import Servers, coordinator
from integration_tests.patience import PATIENCE_S, eventually

TOKEN: Final = "a-token-for-tests-only"


def page_of(log: Path) -> str:
    """The URL of the page of the coordinator with this log, once it says so."""
    found: list[str] = []

    def said() -> bool:
        port = re.search(r"http\.listening at=(\d+): live page", log.read_text())
        if port is not None:
            found.append(f"http://127.0.0.1:{port[1]}/")
        return port is not None

    eventually(said, "the page is served")
    return found[0]


@contextmanager
def paged_coordinator(
    cluster: Servers, root: str, name: str, logs: Path, token: str = TOKEN, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A coordinator with a live page: the URL of that, and the process."""
    given = {
        "ROLLBRIDGE_COORDINATOR_PAGE_ADDRESS": "127.0.0.1:0",
        "ROLLBRIDGE_COORDINATOR_PAGE_TOKEN": token,
        **environment,
    }
    with coordinator(cluster, root, name, logs, **given) as process:
        yield page_of(logs / f"{name}.log"), process


def ask_page(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str = "",
    *,
    timeout_s: float = PATIENCE_S,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in small letters, and body of an answer; a body is sent by POST, as JSON."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        sent = dict(headers or {})
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        answer = connection.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def read_page(url: str, path: str) -> Any:
    """A document of the page's API."""
    status, _, body = ask_page(url, f"/api/v1/{path}")
    assert status == 200, body
    return json.loads(body)


def act(url: str, action: str, wish: Any, token: str = TOKEN, **headers: str) -> tuple[int, Any]:
    """Status and document that the page answers to an action."""
    given = {"Authorization": f"Bearer {token}", **headers}
    status, _, body = ask_page(url, f"/api/v1/actions/{action}", wish, given)
    return status, json.loads(body)
