"""Options: key, type, default, range and what it does, in one place each.

A component's settings are a frozen dataclass, and its fields are the rows of a table::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class WriterOptions:
        linger_s: float = option(0.005, low=0, high=900)
        \"\"\"How long a record waits for others to share its batch.\"\"\"
        block_s: float = 60.0
        \"\"\"How long a writer waits for room.\"\"\"

The key is the name of the field, numbers are positive, and text is anything, unless :func:`option` says otherwise.
:func:`faults_of` checks settings that were made, :func:`values_of` makes the values of others from text or whatever a
configuration holds, and ``docs/generate.py`` writes the tables of the pages. Faults are named by their keys and
gathered, so that all are told at once; a secret shows neither in ``repr`` nor in a fault. Pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from rollbridge.base.errors import InvalidRequestError

logger = logging.getLogger(__name__)

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_FLAGS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PLAIN: Final = {"str": "text", "int": "a number", "float": "a number", "bool": "true or false"}
"""Types whose values are parsed here, and what a wrong one is not."""
_WRONG: Final = (ValueError, InvalidRequestError)
_METADATA: Final = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of a table.

    Attributes:
        name: The field of the settings.
        key: Its name for users.
        aliases: Other names of it; the key wins.
        former: Its names until the last release: taken with a warning.
        kind: The type of the value.
        default: Value if it is not given; ``MISSING`` if it is computed, or required.
        needed: True if it is required.
        low, high: Its range. A number without ``low`` must be positive.
        choices: Possible words, in any case, and the value of each; empty if any value is allowed.
        why: Reason why others are refused.
        convert: Makes the value from what was given; raises ValueError or InvalidRequestError with the fault.
        check: Checks the value; raises as ``convert`` does.
        secret: True if the value is never shown.
    """

    name: str = ""
    key: str = ""
    aliases: Sequence[str] = ()
    former: Sequence[str] = ()
    kind: str = ""
    default: Any = None
    needed: bool = False
    low: float | None = None
    high: float | None = None
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    why: str = ""
    convert: Callable[[Any], Any] | None = None
    check: Callable[[Any], object] | None = None
    secret: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The key, and its other names."""
        return self.key, *self.aliases

    @property
    def is_number(self) -> bool:
        """Return whether values have a range."""
        return self.kind in ("int", "float") and not self.choices

    def parse(self, given: Any) -> Any:
        """Parse and check ``given``; raise ValueError or InvalidRequestError."""
        value = self.convert(given) if self.convert is not None else self._parse_plain(given)
        self.check_range(value)
        return value

    def check_range(self, value: Any) -> None:
        """Raise ValueError or InvalidRequestError if the value is out of its range."""
        if self.choices and value not in self.choices.values():
            raise ValueError(self._no_choice(value))
        if self.is_number:
            if self.low is not None and self.high is not None and not self.low <= value <= self.high:
                raise ValueError(f"{value} is not in {self.low}..{self.high}")
            if self.low is None and value <= 0:
                raise ValueError(f"{value} is not positive")
            if self.low is not None and value < self.low:
                raise ValueError(f"{value} is less than {self.low}")
            if self.high is not None and value > self.high:
                raise ValueError(f"{value} is more than {self.high}")
        if self.check is not None:
            self.check(value)

    def named(self, fault: Exception) -> str:
        """Return what is wrong with the value, behind the key; of a secret only that something is."""
        return f"{self.key}: {'is not possible' if self.secret else fault}"

    def _parse_plain(self, given: Any) -> Any:
        text = str(given)
        if self.choices:
            known = {word.lower(): value for word, value in self.choices.items()}
            if text.lower() not in known:
                raise ValueError(self._no_choice(given))
            return known[text.lower()]
        try:
            match self.kind:
                case "bool":
                    return _FLAGS[text.lower()]
                case "int":
                    number = int(given if isinstance(given, float) and given.is_integer() else text)
                    if not self._counts_from or number >= self._counts_from[0]:
                        return number
                case "float" if math.isfinite(value := float(text)):
                    return value
                case "str":
                    return text
        except (KeyError, ValueError):
            pass
        if self._counts_from:
            raise ValueError(f"{given!r} is not a whole number from {self.low} on")
        raise ValueError(f"{given!r} is not {_PLAIN[self.kind]}")

    @property
    def _counts_from(self) -> tuple[float, ...]:
        return (self.low,) if self.kind == "int" and self.low is not None and self.high is None else ()

    def _no_choice(self, given: Any) -> str:
        words = ", ".join(word for word in self.choices if word)
        return f"{given!r} is not possible: {self.why}" if self.why else f"{given!r} is not one of {words}"


def option(
    default: Any = MISSING, *, choices: Mapping[str, Any] | Sequence[str] = (), secret: bool = False, **more: Any
) -> Any:
    """Return a field of settings with the rest of its row; name, type and default come from the field.

    Args:
        default: Value if it is not given, or a function that makes it. Without, the option is required.
        choices: Possible words, with the value of each where it differs.
        secret: True to leave it out of ``repr``.
        **more: Other fields of :class:`Option`.
    """
    meant = choices if isinstance(choices, Mapping) else {word: word for word in choices}
    row = Option(choices=meant, secret=secret, **more)
    made: dict[str, Any] = {"default_factory" if callable(default) and default is not MISSING else "default": default}
    return dataclasses.field(**made, repr=not secret, metadata={_METADATA: row})


@cache
def table_of(settings: type) -> tuple[Option, ...]:
    """Return the rows of a class of settings, in order: its fields, but for those that hold other settings."""
    rows = []
    for item in dataclasses.fields(settings):
        kind = str(item.type).removesuffix(" | None")
        row = item.metadata.get(_METADATA, Option() if kind in _PLAIN else None)
        if row is not None:
            needed = item.default is MISSING and item.default_factory is MISSING
            rows.append(
                dataclasses.replace(
                    row, name=item.name, key=row.key or item.name, kind=kind, default=item.default, needed=needed
                )
            )
    return tuple(rows)


def keys_of(*settings: type) -> frozenset[str]:
    """Return all keys of several classes of settings, other names included."""
    return frozenset(key for kind in settings for row in table_of(kind) for key in row.keys)


def constants_of(settings: type) -> dict[str, Any]:
    """Return the values of a class of settings that cannot be set: its class variables, by name."""
    hints = vars(settings).get("__annotations__", {})
    return {name: getattr(settings, name) for name, hint in hints.items() if str(hint).startswith("ClassVar[")}


def faults_of(*settings: Any) -> Iterator[str]:
    """Yield what is out of its range, each with its key."""
    for part in settings:
        kind: Any = type(part)
        for row in table_of(kind):
            if (value := getattr(part, row.name)) is None:
                continue
            try:
                row.check_range(value)
            except _WRONG as fault:
                yield row.named(fault)


def values_of(settings: type, given: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Return the values that a configuration gives, by field; what is missing or wrong has its default.

    Args:
        settings: The class of settings.
        given: The configuration by key; what is ``None`` counts as not given. Other keys are left alone.
        faults: Takes what is wrong, each with its key. What is needed and has no value then is ``None``.
    """
    values: dict[str, Any] = {}
    for row in table_of(settings):
        found = next((value for key in row.keys if (value := given.get(key)) is not None), None)
        if row.needed:
            values[row.name] = None
        if found is None:
            faults += [f"{row.key}: is missing"] if row.needed else []
            continue
        try:
            values[row.name] = row.parse(found)
        except _WRONG as fault:
            faults.append(row.named(fault))
    return values


