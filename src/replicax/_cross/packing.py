"""How do many small arrays travel as few large ones?

XLA joins all-reduces of one program into one operation but still pays for each operand (about 17 microseconds on CPU), so
small gradients are concatenated first. Large ones are left alone: copying them into a pack costs more than it saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

SMALL_BYTES = 64 * 1024
PACK_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Pack:
    """Which arrays, by position, travel together."""

    members: tuple[int, ...]


def plan(arrays: Sequence[jax.Array], bytes_per_pack: int = 0) -> list[Pack]:
    """Groups small arrays of one dtype into packs; every other array is a pack of its own."""
    limit = bytes_per_pack or PACK_BYTES
    small = min(limit, SMALL_BYTES)
    packs: list[Pack] = []
    open_packs: dict[object, tuple[list[int], int]] = {}
    for i, array in enumerate(arrays):
        size = array.size * array.dtype.itemsize
        if size > small:
            packs.append(Pack((i,)))
            continue
        members, filled = open_packs.get(array.dtype, ([], 0))
        if members and filled + size > limit:
            packs.append(Pack(tuple(members)))
            members, filled = [], 0
        members.append(i)
        open_packs[array.dtype] = (members, filled + size)
    packs += [Pack(tuple(members)) for members, _ in open_packs.values() if members]
    return packs


def packed(
    combine: Callable[[list[jax.Array]], list[jax.Array]], arrays: Sequence[jax.Array], bytes_per_pack: int = 0
) -> list[jax.Array]:
    """Applies an element-wise `combine` to `arrays`, small ones joined into packs on the way."""
    packs = plan(arrays, bytes_per_pack)
    joined = [
        arrays[pack.members[0]]
        if len(pack.members) == 1
        else jnp.concatenate([arrays[i].reshape(-1) for i in pack.members])
        for pack in packs
    ]
    results: list[jax.Array | None] = [None] * len(arrays)
    for pack, result in zip(packs, combine(joined), strict=True):
        if len(pack.members) == 1:
            results[pack.members[0]] = result
            continue
        start = 0
        for i in pack.members:
            stop = start + arrays[i].size
            results[i] = result[start:stop].reshape(arrays[i].shape)
            start = stop
    return [result for result in results if result is not None]
