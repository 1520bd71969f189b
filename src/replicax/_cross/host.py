"""How does cross-replica code on the host combine what a run returned?

The same algorithms as inside a step, in small programs of their own; components that are held one by one (ragged ones,
sparse ones, Python numbers) are combined by the op as it stands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _errors
from replicax._cross import dtypes, in_step, parts, slices
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._host import dispatch_lock
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS, Placement
from replicax._values import PARTS, ROWS, STACKED, PerReplica, lay_out

PyTree = Any
Axes = tuple[int, ...] | None


class Ops(in_step.Ops, Protocol):
    def reduce(self, op: ReduceOp, value: Any, destinations: Any, options: Any, /) -> Any: ...


def reduce(ops: Ops, placement: Placement, op: ReduceOp, value: Any, axis: Axes, options: CommunicationOptions) -> Any:
    """One host value, per replica or plain → one value."""
    if is_slices(value):
        return _reduce_slices(placement, op, value, axis)
    if not isinstance(value, PerReplica):
        return reduce_plain(op, value, axis, placement.replicas)
    if value.form == PARTS:
        return _reduce_parts(ops, placement, op, value, axis, options)
    _check_axes(axis, value)
    if value.mask is not None and not _covers_rows(axis, value):
        value = _without_padding(placement, op, value)
    (result,) = reduce_laid_out(ops, placement, op, [value], axis, options)
    return result


def reduce_laid_out(
    ops: in_step.Ops,
    placement: Placement,
    op: ReduceOp,
    values: Sequence[PerReplica],
    axis: Axes,
    options: CommunicationOptions,
) -> list[jax.Array]:
    """Values laid over the replicas of `placement`, combined in one exchange."""
    masks = [value.mask for value in values if value.mask is not None and axis is not None]
    program = _reduction(ops, placement, op, tuple(value.form for value in values), axis, bool(masks), options)
    with dispatch_lock:
        return program([value.data for value in values], *masks)


def reduce_plain(op: ReduceOp, value: Any, axis: Axes, replicas: int) -> Any:
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
        return parts.concatenate([value], axis)  # which refuses them
    if not isinstance(value, PerReplica):
        return value
    if value.form == PARTS:
        return parts.concatenate(_of_all(placement, value.data), axis)
    if value.form == STACKED:
        return parts.concatenate([jax.ShapeDtypeStruct((), value.data.dtype)], axis)
    axis = parts.gather_axis(axis, [value.data])
    if value.mask is not None:
        return _gather_rows(placement, value, axis)
    with dispatch_lock:
        return _gathering(placement, axis)(value.data)


# -- values laid over the replicas


@functools.lru_cache(maxsize=512)
def _reduction(
    ops: in_step.Ops,
    placement: Placement,
    op: ReduceOp,
    forms: tuple[str, ...],
    axis: Axes,
    masked: bool,
    options: CommunicationOptions,
) -> Callable[..., Any]:
    def all_reduce(which: ReduceOp, x: Any) -> Any:
        return in_step.all_reduce(ops, placement, which, x, options)

    def body(values: list[jax.Array], mask: jax.Array | None = None) -> list[jax.Array]:
        local = [x[0] if form == STACKED else x for x, form in zip(values, forms, strict=True)]
        if axis is None:
            return all_reduce(op, local)
        return [reduce_local(all_reduce, op, x, axis, None if mask is None else mask[0, 0]) for x in local]

    return _over_replicas(placement, body, 2 if masked else 1)


def reduce_local(
    all_reduce: Callable[[ReduceOp, Any], Any], op: ReduceOp, x: jax.Array, axis: Axes, valid: Any = None
) -> jax.Array:
    """One replica's part in a reduction: first along `axis`, then over the replicas; `valid` rows count, the first."""
    if axis is None:
        return all_reduce(op, x)
    count, rows = jnp.asarray(math.prod(x.shape[a] for a in axis)), None
    if valid is not None and 0 in [a % x.ndim for a in axis]:
        rows = (jnp.arange(x.shape[0]) < valid).reshape((-1,) + (1,) * (x.ndim - 1))
        count = math.prod(x.shape[a] for a in axis if a % x.ndim) * valid
    if op is not ReduceOp.MEAN:
        return all_reduce(op, _along(op, x, axis, rows))
    total, number = all_reduce(ReduceOp.SUM, (_along(ReduceOp.SUM, x, axis, rows), count))
    return total / number


@functools.lru_cache(maxsize=64)
def _gathering(placement: Placement, axis: int) -> Callable[[jax.Array], jax.Array]:
    return _over_replicas(placement, lambda x: in_step.all_gather(placement, x, axis), 1)


