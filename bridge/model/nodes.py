"""Operations on ZooKeeper nodes as values; several of them in one multi are carried out all or none."""

from __future__ import annotations

from dataclasses import dataclass


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
