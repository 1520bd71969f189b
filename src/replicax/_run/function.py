"""How does code around a step become one program with it? `rx.function`, the jit that understands variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from replicax import _context, _errors, _jax, _values
from replicax._ledger import OtherStrategy
from replicax._run import arguments

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

P = ParamSpec("P")
R = TypeVar("R")


def function(fn: Callable[P, R]) -> Callable[P, R]:
    """Compiles `fn`, variables, runs and reductions inside it included, into one program.

    `jax.jit` would bake the values of variables into the program; this does not. Two runs and two reductions that follow each
    other cost one dispatch instead of four. Like a scope, the function is cross-replica code of the strategy in force, or
    of the one whose `run` it calls.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    >>> @rx.function
    ... def train(x):
    ...     loss = strategy.run(lambda x: w.value * x, (x,))
    ...     w.assign_add(1.0)
    ...     return strategy.reduce("mean", loss)
    >>> print(train(rx.PerReplica((1.0, 3.0))), train(rx.PerReplica((1.0, 3.0))))
    2.0 4.0
    """
    learnt: list[Strategy] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _context.current()
        if mode is not None and mode.ledger is not None:
            return fn(*args, **kwargs)
        if mode is not None and mode.replica is not None:
            raise _errors.needs_cross_replica(f"`{fn.__name__}`, an rx.function,")
        if _jax.jit_disabled():
            return fn(*args, **kwargs)
        strategy = mode.strategy if mode is not None else learnt[-1] if learnt else _context.default_strategy()
        try:
            return _carry_out(strategy, fn, args, kwargs)
        except OtherStrategy as other:
            strategy.functions.forget(fn)
            learnt.append(other.strategy)
            return _carry_out(other.strategy, fn, args, kwargs)

    return call  # type: ignore[return-value]


def _carry_out(strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if strategy.eager:
        with strategy.scope():
            return fn(*args, **kwargs)
    try:
        args, kwargs, statics = arguments.prepared(strategy.placement, args, kwargs)
    except _errors.ComponentsError:
        if strategy is _context.default_strategy():
            _learn_whose(strategy, fn, args, kwargs)
        raise
    return strategy.functions.find(fn, statics)(args, kwargs)


def _learn_whose(default: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises `OtherStrategy` if `fn` speaks to one; a trace with the first of each replica's values will do."""
    args, kwargs, statics = arguments.prepared(default.placement, *_values.select_replica(0, (args, kwargs)))
    default.functions.find(fn, statics).lower(args, kwargs)
