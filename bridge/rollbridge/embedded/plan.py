"""What an embedded cluster should be: what is asked for now, on top of what was decided before."""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rollbridge.embedded.ports import demand_port, free_port, is_free
from rollbridge.embedded.servers import KAFKA, ZOOKEEPER
from rollbridge.embedded.state import Home, Ports, State
from rollbridge.errors import EnvironmentProblem

_HEAP = re.compile(r"[1-9][0-9]*[kKmMgG]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a start is asked for; ``None`` keeps what the cluster has, or the default for a new one."""

    kafka_port: int | None = None
    """Default: the one it had if that is still free, else any free one. So for ZooKeeper's."""
    zookeeper_port: int | None = None
    coordinators: int | None = None
    """Default 1."""
    ephemeral: bool | None = None
    """Remove everything when the cluster stops. Default no."""
    short_lived: bool | None = None
    """Servers that start faster and need less memory, but are slower in the long run. Default as ``ephemeral``."""
    kafka_heap: str | None = None
    """As after ``-Xmx``. Default 1g."""
    kafka_settings: Mapping[str, str] | None = None
    """Broker settings on top of ours. Default none."""
    zookeeper_settings: Mapping[str, str] | None = None
    """ZooKeeper's settings on top of ours. Default none."""


def refuse_foreign_directory(home: Home, wishes: Wishes) -> None:
    """Promise that an ephemeral cluster, which removes its directory in the end, removes nothing of anybody else.

    Raises:
        EnvironmentProblem: something else is in the directory.
    """
    if not wishes.ephemeral or not home.path.is_dir():
        return
    state = home.load()
    # A start that runs at the same time has at least its lock there, and perhaps a state file half-written.
    strangers = [path for path in home.path.iterdir() if path.stem not in ("lock", home.state_file.stem)]
    if state is None and strangers:
        raise EnvironmentProblem(
            f"{home.path} is not empty, and an ephemeral cluster removes its directory when it stops; "
            "name one that does not exist yet"
        )
    if state is not None and not state.ephemeral:
        raise EnvironmentProblem(
            f"{home.path} holds a cluster whose data is kept; leave --ephemeral out or name another --home"
        )


def decide(home: Home, before: State | None, wishes: Wishes, running: Collection[str]) -> State:
    """The state that the cluster should have from now on.

    Raises:
        EnvironmentProblem: a port that is asked for is in use, or cannot be changed because its server runs.
    """
    if wishes.kafka_heap is not None and not _HEAP.fullmatch(wishes.kafka_heap):
        raise EnvironmentProblem(
            f"{wishes.kafka_heap!r} is no heap size: a number with k, m or g is expected, such as 512m"
        )
    state = before or State(
        kafka_cluster_id=_stored_cluster_id(home) or new_cluster_id(),
        ports=Ports(kafka=0, kafka_controller=0, zookeeper=0),
        coordinators=1,
        ephemeral=bool(wishes.ephemeral),
        short_lived=bool(wishes.ephemeral),
    )
    changes = {
        name: value
        for name in ("coordinators", "short_lived", "kafka_heap", "kafka_settings", "zookeeper_settings")
        if (value := getattr(wishes, name)) is not None
    }
    ports = _ports(state.ports, wishes, running)
    return replace(state, running=True, ports=ports, **changes)


def _ports(before: Ports, wishes: Wishes, running: Collection[str]) -> Ports:
    """A server that runs keeps its port; one that is asked for must be free; others stay if they still are."""
    asked_for = {port for port in (wishes.kafka_port, wishes.zookeeper_port) if port is not None}
    taken: set[int] = set(asked_for)

    def choose(server: str, purpose: str, port: int, asked: int | None) -> int:
        if server in running:
            if asked not in (None, port):
                raise EnvironmentProblem(
                    f"{purpose} runs on port {port} already; stop the cluster with `rollbridge down` first "
                    f"to have it on port {asked}"
                )
            chosen = port
        elif asked is not None:
            chosen = demand_port(asked, purpose)
        elif port and port not in taken and is_free(port):
            chosen = port
        else:
            chosen = free_port(taken)
        taken.add(chosen)
        return chosen

    return Ports(
        kafka=choose(KAFKA, "Kafka", before.kafka, wishes.kafka_port),
        kafka_controller=choose(KAFKA, "Kafka's controller", before.kafka_controller, None),
        zookeeper=choose(ZOOKEEPER, "ZooKeeper", before.zookeeper, wishes.zookeeper_port),
    )


def _stored_cluster_id(home: Home) -> str | None:
    """The id in Kafka's data, for a state file that was lost."""
    meta = home.of(KAFKA) / "data" / "meta.properties"
    if not meta.exists():
        return None
    found = re.search(r"^cluster\.id=(\S+)$", meta.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def new_cluster_id() -> str:
    """A random id as Kafka writes them: 16 bytes in URL-safe base64, not starting like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text
