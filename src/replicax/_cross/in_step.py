"""How do replicas combine values inside one compiled step?

Each reduction becomes one `jit` equation with a name of ours, so that the locality analysis sees what was meant (a sum,
a mean, ...) whatever packing and arithmetic lie inside. How a sum travels is for the cross-device op to say: by its
algorithm, or by the hooks that a user wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _errors
from replicax._cross import axes, dtypes, slices
from replicax._cross.packing import Packing
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS, Placement
from replicax._values import PARTS, PerReplica, is_per_replica

PyTree = Any
Arrays = list[jax.Array]

REDUCE_NAME = "rx_reduce_"
GATHER_NAME = "rx_gather"
FIRST = "first"


class Algorithm(Protocol):
    """How a sum over the replicas is carried out, inside a compiled step."""

    def sum(self, arrays: Arrays, placement: Placement, bytes_per_pack: int) -> Arrays:
        """The sum of each of `arrays` over the replicas, the same bits on each; floats may come back wider."""
        ...


class Ops(Protocol):
    """What a reduction inside a step needs of a cross-device op. Hashable: reductions are kept per op."""

    @property
    def algorithm(self) -> Algorithm | None:
        """How sums travel; None if the op's hooks are to be asked."""
        ...

    def batch_reduce_implementation(self, op: ReduceOp, pairs: Any, options: Any, /) -> Any: ...


def all_reduce(ops: Ops, placement: Placement, op: ReduceOp, value: PyTree, options: CommunicationOptions) -> PyTree:
    """`value` combined over the replicas, leaf by leaf, all leaves in one exchange."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_one)
    dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
    results: list[Any] = [_reduce_slices(op, leaf, placement) if is_slices(leaf) else None for leaf in leaves]
    if dense:
        reduce = _reducer(op.name.lower(), ops, placement, options)
        for i, result in zip(dense, reduce(*[dtypes.checked(op, leaves[i]) for i in dense]), strict=True):
            results[i] = result
    return jax.tree.unflatten(tree, results)


def first(placement: Placement, value: PyTree) -> PyTree:
    """Replica 0's `value`, on every replica."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_per_replica)
    if not leaves:
        return value
    keys = {i: jax.random.key_impl(leaf) for i, leaf in enumerate(leaves) if dtypes.is_key(leaf)}
    arrays = [jax.random.key_data(leaf) if i in keys else jnp.asarray(leaf) for i, leaf in enumerate(leaves)]
    results = _reducer(FIRST, None, placement, CommunicationOptions())(*arrays)
    wrapped = [jax.random.wrap_key_data(x, impl=keys[i]) if i in keys else x for i, x in enumerate(results)]
    return jax.tree.unflatten(tree, wrapped)


def all_gather(placement: Placement, value: PyTree, axis: int) -> PyTree:
    """`value` of all replicas, concatenated along `axis`, on every replica."""

    def gather(leaf: Any) -> jax.Array:
        array, along = gatherable(leaf, axis)
        return _gatherer(placement, along)(array)

    return jax.tree.map(gather, value, is_leaf=is_one)


def is_one(x: Any) -> bool:
    """Whether `x` is one value to a reduction or a gather: slices, and a value per replica, of which this replica's."""
    return is_slices(x) or isinstance(x, PerReplica)


def gatherable(leaf: Any, axis: Any) -> tuple[jax.Array, int]:
    """What is to be gathered, as an array, and the axis counted from the front."""
    if is_slices(leaf):
        raise NotImplementedError(
            "all_gather does not support IndexedSlices. Gather `slices.values` and `slices.indices`, or "
            "`slices.to_dense()`."
        )
    array = dtypes.as_array("all_gather", leaf)
    axis = axes.one("all_gather", axis)
    if array.ndim == 0:
        raise ValueError(
            "all_gather concatenates along an axis and a scalar has none. Gather `x[None]` along axis 0 to get "
            "one entry per replica."
        )
    return array, axes.from_front("all_gather", (axis,), array.ndim)[0]


def stack(placement: Placement, array: jax.Array) -> Arrays:
    """The component of every replica, on every replica."""
    stacked = _gatherer(placement, 0)(jnp.asarray(array)[None])
    return [stacked[i] for i in range(placement.replicas)]


def _reduce_slices(op: ReduceOp, value: IndexedSlices, placement: Placement) -> IndexedSlices:
    slices.check_op(op)
    values, indices = all_gather(placement, (value.values, value.indices), 0)
    return slices.averaged(op, IndexedSlices(values, indices, value.dense_shape), placement.replicas)


@functools.lru_cache(maxsize=256)
def _gatherer(placement: Placement, axis: int) -> Callable[[jax.Array], jax.Array]:
    def gather(array: jax.Array) -> jax.Array:
        if array.shape[axis] == 0:  # which XLA refuses
            return jnp.zeros_like(array)
        return lax.all_gather(array, AXIS, axis=axis, tiled=True)

    gather.__name__ = gather.__qualname__ = GATHER_NAME
    return jax.jit(gather)


