"""Which equations did replicax itself put into the program, and what do they promise?

The engine emits each reduction as one `jit` equation with a telling name. The name survives differentiation, `vmap`
and rematerialisation, and says what the collectives inside amount to.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

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


def reduction_kind(eqn: JaxprEqn) -> str | None:
    """sum, mean, min, max or first if this equation is one of our reductions, else None."""
    mark = mark_of(eqn)
    return mark.removeprefix(REDUCE).split("_")[0] if mark and mark.startswith(REDUCE) else None


# An assertion speaks of a value, not of its derivative: the gradient that comes back through a mirrored value is as a
# rule different on each replica. A plain `jit(lambda x: x)` would lose the assertion under `grad` (JAX forwards the
# operand and drops the equation) and keep its name on the cotangent. `checkpoint_name` has just the rule we
# need: it names primals, never tangents, and compiles to nothing.


def _named(*values: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(checkpoint_name(value, ASSERT) for value in values)


_named.__name__ = _named.__qualname__ = ASSERT
_assert_mirrored = jax.jit(_named)


def assert_mirrored(*values: jax.Array) -> tuple[jax.Array, ...]:
    """The same values, taken as equal on all replicas by the analysis, whatever they were computed from.

    It is the user's word, not a check. What comes back through it under `grad` is not covered by it.
    """
    return _assert_mirrored(*values)
