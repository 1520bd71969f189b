"""What does the user iterate over? `DistributedDataset`, and the iterator that says where it stands."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context, _jax
from replicax._errors import InputError, NotADatasetError, OutOfRangeError, message
from replicax._input.ahead import Depths
from replicax._input.reading import Reading
from replicax._input.steps import State, Steps

if TYPE_CHECKING:
    from replicax._input.explain import Explanation

PyTree = Any


class DistributedDataset:
    """Data that is handed out to the replicas, step by step.

    Made by `strategy.distribute_dataset`. Each element has the structure of the dataset's, with a `PerReplica` for
    every leaf: what you pass to `strategy.run`. (With a single replica the leaves are plain arrays.) Every pass
    starts from the beginning.

    All elements have one shape, so a step is compiled once: a short batch is filled up, and carries a mask that tells
    which rows are real. `rx.mean`, the metrics and `strategy.reduce` with an axis look at it by themselves.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> dataset = strategy.distribute_dataset(rx.data.from_arrays(np.arange(5), batch_size=4))
    >>> for rows in dataset:
    ...     print([x.tolist() for x in strategy.experimental_local_results(rows)])
    [[0, 1], [2, 3]]
    [[4], []]
    """

    def __init__(
        self, open_steps: Callable[[], Steps], explain: Callable[[], Explanation], depths: Depths, length: int | None
    ) -> None:
        self._open_steps = open_steps
        self._explain = explain
        self._depths = depths
        self._length = length
        self._latest: DistributedIterator | None = None
        self._unread: DistributedIterator | None = None
        self._begin_at: State | None = None
        self.strategy: Any = None
        """The strategy that made it, whose replicas it is for."""

    def __iter__(self) -> DistributedIterator:
        refuse_in_replica("iter(dataset)", "for batch in dataset: strategy.run(step, args=(batch,))")
        self._latest = self._unread or self._open()
        self._unread = self._begin_at = None
        return self._latest

    def __repr__(self) -> str:
        told = self._explain()
        return f"DistributedDataset({told.source}, {len(told.readers)} replicas)"

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                "This distributed dataset has no length: it never ends, or its end is not known beforehand."
            )
        return self._length

    @property
    def element_spec(self) -> PyTree:
        """The shape, type and placement of each leaf, as `strategy.lower` takes it. Reads the first element for it."""
        if self._unread is None:
            self._unread = self._open()
        return self._unread.element_spec

    def reduce(self, initial_state: PyTree, reduce_func: Callable[[PyTree, PyTree], PyTree]) -> PyTree:
        """Calls ``state = reduce_func(state, element)`` for each element, starting from `initial_state`."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def explain(self) -> Explanation:
        """Who reads which rows, how a short batch is divided, and why. Print it."""
        return self._explain()

    def get_state(self) -> State:
        """Where the pass begun last stands; an empty state if it has ended or none was begun.

        With it a dataset can be part of a checkpoint, and a loop ``for batch in dataset`` goes on where it was.
        """
        if self._latest is None or self._latest.ended:
            return self._begin_at or {}
        return self._latest.get_state()

    def set_state(self, state: State) -> None:
        """Lets the next pass, and only that, begin at the place that `get_state` gave."""
        self._begin_at = state or None
        self._latest = self._unread = None

    def _open(self) -> DistributedIterator:
        iterator = DistributedIterator(self._open_steps, self._depths)
        iterator.strategy = self.strategy
        if self._begin_at is not None:
            iterator.set_state(self._begin_at)
        return iterator


