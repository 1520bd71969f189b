"""Which results lie as an argument lay? State that goes into a step and comes out of it again keeps its layout.

Otherwise XLA chooses one: a bias that was whole comes back in parts, and the second call, whose arguments lie otherwise,
is compiled anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax import _jax
from replicax._placement import Placement
from replicax._run import arguments
from replicax._values import PerReplica

if TYPE_CHECKING:
    from replicax._run.trace import Step


def layouts(
    step: Step, placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, NamedSharding]:
    """The layouts of those results that stand where an argument's leaf of the same type stood, by their output's number.

    A result may be such an argument as a whole, or one of several results.
    """
    came: dict[Any, NamedSharding] = {}
    for argument in (*args, *kwargs.values()):
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument, is_leaf=arguments.is_special):
            if not isinstance(leaf, PerReplica) and hasattr(leaf, "dtype"):
                came.setdefault((path, leaf.shape, leaf.dtype), _layout(leaf, placement))
    if not placement.auto_axes and all(sharding.is_fully_replicated for sharding in came.values()):
        return {}
    kept = {}
    for path, result in jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(step.tree, step.results)):
        if result.output is None or step.spreads(result.output):
            continue
        aval = step.jaxpr.outvars[result.output].aval
        found = [came[key] for key in ((path[i:], aval.shape, aval.dtype) for i in (0, 1)) if key in came]
        if found and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            kept[result.output] = found[0]
    return kept


def _layout(leaf: Any, placement: Placement) -> NamedSharding:
    """How a leaf lies over the strategy's devices; as a copy on each, if it came from elsewhere."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding) and sharding.mesh == placement.mesh:
            return sharding
    return placement.mirrored
