"""Which rows was a step given, and whose are the rows of a value in it? A step may get several batches, each padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from replicax import _errors

# A value inside a step does not say which batch its rows belong to, and blocks of two batches may be equally long. So we
# look at what it was computed from: with JAX's tracers in a compiled run, with notes on each array in an eager one. Where
# that ends in the dark (inside a function that JAX traces by itself), any batch of that length may be meant, and the call is
# refused unless they are padded alike. That is seen on the host, before each step: the masks are tiny, and most often
# it is one mask, that of the batch to which all the leaves belong.


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """An argument of the step that has rows."""

    leaf: int
    """Its number among the leaves of the call."""
    rows: int
    """Of one replica, padding included."""
    mask: Any = None
    """Its validity mask, as the step sees it; None if no row is padding."""
    mask_leaf: int | None = None
    label: str = ""
    """What the user calls it."""


@dataclasses.dataclass(frozen=True)
class Alike:
    """Arguments that were asked about at once, so that they must be padded alike."""

    labels: tuple[str, ...]
    masks: tuple[int | None, ...]
    """The numbers of their masks; None where there is none."""
    rows: int


class GivenRows:
    """The arguments with rows, and what was asked about them.

    Args:
      replicas: Of the whole job.
      sources: The numbers of the leaves from which a value was computed; None if that cannot be seen.
    """

    def __init__(self, replicas: int, sources: Callable[[Any], Collection[int] | None]) -> None:
        self._replicas = replicas
        self._sources = sources
        self.all: list[Given] = []
        self.asked: set[int] = set()
        """The numbers of the masks that were looked at."""
        self.alike: set[Alike] = set()

    def counts(self, rows: int | None, of: Any) -> tuple[Any, Any] | None:
        """How many of `rows` rows are real, here and in the whole batch, those of the value `of` if there is one."""
        with_padding = padded(self.all)
        if not with_padding:
            return None
        rows = with_padding[0].rows if rows is None else rows
        found = self._owners(of, rows)
        if not found:
            return None
        masks = {given.mask_leaf: given.mask for given in padded(found)}
        if not masks:
            return rows, rows * self._replicas
        self.asked.update(number for number in masks if number is not None)
        if len(found) > 1:
            self.alike.add(alike(found))
        mask = next(iter(masks.values()))
        return mask[0, 0], mask[0, 1]

    def mask_of(self, rows: int, sources: Collection[int]) -> int | None:
        """The number of the mask of a result with so many rows that was computed from the leaves `sources`, among others."""
        found = owners([given for given in self.all if given.rows == rows], sources)
        if len(found) > 1:
            self.alike.add(alike(found))
        return next((given.mask_leaf for given in padded(found)), None)

    def padded_rows(self) -> int:
        """How many rows a replica has of the first batch with padding."""
        return padded(self.all)[0].rows

    def let_go(self) -> None:
        """Forgets the masks themselves, which belong to a trace that is over."""
        self.all = [dataclasses.replace(given, mask=None) for given in self.all]

    def _owners(self, of: Any, rows: int) -> list[Given]:
        candidates = [given for given in self.all if given.rows == rows]
        with_padding = padded(candidates)
        if of is None or len(candidates) == len(with_padding) < 2:
            return with_padding
        sources = self._sources(of)
        if sources is None:
            return candidates if with_padding else []
        return owners(candidates, sources)


def owners(candidates: Sequence[Given], sources: Collection[int]) -> list[Given]:
    """Whose rows those of a value are that was computed from the leaves `sources`: several, if they may be each one's."""
    own = [given for given in candidates if given.leaf in sources]
    # Noise that was given is as long as the batch it is added to, and none of it is padding.
    return padded(own) or own or padded(candidates)


def padded(candidates: Sequence[Given]) -> list[Given]:
    return [given for given in candidates if given.mask_leaf is not None]


def alike(owners: Sequence[Given]) -> Alike:
    labels, masks = zip(*((given.label, given.mask_leaf) for given in owners), strict=True)
    return Alike(labels, masks, owners[0].rows)


# -- what both runs refuse, on the host: masks are here arrays of NumPy, a row for each replica of this process


def refuse_averaged(fn: Any, site: Any, rows: int, mask: np.ndarray) -> None:
    """Refuses a step that combined the rows of a batch, at `site`, without asking which are real: if the batch is short, or
    comes from data of which a later one is known to be."""
    counts = mask[:, 0]
    if (counts < rows).any() or mask[:, 2].any():
        raise _errors.averages_padding(fn, site, counts, rows)


def refuse_unlike(fn: Any, group: Alike, masks: Sequence[np.ndarray | None], replicas: int) -> None:
    """Refuses batches that were asked about at once and are padded differently."""
    full = [group.rows] * replicas
    counts = [full if mask is None else mask[:, 0].tolist() for mask in masks]
    if any(count != counts[0] for count in counts):
        raise _errors.padded_differently(fn, group.labels, counts, group.rows)