@functools.lru_cache(maxsize=256)
def _reducer(word: str, ops: Ops | None, placement: Placement, options: CommunicationOptions) -> Callable[..., Arrays]:
    """The reduction as one equation. Its name tells the analysis what it is; see `_locality.marks`."""
    combine = _first if ops is None else _combiner(ReduceOp.parse(word), ops, placement, options)

    def reduce(*arrays: jax.Array) -> Arrays:
        work = [dtypes.widened(word, array, bool(placement.auto_axes)) for array in arrays]
        return [dtypes.narrowed(word, x, array) for x, array in zip(combine(work), arrays, strict=True)]

    reduce.__name__ = reduce.__qualname__ = REDUCE_NAME + word
    return jax.jit(reduce)


def _combiner(
    op: ReduceOp, ops: Ops, placement: Placement, options: CommunicationOptions
) -> Callable[[Arrays], Arrays]:
    algorithm, bytes_per_pack = ops.algorithm, options.bytes_per_pack
    if algorithm is None:
        return _by_hooks(op, ops, placement, options)
    match op:
        case ReduceOp.SUM:
            return lambda arrays: algorithm.sum(arrays, placement, bytes_per_pack)
        case ReduceOp.MEAN:
            return lambda arrays: [
                dtypes.divided(x, placement.replicas) for x in algorithm.sum(arrays, placement, bytes_per_pack)
            ]
        case ReduceOp.MAX:
            return _packed_extreme(lax.pmax, placement, bytes_per_pack)
        case ReduceOp.MIN:
            return _packed_extreme(lax.pmin, placement, bytes_per_pack)


def _first(arrays: Arrays) -> Arrays:
    here = lax.axis_index(AXIS) == 0
    return lax.psum([jnp.where(here, x, jnp.zeros_like(x)) for x in arrays], AXIS)


# -- hooks written by a user


def _by_hooks(
    op: ReduceOp, ops: Ops, placement: Placement, options: CommunicationOptions
) -> Callable[[Arrays], Arrays]:
    """Every replica gets the components of all and calls the op's hooks on them, as the host does."""

    def combine(arrays: Arrays) -> Arrays:
        values = [PerReplica(tuple(stack(placement, array)), PARTS) for array in arrays]
        results = ops.batch_reduce_implementation(op, [(value, value) for value in values], options)
        return [_of_hook(ops, result, array) for result, array in zip(results, arrays, strict=True)]

    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        share = placement.replicas if op is ReduceOp.MEAN else 1
        return lambda arrays: linear(combine, arrays, share)
    return combine


def _of_hook(ops: Any, result: Any, operand: jax.Array) -> jax.Array:
    if isinstance(result, PerReplica):
        copies: tuple[Any, ...] = result.data if result.form == PARTS else ()
        if len({id(copy) for copy in copies}) != 1:
            raise _errors.hook_returned_per_replica(ops, result)
        result = copies[0]
    result = jnp.asarray(result)
    if result.shape != operand.shape:
        raise _errors.hook_changed_shape(ops, operand, result)
    return result


# -- derivatives
#
# The gradient of a sum over the replicas is the sum over the replicas of the gradients that come back, and JAX finds
# that by itself for `psum`. An all-gather followed by additions it would differentiate into a reduce-scatter, which is
# right but no longer equal on all replicas as far as the analysis can see. A `custom_vjp` would do and forbid forward
# mode; a `linear_call` cannot be vmapped. So: a `custom_jvp` whose tangents are summed by `psum`.


def linear(combine: Callable[[Arrays], Arrays], arrays: Arrays, share: int = 1) -> Arrays:
    """``combine(arrays)``, known to JAX to be the sum over the replicas divided by `share`."""

    @jax.custom_jvp
    def total(arrays: Arrays) -> Arrays:
        return combine(arrays)

    def rule(primals: Any, tangents: Any) -> tuple[Arrays, list[Any]]:
        results = total(*primals)
        return results, [_summed(t, out, share) for t, out in zip(*tangents, results, strict=True)]

    total.defjvp(rule)
    return total(arrays)


def _summed(tangent: Any, out: jax.Array, share: int) -> Any:
    if tangent.dtype == jax.dtypes.float0:
        return np.zeros(out.shape, jax.dtypes.float0)
    total = lax.psum(tangent, AXIS)
    return (total if share == 1 else total / share).astype(out.dtype)


def _packed_extreme(
    collective: Callable[..., jax.Array], placement: Placement, bytes_per_pack: int
) -> Callable[[Arrays], Arrays]:
    packing = Packing(num_packs=0 if placement.auto_axes else 1)
    return lambda arrays: packing.apply(
        lambda joined: [_extreme(collective, array) for array in joined], arrays, bytes_per_pack
    )


def _extreme(collective: Callable[..., jax.Array], array: jax.Array) -> jax.Array:
    """A pmax or pmin that can be differentiated: the replicas that hold the extreme share the gradient."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return collective(array, AXIS)

    @jax.custom_jvp
    def extreme(x: jax.Array) -> jax.Array:
        return collective(x, AXIS)

    @extreme.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        ((x,), (tangent,)) = primals, tangents
        y = extreme(x)
        holds = (x == y).astype(y.dtype)
        return y, lax.psum(tangent * holds / lax.psum(holds, AXIS), AXIS)

    return extreme(array)
