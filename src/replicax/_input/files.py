"""How do many files become global batches? `from_files`, and which process reads which file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax._errors import InputError, message
from replicax._input.arrays import positive, seed_of
from replicax._input.batch import Batch, batch_of, describe
from replicax._input.plan import shuffled

PyTree = Any

_CALL = "rx.data.from_files"


def from_files(
    paths: Iterable[Any],
    read: Callable[[Any], PyTree],
    batch_size: int,
    shuffle: bool | int = False,
    epochs: int | None = 1,
    drop_remainder: bool = False,
) -> FileBatches:
    """Cuts global batches out of files, one file in memory at a time.

    Use it for data that does not fit in memory and lies in many files of a size that does. Batches run on from one file
    into the next. Over several processes every process normally reads all files and keeps its rows of each batch; with
    ``rx.InputOptions(shard="files")`` each reads only its own files, which is less to read, at the price that
    the place in the data then belongs to that number of processes.

    Args:
      paths: The files, or whatever `read` takes.
      read: Reads one file: a tree of arrays with the examples along axis 0 of every leaf.
      batch_size: The examples of one *global* batch, over all replicas.
      shuffle: False, or an integer from which the order of the files in each epoch, and of the rows in each file, is
        drawn. Rows of different files are not mixed beyond that.
      epochs: How often one pass goes through the files; None goes on for ever.
      drop_remainder: Whether to leave out the last batch of an epoch if it is short.

    Example:
      >>> import numpy as np, replicax as rx
      >>> files = {"a": np.arange(3), "b": np.arange(3, 8)}
      >>> for batch in rx.data.from_files(files, files.get, batch_size=4):
      ...     print(batch)
      [0 1 2 3]
      [4 5 6 7]
    """
    paths = tuple(paths)
    if not paths:
        raise InputError(
            message(
                "`rx.data.from_files(paths, ...)` got no files",
                why="There is nothing to read.",
                instead=["check the pattern that finds them: `sorted(folder.glob('*.npz'))`"],
            )
        )
    return FileBatches(
        paths,
        read,
        positive("batch_size", batch_size, _CALL),
        None if epochs is None else positive("epochs", epochs, _CALL),
        bool(drop_remainder),
        seed_of(shuffle, _CALL),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FileBatches:
    """What `from_files` returns: files, and how they become batches."""

    paths: tuple[Any, ...]
    read: Callable[[Any], PyTree]
    batch_size: int
    epochs: int | None = 1
    drop_remainder: bool = False
    seed: int | None = None

    def __iter__(self) -> Iterator[PyTree]:
        for batch in self.batches():
            yield jax.tree.unflatten(batch.structure, batch.gather(range(batch.rows or 0)))

    def __repr__(self) -> str:
        return f"from_files({len(self.paths)} files, batch_size={self.batch_size})"

    def batches(self, index: int = 0, count: int = 1, sizes: Sequence[int] | None = None) -> Iterator[Batch]:
        """The batches that are cut out of part `index` of `count` of the files, of `sizes` rows in turn."""
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            mine = files_of(self.order(epoch), index, count)
            yield from _cut((self._file(i, epoch) for i in mine), sizes or [self.batch_size], self.drop_remainder)

    def order(self, epoch: int) -> list[int]:
        """The files in the order of `epoch`, by number."""
        return (
            list(range(len(self.paths))) if self.seed is None else shuffled(len(self.paths), self.seed, epoch).tolist()
        )

    def _file(self, number: int, epoch: int) -> Batch:
        batch = batch_of(self.read(self.paths[number]))
        if batch.rows is None:
            raise _bad_file(self.paths[number], batch)
        if self.seed is None:
            return batch
        own_epoch = (number + 1) * 2**32 + epoch  # every file of every epoch has an order of its own
        return dataclasses.replace(batch, order=shuffled(batch.rows, self.seed, own_epoch))


def files_of(files: Sequence[Any], index: int, count: int) -> Sequence[Any]:
    """Part `index` of `count` of the files: every `count`-th.

    >>> files_of(range(10), index=3, count=5)
    range(3, 10, 5)
    """
    return files[index::count]


def _cut(files: Iterable[Batch], sizes: Sequence[int], drop_remainder: bool) -> Iterator[Batch]:
    """Batches of `sizes` rows in turn, cut out of files laid end to end."""
    wanted = itertools.cycle(sizes)
    size, parts, have = next(wanted), [], 0
    for file in files:
        start, rows = 0, file.rows or 0
        while start < rows:
            stop = min(rows, start + size - have)
            parts.append(file.part(range(start, stop)))
            have, start = have + stop - start, stop
            if have == size:
                yield _end_to_end(parts)
                size, parts, have = next(wanted), [], 0
    if parts and not drop_remainder:
        yield _end_to_end(parts)


def _end_to_end(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.gather(range(part.rows or 0)) for part in parts), strict=True)
    return Batch(tuple(map(np.concatenate, columns)), parts[0].structure, sum(part.rows or 0 for part in parts))


def _bad_file(path: Any, batch: Batch) -> InputError:
    return InputError(
        message(
            f"`rx.data.from_files`: the leaves read from {path} have no rows in common",
            [describe(leaf) for leaf in batch.leaves],
            "`read` returns the examples of one file, along axis 0 of every leaf.",
            ["let it return arrays of the same length"],
        )
    )
