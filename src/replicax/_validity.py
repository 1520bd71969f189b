"""Which rows of this batch are real? A short batch is padded, and what a step reduces over rows must leave padding out."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several equal parts of a replica's batch, which code looks at for a while as if it were the batch."""

    rows: int
    whole: int
    """How many rows the replica's batch has."""
    index: Any
    averaged: bool
    """Whether what is computed from the parts will be averaged over them, not added up."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.parts: list[Part] = []


_thread = _Thread()


@contextlib.contextmanager
def looking_at(part: Part) -> Iterator[None]:
    """In this block the questions below are about `part`."""
    _thread.parts.append(part)
    try:
        yield
    finally:
        _thread.parts.pop()


def valid_counts(rows: int | jax.Array | None = None) -> tuple[Any, Any] | None:
    """How many rows are real, here and in the whole global batch; None if the step's batch cannot be padded.

    Inside a step, for a batch that came from a distributed dataset. `rows` chooses among several batches: their number
    of rows, or an array computed from the rows of one.
    """
    rows, of = _length(rows)
    if _thread.parts and rows in (None, _thread.parts[-1].rows):
        return _counts_of_part(_thread.parts[-1])
    mode = _context.current()
    if mode is None or mode.ledger is None:
        return None
    return mode.ledger.valid_counts(rows, of)


def _length(rows: Any) -> tuple[int | None, Any]:
    """The number of rows that was asked about, and the array, if it was one."""
    return (rows.shape[0], rows) if getattr(rows, "ndim", 0) else (rows, None)


def _counts_of_part(part: Part) -> tuple[Any, Any] | None:
    """Real rows of the part, and that number of global rows by which its share is right once parts are combined."""
    mode = _context.current()
    counts = None if mode is None or mode.ledger is None else mode.ledger.valid_counts(part.whole)
    if counts is None:
        return None if part.averaged else (part.rows, part.whole * _context.get_strategy().num_replicas_in_sync)
    valid, total = counts
    here = jnp.clip(valid - part.index * part.rows, 0, part.rows)
    return here, total * part.rows / part.whole if part.averaged else total


def valid_rows(rows: int | jax.Array | None = None) -> jax.Array | None:
    """True for each real row of this replica's batch, False for padding.

    Args:
      rows: How many rows the batch has; or, in a step that gets several batches, an array with the rows of the one that is
        meant. Left out, the answer is None if the batch cannot be padded: one replica, or a dataset whose batches all
        divide evenly.

    Asking for it is how a step says that it takes care of padding itself:

    >>> import replicax as rx, numpy as np
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> def step(x):
    ...     return (x * rx.valid_rows(x.shape[0])).sum()
    >>> float(strategy.run(step, (np.ones(3),)))
    3.0
    """
    counts, (size, _) = valid_counts(rows), _length(rows)
    if counts is None:
        return None if size is None else jnp.ones(size, bool)
    return jnp.arange(_current_rows() if size is None else size) < counts[0]


def _current_rows() -> int:
    if _thread.parts:
        return _thread.parts[-1].rows
    mode = _context.current()
    assert mode is not None and mode.ledger is not None
    return mode.ledger.batch_rows()
