"""Which axes of each replica's value are meant?"""

from __future__ import annotations

import operator
from typing import Any

Axes = tuple[int, ...] | None


def one(call: str, axis: Any) -> int:
    """An axis as an int; `TypeError` for what is none."""
    if not isinstance(axis, bool):
        try:
            return operator.index(axis)
        except TypeError:
            pass
    raise TypeError(f"{call}(..., axis={axis!r}): an axis is an int.")


def several(call: str, axis: Any) -> Axes:
    """An axis or several as ints, or None for none.

    >>> from replicax._cross import axes
    >>> axes.several("strategy.reduce", [0, -1])
    (0, -1)
    """
    if axis is None:
        return None
    if not isinstance(axis, (tuple, list)):
        return (one(call, axis),)
    return tuple(one(call, a) for a in axis)


def from_front(call: str, axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """`axes` of a value of this rank, counted from the front; `ValueError` for one that it does not have.

    >>> from replicax._cross import axes
    >>> axes.from_front("strategy.reduce", (0, -1), rank=3)
    (0, 2)
    """
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(
                f"{call}(..., axis={axis}): each replica's value has rank {rank}, so its axes are {-rank}..{rank - 1}."
                if rank
                else f"{call}(..., axis={axis}): each replica's value is a scalar and has no axis."
            )
    found = tuple(axis % rank for axis in axes)
    if len(set(found)) < len(found):
        raise ValueError(f"{call}(..., axis={axes}): an axis of values of rank {rank} occurs twice.")
    return found
