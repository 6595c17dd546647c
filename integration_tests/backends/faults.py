"""Faults as ``with`` blocks: what is broken is whole again after the block, unless the test itself broke it for good.

Those of single servers work on every backend. Those of networks and disks need containers: rules are set from a side
container in the network of the victim, which itself needs no privilege and no tool, so they hold for the images that
users run. A victim that is started anew has a network of its own without those rules. ``Unsupported`` says what cannot
be done here, and why.

The link in user space (``integration_tests.links``) delays, narrows and cuts what goes between any client and server on
every backend; :func:`linked` puts one in front of a broker.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from integration_tests.backends.containers import ContainerCluster, set_clock
from integration_tests.backends.interface import AnyCluster, Unsupported
from integration_tests.links import Link
from integration_tests.three_brokers import ThreeBrokers

HOST: Final = "host"
"""The party of all programs on this machine, which come through published ports."""
_BALLAST: Final = "/disk/ballast"


# -- servers ------------------------------------------------------------------------------------------------


@contextmanager
def killed(cluster: AnyCluster, part: str) -> Iterator[None]:
    """Dead for the length of a block, by SIGKILL; then started again on its data, and waited for."""
    cluster.kill(part)
    try:
        yield
    finally:
        cluster.restart(part)


@contextmanager
def stopped(cluster: AnyCluster, part: str) -> Iterator[None]:
    """SIGSTOP and SIGCONT: as a pause, but only the server itself stands still."""
    node = cluster.node(part)
    if not isinstance(cluster, ContainerCluster):
        with node.paused():  # which is SIGSTOP there, and waits for all its threads
            yield
        return
    node.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.signal(signal.SIGCONT)


@contextmanager
def clock_off(cluster: AnyCluster, part: str, offset_s: int) -> Iterator[None]:
    """The clock of a server is ahead of the true time by this much, or behind it; it is restarted for that, twice.

    Raises:
        Unsupported: the servers are no containers, or there is no libfaketime.
    """
    node = _containers(cluster, "set the clock of a server").node(part)
    try:
        set_clock(node, offset_s)
        yield
    finally:
        set_clock(node, 0)


# -- networks -----------------------------------------------------------------------------------------------


@contextmanager
def partitioned(cluster: AnyCluster, ones: str | Sequence[str], others: str | Sequence[str]) -> Iterator[None]:
    """No packet goes between any of the one and any of the other parties, either way.

    Raises:
        Unsupported: the backend has no networks that can be cut.
    """
    if isinstance(cluster, ThreeBrokers):
        with ExitStack() as cuts:
            for one in _names(ones):
                cuts.enter_context(cluster.cut(cluster.number(one), [*map(cluster.number, _names(others))]))
            yield
        return
    with _cut(cluster, ones, others, "INPUT -s", "OUTPUT -d"):
        yield


@contextmanager
def silenced(cluster: AnyCluster, senders: str | Sequence[str], receivers: str | Sequence[str]) -> Iterator[None]:
    """What the senders send to the receivers is lost; what these send arrives. :data:`HOST` can only receive.

    Raises:
        Unsupported: the backend has no networks that can be cut.
    """
    with _cut(cluster, senders, receivers, "OUTPUT -d"):
        yield


@contextmanager
def lossy(cluster: AnyCluster, part: str, share: float) -> Iterator[None]:
    """A share of the packets that a part is sent is lost, at random.

    Raises:
        Unsupported: the backend has no networks, or the kernel no rule for this.
    """
    chance = f"-m statistic --mode random --probability {share:.4f}"
    with _rules(cluster, part, [f"INPUT -i eth0 {chance} -j DROP"]):
        yield


@contextmanager
def narrowed(cluster: AnyCluster, part: str, kbit_per_s: int) -> Iterator[None]:
    """What a part sends goes through a thin pipe, in which it queues for up to two seconds, and is lost then.

    Raises:
        Unsupported: the backend has no networks, or the kernel no token bucket.
    """
    network = _containers(cluster, "narrow a network")
    network.in_network_of(part, f"tc qdisc add dev eth0 root tbf rate {kbit_per_s}kbit burst 8kb latency 2s")
    try:
        yield
    finally:
        network.in_network_of(part, "tc qdisc del dev eth0 root || true")


@contextmanager
def linked(cluster: AnyCluster) -> Iterator[Link]:
    """A link to the only broker; who connects to its address stays on it. The broker is restarted for it."""
    with Link("127.0.0.1:0") as link:
        link.lead_to(cluster.add_listener("LINKED", link.address))
        yield link


# -- disks --------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(cluster: AnyCluster, part: str) -> Iterator[None]:
    """No room is left in the data directory of a part; after the block there is.

    The part may end because of it, and is not started again here.

    Raises:
        Unsupported: the backend has no disk of limited size for this part.
    """
    disk = _containers(cluster, "fill a disk").disk_of(part)
    fill = f"dd if=/dev/zero of={_BALLAST} bs=4k 2>/dev/null; cat /dev/zero >>{_BALLAST} 2>/dev/null; true"
    said = disk.exec(["sh", "-c", fill])
    assert said.exit_code == 0, said.output
    try:
        yield
    finally:
        said = disk.exec(["rm", "-f", _BALLAST])
        assert said.exit_code == 0, said.output


# -- how ----------------------------------------------------------------------------------------------------


@contextmanager
def _cut(cluster: AnyCluster, victims: str | Sequence[str], others: str | Sequence[str], *ways: str) -> Iterator[None]:
    """No packet goes these ways between any of the victims and any of the others."""
    with ExitStack() as cuts:
        rules = [f"{way} {address} -j DROP" for address in _addresses(cluster, others) for way in ways]
        for victim in _names(victims):
            cuts.enter_context(_rules(cluster, victim, rules))
        yield


@contextmanager
def _rules(cluster: AnyCluster, victim: str, rules: Sequence[str]) -> Iterator[None]:
    """Rules of the packet filter of a part, before all others."""
    network = _containers(cluster, "cut a network")
    network.in_network_of(victim, "; ".join(f"iptables -w -I {rule}" for rule in rules))
    try:
        yield
    finally:
        # A container that has ended took its rules with it; one that was started again has none.
        if network.node(victim).runs():
            undo = "; ".join(f"iptables -w -D {rule} 2>/dev/null || true" for rule in rules)
            network.in_network_of(victim, undo)


def _containers(cluster: AnyCluster, what: str) -> ContainerCluster:
    if not isinstance(cluster, ContainerCluster):
        raise Unsupported(f"the local backend cannot {what}: its servers share this machine's")
    return cluster


def _addresses(cluster: AnyCluster, names: str | Sequence[str]) -> list[str]:
    network = _containers(cluster, "cut a network")
    gateway = network.gateway
    return [gateway() if name == HOST else network.node(name).address_inside() for name in _names(names)]


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names
