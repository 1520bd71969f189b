"""How does a batch that is too large for memory become one step? `accumulate`: in parts, reduced once at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _jax, _validity
from replicax._errors import InputError, message
from replicax._options import is_count
from replicax._validity import Part

PyTree = Any


def accumulate(
    function: Callable[..., Any], microbatches: int, combine: Literal["mean", "sum"] = "mean"
) -> Callable[..., Any]:
    """Calls `function` on one microbatch after the other and combines what it returns.

    For the batch size that you want and the device does not have memory for. Wrap what computes the gradients; the
    optimizer comes after it and reduces over the replicas once, whatever the number of microbatches.

    Every array among the positional arguments is cut along axis 0; keyword arguments are passed on whole, and parameters
    that `jax.grad` takes belong into the closure: ``rx.accumulate(lambda x: jax.grad(loss)(params, x), 4)(x)``. `rx.mean`,
    `rx.compute_average_loss` and `rx.valid_rows` know which rows of a microbatch are real, so that k microbatches give
    the numbers of the whole batch, also for a short one.

    Args:
      function: Returns arrays, in any structure: ``rx.value_and_grad(loss, variables)``, say.
      microbatches: How many; the rows of a replica's batch must divide by it.
      combine: ``"mean"`` for losses that are means over rows, ``"sum"`` for losses that were divided by the global
        batch size. Integers are counts and are always added up.

    >>> import jax, jax.numpy as jnp, optax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    ...     opt = rx.Optimizer(optax.sgd(0.1), gradients="mean")
    >>> def step(x):
    ...     gradients_of = rx.grad(lambda x: rx.mean(w.value * x), [w])
    ...     gradients = rx.accumulate(gradients_of, microbatches=4)(x)
    ...     opt.apply_gradients(zip(gradients, [w]))
    >>> for rows in strategy.distribute_dataset([jnp.arange(16.0)]):
    ...     strategy.run(step, (rows,))
    >>> print(w.numpy().round(3))
    0.25
    """
    if not callable(function) or not is_count(microbatches) or combine not in ("mean", "sum"):
        wrong = f"`rx.accumulate({_name(function)}, {microbatches!r}, {combine!r})` does not say what to do"
        ways = ['pass a function, at least one microbatch, and how results become one: `"mean"` or `"sum"`']
        raise ValueError(message(wrong, instead=ways))

    def call(*batch: Any, **whole: Any) -> Any:
        rows = _rows(batch, microbatches)
        size = rows // microbatches
        parts = jax.tree.map(lambda x: jnp.reshape(x, (microbatches, size, *x.shape[1:])), batch)

        def one(index: Any, part: Any) -> Any:
            with _validity.looking_at(Part(size, rows, index, combine == "mean")):
                return jax.tree.map(jnp.asarray, function(*part, **whole))

        total = _scanned(one, parts, microbatches) if _jax.is_staging() else _looped(one, parts, microbatches)
        return jax.tree.map(lambda x: _combined(x, microbatches, combine), total)

    return call


def _scanned(one: Callable[..., Any], parts: PyTree, count: int) -> PyTree:
    """The sum of what `one` returns, in one loop of the program. `one` is traced once."""
    first = (jnp.int32(0), jax.tree.map(lambda x: x[0], parts))
    # Not `jax.make_jaxpr`: it traces as `jax.jit` does, and a jit inside a step must not see variables.
    body, captured = jax.closure_convert(one, *first)
    outs = jax.eval_shape(body, *first, *captured)

    def add(total: PyTree, given: Any) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, body(*given, *captured)), None

    start = jax.tree.map(lambda out: jnp.zeros(out.shape, _summed_type(out.dtype)), outs)
    return lax.scan(add, start, (jnp.arange(count, dtype=jnp.int32), parts))[0]


def _looped(one: Callable[..., Any], parts: PyTree, count: int) -> PyTree:
    """The same, line by line."""
    outs = [one(i, jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(count)]
    return jax.tree.map(lambda *xs: sum(x.astype(_summed_type(x.dtype)) for x in xs), *outs)


def _summed_type(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.bool_ else dtype


def _combined(total: jax.Array, count: int, combine: str) -> jax.Array:
    return total / count if combine == "mean" and jnp.issubdtype(total.dtype, jnp.inexact) else total


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _rows(batch: tuple[Any, ...], microbatches: int) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    found = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
    sizes = {shape[0] if shape else None for shape in found.values()}
    rows = next(iter(sizes), None)
    if rows is not None and len(sizes) == 1 and rows % microbatches == 0:
        return rows
    raise InputError(
        message(
            f"`rx.accumulate(f, microbatches={microbatches})` was called with arrays that it cannot cut",
            [f"argument {path}  {_division(shape, microbatches)}" for path, shape in found.items()],
            "All positional arguments are cut along axis 0 into equal microbatches.",
            [
                "choose a number of microbatches that divides the rows of one replica's batch",
                "pass what is not cut by keyword: `rx.accumulate(f, k)(x, y, rate=rate)`",
                "leave parameters in the closure: `rx.accumulate(lambda x, y: f(params, x, y), k)(x, y)`",
            ],
        )
    )


def _division(shape: tuple[int, ...], microbatches: int) -> str:
    if not shape:
        return "a scalar"
    low, left = divmod(shape[0], microbatches)
    return f"{shape[0]} rows = {microbatches} x {low}" + f" + {left} left over" * (left > 0)
