"""What in these objects is saved, under which name, and how is it put back?

A name is the path by which an object is reached: `model/layers/0/w`. Nothing in it tells of strategies, devices or
replicas. `find` walks the objects once and returns a flat list of entries; saving reads them, restoring writes them.
"""

# What is walked into, in this order:
#
#   Variable                     one value: the mirrored one, or for an on-read variable its components combined
#   get_state() + set_state(x)   a data iterator, a dataset, a random generator: whatever it says about where it stands
#   checkpoint_items()           an object that names its own parts: an optimizer, a metric, another Checkpoint
#   `openers`                    a model of a layer library, of which somebody below knows how to name the parts
#   dict, list                   their entries; arrays in them are replaced in place
#   array, number                one value; the container or attribute that holds it gets the restored one
#   pytree                       dataclasses, tuples, optax states, ...: rebuilt and put where the old one was held;
#                                functions in them are settings, not state
#   any other object             its public attributes that are one of the above (numbers there are settings, not state)

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax._errors import CheckpointError, message
from replicax._options import VariableAggregation
from replicax._values import PerReplica
from replicax._variables import storage, sync
from replicax._variables.variable import Variable
from replicax.train._store import place

Replace = Callable[[Any], None]


class Stateful(Protocol):
    """An object that can say where it stands, and be put there."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Composite(Protocol):
    """An object that says itself what it consists of, by name. Variables of an optimizer, say, by what they belong to.

    It may have two further methods. `checkpoint_replace(name, value)` is called with a restored part that cannot be
    changed in place. `checkpoint_later(restore)` is called by a restore if saved parts of the object do not exist yet:
    whenever it has made a part it calls ``restore()``, and the part begins with the saved value.
    """

    def checkpoint_items(self) -> Mapping[str, Any]: ...


openers: list[Callable[[Any], Composite | None]] = []
"""Asked in turn what an object consists of that cannot say so itself: a module of NNX, a model of Keras."""


class Entry(Protocol):
    """One array that is saved."""

    def value(self) -> ArrayLike: ...

    def target(self) -> jax.ShapeDtypeStruct: ...

    def put(self, value: np.ndarray | jax.Array) -> None: ...


@dataclasses.dataclass
class Found:
    """Everything there is to save, by name. A name in `aliases` is a second way to reach another entry."""

    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    states: dict[str, Stateful] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    composites: dict[str, Composite] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Objects of users, which may make variables whenever they like."""
    trees: list["_Tree"] = dataclasses.field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.entries) + len(self.states) + len(self.aliases)

    def finish(self) -> None:
        """To be called when all values are put: hands over the pytrees that had to be rebuilt."""
        for tree in self.trees:
            tree.finish()


def find(objects: Mapping[str, Any], replace: Callable[[str, Any], None], *, may_be_empty: bool = False) -> Found:
    """Walks the objects of a checkpoint; `replace` puts a new object under one of their names.

    Args:
      may_be_empty: Whether there may be objects that hold nothing yet, because they make their variables later.

    Raises:
      CheckpointError: If something in them cannot be saved, naming all that cannot.
    """
    walk = _Walk(may_be_empty)
    for name, thing in objects.items():
        walk.visit(name, thing, functools.partial(replace, name))
    if walk.refused:
        raise _not_savable(walk.refused)
    return walk.found


