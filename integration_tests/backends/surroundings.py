"""What is around the servers of a cluster: its network, its volumes, and programs that run beside them for a moment."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from docker.models.containers import Container
from docker.models.volumes import Volume
from testcontainers.core.network import Network

from integration_tests import clocks
from integration_tests.backends import reaper
from integration_tests.backends.engine import SESSION, engine, prepare
from integration_tests.backends.interface import Ability, Unsupported
from rollbridge.errors import EnvironmentProblem
from rollbridge.images.names import TOOLBOX

_PROBES: Final = {
    Ability.PARTITION: "iptables -w -A OUTPUT -d 192.0.2.1 -j DROP",
    Ability.LOSS: "iptables -w -A OUTPUT -d 192.0.2.1 -m statistic --mode random --probability 0.5 -j DROP",
    Ability.BANDWIDTH: "tc qdisc add dev eth0 root tbf rate 1mbit burst 4kb latency 1s",
}
"""What the toolbox must be able to do for each fault; the kernel decides."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a container has ended."""

    code: int
    out: bytes
    err: bytes


class Surroundings:
    """Of one cluster; everything in them carries ``labels``, and is gone with ``remove``."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex[:12]
        self.labels: Final = reaper.labels(SESSION, self._id)
        self._network: Network | None = None
        self._disks: dict[str, Container] = {}

    def make(self) -> Network:
        """Make the network, once."""
        self._network = Network(docker_network_kw={"labels": self.labels}).create()
        return self._network

    def remove(self) -> None:
        """Remove all that has the labels, containers included; harmless when there is nothing."""
        reaper.remove(f"{reaper.CLUSTER_LABEL}={self._id}")
        if self._network is not None:
            self._network._docker.client.close()
        self._network = None
        self._disks.clear()

    @property
    def network(self) -> Network:
        """The network that was made.

        Raises:
            EnvironmentProblem: there is none.
        """
        if self._network is None:
            raise EnvironmentProblem("the cluster of containers is not started")
        return self._network

    @cached_property
    def can(self) -> frozenset[Ability]:
        """What this backend can do with this engine and its kernel."""
        found = {Ability.CONTAINERS, Ability.CLOCK, Ability.DISK_FULL}
        if clocks.library() is not None:
            found.add(Ability.SERVER_CLOCK)
        script = "; ".join(f"{probe} 2>/dev/null && echo '{ability}'" for ability, probe in _PROBES.items())
        said = self.run(TOOLBOX, ["sh", "-c", f"{script}; true"], as_root=True)
        return frozenset(found | {Ability(line) for line in said.out.decode().splitlines()})

    def volume(self, part: str, size_mib: int | None = None, path: Path | None = None) -> Volume:
        """A named volume for the data of a part; with a size, in memory, so that it can be filled.

        With a ``path`` it is this directory of the engine's machine.
        """
        options = {}
        if path is not None:
            options = {"type": "none", "device": str(path), "o": "bind"}
        if size_mib is not None:
            options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={size_mib}m,uid=1000,gid=1000,mode=0755"}
        name = self._volume_name(part)
        volume = engine().volumes.create(name, driver="local", driver_opts=options, labels=self.labels)
        if size_mib is not None:
            # A file system in memory is gone when no container uses it any more, so one does all the time.
            self._disks[part] = engine().containers.run(
                prepare()[TOOLBOX],
                ["sleep", "infinity"],
                detach=True,
                init=True,
                volumes={volume.name: {"bind": "/disk", "mode": "rw"}},
                network_mode="none",
                labels=self.labels,
            )
        return volume

    def copy_volumes(self, parts: Sequence[str], *, restore: bool) -> None:
        """Copy the volumes of parts to a volume for this purpose, or back from there.

        Raises:
            EnvironmentProblem: it fails.
        """
        source, target = ("/backup", "/data") if restore else ("/data", "/backup")
        steps = [
            f"mkdir -p {target}/{part} && find {target}/{part} -mindepth 1 -delete && "
            f"cp -a {source}/{part}/. {target}/{part}/"
            for part in parts
        ]
        name = self._volume_name("backup")
        engine().volumes.create(name, driver="local", labels=self.labels)
        mounts = {self._volume_name(part): {"bind": f"/data/{part}", "mode": "rw"} for part in parts}
        container = engine().containers.create(
            prepare()[TOOLBOX],
            ["sh", "-ec", " && ".join(steps)],
            volumes={**mounts, name: {"bind": "/backup", "mode": "rw"}},
            network_mode="none",
            labels=self.labels,
            user="root",
        )
        try:
            container.start()
            if container.wait(timeout=120)["StatusCode"]:
                raise EnvironmentProblem(f"volumes cannot be copied: {container.logs().decode()}")
        finally:
            container.remove(force=True, v=False)

    def _volume_name(self, part: str) -> str:
        return f"rollbridge-test-{self._id}-{part}"

    def beside(self, container: Container, script: str) -> str:
        """Run a script of the toolbox as root in the network namespace of a container; returns what it prints.

        Raises:
            Unsupported: it fails.
        """
        said = self.run(TOOLBOX, ["sh", "-ec", script], beside=container, as_root=True)
        if said.code:
            raise Unsupported(f"beside {container.name}, {script!r} fails: {said.err.decode().strip()}")
        return said.out.decode()

    def gateway(self) -> str:
        """The address from which clients on this machine come, in its network."""
        network = engine().networks.get(self.network.name)
        return str(network.attrs["IPAM"]["Config"][0]["Gateway"])

    def disk_of(self, part: str) -> Container:
        """A container that has the disk of a part at ``/disk``.

        Raises:
            Unsupported: that disk has no limit.
        """
        if part not in self._disks:
            raise Unsupported(f"the disk of {part} has no limit; name it in disk_mib")
        return self._disks[part]

    def run(
        self,
        image: str,
        command: Sequence[str],
        *,
        entrypoint: str | None = None,
        environment: Mapping[str, str] | None = None,
        beside: Container | None = None,
        as_root: bool = False,
        timeout_s: int = 120,
    ) -> Said:
        """Run a program in a container of its own in this network, until it ends; the container is removed.

        Args:
            image: Its image.
            command: Its arguments, or all of it if the image has no entry point.
            entrypoint: In place of the image's own.
            environment: Variables of the container.
            beside: Run in the network namespace of this container.
            as_root: As root, who may change that network.
            timeout_s: How long it may take.
        """
        network = f"container:{beside.id}" if beside is not None else self.network.name
        container = engine().containers.create(
            prepare()[image],
            list(command),
            entrypoint=entrypoint,
            environment=dict(environment or {}),
            network=network,
            labels=self.labels,
            user="root" if as_root else None,
            cap_add=["NET_ADMIN"] if as_root else None,
        )
        try:
            container.start()
            code = container.wait(timeout=timeout_s)["StatusCode"]
            return Said(code, container.logs(stderr=False), container.logs(stdout=False))
        finally:
            container.remove(force=True, v=True)
