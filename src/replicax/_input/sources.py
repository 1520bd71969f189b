"""Where do global batches come from? Any iterable, described by one `Source`.

Everything that can be iterated becomes a `Source`: a name for error messages, a way to open a pass at batch k, and what
it promises about the number and size of its batches. The adapters at the end recognise libraries by the module of
a class, so that none of them is imported here.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import multiprocessing
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax._errors import InputError, NotADatasetError, OutOfRangeError, ReplicaxError, message
from replicax._input.arrays import ArrayBatches, ArrayIterator
from replicax._input.batch import Batch, batch_of, describe
from replicax._input.files import FileBatches

PyTree = Any
State = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A sequence of global batches that can be gone through."""

    name: str
    """What the user would call it."""
    open: Callable[[int], Iterator[Any]]
    """Starts a pass whose first batch is batch number k."""
    length: int | None = None
    """The batches of one pass, where that is known."""
    endless: bool = False
    batch_size: int | None = None
    """The rows of a full batch, where that is known before one is read."""
    once: bool = False
    """Whether there is a single pass."""
    even: bool = False
    """Whether every batch is promised to have `batch_size` rows."""
    last_rows: int | None = None
    """The rows of the last batch of an epoch, where that is known."""
    part_of_files: Callable[[int, int, Sequence[int]], Source] | None = None
    """Part i of n of the files, in batches of these sizes in turn; None where the data is not known to lie in files."""
    files: int = 0
    shard: str | None = None
    """How the dataset itself asks to be divided among processes."""


