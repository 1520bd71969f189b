"""How do replicas combine values inside one compiled step?

Each reduction becomes one `jit` equation with a name of ours, so that the locality analysis sees what was meant (a sum, a
mean, ...) whatever packing and arithmetic lie inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _errors
from replicax._cross import packing
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS, Placement

PyTree = Any

REDUCE_NAME = "rx_reduce_"
GATHER_NAME = "rx_gather"


class Algorithm(Protocol):
    """How a sum over the replicas is carried out. Hashable, since compiled reductions are kept per algorithm."""

    def sum(self, arrays: list[jax.Array], replicas: int, bytes_per_pack: int) -> list[jax.Array]: ...


def all_reduce(
    algorithm: Algorithm, placement: Placement, op: ReduceOp, value: PyTree, options: CommunicationOptions
) -> PyTree:
    """`value` combined over the replicas, leaf by leaf, all leaves in one exchange."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_slices)
    dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
    results: list[Any] = [None] * len(leaves)
    if dense:
        reduce = _reducer(op.name.lower(), algorithm, placement, options.bytes_per_pack)
        arrays = [jnp.asarray(leaves[i]) for i in dense]
        for i, result in zip(dense, reduce(*arrays), strict=True):
            results[i] = result
    for i, leaf in enumerate(leaves):
        if is_slices(leaf):
            results[i] = _reduce_slices(op, leaf, placement)
    return jax.tree.unflatten(tree, results)


def first(placement: Placement, value: PyTree) -> PyTree:
    """Replica 0's `value`, on every replica."""
    leaves, tree = jax.tree.flatten(value)
    reduce = _reducer("first", None, placement, 0)
    return jax.tree.unflatten(tree, reduce(*[jnp.asarray(leaf) for leaf in leaves]) if leaves else [])


def all_gather(placement: Placement, value: PyTree, axis: int) -> PyTree:
    """`value` of all replicas, concatenated along `axis`, on every replica."""

    def gather(leaf: Any) -> Any:
        if is_slices(leaf):
            raise NotImplementedError(
                "all_gather does not support IndexedSlices. Gather `slices.values` and `slices.indices`, or "
                "`slices.to_dense()`."
            )
        array = jnp.asarray(leaf)
        if array.ndim == 0:
            raise ValueError(
                "all_gather concatenates along an axis and a scalar has none. Gather `x[None]` along axis 0 to get "
                "one entry per replica."
            )
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"all_gather(axis={axis}) of an array of rank {array.ndim}, whose axes are "
                             f"{-array.ndim}..{array.ndim - 1}.")
        return _gatherer(placement, axis % array.ndim)(array)

    return jax.tree.map(gather, value, is_leaf=is_slices)


def stack(placement: Placement, array: jax.Array) -> list[jax.Array]:
    """The component of every replica, on every replica."""
    stacked = _gatherer(placement, 0)(jnp.asarray(array)[None])
    return [stacked[i] for i in range(placement.replicas)]


def _reduce_slices(op: ReduceOp, slices: IndexedSlices, placement: Placement) -> IndexedSlices:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise _errors.slices_op(op)
    values, indices = all_gather(placement, (slices.values, slices.indices), 0)
    if op is ReduceOp.MEAN:
        values = values / placement.replicas
    return IndexedSlices(values, indices, slices.dense_shape)


@functools.lru_cache(maxsize=256)
def _reducer(op: str, algorithm: Algorithm | None, placement: Placement, bytes_per_pack: int) -> Callable[..., Any]:
    replicas = placement.replicas
    wide = bool(placement.auto_axes)

    def reduce(*arrays: jax.Array) -> list[jax.Array]:
        work = [_widen(array, op, wide) for array in arrays]
        if op in ("sum", "mean"):
            assert algorithm is not None
            out = algorithm.sum(work, replicas, bytes_per_pack)
            if op == "mean":
                out = [x / replicas for x in out]
        elif op == "first":
            here = lax.axis_index(AXIS) == 0
            out = lax.psum([jnp.where(here, x, jnp.zeros_like(x)) for x in work], AXIS)
        else:
            extreme = _extreme(lax.pmax if op == "max" else lax.pmin)
            out = [extreme(x) for x in work]
        return [_narrow(x, array, op) for x, array in zip(out, arrays, strict=True)]

    reduce.__name__ = reduce.__qualname__ = REDUCE_NAME + op
    return jax.jit(reduce)


def _widen(array: jax.Array, op: str, wide: bool) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    if wide and array.dtype.itemsize < 4 and jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.float32)  # a 16-bit psum beside an Auto axis aborts the process on CPU
    return array


def _narrow(result: jax.Array, array: jax.Array, op: str) -> jax.Array:
    if op == "sum" and array.dtype == jnp.bool_:
        return result
    if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
        return result
    return result.astype(array.dtype)


def _extreme(collective: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A differentiable pmax or pmin: the gradient goes to the replicas that hold the extreme, shared among them."""

    @jax.custom_vjp
    def extreme(x: jax.Array) -> jax.Array:
        return collective(x, AXIS)

    def forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y = collective(x, AXIS)
        return y, (x, y)

    def backward(saved: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[jax.Array]:
        x, y = saved
        holds = (x == y).astype(upstream.dtype)
        share, total = lax.psum((holds, upstream), AXIS)
        return (total * holds / share,)

    extreme.defvjp(forward, backward)
    return extreme


@functools.lru_cache(maxsize=256)
def _gatherer(placement: Placement, axis: int) -> Callable[[jax.Array], jax.Array]:
    def gather(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.bool_:
            return gather(array.astype(jnp.int8)).astype(jnp.bool_)
        return lax.all_gather(array, AXIS, axis=axis, tiled=True)

    gather.__name__ = gather.__qualname__ = GATHER_NAME
    return jax.jit(gather)


def packed_sum(arrays: list[jax.Array], bytes_per_pack: int) -> list[jax.Array]:
    """The platform's own all-reduce, small arrays packed."""
    return packing.packed(lambda joined: lax.psum(joined, AXIS), arrays, bytes_per_pack)
