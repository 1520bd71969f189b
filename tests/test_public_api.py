"""The list in `replicax/__init__.py` is what users import: each name documented, annotated, and called `replicax.X`."""

import ast
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import replicax
import replicax.host
from tests.fresh import python

LIST = Path(replicax.__file__).read_text()


def listed() -> list[str]:
    """The names that `__init__.py` exports, by writing `import x as x`, in the order in which a reader meets them."""
    imports = [node for node in ast.parse(LIST).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [alias.asname for node in imports for alias in node.names if alias.asname == alias.name.split(".")[-1]]


NAMES = listed()
OBJECTS = {name: getattr(replicax, name) for name in NAMES}
OURS = {
    name: value
    for name, value in OBJECTS.items()
    if isinstance(value, type | types.FunctionType) and value.__module__.split(".")[0] == "replicax"
}
DOORS = {name: value for name, value in OBJECTS.items() if isinstance(value, types.ModuleType)}


def public_functions(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a user can call through `value`, by their qualified names."""
    if isinstance(value, types.FunctionType):
        yield value.__qualname__, value
        return
    for name, member in vars(value).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        elif isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        member = inspect.unwrap(member) if callable(member) else member
        if isinstance(member, types.FunctionType) and member.__module__.split(".")[0] == "replicax":
            yield member.__qualname__, member


def missing_annotations(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.annotation is inspect.Parameter.empty and parameter.name not in ("self", "cls"):
            yield f"{name}: parameter {parameter.name}"
    if signature.return_annotation is inspect.Signature.empty and not name.endswith("__init__"):
        yield f"{name}: result"


def test_the_list_has_names_and_none_twice():
    assert NAMES
    assert sorted(NAMES) == sorted(set(NAMES))


def test_nothing_else_is_public():
    """A name that is there but not in the list is one that users will find and we do not know of."""
    there = {name for name, value in vars(replicax).items() if not name.startswith("_")}
    modules = {name for name in there if isinstance(vars(replicax)[name], types.ModuleType)}

    assert there - modules - set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name):
    value = OBJECTS[name]
    if not isinstance(value, type | types.FunctionType | types.ModuleType):
        pytest.skip("a value has no docstring of its own")
    doc = value.__doc__

    assert doc and not doc.startswith(f"{name}("), "what a dataclass writes for itself does not count"


@pytest.mark.parametrize("name", OURS)
def test_a_public_name_bears_the_name_users_import_it_by(name):
    assert OURS[name].__module__ == "replicax"
    assert OURS[name].__name__ == name or OURS[OURS[name].__name__] is OURS[name], "an alias shows the listed name"


@pytest.mark.parametrize("name", OURS)
def test_a_public_name_is_annotated(name):
    missing = [
        line
        for qualified, function in public_functions(OURS[name])
        if not (isinstance(OURS[name], type) and issubclass(OURS[name], enum.Enum))
        for line in missing_annotations(qualified, function)
    ]

    assert missing == []


@pytest.mark.parametrize("name", DOORS)
def test_what_a_door_shows_is_documented_and_annotated(name):
    shown = {key: value for key, value in vars(DOORS[name]).items() if not key.startswith("_")}
    ours = [
        value
        for value in shown.values()
        if isinstance(value, type | types.FunctionType) and value.__module__.split(".")[0] == "replicax"
    ]

    assert [value.__qualname__ for value in ours if not value.__doc__] == []
    assert [line for value in ours for pair in public_functions(value) for line in missing_annotations(*pair)] == []


def test_importing_it_imports_nothing_that_takes_long():
    heavy = {"orbax", "optax", "rich", "flax", "keras", "grain", "tensorboardX", "sklearn"}

    found = python(f"import sys, replicax; print(sorted({heavy} & set(sys.modules)))")

    assert found == "[]"


def test_type_checkers_see_the_annotations():
    assert (Path(replicax.__file__).parent / "py.typed").exists()
    assert typing.get_type_hints(replicax.host.configure) == {"cpu_devices": int, "return": type(None)}
