"""The errors: the drawn tree is the real one, codes are stable and unique, exit codes follow the base classes."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterable, Iterator

import pytest

from bridge.tests.imports import TREES
from rollbridge import errors
from rollbridge.base import errors as model_errors
from rollbridge.errors import RollbridgeError

CLASSES = {
    name: item
    for name, item in vars(errors).items()
    if inspect.isclass(item)
    and issubclass(item, RollbridgeError)
    and item.__module__ in {errors.__name__, model_errors.__name__}
}


def drawn_tree() -> dict[str, str | None]:
    """Parent of each class in the module's docstring."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ]*)(?:[├└]─ )?([A-Z]\w+)(?:  |$)", line)
        if match is None:
            continue
        depth = line.index(match[2])
        above = [item for item in above if item[0] < depth]
        parents[match[2]] = above[-1][1] if above else None
        above.append((depth, match[2]))
    return parents


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    real = {name: item.__bases__[0].__name__ if item is not RollbridgeError else None for name, item in CLASSES.items()}
    assert drawn_tree() == real


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [code for item in CLASSES.values() for code in (vars(item).get("code"), *vars(item).get("codes", ()))]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", str(code)) for code in codes)


def test_the_tree_names_every_code_that_has_no_class() -> None:
    assert {
        code for item in CLASSES.values() for code in vars(item).get("codes", ()) if code not in errors.__doc__
    } == set()


def codes_given(trees: Iterable[ast.Module]) -> Iterator[tuple[str, str]]:
    """Each code that an error is made with, and the class."""
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for item in call.keywords:
            if item.arg == "code" and isinstance(item.value, ast.Constant) and isinstance(call.func, ast.Name):
                yield str(item.value.value), call.func.id


def test_an_error_is_made_with_codes_of_its_class_alone() -> None:
    kinds = {kind.__name__: kind for kind in below(RollbridgeError)}
    given = [(code, kinds[name]) for code, name in codes_given(TREES.values()) if name in kinds]
    assert len(given) > 20
    assert [(code, kind) for code, kind in given if code not in vars(kind).get("codes", ())] == []


def below(kind: type[RollbridgeError]) -> Iterator[type[RollbridgeError]]:
    yield kind
    for item in kind.__subclasses__():
        yield from below(item)


def test_an_error_has_the_code_and_the_data_that_it_is_made_with() -> None:
    error = errors.ConflictError("some words", code="stream-busy", resource="topic t")
    assert (str(error), error.code, error.resource) == ("some words", "stream-busy", "topic t")
    assert errors.ConflictError("some words").code == "conflict"


@pytest.mark.parametrize(
    ("former", "kind"),
    [("StreamBusyError", errors.ConflictError), ("AlreadyAbortedError", errors.TransactionAbortedError)],
)
def test_a_class_of_the_last_release_is_the_one_that_has_taken_its_place(former: str, kind: type) -> None:
    with pytest.warns(FutureWarning, match=f"{former} is a {kind.__name__} now, with the code '"):
        assert getattr(errors, former) is kind
    with pytest.raises(AttributeError, match="NoError"):
        getattr(errors, "NoError")  # noqa: B009


@pytest.mark.parametrize("item", CLASSES.values(), ids=CLASSES)
def test_subclasses_exit_as_their_base_does(item: type[RollbridgeError]) -> None:
    for base in CLASSES.values():
        if issubclass(item, base) and base is not RollbridgeError:
            assert item.exit_code == base.exit_code
    assert 1 <= item.exit_code <= 8
    assert item.exit_code != 2, "2 is the shell's and click's code for wrong usage"


@pytest.mark.parametrize("item", CLASSES.values(), ids=CLASSES)
def test_every_error_says_what_it_means(item: type[RollbridgeError]) -> None:
    assert (item.__doc__ or "").rstrip().endswith(".")


def exceptions_in(trees: Iterable[ast.Module]) -> set[str]:
    """Names of all classes that derive from an exception, by whatever way."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases} for node in classes}
    known = {name for name, item in vars(builtins).items() if inspect.isclass(item) and issubclass(item, BaseException)}
    while found := {name for name, of in bases.items() if of & known} - known:
        known |= found
    return known & bases.keys()


def test_every_exception_of_the_product_ends_in_error() -> None:
    found = exceptions_in(TREES.values())
    assert found >= CLASSES.keys()
    assert {name for name in found if not name.endswith("Error")} == set()
    assert exceptions_in([ast.parse("class A(x.B): ...\nclass B(ValueError): ...\nclass C: ...")]) == {"A", "B"}
