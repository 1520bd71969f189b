"""Flax NNX under a strategy: `adopt` a module once, then call it in a step by closure as if there were one replica.

Each `nnx.Variable` of an adopted module keeps its value in an `rx.Variable`, which knows whether it is read on the host, in
a step or under `rx.value_and_grad`. So BatchNorm's statistics and the counts of random streams survive the step, and
an adopted `nnx.Optimizer` works unchanged. Flax is not imported before somebody adopts something.
"""

# Why not `nnx.split` and `nnx.merge` around the step?
#
# Something would have to find the modules that a step mentions, open them before it, and carry back what changed; a
# module that is only mentioned in a closure is found by nobody. As plain arguments modules are copied: the updates of
# BatchNorm would be lost without a word, so `refuse_modules` says it instead.

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np

from replicax import _context, _jax
from replicax._errors import ContextError, NotAvailableError, message
from replicax._run import arguments
from replicax._variables.variable import Variable
from replicax.train._objects import openers


def adopt(module: Any) -> list[Variable]:
    """Makes the variables of an NNX module variables of the strategy in force.

    Afterwards the module may be called inside ``strategy.run``, by closure. What becomes of its state there:

    - `nnx.Param` is read; an optimizer updates it.
    - `nnx.BatchStat` is averaged over the replicas. (For batch statistics of the global batch, as on one device, make the
      layer with ``nnx.BatchNorm(..., axis_name="replica")``.)
    - Random streams advance equally everywhere, and each replica draws numbers of its own from them.
    - Any other variable must get a value that is equal on all replicas, unless it was made with the metadata
      ``aggregation="mean"``, ``"sum"`` or ``"only_first_replica"``.

    Args:
      module: A module, or an `nnx.Optimizer`. Adopting it again returns the same variables.

    Returns:
      What `rx.value_and_grad` and `rx.Optimizer` want: the variables of its parameters.

    >>> import jax, jax.numpy as jnp, optax, replicax as rx
    >>> from flax import nnx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     model = nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    ...     weights = rx.nnx.adopt(model)
    ...     opt = rx.Optimizer(optax.sgd(0.25), gradients="mean")
    >>> def step(x):
    ...     loss, gradients = rx.value_and_grad(lambda: rx.mean(model(x)), weights)()
    ...     opt.apply_gradients(zip(gradients, weights))
    ...     return loss
    >>> losses = strategy.run(step, (rx.PerReplica((jnp.ones((2, 1)), 3 * jnp.ones((2, 1)))),))
    >>> print(strategy.reduce("mean", losses), model.kernel[...], model.bias[...])
    2.0 [[0.5]] [-0.25]
    """
    nnx = _flax()
    found = list(_variables(module))
    for path, variable in found:
        _check(module, path, variable)
    for path, variable in found:
        _adopt(path, variable)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            _let_into_steps(node)
        if isinstance(node, nnx.RngStream):
            object.__setattr__(node, "__class__", _adopted_stream(type(node)))
    return [_kept(variable) for _, variable in found if isinstance(variable, nnx.Param)]


def variables(module: Any) -> dict[str, Variable]:
    """The variables that keep the state of an adopted module, by path.

    >>> import replicax as rx
    >>> from flax import nnx
    >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> weights = rx.nnx.adopt(model)
    >>> sorted(rx.nnx.variables(model))
    ['bias', 'mean', 'scale', 'var']
    """
    _flax()
    found = {"/".join(map(str, path)): _kept(variable) for path, variable in _variables(module)}
    missing = [path for path, variable in found.items() if not isinstance(variable, Variable)]
    if missing:
        raise _not_adopted(module, missing)
    return found


def _flax() -> Any:
    try:
        from flax import nnx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("rx.nnx needs Flax: pip install 'replicax[nnx]'", name=error.name) from None
    return nnx


def _variables(module: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    nnx = _flax()
    return ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable))


def _adopt(path: tuple[Any, ...], variable: Any) -> None:
    if isinstance(_kept(variable), Variable):
        return
    nnx = _flax()
    is_statistic = isinstance(variable, nnx.BatchStat)
    kept = Variable(
        variable.get_raw_value(),
        name="/".join(map(str, path)),
        trainable=isinstance(variable, nnx.Param),
        aggregation=variable.get_metadata("aggregation", "mean" if is_statistic else "none"),
    )
    _slot(variable).__set__(variable, kept)
    object.__setattr__(variable, "__class__", _adopted(type(variable)))


def _slot(variable: Any) -> Any:
    """Where an `nnx.Variable` keeps its value; of an adopted one, its `rx.Variable`."""
    return vars(_flax().Variable)["_raw_value"]


def _kept(variable: Any) -> Any:
    return _slot(variable).__get__(variable)


@functools.cache
def _adopted(base: type) -> type:
    """The kind of variable that `base` becomes. NNX copies it by its class; a copy holds a plain value and is as before."""
    if issubclass(base, _Adopted):
        return base
    return cast(Any, type(base))(base.__name__, (_Adopted, base), {"__slots__": (), "__module__": base.__module__})


class _Adopted:
    """Answers for the value of an `nnx.Variable`; NNX reads and writes it through these three names."""

    __slots__ = ()

    @property
    def _raw_value(self) -> Any:
        kept = _kept(self)
        return kept.value if isinstance(kept, Variable) else kept

    @_raw_value.setter
    def _raw_value(self, value: Any) -> None:
        try:
            kept = _kept(self)
        except AttributeError:  # a copy that is being made
            kept = None
        if not isinstance(kept, Variable):
            _slot(self).__set__(self, value)
        elif value is not kept.value:
            kept.assign(value)

    @property
    def _can_update(self) -> bool:
        return isinstance(_kept(self), Variable) or super()._can_update  # type: ignore[misc]

    def _check_can_update(self) -> None:
        if not isinstance(_kept(self), Variable):
            super()._check_can_update()  # type: ignore[misc]


