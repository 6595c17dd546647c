"""The checker of histories must find what is wrong, and nothing else: histories made by hand, and simulated ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from integration_tests.histories import ANY, EMPTY, FOREVER, Answer, Look, Operation, Stored, Write, find_fault


def ok(
    value: str, expected: int, position: int, asked: int, answered: int, *, key: str = "a", by_key: bool = False
) -> Write:
    return Write(value, key, by_key, expected, asked, answered, Answer.OK, position)


def refused(
    value: str, expected: int, actual: int, asked: int, answered: int, *, key: str = "a", by_key: bool = False
) -> Write:
    return Write(value, key, by_key, expected, asked, answered, Answer.REFUSED, None, actual)


def unknown(value: str, expected: int, asked: int) -> Write:
    return Write(value, "a", False, expected, asked, FOREVER, Answer.UNKNOWN)


def stored(*records: tuple[int, str]) -> list[Stored]:
    return [Stored(position, "a", value) for position, value in records]


GOOD: dict[str, tuple[list[Operation], list[Stored]]] = {
    "nothing": ([], []),
    "one after the other": ([ok("x", EMPTY, 0, 1, 2), ok("y", 0, 2, 3, 4)], stored((0, "x"), (2, "y"))),
    "two at once, one refused": ([ok("x", EMPTY, 0, 1, 5), refused("y", EMPTY, 0, 2, 4)], stored((0, "x"))),
    "answered before the one it saw": ([ok("x", EMPTY, 0, 1, 9), Look(None, 0, 2, 3)], stored((0, "x"))),
    "looked before and after": (
        [Look(None, EMPTY, 0, 3), ok("x", EMPTY, 0, 1, 4), Look(None, 0, 2, 5)],
        stored((0, "x")),
    ),
    "unknown and written": ([unknown("x", EMPTY, 1), ok("y", 0, 2, 3, 4)], stored((0, "x"), (2, "y"))),
    "unknown and not written": ([unknown("x", EMPTY, 1), ok("y", EMPTY, 0, 3, 4)], stored((0, "y"))),
    "unknown takes effect late": (
        [unknown("x", 0, 1), ok("y", EMPTY, 0, 3, 4), Look(None, 0, 5, 6)],
        stored((0, "y"), (2, "x")),
    ),
    "another key in between": (
        [ok("x", EMPTY, 0, 1, 2), ok("y", ANY, 2, 3, 4, key="b"), ok("z", 0, 4, 5, 6, by_key=True)],
        [Stored(0, "a", "x"), Stored(2, "b", "y"), Stored(4, "a", "z")],
    ),
    "refused beyond the end": ([refused("x", 7, EMPTY, 1, 2, by_key=True)], []),
    "refused by a record that is older than the last": (
        [
            ok("x", EMPTY, 0, 1, 2),
            ok("y", ANY, 2, 3, 4, key="b"),
            refused("z", EMPTY, 0, 5, 6, by_key=True),
            Look("b", 2, 5, 6),
        ],
        [Stored(0, "a", "x"), Stored(2, "b", "y")],
    ),
}

BAD: dict[str, tuple[list[Operation], list[Stored]]] = {
    "lost": ([ok("x", EMPTY, 0, 1, 2)], []),
    "refused but written": ([refused("x", EMPTY, EMPTY, 1, 2)], stored((0, "x"))),
    "never written": ([], stored((0, "x"))),
    "doubled": ([ok("x", EMPTY, 0, 1, 2)], stored((0, "x"), (2, "x"))),
    "elsewhere": ([ok("x", EMPTY, 0, 1, 2)], stored((4, "x"))),
    "two winners": ([ok("x", EMPTY, 0, 1, 5), ok("y", EMPTY, 2, 2, 4)], stored((0, "x"), (2, "y"))),
    "lost update": (
        [ok("x", EMPTY, 0, 1, 2), ok("y", 0, 2, 3, 6), ok("z", 0, 4, 3, 6)],
        stored((0, "x"), (2, "y"), (4, "z")),
    ),
    "stale look": ([ok("x", EMPTY, 0, 1, 2), Look(None, EMPTY, 3, 4)], stored((0, "x"))),
    "look from the future": ([Look(None, 0, 1, 2), ok("x", EMPTY, 0, 3, 4)], stored((0, "x"))),
    "looks go backwards": (
        [ok("x", EMPTY, 0, 1, 9), Look(None, 0, 2, 3), Look(None, EMPTY, 4, 5)],
        stored((0, "x")),
    ),
    "refused without a reason": ([ok("x", EMPTY, 0, 1, 2), refused("y", 0, 0, 3, 4)], stored((0, "x"))),
    "refused by what came later": ([refused("y", EMPTY, 0, 1, 2), ok("x", EMPTY, 0, 3, 4)], stored((0, "x"))),
    "order of two that did not overlap": (
        [ok("x", ANY, 2, 1, 2), ok("y", ANY, 0, 3, 4)],
        stored((0, "y"), (2, "x")),
    ),
    "same key in between": (
        [ok("x", EMPTY, 0, 1, 2), ok("y", ANY, 2, 3, 4), ok("z", 0, 4, 5, 6, by_key=True)],
        stored((0, "x"), (2, "y"), (4, "z")),
    ),
    "failed but written": (
        [replace(ok("x", EMPTY, 0, 1, 2), answer=Answer.FAILED, position=None)],
        stored((0, "x")),
    ),
    "unknown wrote although its condition never held": ([unknown("x", 5, 1)], stored((0, "x"))),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    assert find_fault(*GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_found(name: str) -> None:
    assert find_fault(*BAD[name]) is not None


class Simulated:
    """Clients of a perfect log: each operation takes effect at one random instant of its interval."""

    def __init__(self, seed: int, clients: int = 5, each: int = 40) -> None:
        self._random = random.Random(seed)
        self.log: list[Stored] = []
        self.operations: list[Operation] = []
        times = []
        for client in range(clients):
            now = self._random.randrange(20)
            for number in range(each):
                asked = now
                effect = asked + self._random.randrange(1, 40)
                answered = effect + self._random.randrange(1, 40)
                now = answered + self._random.randrange(1, 20)
                times.append((effect, asked, answered, f"{client}-{number}"))
        for _, asked, answered, name in sorted(times):
            self._act(asked, answered, name)

    def _act(self, asked: int, answered: int, name: str) -> None:
        key = self._random.choice("abc")
        of_key = [record.position for record in self.log if record.key == key]
        last = self.log[-1].position if self.log else EMPTY
        last_of_key = of_key[-1] if of_key else EMPTY
        if self._random.random() < 0.2:
            by_key = self._random.random() < 0.5
            self.operations.append(Look(key if by_key else None, last_of_key if by_key else last, asked, answered))
            return
        by_key = self._random.random() < 0.5
        expected = self._random.choice([ANY, EMPTY, last, last_of_key, *[record.position for record in self.log[-3:]]])
        if expected == ANY:
            good = True
        elif by_key:
            good = last_of_key == EMPTY if expected == EMPTY else last_of_key <= expected <= last
        else:
            good = last == expected
        lost = self._random.random() < 0.1
        answer = Answer.UNKNOWN if lost else Answer.OK if good else Answer.REFUSED
        position = last + self._random.randrange(1, 4)
        if good:
            self.log.append(Stored(position, key, name))
        self.operations.append(
            Write(
                name,
                key,
                by_key,
                expected,
                asked,
                FOREVER if lost else answered,
                answer,
                position if good and not lost else None,
                None if good or lost else last_of_key if by_key else last,
            )
        )


@pytest.mark.parametrize("seed", range(30))
def test_simulated_histories_pass_and_their_corruptions_are_found(seed: int) -> None:
    world = Simulated(seed)
    operations, log = world.operations, world.log
    assert find_fault(operations, log) is None
    assert find_fault(operations, log[:-1] if _is_ok(operations, log[-1]) else [*log, log[0]]) is not None
    swapped = [replace(log[0], position=log[1].position), *log[1:]]
    swapped[1] = replace(log[1], position=log[0].position)
    swapped[0], swapped[1] = swapped[1], swapped[0]
    assert find_fault(operations, swapped) is not None
    choice = random.Random(seed)
    refusals = [item for item in operations if isinstance(item, Write) and item.answer is Answer.REFUSED]
    wrong = choice.choice(refusals)
    turned = [replace(item, actual=1_000_000) if item is wrong else item for item in operations]
    assert find_fault(turned, log) is not None


def _is_ok(operations: list[Operation], record: Stored) -> bool:
    return any(
        isinstance(item, Write) and item.value == record.value and item.answer is Answer.OK for item in operations
    )
