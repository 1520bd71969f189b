"""How does a variable lie between steps, if not as one copy on each device? Layouts, and rules that give them.

A layout is a `jax.sharding.PartitionSpec`: for each axis of the array the mesh axis it is cut over, or None. The mesh
axes are ``"replica"`` and those that the strategy was given for the inside of a replica (`replica_mesh={"model": 2}`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax._errors import VariableError, message
from replicax._options import is_count
from replicax._placement import AXIS, Placement
from replicax._variables.creation import variable_creator_scope

if TYPE_CHECKING:
    from replicax._variables.variable import Variable

PyTree = Any


class LayoutPolicy(Protocol):
    """Says how parameters lie that do not say it themselves."""

    def layout(self, name: str, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
        """The layout of the parameter `name`."""
        ...


def settled(variable: Variable, policy: LayoutPolicy | None) -> PartitionSpec | None:
    """The layout of a new variable: its own, or else the policy's, on the axes that its strategy has."""
    wanted: Any = variable.layout if variable.layout is not None else policy
    placement = variable.placement
    if wanted is None or variable.on_read or placement.apart:
        return None
    if not isinstance(wanted, PartitionSpec):
        wanted = checked(wanted, f"rx.Variable(..., name={variable.name!r}, layout=...)").layout(
            variable.name, variable.shape, placement
        )
    return fitted(f"variable {variable.name!r}", wanted, variable.shape, placement)


def checked(policy: Any, call: str) -> Any:
    """`policy`, if it can say how parameters lie."""
    if policy is not None and not callable(getattr(policy, "layout", None)):
        raise _no_policy(policy, call)
    return policy


