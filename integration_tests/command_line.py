"""The command line for tests: in this process where that is enough, as a process of its own where signals matter."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import IO, Any
from unittest.mock import patch

from integration_tests.backends.interface import AnyCluster
from rollbridge.cli.main import main


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


def run_cli(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> Answer:
    """Run a command to its end, with environment variables beside those of this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    source = io.TextIOWrapper(io.BytesIO(stdin))
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "stdin", source),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main(arguments)
    return Answer(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


class Cli:
    """Runs ``rollbridge`` against one cluster, which it is told of by environment variables."""

    def __init__(self, cluster: AnyCluster, root: str = "/rollbridge") -> None:
        self._environment = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Answer:
        """Run a command to its end."""
        return run_cli(self._environment, *arguments, stdin=stdin)

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """The answer of a command that is to succeed."""
        answer = self(*arguments, "--json", stdin=stdin)
        assert answer.code == 0, answer
        return json.loads(answer.out)

    def json_lines(self, *arguments: str) -> list[Any]:
        """The lines of a command that prints one object in each."""
        answer = self(*arguments, "--json")
        assert answer.code == 0, answer
        return [json.loads(line) for line in answer.out.splitlines()]

    def start(
        self, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, file_bytes: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command as a process, its output in pipes; files may not grow beyond ``file_bytes``."""
        limit = [] if file_bytes is None else ["prlimit", f"--fsize={file_bytes}"]
        return subprocess.Popen(
            [*limit, sys.executable, "-m", "rollbridge", *arguments],
            env={**os.environ, **self._environment},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