def by_present_names(given: Mapping[str, Any], source: str, faults: list[str], *settings: type) -> dict[str, Any]:
    """Return what one source gives, with a name of the last release replaced, and a warning in the log.

    Args:
        given: The configuration by key.
        source: Where it is from, for warnings and faults.
        faults: Takes the options that are given by both names.
        settings: All classes of settings that the source may give.
    """
    found = dict(given)
    for row in (row for kind in settings for row in table_of(kind)):
        for former in row.former:
            if found.get(former) is None:
                continue
            value = found.pop(former)
            if found.get(row.key) is not None:
                faults.append(
                    f"{former}: is the former name of {row.key}, and the {source} gives both; give {row.key} alone"
                )
                continue
            found[row.key] = value
            logger.warning(
                "option.renamed former=%s option=%s source=%s: the next release does not take the former name",
                former,
                row.key,
                source,
            )
    return found


_OF_KUBERNETES: Final = re.compile(r"(?:^|_)(?:SERVICE_(?:HOST|PORT)|PORT)(?:_\w+)?$")
"""Ends of the variables that Kubernetes sets in each container for each service, by its name."""


def unknown_variables(
    environ: Mapping[str, str], prefix: str, known: Collection[str], constants: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the variables with a prefix that are not known, as :func:`unknown` does; not Kubernetes' own."""
    found = [name for name, value in environ.items() if value and name.startswith(prefix)]
    return unknown(
        (name for name in found if not _OF_KUBERNETES.search(name.removeprefix(prefix))), known, constants=constants
    )


def unknown(
    given: Iterable[str],
    known: Collection[str],
    words: str = "is unknown",
    constants: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield unknown keys, each with the likely correction, or with the value that it always has."""
    for key in sorted(set(given) - set(known)):
        fixed = f"is no option, it is always {constants[key]}" if key in constants else ""
        yield f"{key}: {fixed or words + nearest(key, known)}"


def nearest(key: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question for the known key that looks most like this one; empty if none does. Case does not count."""
    by_case = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(key.lower(), by_case, n=1, cutoff=cutoff)
    return f"; did you mean {by_case[found[0]]}?" if found else ""


# Values other than plain text and numbers


def function(given: Any) -> Any:
    """Return what is given, if it can be called."""
    if not callable(given):
        raise ValueError("cannot be called")
    return given


def filled(text: str) -> None:
    """Raise ValueError if a text is empty."""
    if not text:
        raise ValueError("is empty")


def words(given: Any) -> tuple[str, ...]:
    """Return the words of a list, or of a text with commas between."""
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())
