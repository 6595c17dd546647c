"""The end of a coordinator process that was asked to end: in good order if that is possible, and within a bound.

Nothing is done in a signal handler. Handlers run in the main thread, between any two of its instructions: one that
sets a :class:`threading.Event` waits for ever if the main thread was just about to wait for that event and holds its
lock, and none runs at all while the main thread is inside of a library. So the signal is written to a pipe, which the
interpreter does at once wherever its threads are, and a thread of its own reads it and sees to the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

END_AT_LATEST_S: Final = 20.0
"""How long after it was asked to end a coordinator is there at most, whatever server it waits for."""
FLUSH_S: Final = 1.0
"""How long a last line may take to be written: nobody may be reading what we write."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def end_on_signals(stop: Callable[[], None], is_serving: Callable[[], bool]) -> None:
    """From now on, end when SIGTERM or SIGINT comes. To be called from the main thread.

    Args:
        stop: Makes the main thread end the process in good order, soon; is called from another thread.
        is_serving: Whether there may be something to hand over; otherwise the process ends at once.
    """
    asked, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(asked, stop, is_serving), name="ending", daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def _wait(asked: int, stop: Callable[[], None], is_serving: Callable[[], bool]) -> None:
    """Wait for a signal, and see to it that the process ends."""
    while not set(os.read(asked, 64)) & set(SIGNALS):
        """A signal that is none of these has a handler too."""
    if not is_serving():
        leave("asked to end before it served anything")
    stop()
    threading.Event().wait(END_AT_LATEST_S)  # the main thread ends the process meanwhile
    leave(f"a server has kept this coordinator from ending for {END_AT_LATEST_S:g} s; it ends all the same")


def leave(why: str = "") -> NoReturn:
    """End at once, as after a crash, but with exit code 0: what is under way is finished by the next leader."""

    def say() -> None:
        if why:
            logger.warning("%s", why)
        logging.shutdown()

    last_words = threading.Thread(target=say, daemon=True)
    last_words.start()
    last_words.join(FLUSH_S)
    os._exit(0)
