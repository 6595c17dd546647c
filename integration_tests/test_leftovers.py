"""The check for processes that a test leaves behind finds them, and only them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from integration_tests.leftovers import children, left_behind


@contextmanager
def running(*name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its input does."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_a_process_that_outlives_its_test_is_found() -> None:
    before = children()
    with running("forgotten") as process:
        assert [command[-1] for command in left_behind(before, 0).values()] == ["forgotten"]
        assert list(left_behind(before, 0)) == [process.pid]
    assert left_behind(before) == {}


def test_a_coordinator_may_have_a_successor_with_another_name() -> None:
    with running("--name=one", "--zookeeper-root=/a"):
        before = children()
    with running("--name=two", "--zookeeper-root=/a"), running("--name=one", "--zookeeper-root=/b"):
        assert [command[-1] for command in left_behind(before, 0).values()] == ["--zookeeper-root=/b"]
