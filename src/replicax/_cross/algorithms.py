"""In which order, and over which roads, are the replicas' values added up?

Each algorithm here is an `in_step.Algorithm`: frozen data that says how a compiled step sums a list of arrays. All give
the same sums up to the order of the additions.
"""

# Reduce-scatter followed by all-gather moves the same bytes as an all-reduce, in two operations. In-process on CPU it
# is the faster of the two only in a process whose allocator hands large buffers back to the kernel: there XLA's
# all-reduce of many large gradients faults in a temporary as big as all of them, at every step. Steps on 2 and 4 devices
# that compute their gradients (of gradients that are arguments the all-reduce is the faster one in both), time over that
# of `lax.psum`:
#
#                      allocator untuned     tuned
#   80 x 256 KB        0.64  0.48            1.30  1.21
#   20 x 1 MB          0.49  0.39            1.08  1.12
#    4 x 4 MB          0.48  0.35            1.18  1.09
#    1 x 16 MB         0.39  0.45            1.14  1.05
#    1 x 64 MB         0.98  0.88            1.11  1.08

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _host
from replicax._cross import in_step
from replicax._cross.in_step import Arrays
from replicax._cross.packing import Packing
from replicax._cross.parts import Accumulate, added_in_order
from replicax._placement import AXIS, Placement

SCATTER_BYTES = 256 * 1024
"""From this size on an all-reduce is done in two halves, where that pays."""

EXCHANGE_BYTES = 128 * 1024
"""From this size on replicas exchange chunks of an array instead of copies of it."""

Groups = list[list[int]]


@dataclasses.dataclass(frozen=True)
class AllReduceAlgorithm:
    """The platform's own all-reduce (in-process, gloo, NCCL, ICI), small arrays packed."""

    packing: Packing = Packing()

    def sum(self, arrays: Arrays, placement: Placement, bytes_per_pack: int) -> Arrays:
        halves = _is_in_process_cpu(placement) and not _host.keeps_buffers()

        def combine(joined: Arrays) -> Arrays:
            large = [halves and _bytes(array) >= SCATTER_BYTES for array in joined]
            rest = iter(lax.psum([x for x, in_halves in zip(joined, large, strict=True) if not in_halves], AXIS))
            return [_in_halves(x) if in_halves else next(rest) for x, in_halves in zip(joined, large, strict=True)]

        return _packed(self.packing, combine, arrays, placement, bytes_per_pack)


@dataclasses.dataclass(frozen=True)
class OneDeviceAlgorithm:
    """Replica 0's value plus replica 1's plus ..., always in this order, so that results are reproducible bit for bit.

    Every replica does the additions itself, each of a chunk if the array is large, which gives all of them what the one
    device would have computed. Floats of 16 bits are added as 32-bit ones and rounded once.
    """

    accumulate: Accumulate | None = None
    """What adds up a list of arrays; by default `added_in_order`."""

    def sum(self, arrays: Arrays, placement: Placement, bytes_per_pack: int) -> Arrays:
        def combine(joined: Arrays) -> Arrays:
            return [self._of_all(array, placement) for array in joined]

        packing = Packing(num_packs=1 if self.accumulate is None else 0)
        return in_step.linear(lambda arrays: _packed(packing, combine, arrays, placement, bytes_per_pack), arrays)

    def _of_all(self, array: jax.Array, placement: Placement) -> jax.Array:
        if self.accumulate is not None:
            return self.accumulate(in_step.stack(placement, array))
        if _bytes(array) < EXCHANGE_BYTES or placement.auto_axes:
            return added_in_order(list(lax.all_gather(array, AXIS)))
        chunks = lax.all_to_all(_flat(array, placement.replicas).reshape(placement.replicas, -1), AXIS, 0, 0)
        return _unflat(lax.all_gather(added_in_order(list(chunks)), AXIS, tiled=True), array)


@dataclasses.dataclass(frozen=True)
class HierarchicalAlgorithm:
    """First within groups, then between them: over hosts if there are several, else over groups of about half."""

    packing: Packing = Packing()

    def sum(self, arrays: Arrays, placement: Placement, bytes_per_pack: int) -> Arrays:
        inside, across = groups(placement)

        def combine(joined: Arrays) -> Arrays:
            return [_in_two_levels(array, inside, across) for array in joined]

        if len(inside) == 1:
            return AllReduceAlgorithm(self.packing).sum(arrays, placement, bytes_per_pack)
        return _packed(self.packing, combine, arrays, placement, bytes_per_pack)


def groups(placement: Placement) -> tuple[Groups, Groups]:
    """Who reduces with whom: the groups of the first level, and of the second, which takes one member of each.

    >>> import jax
    >>> from replicax._cross.algorithms import groups
    >>> from replicax._placement import place
    >>> groups(place(jax.devices()[:6]))
    ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])
    """
    hosts: dict[int, list[int]] = {}
    for i, device in enumerate(placement.devices):
        hosts.setdefault(device.process_index, []).append(i)
    inside = list(hosts.values())
    if len(inside) == 1 or len({len(group) for group in inside}) > 1:
        n = placement.replicas
        size = next((size for size in range(n // 2, 1, -1) if n % size == 0), n)
        inside = [list(range(start, start + size)) for start in range(0, n, size)]
    return inside, [list(members) for members in zip(*inside, strict=True)]


def _packed(
    packing: Packing, combine: Callable[[Arrays], Arrays], arrays: Arrays, placement: Placement, bytes_per_pack: int
) -> Arrays:
    if placement.replicas == 1:
        return arrays
    if placement.auto_axes:  # joining arrays that lie over several devices would collect them first
        return combine(arrays)
    return packing.apply(combine, arrays, bytes_per_pack)


def _in_halves(array: jax.Array) -> jax.Array:
    replicas = lax.axis_size(AXIS)
    mine = lax.psum_scatter(_flat(array, replicas), AXIS, tiled=True)
    return _unflat(lax.all_gather(mine, AXIS, tiled=True), array)


def _in_two_levels(array: jax.Array, inside: Groups, across: Groups) -> jax.Array:
    """Between the groups travels 1/n of a large array for each of a group's n members."""
    if _bytes(array) < SCATTER_BYTES:
        return lax.psum(lax.psum(array, AXIS, axis_index_groups=inside), AXIS, axis_index_groups=across)
    mine = lax.psum_scatter(_flat(array, len(inside[0])), AXIS, axis_index_groups=inside, tiled=True)
    mine = lax.psum(mine, AXIS, axis_index_groups=across)
    return _unflat(lax.all_gather(mine, AXIS, axis_index_groups=inside, tiled=True), array)


def _flat(array: jax.Array, chunks: int) -> jax.Array:
    """All elements in a row, and zeros behind them until `chunks` divides their number."""
    flat = array.reshape(-1)
    missing = -flat.size % chunks
    return jnp.pad(flat, (0, missing)) if missing else flat


def _unflat(flat: jax.Array, like: jax.Array) -> jax.Array:
    return (flat if flat.size == like.size else flat[: like.size]).reshape(like.shape)


def _bytes(array: jax.Array) -> int:
    return array.size * array.dtype.itemsize


def _is_in_process_cpu(placement: Placement) -> bool:
    return len(placement.local_replicas) == placement.replicas and placement.devices[0].platform == "cpu"
