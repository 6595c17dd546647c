"""Effects: each is declared once, has one method that carries it out, and gives its procedure what it is sent."""

from __future__ import annotations

import inspect

import pytest

from rollbridge.base.effects import AnyEffect, Effect, Steps
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.interpreter import HANDLERS
from rollbridge_coordinator.core.metric_samples import EFFECTS

DECLARED: set[type[AnyEffect]] = {
    kind for kind in vars(fx).values() if inspect.isclass(kind) and issubclass(kind, Effect) and kind is not Effect
}


def test_the_interpreter_carries_out_each_effect_that_there_is() -> None:
    assert set(HANDLERS) == DECLARED
    assert [kind.__name__ for kind in sorted(DECLARED, key=lambda kind: kind.__name__)] == list(EFFECTS)


@pytest.mark.parametrize("kind", sorted(DECLARED, key=str))
def test_each_method_is_entered_for_the_effect_that_it_takes(kind: type[AnyEffect]) -> None:
    _, effect = inspect.signature(HANDLERS[kind]).parameters.values()
    assert effect.annotation == f"fx.{kind.__name__}"


def test_a_procedure_yields_the_effect_itself_and_goes_on_with_what_it_is_sent() -> None:
    def procedure() -> Steps[int]:
        ends = yield from fx.Seal([("t", 0)])
        return ends["t", 0] + (yield from fx.Now())

    steps = procedure()
    assert next(steps) == fx.Seal([("t", 0)])
    assert steps.send({("t", 0): 3}) == fx.Now()
    with pytest.raises(StopIteration) as end:
        steps.send(4)
    assert end.value.value == 7


def test_a_refusal_is_raised_where_the_effect_was_asked_for() -> None:
    def procedure() -> Steps[str]:
        try:
            yield from fx.CommitRound()
        except fx.EffectRefusedError as refused:
            return refused.by
        return ""

    steps = procedure()
    with pytest.raises(StopIteration) as end:
        steps.throw(fx.EffectRefusedError(next(steps), "no", code="INVALID_TXN_STATE"))
    assert end.value.value == "Kafka"
