"""Check arguments of public calls against their annotations before anything is done.

:func:`checked` decorates each class that users call. Calls made a million times a second check for themselves, with
:func:`as_bytes`, and only values of an unusual type.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import ArgumentError
from dataclasses import fields
from datetime import timedelta
from decimal import Decimal
from functools import cache, wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS, Parameter, isfunction, signature
from numbers import Integral, Real
from types import FunctionType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NewType,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from rollbridge.errors import InvalidRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_Buffer = bytearray | memoryview
NOT_BYTES: Final = (TypeError, ValueError, AttributeError, ArgumentError)
"""Exceptions raised when a batch is built from a record that is no pair of bytes."""
_NOTHING: Final = object()
_TIME_MAX: Final = (1 << 63) - 1


def checked(but: Collection[str] = (), leave: Collection[str] = ()) -> Callable[[C], C]:
    """Make the public methods of a class raise TypeError for an argument that does not fit its annotation.

    Args:
        but: Methods that are left alone: they are called for each record, or by rollbridge itself.
        leave: Parameters of which the methods themselves say better what they must be.
    """

    def check(owner: C) -> C:
        for name, member in list(vars(owner).items()):
            if isfunction(member) and not name.startswith("_") and name not in but and _takes_any(member):
                setattr(owner, name, checked_call(member, leave))
        return owner

    return check


def _takes_any(method: FunctionType) -> bool:
    code = method.__code__
    return code.co_argcount + code.co_kwonlyargcount > 1 or bool(code.co_flags & (CO_VARARGS | CO_VARKEYWORDS))


def checked_call(function: Callable[P, T], leave: Collection[str] = ()) -> Callable[P, T]:
    """Return a function that checks its arguments; those that are buffers are passed on as bytes."""
    rules: CheckedParameters | None = None

    @wraps(function)
    def call(*args: Any, **options: Any) -> T:
        nonlocal rules
        if rules is None:
            rules = CheckedParameters(function, leave)
        for at, value in enumerate(args):
            rule = rules.positional[at] if at < len(rules.positional) else rules.rest
            if rule is not None and type(value) not in rule.exact and (fit := rule.take(value)) is not value:
                args = (*args[:at], fit, *args[at + 1 :])
        for name, value in options.items():
            rule = rules.named.get(name)
            if rule is not None and type(value) not in rule.exact:
                options[name] = rule.take(value)
        return function(*args, **options)

    return cast("Callable[P, T]", call)


def check_fields(instance: DataclassInstance) -> None:
    """Raise TypeError unless the fields of a dataclass fit their annotations."""
    hints = get_type_hints(type(instance))
    for field in fields(instance):
        CheckedParameter(field.name, hints[field.name]).take(getattr(instance, field.name))


class CheckedParameters:
    """Parameters of a function by position and name; the first one of a method takes anything."""

    def __init__(self, function: Callable[..., object], leave: Collection[str] = ()) -> None:
        hints = get_type_hints(function)
        self.positional: list[CheckedParameter | None] = []
        self.named: dict[str, CheckedParameter] = {}
        self.rest: CheckedParameter | None = None
        for name, parameter in signature(function).parameters.items():
            rule = CheckedParameter(name, hints[name]) if name in hints and name not in leave else None
            if parameter.kind is Parameter.VAR_POSITIONAL:
                self.rest = rule
            elif parameter.kind is not Parameter.VAR_KEYWORD:
                if parameter.kind is not Parameter.KEYWORD_ONLY:
                    self.positional.append(rule)
                if rule is not None:
                    self.named[name] = rule


class CheckedParameter:
    """Type and default of a parameter."""

    def __init__(self, name: str, hint: Any) -> None:
        self._name = name
        self._hints = _alternatives(hint)
        plain = {item for item in self._hints if isinstance(item, type) and get_origin(item) is None}
        self.exact: Final = frozenset(plain | {int} if float in plain else plain)
        """Types whose values need no second look."""

    @property
    def limits(self) -> bool:
        """Return whether some values are refused."""
        return not any(_fits(hint, _NOTHING) for hint in self._hints)

    def take(self, value: object) -> object:
        """Return the value, or what means the same: a buffer as bytes, a number as int or float, an iterable as a list.

        Raises:
            TypeError: It does not fit.
        """
        if any(_fits(hint, value) for hint in self._hints):
            return value
        for hint in self._hints:
            if (same := _converted(hint, value)) is not _NOTHING:
                return same
        raise TypeError(
            f"{self._name} must be {_described(self._hints)}, not {_given(value)}"
            f"{_remedy(self._name, value) if bytes in self._hints else ''}; nothing was done"
        )


INT_MAX: Final = (1 << 31) - 1


def check_ints(**numbers: int | Iterable[int] | None) -> None:
    """Check whole numbers, by their names, that are stored in 32 bits; what else they must be says who takes them.

    Raises:
        InvalidRequestError: One is more.
    """
    for name, given in numbers.items():
        for number in () if given is None else (given,) if isinstance(given, int) else given:
            if not -INT_MAX <= number <= INT_MAX:
                raise InvalidRequestError(f"{name} is {number:,}, more than 32 bits hold; nothing was written")


_PACKAGE: Final = __name__.partition(".")[0]


def renamed(former: str, name: str, given: T | None, value: T) -> T:
    """Return an argument that had another name in the last release, with a warning if it is given by that one.

    Raises:
        TypeError: It is given by both names, and they differ.
    """
    if given is None:
        return value
    if value and given != value:
        raise TypeError(
            f"{former} is the former name of {name}, and both are given; give {name} alone; nothing was done"
        )
    warn_renamed(former, name)
    return given


def warn_renamed(former: str, name: str) -> None:
    """Warn the caller of the package that it uses a name of the last release."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_back.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    told = f"{former} is called {name} now; the next release does not take it"
    warnings.warn(told, FutureWarning, stacklevel=level + 1)  # shown by default, in whatever module the call is


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


@cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without aliases."""
    if isinstance(hint, NewType):
        return _alternatives(hint.__supertype__)
    if get_origin(hint) in (Union, UnionType):
        return tuple(part for member in get_args(hint) for part in _alternatives(member))
    return (hint,)


def _fits(hint: Any, value: object) -> bool:
    """Return whether a value is what one alternative says; pairs within a collection are left to the callee."""
    origin, parts = _shape(hint)
    kind = origin or hint
    if kind is Literal:
        return isinstance(value, str)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # Any, a type variable
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, kind):
        return False
    if origin is None or not issubclass(kind, Iterable):
        return True
    if isinstance(value, str | bytes | _Buffer):
        return False
    if len(parts) == 1 and isinstance(value, Collection):
        return all(_fits_any(parts[0], item) for item in value)
    if len(parts) == 2 and isinstance(value, Mapping):
        return all(_fits_any(parts[0], key) and _fits_any(parts[1], item) for key, item in value.items())
    return True


def _fits_any(hint: Any, value: object) -> bool:
    hints = _alternatives(hint)
    return any(
        _shape(item)[0] is tuple or _fits(item, value) or _converted(item, value) is not _NOTHING for item in hints
    )


def _converted(hint: Any, value: object) -> object:
    """Return what means the same as a value, in the type of one alternative; ``_NOTHING`` if nothing does."""
    if hint is bytes:
        buffer = _buffer(value)
        return _NOTHING if buffer is None else buffer
    if isinstance(value, Integral) and hint is bool:
        return bool(value)
    if isinstance(value, bool):
        return _NOTHING
    if isinstance(value, Integral) and hint is int:
        return int(value)
    if isinstance(value, Real | Decimal) and hint is float:
        return float(value)
    kind = get_origin(hint)
    if isinstance(kind, type) and issubclass(list, kind) and isinstance(value, Iterable):
        whole = value if isinstance(value, str | bytes | _Buffer | Mapping) else list(value)
        return whole if _fits(hint, whole) else _NOTHING
    return _NOTHING


def _buffer(value: object) -> bytes | None:
    """Return the bytes of a buffer; None if the value is none."""
    try:
        return bytes(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        return None


def _described(hints: tuple[Any, ...]) -> str:
    if float in hints and timedelta in hints:
        seconds = "seconds as a number or a timedelta"
        return _either([seconds, *(_name(hint) for hint in hints if hint not in (float, timedelta))])
    return _either([_name(hint) for hint in hints])


def _either(names: list[str]) -> str:
    return " or ".join(dict.fromkeys(names))


def _name(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _either([repr(part) for part in parts])
    if hint is NoneType:
        return "None"
    if hint is float:
        return "a number"
    if origin is None or not isinstance(origin, type):
        return str(getattr(hint, "__name__", hint))
    if not issubclass(origin, Iterable):
        return "callable" if origin.__name__ == "Callable" else origin.__name__
    if len(parts) == 1:
        return f"{origin.__name__} of {_described(_alternatives(parts[0]))}"
    if len(parts) == 2 and issubclass(origin, Mapping):
        return f"{origin.__name__} of {_name(parts[0])} to {_described(_alternatives(parts[1]))}"
    return origin.__name__


def _given(value: object) -> str:
    """Return the type of a value, and of the first of what it holds."""
    if isinstance(value, Collection) and not isinstance(value, str | bytes | _Buffer) and len(value):
        return f"{type(value).__name__} of {type(next(iter(value))).__name__}"
    return type(value).__name__


def _remedy(name: str, value: object) -> str:
    return f": use {name}.encode()" if isinstance(value, str) and name.isidentifier() else ""


# Of records


def as_bytes(name: str, value: object) -> bytes | None:
    """Return a key or value of a record, which may be any buffer.

    Raises:
        TypeError: It is neither bytes nor None.
    """
    if value is None or isinstance(value, bytes):
        return value
    if (found := _buffer(value)) is not None:
        return found
    raise TypeError(
        f"{name} must be bytes or None, not {_given(value)}{_remedy(name, value)}; the record was not written"
    )


def not_text(name: str, value: object) -> TypeError:
    """Return the refusal of a name that is no text."""
    return TypeError(f"{name} must be str, not {_given(value)}; the record was not written")


def as_transaction_id(number: object) -> int:
    """Return the transaction id of a record.

    Raises:
        TypeError: It is no whole number.
    """
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"transaction_id must be int or None, not {_given(number)}; the record was not written")
    return int(number)


def as_record(record: object) -> tuple[bytes | None, bytes | None]:
    """Return a record as key and value.

    Raises:
        TypeError: It is no such pair.
    """
    if not isinstance(record, tuple | list) or len(record) != 2:
        raise TypeError(f"a record must be a pair of key and value, not {repr(record)[:60]}; it was not written")
    return as_bytes("key", record[0]), as_bytes("value", record[1])


def from_fault_on(records: Sequence[object], fault: Exception) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield the records from the one on at which a fault occurred, buffers as bytes.

    Raises:
        TypeError: One of them is no pair of key and value.
        Exception: The fault itself, if that record is not to blame.
    """
    for at, record in enumerate(records):
        whole = as_record(record)
        if not at and all(given is taken for given, taken in zip(record, whole, strict=True)):  # type: ignore[call-overload]
            raise fault
        yield whole


