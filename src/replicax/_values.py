"""How does one name hold N values?

A value that is equal on every replica is a plain `jax.Array`. A value that may differ is a `PerReplica`. This module makes
them, takes them apart, and merges what N replicas returned into one structure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from replicax import _context, _errors, _jax
from replicax._placement import AXIS, Placement

PyTree = Any

ROWS = "rows"
STACKED = "stacked"
PARTS = "parts"
TRACED = "traced"


class DistributedValues:
    """Anything that holds one value per replica under one name."""

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The component of each replica of this process, in replica order."""
        raise NotImplementedError


# C++ flattens and rebuilds this dataclass, so it must be cheap to make and must not check anything when made.
@functools.partial(register_dataclass, data_fields=["data", "mask"], meta_fields=["form"])
@dataclasses.dataclass(slots=True, repr=False, eq=False)
class PerReplica(DistributedValues):
    """One value per replica, under one name.

    A distributed dataset hands these out and `strategy.run` returns them wherever replicas ended with different
    values. Pass one back to `run` and each replica gets its own component; combine one with `strategy.reduce` or
    `strategy.gather`; look inside with `strategy.experimental_local_results` or `.values`. It is a pytree, so it
    also travels through `jax.jit` and `jax.tree.map`.

    You can make one from components yourself, also from ragged ones and from Python objects:

    >>> import replicax as rx
    >>> rx.PerReplica((1.0, 2.0))
    PerReplica:{
      0: 1.0,
      1: 2.0
    }
    """

    data: Any
    form: str = PARTS
    mask: Any = None

    @property
    def values(self) -> tuple[Any, ...]:
        return components(self)

    def __repr__(self) -> str:
        if self.form == TRACED:
            return f"PerReplica(traced {self.data.aval.str_short()})"
        if _can_be_opened(self):
            lines = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(components(self)))
            return f"PerReplica:{{\n{lines}\n}}"
        if not isinstance(self.data, (jax.Array, jax.ShapeDtypeStruct)):
            return f"PerReplica({self.data!r}, {self.form!r})"
        gone = isinstance(self.data, jax.Array) and not isinstance(self.data, Tracer) and self.data.is_deleted()
        return f"PerReplica({self.form}, {jax.typeof(self.data).str_short()}{', deleted' if gone else ''})"

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, PerReplica) or not isinstance(self.data, jax.ShapeDtypeStruct):
            return self is other
        # Described, as in an element_spec.
        return (self.data, self.form, self.mask) == (other.data, other.form, other.mask)

    def __hash__(self) -> int:
        return hash((self.data, self.form)) if isinstance(self.data, jax.ShapeDtypeStruct) else id(self)

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        mode = _context.current()
        if mode is None or mode.ledger is None or mode.replica is None or _jax.about_to_refuse():
            raise _errors.per_replica_as_array(self)
        ledger = mode.ledger
        return lambda: ledger.own(self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _errors.per_replica_as_array(self)

    def __bool__(self) -> bool:
        raise _errors.per_replica_as_array(self)

    def __format__(self, spec: str) -> str:
        if spec:
            raise _errors.per_replica_as_array(self)
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ARRAYS:
            raise _errors.attribute_of_per_replica(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_OF_ARRAYS = {
    "shape",
    "dtype",
    "ndim",
    "size",
    "T",
    "mean",
    "sum",
    "max",
    "min",
    "item",
    "astype",
    "reshape",
    "at",
    "numpy",
}

_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
_OF_NUMBERS = [
    *(f"__{side}{operator}__" for operator in _OPERATORS for side in ("", "r")),
    *(
        f"__{word}__"
        for word in ("neg", "abs", "round", "invert", "lt", "le", "gt", "ge", "getitem", "float", "int", "index")
    ),
]


def _forward(name: str) -> Callable[..., Any]:
    def method(self: PerReplica, *others: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*others)

    method.__name__ = name
    return method


for _name in _OF_NUMBERS:  # refused where one tries them first, with the loss that a step gave; right inside a replica
    setattr(PerReplica, _name, _forward(_name))


def is_per_replica(x: Any) -> bool:
    return isinstance(x, DistributedValues)


def components(value: PerReplica) -> tuple[Any, ...]:
    """This process's components of a host value; padding rows are left out."""
    if value.form == PARTS:
        return parts_of(value)
    if isinstance(value.data, jax.ShapeDtypeStruct):
        return _specs(value)
    blocks = _blocks(value.data)
    stacked = value.form == STACKED
    if value.mask is None:
        return tuple(block.reshape(block.shape[1:]) for block in blocks) if stacked else tuple(blocks)
    counts = [int(np.asarray(block)[0, 0]) for block in _blocks(value.mask)]
    return tuple(block[0 if stacked and count else slice(count)] for block, count in zip(blocks, counts, strict=True))


def _specs(value: PerReplica) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What each component of a described value would be, padding included."""
    sharding = value.data.sharding
    assert isinstance(sharding, NamedSharding)
    replicas = sharding.mesh.shape[AXIS]
    here = replicas * len(sharding.addressable_devices) // sharding.mesh.size
    rows, *rest = value.data.shape
    shape = tuple(rest) if value.form == STACKED else (rows // replicas, *rest)
    return (jax.ShapeDtypeStruct(shape, value.data.dtype),) * here


def parts_of(value: PerReplica) -> tuple[Any, ...]:
    """The components that are held one by one."""
    if not isinstance(value.data, (tuple, list)):
        raise _errors.not_components(value.data)
    return tuple(value.data)


def is_laid_over(mesh: Mesh, value: PerReplica) -> bool:
    """Whether a value lies over the replicas of this mesh, or is being traced or described."""
    return (
        isinstance(value.data, (Tracer, jax.ShapeDtypeStruct))
        or getattr(getattr(value.data, "sharding", None), "mesh", None) is mesh
    )


def laid_again(placement: Placement, value: PerReplica) -> PerReplica:
    """A value that was taken off the replicas' devices (`jax.device_get`, say), laid over them again."""
    refuse_misfit(placement, value)
    data, mask = jax.device_put((value.data, value.mask), placement.split)
    return PerReplica(data, value.form, mask)


def refuse_misfit(placement: Placement, value: PerReplica) -> None:
    """Raises if an array is gone, or too long or too short to hold a component for each replica."""
    if isinstance(value.data, jax.Array) and not isinstance(value.data, Tracer) and value.data.is_deleted():
        raise _errors.deleted_value(value.data)
    shape, replicas = np.shape(value.data), placement.replicas
    if not shape or shape[0] % replicas or value.form == STACKED and shape[0] != replicas:
        raise _errors.not_laid_out(value.data)


def _blocks(array: jax.Array) -> list[jax.Array]:
    """The addressable blocks along axis 0, one per replica."""
    if isinstance(array, Tracer):
        raise _errors.components_of_traced(array)
    mesh = _mesh_of(array)
    if mesh is None:
        raise _errors.not_laid_out(array)
    if array.is_deleted():
        raise _errors.deleted_value(array)
    if array.size == 0:
        return _empty_blocks(array, mesh)
    blocks = _shards(array)
    if len(blocks) * mesh.size != mesh.shape[AXIS] * len(array.sharding.addressable_devices):  # whole on every device
        blocks = _shards(jax.device_put(array, NamedSharding(mesh, PartitionSpec(AXIS))))
    return blocks


def _mesh_of(array: Any) -> Mesh | None:
    """The mesh over whose replicas an array lies, or could lie."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    replicas = sharding.mesh.shape.get(AXIS)
    return sharding.mesh if replicas and array.ndim and array.shape[0] % replicas == 0 else None


def _can_be_opened(value: PerReplica) -> bool:
    if value.form == PARTS:
        return isinstance(value.data, (tuple, list))
    array = value.data
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.is_deleted():
        return False
    return value.form in (ROWS, STACKED) and _mesh_of(array) is not None


def _shards(array: jax.Array) -> list[jax.Array]:
    by_start: dict[int, jax.Array] = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0 if shard.index else 0
        by_start.setdefault(start, shard.data)
    return [by_start[start] for start in sorted(by_start)]


def _empty_blocks(array: jax.Array, mesh: Any) -> list[jax.Array]:
    """The same for an array without elements, which XLA leaves whole on every device whatever its layout should be."""
    replicas = mesh.shape[AXIS]
    rows = array.shape[0] // replicas
    return [shard.data[:rows] for shard in array.addressable_shards[:: mesh.size // replicas]]


def lay_out(placement: Placement, parts: Sequence[Any]) -> PerReplica:
    """One component per local replica → a `PerReplica`, laid over the replicas' devices when the shapes allow it."""
    if not parts or not all(_is_numeric(part) for part in parts):
        return PerReplica(tuple(parts), PARTS)
    arrays = [jnp.asarray(part) for part in parts]
    avals = [jax.typeof(array) for array in arrays]
    if any(a.shape != avals[0].shape or a.dtype != avals[0].dtype for a in avals):
        return PerReplica(tuple(parts), PARTS)
    local = len(placement.local_replicas)
    if len(parts) != local:
        return PerReplica(tuple(parts), PARTS)
    stacked = avals[0].ndim == 0
    shape = avals[0].shape
    total = (placement.replicas,) if stacked else (placement.replicas * shape[0], *shape[1:])
    if placement.auto_axes:  # a replica's block lies on several devices: let JAX spread it
        here = placement.local_devices[0]
        whole = jnp.concatenate([jax.device_put(part[None] if stacked else part, here) for part in arrays])
        return PerReplica(jax.device_put(whole, placement.split), uniform(shape))
    pieces = [
        jax.device_put(part[None] if stacked else part, device)
        for part, device in zip(arrays, placement.local_devices, strict=True)
    ]
    whole = jax.make_array_from_single_device_arrays(total, placement.split, pieces)
    return PerReplica(whole, uniform(shape))


def _is_numeric(x: Any) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return fits_device(x.dtype)
    return isinstance(x, (jax.Array, int, float, complex)) and not isinstance(x, Tracer)


@functools.lru_cache(maxsize=256)
def fits_device(dtype: Any) -> bool:
    """Whether JAX can hold an array of this type; text, dates, Python objects and foreign byte orders it cannot."""
    if not getattr(dtype, "isnative", True):
        return False
    return dtype == np.bool_ or any(jnp.issubdtype(dtype, kind) for kind in (np.number, jax.dtypes.extended))


def select_replica(index: int, tree: PyTree) -> PyTree:
    """The structure as replica `index` sees it: its own component of every `PerReplica`, all else as it is."""
    return jax.tree.map(
        lambda leaf: leaf.values[index] if isinstance(leaf, PerReplica) else leaf, tree, is_leaf=is_leaf
    )


def of_first(tree: PyTree) -> PyTree:
    """The structure with the first replica's component in place of each value per replica; in a run all get it."""

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if leaf.form != TRACED:
            return leaf.values[0]
        mode = _context.current()
        assert mode is not None and mode.ledger is not None, "a traced value lives in a run"
        return mode.ledger.first(leaf.data)

    return jax.tree.map(first, tree, is_leaf=is_leaf)


def is_leaf(x: Any) -> bool:
    """Where trees of user values end for us: at a value per replica and at None."""
    return x is None or isinstance(x, DistributedValues)


def regroup(trees: Sequence[PyTree], wrap: Callable[[tuple[Any, ...]], Any], always_wrap: bool = False) -> PyTree:
    """What N replicas returned, merged into one structure.

    Lists, tuples, named tuples and mappings must agree in shape and are merged entry by entry; other registered
    pytrees likewise. A leaf that is the same object on every replica stays itself unless `always_wrap`;
    any other leaf becomes ``wrap((leaf of replica 0, leaf of replica 1, ...))``.
    """
    first = trees[0]
    if isinstance(first, (list, tuple)):
        for tree in trees:
            if not isinstance(tree, type(first)) or len(tree) != len(first):
                raise _errors.different_structures(trees)
        merged = [regroup(entries, wrap, always_wrap) for entries in zip(*trees, strict=True)]
        rebuild = cast(Any, type(first))
        return rebuild(*merged) if hasattr(first, "_fields") else rebuild(merged)
    if isinstance(first, Mapping):
        for tree in trees:
            if not isinstance(tree, Mapping) or set(tree) != set(first):
                raise _errors.different_structures(trees)
        merged = {key: regroup([tree[key] for tree in trees], wrap, always_wrap) for key in first}
        if isinstance(first, defaultdict):
            return type(first)(first.default_factory, merged)
        return merged if type(first) is dict else cast(Any, type(first))(merged)
    if not isinstance(first, DistributedValues) and not jax.tree_util.all_leaves([first], is_leaf=is_leaf):
        flat = [jax.tree.flatten(tree, is_leaf=is_leaf) for tree in trees]
        if any(structure != flat[0][1] for _, structure in flat):
            raise _errors.different_structures(trees)
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return jax.tree.unflatten(flat[0][1], [regroup(column, wrap, always_wrap) for column in columns])
    if not always_wrap and all(tree is first for tree in trees):
        return first
    return wrap(tuple(trees))


def uniform(shape: tuple[int, ...]) -> str:
    """The form in which a laid-out value of this local shape is held."""
    return ROWS if shape else STACKED


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """What a function that makes one replica's value may know; see `experimental_distribute_values_from_function`."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
