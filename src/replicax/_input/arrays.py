"""How do arrays in memory become global batches? `from_arrays`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax._errors import InputError, message
from replicax._input.batch import Batch, describe, is_text, on_host
from replicax._input.plan import Position, Schedule

PyTree = Any
State = dict[str, Any]

_CALL = "rx.data.from_arrays"


def from_arrays(
    tree: PyTree,
    batch_size: int,
    shuffle: bool | int = False,
    epochs: int | None = 1,
    drop_remainder: bool = False,
) -> ArrayBatches:
    """Cuts arrays that fit in memory into global batches.

    Use it whenever your data is a handful of arrays whose rows belong together. It gathers a whole batch at a time,
    which is some fifty times as fast as a loader that handles one example at a time, and its place in the data is a
    few integers: a run may stop at any batch and go on with the same sequence on any number of devices.

    Args:
      tree: A tree of arrays with the examples along axis 0 of every leaf.
      batch_size: The examples of one *global* batch, over all replicas.
      shuffle: False, or an integer from which the order of each epoch is drawn. There is no "any order": two
        processes, or a run and its continuation, would not agree on one.
      epochs: How often one pass goes through the data; None goes on for ever. Each epoch has an order of its own,
        while two passes over the same batches are alike: ask for three epochs here rather than making three passes.
      drop_remainder: Whether to leave out the last batch of an epoch if it is short. It need not be: a distributed
        dataset pads it and remembers which rows are real.

    Returns:
      An iterable of batches. Every `iter()` starts from the beginning.

    Example:
      >>> import numpy as np, replicax as rx
      >>> images, labels = np.zeros((10, 4)), np.arange(10)
      >>> for x, y in rx.data.from_arrays((images, labels), batch_size=4):
      ...     print(x.shape, y)
      (4, 4) [0 1 2 3]
      (4, 4) [4 5 6 7]
      (2, 4) [8 9]
    """
    leaves, structure = _host_arrays(tree)
    _check(structure, leaves)
    schedule = Schedule(
        rows=leaves[0].shape[0],
        batch_size=positive("batch_size", batch_size, _CALL),
        epochs=None if epochs is None else positive("epochs", epochs, _CALL),
        drop_remainder=bool(drop_remainder),
        seed=seed_of(shuffle, _CALL),
    )
    return ArrayBatches(leaves, structure, schedule)


class ArrayBatches:
    """What `from_arrays` returns: arrays and the schedule by which they become batches."""

    def __init__(self, leaves: tuple[np.ndarray, ...], structure: Any, schedule: Schedule) -> None:
        self.leaves = leaves
        self.structure = structure
        self.schedule = schedule
        self._latest: ArrayIterator | None = None
        self._begin_at: State | None = None

    def __iter__(self) -> ArrayIterator:
        self._latest = ArrayIterator(self)
        if self._begin_at is not None:
            self._latest.set_state(self._begin_at)
            self._begin_at = None
        return self._latest

    def __len__(self) -> int:
        length = self.schedule.length
        if length is None:
            raise TypeError(f"{self!r} has no length: with epochs=None it never ends.")
        return length

    def __repr__(self) -> str:
        schedule = self.schedule
        order = "in order" if schedule.seed is None else f"shuffled by {schedule.seed}"
        return f"from_arrays({schedule.rows} rows, batch_size={schedule.batch_size}, {order})"

    def get_state(self) -> State:
        """Where the pass begun last stands; the beginning if it has ended or none was begun."""
        latest = ArrayIterator(self) if self._latest is None or self._latest.ended else self._latest
        return self._begin_at or latest.get_state()

    def set_state(self, state: State) -> None:
        """Lets the next pass, and only that, begin at the place that `get_state` gave."""
        ArrayIterator(self).set_state(state)  # refuses the place of another sequence
        self._begin_at = state

    @property
    def element_spec(self) -> PyTree:
        """The shape and type of each leaf of a full batch."""
        size = min(self.schedule.batch_size, self.schedule.rows)
        specs = [jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, specs)


class ArrayIterator:
    """One pass over an `ArrayBatches`, which can say where it stands and go there.

    >>> import numpy as np, replicax as rx
    >>> data = rx.data.from_arrays(np.arange(6), batch_size=2, shuffle=7)
    >>> batches = iter(data)
    >>> first, state = next(batches), batches.get_state()
    >>> state
    {'seed': 7, 'epoch': 0, 'batch': 1, 'batch_size': 2, 'rows': 6}
    >>> resumed = iter(data)
    >>> resumed.set_state(state)
    >>> bool((next(resumed) == next(batches)).all())
    True
    """

    def __init__(self, data: ArrayBatches) -> None:
        self._data = data
        self._position = Position()
        self._order: tuple[int, np.ndarray | None] = (-1, None)
        self.ended = False

    def __iter__(self) -> ArrayIterator:
        return self

    def __next__(self) -> PyTree:
        batch = self.next_batch()
        index = batch.index(range(batch.rows or 0))
        leaves = [
            leaf[index.start : index.stop].copy() if isinstance(index, range) else leaf[index] for leaf in batch.leaves
        ]
        return jax.tree.unflatten(batch.structure, leaves)

    def next_batch(self, name: str = "A batch of this dataset") -> Batch:
        """The next batch, not yet gathered."""
        position = self._data.schedule.settle(self._position)
        if position is None:
            self.ended = True
            raise StopIteration
        self._position = Position(position.epoch, position.batch + 1)
        span = self._data.schedule.span(position.batch)
        order = self._order_of(position.epoch)
        return Batch(self._data.leaves, self._data.structure, len(span), order, span.start, name)

    def get_state(self) -> State:
        """Where this pass stands: the seed, the epoch, and how many batches of the epoch have been read."""
        schedule = self._data.schedule
        return {
            "seed": schedule.seed,
            "epoch": self._position.epoch,
            "batch": self._position.batch,
            "batch_size": schedule.batch_size,
            "rows": schedule.rows,
        }

    def set_state(self, state: State) -> None:
        """Goes to a place that `get_state` of a pass over the same data gave."""
        here = self.get_state()
        if not isinstance(state, Mapping) or not here.keys() <= state.keys():
            raise _no_place(state, here)
        differing = [key for key in ("seed", "batch_size", "rows") if state[key] != here[key]]
        if differing:
            raise _another_sequence(state, here, differing)
        self._position = Position(state["epoch"], state["batch"])

    def _order_of(self, epoch: int) -> np.ndarray | None:
        if self._order[0] != epoch:
            self._order = (epoch, self._data.schedule.order(epoch))
        return self._order[1]


def _host_arrays(tree: PyTree) -> tuple[tuple[np.ndarray, ...], Any]:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_text)
    return tuple(map(on_host, leaves)), structure


def _check(structure: Any, leaves: tuple[np.ndarray, ...]) -> None:
    """Refuses a tree that has no rows, or not one number of them, or rows of different shapes."""
    if not leaves:
        raise InputError(
            message(
                "`rx.data.from_arrays(tree, ...)` got a tree without arrays",
                [f"tree = {structure}"],
                "There is nothing to cut into batches.",
                ["pass the arrays: `rx.data.from_arrays((x, y), batch_size=...)`"],
            )
        )
    scalars = [leaf.ndim == 0 for leaf in leaves]
    if any(scalars):
        raise _bad_leaves(
            "holds scalars, which have no rows",
            structure,
            leaves,
            scalars,
            "The examples must stand along axis 0 of every leaf. A Python list counts as a tree of its "
            "entries, not as an array.",
            "turn lists into arrays: `np.asarray(x)`",
            "repeat a constant once for each row: `np.full(len(x), value)`",
        )
    ragged = [leaf.dtype == object and not is_text(leaf.tolist()) for leaf in leaves]
    if any(ragged):
        raise _bad_leaves(
            "holds rows of different shapes, or rows that are not numbers",
            structure,
            leaves,
            ragged,
            "A batch is one array, so all its rows need one shape and one type.",
            "pad the rows to one length and keep the lengths as one more leaf",
            "make the batches yourself and distribute those: any iterable of them will do",
        )
    rows = [leaf.shape[0] for leaf in leaves]
    if len(set(rows)) > 1:
        raise _bad_leaves(
            "holds leaves with different numbers of rows",
            structure,
            leaves,
            [True] * len(leaves),
            "Row i of every leaf belongs to example i.",
            "cut all leaves to the same examples: " + f"`x[:{min(rows)}]`",
        )
    if rows[0] == 0:
        raise _bad_leaves(
            "holds no rows",
            structure,
            leaves,
            [True] * len(leaves),
            "There is nothing to cut into batches.",
            "check what was loaded",
        )


def _bad_leaves(
    what: str, structure: Any, leaves: tuple[np.ndarray, ...], bad: list[bool], why: str, *instead: str
) -> InputError:
    paths = [path for path, _ in jax.tree.leaves_with_path(jax.tree.unflatten(structure, list(leaves)))]
    listed = [
        f"tree{jax.tree_util.keystr(path)}  {describe(leaf)}{_row_shapes(leaf)}"
        for path, leaf, wrong in zip(paths, leaves, bad, strict=True)
        if wrong
    ]
    return InputError(message(f"`rx.data.from_arrays(tree, ...)` got a tree that {what}", listed, why, instead))


def _row_shapes(leaf: np.ndarray) -> str:
    """Of a leaf that NumPy holds as Python objects: what its rows look like."""
    if leaf.dtype != object:
        return ""
    kinds = dict.fromkeys(f"shape {row.shape}" if hasattr(row, "shape") else type(row).__name__ for row in leaf.flat)
    return f"  rows of {', '.join(list(kinds)[:4])}{', ...' * (len(kinds) > 4)}"


def positive(name: str, value: int, call: str) -> int:
    """`value`, if it is a whole number above 0."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number > 0 and not isinstance(value, bool):
        return number
    if isinstance(value, (np.ndarray, jax.Array)):
        raise InputError(
            message(
                f"`{call}` got an array where the batch size belongs",
                [f"{name}  {value.dtype}{list(value.shape)}"],
                "All arrays of an example go into one tree, which is the first argument.",
                ["`rx.data.from_arrays((x, y), batch_size=256)`"],
            )
        )
    meaning = {"batch_size": "the number of examples in one global batch", "epochs": "how often to go through the data"}
    raise InputError(
        message(
            f"`{call}({name}={value!r})` needs a whole number above 0",
            why=f"`{name}` is {meaning[name]}.",
            instead=["give the size for all replicas together: `batch_size=256`"]
            if name == "batch_size"
            else ["give a number: `epochs=3`", "go on without end: `epochs=None`"],
        )
    )


