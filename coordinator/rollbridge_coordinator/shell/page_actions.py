"""What the live page does for whoever has its token: abort, extend, scale, by the same requests as the command line.

Each goes over a connection of its own, as a client's: through ZooKeeper, or the buffers, to whichever coordinator
leads. So it makes no difference on whose page somebody sits, and a leader takes what comes from here as it takes
anything else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from rollbridge.client.runtime import ClientOptions
from rollbridge.config import ConnectionSettings
from rollbridge.connection import Bridge
from rollbridge.errors import BackpressureError, InvalidRangesError
from rollbridge.model.keyspace import cut_evenly
from rollbridge_coordinator.state.admission import AbortWish, ExtendWish, ScaleWish, Wish
from rollbridge_coordinator.state.documents import VERSION, Document

logger = logging.getLogger(__name__)

AT_ONCE: Final = 2
"""Actions that are carried out at a time; each takes a connection and a thread of the server."""
CONNECT_S: Final = 10.0
ANSWER_S: Final = 30.0
"""How long an answer is waited for."""


class PageActions:
    """Actions of the live page; safe to use from several threads."""

    def __init__(
        self, settings: ConnectionSettings, connect: Callable[[ConnectionSettings, ClientOptions], Bridge] = Bridge
    ) -> None:
        """Prepare; ``settings`` are those of the coordinator, whose rights the actions have."""
        self._settings = settings
        self._connect = connect
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._options = ClientOptions(connect_timeout_s=CONNECT_S, admin_timeout_s=ANSWER_S)

    def carry_out(self, wish: Wish, asker: str) -> Document:
        """Carry out what was asked for, and return what was done.

        Args:
            wish: What.
            asker: Address of who has asked, for the log.

        Raises:
            RollbridgeError: as the command of the same name does; the message says whether anything was done.
        """
        if wish is None:
            return {"version": VERSION, "done": "The token is right."}
        if not self._turns.acquire(blocking=False):
            raise BackpressureError(f"{AT_ONCE} actions are under way; nothing was done, try again when they are over")
        try:
            logger.info("the page at %s asks: %s", asker, wish)
            with self._connect(self._settings, self._options) as bridge:
                done = _carry_out(bridge, wish)
        except Exception as fault:
            logger.info("the page at %s asked: %s: %s", asker, wish, fault)
            raise
        finally:
            self._turns.release()
        logger.info("the page at %s: %s", asker, done["done"])
        return {"version": VERSION, **done}


def _carry_out(bridge: Bridge, wish: AbortWish | ExtendWish | ScaleWish) -> Document:
    match wish:
        case AbortWish(transaction, reason):
            bridge.admin.abort_transaction(transaction, reason=reason)
            return {"done": f"Aborted {transaction}.", "transaction": transaction}
        case ExtendWish(transaction, lease_ms):
            end = bridge.extend(transaction, timedelta(milliseconds=lease_ms), timeout=ANSWER_S)
            ends_ms = int(end.timestamp() * 1000)
            text = end.strftime("%Y-%m-%d %H:%M:%SZ")
            done = f"Transaction {transaction} may stay open until {text}."
            return {"done": done, "transaction": transaction, "lease_ends_ms": ends_ms}
        case ScaleWish(stream, seal, into):
            active = bridge.admin.history(stream).active
            sealed = [item.range for item in active.segments if item.id.number in seal]
            if len(sealed) < len(set(seal)):
                numbers = ", ".join(str(item.id.number) for item in active.segments)
                raise InvalidRangesError(
                    f"not all of {list(seal)} are active segments; active are {numbers}; nothing was written"
                )
            record = bridge.admin.scale(stream, seal=seal, ranges=cut_evenly(sealed, into))
            done = f"{stream} is in epoch {record.epoch} now, with {len(record.segments)} active segments."
            return {"done": done, "stream": stream, "epoch": int(record.epoch)}
