"""How does cross-replica code on the host combine what a run returned?

The same algorithms as inside a step, in small programs of their own; ragged parts and Python objects are combined one by
one on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _errors
from replicax._cross import in_step
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._host import dispatch_lock
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS, Placement
from replicax._values import PARTS, STACKED, TRACED, PerReplica, components

PyTree = Any


def reduce(
    algorithm: in_step.Algorithm,
    placement: Placement,
    op: ReduceOp,
    value: Any,
    axis: tuple[int, ...] | None,
    options: CommunicationOptions,
) -> Any:
    """One host value, per replica or plain → one value."""
    if is_slices(value):
        return _reduce_slices(placement, op, value)
    if not isinstance(value, PerReplica):
        return reduce_plain(op, value, axis, placement.replicas)
    if value.form == PARTS:
        return _reduce_parts(op, value.data, axis)
    _check_axes(axis, value)
    program = _reduction(algorithm, placement, op, value.form, axis, value.mask is not None, options.bytes_per_pack)
    with dispatch_lock:
        return program(value.data) if value.mask is None else program(value.data, value.mask)


def reduce_plain(op: ReduceOp, value: Any, axis: tuple[int, ...] | None, replicas: int) -> Any:
    """A value that is the same on every replica."""
    if axis is not None:
        reduced = _along(op, jnp.asarray(value), axis)
        return reduced * replicas if op is ReduceOp.SUM else reduced
    if op is not ReduceOp.SUM or replicas == 1 or _is_zero(value):
        return value
    raise _errors.ambiguous_sum(value, replicas)


def gather(placement: Placement, value: Any, axis: int) -> Any:
    """The components of all replicas, concatenated along `axis`."""
    if is_slices(value):
        raise NotImplementedError("gather does not support IndexedSlices. Gather its values and its indices.")
    if not isinstance(value, PerReplica):
        return value
    if value.form == STACKED:
        raise ValueError(
            "gather concatenates along an axis and the replicas' values are scalars. Return `x[None]` from the step, "
            "or read them with strategy.experimental_local_results(value)."
        )
    if value.form == PARTS or value.mask is not None:
        parts = [jnp.asarray(np.asarray(part)) for part in components(value)]
        return jnp.concatenate(parts, _gather_axis(axis, parts))
    axis = _gather_axis(axis, [value.data])
    with dispatch_lock:
        if axis == 0:
            return jax.device_put(value.data, placement.mirrored)
        return _gathering(placement, axis)(value.data)


@functools.lru_cache(maxsize=512)
def _reduction(
    algorithm: in_step.Algorithm,
    placement: Placement,
    op: ReduceOp,
    form: str,
    axis: tuple[int, ...] | None,
    masked: bool,
    bytes_per_pack: int,
) -> Callable[..., Any]:
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def all_reduce(which: ReduceOp, x: Any) -> Any:
        return in_step.all_reduce(algorithm, placement, which, x, options)

    def body(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return reduce_local(all_reduce, op, x[0] if form == STACKED else x, axis, None if mask is None else mask[0, 0])

    return jax.jit(
        jax.shard_map(
            body,
            mesh=placement.mesh,
            in_specs=(PartitionSpec(AXIS),) * (2 if masked else 1),
            out_specs=PartitionSpec(),
            check_vma=False,
            axis_names={AXIS},
        )
    )


def reduce_local(
    all_reduce: Callable[[ReduceOp, Any], Any],
    op: ReduceOp,
    x: jax.Array,
    axis: tuple[int, ...] | None,
    valid: Any = None,
) -> jax.Array:
    """One replica's part in a reduction: first along `axis`, then over the replicas; only the first `valid` rows count."""
    if axis is None:
        return all_reduce(op, x)
    by_row = valid is not None and 0 in [a % x.ndim for a in axis]
    rows = (jnp.arange(x.shape[0]) < valid).reshape((-1,) + (1,) * (x.ndim - 1)) if by_row else None
    if op is not ReduceOp.MEAN:
        return all_reduce(op, _along(op, x, axis, rows))
    count = jnp.asarray(math.prod(x.shape[a] for a in axis))
    if by_row:
        count = math.prod(x.shape[a] for a in axis if a % x.ndim) * valid
    total, number = all_reduce(ReduceOp.SUM, (_along(ReduceOp.SUM, x, axis, rows), count))
    return total / number


