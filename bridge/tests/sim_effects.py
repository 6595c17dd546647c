"""Driver of procedures of effects in simulations, where each effect has a fate of its own.

An effect is done, or refused, or has to wait; the process that asks for it may stand still before it, die before or
after it, or be fenced, which ends its procedure. Procedures are those of leaders, gateways and writers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from rollbridge.base.effects import AnyEffect, UnderWay

T = TypeVar("T")
Turns = Generator[None, None, T]
"""What yields wherever others may act, or the process be left."""


class Blocked(Exception):
    """An effect has to wait, and nothing of it is done; it is asked for again in the next turn."""


class Driven(UnderWay[T]):
    """A procedure that a simulated process carries out."""

    def turns(
        self,
        carry_out: Callable[[AnyEffect], Any],
        *,
        refusals: tuple[type[Exception], ...] = (),
        live_on: Callable[[str], None] = lambda _: None,
    ) -> Turns[T]:
        """Carry out an effect in each turn; yield before each of them, and return the procedure's result.

        Args:
            carry_out: Returns an effect's result, or yields within it and returns the result then. The process is
                fenced, and its procedure over, by whatever else it raises.
            refusals: Faults of effects that the procedure is told.
            live_on: Called with "before" or "after" and the effect's name; the process dies by what it raises.
        """
        while self.look_ahead() is not None:
            yield
            effect = self.effect
            assert effect is not None
            name = type(effect).__name__
            live_on(f"before {name}")
            try:
                result = carry_out(effect)
                self.reply((yield from result) if isinstance(result, Generator) else result)
            except Blocked:
                continue
            except refusals as fault:
                self.refuse(fault)
            live_on(f"after {name}")
        return self.result
