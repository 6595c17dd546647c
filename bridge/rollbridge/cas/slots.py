"""Slots: which transactional ids a conditional writer uses, so that no two live writers share one.

A transactional id has one user: whoever takes it fences the one before. The ids of a stream's conditional writers are
therefore numbered, ``scope.stream.cas.SLOT.INDEX``, and a writer takes the lowest slot that no live one holds, by an
ephemeral ZooKeeper node. A writer that died leaves its slot, and whoever takes it next ends what the dead one left
open. A writer that was only paused finds itself fenced, has written nothing, and takes another slot.

The numbers belong to the stream and not to a client's name, because unnamed clients are named after their process: ids
made from those would be new ones at every start, which brokers keep for days and which fence nobody.
"""

from __future__ import annotations

import logging
import uuid
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.model import paths
from rollbridge.model.names import StreamName
from rollbridge.zookeeper.errors import NodeExists, UnknownWriteError
from rollbridge.zookeeper.session import ZooKeeperSession

logger = logging.getLogger(__name__)

IDS_PER_SLOT: Final = 3
"""Used in turn, a transaction never waits for the markers of the one before."""


def transactional_ids(stream: StreamName, slot: int) -> list[str]:
    """The ids of a slot; they begin like the stream's topics, so one prefixed ACL covers both."""
    return [f"{stream.scope}.{stream.stream}.cas.{slot}.{index}" for index in range(IDS_PER_SLOT)]


class Slot:
    """A slot that is held as long as the ZooKeeper session lives in which it was taken."""

    def __init__(self, session: ZooKeeperSession, path: str, number: int, session_id: int | None) -> None:
        self.number: Final = number
        self._session = session
        self._path = path
        self._session_id = session_id

    @property
    def is_held(self) -> bool:
        """Whether nobody else can have taken it, as far as is known here; costs no round trip."""
        return self._session.session_id in (None, self._session_id)

    def release(self) -> None:
        """Give it back; if that can not be done, the end of the session does it."""
        if not self.is_held:
            return
        try:
            self._session.delete(self._path)
        except RollbridgeError as fault:
            logger.info("slot %s is given back with the end of the session: %s", self._path, fault)


def take_slot(session: ZooKeeperSession, stream: StreamName, owner: str) -> Slot:
    """Take the lowest slot of a stream that nobody holds.

    Args:
        session: Its end gives the slot back.
        stream: Whose slots.
        owner: Name of the client, for whoever looks at the node.

    Raises:
        ZooKeeperUnavailable: no answer in time.
    """
    parent = paths.cas_slots(stream)
    session.ensure(parent)
    mark = f"{owner} {uuid.uuid4().hex}".encode()
    while True:
        taken = set(session.children(parent))
        number = next(number for number in range(len(taken) + 1) if str(number) not in taken)
        path = f"{parent}/{number}"
        session_id = session.session_id
        try:
            session.create(path, mark, ephemeral=True)
        except NodeExists:
            continue
        except UnknownWriteError:
            node = session.get(path)
            if node is None or node.value != mark:
                continue
        if session.session_id != session_id:
            # The session ended meanwhile, and the node may belong to the old one.
            node = session.get(path)
            if node is None or node.value != mark:
                continue
            session.delete(path)
            continue
        logger.info("%s writes conditionally to %s with slot %d", owner, stream, number)
        return Slot(session, path, number, session_id)
