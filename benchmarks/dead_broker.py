"""What idle readers cost while one of three brokers is dead: they must leave it the processor it needs to come back.

The only experiment on several brokers, each in a container of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from rollbridge.errors import LocalEnvironmentError

READERS: Final = 10
ALIVE: Final = "all brokers alive"
_ROOT: Final = "/dead-broker"
_STREAM: Final = "idle/orders"
_POLL_S: Final = 1.0


def experiment(*, rounds: int, quick: bool) -> Experiment:
    """Half a minute each, with a broker that is dead and with none (five seconds if ``quick``).

    Raises:
        LocalEnvironmentError: there is no engine for containers.
    """
    ensemble = Ensemble(5.0 if quick else 30.0)
    return Experiment(
        name="dead-broker",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: ensemble.measure, ALIVE: ensemble.alive},
        rows=[
            Row(
                name="dead-broker",
                title=f"processor time of {READERS} idle readers together while one of three brokers is dead, in "
                "percent of a core; bar: 2",
                metric="percent",
                unit="%",
                better=Better.LESS,
                bar=2.0,
                beside=(ALIVE,),
            )
        ],
    )


class Ensemble:
    """Three brokers, a coordinator, and a process with the readers, anew for each round."""

    def __init__(self, seconds: float) -> None:
        # Containers are needed by this experiment alone.
        from integration_tests.backends.container_nodes import prepare
        from integration_tests.backends.interface import Unsupported

        try:
            prepare()
        except Unsupported as lack:
            raise LocalEnvironmentError(str(lack)) from lack
        self._seconds = seconds
        self._percent: dict[str, float] = {}

    def measure(self) -> Measured:
        """The dead broker's share; what it is with all of them alive is measured in the same run."""
        from integration_tests.backends.containers import ContainerCluster

        with (
            tempfile.TemporaryDirectory() as logs,
            ContainerCluster(brokers=3) as cluster,
            cluster.coordinator(_ROOT, "one", Path(logs), {}),
        ):
            servers, zookeeper = cluster.bootstrap_servers, cluster.zookeeper
            with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=_ROOT) as client:
                client.admin.create_stream(_STREAM, segments=3)
                with client.transaction(_STREAM) as transaction:
                    transaction.write_all(_STREAM, ((b"%d" % number, b"value") for number in range(30)))
            command = [sys.executable, "-m", __name__, servers, zookeeper, str(self._seconds)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as readers:
                assert readers.stdin is not None
                assert readers.stdout is not None
                readers.stdout.readline()
                self._percent[ALIVE] = _ask(readers)
                cluster.kill(cluster.brokers[-1])
                self._percent[OURS] = _ask(readers)
                readers.stdin.close()
        return {"percent": self._percent.pop(OURS)}

    def alive(self) -> Measured:
        """What the same readers took before the broker died."""
        if ALIVE not in self._percent:
            self.measure()
        return {"percent": self._percent.pop(ALIVE)}


def _ask(readers: subprocess.Popen[str]) -> float:
    assert readers.stdin is not None
    assert readers.stdout is not None
    print("measure", file=readers.stdin, flush=True)
    return float(readers.stdout.readline())


def serve(bootstrap_servers: str, zookeeper: str, seconds: float) -> None:
    """Open the readers, read what is there, and tell the processor time of this process whenever asked."""
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, zookeeper_root=_ROOT) as client:
        read = threading.Semaphore(0)
        over = threading.Event()

        def idle() -> None:
            with client.reader(_STREAM) as reader:
                left = 30
                while left:
                    left -= len(reader.consume(left, _POLL_S))
                read.release()
                while not over.is_set():
                    reader.poll(_POLL_S)

        threads = [threading.Thread(target=idle) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for _ in threads:
            read.acquire()
        print("ready", flush=True)
        for _ in sys.stdin:
            began, used = time.monotonic(), time.process_time()
            time.sleep(seconds)  # what is measured is what nobody does meanwhile
            print(100 * (time.process_time() - used) / (time.monotonic() - began), flush=True)
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]))
