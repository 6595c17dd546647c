"""The jar cache against a repository on loopback that errs in all the ways a network does."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bridge.tests.refusals import raises_code
from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster.jars import REPOSITORY_VARIABLE, Jar, JarCache, read_lock

GOOD = {f"org/example/{name}/1.0/{name}-1.0.jar": name.encode() * 100_000 for name in ("alpha", "beta", "gamma")}
ALPHA = "org/example/alpha/1.0/alpha-1.0.jar"

Answer = Callable[[BaseHTTPRequestHandler, int], None]
"""Answers the n-th request (from 1) for one path."""


class Repository:
    """A Maven repository that serves ``GOOD``, except where a test has it err."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.errors: dict[str, Answer] = {}
        self._lock = threading.Lock()
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.removeprefix("/maven2/")
                with repository._lock:
                    repository.asked[path] += 1
                    count = repository.asked[path]
                if path in repository.errors:
                    repository.errors[path](self, count)
                else:
                    serve(self, GOOD[path])

            def log_message(self, format: str, *args: object) -> None:
                """Silent: requests are counted instead."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/maven2"


def serve(handler: BaseHTTPRequestHandler, body: bytes, *, claimed: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if claimed is None else claimed))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    repository = Repository()
    thread = threading.Thread(target=repository.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv(REPOSITORY_VARIABLE, repository.url + "/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield repository
    repository.server.shutdown()
    repository.server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> JarCache:
    lock = tmp_path / "jars.lock"
    lines = [f"tools {hashlib.sha256(body).hexdigest()} {len(body)} {path}" for path, body in GOOD.items()]
    lock.write_text("# a comment\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return JarCache(directory=tmp_path / "cache", lock_file=lock, retry_seconds=0.001)


def files(cache: JarCache) -> set[str]:
    return {path.name for path in (cache.directory / "jars").iterdir()} - {".lock"}


def test_fetches_each_jar_once_and_not_again(cache: JarCache, repository: Repository) -> None:
    paths = cache.ensure("tools")
    assert [path.read_bytes() for path in paths] == list(GOOD.values())
    assert cache.ensure("tools") == paths
    assert repository.asked == Counter(dict.fromkeys(GOOD, 1))
    assert files(cache) == {path.name for path in paths}


def test_a_wrong_file_is_refused_and_leaves_nothing(cache: JarCache, repository: Repository) -> None:
    body = GOOD[ALPHA]
    repository.errors[ALPHA] = lambda handler, count: serve(handler, b"x" + body[1:])
    with raises_code("checksum-mismatch", match=r"alpha-1\.0\.jar from http.*is pinned"):
        cache.ensure("tools")
    assert "alpha-1.0.jar" not in files(cache)
    assert not [name for name in files(cache) if name.startswith(".")]
    del repository.errors[ALPHA]
    cache.ensure("tools")
    assert len(files(cache)) == 3


def test_an_answer_cut_short_is_fetched_again(cache: JarCache, repository: Repository) -> None:
    body = GOOD[ALPHA]

    def cut_once(handler: BaseHTTPRequestHandler, count: int) -> None:
        serve(handler, body[:1000] if count == 1 else body, claimed=len(body))
        handler.close_connection = True

    repository.errors[ALPHA] = cut_once
    cache.ensure("tools")
    assert repository.asked[ALPHA] == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_repository_is_asked_again(cache: JarCache, repository: Repository, status: int) -> None:
    def busy_twice(handler: BaseHTTPRequestHandler, count: int) -> None:
        if count > 2:
            serve(handler, GOOD[ALPHA])
        else:
            handler.send_error(status)

    repository.errors[ALPHA] = busy_twice
    cache.ensure("tools")
    assert repository.asked[ALPHA] == 3


def test_a_missing_file_is_not_asked_for_again(cache: JarCache, repository: Repository) -> None:
    repository.errors[ALPHA] = lambda handler, count: handler.send_error(404)
    with pytest.raises(LocalEnvironmentError, match=r"alpha-1\.0\.jar cannot be fetched .*404.*" + REPOSITORY_VARIABLE):
        cache.ensure("tools")
    assert repository.asked[ALPHA] == 1


def test_no_repository_says_so(cache: JarCache, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    monkeypatch.setenv(REPOSITORY_VARIABLE, f"http://127.0.0.1:{unused_port}")
    with pytest.raises(LocalEnvironmentError, match="check the network"):
        cache.ensure("tools")


@pytest.fixture
def unused_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    return server.server_port


def test_mavens_own_cache_is_used_if_its_file_is_right(cache: JarCache, repository: Repository, tmp_path: Path) -> None:
    right, wrong, absent = GOOD
    for path, body in ((right, GOOD[right]), (wrong, b"something else")):
        (tmp_path / "m2" / path).parent.mkdir(parents=True)
        (tmp_path / "m2" / path).write_bytes(body)
    with_maven = JarCache(
        directory=cache.directory, lock_file=cache.lock_file, local_repository=tmp_path / "m2", retry_seconds=0.001
    )
    assert [path.read_bytes() for path in with_maven.ensure("tools")] == list(GOOD.values())
    assert repository.asked == {wrong: 1, absent: 1}


@pytest.mark.parametrize("content", [b"torn", bytes(len(GOOD[ALPHA]))], ids=["another size", "the same size"])
def test_a_file_that_is_not_the_pinned_one_is_fetched_again(
    cache: JarCache, repository: Repository, content: bytes
) -> None:
    damaged = cache.ensure("tools")[0]
    damaged.write_bytes(content)
    assert [jar.name for jar in cache.missing("tools")] == [damaged.name]
    assert cache.ensure("tools")[0].read_bytes() == GOOD[ALPHA]


def test_a_file_that_is_replaced_under_a_process_is_noticed_although_it_looks_as_old(
    cache: JarCache, repository: Repository
) -> None:
    replaced = cache.ensure("tools")[0]
    assert cache.missing("tools") == []
    found = replaced.stat()
    replaced.write_bytes(bytes(found.st_size))
    os.utime(replaced, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert [jar.name for jar in cache.missing("tools")] == [replaced.name]
    assert cache.ensure("tools")[0].read_bytes() == GOOD[ALPHA]


def test_several_fetchers_at_once_fetch_each_jar_once(cache: JarCache, repository: Repository) -> None:
    failures: list[BaseException] = []

    def fetch() -> None:
        try:
            cache.ensure("tools", quiet=True)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert repository.asked == Counter(dict.fromkeys(GOOD, 1))


def test_a_cache_that_cannot_be_written_is_named(cache: JarCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    blocked = JarCache(directory=tmp_path / "file", lock_file=cache.lock_file)
    with pytest.raises(LocalEnvironmentError, match=r"jar cache .* cannot be written"):
        blocked.ensure("tools")


def test_the_lock_file_pins_what_the_documentation_promises() -> None:
    sets = read_lock()
    servers = {"kafka", "kafka-image", "zookeeper", "zookeeper-image"}
    assert set(sets) == servers | {"spark", "tools", "compiler", "clients-3.9", "connect", "debezium", "flink"}
    names = {name: {jar.name for jar in jars} for name, jars in sets.items()}
    assert "kafka_2.13-4.2.0.jar" in names["kafka"]
    assert "log4j-slf4j-impl-2.25.3.jar" in names["kafka"]
    assert "zookeeper-3.9.5.jar" in names["zookeeper"]
    every = [jar for jars in sets.values() for jar in jars]
    assert all(len(jar.sha256) == 64 and jar.size_bytes > 0 for jar in every)
    # The cache is flat, so one name must mean one file.
    by_name: dict[str, Jar] = {}
    for jar in every:
        assert by_name.setdefault(jar.name, jar).sha256 == jar.sha256
