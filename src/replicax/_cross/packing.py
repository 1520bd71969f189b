"""How do many small arrays travel as few large ones?

XLA joins all-reduces of one program into one operation but still pays for each operand (about 17 microseconds on CPU),
so small gradients are concatenated first. Large ones are left alone: copying them into a pack costs more than it saves.

A *plan* says which arrays, by position, travel together. Whatever the plan, the sums are the same.
"""

# Where the two sizes come from: a step on 2 CPU devices that reduces its gradients and updates as many weights, time
# over that of one unpacked `lax.psum` of the list (benchmarks/allreduce.py; allocator tuned; 4 devices look the same;
# docs/log.md has the figures of what we chose):
#
#                         packs of 64 KB   256 KB    1 MB      2 MB
#   200 arrays of 256 B        0.30         0.28     0.28
#    40 arrays of 16 KB        0.38         0.35     0.28
#    40 arrays of 64 KB        1.04         0.56     0.45      0.47
#    40 arrays of 128 KB                    0.76     0.69      0.73
#    20 arrays of 256 KB                    0.99     0.78      0.77
#    20 arrays of 1 MB         copying into packs of 4 MB made it 3.6 times slower

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

SMALL_BYTES = 256 * 1024
PACK_BYTES = 1024 * 1024

Plan = list[list[int]]
Combine = Callable[[list[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """What the maker of a cross-device op asked for, in the words of tf.distribute.

    Args:
      num_packs: 0 packs nothing, 1 packs by size as measured, more joins everything and cuts it into so many pieces.
      small_bytes: With ``num_packs=0``: neighbours of at most this many bytes travel together; 0 packs nothing.
      small_group: At most so many of them.
    """

    num_packs: int = 1
    small_bytes: int = 0
    small_group: int = 10

    def apply(self, combine: Combine, arrays: Sequence[jax.Array], bytes_per_pack: int = 0) -> list[jax.Array]:
        """Applies an element-wise `combine` to `arrays`; a `bytes_per_pack` of the caller beats all else."""
        if bytes_per_pack:
            return packed(combine, arrays, by_dtype(arrays, lambda sizes: group_by_size(sizes, bytes_per_pack)))
        if self.num_packs > 1:
            return cut(combine, arrays, self.num_packs)
        if self.num_packs == 1:
            return packed(combine, arrays, by_size_class(arrays))
        if self.small_bytes and self.small_group:
            return packed(combine, arrays, small_runs(arrays, self.small_bytes, self.small_group))
        return combine(list(arrays))


# -- plans


def by_size_class(arrays: Sequence[Any]) -> Plan:
    """Small arrays of one dtype together, in packs that do not exceed `PACK_BYTES`; every large one by itself."""
    plan: Plan = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for i, array in enumerate(arrays):
        size = _bytes(array)
        if size > SMALL_BYTES:
            plan.append([i])
            continue
        pack, filled = filling.get(array.dtype, ([], 0))
        if not pack or filled + size > PACK_BYTES:
            pack, filled = [], 0
            plan.append(pack)
        pack.append(i)
        filling[array.dtype] = pack, filled + size
    return plan


def by_dtype(arrays: Sequence[Any], group: Callable[[list[int]], Plan]) -> Plan:
    """A plan made by `group` from sizes in bytes, for each dtype on its own, the last arrays first.

    The gradients of the last layers are ready first, so their pack can leave while the others are still computed.
    """
    dtypes: dict[Any, list[int]] = {}
    for i in reversed(range(len(arrays))):
        dtypes.setdefault(arrays[i].dtype, []).append(i)
    return [
        [members[k] for k in pack]
        for members in dtypes.values()
        for pack in group([_bytes(arrays[i]) for i in members])
    ]


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> Plan:
    """Neighbours together until a pack is larger than `bytes_per_pack`; 0 puts all into one.

    >>> from replicax._cross.packing import group_by_size
    >>> group_by_size([128, 32, 800, 4], 200)
    [[0, 1, 2], [3]]
    """
    plan: Plan = []
    filled = 0
    for i, size in enumerate(sizes):
        if not plan or (bytes_per_pack and filled > bytes_per_pack):
            plan.append([])
            filled = 0
        plan[-1].append(i)
        filled += size
    return plan


def small_runs(arrays: Sequence[Any], max_bytes: int, max_group: int) -> Plan:
    """Runs of small float32 neighbours, at most `max_group` each, before all others; those travel by themselves.

    >>> import numpy as np
    >>> from replicax._cross.packing import small_runs
    >>> small, large = np.zeros(4, np.float32), np.zeros(100, np.float32)
    >>> small_runs([small, small, large, small], max_bytes=64, max_group=10)
    [[0, 1], [2], [3]]
    """
    if max_bytes <= 0 or max_group <= 0:
        raise ValueError(
            f"Small gradients cannot be joined with max_bytes={max_bytes} and max_group={max_group}: both say how much "
            "may travel together and must be positive."
        )
    small = [array.dtype == jnp.float32 and _bytes(array) <= max_bytes for array in arrays]
    runs = [list(run) for is_small, run in itertools.groupby(range(len(arrays)), small.__getitem__) if is_small]
    packs = [run[k : k + max_group] for run in runs for k in range(0, len(run), max_group)]
    joined = [pack for pack in packs if len(pack) > 1]
    return joined + [[i] for i in sorted(set(range(len(arrays))).difference(*joined))]


def piece_sizes(total: int, num_packs: int) -> list[int]:
    """`total` elements in `num_packs` equal pieces, of which the last takes the remainder.

    >>> from replicax._cross.packing import piece_sizes
    >>> piece_sizes(10, 4)
    [2, 2, 2, 4]
    """
    if num_packs <= 0:
        raise ValueError(f"num_packs={num_packs}: everything cannot be cut into fewer than one piece.")
    return [total // num_packs] * (num_packs - 1) + [total - total // num_packs * (num_packs - 1)]


# -- carrying a plan out


def packed(combine: Combine, arrays: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Applies an element-wise `combine` to `arrays`, those of one pack joined on the way."""
    joined = [arrays[pack[0]] if len(pack) == 1 else _join(arrays[i] for i in pack) for pack in plan]
    results: dict[int, jax.Array] = {}
    for pack, result in zip(plan, combine(joined), strict=True):
        parts = [result] if len(pack) == 1 else _part(result, [arrays[i] for i in pack])
        results.update(zip(pack, parts, strict=True))
    return [results[i] for i in range(len(arrays))]


def cut(combine: Combine, arrays: Sequence[jax.Array], num_packs: int) -> list[jax.Array]:
    """Applies an element-wise `combine` to all arrays of one dtype, joined and cut into `num_packs` pieces."""
    plan = by_dtype(arrays, lambda sizes: group_by_size(sizes, 0))
    joined = [_join(arrays[i] for i in members) for members in plan]
    pieces = [piece for whole in joined for piece in _cut(whole, num_packs)]
    done = iter(combine(pieces))
    results: dict[int, jax.Array] = {}
    for members in plan:
        whole = jnp.concatenate([next(done) for _ in range(num_packs)])
        results.update(zip(members, _part(whole, [arrays[i] for i in members]), strict=True))
    return [results[i] for i in range(len(arrays))]


def _join(arrays: Iterable[jax.Array]) -> jax.Array:
    return jnp.concatenate([array.reshape(-1) for array in arrays])


def _cut(whole: jax.Array, num_packs: int) -> list[jax.Array]:
    ends = list(itertools.accumulate(piece_sizes(whole.size, num_packs)))
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _part(whole: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    ends = list(itertools.accumulate(array.size for array in like))
    return [whole[start:end].reshape(array.shape) for array, start, end in zip(like, [0, *ends], ends, strict=False)]


def _bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize
