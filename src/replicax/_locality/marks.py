"""Which equations did replicax itself put into the program, and what do they promise?

The engine emits each reduction as one `jit` equation with a telling name. The name survives differentiation, `vmap`
and rematerialisation, and says what the collectives inside amount to.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

PyTree = Any

REDUCE = "rx_reduce_"
"""Followed by sum, mean, min, max or first. Operand i is reduced into result i."""
GATHER = "rx_gather"
ASSERT = "rx_assert_mirrored"


def mark_of(eqn: JaxprEqn) -> str | None:
    """The name that replicax gave to this equation; None for the user's own."""
    if eqn.primitive.name != "jit":
        return None
    name: str = eqn.params["name"]
    return name if name.startswith((REDUCE, GATHER, ASSERT)) else None


def spoken(name: str) -> str:
    """What the user calls the collective that goes by this name in the program."""
    if name.startswith(REDUCE):
        return f'all_reduce("{name.removeprefix(REDUCE).split("_")[0]}")'
    return "all_gather" if name.startswith(GATHER) else f"lax.{name}"


def reduction_kind(eqn: JaxprEqn) -> str | None:
    """sum, mean, min, max or first if this equation is one of our reductions, else None."""
    mark = mark_of(eqn)
    return mark.removeprefix(REDUCE).split("_")[0] if mark and mark.startswith(REDUCE) else None


# An assertion speaks of a value, not of its derivative: the gradient that comes back through a mirrored value is as a
# rule different on each replica. A plain `jit(lambda x: x)` would lose the assertion under `grad` (JAX forwards the
# operand and drops the equation) and keep its name on the cotangent. `checkpoint_name` has just the rule we
# need: it names primals, never tangents, and compiles to nothing.


def _named(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: checkpoint_name(jnp.asarray(leaf), ASSERT), tree)


_named.__name__ = _named.__qualname__ = ASSERT
_assert_mirrored = jax.jit(_named)


def assert_mirrored(value: PyTree) -> PyTree:
    """The same value, which the analysis then takes as equal on all replicas, whatever it was computed from.

    replicax proves that what a step writes to a mirrored variable is equal everywhere, and refuses what it cannot
    prove, such as the answer of a host callback. Where you know better, say so. It is your word, not a check: if the
    value does differ, the copies of the variable drift apart silently. A gradient that comes back through it
    is not covered by it and has to be reduced as always.

    Args:
      value: An array or a tree of arrays, inside a replica function.

    Example:
      >>> import jax, jax.numpy as jnp, replicax as rx
      >>> from jax.experimental import io_callback
      >>> def learning_rate():  # read by the host, so that the program does not show that it is equal everywhere
      ...     return io_callback(lambda: jnp.float32(0.5), jax.ShapeDtypeStruct((), jnp.float32))
      >>> def step():
      ...     return rx.assert_mirrored(learning_rate())
      >>> print(rx.MirroredStrategy(jax.devices()[:2]).run(step))
      0.5
    """
    return _assert_mirrored(value)