class _Walk:
    def __init__(self, may_be_empty: bool) -> None:
        self.found = Found()
        self.may_be_empty = may_be_empty
        self.refused: list[str] = []
        self._first_name: dict[int, str] = {}
        self._open: set[int] = set()

    def visit(self, name: str, thing: Any, replace: Replace | None, *, implicit: bool = False) -> None:
        """`implicit`: reached through an attribute of somebody's object, where what is no state is passed over."""
        if isinstance(thing, Variable):
            self._variable(name, thing)
        elif _is_stateful(thing):
            self.found.states[name] = thing
        elif isinstance(thing, np.random.Generator):
            self.found.states[name] = _NumPyGenerator(thing)
        elif _is_array(thing) and not (implicit and _is_setting(thing)):
            self._array(name, thing, replace)
        elif id(thing) not in self._open:
            self._open.add(id(thing))
            self._inside(name, thing, replace, implicit)
            self._open.remove(id(thing))

    def _inside(self, name: str, thing: Any, replace: Replace | None, implicit: bool) -> None:
        if (composite := _opened(thing)) is not None:
            self._composite(name, composite)
        elif isinstance(thing, dict):
            for key, part in thing.items():
                self.visit(f"{name}/{key}", part, functools.partial(thing.__setitem__, key), implicit=implicit)
        elif isinstance(thing, list):
            for key, part in enumerate(thing):
                self.visit(f"{name}/{key}", part, functools.partial(thing.__setitem__, key), implicit=implicit)
        elif isinstance(thing, PerReplica):
            self._refuse(name, thing, "differs per replica: reduce or gather it first")
        elif not jax.tree_util.all_leaves([thing]):
            self._tree(name, thing, replace, implicit)
        elif thing is not None and hasattr(thing, "__dict__") and not _is_code(thing):
            self._attributes(name, thing, implicit)
        elif thing is not None and not implicit:
            self._refuse(name, thing, "is not an array, a variable or something that holds them")

    def _composite(self, name: str, thing: Any) -> None:
        self.found.composites[name] = thing
        replace = getattr(thing, "checkpoint_replace", None)
        for key, part in thing.checkpoint_items().items():
            self.visit(f"{name}/{key}", part, replace and functools.partial(replace, key))

    def _variable(self, name: str, variable: Variable) -> None:
        first = self._first_name.setdefault(id(variable), name)
        if first == name:
            self._add(name, _OfVariable(variable))
        else:
            self.found.aliases[name] = first

    def _array(self, name: str, array: Any, replace: Replace | None) -> None:
        if replace is None:
            self._refuse(name, array, "cannot be put back: hold it in a dict, a list or an attribute")
        else:
            self._add(name, _OfHolder(array, replace))

    def _tree(self, name: str, tree: Any, replace: Replace | None, implicit: bool) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_object)
        rebuilt = _Tree([leaf for _, leaf in leaves], structure, replace)
        state = [(index, path, leaf) for index, (path, leaf) in enumerate(leaves) if not _is_code(leaf)]
        if leaves and not state and not implicit:
            self._refuse(name, tree, "holds nothing but functions")
        for index, path, leaf in state:
            setter = None if replace is None else rebuilt.setter(index)
            self.visit("/".join([name, *map(_key, path)]), leaf, setter, implicit=implicit)
        self.found.trees.append(rebuilt)

    def _attributes(self, name: str, thing: Any, implicit: bool) -> None:
        before = self.found.size
        if getattr(type(thing), "__weakrefoffset__", 0):
            self.found.objects[name] = thing
        for key, part in vars(thing).items():
            if not key.startswith("_"):
                self.visit(f"{name}/{key}", part, functools.partial(setattr, thing, key), implicit=True)
        if self.found.size == before and not implicit and not self.may_be_empty:
            self._refuse(name, thing, "holds no variable, array or state in its public attributes")

    def _add(self, name: str, entry: Entry) -> None:
        if name in self.found.entries:
            self.refused.append(f"{name}  is the path of two different values")
        self.found.entries[name] = entry

    def _refuse(self, name: str, thing: Any, why: str) -> None:
        self.refused.append(f"{name}  {type(thing).__name__}  {why}")


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "get_state", None)) and callable(getattr(thing, "set_state", None))


def _is_code(thing: Any) -> bool:
    """Functions, classes, and what wraps them: `jax.jit(f)`, `functools.partial(f)`. An object may be callable too."""
    return inspect.isroutine(thing) or isinstance(thing, (type, functools.partial)) or hasattr(thing, "__wrapped__")


