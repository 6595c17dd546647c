"""Names of the container images that rollbridge uses, and the labels on those that it has built. Imports nothing else.

``KAFKA``, ``ZOOKEEPER`` and ``PYTHON`` are official images; where they can not be had, stand-ins of the same name and
contract are built. The others are ours.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Final

VERSION: Final = version("rollbridge")

KAFKA: Final = "apache/kafka:4.2.0"
ZOOKEEPER: Final = "zookeeper:3.9.5"
PYTHON: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
"""What the coordinator's image is based on. Its wheels are fetched by this interpreter, hence the same version."""

COORDINATOR: Final = f"rollbridge/coordinator:{VERSION}"
"""Runs a coordinator unless told otherwise; ``rollbridge`` is on its PATH, so it is the client's image as well."""
TOOLBOX: Final = f"rollbridge/toolbox:{VERSION}"
"""A shell, coreutils and network tools (``iptables``, ``tc``, ``ip``, ``ss``), for side containers in the network
namespace of another one. Its label :data:`LABEL_TOOLS` says which tools it has."""
JAVA: Final = f"rollbridge/java:{VERSION}"
"""The toolbox with a Java, on which the stand-ins of Kafka and ZooKeeper are based."""

LABEL: Final = "io.rollbridge.image"
"""On every image that rollbridge has built, and on no other; its value is what it is: ``stand-in`` of an official
image, or ``own``."""
LABEL_INPUTS: Final = "io.rollbridge.inputs"
"""A digest of what the image was built from: with the same one there is nothing to do."""
LABEL_TOOLS: Final = "io.rollbridge.tools"
"""On the toolbox: the names of its programs, separated by spaces."""
