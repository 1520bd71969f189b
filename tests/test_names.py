"""Every name of the old documents exists here, takes what it took, and has a test of what it does."""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import replicax as rx
from replicax.compat import tower

REPOSITORY = Path(__file__).parents[1]
ROWS = tomllib.loads((REPOSITORY / "docs" / "port" / "names.toml").read_text())["name"]
CALLS = [row for row in ROWS if "parameters" in row or "keywords" in row]

MISSING = object()


def ids(row: dict[str, Any]) -> str:
    return f"{row['era']}-{row['old']}"


def find(path: str) -> Any:
    """What a dotted path leads to, as it stands in its class: a function, not a method; a property, not its value."""
    parts = path.split(".")
    there: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if isinstance(there, types.ModuleType) and not hasattr(there, part):
            there = importlib.import_module(".".join(parts[:depth]))
        elif isinstance(there, type):
            there = _in_class(there, part)
        else:
            there = getattr(there, part)
    return there


def _in_class(cls: type, name: str) -> Any:
    """A member that is written in the class or a base of it; one that `__getattr__` makes up does not count."""
    if issubclass(cls, enum.Enum) and name in cls.__members__:
        return cls[name]
    if dataclasses.is_dataclass(cls) and name in {field.name for field in dataclasses.fields(cls)}:
        return property()
    found = inspect.getattr_static(cls, name, MISSING)
    if found is MISSING:
        raise AttributeError(f"{cls.__qualname__} has no {name}")
    return found


def signature(found: Any) -> inspect.Signature:
    """The signature as a caller sees it, without the instance or class."""
    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    described = inspect.signature(function)
    if isinstance(found, staticmethod) or not _is_method(function):
        return described
    return described.replace(parameters=list(described.parameters.values())[1:])


def _is_method(function: Callable[..., Any]) -> bool:
    return "." in function.__qualname__.rpartition("<locals>.")[2]


def split(parameters: list[str]) -> tuple[list[str], list[tuple[str, str]], bool, bool]:
    """What must be given; what may be, with its default; whether more may follow by position, and by name."""
    plain = [parameter.partition("=") for parameter in parameters if not parameter.startswith("*")]
    required = [name for name, equals, _ in plain if not equals]
    optional = [(name, default) for name, equals, default in plain if equals]
    by_name = any(parameter.startswith("**") for parameter in parameters)
    by_position = any(parameter.startswith("*") and not parameter.startswith("**") for parameter in parameters)
    return required, optional, by_position, by_name


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_an_old_name_has_a_new_one(row):
    find(row["new"])


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_the_new_name_is_the_same_kind_of_thing(row):
    found = find(row["new"])

    if row["kind"] == "module":
        assert isinstance(found, types.ModuleType)
    elif row["kind"] == "class":
        assert isinstance(found, type)
    elif row["kind"] == "property":
        assert inspect.isdatadescriptor(found) or isinstance(found, functools.cached_property)
    elif row["kind"] == "member":
        assert isinstance(found, enum.Enum)
    else:
        assert callable(found) or isinstance(found, staticmethod | classmethod)


@pytest.mark.parametrize("row", CALLS, ids=ids)
def test_the_new_name_has_the_old_parameters(row):
    required, optional, _, _ = split(row.get("parameters", []))
    parameters = signature(find(row["new"])).parameters

    assert [name for name in (*required, *(name for name, _ in optional)) if name not in parameters] == []


@pytest.mark.parametrize("row", CALLS, ids=ids)
def test_every_old_call_is_a_new_call(row):
    required, optional, more_by_position, more_by_name = split(row.get("parameters", []))
    keywords = [keyword.partition("=")[0] for keyword in row.get("keywords", [])]
    everything = [*required, *(name for name, _ in optional)]
    new = signature(find(row["new"]))

    if "parameters" in row:
        new.bind(*required)
        new.bind(*everything)
        new.bind(**dict.fromkeys(required))
        new.bind(**dict.fromkeys(everything))
        if more_by_position:
            new.bind(*everything, 1, 2, 3)
        if more_by_name:
            new.bind(*everything, some_word_of_the_caller=1)
    for keyword in keywords:
        new.bind(*required, **{keyword: None})


