"""What a client says and asks first: its own name, and which Kafka cluster it has reached."""

from __future__ import annotations

import os
import socket

from rollbridge.config import ConnectionSettings
from rollbridge.errors import KafkaUnavailable
from rollbridge.kafka.topics import TopicAdmin


def own_name() -> str:
    """A client name for a process that has none: the host and the process id."""
    host = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return f"{host[:100] or 'client'}-{os.getpid()}"


def find_cluster_id(settings: ConnectionSettings, timeout_s: float) -> str:
    """Kafka's id of the cluster; KafkaUnavailable if no broker answers in time, which is a second at least."""
    try:
        admin = TopicAdmin(
            settings.bootstrap_servers,
            security=settings.kafka,
            client_id=settings.client_name,
            timeout_s=max(timeout_s, 1.0),
        )
        return admin.cluster_id()
    except KafkaUnavailable as fault:
        raise KafkaUnavailable(
            f"no Kafka broker answered at {settings.bootstrap_servers} within {timeout_s:.3g} s: is it running, and is "
            "the address right?"
        ) from fault