@functools.lru_cache(maxsize=64)
def _gathering(placement: Placement, axis: int) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        jax.shard_map(
            lambda x: in_step.all_gather(placement, x, axis),
            mesh=placement.mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
            axis_names={AXIS},
        )
    )


def _along(op: ReduceOp, x: jax.Array, axis: tuple[int, ...], rows: jax.Array | None = None) -> jax.Array:
    match op:
        case ReduceOp.SUM:
            return jnp.sum(x, axis, where=rows)
        case ReduceOp.MEAN:
            return jnp.mean(x, axis, where=rows)
        case ReduceOp.MIN:
            return jnp.min(x, axis) if rows is None else jnp.min(x, axis, where=rows, initial=_limit(x, True))
        case ReduceOp.MAX:
            return jnp.max(x, axis) if rows is None else jnp.max(x, axis, where=rows, initial=_limit(x, False))


def _limit(x: jax.Array, largest: bool) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.inf if largest else -jnp.inf
    info = jnp.iinfo(x.dtype)
    return info.max if largest else info.min


def _reduce_parts(op: ReduceOp, parts: Sequence[Any], axis: tuple[int, ...] | None) -> Any:
    arrays = [np.asarray(part) for part in parts]
    if axis is not None:
        if op is ReduceOp.MEAN:
            total = sum(array.sum(axis) for array in arrays)
            count = sum(math.prod(array.shape[a] for a in axis) for array in arrays)
            return jnp.asarray(total) / count
        arrays = [np.asarray(_along(op, jnp.asarray(array), axis)) for array in arrays]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise _errors.ragged_reduce(op, arrays)
    match op:
        case ReduceOp.SUM | ReduceOp.MEAN:
            total = functools.reduce(np.add, arrays)
            return jnp.asarray(total) / len(arrays) if op is ReduceOp.MEAN else jnp.asarray(total)
        case ReduceOp.MIN:
            return jnp.asarray(functools.reduce(np.minimum, arrays))
        case ReduceOp.MAX:
            return jnp.asarray(functools.reduce(np.maximum, arrays))


def _reduce_slices(placement: Placement, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise _errors.slices_op(op)
    if not isinstance(slices.values, PerReplica):
        return slices
    values, indices = gather(placement, slices.values, 0), gather(placement, slices.indices, 0)
    return IndexedSlices(
        values / placement.replicas if op is ReduceOp.MEAN else values, indices, slices.dense_shape
    )


def _check_axes(axis: tuple[int, ...] | None, value: PerReplica) -> None:
    rank = 0 if value.form == STACKED else value.data.ndim
    for a in axis or ():
        if not -rank <= a < rank:
            raise ValueError(
                f"strategy.reduce(..., axis={a}): each replica's value has rank {rank}, so its axes are "
                f"{-rank}..{rank - 1}." if rank else
                f"strategy.reduce(..., axis={a}): each replica's value is a scalar and has no axis. Use axis=None."
            )  # fmt: skip


def _gather_axis(axis: int, arrays: list[jax.Array]) -> int:
    rank = arrays[0].ndim
    if any(array.ndim != rank for array in arrays):
        raise _errors.gather_shapes("rank", arrays)
    if not -rank <= axis < rank:
        raise ValueError(f"gather(axis={axis}) of values of rank {rank}: the axes are {-rank}..{rank - 1}.")
    axis %= rank
    rests = {array.shape[:axis] + array.shape[axis + 1 :] for array in arrays}
    if len(rests) > 1:
        raise _errors.gather_shapes("shape", arrays)
    return axis


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) and value == 0
