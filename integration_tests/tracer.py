"""Calls of the product's functions, thread by thread, as the interpreter tells its profilers."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NamedTuple

_YIELD: Final = dis.opmap["YIELD_VALUE"]
_RESUME_KIND: Final = 0b11
"""Bits of a RESUME instruction's argument that say what is resumed; 0 is the beginning of a function."""
_EXPRESSIONS: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Names of code that newer interpreters have no frames for."""
_GENERATED: Final = "<string>"
"""File of what dataclasses and named tuples generate."""


class Step(NamedTuple):
    """A function is entered or left."""

    frame: int
    module: str
    function: str
    enters: bool
    is_edge: bool
    """True if the function is called or ends, False if a generator resumes or yields."""


@dataclass(frozen=True)
class Trip:
    """What a piece of work takes; ``returns`` is how often it comes back to a module that it had left."""

    calls: int
    modules: frozenset[str]
    returns: int


class Tracer:
    """Steps of the threads that are started while it is installed, when something is recorded."""

    def __init__(self, packages: Collection[str]) -> None:
        """Trace the functions of these packages, by their top-level names."""
        self._packages = frozenset(packages)
        self._threads: dict[str, list[Step]] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace this thread, and those that are started meanwhile."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[dict[str, list[Step]]]:
        """Give the steps of each thread, by its name, that are done meanwhile."""
        found: dict[str, list[Step]] = {}
        self._threads = found
        try:
            yield found
        finally:
            self._threads = None

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        threads, code = self._threads, frame.f_code
        if threads is None or event not in ("call", "return"):
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in self._packages:
            return
        if code.co_name in _EXPRESSIONS or code.co_filename == _GENERATED:
            return
        operation, argument = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        enters = event == "call"
        is_edge = argument & _RESUME_KIND == 0 if enters else operation != _YIELD
        step = Step(id(frame), module, code.co_qualname, enters, is_edge)
        threads.setdefault(threading.current_thread().name, []).append(step)


def within(steps: Sequence[Step], function: str) -> list[Sequence[Step]]:
    """Return the steps of each call of a function that has ended, by its name in its class; the outermost calls."""
    found: list[Sequence[Step]] = []
    begun: tuple[int, int] | None = None
    for position, step in enumerate(steps):
        if not step.is_edge:
            continue
        if begun is None and step.enters and step.function == function:
            begun = position, step.frame
        elif begun is not None and not step.enters and step.frame == begun[1]:
            found.append(steps[begun[0] : position + 1])
            begun = None
    return found


def trip_of(steps: Sequence[Step]) -> Trip:
    """Count the calls, and the modules that the work comes through one after the other."""
    stack: list[str] = []
    modules: list[str] = []
    for step in steps:
        if step.enters:
            stack.append(step.module)
        elif stack:
            stack.pop()
        if stack and modules[-1:] != stack[-1:]:
            modules.append(stack[-1])
    calls = sum(step.enters and step.is_edge for step in steps)
    return Trip(calls, frozenset(modules), len(modules) - len(set(modules)))