def _opened(thing: Any) -> Composite | None:
    if hasattr(thing, "checkpoint_items"):
        return thing
    return next((composite for opener in openers if (composite := opener(thing)) is not None), None)


def _is_number(thing: Any) -> bool:
    return isinstance(thing, (bool, int, float, complex, np.generic))


def _is_setting(thing: Any) -> bool:
    """What stands in an attribute of somebody's object and is no state: a number, a table of Python objects."""
    return _is_number(thing) or isinstance(thing, np.ndarray) and thing.dtype.hasobject


def _is_array(thing: Any) -> bool:
    return _is_number(thing) or isinstance(thing, (np.ndarray, jax.Array))


def _is_object(thing: Any) -> bool:
    """What a pytree may hold that must be visited as a whole."""
    return isinstance(thing, (Variable, PerReplica)) or _is_stateful(thing) or _opened(thing) is not None


def _key(entry: Any) -> str:
    """`.w`, `['w']` and `[0]` of a pytree path are the names w, w and 0."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


class _OfVariable:
    """A variable under any strategy: one value goes out, one value comes in."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def value(self) -> jax.Array:
        variable = self._variable
        # Not `variable.value`: that marks the array as handed out, and the next step would copy it on every device.
        return storage.host_value(variable) if variable.on_read else variable._array

    def target(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self._variable.shape, self._variable.dtype)

    def put(self, value: np.ndarray | jax.Array) -> None:
        variable, value = self._variable, jnp.asarray(value)
        if variable.on_read and variable.aggregation is VariableAggregation.SUM:
            value = sync.shares(value, variable.placement.replicas)
        storage.host_write(variable, value)


class _OfHolder:
    """An array or number that something else holds. The restored one is of the same kind and lies in the same place."""

    def __init__(self, old: Any, replace: Replace) -> None:
        self._old, self._replace = old, replace

    def value(self) -> ArrayLike:
        return self._old

    def target(self) -> jax.ShapeDtypeStruct:
        old = self._old
        if isinstance(old, jax.Array):
            return jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=old.sharding if old.committed else None)
        python_number = _is_number(old) and not isinstance(old, np.generic)
        return jax.ShapeDtypeStruct(np.shape(old), np.asarray(old).dtype, weak_type=python_number)

    def put(self, value: np.ndarray | jax.Array) -> None:
        if isinstance(self._old, jax.Array):
            self._replace(jnp.asarray(place(value, self.target())))
        elif isinstance(self._old, np.ndarray):
            self._replace(np.array(value))
        else:
            self._replace(type(self._old)(np.asarray(value).item()))


class _Tree:
    """A pytree that cannot be changed in place: collects new leaves and replaces the whole."""

    def __init__(self, leaves: list[Any], structure: Any, replace: Replace | None) -> None:
        self._leaves, self._structure, self._replace = leaves, structure, replace
        self._changed = False

    def setter(self, index: int) -> Replace:
        def put(value: Any) -> None:
            self._leaves[index] = value
            self._changed = True

        return put

    def finish(self) -> None:
        if self._changed and self._replace is not None:
            self._replace(jax.tree_util.tree_unflatten(self._structure, self._leaves))


class _NumPyGenerator:
    """`np.random.Generator` under the names that everybody else uses."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def get_state(self) -> Any:
        return self._generator.bit_generator.state

    def set_state(self, state: Any) -> None:
        self._generator.bit_generator.state = state


def _not_savable(refused: list[str]) -> CheckpointError:
    why = "A checkpoint holds variables, arrays, numbers, and objects that have them or `get_state` and `set_state`."
    ways = ["leave it out of `rx.Checkpoint(...)`", "give its class `get_state()` and `set_state(state)`"]
    return CheckpointError(message("`rx.Checkpoint` was given something that cannot be saved", refused, why, ways))