@functools.cache
def _adopted_stream(base: Any) -> type:
    """The kind of random stream that `base` becomes: key and count are equal on all replicas while the draws differ."""
    if hasattr(base, "draws_of_its_own"):
        return base

    def __call__(self: Any) -> Any:
        key = base.__call__(self)
        mode = _context.current()
        if mode is None or mode.replica is None or mode.strategy.num_replicas_in_sync == 1:
            return key
        return mode.replica.replica_key(key)

    # No second base class: an object cannot change to a class that is laid out differently.
    contents = {"__call__": __call__, "draws_of_its_own": True, "__slots__": (), "__module__": base.__module__}
    return type(base)(base.__name__, (base,), contents)


# -- `nnx.grad` and its like
#
# NNX lets a node into a transform only under the trace in which it was made, and a step has another. Inside, the node is a
# copy; afterwards NNX empties the original and fills it with the copy's parts, its marks of traces included.


def _let_into_steps(node: Any) -> None:
    state = node._pytree__state
    object.__setattr__(node, "_pytree__state", _adopted_state()(state._initializing, state._is_setup))


@functools.cache
def _adopted_state() -> type[Any]:
    from flax.nnx.pytreelib import PytreeState
    from flax.nnx.tracers import TraceState

    class AnyStep(TraceState):
        def is_valid(self) -> bool:
            mode = _context.current()
            return mode is not None and mode.ledger is not None or not _jax.is_staging() or super().is_valid()

    class AdoptedState(PytreeState):
        __slots__ = ()

        def __init__(self, initializing: bool = False, is_setup: bool = False) -> None:
            super().__init__(initializing, is_setup)
            self._trace_state = AnyStep()

    jax.tree_util.register_pytree_node(
        AdoptedState, lambda state: ((), (state.initializing, state.is_setup)), lambda flags, _: AdoptedState(*flags)
    )
    return AdoptedState


# -- modules as arguments


def refuse_modules(fn: Callable[..., Any], call: Any) -> None:
    """Raises if a step was handed a module; asked whenever a step is traced."""
    if "flax.nnx" not in sys.modules:
        return
    module_type = sys.modules["flax.nnx"].Pytree
    for leaf in jax.tree.leaves(call, is_leaf=lambda node: isinstance(node, module_type)):
        if isinstance(leaf, module_type):
            raise _module_as_argument(fn, leaf)


arguments.checks.append(refuse_modules)


# -- in a checkpoint


class _Saved:
    """What a checkpoint holds of a module: the values of its variables by path, whether it is adopted or not."""

    def __init__(self, module: Any) -> None:
        self._variables = {"/".join(map(str, path)): variable for path, variable in _variables(module)}

    def checkpoint_items(self) -> dict[str, Any]:
        return {name: _kept(variable) for name, variable in self._variables.items()}

    def checkpoint_replace(self, name: str, value: Any) -> None:
        variable = self._variables[name]
        _slot(variable).__set__(variable, value)


def _saved(thing: Any) -> _Saved | None:
    is_module = "flax.nnx" in sys.modules and isinstance(thing, sys.modules["flax.nnx"].Pytree)
    return _Saved(thing) if is_module else None


openers.append(_saved)


def _check(module: Any, path: tuple[Any, ...], variable: Any) -> None:
    if isinstance(_kept(variable), Variable):
        return
    value = _kept(variable)
    if variable.hijax or variable.ref or not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
        raise _not_adoptable(module, path, variable)


def _not_adoptable(module: Any, path: tuple[Any, ...], variable: Any) -> NotAvailableError:
    kind = "a hijax variable" if variable.hijax else "a Ref" if variable.ref else f"a {type(_kept(variable)).__name__}"
    return NotAvailableError(
        message(
            f"rx.nnx.adopt({type(module).__name__}) found a variable that it cannot adopt",
            [f"{'/'.join(map(str, path))}  {type(variable).__name__} holding {kind}"],
            "Each variable becomes one `rx.Variable`, which holds one array.",
            ["give each array an `nnx.Variable` of its own", "make it with `hijax=False, ref=False`"],
        )
    )


def _not_adopted(module: Any, paths: list[str]) -> ContextError:
    return ContextError(
        message(
            f"rx.nnx.variables({type(module).__name__}) of a module that was not adopted",
            paths[:5],
            "Its state is in plain arrays of Flax.",
            ["adopt it first: `with strategy.scope(): rx.nnx.adopt(module)`"],
        )
    )


def _module_as_argument(fn: Callable[..., Any], module: Any) -> NotAvailableError:
    name = getattr(fn, "__name__", "step")
    return NotAvailableError(
        message(
            f"strategy.run({name}, ...) was given an NNX module as an argument",
            [f"{type(module).__name__}"],
            "A step gets copies of its arguments, so what the module changes in itself (BatchNorm statistics, counts of "
            "random streams) would be lost.",
            [
                f"adopt it, `with strategy.scope(): rx.nnx.adopt(module)`, and let `{name}` use it by closure or bind it: "
                f"`functools.partial({name}, module)`",
                "pass its state and return the new one: `graphdef, state = nnx.split(module)`",
            ],
        )
    )
