"""Conditional writes beside NATS JetStream's: publish only if the last sequence number is the expected one.

Both keep one copy on disk and leave the flushing to the operating system, which is the default of both. JetStream
knows two conditions: ``Nats-Expected-Last-Sequence`` is about the whole stream, as ours with scope ``segment``, and
``Nats-Expected-Last-Subject-Sequence`` about one subject of it, as ours with scope ``key``. One at a time, each write
waits for the answer to the one before. Pipelined, each expects the one before nevertheless: ours is given its future,
and for JetStream, which has no such thing, the caller counts, which it can because nobody else publishes.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import Header, StorageType, StreamConfig

from benchmarks.conditional import one_at_a_time, pipelined
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Pair, Site, records
from benchmarks.small import percentiles
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import LocalEnvironmentError
from rollbridge.stream.conditions import Scope
from rollbridge_devcluster import processes
from rollbridge_devcluster.state import LOOPBACK, free_port

T = TypeVar("T")

KEYS: Final = 100
"""Different keys, or subjects, of what is pipelined under a condition on each."""
_START_S: Final = 20.0
_ANSWER_S: Final = 120.0
_EXPECTED: Final = {
    Scope.SEGMENT: Header.EXPECTED_LAST_SEQUENCE.value,
    Scope.KEY: Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value,
}
_PIPELINED: Final = "pipelined"
_KEYED: Final = "pipelined by key"
_THEIRS: Final = {side: f"native, JetStream{end}" for side, end in ((OURS, ""), (_PIPELINED, " pipelined"))}
_THEIRS_KEYED: Final = "native, JetStream pipelined by subject"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One segment, 100-byte values.

    Raises:
        LocalEnvironmentError: there is no ``nats-server`` on this machine.
    """
    count = 200 if quick else 1_000
    many = count * 10
    pair = next(iter(records(1, b"one")))
    keyed = list(records(KEYS, b"last"))
    jetstream = _JetStream(site)

    def writer(name: str) -> CasWriter:
        return site.bridge.cas_writer(site.make_stream(f"jetstream-{name}"))

    what = "conditional writes of one record"
    against = "against NATS JetStream"
    return Experiment(
        name="jetstream",
        rounds=rounds,
        sides={
            OURS: one_at_a_time(writer("one"), pair, count),
            _THEIRS[OURS]: lambda: jetstream.run(_publish_one_at_a_time(jetstream, "one", pair, count)),
            _PIPELINED: pipelined(writer("pipelined"), [pair], many, Scope.SEGMENT),
            _THEIRS[_PIPELINED]: lambda: jetstream.run(
                _publish_pipelined(jetstream, "pipelined", [pair], many, Scope.SEGMENT)
            ),
            _KEYED: pipelined(writer("keyed"), keyed, many, Scope.KEY),
            _THEIRS_KEYED: lambda: jetstream.run(_publish_pipelined(jetstream, "keyed", keyed, many, Scope.KEY)),
        },
        rows=[
            Row(
                name="jetstream-p50",
                title=f"{what}, one at a time, {against} with `Nats-Expected-Last-Sequence`: p50",
                metric="p50_ms",
                unit="ms",
                better=Better.LESS,
                peers=(_THEIRS[OURS],),
            ),
            Row(
                name="jetstream-p99",
                title=f"{what}, one at a time, {against}: p99",
                metric="p99_ms",
                unit="ms",
                better=Better.LESS,
                peers=(_THEIRS[OURS],),
            ),
            Row(
                name="jetstream-pipelined",
                title=f"{what}, pipelined, each expects the one before, {against}",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.0,
                ours=_PIPELINED,
                peers=(_THEIRS[_PIPELINED],),
            ),
            Row(
                name="jetstream-keyed",
                title=f"{what}, pipelined, each expects the one before of its key ({KEYS} keys), {against} with "
                "`Nats-Expected-Last-Subject-Sequence`",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.0,
                ours=_KEYED,
                peers=(_THEIRS_KEYED,),
            ),
        ],
    )


class _JetStream:
    """A server for the experiment, and a client of it on a thread of its own, on which asyncio's loop runs."""

    def __init__(self, site: Site) -> None:
        command = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
        if command is None:
            raise LocalEnvironmentError("there is no nats-server on this machine (on Debian: apt install nats-server)")
        home, port = site.cluster.home, free_port()
        # It carries the mark of the embedded cluster, and is stopped with it.
        processes.spawn(
            [command, "-a", LOOPBACK, "-p", str(port), "-js", "-sd", str(home / "nats")],
            home=home,
            part="nats-server",
            output=home / "nats-server.log",
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nats", daemon=True).start()
        self.lasts: dict[str, int] = {}
        """Sequence number of the last message, by stream or subject."""
        self.context: Final[JetStreamContext] = self.run(self._connect(f"nats://{LOOPBACK}:{port}"))

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Have the loop carry out something."""
        asked: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return asked.result()

    async def _connect(self, url: str) -> JetStreamContext:
        client = Client()
        deadline = time.monotonic() + _START_S
        while True:
            try:
                await client.connect(url, error_cb=_not_told, allow_reconnect=False, connect_timeout=2)
                break
            except (OSError, nats.errors.Error):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
        context = client.jetstream(timeout=_ANSWER_S)
        for name in ("one", "pipelined", "keyed"):
            await context.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], storage=StorageType.FILE))
        return context


async def _not_told(_: Exception) -> None:
    """Without this the client logs the end of the server as an error; faults of publishing are raised where it is."""


async def _publish_one_at_a_time(jetstream: _JetStream, stream: str, pair: Pair, count: int) -> Measured:
    subject, payload, name = f"{stream}.{pair[0].decode()}", pair[1], _EXPECTED[Scope.SEGMENT]
    last = jetstream.lasts.get(stream, 0)
    took = []
    for _ in range(count):
        start = time.perf_counter()
        last = (await jetstream.context.publish(subject, payload, headers={name: str(last)})).seq
        took.append(time.perf_counter() - start)
    jetstream.lasts[stream] = last
    return {**percentiles(took), "per_s": count / sum(took)}


async def _publish_pipelined(
    jetstream: _JetStream, stream: str, pairs: Sequence[Pair], count: int, scope: Scope
) -> Measured:
    subjects = [(f"{stream}.{key.decode()}", value) for key, value in pairs]
    publish, lasts, name = jetstream.context.publish_async, jetstream.lasts, _EXPECTED[scope]
    last = lasts.get(stream, 0)
    futures = []
    start = time.perf_counter()
    for number in range(count):
        subject, payload = subjects[number % len(subjects)]
        expected = last if scope is Scope.SEGMENT else lasts.get(subject, 0)
        futures.append(await publish(subject, payload, headers={name: str(expected)}))
        last += 1
        lasts[subject] = last
    answers = await asyncio.gather(*futures)
    took = time.perf_counter() - start
    lasts[stream] = last
    if [answer.seq for answer in answers] != list(range(last - count + 1, last + 1)):
        raise AssertionError("JetStream wrote something else than was asked for")
    return {"per_s": count / took}
