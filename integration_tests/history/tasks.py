"""What a client of a history is told to do, as JSON on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Task:
    """What a client does.

    Attributes:
        name: Of the client.
        role: ``writer`` or ``reader``.
        streams: Streams of one group; a reader reads the first.
        seed: Of its choices.
        out: File that it notes down into.
        heir_of: Name and file of a client that was killed, whose name this one takes and whose transactions it ends.
    """

    name: str
    role: str
    bootstrap_servers: str
    zookeeper: str
    streams: tuple[str, ...]
    seed: int
    out: str
    heir_of: tuple[str, str] | None = None

    @property
    def client_name(self) -> str:
        """The name under which it is known to the coordinator: its own, or that of the first of a line of heirs."""
        return self.heir_of[0] if self.heir_of else self.name

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: str) -> Task:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(raw)
        heir_of = None if fields["heir_of"] is None else tuple(fields["heir_of"])
        return cls(**{**fields, "streams": tuple(fields["streams"]), "heir_of": heir_of})