class DistributedIterator:
    """One pass over a `DistributedDataset`.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> iterator = iter(strategy.distribute_dataset([np.arange(4)]))
    >>> batch = iterator.get_next()
    >>> iterator.get_next_as_optional().has_value()
    False
    """

    def __init__(self, open_steps: Callable[[], Steps], depths: Depths) -> None:
        self._open_steps = open_steps
        self._depths = depths
        self._one_at_a_time = threading.RLock()
        self.strategy: Any = None
        """The strategy that made its dataset."""
        self._begin(open_steps())

    def _begin(self, steps: Steps) -> None:
        self._steps = steps
        self._state = steps.get_state()
        self._reading: Reading | None = None
        self._peeked: tuple[PyTree, State] | None = None
        self._closed = self.ended = False

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> PyTree:
        refuse_in_replica("next(iterator)", "strategy.run(step, args=(next(iterator),))")
        with self._one_at_a_time:  # threads that share an iterator share out its elements
            element = self._next()
            if element is None:
                raise StopIteration
            self._state = element[1]
            return element[0]

    def get_next(self, name: str | None = None) -> PyTree:
        """The next element; `rx.OutOfRangeError` at the end of the data. `name` means nothing here."""
        for element in self:
            return element
        raise OutOfRangeError("The dataset has no further element. A `for` loop ends by itself here.")

    def get_next_as_optional(self) -> Optional:
        """The next element if there is one: nothing is raised at the end."""
        return Optional(list(itertools.islice(self, 1)))

    def initialize(self) -> None:
        """Starts again from the beginning."""
        self._stop_reading()
        self._begin(self._open_steps())

    @property
    def initializer(self) -> Callable[[], None]:
        """What starts the iterator again when called."""
        return self.initialize

    @property
    def element_spec(self) -> PyTree:
        """The shape, type and placement of each leaf of an element."""
        with self._one_at_a_time:
            self._peeked = peeked = self._next()
        if peeked is None:
            raise InputError(
                message(
                    "`element_spec` was asked of a dataset without elements",
                    why="The shapes are those of the first element, and there is none.",
                    instead=["check that the source gives batches: `next(iter(source))`"],
                )
            )
        return jax.tree.map(_spec, peeked[0])

    def get_state(self) -> State:
        """Where this pass stands, in integers and strings: put it in a checkpoint.

        It counts global batches, so it also fits an iterator over another number of replicas or processes.
        """
        return self._state

    def set_state(self, state: State) -> None:
        """Goes to the place that `get_state` gave; an empty state is the beginning."""
        self._stop_reading()
        self._steps.set_state(state)
        self._begin(self._steps)

    def close(self) -> None:
        """Ends this pass, and the thread that reads ahead, if there is one. Happens by itself at the end of the data.

        Its place remains known. `initialize` and `set_state` begin again.
        """
        self._closed = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def _next(self) -> tuple[PyTree, State] | None:
        if self._peeked is not None and not self._closed:
            element, self._peeked = self._peeked, None
            return element
        if self.ended or self._closed:  # a source may start again after its end; a pass may not
            return None
        if self._reading is None:
            self._reading = Reading(self._steps, self._depths)
        element = self._reading.take()
        self.ended = element is None
        return element


class Optional:
    """An element, or the knowledge that there is none."""

    def __init__(self, elements: list[PyTree]) -> None:
        self._elements = elements

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._elements)

    def __repr__(self) -> str:
        return f"Optional({self._elements[0]!r})" if self._elements else "Optional(no value)"

    def get_value(self) -> PyTree:
        """The element; `rx.OutOfRangeError` if there is none."""
        if not self._elements:
            raise OutOfRangeError("This optional has no value: the dataset had ended. Ask `has_value()` first.")
        return self._elements[0]


def refuse_in_replica(call: str, instead: str) -> None:
    """Refuses `call` inside a step, or another function that is compiled: it would be carried out once, while that is
    traced, and never again."""
    mode = _context.current()
    if mode is not None and mode.replica is not None:
        raise InputError(
            message(
                f"`{call}` should be called from outside of the replica function, and was called inside",
                why="A step is one replica's work on data it is given. Reading is done once, for all replicas, before.",
                instead=[f"read first and pass the batch to the step: `{instead}`"],
            )
        )
    if _jax.is_staging():
        raise InputError(
            message(
                f"`{call}` inside a function that is being compiled",
                why="It would read once, while the function is traced, and the program would see that element ever after.",
                instead=[
                    "read first and pass the batch to the function: `train(next(iterator))`",
                    "`strategy.run_steps(fn, iterator, steps)` takes several steps in one program",
                ],
            )
        )


def is_distributed(dataset: Any) -> bool:
    return isinstance(dataset, (DistributedDataset, DistributedIterator))


def distributed_twice(call: str) -> NotADatasetError:
    return NotADatasetError(
        message(
            f"`{call}` got a dataset that is distributed already",
            why="Its elements are one value per replica and cannot be divided again.",
            instead=["use it as it is: `for batch in dataset: strategy.run(step, args=(batch,))`"],
        )
    )


def _spec(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
