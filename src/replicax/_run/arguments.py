"""What may be handed to a step, and what does each argument become?

Arrays and numbers are traced; bools, strings, None, enums, callables, variables and other hashable objects are *static*:
they are part of what the program is, and another value makes another program. A `PerReplica` is opened, so that each
replica sees its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from replicax import _errors, _jax
from replicax._context import checked_call
from replicax._cross import host
from replicax._placement import AXIS, Placement
from replicax._values import PARTS, PerReplica, fits_device, is_laid_over, is_leaf, lay_out, parts_of, regroup

PyTree = Any

DIRECT = frozenset({PerReplica, _jax.ConcreteArray})
"""Arguments of these types go to the compiled program as they are."""

RUN = "strategy.run(step, ...)"

checks: list[Callable[[Callable[..., Any], Any], None]] = []
"""Called with a step and what it is given, ``(args, kwargs)``, when it is traced. How layer libraries refuse arguments."""

_NUMBERS = (int, float, complex, np.ndarray, np.generic)
_LOOKED_AT = frozenset({np.ndarray, PerReplica})
_TRACEABLE = frozenset({_jax.ConcreteArray, int, float}) | _LOOKED_AT


@jax.tree_util.register_static
class Static:
    """A part of the call that belongs to the program's key. Equal means the same type and the same value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        return equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def equal(one: Any, other: Any) -> bool:
    """Whether two Python objects are the same or of one type and equal; an `__eq__` that does not say is a no."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # arrays in it, say, of which each element has an answer of its own
        return False


def is_special(x: Any) -> bool:
    return isinstance(x, (PerReplica, Static))


def are_direct(values: Iterable[Any], mesh: Mesh) -> bool:
    """Whether all are arrays, values per replica that lie over `mesh`, or plain containers of such: `prepared` would
    return them as they are. For a batch in a tuple this takes 1 µs, and `prepared` 20 after a step."""
    for value in values:
        kind = type(value)
        if kind is PerReplica:
            data = value.data
            if type(data) is not _jax.ConcreteArray or getattr(data.sharding, "mesh", None) is not mesh:
                return False
        elif kind is tuple or kind is list:
            if not are_direct(value, mesh):
                return False
        elif kind is dict:
            if not are_direct(value.values(), mesh):
                return False
        elif kind is not _jax.ConcreteArray:
            return False
    return True


def prepared(placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """The call as a program takes it; most calls can go as they are."""
    try:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: type(x) is PerReplica)
    except ValueError as error:
        raise _errors.not_a_tree("an argument", error) from error
    kinds = set(map(type, leaves))
    if kinds <= _TRACEABLE and all(_goes_as_it_is(placement, leaf) for leaf in leaves if type(leaf) in _LOOKED_AT):
        return args, kwargs, ()
    return _prepare(placement, args, kwargs)


def _goes_as_it_is(placement: Placement, leaf: np.ndarray | PerReplica) -> bool:
    if isinstance(leaf, np.ndarray):
        return fits_device(leaf.dtype)
    return leaf.form != PARTS and is_laid_over(placement.mesh, leaf)


def _prepare(placement: Placement, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The call with statics wrapped and per-replica parts laid out; the statics also by themselves, as a key."""
    statics: list[Static] = []

    def wrap(path: Any, leaf: Any) -> Any:
        kind = type(leaf)
        if kind is _jax.ConcreteArray:
            return leaf
        if kind is PerReplica:
            return _laid(placement, path, leaf)
        if isinstance(leaf, np.ndarray) and not fits_device(leaf.dtype):
            raise _errors.no_array_of_jax(where(path), leaf)
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, *_NUMBERS)) and kind not in (bool, np.str_, np.bytes_):
            return leaf
        try:
            hash(leaf)
        except TypeError:
            raise _errors.unhashable_argument(where(path), leaf) from None
        statics.append(Static(leaf))
        return statics[-1]

    args, kwargs = jax.tree_util.tree_map_with_path(
        wrap, (tuple(args), kwargs), is_leaf=lambda x: isinstance(x, PerReplica)
    )
    return args, kwargs, tuple(statics)


def _laid(placement: Placement, path: Any, value: PerReplica) -> Any:
    """A value per replica over the replicas' devices; components that are structures become a structure of such values."""
    if value.form != PARTS:
        return host.check_replicas(RUN, placement, value, where(path))
    parts, replicas = len(parts_of(value)), len(placement.local_replicas)
    if parts != replicas:
        raise _errors.wrong_number_of_components(where(path), parts, replicas)
    if not jax.tree_util.all_leaves(value.data, is_leaf=is_leaf):
        return regroup(value.data, lambda column: _laid(placement, path, PerReplica(column)), always_wrap=True)
    laid = lay_out(placement, value.data)
    if laid.form == PARTS:
        raise _errors.ragged_argument(where(path), value)
    return laid


