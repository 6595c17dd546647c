"""When a gateway may go on, and when another one may take its ids: lives, and the proof that one is over. Pure.

A gateway writes into a node of its own again and again (``/gateways/leases/LIFE``), and is *sure* of what it holds for
a while after it began to write, if that write succeeded. Another gateway that has seen the node unchanged for longer
than that deletes it, on the condition that it is still unchanged. Then the first one is not sure any more, and never
will be under that life: its last write that succeeded was begun before it was seen, and another one can not succeed.

::

    holder   write v ........ sure ........|
    other         sees v ..... still v, for longer than anybody is sure ..| deletes v
    holder                                      (paused)                          write fails: another life

Nobody's clock is compared with another's; they only have to run at about the same rate (:data:`MARGIN`). Where the node
is gone the life is over, too, however it went: by such a deletion, with the holder's session, of which the time-out is
twice as long, or because the holder has ended.
"""

from __future__ import annotations

from typing import Final

SURE_SHARE: Final = 0.5
"""For which part of its session's time-out a gateway is sure. ZooKeeper's leader hears of a follower's sessions as late
as after a quarter of the shortest time-out that is possible, so a session outlives this."""
MARGIN: Final = 0.1
"""By how much longer others wait, of the same: what clocks may differ in their rates, and more."""
WRITES: Final = 4
"""How often a gateway writes while it is sure."""


class Life:
    """A gateway's side: until when it is sure."""

    def __init__(self, sure_s: float) -> None:
        self._sure_s = sure_s
        self._until_s = float("-inf")

    def written(self, begun_s: float) -> None:
        """Note that a write has succeeded which was begun at this time, in monotonic seconds."""
        self._until_s = max(self._until_s, begun_s + self._sure_s)

    def is_sure(self, now_s: float) -> bool:
        """Return whether nobody can have proved that it is over."""
        return now_s < self._until_s


class Witness:
    """Another gateway's side: for how long it has seen the node of a life unchanged."""

    def __init__(self, sure_s: float) -> None:
        self._wait_s = sure_s * (1 + MARGIN)
        self._version: int | None = None
        self._since_s = 0.0

    def is_over(self, version: int, now_s: float) -> bool:
        """Note the version that was read, after which ``now_s`` was; return whether that proves the life to be over.

        What is done then has to depend on the version, as a deletion on its condition does.
        """
        if version != self._version:
            self._version, self._since_s = version, now_s
        return now_s - self._since_s > self._wait_s
