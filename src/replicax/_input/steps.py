"""What does one step take from the data? A global batch divided over the replicas, or one batch for each replica."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from replicax._errors import InputError, message
from replicax._input.agreement import Agreement, Together
from replicax._input.batch import Batch, describe, digest, require_rows
from replicax._input.feed import Feed, Gathered
from replicax._input.plan import Split, balanced
from replicax._input.sources import Pass

State = dict[str, Any]


_NEVER_SEEN = -1
"""Said instead of the number of rows by a process that has none and never had any."""


class Steps(Protocol):
    """One pass over distributed data."""

    def read(self) -> Gathered | None:
        """What the next step gets, read and ready to be sent to the devices; None at the end."""
        ...

    def get_state(self) -> State: ...
    def set_state(self, state: State) -> None: ...


@dataclasses.dataclass
class Padding:
    """What a dataset knows about the size of its batches. All its passes share it, so that all have one shape."""

    full: int | None = None
    """The rows of a full batch: as declared, or the most seen so far."""
    promised: bool = False
    """Whether no batch will need padding, so that none needs a mask."""
    short_ahead: bool = False
    """Whether a batch is known to need padding, so that a step which would average it is refused at the first one."""
    refuse: bool = False
    """Whether the user wants to hear of a short batch instead of having it padded."""

    def grow(self, rows: int) -> int:
        self.full = max(rows, self.full or 0)
        return self.full


class GlobalSteps:
    """Global batches, each divided over all replicas.

    Every process goes through the same batches and copies the rows of its own replicas. That they *are* the same is
    asked once, of the first batch and the length: a source that every process shuffles in its own way would otherwise
    give some rows twice and some not at all. Where the length is not known, processes also say at which batch they are,
    so that none waits in a step which another will not take.
    """

    def __init__(self, batches: Pass, feed: Feed, padding: Padding, others: Together | None = None) -> None:
        self._batches = batches
        self._feed = feed
        self._padding = padding
        self._kind = Kind()
        self._others = others
        self._compared = False

    def read(self) -> Gathered | None:
        name = self._batches.name
        batch = self._next() if self._others is None else self._next_of_all(self._others, name)
        if batch is None:
            return None
        replicas = self._feed.placement.replicas
        if replicas == 1:
            return self._feed.whole(batch)
        rows = batch.rows or 0
        full = self._padding.grow(rows)
        split = balanced(rows, replicas, full)
        if self._padding.refuse and not (split.even and rows == full):
            raise _short_batch(name, rows, full, replicas)
        masked = not self._padding.promised or not split.even
        return self._feed.divided(batch, split, masked, self._padding.short_ahead)

    def _next(self) -> Batch | None:
        batch = self._batches.read()
        if batch is not None:
            self._kind.check(batch)
            if self._feed.placement.replicas > 1:
                require_rows(batch, self._feed.placement.replicas)
        return batch

    def _next_of_all(self, others: Together, name: str) -> Batch | None:
        number, source = self._batches.number, self._batches.source
        try:
            batch = self._next()
        except Exception as error:
            others.failed(error)
            raise
        if not self._compared:
            self._compared = True
            mine = (0 if batch is None else digest(batch), source.length)
            _compare(name, source.name, others.exchange(dict.fromkeys(self._feed.readers, mine)))
        if source.length is None and not source.endless:
            (others.handed_out if batch is not None else others.ended)(number)
        return batch

    def get_state(self) -> State:
        return self._batches.get_state() | {"full": self._padding.full}

    def set_state(self, state: State) -> None:
        self._padding.grow(_place(state, "batch").get("full") or 0)
        self._batches.set_state(state)


class ReplicaSteps:
    """Batches that are one replica's already: each replica of this process takes the next one of its pipeline.

    There is one pipeline for all replicas of the process, or one for each. A replica whose pipeline has ended gets a
    block without valid rows until all have ended.
    """

    def __init__(self, pipelines: Sequence[Pass], feed: Feed, padding: Padding, agreement: Agreement) -> None:
        self._pipelines = pipelines
        self._feed = feed
        self._padding = padding
        self._agreement = agreement
        self._kind = Kind()

    def read(self) -> Gathered | None:
        try:
            batches = [self._next(i) for i in range(len(self._feed.readers))]
        except Exception as error:
            self._agreement.failed(error)
            raise
        mine = {r: _size(batch) for r, batch in zip(self._feed.readers, batches, strict=True)}
        if not any(mine.values()) and not self._knows_the_kind():
            mine = dict.fromkeys(mine, _NEVER_SEEN)
        sizes = self._agreement.exchange(mine)
        if not any(size > 0 for size in sizes.values()):
            return None
        if _NEVER_SEEN in sizes.values():
            raise _no_data(self._pipelines[0].source.name, sizes)
        if self._feed.placement.replicas == 1:
            assert batches[0] is not None
            return self._feed.whole(batches[0])
        stand_in = self._kind.first
        assert stand_in is not None
        filled = [stand_in if batch is None else batch for batch in batches]
        rowless = any(batch.rows is None for batch in filled)
        if rowless:
            filled = [dataclasses.replace(batch, rows=None) for batch in filled]
        split = Split(
            tuple(sizes[replica] for replica in sorted(sizes)),
            1 if rowless else self._padding.grow(max(sizes.values())),
        )
        if not split.even and (self._padding.refuse or rowless and not _scalars(stand_in)):
            raise _uneven_group(self._pipelines[0].source.name, batches)
        return self._feed.joined(filled, split, not self._padding.promised or not split.even)

    def _knows_the_kind(self) -> bool:
        """Whether padding can be made. A pass resumed after the end of its data looks at the beginning again."""
        source = self._pipelines[0].source
        if self._kind.first is None and not source.once:
            self._kind.first = Pass(source).read()
        return self._kind.first is not None

    def get_state(self) -> State:
        return {"pipelines": [pipeline.get_state() for pipeline in self._pipelines], "full": self._padding.full}

    def set_state(self, state: State) -> None:
        self._padding.grow(_place(state, "pipelines").get("full") or 0)
        places = state["pipelines"] if state else [None] * len(self._pipelines)
        if len(places) != len(self._pipelines):
            raise _other_pipelines(len(places), len(self._pipelines))
        for pipeline, place in zip(self._pipelines, places, strict=True):
            pipeline.set_state(place)

    def _next(self, i: int) -> Batch | None:
        """The batch of the i-th replica of this process; None if there is none. Batches without rows are passed over."""
        pipeline = self._pipelines[i % len(self._pipelines)]
        while (batch := pipeline.read()) is not None:
            self._kind.check(batch)
            if batch.rows != 0:
                break
        return batch


class Kind:
    """What all batches of a pass must share with the first: the tree, and the rank of each leaf."""

    def __init__(self) -> None:
        self.first: Batch | None = None

    def check(self, batch: Batch) -> None:
        first = self.first = self.first or batch
        ranks = [(leaf.ndim, other.ndim) for leaf, other in zip(batch.leaves, first.leaves, strict=False)]
        if batch.structure != first.structure or any(rank != before for rank, before in ranks):
            raise _another_kind(first, batch)


def _place(state: State, key: str) -> State:
    """`state`, if it says in `key` where to go, or is empty: the beginning."""
    if not state or isinstance(state, Mapping) and key in state and _says_where(state[key]):
        return state or {}
    raise InputError(
        message(
            "`iterator.set_state(state)` got what is no place in this dataset",
            [f"state = {state!r:.200}"],
            "It is what `get_state` of an iterator over the same dataset gave. Global batches and batches made by an "
            "input function are counted in different ways.",
            [
                "save `iterator.get_state()`, and make the dataset as it was",
                "start from the beginning: `set_state({})`",
            ],
        )
    )


def _says_where(place: Any) -> bool:
    """A number of batches, or the place of each of several pipelines."""
    if isinstance(place, (list, tuple)):
        return all(isinstance(each, Mapping) and _says_where(each.get("batch")) for each in place)
    return hasattr(place, "__index__") and operator.index(place) >= 0


def _size(batch: Batch | None) -> int:
    """The rows of one replica's batch; an element without rows counts as one."""
    return 0 if batch is None else 1 if batch.rows is None else batch.rows


