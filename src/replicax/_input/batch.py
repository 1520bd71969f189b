"""What is one global batch on the host? Arrays with rows on axis 0, some of whose rows are the batch.

A batch does not gather its rows until it is told where they go: a process copies only the rows of its own replicas,
once, into memory that JAX may keep.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._errors import InputError, message
from replicax._values import fits_device, is_per_replica

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """`rows` rows of every leaf: row i is row ``order[start + i]``, or ``start + i`` where `order` is None.

    `rows` is None for a tree whose leaves have no rows in common, such as a scalar: it can be handed to a replica as it
    is, and cannot be divided.
    """

    leaves: tuple[Any, ...]
    structure: Any
    rows: int | None
    order: np.ndarray | None = None
    start: int = 0
    name: str = "A batch of this dataset"
    """What error messages call it: its number and its source."""

    def part(self, rows: range) -> Batch:
        """The batch that consists of these rows of this one."""
        return dataclasses.replace(self, rows=len(rows), start=self.start + rows.start)

    def index(self, places: np.ndarray | range) -> np.ndarray | range:
        """The rows of the leaves that stand at `places` of the batch."""
        if self.order is not None:
            assert self.rows is not None
            return self.order[self.start : self.start + self.rows][_key(places)]
        if isinstance(places, range):
            return range(self.start + places.start, self.start + places.stop)
        return places + self.start

    def gather(self, places: np.ndarray | range) -> list[Any]:
        """The rows at `places` of the batch, each leaf in a new buffer of the type in which JAX will hold it."""
        index = self.index(places)
        return [self._gather(which, index) for which in range(len(self.leaves))]

    def _gather(self, which: int, index: np.ndarray | range) -> Any:
        leaf = self.leaves[which]
        if isinstance(leaf, jax.Array):
            whole = isinstance(index, range) and index == range(leaf.shape[0])
            return leaf if whole else leaf[np.asarray(index)]  # on its device; nobody can write into it
        if not fits_device(leaf.dtype):
            return leaf[np.asarray(index)]
        out = aligned_empty((len(index), *leaf.shape[1:]), device_dtype(leaf.dtype))
        self.fill(out, which, index)
        return out

    def fill(self, out: np.ndarray, which: int, index: np.ndarray | range) -> None:
        """Writes the rows of leaf number `which` at `index` into `out`."""
        leaf = self.leaves[which]
        if isinstance(index, np.ndarray) and out.dtype == leaf.dtype:
            # Anything but "clip" makes NumPy gather into a second buffer first. The index is within bounds.
            np.take(leaf, index, axis=0, out=out, mode="clip")
        else:
            rows = leaf[_key(index)]
            out[...] = rows
            if leaf.dtype.kind in "iu" and out.dtype.itemsize < leaf.dtype.itemsize and not np.array_equal(out, rows):
                raise _too_large(self, which, rows, out.dtype)

    def paths(self) -> list[str]:
        """What each leaf is called: ``batch['image']``."""
        numbered = jax.tree.unflatten(self.structure, range(len(self.leaves)))
        return [f"batch{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(numbered)]


def batch_of(tree: PyTree, name: str = "A batch of this dataset") -> Batch:
    """The pytree `tree`, a whole global batch, as a `Batch`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    if any(map(is_per_replica, leaves)):
        raise _divided_already(name)
    leaves = tuple(leaf if isinstance(leaf, jax.Array) else on_host(leaf) for leaf in leaves)
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    return Batch(leaves, structure, sizes.pop() if len(sizes) == 1 else None, name=name)


def _is_leaf(x: Any) -> bool:
    return is_per_replica(x) or is_text(x)


def is_text(x: Any) -> bool:
    """Whether `x` is a list of words: a column of text, as torch's loaders make it, and not a tree of single words."""
    return type(x) in (list, tuple) and len(x) > 0 and all(isinstance(word, (str, bytes)) for word in x)


def on_host(leaf: Any) -> np.ndarray:
    """`leaf` as NumPy sees it; a copy of one whose bytes stand in another order or, torch's bfloat16, are not known."""
    if is_text(leaf):
        return np.array(leaf, dtype=object)
    if np.ma.is_masked(leaf):
        raise _masked_array(leaf)
    try:
        array = np.asarray(leaf)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    except (TypeError, RuntimeError):
        if not hasattr(leaf, "__dlpack__"):
            raise
        return np.array(jnp.from_dlpack(leaf.detach() if hasattr(leaf, "detach") else leaf))


def require_rows(batch: Batch, replicas: int) -> int:
    """The number of rows of `batch`; refuses one that has none to divide."""
    if batch.rows:
        return batch.rows
    raise _no_common_rows(batch, replicas)


