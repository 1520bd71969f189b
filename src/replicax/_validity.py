"""Which rows of this batch are real? A short batch is padded, and what a step reduces over rows must leave padding out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context


def valid_counts(rows: int | None = None) -> tuple[Any, Any] | None:
    """How many rows are real, here and in the whole global batch; None if the step's batch cannot be padded.

    Inside a step, for a batch that came from a distributed dataset. `rows` chooses among batches of different size.
    """
    mode = _context.current()
    if mode is None or mode.ledger is None:
        return None
    return mode.ledger.valid_counts(rows)


def valid_rows(rows: int | None = None) -> jax.Array | None:
    """True for each real row of this replica's batch, False for padding; None if the batch cannot be padded.

    Asking for it is how a step says that it takes care of padding itself:

    >>> import replicax as rx, numpy as np
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> def step(x):
    ...     mask = rx.valid_rows(x.shape[0])
    ...     return x.sum() if mask is None else (x * mask).sum()
    >>> float(strategy.run(step, (np.ones(3),)))
    3.0
    """
    counts = valid_counts(rows)
    if counts is None:
        return None
    size = rows if rows is not None else _current_rows()
    return jnp.arange(size) < counts[0]


def _current_rows() -> int:
    mode = _context.current()
    assert mode is not None and mode.ledger is not None
    return mode.ledger.batch_rows()
