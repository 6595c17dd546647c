"""Operations on ZooKeeper nodes as values; several of them in one multi are carried out all or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final


@dataclass(frozen=True, slots=True)
class CheckNode:
    """Promise that a node exists and, unless -1 is given, has this version."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a persistent node; its parent must exist and it must not."""

    path: str
    value: bytes


@dataclass(frozen=True, slots=True)
class SetNode:
    """Replace a node's value."""

    path: str
    value: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Delete a node without children."""

    path: str
    version: int = -1


NodeOperation = CheckNode | CreateNode | SetNode | DeleteNode

ROOT_CHARACTERS_MAX: Final = 128
"""Longest path, with a chroot, below which everything may stand."""
OPERATION_BYTES: Final = ROOT_CHARACTERS_MAX + 72
"""What an operation takes in a multi beside its path and value: the root path, and its frame."""


def bytes_of(operation: NodeOperation) -> int:
    """Return how many bytes an operation takes in a multi at most. ZooKeeper takes 1 MiB for all of them together."""
    value = operation.value if isinstance(operation, CreateNode | SetNode) else b""
    return len(operation.path) + len(value) + OPERATION_BYTES


def leading(operations: Sequence[NodeOperation], bytes_max: int) -> int:
    """Return how many of the operations, from the first on, fit into one multi; one at least, if there are any."""
    sizes = accumulate(map(bytes_of, operations))
    return max(sum(size <= bytes_max for size in sizes), min(len(operations), 1))
