"""How do gradients become the same update everywhere? `Optimizer`: an Optax transformation under a strategy."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from replicax import _context, _errors, _jax
from replicax._context import Kind, Mode
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import ReduceOp
from replicax._placement import AXIS
from replicax._values import PerReplica
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    import optax

    from replicax._strategy.base import Strategy

PyTree = Any


@functools.partial(register_dataclass, data_fields=["step", "params", "slots"], meta_fields=["transform"])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and what an Optax transformation remembers, as one value that goes into a step and comes out of it.

    For programs that keep their state in values instead of variables. Nothing of a strategy is in it: the step reduces
    the gradients, and since they are then equal on all replicas the new state is too, which is proven when the step
    is compiled.

    >>> import jax, jax.numpy as jnp, optax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> state = rx.TrainState.create({"w": jnp.array(1.0)}, optax.sgd(0.1))
    >>> def step(state, x):
    ...     gradients = jax.grad(lambda params: params["w"] * x)(state.params)
    ...     return state.apply(rx.get_replica_context().all_reduce("mean", gradients))
    >>> state = strategy.run(step, (state, rx.PerReplica((1.0, 3.0))))
    >>> print(int(state.step), state.params["w"])
    1 0.8
    """

    step: Any
    params: PyTree
    slots: PyTree
    transform: optax.GradientTransformationExtraArgs

    @classmethod
    def create(cls, params: PyTree, transform: optax.GradientTransformation) -> TrainState:
        """The state before the first step."""
        transform = _extended(transform, "rx.TrainState.create(params, transform)")
        return cls(jnp.zeros((), jnp.int32), params, transform.init(params), transform)

    def apply(self, gradients: PyTree, **extra: Any) -> TrainState:
        """The state after one more step; `extra` goes to the transformation."""
        updates, slots = self.transform.update(gradients, self.slots, self.params, **extra)
        return TrainState(self.step + 1, _moved(self.params, updates), slots, self.transform)