def seed_of(shuffle: bool | int, call: str) -> int | None:
    """The integer that the order is drawn from; None to keep the order."""
    if shuffle is False or shuffle is None:
        return None
    if shuffle is not True and isinstance(shuffle, (int, np.integer)) and 0 <= shuffle < 2**64:
        return int(shuffle)
    raise InputError(
        message(
            f"`{call}(shuffle={shuffle!r})` does not say in which order",
            why="The order of the rows is drawn from an integer from 0 to 2**64 - 1, so that all processes, and a run "
            "and its continuation, go through the same sequence.",
            instead=["choose any integer: `shuffle=0`", "read the rows as they stand: `shuffle=False`"],
        )
    )


def _no_place(state: Any, here: State) -> InputError:
    return InputError(
        message(
            "`iterator.set_state(state)` got what is no place in a sequence of batches",
            [f"state = {state!r:.200}", f"a place is {here}"],
            "It is what `get_state` of an iterator over the same dataset gave.",
            ["save `iterator.get_state()`", "start from the beginning: leave out `set_state`"],
        )
    )


def _another_sequence(state: State, here: State, differing: list[str]) -> InputError:
    return InputError(
        message(
            "`iterator.set_state(state)` got the state of another sequence of batches",
            [f"{key}: {state[key]!r} in the state, {here[key]!r} in this dataset" for key in differing],
            "A place in one sequence means other rows in another, so that some would be read twice and some never.",
            [
                f"make the dataset as it was: `rx.data.from_arrays(tree, batch_size={state['batch_size']}, "
                f"shuffle={False if state['seed'] is None else state['seed']})` of {state['rows']} rows",
                "start from the beginning: leave out `set_state`",
            ],
        )
    )
