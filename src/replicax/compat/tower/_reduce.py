"""How did one say which reduction is meant, and where its result should go?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax._options import ReduceOp, VariableAggregation
from replicax._strategy import destinations as _destinations
from replicax._strategy.base import Strategy
from replicax._values import is_per_replica, of_first
from replicax.compat.tower import _refusals
from replicax.compat.tower._values import combine_items, map_outputs

PyTree = Any

FIRST = VariableAggregation.ONLY_FIRST_TOWER
Method = ReduceOp | VariableAggregation
"""A reduction, or the aggregation that takes the first tower's value."""


class _Required:
    """Stands in a signature for an argument that must be given, but may follow one with several names."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


def method(*named: Any) -> Method:
    """The reduction that was named; in different releases the argument had different names, of which one is given."""
    given = [name for name in named if name is not None]
    if len(given) != 1:
        names = dict(zip(("aggregation", "method_string", "reduce_op"), named, strict=True))
        raise _refusals.which_reduction({name: word for name, word in names.items() if word is not None})
    (word,) = given
    if isinstance(word, str) and word.upper() in ("ONLY_FIRST_TOWER", "ONLY_FIRST_REPLICA"):
        return FIRST
    if isinstance(word, (str, ReduceOp)):
        return ReduceOp.parse(word)
    if word in (VariableAggregation.SUM, VariableAggregation.MEAN):
        return ReduceOp.from_variable_aggregation(word)
    if word is FIRST:
        return FIRST
    raise _refusals.not_a_reduction(word)


def as_aggregation(word: Any) -> VariableAggregation:
    """The same, as the aggregation of a variable."""
    chosen = method(word, None, None)
    return chosen if isinstance(chosen, VariableAggregation) else VariableAggregation[chosen.name]


def reduce(engine: Strategy, how: Method, value: PyTree, destinations: Any) -> PyTree:
    """One value combined over the towers, on the devices of `destinations`."""
    (result,) = batch_reduce(engine, how, [(value, destinations)])
    return result


def batch_reduce(engine: Strategy, how: Method, pairs: list[Any]) -> list[PyTree]:
    """Values combined over the towers, each on the devices of its destinations."""
    if any(map_outputs(_first(pair)) is not None for pair in pairs):
        return [_reduce_items(engine, how, *pair) for pair in pairs]
    if isinstance(how, ReduceOp):
        return _destinations.batch_reduce_to(engine, how, pairs)
    return [_destinations.sent(engine.placement, of_first(value), destinations) for value, destinations in pairs]


def broadcast(engine: Strategy, tensor: PyTree, destinations: Any) -> PyTree:
    """A copy of `tensor` on each device of `destinations`; a number becomes an array."""
    arrays = jax.tree.map(
        lambda leaf: leaf if is_per_replica(leaf) else jnp.asarray(leaf), tensor, is_leaf=is_per_replica
    )
    return _destinations.broadcast_to(engine, arrays, destinations)


def _first(pair: Any) -> Any:
    return pair[0] if isinstance(pair, tuple) and pair else None


def _reduce_items(engine: Strategy, how: Method, value: Any, destinations: Any) -> Any:
    items = map_outputs(value)
    if items is None:
        return reduce(engine, how, value, destinations)
    if not isinstance(how, ReduceOp):
        raise _refusals.not_a_reduction(how)
    return _destinations.sent(engine.placement, combine_items(how, items), destinations)
