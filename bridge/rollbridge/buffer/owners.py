"""Fences: newer sessions of a client fence older ones, and later owners of a transaction fence earlier ones.

- A *session* of a client has an epoch, higher than that of the session before. BEGIN, commit and abort of an older
  session are refused. Its open transactions stay, for the newer session to resume.
- A transaction that is *resumed* gets a new owner, with a part number of its own. From its BEGIN frames on, which
  follow all frames that counted before, former owners can neither write nor end it, in whatever session.

Records of sessions expire. Below the *floor* a session counts only if it is on record
(:mod:`rollbridge.metadata.client_sessions`); a leader knows each session on record below it.

The second rule follows from the buffer alone. The first does not: a leader knows sessions from ZooKeeper, from requests
and from BEGIN frames. A later leader, which knows newer sessions, reads the same frames again. Then no BEGIN is
refused, because it may be older than these sessions; and a final commit stays final.

Source: Kafka's producer epochs and ``InitProducerId``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.base.ids import OWNER_PART
from rollbridge.buffer.frames import BeginFrame

_FIRST: Final = (int(OWNER_PART),)
_NONE_RESUMED: Final[Mapping[str, tuple[int, ...]]] = {}
CLIENTS_MAX: Final = 200_000
"""Client names whose sessions frames may tell of; one takes 150 bytes and its name. Those on record are not limited."""
OWNERS_MAX: Final = 1_000
"""Most resumptions of a transaction, by each stream's buffer. Each frame is compared with all owners."""
SessionName = tuple[str, int]
"""Name and epoch of a client's session; epoch 0 is none: a client without a name of its own."""
NO_SESSION: Final[SessionName] = ("", 0)


@dataclass(slots=True)
class Fences:
    """The newest session of each client that a fold knows of.

    Attributes:
        replaying: Whether frames are read that an earlier leader may have read.
        decided_before: Transactions whose commit was decided for good, with the part of the owner who asked for it.
        floor: Up to this epoch, sessions of clients that are not known are over.
    """

    replaying: bool = False
    decided_before: Mapping[bytes, int] = field(default_factory=dict)
    floor: int = 0
    _epochs: dict[str, int] = field(default_factory=dict)
    _heard: set[str] = field(default_factory=set)
    """Clients that only frames have told of."""

    def epoch_of(self, client: str) -> int:
        """Return the epoch of the client's newest session; 0 if it never had one."""
        return self._epochs.get(client, 0)

    def knows(self, client: str) -> bool:
        """Return True if a session of the client was noted."""
        return client in self._epochs

    def raise_to(self, client: str, epoch: int) -> None:
        """Record a session that is on record, or was when it was heard of; it fences those with lower epochs."""
        if epoch > self.epoch_of(client):
            self._epochs[client] = epoch
        if self._heard:
            self._heard.discard(client)

    def hear_of(self, session: SessionName) -> None:
        """Record a session that only a frame tells of, unless it is over."""
        client, epoch = session
        known = self._epochs.get(client)
        if known is None and epoch > self.floor:
            self._heard.add(client)
            self._epochs[client] = epoch
        elif known is not None and epoch > known:
            self._epochs[client] = epoch

    def strangers(self, on_record: Iterable[str]) -> list[str]:
        """Return the clients that only frames have told of, told which clients have sessions on record."""
        self._heard.difference_update(on_record)
        return list(self._heard)

    def raise_floor(self, floor: int) -> None:
        """End all sessions up to an epoch, but for those that are known."""
        self.floor = max(self.floor, floor)

    def has_room_for(self, client: str) -> bool:
        """Return True if a session that only a frame tells of may be noted."""
        return client in self._epochs or len(self._heard) < CLIENTS_MAX

    def learn(self, other: Fences) -> None:
        """Add all sessions that another fold knows."""
        for session in other._epochs.items():
            self.hear_of(session)

    def forget(self, client: str) -> None:
        """Forget a client without a session on record; what the floor is above is over."""
        self._epochs.pop(client, None)
        self._heard.discard(client)

    def forget_strangers(self, strangers: Iterable[str], needed: Collection[str]) -> None:
        """Forget those of the strangers whose sessions the floor ends as well, but for some."""
        for client in strangers:
            if client in self._heard and self._epochs[client] <= self.floor and client not in needed:
                self.forget(client)

    def caught_up(self) -> None:
        """Record that everything to be read again has been read; nothing has to be spared any more."""
        self.replaying, self.decided_before = False, {}

    def refuses(self, session: SessionName) -> bool:
        """Return True if a session may not begin anything."""
        return not self.replaying and self.holds_off(session)

    def holds_off(self, session: SessionName) -> bool:
        """Return True if a newer session has begun, or this one is over; never for clients without a name."""
        client, epoch = session
        known = self._epochs.get(client)
        return 0 < epoch < known if known is not None else 0 < epoch <= self.floor


class Owners:
    """Owners of one transaction: only the latest one to begin or resume it may write and end it.

    A new owner sends a BEGIN frame to each stream's buffer. Only the home stream's buffer decides who may end the
    transaction; each stream's own buffer fences writes of former owners, because two buffers have no common order.

    Attributes:
        part: The present owner's part number; the end is requested with it.
        session: Of the present owner.
    """

    __slots__ = ("_home", "_parts", "part", "session")

    def __init__(self, begin: BeginFrame) -> None:
        self._home = begin.home
        self._parts = _NONE_RESUMED
        self.part: int = OWNER_PART
        self.session: SessionName = (begin.client_name, begin.client_epoch)

    @property
    def parts(self) -> tuple[int, ...]:
        """The part numbers of all owners, former ones included."""
        return self._parts.get(self._home, _FIRST)

    @property
    def resumed(self) -> int:
        """Return the number of resumptions, by all buffers together."""
        return sum(map(len, self._parts.values())) - len(self._parts)

    def is_full(self, stream: str) -> bool:
        """Return True if it was resumed as often as it may be."""
        return len(self._parts.get(stream, _FIRST)) > OWNERS_MAX

    def adopt(self, begin: BeginFrame) -> None:
        """Take the BEGIN frame of the first owner, if another one's was met first."""
        if self.part == OWNER_PART:
            self.session = (begin.client_name, begin.client_epoch)

    def last(self, stream: str) -> int:
        """Return the part number of the present owner, by a stream's buffer."""
        return self._parts.get(stream, _FIRST)[-1]

    def hand_over(self, stream: str, part: int, begin: BeginFrame) -> bool:
        """Record a new owner; return False, and change nothing, if a later one is known."""
        known = self._parts.get(stream, _FIRST)
        if part <= known[-1]:
            return False
        self._parts = {**self._parts, stream: (*known, part)}
        if stream == self._home:
            self.part = part
            self.session = (begin.client_name, begin.client_epoch)
        return True

    def of(self, stream: str) -> tuple[int, ...]:
        """Return the part numbers of all who resumed it, in order, by a stream's buffer."""
        return self._parts.get(stream, _FIRST)[1:]

    def restore(self, stream: str, parts: Sequence[int], session: SessionName) -> None:
        """Put back what :meth:`of` and ``session`` said of a stream's buffer."""
        if parts:
            self._parts = {**self._parts, stream: (*_FIRST, *parts)}
            if stream == self._home:
                self.part, self.session = parts[-1], session

    def is_former(self, stream: str, part: int) -> bool:
        """Return True if a part is that of a former owner; parts that other processes write for it are not."""
        if not self._parts:
            return False
        known = self._parts.get(stream, _FIRST)
        return part != known[-1] and part in known