@pytest.mark.parametrize("row", CALLS, ids=ids)
def test_what_could_be_left_out_still_means_the_same(row):
    _, optional, _, _ = split(row.get("parameters", []))
    parameters = signature(find(row["new"])).parameters

    for name, default in optional:
        try:
            expected = ast.literal_eval(default)
        except ValueError:  # a lambda or a member of an enum: any default will do
            assert parameters[name].default is not inspect.Parameter.empty
        else:
            assert parameters[name].default == expected, name


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_test_says_what_the_name_does(row):
    file, _, function = row["test"].partition("::")

    assert function, f'{row["new"]}: `test` in docs/port/names.toml is empty; write "tests/test_x.py::test_y"'
    text = text_of(function, (REPOSITORY / file).read_text())
    assert text, f"there is no {row['test']}"
    assert [word for word in words(row) if word not in text] == [], f"{row['test']} does not use {row['new']}"


def words(row: dict[str, Any]) -> list[str]:
    """What a test of the name has to write: the name, and the class it is a member of if that is a kind of strategy."""
    *_, owner, name = ["", *row["new"].split(".")]
    kinds = [owner] if owner.endswith("Strategy") and owner not in ("DistributionStrategy", "Strategy") else []
    return [*kinds, owner if name == "__init__" else name.strip("_")]


def text_of(name: str, source: str) -> str:
    """What a test consists of: its lines, and those of whatever in its file it mentions, fixtures and helpers."""
    lines = source.splitlines()
    pieces: dict[str, str] = {}
    mentions: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        begin = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        within = list(ast.walk(node))
        stored = {each.id for each in within if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for target in {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else stored:
            pieces[target] = "\n".join(lines[begin - 1 : node.end_lineno])
            mentions[target] = {each.id for each in within if isinstance(each, ast.Name)}
            mentions[target] |= {each.arg for each in within if isinstance(each, ast.arg)}
    found, waiting = [], [name]
    while waiting:
        piece = waiting.pop()
        if piece in pieces:
            found.append(pieces.pop(piece))
            waiting += mentions[piece]
    return "\n".join(found)


CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
NEED_PROCESSES = {
    "replicax.compat.tower.CollectiveAllReduceStrategy": lambda make: make().configure(None, CLUSTER, "worker", 0),
    "replicax.compat.tower.CollectiveAllReduceStrategy.configure": lambda configure: configure(
        tower.CollectiveAllReduceStrategy(), cluster_spec=CLUSTER, task_type="worker", task_id=1
    ),
    "replicax.compat.tower.ParameterServerStrategy": lambda make: make(0, CLUSTER, "worker", 0),
    "replicax.compat.tower.run_standard_tensorflow_server": lambda run: run(),
    "replicax.experimental.ParameterServerStrategy": lambda make: make(),
    "replicax.Server": lambda make: make(CLUSTER, "ps"),
}


@pytest.mark.parametrize("row", [row for row in ROWS if "later" in row], ids=ids)
def test_what_needs_several_processes_says_what_it_will_come_with(row, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}))

    with pytest.raises(rx.NotAvailableError) as error:
        NEED_PROCESSES[row["new"]](find(row["new"]))
    assert f"`{row['later']}`" in str(error.value)


# The checks above, on things that are made here.


class Old:
    def method(self, value, destinations=None, *args, **kwargs): ...

    @staticmethod
    def static(value): ...

    @classmethod
    def on_class(cls, value): ...


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("method", ["value", "destinations", "args", "kwargs"]), ("static", ["value"]), ("on_class", ["value"])],
)
def test_a_signature_is_what_the_caller_writes(name, parameters):
    assert list(signature(inspect.getattr_static(Old, name)).parameters) == parameters


def test_names_that_are_made_up_when_asked_for_do_not_count():
    class MadeUp:
        def __getattr__(self, name): ...

    with pytest.raises(AttributeError, match="MadeUp has no anything"):
        _in_class(MadeUp, "anything")


def test_a_test_consists_of_what_it_mentions():
    source = """
WORD = "inside"
OTHER = "outside"

@pytest.fixture
def thing():
    return WORD

def helper():
    return thing

def test_it(thing):
    assert thing
"""
    assert "inside" in text_of("test_it", source)
    assert "outside" not in text_of("test_it", source) and "helper" not in text_of("test_it", source)
    assert text_of("test_that_is_not_there", source) == ""


def test_parameters_are_split_by_what_a_caller_may_leave_out():
    assert split(["fn", "name='a'", "*args", "**kwargs"]) == (["fn"], [("name", "'a'")], True, True)