def as_headers(headers: object) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record as a list.

    Raises:
        TypeError: They are not pairs of a name and a value.
    """
    if not isinstance(headers, Iterable) or isinstance(headers, str | bytes | _Buffer | Mapping):
        raise TypeError(f"headers must be pairs of name and value, not {_given(headers)}; the record was not written")
    found = []
    for pair in headers:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                f"headers must be pairs of a name (str) and a value, not {repr(pair)[:60]}; the record was not written"
            )
        found.append((pair[0], as_bytes(f"the value of header {pair[0]!r}", pair[1])))
    return found


def as_timestamp(timestamp: object) -> int:
    """Return the time of a record, in milliseconds since 1970.

    Raises:
        TypeError: It is no whole number.
        InvalidRequestError: No record has such a time.
    """
    if isinstance(timestamp, bool) or not isinstance(timestamp, Integral):
        raise TypeError(
            f"timestamp must be int (milliseconds since 1970) or None, not {_given(timestamp)}; "
            "the record was not written"
        )
    whole = int(timestamp)
    if not 0 <= whole <= _TIME_MAX:
        when = "lies before 1970" if whole < 0 else "is more than 64 bits hold"
        raise InvalidRequestError(f"a timestamp of {timestamp} ms {when}; the record was not written")
    return whole
