"""Metrics and health of a gateway over HTTP, in its own event loop; the paths are those of a coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from rollbridge.errors import LocalEnvironmentError
from rollbridge.metrics import SampleCollector
from rollbridge.model.metrics import Sample
from rollbridge_gateway.families import FAMILIES

logger = logging.getLogger(__name__)

METRICS: Final = "/metrics"
HEALTH: Final = "/healthz"
REQUEST_S: Final = 5.0
"""Time limit for a client to send its request."""
_TEXT: Final = "text/plain; charset=utf-8"


@asynccontextmanager
async def endpoint(
    host: str, port: int, samples: Callable[[], Iterable[Sample]], faults: Callable[[], list[str]]
) -> AsyncIterator[int]:
    """Serve metrics and health inside the block; yield the port.

    Raises:
        LocalEnvironmentError: the address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(SampleCollector(samples, FAMILIES))
    ProcessCollector(registry=registry)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status, kind, body = _answer(head, registry, faults)
                lines = (
                    f"HTTP/1.1 {status.value} {status.phrase}",
                    f"Content-Type: {kind}",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                )
                writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
                if not head.startswith("HEAD "):
                    writer.write(body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as fault:
            logger.debug("a request for metrics ended: %r", fault)
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as fault:
        raise LocalEnvironmentError(f"metrics cannot be served at {host}:{port}: {fault}") from fault
    try:
        at = int(server.sockets[0].getsockname()[1])
        logger.info("metrics and health at port %d", at)
        yield at
    finally:
        server.close()


def _answer(head: str, registry: CollectorRegistry, faults: Callable[[], list[str]]) -> tuple[HTTPStatus, str, bytes]:
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[0] not in ("GET", "HEAD"):
        return HTTPStatus.NOT_FOUND, _TEXT, b"only GET and HEAD are answered\n"
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    path = words[1].partition("?")[0]
    if path == METRICS:
        encode, kind = choose_encoder(headers.get("accept", ""))
        return HTTPStatus.OK, kind, encode(registry)
    if path == HEALTH:
        found = faults()
        status = HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK
        return status, _TEXT, "".join(f"{line}\n" for line in found or ["ok"]).encode()
    return HTTPStatus.NOT_FOUND, _TEXT, f"there are {METRICS} and {HEALTH}\n".encode()
