"""Errors cross processes: each class of ours, in every package, comes back from pickle and copy as it was."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import pytest
from kio.schema.errors import ErrorCode

import rollbridge
import rollbridge_coordinator
import rollbridge_devcluster
import rollbridge_gateway
import rollbridge_schemas
from rollbridge.base.sn import ANY, EMPTY, Token
from rollbridge.errors import CasWriteError, TransactionAbortedError, TransactionRefusedError
from rollbridge.kafka.errors import Meaning
from rollbridge_coordinator.core.effects import ReadNodes
from rollbridge_gateway.producer.table import KafkaFault, Step

PACKAGES = (rollbridge_schemas, rollbridge, rollbridge_coordinator, rollbridge_gateway, rollbridge_devcluster)
SAMPLES: dict[str, object] = {
    "str": "some words",
    "str | None": "some words",
    "int": 7,
    "int | None": 7,
    "bool": True,
    "bytes | None": b"\xff",
    "Iterable[str]": ("one", "another"),
    "Sequence[int]": (1, 2),
    "Mapping[str, str]": {"a": "b"},
    "Mapping[str, tuple[str, str]]": {"a": ("b", "c")},
    "SN": EMPTY,
    "Token": Token(bytes(16), b"key", ANY),
    "Partition": ("orders", 3),
    "ErrorCode": ErrorCode.not_controller,
    "Meaning": next(iter(Meaning)),
    "AnyEffect": ReadNodes(["/a"]),
    "KafkaFault": KafkaFault.GAP,
    "KafkaFault | Step": Step.BEGIN,
    "object": "what programs read",
}
"""An argument of each type that a constructor takes; a new type needs one here."""


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def error_classes() -> list[type[BaseException]]:
    own = tuple(package.__name__ for package in PACKAGES)
    every = (item for module in modules() for item in vars(module).values() if inspect.isclass(item))
    found = {item for item in every if issubclass(item, BaseException) and item.__module__.startswith(own)}
    return sorted(found, key=lambda item: (item.__module__, item.__name__))


def made(kind: type[BaseException]) -> BaseException:
    """An error of this class, by its own constructor."""
    if not inspect.isfunction(kind.__init__):
        return kind("some words")
    given, named = [], {}
    for item in inspect.signature(kind).parameters.values():
        value = SAMPLES[item.annotation]
        if item.kind in (item.KEYWORD_ONLY, item.VAR_KEYWORD):
            named[item.name] = value
        else:
            given.append(value)
    return kind(*given, **named)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
@pytest.mark.parametrize(
    "copied",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deep"],
)
def test_every_error_comes_back_as_it_was(
    kind: type[BaseException], copied: Callable[[BaseException], BaseException]
) -> None:
    error = made(kind)
    error.add_note("a note of whoever handled it")
    again = copied(error)
    assert type(again) is kind
    assert again is not error
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_what_a_leader_has_seen_of_a_transaction_comes_back_with_its_error() -> None:
    error = TransactionAbortedError("it is aborted", transaction="1", reason="admin")
    error.tell(["one", "two"])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.events, again.reason) == (str(error), ("one", "two"), "admin")


def refuse(kind: type[BaseException]) -> None:
    raise made(kind)


def test_an_error_of_a_worker_process_reaches_who_waits_for_it() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(CasWriteError) as refused:
            pool.submit(refuse, CasWriteError).result(60)
        assert (refused.value.expected, refused.value.actual, refused.value.status_code) == (EMPTY, EMPTY, 525)
        with pytest.raises(TransactionRefusedError, match="some words"):
            pool.submit(refuse, TransactionRefusedError).result(60)
