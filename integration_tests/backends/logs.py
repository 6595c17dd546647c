"""What a container says, in a file of this machine while it says it, as a process has its log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from docker.errors import DockerException
from requests import RequestException
from urllib3.exceptions import HTTPError

from integration_tests.backends.nodes import Node

_END_S = 30.0


@contextmanager
def logged(node: Node, path: Path) -> Iterator[None]:
    """Append to a file what a container that has been started says, and remove the container in the end.

    What it says after it was started once more is there in the end, too, but not before.
    """
    with path.open("ab") as log:
        begin = log.tell()
    follower = threading.Thread(target=_follow, args=(node, path), name=f"log of {node.part}", daemon=True)
    follower.start()
    try:
        yield
    finally:
        said = node.said("all")
        node.discard()  # which ends the stream
        follower.join(_END_S)
        with path.open("r+b") as log:
            log.truncate(begin)
            log.seek(begin)
            log.write(said.encode())


def _follow(node: Node, path: Path) -> None:
    with path.open("ab") as log, suppress(DockerException, RequestException, HTTPError):
        for chunk in node.container.logs(stream=True, follow=True):
            log.write(chunk)
            log.flush()