def digest(batch: Batch) -> int:
    """A number that differs, in all likelihood, if the values of the batch do. Python objects are not looked at."""
    value = 0
    for leaf in batch.gather(range(batch.rows or 0)):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            value = zlib.crc32(leaf.tobytes(), value)
    return value


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory that starts at a multiple of 64 bytes.

    On CPU `jax.device_put` keeps such memory as it is instead of copying it (113 against 300 µs for 256 rows of 784
    floats over four devices). That is why nothing but our own buffers may go there: from the user's, training would
    see whatever they write into it next.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 63, dtype=np.uint8)
    offset = -raw.__array_interface__["data"][0] % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


def device_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which JAX will hold this one: float32 for float64, unless 64 bits were asked for."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _key(index: np.ndarray | range) -> np.ndarray | slice:
    return slice(index.start, index.stop) if isinstance(index, range) else index


def describe(leaf: Any) -> str:
    """``float32[100,28,28]``: the type and shape of a leaf, for error messages and tables."""
    return f"{np.dtype(leaf.dtype).name if fits_device(leaf.dtype) else leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _divided_already(name: str) -> InputError:
    return InputError(
        message(
            f"{name} holds a value per replica",
            why="It came from a distributed dataset or from `strategy.run`, so it is divided already. As rows of a "
            "batch its padding would count as data.",
            instead=[
                "distribute the dataset that gives plain arrays, and pass its elements to `strategy.run`",
                "put the rows together first: `strategy.gather(value, axis=0)`",
            ],
        )
    )


def _too_large(batch: Batch, which: int, rows: np.ndarray, dtype: np.dtype) -> InputError:
    return InputError(
        message(
            f"{batch.name} holds integers that do not fit {dtype.name}",
            [f"{batch.paths()[which]}  {rows.dtype.name}, from {rows.min()} to {rows.max()}"],
            "JAX holds integers in 32 bits unless told otherwise, and would cut these off without a word.",
            [
                'switch 64 bits on: `jax.config.update("jax_enable_x64", True)`',
                "number them anew: `np.unique(ids, return_inverse=True)[1]`",
                "keep them on the host, as text: `ids.astype(str)`",
            ],
        )
    )


LEAVES_LISTED = 6


def _told(path: str, leaf: Any) -> str:
    if leaf.ndim:
        return f"{path}  {describe(leaf)}  {leaf.shape[0]} row{'s' * (leaf.shape[0] != 1)}"
    if leaf.dtype == object:
        return f"{path}  {type(leaf.item()).__name__}  no rows: it is a Python object"
    return f"{path}  {describe(leaf)}  no rows: it is a scalar"


def _no_common_rows(batch: Batch, replicas: int) -> InputError:
    leaves = list(zip(batch.paths(), batch.leaves, strict=True))
    listed = [_told(path, leaf) for path, leaf in leaves[:LEAVES_LISTED]]
    if len(leaves) > LEAVES_LISTED:
        listed.append(f"... and {len(leaves) - LEAVES_LISTED} more leaves")
    what = "it has no rows" if batch.rows == 0 else "its leaves have no rows in common"
    instead = [
        "batch single examples first: call `batch(global_batch_size)` on the dataset, or `np.stack` them",
        "cut batches out of whole arrays: `rx.data.from_arrays(tree, batch_size=...)`",
        "give a constant to the step by itself: `strategy.run(step, args=(batch, constant))`",
    ]
    if batch.rows == 0:
        instead = ["leave empty batches out: `(batch for batch in batches if len(batch))`"]
    elif any(leaf.ndim == 0 and leaf.dtype == object for _, leaf in leaves):
        instead[:0] = ["say what a class of yours holds: `jax.tree_util.register_dataclass(Batch)`, or pass a dict"]
    elif any(leaf.ndim == 0 and path.endswith("[0]") for path, leaf in leaves):
        instead[:0] = ["turn lists of numbers into arrays: `np.asarray(column)`. A list is a tree of its entries"]
    return InputError(
        message(
            f"{batch.name} cannot be divided over {replicas} replicas: {what}",
            listed or ["batch  has no leaves"],
            "A global batch is a tree of arrays with the examples along axis 0 of every leaf. Each replica gets some "
            "of the examples, so every leaf needs as many of them, and at least one.",
            instead,
        )
    )


def _masked_array(leaf: Any) -> InputError:
    return InputError(
        message(
            "A batch holds a NumPy masked array",
            [f"{leaf.dtype}{list(leaf.shape)}, {np.ma.count_masked(leaf)} of {leaf.size} elements masked"],
            "JAX has no such arrays: the mask would be lost and what lies under it would be used.",
            ["put both into the batch: `(x.filled(0), ~np.ma.getmaskarray(x))`, and use the second in the step"],
        )
    )