def refuse_misfits(placement: Placement, args: Any, kwargs: Any) -> None:
    """Raises if a value per replica has rows that cannot be handed out evenly."""
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_special):
        if isinstance(leaf, PerReplica):
            host.check_replicas(RUN, placement, leaf, where(path))


def where(path: Any) -> str:
    """What the user calls the leaf at this path of ``(args, kwargs)``: ``args[0]['image']``."""
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def check_call(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of a call of `run`, whatever the user wrote them as."""
    return checked_call("strategy.run({})", "step", fn, args, kwargs)


def refuse_unusable(fn: Callable[..., Any], args: Any, kwargs: Any, cause: Exception | None = None) -> None:
    """Raises if an argument can be no input of a step: a number too large, an iterator, a buffer that is gone."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_special)
    except ValueError as error:
        raise _errors.not_a_tree("an argument", error) from error
    for path, leaf in leaves:
        value = leaf.data if isinstance(leaf, PerReplica) else leaf
        if isinstance(value.value if isinstance(value, Static) else value, Iterator):
            raise _errors.iterator_as_argument(fn, where(path))
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise _errors.deleted_argument(fn, where(path), value) from cause
        if type(value) is int:
            limits = jax.numpy.iinfo(jax.dtypes.canonicalize_dtype(int))
            if not limits.min <= value <= limits.max:
                raise _errors.number_too_large(fn, where(path), value, limits) from cause


def refuse_donated_twice(fn: Callable[..., Any], donated: Any, call: Any) -> None:
    """Raises if a buffer that is donated is an argument for a second time: XLA ends the process over it."""
    ids = list(map(id, jax.tree.leaves(call)))
    if len(set(ids)) == len(ids):
        return
    named = [(where(path), id(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(call)]
    for leaf in jax.tree.leaves(donated):
        places = [place for place, it in named if it == id(leaf)]
        if isinstance(leaf, jax.Array) and len(places) > 1:
            raise _errors.donated_twice(fn, places)


def refuse_unrun(fn: Callable[..., Any], out: Any) -> None:
    """Raises if what the step returned shows that its body has not run."""
    if inspect.isgenerator(out) or inspect.isasyncgen(out):
        raise _errors.body_not_run(fn, "a generator")
    if inspect.iscoroutine(out):
        out.close()  # or Python warns that nobody awaited it
        raise _errors.body_not_run(fn, "a coroutine")


def refuse_hidden_arrays(fn: Callable[..., Any], leaf: Any) -> None:
    """Raises if a result that is no array is an object of the user's with arrays of the step in it."""
    held = getattr(leaf, "__dict__", None)
    inside = dict(held) if isinstance(held, dict) and not isinstance(leaf, type) else {}
    if inspect.isfunction(leaf):
        inside = inspect.getclosurevars(leaf).nonlocals
    hidden = [name for name, value in inside.items() if any(map(_is_tracer, jax.tree.leaves(value)))]
    if hidden:
        raise _errors.hidden_arrays(fn, leaf, hidden)


def _is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)


def aval(leaf: Any) -> Any:
    """The shape and dtype of a leaf; a Python number keeps its weak type."""
    return jax.typeof(leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else jax.numpy.asarray(leaf))


def specs(tree: Any) -> list[PartitionSpec]:
    """How each leaf enters the step: cut along axis 0, or whole."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    cut: set[int] = set()
    for value in jax.tree.leaves(numbered, is_leaf=is_special):
        if isinstance(value, PerReplica):
            cut.update(jax.tree.leaves(value))
    return [PartitionSpec(AXIS) if i in cut else PartitionSpec() for i in range(tree.num_leaves)]


def names(fn: Callable[..., Any], tree: Any) -> list[str]:
    """What the user calls each leaf: ``x``, ``batch['image']``; ``0`` where the signature cannot be seen."""
    args, kwargs = jax.tree.unflatten(tree, range(tree.num_leaves))
    labels = [""] * tree.num_leaves
    parameters = _parameters(fn, len(args))
    named = [*zip(parameters, args, strict=True), *kwargs.items()]
    for name, value in named:
        for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: isinstance(x, PerReplica)):
            for number in jax.tree.leaves(leaf):
                labels[number] = f"'{name}{jax.tree_util.keystr(path)}'"
    return labels


def _parameters(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return [str(i) for i in range(count)]
    known = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [known[i].name if i < len(known) else str(i) for i in range(count)]