class Pass:
    """One pass over a source: reads batches, counts them, and names the one at which the source failed.

    Its place is the number of batches read. An iterator that knows its own place (`get_state` and `set_state`, as those
    of Grain and of `from_arrays` have) is asked to go there; any other is opened anew and skips.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.number = 0
        self._iterator: Any = self._asked(source.open, 0)

    @property
    def name(self) -> str:
        """What the next batch is called."""
        return f"Batch {self.number} of {self.source.name}"

    def read(self) -> Batch | None:
        """The next batch; None at the end."""
        try:
            batch = self._asked(_next_batch, self._iterator, self.name)
        except (StopIteration, OutOfRangeError):
            return None
        self.number += 1
        return batch

    def get_state(self) -> State:
        state: State = {"batch": self.number}
        if _knows_its_place(self._iterator):
            place = self._iterator.get_state()
            state["source"] = {"bytes": place.decode("latin-1")} if isinstance(place, bytes) else place
        return state

    def set_state(self, state: State | None) -> None:
        """Goes to where `get_state` said; None and a state without a place are the beginning."""
        number, place = (state or {}).get("batch", 0), (state or {}).get("source")
        if place is not None and _knows_its_place(self._iterator):
            as_bytes = isinstance(place, dict) and place.keys() == {"bytes"}
            self._iterator.set_state(place["bytes"].encode("latin-1") if as_bytes else place)
        elif self.source.once and number > self.number:
            self._asked(deque, itertools.islice(self._iterator, number - self.number), 0)
        elif number != self.number:
            self._iterator = self._asked(self.source.open, number)
        self.number = number

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """What the source answers; if it fails, the error names it and the batch."""
        try:
            return ask(*arguments)
        except (StopIteration, ReplicaxError):
            raise
        except Exception as error:
            raise _source_failed(self.source, self.number, error) from error


def _next_batch(iterator: Any, name: str) -> Batch:
    if isinstance(iterator, ArrayIterator):
        return iterator.next_batch(name)
    batch = next(iterator)
    return dataclasses.replace(batch, name=name) if isinstance(batch, Batch) else batch_of(batch, name)


def _knows_its_place(iterator: Any) -> bool:
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def as_source(dataset: Any, call: str = "strategy.distribute_dataset(dataset)") -> Source:
    """What `dataset` is as a source of global batches; refuses what is none, under the headline `call`."""
    if isinstance(dataset, Source):
        return dataset
    for recognises, adapt in _ADAPTERS:
        if recognises(dataset):
            return adapt(dataset)
    if isinstance(dataset, (np.ndarray, jax.Array)) or hasattr(dataset, "shape") and hasattr(dataset, "__array__"):
        raise _bare_data(call, "an array", [f"dataset  {describe(np.asarray(dataset))}"])
    if isinstance(dataset, Mapping):
        raise _bare_data(call, "a dict", [f"dataset[{key!r}]  {_kind(value)}" for key, value in dataset.items()])
    if isinstance(dataset, (str, bytes)):
        raise _not_iterable(call, dataset)
    if isinstance(dataset, Sequence) or _is_numbered(dataset):
        return _from_sequence(dataset)
    if isinstance(dataset, Iterator):
        return _from_iterator(dataset)
    if isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__") and not isinstance(dataset, type):
        return Source(f"`{type(dataset).__qualname__}`", _reopened(dataset))
    if callable(dataset):
        return _from_function(dataset, call)
    raise _not_iterable(call, dataset)


def _reopened(iterable: Any) -> Callable[[int], Iterator[Any]]:
    return lambda skip: itertools.islice(iter(iterable), skip, None) if skip else iter(iterable)


def _is_numbered(dataset: Any) -> bool:
    """Whether batches are asked for by number, up to a length, as of torch's map-style datasets. Such a class need not
    refuse a number beyond the end: one that cuts slices out of arrays gives empty batches for ever."""
    try:
        return not hasattr(dataset, "__iter__") and hasattr(dataset, "__getitem__") and len(dataset) >= 0
    except (TypeError, NotImplementedError):  # it has no length, and maybe no end
        return False


def _from_sequence(batches: Sequence[Any]) -> Source:
    """Batches with numbers. Of a list or tuple all sizes can be seen at once."""
    sizes = [batch_of(batch).rows or 0 for batch in batches] if isinstance(batches, (list, tuple)) else []
    return Source(
        f"a {type(batches).__name__} of {len(batches)} batches",
        lambda skip: map(batches.__getitem__, range(skip, len(batches))),
        length=len(batches),
        batch_size=max(sizes, default=0) or None,
        even=len(set(sizes)) == 1,
        last_rows=sizes[-1] if sizes else None,
    )


def _from_iterator(iterator: Iterator[Any]) -> Source:
    """A generator or other iterator, which can be gone through once."""
    name = f"{type(iterator).__name__} `{getattr(iterator, '__qualname__', type(iterator).__qualname__)}`"
    taken = False

    def take(skip: int) -> Iterator[Any]:
        nonlocal taken
        if taken:
            raise _used_up(name)
        taken = True
        return itertools.islice(iterator, skip, None) if skip else iterator

    return Source(name, take, once=True)


def _from_function(make: Callable[[], Any], call: str) -> Source:
    """A function that makes the dataset, called for each pass."""
    if not takes(make, 0):
        raise _wants_arguments(call, make)
    name = f"function `{getattr(make, '__qualname__', type(make).__qualname__)}`"
    return Source(name, lambda skip: as_source(make(), call).open(skip))


def from_calls(produce: Callable[[], Any]) -> Source:
    """A function that returns the next batch each time it is called, until it raises `OutOfRangeError`."""
    return Source(
        f"function `{getattr(produce, '__qualname__', type(produce).__qualname__)}`", lambda skip: _Calls(produce, skip)
    )


class _Calls:
    """An iterator made of calls. Not a generator, in which a `StopIteration` from the function would be an error."""

    def __init__(self, produce: Callable[[], Any], skip: int) -> None:
        self._produce = produce
        for _ in range(skip):
            produce()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._produce()


def takes(fn: Any, count: int) -> bool:
    """Whether `fn` can be called with `count` arguments, as far as can be seen."""
    if not callable(fn):
        return False
    try:
        inspect.signature(fn).bind(*range(count))
    except ValueError:  # some built-in types do not say what they take
        return True
    except TypeError:
        return False
    return True


def _from_arrays(batches: ArrayBatches) -> Source:
    schedule = batches.schedule
    return Source(
        f"`{batches!r}`",
        _reopened(batches),
        length=schedule.length,
        endless=schedule.epochs is None,
        batch_size=min(schedule.batch_size, schedule.rows),
        even=schedule.even or schedule.rows < schedule.batch_size,
        last_rows=len(schedule.span(schedule.batches - 1)) if schedule.batches else None,
    )


def _from_files(batches: FileBatches) -> Source:
    def part(index: int, count: int, sizes: Sequence[int]) -> Source:
        def open_part(skip: int) -> Iterator[Any]:
            return itertools.islice(batches.batches(index, count, sizes), skip, None)

        return Source(f"`{batches!r}`", open_part, endless=batches.epochs is None, batch_size=max(sizes))

    return dataclasses.replace(part(0, 1, [batches.batch_size]), part_of_files=part, files=len(batches.paths))


def _from_grain(dataset: Any) -> Source:
    length = len(dataset) if hasattr(dataset, "__len__") else None
    endless = length == sys.maxsize  # what `repeat()` without a number gives
    return Source(
        f"grain `{type(dataset).__name__}`", _reopened(dataset), length=None if endless else length, endless=endless
    )


def _from_tf(dataset: Any) -> Source:
    cardinality = int(dataset.cardinality())
    first_dims = {_static_rows(spec) for spec in jax.tree.leaves(dataset.element_spec)}
    rows = first_dims.pop() if len(first_dims) == 1 else None
    policy = dataset.options().experimental_distribute.auto_shard_policy.name
    return Source(
        "`tf.data.Dataset`",
        lambda skip: iter((dataset.skip(skip) if skip else dataset).as_numpy_iterator()),
        length=cardinality if cardinality >= 0 else None,
        endless=cardinality == -1,
        batch_size=rows,
        even=rows is not None,
        shard=None if policy == "AUTO" else policy,
    )


def _static_rows(spec: Any) -> int | None:
    return spec.shape[0] if getattr(spec, "shape", None) is not None and spec.shape.rank else None


def _from_torch(loader: Any) -> Source:
    if loader.num_workers and loader.multiprocessing_context is None and _start_method() == "fork":
        warnings.warn(_forking_loader(loader.num_workers), RuntimeWarning, stacklevel=5)
    sized = hasattr(loader.dataset, "__len__") or loader.batch_sampler is not None
    return Source(
        "torch `DataLoader`",
        _reopened(loader),
        length=len(loader) if sized and hasattr(loader.dataset, "__len__") else None,
        batch_size=loader.batch_size,
        even=bool(loader.drop_last) and loader.batch_size is not None,
    )


def _start_method() -> str:
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _of_library(module: str, *names: str) -> Callable[[Any], bool]:
    """Whether an object's class, or one it derives from, is called one of `names` in package `module`."""

    def recognises(dataset: Any) -> bool:
        return any(
            kind.__name__ in names and kind.__module__.partition(".")[0] == module for kind in type(dataset).__mro__
        )

    return recognises


_ADAPTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Source]], ...] = (
    (lambda dataset: isinstance(dataset, ArrayBatches), _from_arrays),
    (lambda dataset: isinstance(dataset, FileBatches), _from_files),
    (_of_library("grain", "MapDataset", "IterDataset", "DataLoader"), _from_grain),
    (_of_library("tensorflow", "DatasetV2"), _from_tf),
    (_of_library("torch", "DataLoader"), _from_torch),
)


def _kind(value: Any) -> str:
    return describe(value) if isinstance(value, (np.ndarray, jax.Array)) else type(value).__name__


def _bare_data(call: str, what: str, listed: list[str]) -> NotADatasetError:
    return NotADatasetError(
        message(
            f"`{call}` got {what}, which does not say what one batch is",
            listed,
            "A dataset is a sequence of global batches. Going through this one would give "
            + ("its rows, one at a time." if what == "an array" else "its keys."),
            [
                "cut global batches out of it: `rx.data.from_arrays(tree, batch_size=...)`",
                "if it is a single batch, pass a list of one: `[batch]`",
            ],
        )
    )


def _not_iterable(call: str, dataset: Any) -> NotADatasetError:
    return NotADatasetError(
        message(
            f"`{call}` got {type(dataset).__name__} {dataset!r:.60}, which is no dataset",
            why="A dataset is anything that can be iterated and gives global batches: a list, a generator, a Grain "
            "dataset, a torch DataLoader, a tf.data.Dataset, or a function without arguments that returns "
            "one of these.",
            instead=["cut global batches out of arrays: `rx.data.from_arrays(tree, batch_size=...)`"],
        )
    )


def _wants_arguments(call: str, make: Callable[..., Any]) -> NotADatasetError:
    return NotADatasetError(
        message(
            f"`{call}` got function `{getattr(make, '__qualname__', make)}{inspect.signature(make)}`, which it calls "
            "without arguments",
            why="A function given as a dataset is called anew for each pass and returns the global batches.",
            instead=[
                "bind its arguments: `functools.partial(make, ...)`",
                "if it takes an `InputContext` and returns batches for one replica: "
                "`strategy.distribute_datasets_from_function(make)`",
            ],
        )
    )


def _used_up(name: str) -> InputError:
    return InputError(
        message(
            f"This dataset was made from {name}, which can be gone through once, and a second pass was asked for",
            why="An iterator does not start again, so a second epoch would see no data.",
            instead=[
                "pass the function that makes it, so that every pass gets its own: "
                "`strategy.distribute_dataset(make_batches)`, not `make_batches()`",
                "keep the batches, if they fit in memory: `strategy.distribute_dataset(list(batches))`",
            ],
        )
    )


def _source_failed(source: Source, number: int, error: Exception) -> InputError:
    return InputError(
        message(
            f"{source.name} failed when it was asked for batch {number} (counted from 0)",
            [f"{type(error).__name__}: {error}"],
            "The error came from the data source, not from the step; it is chained above.",
            ["run the source by itself to find the line: `for batch in dataset: pass`"],
        )
    )


def _forking_loader(workers: int) -> str:
    return message(
        f"torch `DataLoader(num_workers={workers})` will start its workers by forking this process",
        why="JAX runs threads in this process. A forked copy keeps the locks that those threads held and none of the "
        "threads, so that a worker can wait for ever.",
        instead=['start the workers fresh: `DataLoader(..., multiprocessing_context="forkserver")`'],
    )