def _scalars(batch: Batch) -> bool:
    return all(leaf.ndim == 0 for leaf in batch.leaves)


def _compare(name: str, source: str, said: dict[int, tuple[int, int | None]]) -> None:
    """Refuses first batches, and lengths, that are not the same on all processes."""
    digests = {replica: value for replica, (value, _) in said.items()}
    lengths = {replica: length for replica, (_, length) in said.items()}
    if len(set(digests.values())) > 1:
        raise _other_rows_elsewhere(name, digests)
    if len(set(lengths.values())) > 1:
        raise _other_lengths_elsewhere(source, lengths)


def _other_lengths_elsewhere(source: str, lengths: dict[int, int | None]) -> InputError:
    return InputError(
        message(
            f"{source} is not as long on all processes",
            [f"replica {replica}: {length} batches" for replica, length in sorted(lengths.items())],
            "Every process goes through the same global batches and keeps the rows of its replicas. The steps after the "
            "end of the shortest would wait for it for ever, and their rows would be lost.",
            [
                "give all processes the same batches",
                'if every process has data of its own on purpose: `rx.InputOptions(shard="off")`, or '
                "`strategy.distribute_datasets_from_function(make)`; there the end waits for the longest",
            ],
        )
    )


def _other_rows_elsewhere(name: str, digests: dict[int, int]) -> InputError:
    return InputError(
        message(
            f"{name} is not the same on all processes",
            [f"replica {replica}: digest {value:08x}" for replica, value in sorted(digests.items())],
            "Every process goes through the same global batches and keeps the rows of its replicas. Where the batches "
            "differ, some rows would be used twice and some not at all.",
            [
                "shuffle from the same seed on every process: `rx.data.from_arrays(..., shuffle=0)`, or a seeded "
                "generator in the loader",
                'if every process has data of its own on purpose: `rx.InputOptions(shard="off")`, or '
                "`strategy.distribute_datasets_from_function(make)`",
            ],
        )
    )


