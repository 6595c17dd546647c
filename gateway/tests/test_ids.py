"""Nobody takes what another gateway is still sure of, whatever stands still for how long; mutants do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from rollbridge_gateway.producer import ids
from rollbridge_gateway.producer.ids import MARGIN, Life, Witness

SURE_S = 3.0
ROUNDS = 400


@dataclass
class Node:
    """A lease in ZooKeeper: its version, None once it is gone."""

    version: int | None = 0

    def write(self) -> bool:
        if self.version is None:
            return False
        self.version += 1
        return True

    def delete(self, version: int) -> bool:
        """On the condition of its version."""
        if self.version != version:
            return False
        self.version = None
        return True


class Hasty(Witness):
    """Waits less than others are sure."""

    def __init__(self, sure_s: float) -> None:
        super().__init__(sure_s / 2)


class Forgetful(Witness):
    """Goes on counting when the version has changed."""

    def is_over(self, version: int, now_s: float) -> bool:
        is_first = self._version is None
        self._version = version
        if is_first:
            self._since_s = now_s
        return now_s - self._since_s > self._wait_s


class Careless(Node):
    """Is deleted whatever its version."""

    def delete(self, version: int) -> bool:
        was, self.version = self.version, None
        return was is not None


class Late(Life):
    """Counts from when the answer came."""

    now: Callable[[], float]

    def written(self, begun_s: float) -> None:
        super().written(self.now())


@dataclass
class Bench:
    """Two gateways on one clock, and messages that take their time; both stand still now and then."""

    dice: random.Random
    node: Node
    life: Life
    witness: Witness
    now_s: float = 0.0
    taken_s: float | None = None
    overlaps: list[float] = field(default_factory=list)
    sure: int = 0

    def run(self) -> None:
        """The holder writes again and again, the other one looks; both by their own pace, each step takes its time."""
        agendas = {"holder": self.holder(), "other": self.other()}
        due = dict.fromkeys(agendas, 0.0)
        while due and self.now_s < 60.0:
            name = min(due, key=lambda item: due[item])
            self.now_s = due[name]
            self.look()
            try:
                due[name] = self.now_s + next(agendas[name])
            except StopIteration:
                del due[name]
            self.look()

    def look(self) -> None:
        is_sure = self.life.is_sure(self.now_s)
        self.sure += is_sure
        if self.taken_s is not None and is_sure:
            self.overlaps.append(self.now_s)

    def pause(self) -> float:
        return self.dice.choice((0.001, 0.01, 0.1, 0.4, 0.4, 0.4, 0.7, 2.0, 3.0, 5.0))

    def holder(self) -> Iterator[float]:
        while True:
            begun_s = self.now_s
            yield self.pause()
            if not self.node.write():
                return
            yield self.pause()
            self.life.written(begun_s)
            yield self.dice.choice((0.4, 0.4, self.pause()))

    def other(self) -> Iterator[float]:
        while True:
            seen = self.node.version
            yield self.pause()  # what was read is old by now
            if seen is None:
                return
            if self.witness.is_over(seen, self.now_s):
                yield self.pause()
                if self.node.delete(seen):
                    self.taken_s = self.now_s
                    return
            yield 0.4


def benches(node: type[Node] = Node, life: type[Life] = Life, witness: type[Witness] = Witness) -> list[Bench]:
    found = []
    for seed in range(ROUNDS):
        bench = Bench(random.Random(seed), node(), life(SURE_S), witness(SURE_S))
        if isinstance(bench.life, Late):
            bench.life.now = lambda bench=bench: bench.now_s  # type: ignore[misc]
        bench.run()
        found.append(bench)
    return found


def test_nobody_takes_what_another_one_is_sure_of() -> None:
    found = benches()
    assert not [bench.overlaps for bench in found if bench.overlaps]
    assert sum(bench.taken_s is not None for bench in found) > ROUNDS // 4, "many were taken"
    assert sum(bench.taken_s is None for bench in found) > 0
    assert sum(bench.sure > 0 for bench in found) > ROUNDS // 2


@pytest.mark.parametrize(
    "mutant", [{"witness": Hasty}, {"witness": Forgetful}, {"node": Careless}, {"life": Late}], ids=str
)
def test_mutants_do(mutant: dict[str, type]) -> None:
    assert [bench for bench in benches(**mutant) if bench.overlaps]


def test_a_gateway_is_sure_for_as_long_as_it_says_and_a_witness_waits_longer() -> None:
    life, witness = Life(SURE_S), Witness(SURE_S)
    assert not life.is_sure(0.0)
    life.written(10.0)
    life.written(9.0)
    assert life.is_sure(12.999)
    assert not life.is_sure(13.0)
    assert not witness.is_over(7, 10.0)
    assert not witness.is_over(7, 9.999 + SURE_S * (1 + MARGIN))
    assert witness.is_over(7, 10.001 + SURE_S * (1 + MARGIN))
    assert not witness.is_over(8, 99.0)
    assert ids.SURE_SHARE <= 0.5, "a session that has ended is over for sure"