class Optimizer:
    """Reduces gradients over the replicas and applies an Optax transformation to variables.

    Call `apply_gradients` inside a step, with this replica's own gradients. What the transformation remembers (moments,
    counts) is kept in variables of the same strategy, so that it is saved, restored and moved with the model.

    Whether gradients are summed or averaged over replicas has no default, because either choice is silently wrong for
    half of all losses: ``"mean"`` goes with a loss that is a mean over the replica's rows (`rx.mean`), ``"sum"`` with a
    loss that was divided by the global batch size (`rx.compute_average_loss`).

    Args:
      transform: Any `optax.GradientTransformation`.
      gradients: ``"mean"`` or ``"sum"``, or the member of `rx.ReduceOp`.
      shard_state: Cuts the slots over the replicas between steps (ZeRO-1): each device then holds 1/N of them.

    >>> import jax, jax.numpy as jnp, optax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    ...     opt = rx.Optimizer(optax.sgd(0.1), gradients="mean")
    >>> def step(x):
    ...     gradients = rx.grad(lambda: w.value * x, [w])()
    ...     opt.apply_gradients(zip(gradients, [w]))
    >>> strategy.run(step, (rx.PerReplica((1.0, 3.0)),))
    >>> print(w.numpy())
    0.8
    """

    def __init__(
        self,
        transform: optax.GradientTransformation,
        gradients: Literal["sum", "mean"] | ReduceOp,
        *,
        shard_state: bool = False,
    ) -> None:
        self.transform = _extended(transform, "rx.Optimizer(transform, ...)")
        self.gradients = _chosen(gradients)
        self.shard_state = shard_state
        self.variables: tuple[Variable, ...] = ()
        self.state: PyTree = None
        """The transformation's state, with a variable in place of each array."""
        self._building = threading.Lock()
        self._restore: Callable[[], None] | None = None

    def __repr__(self) -> str:
        held = f"{len(self.slots)} slots for {len(self.variables)} variables" if self.variables else "no slots yet"
        return f'<rx.Optimizer gradients="{self.gradients.name.lower()}": {held}>'

    def build(self, variables: Iterable[Variable]) -> None:
        """Makes the slots now instead of at the first step, say to restore them from a checkpoint."""
        with self._building:
            if self.state is None:
                self._build(tuple(variables))
                self._begin_with_saved_slots()

    def _build(self, variables: tuple[Variable, ...]) -> None:
        for variable in variables:
            if not isinstance(variable, Variable):
                raise _errors.not_a_variable("rx.Optimizer.apply_gradients", variable)
        if not variables:
            raise ValueError("rx.Optimizer: no variables to optimize. Pass pairs (gradient, variable).")
        owners = {variable.strategy for variable in variables}
        if len(owners) > 1:
            first, second = list(owners)[:2]
            raise _errors.mixed_strategies("`rx.Optimizer`", first, second)
        strategy = variables[0].strategy
        # The slots are made on the host even if a step is being traced: they outlive it.
        with _jax.on_host(), _context.push(Mode(strategy, Kind.CROSS)):
            state = self.transform.init([variable.value for variable in variables])
            names = [_last_word(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
            owners_of = _owners(self.transform, state, variables)

            def made(array: Any, name: str, owner: Variable | None) -> Any:
                if not _is_array(array):
                    return array
                if owner is None:
                    return Variable(array, name=f"optimizer/{name}", trainable=False)
                return Variable(
                    array, name=f"{owner.name}/{name}", trainable=False, colocate_with=owner,
                    layout=self._layout(array) or _as_variable(array, owner),
                )  # fmt: skip

            leaves, structure = jax.tree.flatten(state)
            slots = [made(*given) for given in zip(leaves, names, owners_of, strict=True)]
            self.state = jax.tree.unflatten(structure, slots)
        self._slot_of = {id(slot): owner for slot, owner in zip(slots, owners_of, strict=True) if owner is not None}
        self.variables = variables

    def _layout(self, array: Any) -> PartitionSpec | None:
        """The first axis that divides evenly is cut over the replicas; a slot without one stays whole."""
        if not self.shard_state:
            return None
        replicas = _context.get_strategy().num_replicas_in_sync
        for axis, size in enumerate(array.shape):
            if size and size % replicas == 0 and replicas > 1:
                return PartitionSpec(*[None] * axis, AXIS)
        return None

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        aggregate: bool = True,
        when: Any = None,
        **extra: Any,
    ) -> None:
        """Reduces the gradients over the replicas and updates the variables.

        Args:
          grads_and_vars: Pairs. A gradient of None leaves its variable and its slots untouched, with a warning.
          global_step: A counter that goes up by one, however many replicas there are.
          name: Means nothing here.
          aggregate: False if the gradients are equal on all replicas already; that is proven, not trusted.
          when: A boolean scalar, equal on all replicas. If False, variables and slots stay as they are.
          extra: Passed on to the transformation's ``update``, for those that want the loss value, say.
        """
        mode = _context.current()
        if mode is not None and mode.replica is None:
            raise _errors.apply_across()
        context = _context.get_replica_context()
        assert context is not None
        pairs = _pairs(grads_and_vars)
        if not pairs:
            return
        if (
            self.state is None
        ):  # once for all replicas, and line by line on the caller's thread, which may restore slots
            context.merge_call(lambda strategy: self.build([variable for _, variable in pairs]))
        given = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not given:
            raise _no_gradients("apply_gradients")
        if len(given) < len(pairs):
            _warn_of_missing_gradients([variable for gradient, variable in pairs if gradient is None])
        gradients = [gradient for gradient, _ in given]
        if aggregate:
            gradients = context.all_reduce(self.gradients, gradients)
        replica = context._replica_id  # not the property: an eager run trusts a step less that looks at it
        update = Mode(
            context.strategy, Kind.UPDATE, None if mode is None else mode.ledger,
            update_id=replica if isinstance(replica, int) else None,
        )  # fmt: skip
        with _context.push(update):
            self._update(dict(zip([v for _, v in given], gradients, strict=True)), extra, when)
            if global_step is not None:
                _assign(global_step, global_step.value + 1, when)

    def _distributed_apply(
        self,
        distribution: Strategy,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """As `apply_gradients`, for code that speaks for all replicas: each gradient is a value per replica.

        The form in which tf.distribute's optimizers of 2018 apply gradients; `merge_call` can be given it as it is.

        Args:
          distribution: The strategy, of either era.
          global_step: A counter that goes up by one.
          name: Means nothing here.
        """
        call = "optimizer._distributed_apply(...)"
        strategy = distribution.extended._strategy  # itself, or what a strategy of 2018 stands in front of
        mode = _context.require_cross(strategy, call)
        given = [(gradient, variable) for gradient, variable in _pairs(grads_and_vars) if gradient is not None]
        if not given:
            raise _no_gradients(call)
        variables = [variable for _, variable in given]
        self.build(variables)
        if mode is None or mode.ledger is None:
            given = [(_one_each(gradient, strategy), variable) for gradient, variable in given]
        gradients = strategy.extended.batch_reduce_to(self.gradients, given)
        with _context.push(Mode(strategy, Kind.UPDATE, None if mode is None else mode.ledger)):
            self._update(dict(zip(variables, gradients, strict=True)), {})
            if global_step is not None:
                global_step.assign_add(1)

    def _update(self, gradients: dict[Variable, Any], extra: dict[str, Any], when: Any = None) -> None:
        unknown = [variable for variable in gradients if variable not in self.variables]
        if unknown:
            raise _errors.unknown_to_optimizer(unknown, self.variables)
        _require_shapes(gradients)
        values = [variable.value for variable in self.variables]
        dense = [
            _dense(gradients[v], v) if v in gradients else jnp.zeros_like(value)
            for v, value in zip(self.variables, values, strict=True)
        ]
        state = jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf, self.state)
        updates, new_state = self.transform.update(dense, state, values, **extra)
        new_values = _moved(values, updates)
        for variable, value in zip(self.variables, new_values, strict=True):
            if variable in gradients:
                _assign(variable, value if variable.constraint is None else variable.constraint(value), when)
        for leaf, value in zip(jax.tree.leaves(self.state), jax.tree.leaves(new_state), strict=True):
            if isinstance(leaf, Variable) and self._slot_of.get(id(leaf)) in (None, *gradients):
                _assign(leaf, value, when)

    def checkpoint_items(self) -> dict[str, Any]:
        """What a checkpoint saves: the slots, each named after its variable if these have names of their own."""
        names = [variable.name for variable in self.variables]
        if len(set(names)) < len(names):
            return {"state": self.state}

        def per_variable(node: Any) -> bool:
            return isinstance(node, list) and len(node) == len(names)

        named = jax.tree.map(
            lambda node: dict(zip(names, node, strict=True)) if per_variable(node) else node,
            self.state,
            is_leaf=per_variable,
        )
        return {"state": named}

    def checkpoint_later(self, restore: Callable[[], None]) -> None:
        """Called by a restore that found slots for this optimizer before it has any."""
        self._restore = restore

    def _begin_with_saved_slots(self) -> None:
        if self._restore is not None:
            with _jax.on_host():
                self._restore()

    @property
    def slots(self) -> list[Variable]:
        """Every variable that the transformation's state is kept in."""
        return [leaf for leaf in jax.tree.leaves(self.state) if isinstance(leaf, Variable)]


def _chosen(gradients: Any) -> ReduceOp:
    for op in (ReduceOp.SUM, ReduceOp.MEAN):
        if gradients is op or isinstance(gradients, str) and gradients.upper() == op.name:
            return op
    raise ValueError(
        f'rx.Optimizer(gradients={gradients!r}): write "mean" if each replica\'s loss is a mean over its own rows, "sum" '
        "if it was divided by the global batch size."
    )


def _assign(variable: Variable, value: Any, when: Any) -> None:
    variable.assign(value if when is None else jnp.where(when, value, variable.value))


def _no_transformation(given: Any, call: str) -> TypeError:
    name = getattr(given, "__name__", repr(given)[:60])
    return TypeError(
        _errors.message(
            f"`{call}` got {name} where it takes an Optax transformation",
            [f"transform  {type(given).__name__}"],
            instead=["`optax.sgd(0.1)`", "a schedule is the learning rate of one: `optax.sgd(schedule)`"],
        )
    )


def _no_gradients(call: str) -> ValueError:
    return ValueError(
        f"No gradients provided for any variable: every gradient given to {call} is None. Does the loss depend on the "
        "variables?"
    )


def _warn_of_missing_gradients(variables: list[Variable]) -> None:
    names = ", ".join(repr(variable.name) for variable in variables)
    warnings.warn(
        f"rx.Optimizer.apply_gradients: no gradients for {names}, which stay as they are. Does the loss depend on them?",
        stacklevel=3,
    )


# Optax is imported by whoever has a transformation for us, not by `import replicax`.


def _extended(transform: optax.GradientTransformation, call: str) -> optax.GradientTransformationExtraArgs:
    import optax

    if not (callable(getattr(transform, "init", None)) and callable(getattr(transform, "update", None))):
        raise _no_transformation(transform, call)
    return optax.with_extra_args_support(transform)


def _moved(params: PyTree, updates: PyTree) -> Any:
    import optax

    return optax.apply_updates(params, updates)


def _owners(transform: Any, state: PyTree, variables: tuple[Variable, ...]) -> list[Variable | None]:
    """For each leaf of a state, the variable that it is a slot of; None for what belongs to no single one."""
    from optax.tree_utils import tree_map_params

    leaves, structure = jax.tree.flatten(state)
    owners: list[Variable | None] = [None] * len(leaves)

    def like_the_parameters(numbers: Any) -> None:
        for part, variable in zip(numbers, variables, strict=True):
            for number in jax.tree.leaves(part):  # none where it is masked, several in SM3
                owners[number] = variable

    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    try:
        tree_map_params(transform, like_the_parameters, numbered, is_leaf=lambda _: True)
    except Exception:  # Optax makes a state of placeholders, and L-BFGS, say, looks at its parameters
        return [_by_path(path, variables) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return owners


def _by_path(path: tuple[Any, ...], variables: tuple[Variable, ...]) -> Variable | None:
    """The slot of the third variable is the third entry of a list that has a name: `.mu[2]`."""
    index = getattr(path[-1], "idx", None) if len(path) > 1 and _word(path[-2]) else None
    return variables[index] if index is not None and index < len(variables) else None


def _last_word(path: tuple[Any, ...]) -> str:
    """What a transformation calls a part of its state: `mu`, `count`, `learning_rate`."""
    return next((word for key in reversed(path) if (word := _word(key))), "slot")


def _word(key: Any) -> str | None:
    word = getattr(key, "name", getattr(key, "key", None))
    return word if isinstance(word, str) else None


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Variable]]:
    pairs = list(grads_and_vars)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"rx.Optimizer.apply_gradients takes pairs (gradient, variable), got {type(pair).__name__}. "
                "Write opt.apply_gradients(zip(gradients, variables))."
            )
    swapped = [variable for gradient, variable in pairs if isinstance(gradient, Variable)]
    if swapped and not any(isinstance(variable, Variable) for variable in swapped):
        raise TypeError(
            "rx.Optimizer.apply_gradients takes pairs (gradient, variable), got pairs (variable, gradient). "
            "Write opt.apply_gradients(zip(gradients, variables))."
        )
    seen: set[Variable] = set()
    twice = [v for _, v in pairs if isinstance(v, Variable) and (v in seen or seen.add(v))]
    if twice:
        raise _errors.two_gradients(twice)
    strange = [(v, g) for g, v in pairs if not _is_gradient(g)]
    if strange:
        raise _errors.not_gradients(strange)
    whole = [
        v for g, v in pairs if g is not None and isinstance(v, Variable) and not jnp.issubdtype(v.dtype, jnp.inexact)
    ]
    if whole:
        raise _errors.gradients_of_integers(whole)
    return [(gradient, variable) for gradient, variable in pairs]


def _is_gradient(x: Any) -> bool:
    return x is None or is_slices(x) or isinstance(x, PerReplica | numbers.Number) or _is_array(x)


def _require_shapes(gradients: dict[Variable, Any]) -> None:
    bad = [(v, jnp.shape(g)) for v, g in gradients.items() if not is_slices(g) and jnp.shape(g) != v.shape]
    if bad:
        raise _errors.gradients_of_other_shapes(bad)


def _one_each(gradient: Any, strategy: Strategy) -> Any:
    """A gradient that turned out to be equal on all replicas is still one from each."""
    if isinstance(gradient, PerReplica) or strategy.num_replicas_in_sync == 1:
        return gradient
    return PerReplica((gradient,) * strategy.num_replicas_in_sync)


def _as_variable(array: Any, variable: Variable) -> PartitionSpec:
    """A slot lies as its variable does, if it has its shape."""
    return variable.layout if variable.layout is not None and array.shape == variable.shape else PartitionSpec()


def _dense(gradient: Any, variable: Variable) -> Any:
    if is_slices(gradient):
        slices: IndexedSlices = gradient
        return jnp.zeros(variable.shape, slices.values.dtype).at[slices.indices].add(slices.values)
    return gradient