def _short_batch(name: str, rows: int, full: int, replicas: int) -> InputError:
    low, larger = divmod(rows, replicas)
    division = f"{rows} rows = {replicas} x {low}" + f" + {larger} left over" * (larger > 0)
    return InputError(
        message(
            f'{name} is not a full one, and `rx.InputOptions(short_batches="refuse")` says that all are',
            [division, f"{full} rows in a full batch"],
            "A batch of another size would have to be padded, and the padding masked.",
            [
                "drop it where the batches are made: `drop_remainder=True`",
                'let it be padded: `rx.InputOptions(short_batches="pad")`, and take means with `rx.mean`',
            ],
        )
    )


def _uneven_group(name: str, batches: Sequence[Batch | None]) -> InputError:
    return InputError(
        message(
            f"{name} came to its end, or to a short batch, before all replicas had their part",
            [f"replica {i}: {_part(batch)}" for i, batch in enumerate(batches)],
            "Every replica runs the same program on the same shapes. What is missing cannot be filled up: either the "
            "options forbid it, or the leaves have no rows in common by which padding could be counted.",
            [
                'leave out `short_batches="refuse"`, and let all leaves have the examples along axis 0',
                "give every replica as many elements: `dataset.batch(size, drop_remainder=True)`",
            ],
        )
    )


def _part(batch: Batch | None) -> str:
    if batch is None:
        return "nothing"
    return f"{batch.rows} rows" if batch.rows is not None else ", ".join(describe(leaf) for leaf in batch.leaves)


def _no_data(name: str, sizes: dict[int, int]) -> InputError:
    return InputError(
        message(
            f"{name} gave some processes no batch at all, and others have data",
            [f"replica {r}: {'nothing' if size < 0 else f'{size} rows'}" for r, size in sorted(sizes.items())],
            "All processes take every step together, those without data on padding. One that has never seen a batch does "
            "not know what padding looks like.",
            [
                "give every process some data, for instance by dividing rows instead of files",
                "use global batches: `strategy.distribute_dataset(dataset)`",
            ],
        )
    )


def _other_pipelines(saved: int, here: int) -> InputError:
    return InputError(
        message(
            f"`iterator.set_state(state)` got the places of {saved} input pipelines, and this iterator has {here}",
            why="With one pipeline for each replica the place in the data depends on how many replicas there were.",
            instead=[
                f"resume on {saved} replicas",
                "use global batches, whose place is one number for any number of replicas: "
                "`strategy.distribute_dataset(dataset)`",
            ],
        )
    )


def _another_kind(first: Batch, batch: Batch) -> InputError:
    return InputError(
        message(
            f"{batch.name} is not like the batches before it",
            [f"before  {_kind_of(first)}", f"now     {_kind_of(batch)}"],
            "A step is compiled for one tree of arrays. The number of rows may change from batch to batch; the tree "
            "and the number of dimensions may not.",
            [
                "if these are the arrays of one dataset, cut batches out of them: "
                "`rx.data.from_arrays((x, y), batch_size=...)`",
                "if they are two kinds of batches, make a dataset of each",
            ],
        )
    )


def _kind_of(batch: Batch) -> str:
    return f"{jax.tree.unflatten(batch.structure, [describe(leaf) for leaf in batch.leaves])}"
