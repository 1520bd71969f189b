"""How do N values that are all here become one? On one device, in replica order.

This is what a reduction to one device does, what user-written hooks call inside a compiled step, and the way for values
that no all-reduce takes: ragged ones, sparse ones, numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax import _errors, _jax
from replicax._cross import axes, dtypes, slices
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import ReduceOp

Accumulate = Callable[[list[jax.Array]], jax.Array]


def combine(op: ReduceOp, parts: Sequence[Any], accumulate: Accumulate | None = None) -> Any:
    """One value of `parts`, element by element. With any sparse part the result is sparse, rows one after the other."""
    if any(map(is_slices, parts)):
        return slices.joined(op, [part if is_slices(part) else _all_rows(part) for part in together(parts)])
    arrays = [dtypes.checked(op, part) for part in parts]
    if len({array.shape for array in arrays}) > 1:
        raise _errors.ragged_reduce(op, arrays)
    common = jnp.result_type(*arrays)
    arrays = [array.astype(common) for array in together(arrays)]
    return _combiner(op, accumulate or added_in_order)(*arrays)


def concatenate(parts: Sequence[Any], axis: int) -> jax.Array:
    """`parts` one after the other along `axis`."""
    if any(map(is_slices, parts)):
        raise NotImplementedError("gather does not support IndexedSlices. Gather its values and its indices.")
    arrays = [dtypes.as_array("gather", part) for part in parts]
    return jnp.concatenate(together(arrays), gather_axis(axis, arrays))


def together(parts: Sequence[Any], device: jax.Device | None = None) -> list[Any]:
    """`parts` on `device`; by default on that of the first, if they lie on several. Traced ones lie nowhere."""
    homes = [home for part in jax.tree.leaves(list(parts)) for home in _homes(part)]
    if device is None and len(set(homes)) < 2:
        return list(parts)
    sharding = SingleDeviceSharding(device or homes[0])
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if is_concrete(x) else x, list(parts))


def is_concrete(x: Any) -> bool:
    """Whether `x` can be moved to a device: not if it is being traced."""
    return is_array(x) or isinstance(x, (np.ndarray, np.generic, bool, int, float, complex))


def is_array(x: Any) -> bool:
    """Whether `x` is an array that lies somewhere."""
    return isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer)


def _homes(part: Any) -> list[jax.Device]:
    return sorted(part.devices(), key=lambda device: device.id) if is_array(part) else []


def gather_axis(axis: Any, arrays: Sequence[Any]) -> int:
    """`axis` counted from the front; refuses arrays that cannot be concatenated along it."""
    rank = arrays[0].ndim
    if any(array.ndim != rank for array in arrays):
        raise _errors.gather_shapes("rank", arrays)
    if rank == 0:
        raise ValueError(
            "gather concatenates along an axis and the replicas' values are scalars. Return `x[None]` from the step, "
            "or read them with strategy.experimental_local_results(value)."
        )
    (axis,) = axes.from_front("strategy.gather", (axes.one("strategy.gather", axis),), rank)
    rests = {array.shape[:axis] + array.shape[axis + 1 :] for array in arrays}
    if len(rests) > 1:
        raise _errors.gather_shapes("shape", arrays)
    return axis


def added_in_order(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum from left to right. Floats of 16 bits are added as 32-bit ones, for the caller to round once."""
    if parts[0].dtype.itemsize < 4 and dtypes.is_float(parts[0]):
        parts = [part.astype(jnp.float32) for part in parts]  # else XLA rounds in between or not, as it likes
    return functools.reduce(operator.add, parts)


@functools.lru_cache(maxsize=64)
def _combiner(op: ReduceOp, accumulate: Accumulate) -> Callable[..., jax.Array]:
    word = op.name.lower()

    def reduce(*parts: jax.Array) -> jax.Array:
        result = _combined(op, accumulate, [dtypes.widened(word, part) for part in parts])
        return dtypes.narrowed(word, result, parts[0])

    return jax.jit(reduce)


def _combined(op: ReduceOp, accumulate: Accumulate, parts: list[jax.Array]) -> jax.Array:
    match op:
        case ReduceOp.SUM:
            return accumulate(parts)
        case ReduceOp.MEAN:
            return dtypes.divided(accumulate(parts), len(parts))
        case ReduceOp.MIN:
            return functools.reduce(jnp.minimum, parts)
        case ReduceOp.MAX:
            return functools.reduce(jnp.maximum, parts)


def _all_rows(array: Any) -> IndexedSlices:
    array = jnp.asarray(array)
    return IndexedSlices(array, jnp.arange(array.shape[0]), array.shape)
