"""How does a batch on the host reach the replicas? One copy, one transfer, and a mask where rows are padding.

JAX keeps host memory that is aligned well instead of copying it, so the copy is ours to make (`aligned_empty`). It is
the same copy that gathers the rows, so nothing is copied twice. The way has two halves: gathering, which each method
does at once, and sending, which the function does that it returns. The user may overwrite his arrays in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax
from replicax._input.batch import Batch, aligned_empty, device_dtype
from replicax._input.plan import Split, padded
from replicax._placement import Placement
from replicax._values import PARTS, ROWS, STACKED, PerReplica, fits_device

PyTree = Any
Gathered = Callable[[], PyTree]
"""A batch that is ready to be sent; calling it sends it."""

MASKS_KEPT = 64


class Feed:
    """Lays batches over the replicas of one placement."""

    def __init__(self, placement: Placement, to_device: bool = True) -> None:
        self.placement = placement
        self.to_device = to_device
        here = placement.split.addressable_devices
        grid = placement.mesh.devices.reshape(placement.replicas, -1)
        self.readers = tuple(replica for replica, devices in enumerate(grid) if here.intersection(devices))
        """The replicas of which this process holds a part, so that it must supply their rows."""
        self._masks: dict[tuple[Split, bool], jax.Array] = {}

    def whole(self, batch: Batch) -> Gathered:
        """A batch for the only replica: plain arrays, of the size they are."""
        structure = batch.structure
        if batch.rows is None:
            leaves = [leaf if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in batch.leaves]
        else:
            leaves = batch.gather(range(batch.rows))
        fit = [i for i, leaf in enumerate(leaves) if self.to_device and fits_device(leaf.dtype)]

        def send() -> PyTree:
            for i, array in zip(fit, _jax.put([leaves[i] for i in fit], self.placement.mirrored), strict=True):
                leaves[i] = array
            return jax.tree.unflatten(structure, leaves)

        return send

    def divided(self, batch: Batch, split: Split, masked: bool, short_ahead: bool = False) -> Gathered:
        """A global batch, of which each replica gets its rows."""
        structure = batch.structure
        columns = [PerReplica(leaf, ROWS) for leaf in batch.gather(self._places(split))]
        return lambda: jax.tree.unflatten(structure, self._laid(columns, split, masked, short_ahead))

    def joined(self, batches: Sequence[Batch], split: Split, masked: bool) -> Gathered:
        """One batch for each replica of this process, in order; rows beyond what `split` counts are padding."""
        structure = batches[0].structure
        sizes = [split.sizes[replica] for replica in self.readers]
        columns = [_column(batches, sizes, i, split.block) for i in range(len(batches[0].leaves))]
        return lambda: jax.tree.unflatten(structure, self._laid(columns, split, masked))

    def mask(self, split: Split, short_ahead: bool = False) -> jax.Array:
        """The validity mask of a split, on the devices. A full batch has the same one every time."""
        mask = self._masks.get((split, short_ahead))
        if mask is None or mask.is_deleted():  # a user may delete a batch that he has done with
            if len(self._masks) >= MASKS_KEPT:
                self._masks.clear()
            columns = np.insert(split.mask(), 2, short_ahead, axis=1)
            (mask,) = self._send([columns[list(self.readers)]])
            self._masks[split, short_ahead] = mask
        return mask

    def _places(self, split: Split) -> np.ndarray | range:
        """The rows that this process supplies; as a range where they stand in a row, which is faster to copy."""
        first, last = self.readers[0], self.readers[-1]
        if split.even and len(self.readers) == last - first + 1:
            return range(split.rows_of(first).start, split.rows_of(last).stop)
        return split.places(self.readers)

    def _laid(
        self, columns: list[PerReplica], split: Split, masked: bool, short_ahead: bool = False
    ) -> list[PerReplica]:
        """Columns of this process's blocks, on the devices. What cannot go there becomes a component per replica."""
        mask = self.mask(split, short_ahead) if masked and self.to_device else None
        goes = [self.to_device and column.form != PARTS and fits_device(column.data.dtype) for column in columns]
        sent = iter(self._send([column.data for column, to_device in zip(columns, goes, strict=True) if to_device]))
        return [
            PerReplica(next(sent), column.form, mask) if to_device else self._apart(column, split)
            for column, to_device in zip(columns, goes, strict=True)
        ]

    def _apart(self, column: PerReplica, split: Split) -> PerReplica:
        """A column on the host as components: the valid rows of each replica."""
        if column.form == PARTS:
            return column
        if column.form == STACKED:
            return PerReplica(tuple(column.data), PARTS)
        blocks = np.split(np.asarray(column.data), len(self.readers))
        return PerReplica(
            tuple(block[: split.sizes[replica]] for replica, block in zip(self.readers, blocks, strict=True)), PARTS
        )

    def _send(self, blocks: list[Any]) -> list[jax.Array]:
        """This process's blocks of some arrays, laid over the replicas."""
        sharding = self.placement.split
        if sharding.is_fully_addressable:
            return _jax.put(blocks, sharding)
        replicas, here = self.placement.replicas, len(self.readers)
        return [
            jax.make_array_from_process_local_data(
                sharding, np.asarray(block), (len(block) // here * replicas, *block.shape[1:])
            )
            for block in blocks
        ]


def _column(batches: Sequence[Batch], sizes: Sequence[int], which: int, block: int) -> PerReplica:
    """One leaf of several replicas' batches: end to end, each in a block, or apart if their types do not allow it."""
    leaves = [batch.leaves[which] for batch in batches]
    kinds = {(leaf.dtype, leaf.shape[batch.rows is not None :]) for leaf, batch in zip(leaves, batches, strict=True)}
    if len(kinds) > 1 or not fits_device(leaves[0].dtype):
        return PerReplica(tuple(map(_valid, batches, sizes, leaves)), PARTS)
    if batches[0].rows is None:
        return _without_rows(leaves)
    index = [batch.index(padded(batch.rows or 1, block)) for batch in batches]
    if isinstance(leaves[0], jax.Array):
        return PerReplica(jnp.concatenate([leaf[i] for leaf, i in zip(leaves, index, strict=True)]), ROWS)
    out = aligned_empty((len(leaves) * block, *leaves[0].shape[1:]), device_dtype(leaves[0].dtype))
    for target, batch, rows in zip(np.split(out, len(leaves)), batches, index, strict=True):
        batch.fill(target, which, rows)
    return PerReplica(out, ROWS)


def _without_rows(leaves: Sequence[Any]) -> PerReplica:
    """Equal shapes without rows in common: scalars are stacked, others laid end to end."""
    if leaves[0].ndim == 0:
        stack = jnp.stack if isinstance(leaves[0], jax.Array) else np.stack
        return PerReplica(stack(leaves), STACKED)
    return PerReplica(np.concatenate([np.asarray(leaf) for leaf in leaves]), ROWS)


def _valid(batch: Batch, size: int, leaf: Any) -> Any:
    return leaf if batch.rows is None else leaf[np.asarray(batch.index(range(size)))]