def _over_replicas(placement: Placement, body: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """A program whose inputs are laid over the replicas and whose results are equal on all."""
    return jax.jit(
        jax.shard_map(
            body,
            mesh=placement.mesh,
            in_specs=(PartitionSpec(AXIS),) * inputs,
            out_specs=PartitionSpec(),
            check_vma=False,
            axis_names={AXIS},
        )
    )


# -- padding


def _covers_rows(axis: Axes, value: PerReplica) -> bool:
    return axis is not None and 0 in [a % value.data.ndim for a in axis]


def _counts(placement: Placement, value: PerReplica) -> list[int]:
    """How many rows of each replica are real."""
    with dispatch_lock:
        return np.asarray(_gathering(placement, 0)(value.mask))[:, 0].tolist()


def _without_padding(placement: Placement, op: ReduceOp, value: PerReplica) -> PerReplica:
    """The value without its padding rows, which must be as many on each replica: rows are matched one by one."""
    counts = _counts(placement, value)
    rows = value.data.shape[0] // placement.replicas
    if len(set(counts)) > 1:
        shape = value.data.shape[1:]
        raise _errors.ragged_reduce(op, [jax.ShapeDtypeStruct((count, *shape), value.data.dtype) for count in counts])
    if counts[0] == rows:
        return PerReplica(value.data, ROWS)
    cut = _over_replicas_apart(placement, counts[0])
    with dispatch_lock:
        return PerReplica(cut(value.data), ROWS)


@functools.lru_cache(maxsize=64)
def _over_replicas_apart(placement: Placement, rows: int) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            lambda x: x[:rows], mesh=placement.mesh, in_specs=spec, out_specs=spec, check_vma=False, axis_names={AXIS}
        )
    )


def _gather_rows(placement: Placement, value: PerReplica, axis: int) -> jax.Array:
    with dispatch_lock:
        whole = _gathering(placement, 0)(value.data)
    counts, rows = _counts(placement, value), whole.shape[0] // placement.replicas
    blocks = [whole[i * rows : i * rows + count] for i, count in enumerate(counts)]
    return parts.concatenate(blocks, axis)


# -- components held one by one


def _reduce_parts(
    ops: Ops, placement: Placement, op: ReduceOp, value: PerReplica, axis: Axes, options: CommunicationOptions
) -> Any:
    if axis is None:
        everyones = PerReplica(tuple(_of_all(placement, value.data)), PARTS)
        return ops.reduce(op, everyones, everyones, options)
    arrays = [dtypes.checked(op, part) for part in value.data]
    for array in arrays:
        _check_axis_of(axis, array.ndim)
    which = ReduceOp.SUM if op is ReduceOp.MEAN else op
    total = parts.combine(which, _of_all(placement, [_along(which, array, axis) for array in arrays]))
    if op is not ReduceOp.MEAN:
        return total
    return total / sum(map(int, _of_all(placement, [math.prod(array.shape[a] for a in axis) for array in arrays])))


def _of_all(placement: Placement, mine: Sequence[Any]) -> list[Any]:
    """The components of all replicas, given those of this process. They may be of different lengths."""
    if len(mine) == placement.replicas:
        return list(mine)
    if is_slices(mine[0]):
        values = _of_all(placement, [part.values for part in mine])
        indices = _of_all(placement, [part.indices for part in mine])
        return [IndexedSlices(v, i, mine[0].dense_shape) for v, i in zip(values, indices, strict=True)]
    arrays = [np.asarray(part) for part in mine]
    shapes = _all_gathered(placement, [np.array(array.shape, np.int32)[None] for array in arrays])
    largest = shapes.max(0)
    padded = [np.pad(array, [(0, most - n) for n, most in zip(array.shape, largest, strict=True)]) for array in arrays]
    blocks = _all_gathered(placement, [array[None] for array in padded])
    return [jnp.asarray(block[tuple(map(slice, shape))]) for block, shape in zip(blocks, shapes, strict=True)]


def _all_gathered(placement: Placement, mine: list[np.ndarray]) -> np.ndarray:
    with dispatch_lock:
        return np.asarray(_gathering(placement, 0)(lay_out(placement, mine).data))


def _reduce_slices(placement: Placement, op: ReduceOp, value: IndexedSlices, axis: Axes) -> IndexedSlices:
    """Slices whose values or indices, or both, differ per replica."""
    slices.check_op(op)
    if axis is not None:
        raise NotImplementedError("strategy.reduce(..., axis=...) of IndexedSlices. Reduce `slices.to_dense()`.")
    held = (value.values, value.indices)
    if not any(isinstance(array, PerReplica) for array in held):
        return reduce_plain(op, value, None, placement.replicas)
    values, indices = (
        gather(placement, array, 0) if isinstance(array, PerReplica) else jnp.concatenate([array] * placement.replicas)
        for array in held
    )
    return slices.averaged(op, IndexedSlices(values, indices, value.dense_shape), placement.replicas)


# -- along axes


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
    if x.dtype == jnp.bool_:
        return largest
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.inf if largest else -jnp.inf
    info = jnp.iinfo(x.dtype)
    return info.max if largest else info.min


def _check_axes(axis: Axes, value: PerReplica) -> None:
    _check_axis_of(axis, 0 if value.form == STACKED else value.data.ndim)


def _check_axis_of(axis: Axes, rank: int) -> None:
    for a in axis or ():
        if not -rank <= a < rank:
            raise ValueError(
                f"strategy.reduce(..., axis={a}): each replica's value has rank {rank}, so its axes are "
                f"{-rank}..{rank - 1}." if rank else
                f"strategy.reduce(..., axis={a}): each replica's value is a scalar and has no axis. Use axis=None."
            )  # fmt: skip


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) and value == 0
