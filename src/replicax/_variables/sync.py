"""How do the copies of a variable stay equal? The rules of synchronization x aggregation, in one place.

==================  =========================================  ==========================================
assign(x) in ...    ON_WRITE (mirrored)                        ON_READ (one component per replica)
==================  =========================================  ==========================================
a replica, NONE     x, which must be equal on every replica    this replica's component becomes x
a replica, SUM      sum of x over replicas                     likewise
a replica, MEAN     mean of x over replicas                    likewise
a replica, FIRST    replica 0's x                              likewise
across replicas     x, which must not be per-replica           each component x; under SUM its share of x
an update fn        x, this component                          x, this component
==================  =========================================  ==========================================
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context, _errors
from replicax._context import Kind, Mode
from replicax._options import ReduceOp, VariableAggregation, VariableSynchronization
from replicax._values import PerReplica
from replicax._variables import storage

if TYPE_CHECKING:
    from replicax._variables.variable import Variable

SUM, MEAN, NONE = VariableAggregation.SUM, VariableAggregation.MEAN, VariableAggregation.NONE
FIRST = VariableAggregation.ONLY_FIRST_REPLICA


def parse_synchronization(word: VariableSynchronization | str | None, name: str) -> VariableSynchronization:
    """ON_WRITE or ON_READ, from what the user wrote."""
    found = as_synchronization(word, name)
    return VariableSynchronization.ON_WRITE if found is VariableSynchronization.AUTO else found


def as_synchronization(word: VariableSynchronization | str | None, name: str) -> VariableSynchronization:
    """What the user wrote, as a member of the enum."""
    sync = VariableSynchronization
    if word is None:
        return sync.AUTO
    if isinstance(word, str) and word.upper() in sync.__members__:
        word = sync[word.upper()]
    if word is sync.NONE:
        raise _errors.synchronization_none(name)
    if not isinstance(word, sync):
        raise _errors.invalid_mode("synchronization", word, name, list(sync.__members__))
    return word


def parse_aggregation(word: VariableAggregation | str | None, name: str) -> VariableAggregation:
    if word is None:
        return NONE
    if isinstance(word, str) and word.upper() in VariableAggregation.__members__:
        return VariableAggregation[word.upper()]
    if not isinstance(word, VariableAggregation):
        raise _errors.invalid_mode("aggregation", word, name, list(VariableAggregation.__members__))
    return word


def combined(variable: Variable, value: Any, mode: Mode | None, method: str) -> Any:
    """The value that the copies take, once all replicas have had their say."""
    if mode is not None and mode.kind is Kind.UPDATE:
        return _single(variable, value, method)
    if mode is None or mode.replica is None:
        return _from_across(variable, value, method)
    if mode.ledger is None:
        return _single(variable, value, method)
    if variable.on_read:
        return value
    aggregation = variable.aggregation
    if aggregation is NONE:
        return value
    if isinstance(value, numbers.Number) and not mode.ledger.merge_call(_differs, (value,), {}):
        if aggregation is SUM and mode.strategy.num_replicas_in_sync > 1:
            raise _errors.sum_of_a_number(variable, value, method)
        return value
    if aggregation is FIRST:
        return mode.ledger.first(value)
    return mode.ledger.all_reduce(ReduceOp.from_variable_aggregation(aggregation), value, None)


def _differs(strategy: Any, number: Any) -> bool:
    """Whether replicas that run line by line, where ids are ints, came with different Python numbers."""
    return isinstance(number, PerReplica) and len(set(map(float, number.values))) > 1


def _from_across(variable: Variable, value: Any, method: str) -> Any:
    value, replicas = _single(variable, value, method), variable.placement.replicas
    if not variable.on_read or variable.aggregation is not SUM or replicas == 1:
        return value
    if method != "assign":
        raise _errors.on_read_sum_from_across(variable, method)
    return shares(storage.checked(variable, value, method), replicas)


def shares(total: jax.Array, replicas: int) -> jax.Array:
    """Components that add up to `total`: equal ones, and for integers the rest goes to the first replica.

    >>> import jax.numpy as jnp
    >>> from replicax._variables.sync import shares
    >>> print(shares(jnp.array(7), 3), shares(jnp.array(7.5), 3))
    [3 2 2] [2.5 2.5 2.5]
    """
    if not jnp.issubdtype(total.dtype, jnp.integer):
        return jnp.broadcast_to((total / replicas).astype(total.dtype), (replicas, *total.shape))
    share, rest = jnp.divmod(total, replicas)
    return jnp.stack([share + rest] + [share] * (replicas - 1))


def has_no_common_value(variable: Variable, mode: Mode | None) -> bool:
    """Whether an assignment made here could not return what was assigned: components that nothing combines."""
    across = mode is None or mode.replica is None and mode.kind is not Kind.UPDATE
    return across and variable.on_read and variable.aggregation is NONE and variable.placement.replicas > 1


def _single(variable: Variable, value: Any, method: str) -> Any:
    if not isinstance(value, PerReplica):
        return value
    if variable.placement.replicas > 1:
        raise _errors.per_replica_assigned(variable, value, method)
    return value.values[0]


def read_across(variable: Variable) -> Any:
    """What code across replicas reads, asked from anywhere: the components of an on-read variable combined."""
    if not hasattr(variable, "on_read"):
        if isinstance(variable, (jax.Array, np.ndarray, np.generic, numbers.Number)):
            return variable  # the same on all replicas, and no variable
        raise _errors.read_of_no_variable(variable)
    mode = _context.current()
    if not variable.on_read:
        return variable.value
    return storage.host_value(variable) if mode is None or mode.ledger is None else mode.ledger.read_across(variable)


def trainable(explicit: bool | None, synchronization: VariableSynchronization) -> bool:
    if explicit is None:
        return synchronization is not VariableSynchronization.ON_READ
    return explicit
