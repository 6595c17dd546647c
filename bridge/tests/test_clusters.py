"""Connections that are kept for the next question are closed with the object that keeps them."""

from __future__ import annotations

import gc
import socket

import pytest

from rollbridge.calls import Deadline
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka.metadata import Clusters


class Kept:
    """Stands for a cluster with a connection."""

    def __init__(self, near: socket.socket) -> None:
        self.near = near

    def close(self) -> None:
        self.near.close()


def test_sockets_are_closed_although_the_keeper_is_part_of_a_cycle() -> None:
    near, far = socket.socketpair()
    clusters = Clusters("127.0.0.1:1", security=None, client_id="c")
    clusters._idle.append(Kept(near))  # type: ignore[arg-type]
    clusters.itself = clusters  # type: ignore[attr-defined]
    del clusters, near
    gc.collect()  # a socket that nobody has closed is a warning, and with that this test's failure
    with far:
        assert far.recv(1) == b""


def test_nobody_there_is_told_and_not_dialled_again_at_once() -> None:
    clusters = Clusters("127.0.0.1:1", security=None, client_id="c")
    deadline = Deadline(5.0)
    with clusters.borrow(deadline) as cluster:
        for said in ("cannot connect", "not tried again at once"):
            with pytest.raises(KafkaUnavailableError, match=said):
                cluster.leader("t", 0)
