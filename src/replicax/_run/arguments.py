"""What may be handed to a step, and what does each argument become?

Arrays and numbers are traced; bools, strings, None, enums, callables, variables and other hashable objects are *static*:
they are part of what the program is, and another value makes another program. A `PerReplica` is opened, so that each
replica sees its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _errors, _jax
from replicax._placement import AXIS, Placement
from replicax._values import PARTS, PerReplica, fits_device, lay_out

PyTree = Any

DIRECT = frozenset({PerReplica, _jax.ConcreteArray})
"""Arguments of these types go to the compiled program as they are."""

checks: list[Callable[[Callable[..., Any], Any], None]] = []
"""Called with a step and what it is given, ``(args, kwargs)``, when it is traced. How layer libraries refuse arguments."""

_NUMBERS = (int, float, complex, np.ndarray, np.generic)
_TRACEABLE = frozenset({_jax.ConcreteArray, np.ndarray, int, float})


@jax.tree_util.register_static
class Static:
    """A part of the call that belongs to the program's key. Equal means the same type and the same value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or (type(mine) is type(theirs) and bool(mine == theirs))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def is_special(x: Any) -> bool:
    return isinstance(x, (PerReplica, Static))


def prepared(placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    """The call as a program takes it; most calls can go as they are."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: type(x) is PerReplica and x.form == PARTS)
    if _TRACEABLE.issuperset(map(type, leaves)) and all(
        fits_device(leaf.dtype) for leaf in leaves if type(leaf) is np.ndarray
    ):
        return args, kwargs, ()
    return _prepare(placement, args, kwargs)


def _prepare(placement: Placement, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The call with statics wrapped and per-replica parts laid out; the statics also by themselves, as a key."""
    statics: list[Static] = []

    def wrap(path: Any, leaf: Any) -> Any:
        kind = type(leaf)
        if kind is _jax.ConcreteArray:
            return leaf
        if kind is PerReplica:
            return _laid(placement, path, leaf) if leaf.form == PARTS else leaf
        if isinstance(leaf, np.ndarray) and not fits_device(leaf.dtype):
            raise _errors.no_array_of_jax(jax.tree_util.keystr(path), leaf)
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, *_NUMBERS)) and kind not in (bool, np.str_, np.bytes_):
            return leaf
        try:
            hash(leaf)
        except TypeError:
            raise _errors.unhashable_argument(jax.tree_util.keystr(path), leaf) from None
        statics.append(Static(leaf))
        return statics[-1]

    args, kwargs = jax.tree_util.tree_map_with_path(
        wrap, (tuple(args), kwargs), is_leaf=lambda x: isinstance(x, PerReplica)
    )
    return args, kwargs, tuple(statics)


def _laid(placement: Placement, path: Any, value: PerReplica) -> PerReplica:
    laid = lay_out(placement, value.data)
    if laid.form == PARTS:
        raise _errors.ragged_argument(jax.tree_util.keystr(path), value)
    return laid


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


def masked_leaves(tree: Any) -> dict[int, int]:
    """For each leaf that holds rows with a validity mask: the position of the mask's leaf."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    found = {}
    for value in jax.tree.leaves(numbered, is_leaf=is_special):
        if isinstance(value, PerReplica) and value.mask is not None:
            found[value.data] = value.mask
    return found


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