def fitted(what: str, spec: PartitionSpec, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
    """`spec` on the axes that there are.

    A strategy without axes inside its replicas runs the same program, so that their names mean nothing to it.
    """
    mesh = placement.mesh
    unknown = [name for entry in spec for name in _names(entry) if not _axes_called(name, placement)]
    if unknown and placement.auto_axes:
        raise _unknown_axes(what, spec, unknown, placement)
    entries = [_known(entry, placement) for entry in spec]
    while entries and entries[-1] is None:  # as XLA reports layouts; another spelling would compile the second call
        entries.pop()
    spec = PartitionSpec(*entries)
    used = [name for entry in spec for name in _names(entry)]
    if len(set(used)) < len(used):
        raise _cut_twice(what, spec)
    if len(spec) > len(shape):
        raise _too_many_entries(what, spec, shape)
    cuts = [(axis, entry, math.prod(mesh.shape[name] for name in _names(entry))) for axis, entry in enumerate(spec)]
    uneven = [cut for cut in cuts if shape[cut[0]] % cut[2]]
    if uneven:
        raise _indivisible(what, spec, shape, uneven)
    return spec


def _known(entry: Any, placement: Placement) -> Any:
    names = tuple(axis for name in _names(entry) for axis in _axes_called(name, placement))
    return names if len(names) > 1 else names[0] if names else None


def _axes_called(name: str, placement: Placement) -> tuple[str, ...]:
    """The mesh axes that `name` means: one, or several that are together called so (see `TPUStrategy`)."""
    names = placement.mesh.axis_names
    return (name,) if name in names else tuple(axis for axis in names if axis.startswith(f"{name}_"))


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


@dataclasses.dataclass(frozen=True)
class PartitionRules:
    """Layouts by name: the first rule whose pattern is found in a name decides. Made by `rx.partition_rules`."""

    rules: tuple[tuple[str, PartitionSpec], ...]
    _scopes: list[Any] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def layout(self, name: str, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
        """The layout of the parameter `name`. A scalar cannot be cut and needs no rule."""
        spec = self._found(name, shape)
        if spec is None:
            raise _unmatched([(name, shape)], self)
        return spec

    def specs(self, tree: PyTree) -> PyTree:
        """The layout of each leaf of a pytree; its name is its path, as in ``layers/0/kernel``."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        named = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), getattr(leaf, "shape", ()))
            for path, leaf in leaves
        ]
        found = [self._found(name, shape) for name, shape in named]
        unmatched = [pair for pair, spec in zip(named, found, strict=True) if spec is None]
        if unmatched:
            raise _unmatched(unmatched, self)
        return jax.tree.unflatten(structure, found)

    def place(self, tree: PyTree) -> PyTree:
        """The arrays of a pytree, laid out over the devices of the strategy in force. Other leaves stay as they are."""
        placement = _context.get_strategy().placement

        def lay(path: Any, leaf: Any, spec: PartitionSpec) -> Any:
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
                return leaf  # the activation function of an Equinox module, say
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return jax.device_put(
                leaf, NamedSharding(placement.mesh, fitted(repr(name), spec, np.shape(leaf), placement))
            )

        return jax.tree_util.tree_map_with_path(lay, tree, self.specs(tree))

    def _found(self, name: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        if math.prod(shape) == 1:
            return PartitionSpec()
        return next((spec for pattern, spec in self.rules if re.search(pattern, name)), None)

    def __enter__(self) -> PartitionRules:
        scope = contextlib.ExitStack()
        scope.enter_context(variable_creator_scope(self._create))
        self._scopes.append(scope)
        return self

    def __exit__(self, *exc: object) -> None:
        self._scopes.pop().close()

    def _create(self, next_creator: Any, **options: Any) -> Any:
        if options.get("layout") is None:
            options["layout"] = self
        return next_creator(**options)


def partition_rules(rules: Iterable[tuple[str, PartitionSpec]] | Mapping[str, PartitionSpec]) -> PartitionRules:
    """Says by name how parameters are cut over the devices of a replica.

    For models too large for one device. Each rule is a regular expression and a layout; the first whose expression is
    found in the name of a variable, or in the path of a leaf of a pytree, decides, and a parameter that no rule matches
    is an error. Give the rules to a strategy (``variables=rules``), or make variables in a ``with`` block of them.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> from jax.sharding import PartitionSpec as P
    >>> rules = rx.partition_rules([("kernel", P(None, "model")), (".*", P())])
    >>> strategy = rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2}, variables=rules)
    >>> with strategy.scope():
    ...     w = rx.Variable(jnp.zeros((8, 6)), name="dense/kernel")
    >>> [shard.data.shape for shard in w.value.addressable_shards]
    [(8, 3), (8, 3), (8, 3), (8, 3)]
    """
    return PartitionRules(tuple(map(_rule, rules.items() if isinstance(rules, Mapping) else rules)))


def _rule(rule: Any) -> tuple[str, PartitionSpec]:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[1], PartitionSpec):
        raise _no_rule(rule, "a pattern and a `jax.sharding.PartitionSpec`")
    try:
        re.compile(rule[0])
    except (re.error, TypeError) as error:
        raise _no_rule(rule, f"a regular expression first: {error}") from error
    return rule[0], rule[1]


@dataclasses.dataclass(frozen=True)
class FullySharded:
    """Every parameter cut over the replicas between steps. Made by `rx.fully_sharded`."""

    min_size: int

    def layout(self, name: str, shape: tuple[int, ...], placement: Placement) -> PartitionSpec:
        """The largest axis that divides evenly is cut; a small parameter, or one without such an axis, stays whole."""
        even = [axis for axis, size in enumerate(shape) if size and size % placement.replicas == 0]
        if not even or math.prod(shape) < self.min_size:
            return PartitionSpec()
        axis = max(even, key=lambda axis: shape[axis])
        return PartitionSpec(*[None] * axis, AXIS)


def fully_sharded(min_size: int = 1024) -> FullySharded:
    """Cuts variables over the replicas between steps, so that each device holds about 1/N of them (ZeRO-3, FSDP).

    An optimizer's slots lie as their variables do. A step gathers what it uses and sees whole values; the numbers do
    not change.

    Args:
      min_size: Variables with fewer elements stay whole: they cost more to gather than to keep.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded())
    >>> with strategy.scope():
    ...     w = rx.Variable(jnp.zeros((64, 128)))
    >>> [shard.data.shape for shard in w.value.addressable_shards]
    [(64, 64), (64, 64)]
    """
    if not is_count(min_size, at_least=0):
        raise VariableError(f"rx.fully_sharded(min_size={min_size!r}): a number of elements, 0 to cut every variable.")
    return FullySharded(min_size)


def shard(x: PyTree, *axes: str | tuple[str, ...] | PartitionSpec | None) -> PyTree:
    """Says inside a step how a value lies over the devices of its replica; without such axes it says nothing.

    XLA partitions a replica's computation by itself, from the layouts of the variables. Say it where it chose badly,
    mostly for activations: ``h = rx.shard(h, None, "model")``, or with one `PartitionSpec` in place of the axes. The
    value stays the same.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2})
    >>> print(strategy.run(lambda x: rx.shard(x, "model") * 2, (jnp.arange(4),)))
    [0 2 4 6]
    """
    mode = _context.current()
    placement = None if mode is None or mode.replica is None or mode.ledger is None else mode.strategy.placement
    if placement is None or not placement.auto_axes:
        return x
    if len(axes) == 1 and isinstance(axes[0], PartitionSpec):
        axes = tuple(axes[0])
    if any(AXIS in _names(entry) for entry in axes):
        raise _over_replicas(axes)

    def constrain(leaf: Any) -> Any:
        spec = fitted(f"`rx.shard(x, {', '.join(map(repr, axes))})`", PartitionSpec(*axes), np.shape(leaf), placement)
        return lax.with_sharding_constraint(jnp.asarray(leaf), spec)

    return jax.tree.map(constrain, x)


# -- errors


def _unmatched(parameters: Sequence[tuple[str, tuple[int, ...]]], rules: PartitionRules) -> VariableError:
    listed = ", ".join(repr(pattern) for pattern, _ in rules.rules) or "none"
    return VariableError(
        message(
            "`rx.partition_rules(...)` says nothing about some parameters",
            [f"{name!r}  {list(shape)}" for name, shape in parameters],
            f"Its patterns are {listed}, and the first that is found in a name decides.",
            ["add a rule for them", 'end with a rule for all others: `(".*", PartitionSpec())`'],
        )
    )


def _no_rule(rule: Any, needed: str) -> VariableError:
    return VariableError(
        message(
            "`rx.partition_rules([...])` got something that is no rule",
            [f"{rule!r}"],
            f"A rule has {needed}.",
            ['rx.partition_rules([("kernel", PartitionSpec(None, "model")), (".*", PartitionSpec())])'],
        )
    )


def _no_policy(policy: Any, call: str) -> VariableError:
    return VariableError(
        message(
            f"`{call}` got something that does not say how parameters lie",
            [f"{policy!r} of type {type(policy).__name__}"],
            instead=[
                'rx.partition_rules([("kernel", PartitionSpec(None, "model")), (".*", PartitionSpec())])',
                "rx.fully_sharded()",
                'a `jax.sharding.PartitionSpec`, PartitionSpec(None, "model") say, for one variable',
            ],
        )
    )


def _cut_twice(what: str, spec: PartitionSpec) -> VariableError:
    return VariableError(
        message(
            f"The layout {spec} of {what} names an axis of the devices twice",
            why="Over one axis of the devices one axis of the value can be cut.",
            instead=["name it once, None in the other place"],
        )
    )


def _unknown_axes(what: str, spec: PartitionSpec, unknown: Sequence[str], placement: Placement) -> VariableError:
    return VariableError(
        message(
            f"The layout {spec} of {what} names axes that the strategy does not have",
            [repr(name) for name in unknown],
            f"It has {', '.join(f'{name!r} of size {size}' for name, size in placement.mesh.shape.items())}.",
            ["use these names", "give the strategy the axis: `replica_mesh={...}`"],
        )
    )


def _too_many_entries(what: str, spec: PartitionSpec, shape: tuple[int, ...]) -> VariableError:
    return VariableError(
        message(
            f"The layout {spec} has more entries than {what} has axes",
            [f"{len(spec)} entries, shape {list(shape)}"],
            "An entry says over what an axis is cut.",
            ["write one entry for each axis, None for those that stay whole"],
        )
    )


def _indivisible(what: str, spec: PartitionSpec, shape: tuple[int, ...], uneven: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            f"The layout {spec} does not divide {what} evenly",
            [
                f"axis {axis} of size {shape[axis]} cut over {entry!r} in {parts} parts: "
                f"{shape[axis]} = {parts} x {shape[axis] // parts} + {shape[axis] % parts} left over"
                for axis, entry, parts in uneven
            ],
            "Every device holds an equal part.",
            ["pad the axis to a multiple", "leave it whole: None in its place", "cut another axis"],
        )
    )


def _over_replicas(axes: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            f"`rx.shard(x, {', '.join(map(repr, axes))})` names the axis 'replica'",
            why="Inside a step each replica has a value of its own, so there is nothing to cut over the replicas.",
            instead=["name the axes inside a replica only"],
        )
    )
