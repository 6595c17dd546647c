"""Names of the container images that rollbridge uses, and the labels on those that it has built.

This module imports no other one, so that whoever only needs the names needs no Docker library either.
``KAFKA``, ``ZOOKEEPER`` and ``PYTHON`` are official images; where they cannot be had, stand-ins of the same name and
contract are built. The others are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

VERSION: Final = version("rollbridge")

KAFKA: Final = "apache/kafka:4.2.0"
ZOOKEEPER: Final = "zookeeper:3.9.5"
PYTHON: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
"""What the coordinator's image is based on. Its wheels are fetched by this interpreter, hence the same version."""

COORDINATOR: Final = f"localhost/rollbridge/coordinator:{VERSION}"
"""Runs a coordinator unless told otherwise; ``rollbridge`` is on its PATH, so it is the client's image as well."""
TOOLBOX: Final = f"localhost/rollbridge/toolbox:{VERSION}"
"""A shell, coreutils and network tools (``iptables``, ``tc``, ``ip``, ``ss``), for side containers in the network
namespace of another one. Its label :data:`LABEL_TOOLS` says which tools it has."""
PROMETHEUS: Final = f"localhost/rollbridge/prometheus:{VERSION}"
"""The Prometheus of the machine that builds it (Debian's package), where the official one cannot be had: same program,
ports, volume and user. Only ``compose.yaml``'s profile ``metrics`` uses it."""
JAVA: Final = f"localhost/rollbridge/java:{VERSION}"
"""The toolbox with a Java, on which the stand-ins of Kafka and ZooKeeper are based."""

OFFICIAL: Final = frozenset({KAFKA, ZOOKEEPER, PYTHON})
"""Of these, what rollbridge builds is a stand-in."""
DIGESTS: Final[Mapping[str, str]] = {
    KAFKA: "sha256:9516fb7634bad307d17c33b589fde9023003b0cb761374f500002b980a3149b9",
    ZOOKEEPER: "sha256:4c6f15fbd5491a3e01b0108c046891125553329a4956848ba3014cedff5386ee",
    "python:3.11-slim": "sha256:c8271b1f627d0068857dce5b53e14a9558603b527e46f1f901722f935b786a39",
    "python:3.12-slim": "sha256:f3fa41d74a768c2fce8016b98c191ae8c1bacd8f1152870a3f9f87d350920b7c",
    "python:3.13-slim": "sha256:2b9c9803c6a287cafa0a8c917211dddd23dcd2016f049690ee5219f5d3f1636e",
}
"""Of the official images, by name: what is pulled has this digest, whatever the tag says by then. It is that of the
index, so it holds for each architecture."""

IN_USE: Final = (KAFKA, ZOOKEEPER, COORDINATOR, TOOLBOX)
"""What tests and ``compose.yaml`` use; what these stand on is made when it is needed."""

LABEL: Final = "io.rollbridge.image"
"""The name under which rollbridge has built an image. Other images may inherit it with another name on themselves, so
see :func:`is_ours`."""
LABEL_INPUTS: Final = "io.rollbridge.inputs"
"""A digest of what the image was built from: with the same one there is nothing to do."""
LABEL_STAGE: Final = "io.rollbridge.stage"
"""On what a build with several stages leaves without a name."""
LABEL_TOOLS: Final = "io.rollbridge.tools"
"""On the toolbox: the names of its programs, separated by spaces."""


def is_ours(name: str, labels: Mapping[str, str]) -> bool:
    """Whether rollbridge has built the image that has this name and these labels."""
    return labels.get(LABEL) == name


def is_stand_in(name: str, labels: Mapping[str, str]) -> bool:
    """Whether the image that has this name and these labels is our stand-in for an official one."""
    return name in OFFICIAL and is_ours(name, labels)


def pinned(name: str) -> str | None:
    """The name with its digest, as ``compose.yaml`` and ``docker pull`` take it; None if there is none for it."""
    digest = DIGESTS.get(name)
    return None if digest is None else f"{name}@{digest}"
