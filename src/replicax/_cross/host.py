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
from replicax._cross.axes import Axes, from_front
from replicax._cross.destinations import placement_of
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._host import dispatch_lock
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS, Placement
from replicax._values import (
    PARTS,
    ROWS,
    STACKED,
    PerReplica,
    is_laid_over,
    laid_again,
    lay_out,
    parts_of,
    refuse_misfit,
)

PyTree = Any


class Ops(in_step.Ops, Protocol):
    def reduce(self, op: ReduceOp, value: Any, destinations: Any, options: Any, /) -> Any: ...


def reduce(
    ops: Ops, placement: Placement, op: ReduceOp, values: Sequence[Any], axis: Axes, options: CommunicationOptions
) -> list[Any]:
    """Host values, per replica or plain → one value of each. Those laid over the replicas share one exchange."""
    results: dict[int, Any] = {}
    together: list[tuple[int, PerReplica]] = []
    for i, value in enumerate(values):
        if is_slices(value):
            results[i] = _reduce_slices(placement, op, value, axis)
        elif not isinstance(value, PerReplica):
            results[i] = reduce_plain(op, value, axis, placement.replicas)
        elif (value := check_replicas("strategy.reduce(...)", placement, value)).form == PARTS:
            results[i] = _reduce_parts(ops, placement, op, value, axis, options)
        elif value.mask is not None and value.form == STACKED:  # single examples, of which some replicas have none
            rows = PerReplica(value.data, ROWS, value.mask)
            (results[i],) = reduce_laid_out(ops, placement, op, [rows], (0,), options)
        elif value.mask is not None and _covers_rows(axis, value):
            (results[i],) = reduce_laid_out(ops, placement, op, [value], axis, options)
        else:
            together.append((i, value if value.mask is None else _without_padding(placement, op, value)))
    if together:
        laid_out = [value for _, value in together]
        reduced = reduce_laid_out(ops, placement, op, laid_out, axis, options)
        results.update((i, result) for (i, _), result in zip(together, reduced, strict=True))
    return [results[i] for i in range(len(values))]


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
        reduced = _along(op, dtypes.checked(op, value), axis)
        return reduced * replicas if op is ReduceOp.SUM else reduced
    if op is not ReduceOp.SUM or replicas == 1 or _is_zero(value):
        return value
    raise _errors.ambiguous_sum(value, replicas)


def gather(placement: Placement, value: Any, axis: int) -> Any:
    """The components of all replicas, concatenated along `axis`."""
    if is_slices(value):
        return parts.concatenate([value], axis)  # which refuses them
    if not isinstance(value, PerReplica):
        return _of_each(placement, value, axis) if lies_on_all(placement, value) else value
    value = check_replicas("strategy.gather(...)", placement, value)
    if value.form == PARTS:
        return parts.concatenate(_of_all(placement, value.data), axis)
    axis = parts.gather_axis(
        axis, [jax.ShapeDtypeStruct((), value.data.dtype) if value.form == STACKED else value.data]
    )
    if value.mask is not None:
        return _gather_rows(placement, value, axis)
    with dispatch_lock:
        return _gathering(placement, axis)(value.data)


def check_replicas(call: str, placement: Placement, value: PerReplica, name: str = "value") -> PerReplica:
    """`value`, if it has a component for each replica of `placement`; laid over them again if it was taken off them."""
    if value.form == PARTS:
        if len(parts_of(value)) != len(placement.local_replicas):
            raise _errors.of_other_replicas(call, value, placement, name)
        return value
    if not is_laid_over(placement.mesh, value):
        there = placement_of(value)
        if there is None:
            return laid_again(placement, value)
        if there.mesh != placement.mesh:
            raise _errors.of_other_replicas(call, value, placement, name)
    refuse_misfit(placement, value)
    return value


def lies_on_all(placement: Placement, value: Any) -> bool:
    """Whether `value` is an array with a copy on every device of several replicas: one that all of them have."""
    return (
        placement.replicas > 1
        and parts.is_array(value)
        and value.is_fully_replicated
        and value.sharding.device_set == placement.mirrored.device_set
    )


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
    if is_slices(x):
        raise _errors.slices_axis()
    axis = from_front("strategy.reduce", axis, x.ndim)
    count, rows = jnp.asarray(math.prod(x.shape[a] for a in axis)), None
    if valid is not None and 0 in axis:
        rows = (jnp.arange(x.shape[0]) < valid).reshape((-1,) + (1,) * (x.ndim - 1))
        count = math.prod(x.shape[a] for a in axis if a) * valid
    if op is not ReduceOp.MEAN:
        return all_reduce(op, _along(op, x, axis, rows))
    total, number = all_reduce(ReduceOp.SUM, (_along(ReduceOp.SUM, dtypes.in_full(op, x), axis, rows), count))
    return dtypes.narrowed("mean", total / number, x)


def _of_each(placement: Placement, value: jax.Array, axis: int) -> jax.Array:
    """Every replica's copy of one array, one after the other."""
    with dispatch_lock:
        return parts.concatenate([value] * placement.replicas, axis)


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
    return axis is not None and 0 in from_front("strategy.reduce", axis, value.data.ndim)


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
    mine = [math.prod(x.shape[a] for a in from_front("strategy.reduce", axis, x.ndim)) for x in arrays]
    count = sum(map(int, _of_all(placement, mine)))
    rows = None if count == 0 else jnp.array(True)  # a replica without any leaves the word to the others
    which = ReduceOp.SUM if op is ReduceOp.MEAN else op
    along = [_along(which, dtypes.in_full(op, array), axis, rows) for array in arrays]
    total = parts.combine(which, _of_all(placement, along))
    return dtypes.narrowed("mean", total / count, arrays[0]) if op is ReduceOp.MEAN else total


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
        raise _errors.slices_axis()
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
    axis = from_front("strategy.reduce", axis, x.ndim)
    if rows is None and op in (ReduceOp.MIN, ReduceOp.MAX) and 0 in [x.shape[a] for a in axis]:
        raise _errors.nothing_to_compare(op, x)
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


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic, np.ndarray)) and bool(np.all(value == 0))
