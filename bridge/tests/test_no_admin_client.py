"""librdkafka's AdminClient is on the path of no client and no coordinator.

Some of its requests end the process by a failed assertion when their broker goes away, and others dial a dead broker
again without pause. Whatever it could be asked goes over connections of our own instead: ``rollbridge.kafka.topics``,
``log_offsets``, ``views``, ``rollbridge.kafka.groups``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "benchmarks",
    "bridge",
    "coordinator",
    "schemas",
    "spark_examples",
)


OTHERS = ("moving_before.py", "moving_after.py")
"""A program of somebody else's, as it was and after its move: it makes its topics as it always has."""


def admin_clients(source: str) -> Iterator[int]:
    """Lines that import something of confluent-kafka's administration, or name it as an attribute."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                if any(name.name.startswith("confluent_kafka.admin") for name in names):
                    yield node.lineno
            case ast.ImportFrom(module=str(module), names=names):
                below = module == "confluent_kafka" and {"admin", "AdminClient"} & {name.name for name in names}
                if below or module.startswith("confluent_kafka.admin"):
                    yield node.lineno
            case ast.Attribute(attr="AdminClient" | "AIOAdminClient"):
                yield node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_uses_the_admin_client_of_the_library(package: str) -> None:
    files = sorted(path for path in (ROOT / package).rglob("*.py") if path.name not in OTHERS)
    assert files
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in admin_clients(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "from confluent_kafka.admin import AdminClient",
        "from confluent_kafka.admin import OffsetSpec as Spec",
        "import confluent_kafka.admin",
        "import confluent_kafka.admin as a",
        "from confluent_kafka import admin",
        "import confluent_kafka\nconfluent_kafka.admin.AdminClient({})",
    ],
)
def test_every_way_to_it_is_found(source: str) -> None:
    assert list(admin_clients(source))


def test_what_is_not_it_is_let_be() -> None:
    assert not list(
        admin_clients("from confluent_kafka import Consumer, Producer\nfrom rollbridge.client.admin import Admin\n")
    )
