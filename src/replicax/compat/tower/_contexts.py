"""Where in the program am I, in the words of 2018: in a tower, or across towers?"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from replicax import _context
from replicax._context import ReplicaContext
from replicax._options import VariableAggregation
from replicax._variables.variable import Variable
from replicax.compat.tower import _refusals
from replicax.compat.tower._strategy import DistributionStrategy, front_of

_contexts: weakref.WeakKeyDictionary[ReplicaContext, weakref.ref[TowerContext]] = weakref.WeakKeyDictionary()


class TowerContext:
    """What code may ask and do while it runs for one tower; `get_tower_context` returns it.

    At the bare top level it is that of the default strategy, which has one tower.

    >>> from replicax.compat import tower
    >>> tower.get_tower_context().tower_id
    0
    """

    def __init__(self, distribution_strategy: DistributionStrategy, tower_id: int) -> None:
        self._over(ReplicaContext(distribution_strategy._engine, tower_id))

    def _over(self, replica: ReplicaContext) -> None:
        self._replica = replica
        _contexts[replica] = weakref.ref(self)

    def __enter__(self) -> None:
        self._replica.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._replica.__exit__(*exc)

    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Meets the other towers, runs ``merge_fn(distribution, *args, **kwargs)`` once for all, and goes on.

        What the towers passed reaches `merge_fn` merged; each tower gets its component of what it returns.
        """
        require_tower_context(self)

        def merge(strategy: Any, /, *args: Any, **kwargs: Any) -> Any:
            return merge_fn(front_of(strategy), *args, **kwargs)

        return self._replica.merge_call(merge, args, kwargs)

    def tower_local_var_scope(self, reduce_method: Any) -> AbstractContextManager[None]:
        """As `DistributionStrategy.tower_local_var_scope`."""
        return self.distribution_strategy.tower_local_var_scope(reduce_method)

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        require_tower_context(self)
        return self.num_towers == 1

    @property
    def num_towers(self) -> int:
        """How many towers there are, to average over."""
        return self._replica.num_replicas_in_sync

    @property
    def tower_id(self) -> Any:
        """Which tower this is, from 0: an int in an eager run, a traced scalar in a compiled one."""
        require_tower_context(self)
        return self._replica.replica_id_in_sync_group

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy that runs this tower."""
        return front_of(self._replica.strategy)

    @property
    def device(self) -> jax.Device:
        """The device of this tower; in a compiled run, which is one program for all, that of tower 0."""
        require_tower_context(self)
        return self._replica.devices[0]


def get_tower_context() -> TowerContext | None:
    """The context of the tower that this code runs for, or None in cross-tower context."""
    replica = _context.get_replica_context()
    if replica is None:
        return None
    known = _contexts.get(replica)
    context = known() if known is not None else None
    if context is None:
        context = object.__new__(TowerContext)
        context._over(replica)
    return context


def get_cross_tower_context() -> DistributionStrategy | None:
    """The strategy for all of whose towers this code runs, or None in a tower."""
    return front_of(_context.get_strategy()) if _context.in_cross_replica_context() else None


def get_distribution_strategy() -> DistributionStrategy:
    """The strategy in force, the default one if none was entered.

    >>> from replicax.compat import tower
    >>> tower.get_distribution_strategy().num_towers
    1
    """
    return front_of(_context.get_strategy())


def has_distribution_strategy() -> bool:
    """Whether a strategy other than the default one is in force."""
    return _context.has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Raises a `ContextError` unless `tower_ctx` is that of the tower under way."""
    active = get_tower_context()
    if active is None or active._replica is not tower_ctx._replica:
        raise _refusals.wrong_tower(tower_ctx, active)


def get_loss_reduction() -> VariableAggregation:
    """How towers' losses were to be combined: MEAN, as no library of losses here records a sum."""
    return VariableAggregation.MEAN


def increment_var(v: Variable, amount: Any = 1) -> Any:
    """Adds `amount` to `v` once, from inside a tower.

    >>> import jax, replicax as rx
    >>> from replicax.compat import tower
    >>> distribution = tower.MirroredStrategy(devices=jax.devices()[:2])
    >>> with distribution.scope():
    ...     steps = rx.Variable(0)
    ...     distribution.call_for_each_tower(lambda: tower.increment_var(steps))
    >>> int(steps)
    1
    """

    def merge_fn(distribution: DistributionStrategy) -> None:
        distribution.update(v, lambda component: component.assign_add(amount, read_value=False))

    context = get_tower_context()
    if context is None:
        raise _refusals.needs_tower("increment_var(v)")
    return context.merge_call(merge_fn)
