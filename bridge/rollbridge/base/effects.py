"""Effects: what a procedure asks of Kafka, ZooKeeper or a client, as values, each with the type of its result. Pure.

A procedure is a generator that yields effects and is sent their results; it does no I/O itself. It says ``yield from``
instead of ``yield``: that is the same, and tells mypy the type of the result, because an effect is a generator of one
step (:meth:`Effect.__iter__`)::

    ends = yield from Seal(partitions)  # Mapping[Partition, int]

The runner of a procedure carries out one effect after the other: on real servers, or in the memory of a simulation. A
class is an effect's only declaration: its fields are the request, the argument of ``Effect`` is the result, and its
docstring says what is true when the result arrives. A crash may happen between any two effects, and between an effect
and its result. A refusal is thrown in, in place of the result.

Leaders (:mod:`rollbridge_coordinator.core.effects`), gateways (:mod:`rollbridge_gateway.producer.procedures`) and
readers of a log's end (:mod:`rollbridge.kafka.segment_tail`) are written like this.

Do not mutate an effect's arguments after yielding it: sequences and mappings are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Effect(Generic[T]):
    """Request with a result of type ``T``; each subclass is one kind of effect."""

    __slots__ = ()

    def __iter__(self) -> Generator[AnyEffect, Any, T]:
        """Yield the effect itself and return its result, for ``yield from`` in a procedure."""
        result: T = yield self
        return result


AnyEffect = Effect[Any]

Steps = Generator[AnyEffect, Any, T]
"""A procedure that returns a ``T``."""


class UnderWay(Generic[T]):
    """A procedure that is being carried out, effect by effect; it may be left between any two.

    Attributes:
        effect: The effect to carry out next, once :meth:`look_ahead` has found it; None before, and at the end.
        result: What the procedure has returned, once it has ended.
    """

    __slots__ = ("_answer", "_go_on", "effect", "has_ended", "procedure", "result")

    def __init__(self, procedure: Steps[T]) -> None:
        self.procedure = procedure
        self.effect: AnyEffect | None = None
        self.result: T
        self.has_ended = False
        self._go_on: Callable[[Any], AnyEffect] = procedure.send
        self._answer: Any = None

    def look_ahead(self) -> AnyEffect | None:
        """Return the effect to carry out next; None at the end. Raises what the procedure does not expect."""
        if self.effect is None and not self.has_ended:
            try:
                self.effect = self._go_on(self._answer)
            except StopIteration as end:
                self.result, self.has_ended = end.value, True
            finally:
                self._answer = None  # a fault that is raised again would hold itself, by its traceback
        return self.effect

    def reply(self, result: Any) -> None:
        self.effect, self._answer, self._go_on = None, result, self.procedure.send

    def refuse(self, fault: Exception) -> None:
        """Throw a fault into the procedure, in place of a result."""
        self.effect, self._answer, self._go_on = None, fault, self.procedure.throw


def run(procedure: Steps[T], carry_out: Callable[[AnyEffect], Any]) -> T:
    """Carry out the effects of a procedure; return its result.

    What carrying out raises is thrown into the procedure, and raised by it unless it expects that.
    """
    under_way = UnderWay(procedure)
    while (effect := under_way.look_ahead()) is not None:
        try:
            under_way.reply(carry_out(effect))
        except Exception as fault:
            under_way.refuse(fault)
    return under_way.result
