"""What is a variable to the person who uses it? `Variable`."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _context, _errors, _jax
from replicax._context import Kind, Mode
from replicax._options import VariableAggregation, VariableSynchronization
from replicax._variables import overlay, storage, sync
from replicax._variables.scatter import Scatters

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

_serial = itertools.count()
_NAMELESS = "Variable"


class _Creating(type):
    """Routes ``Variable(...)`` through the creators and the strategy in force, so that a run can hand back its own."""

    def __call__(cls, initial_value: Any = None, *more: Any, **options: Any) -> Any:
        if more:
            raise _errors.positional_options(more)
        options = _with_defaults(initial_value, options)

        def create(**kwargs: Any) -> Any:
            mode = _context.current()
            ledger = None if mode is None else mode.ledger
            if ledger is not None:
                return ledger.create(lambda **final: type.__call__(cls, **final), kwargs)
            return type.__call__(cls, **kwargs)

        for creator in _context.thread.creators:
            create = _wrapped(creator, create)
        return create(**options)


def _with_defaults(initial_value: Any, options: dict[str, Any]) -> dict[str, Any]:
    """All options of a new variable, as creators see them: what was left out too, and words as members of their enums."""
    options = _DEFAULTS | options | {"initial_value": initial_value}
    name = options["name"] or _NAMELESS
    options["synchronization"] = sync.as_synchronization(options["synchronization"], name)
    options["aggregation"] = sync.parse_aggregation(options["aggregation"], name)
    return options


def _wrapped(creator: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **kwargs: creator(inner, **kwargs)


class Variable(Scatters, metaclass=_Creating):
    """State that survives between steps: a weight, a running mean, a counter.

    Make it under ``strategy.scope()`` and use it in a step as if there were only one replica: read `value`, call
    `assign`. The strategy keeps its copies equal (or, with ``synchronization="on_read"``, keeps one component per replica
    and combines them when somebody looks).

    Args:
      initial_value: An array, a number, or a function of no arguments that makes one.
      trainable: Whether optimizers should find it; by default yes, except for on-read variables.
      name: For messages and checkpoints.
      dtype: Converts the initial value.
      synchronization: ``"on_write"`` (the default) or ``"on_read"``.
      aggregation: What an assignment inside a replica means: ``"none"`` (the value must be equal everywhere),
        ``"sum"``, ``"mean"`` or ``"only_first_replica"``.
      constraint: A function applied by optimizers to the updated value.
      caching_device: Accepted for callers of tf.distribute, as is `experimental_batch_initialization`, and left alone.
      layout: How a mirrored variable lies between steps, if not as one copy per device: ``PartitionSpec("replica")`` cuts
        its first axis over the replicas, ``PartitionSpec("model")`` over the devices of each replica that is made of
        several. By default what the strategy was told for all variables. Each step sees the whole value all the same.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     total = rx.Variable(0.0, name="total", aggregation="sum")
    >>> def step():
    ...     total.assign_add(rx.get_replica_context().replica_id_in_sync_group + 1.0)
    >>> strategy.run(step)
    >>> print(total.numpy())
    3.0
    """

    __signature__: ClassVar[inspect.Signature]

    __array_priority__ = 100
    """So that NumPy leaves ``np.ones(2) * w`` to the variable."""

    __slots__ = (
        "__weakref__", "_array", "_shared", "aggregation", "constraint", "dtype", "layout", "name", "on_read", "placement",
        "serial", "shape", "strategy", "synchronization", "trainable",
    )  # fmt: skip

    def __init__(
        self,
        initial_value: Any = None,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        synchronization: VariableSynchronization | str | None = None,
        aggregation: VariableAggregation | str | None = None,
        constraint: Callable[[Any], Any] | None = None,
        colocate_with: Any = None,
        caching_device: Any = None,
        experimental_batch_initialization: bool | None = None,
        layout: PartitionSpec | None = None,
    ) -> None:
        self.name = name or _NAMELESS
        self.serial = next(_serial)
        self.synchronization = sync.parse_synchronization(synchronization, self.name)
        self.aggregation = sync.parse_aggregation(aggregation, self.name)
        self.on_read = self.synchronization is VariableSynchronization.ON_READ
        self.trainable = sync.trainable(trainable, self.synchronization)
        self.constraint = constraint
        self.layout = layout
        self.strategy: Strategy = _context.get_strategy()
        initial = storage.initial_array(initial_value, dtype, shape, self.name)
        self.shape: tuple[int, ...] = initial.shape
        self.dtype = initial.dtype
        if self.aggregation is VariableAggregation.MEAN and not jnp.issubdtype(self.dtype, jnp.inexact):
            raise _errors.mean_of_integers(self.name, self.dtype)
        self.placement = self.strategy.place_variable(self, colocate_with)
        self.layout = self.strategy.settle_layout(self)
        self._shared = False
        self._array = storage.rest(self, initial)
        self.strategy.made.add(self)

    # -- reading

    @property
    def value(self) -> jax.Array:
        """What the variable holds, as seen from here.

        In a replica its own copy; across replicas the common value, or for an on-read variable the components
        combined by its aggregation.
        """
        mode = _context.current()
        for layer in reversed(_context.thread.overlays):
            if self in layer.values:
                self._check_overlay(mode)
                return layer.values[self]
        if mode is None or mode.ledger is None:
            self._check_host("read")
            self._check_strategy(mode, "read")
            if self.on_read and mode is not None and mode.update_id is not None:
                return storage.component(self, mode.update_id)
            return storage.host_value(self)
        self._check_strategy(mode, "read")
        if self.on_read and mode.kind is Kind.CROSS:
            return mode.ledger.read_across(self)
        return mode.ledger.read(self)

    @value.setter
    def value(self, value: Any) -> NoReturn:
        raise AttributeError(
            f"`{self.name}.value` is read; write {self.name}.assign(x), assign_add(x) or assign_sub(x)."
        )

    def read_value(self) -> jax.Array:
        """The same as `value`, as a method."""
        return self.value

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array of its own."""
        return np.array(self.value)

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The copy or component of every replica: of this process on the host, of all in a run."""
        mode = _context.current()
        if mode is None or mode.ledger is None:
            return storage.components(self)
        if not self.on_read:
            return (self.value,) * self.strategy.num_replicas_in_sync
        return tuple(mode.ledger.components(self))

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)

    # -- assigning

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Gives the variable a new value; what that means in a replica is set by `aggregation`.

        Returns:
          The new value inside a run, the variable itself elsewhere; None with ``read_value=False``.
        """
        return self._assign("assign", None, value, read_value)

    def assign_add(self, value: Any, read_value: bool = True) -> Any:
        """Adds to the variable. Inside a replica `value` is first combined over replicas by `aggregation`."""
        return self._assign("assign_add", operator.add, value, read_value)

    def assign_sub(self, value: Any, read_value: bool = True) -> Any:
        """Subtracts from the variable. Inside a replica `value` is first combined over replicas by `aggregation`."""
        return self._assign("assign_sub", operator.sub, value, read_value)

    def _assign(self, method: str, change: Callable[[Any, Any], Any] | None, value: Any, read_value: bool) -> Any:
        mode = _context.current()
        self._check_strategy(mode, method)
        ledger = None if mode is None else mode.ledger
        if ledger is None:
            self._check_host(method)
        if read_value and sync.has_no_common_value(self, mode):
            raise _errors.on_read_none_assigned(self, method)
        if isinstance(value, Variable):
            value = value.value
        value = sync.combined(self, value, mode, method)
        if change is not None:
            before = self._component(mode)
            value = change(before, storage.brought(self, value, before) if ledger is None else value)
        value = storage.checked(self, value, method)
        layer = overlay.accepting(self)
        if layer is not None:
            layer.write(self, value)
        elif ledger is not None:
            ledger.write(self, value)
        else:
            if self.on_read and mode is not None and mode.update_id is not None:
                storage.write_component(self, mode.update_id, value)
            else:
                storage.host_write(self, value)
            return self if read_value else None
        if not read_value:
            return None
        across = mode is not None and mode.kind is Kind.CROSS
        return ledger.read_across(self) if ledger is not None and across and self.on_read else value

    def _component(self, mode: Mode | None) -> Any:
        """What an in-place change starts from: this replica's component, or all components of an on-read variable."""
        if self.on_read and (mode is None or mode.ledger is None and mode.update_id is None):
            return storage.stacked(self)
        if self.on_read and mode is not None and mode.ledger is not None:
            return mode.ledger.read(self)
        return self.value

    # -- where it may be used

    def _check_host(self, method: str) -> None:
        if _jax.is_staging():
            raise _errors.foreign_jit(self, method)

    def _check_overlay(self, mode: Mode | None) -> None:
        if mode is not None and mode.ledger is not None:
            mode.ledger.refuse_foreign_jit(self, "read")
        else:
            self._check_host("read")

    def _check_strategy(self, mode: Mode | None, method: str) -> None:
        if mode is None or mode.strategy is self.strategy:
            return
        default = _context.default_strategy()
        if self.strategy is not default and mode.strategy is not default:
            raise _errors.mixed_strategies(f"`{self.name}.{method}`", self.strategy, mode.strategy)

    # -- being array-like

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy under whose scope the variable was made."""
        return self.strategy

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold a copy or a component."""
        return tuple(sorted(self._array.devices(), key=lambda device: device.id))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def T(self) -> jax.Array:
        return self.value.T

    def __repr__(self) -> str:
        kind = f"on_read {self.aggregation.name.lower()}" if self.on_read else "mirrored"
        if not self.on_read and self.aggregation is not VariableAggregation.NONE:
            kind += f" {self.aggregation.name.lower()}"
        return (
            f"<rx.Variable {self.name!r} {jnp.dtype(self.dtype).name if not _is_key(self.dtype) else self.dtype}"
            f"{list(self.shape)} {kind}>"
        )

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _errors.variable_item_assigned(self)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __neg__(self) -> jax.Array:
        return -self.value

    def __pos__(self) -> jax.Array:
        return +self.value

    def __round__(self, ndigits: int | None = None) -> jax.Array:
        return round(self.value, ndigits or 0)

    def __pow__(self, other: Any, modulo: Any = None) -> jax.Array:
        power = self.value ** (other.value if isinstance(other, Variable) else other)
        return power if modulo is None else power % modulo

    def __abs__(self) -> jax.Array:
        return abs(self.value)

    def __invert__(self) -> jax.Array:
        return ~self.value

    def __copy__(self) -> Variable:
        return self._twin("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return memo.setdefault(id(self), self._twin("deepcopy"))

    def _twin(self, call: str) -> Variable:
        """Another variable of the same kind, with the same components."""
        mode = _context.current()
        self._check_strategy(mode, call)
        if mode is not None and mode.ledger is not None:
            raise _errors.copied_in_a_run(self, call)
        twin = object.__new__(type(self))
        for name in Variable.__slots__:
            if name not in ("__weakref__", "_array"):
                setattr(twin, name, getattr(self, name))
        twin.serial, twin._shared = next(_serial), False
        twin._array = jnp.copy(self._array)
        self.strategy.made.add(twin)
        return twin

    def __reduce__(self) -> Any:
        raise _errors.pickled_variable(self)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _forward(name: str) -> Callable[[Variable, Any], Any]:
    def method(self: Variable, other: Any) -> Any:
        return getattr(self.value, name)(other.value if isinstance(other, Variable) else other)

    method.__name__ = name
    return method


# `==` stays identity, as variables are keys of dictionaries; the other operators are those of the value.
for _name in "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split():
    if _name != "pow":
        setattr(Variable, f"__{_name}__", _forward(f"__{_name}__"))
    setattr(Variable, f"__r{_name}__", _forward(f"__r{_name}__"))
for _name in "lt le gt ge".split():
    setattr(Variable, f"__{_name}__", _forward(f"__{_name}__"))

_jax.stands_for(Variable, operator.attrgetter("value"))
_OPTIONS = inspect.signature(Variable.__init__)
Variable.__signature__ = _OPTIONS.replace(parameters=[*_OPTIONS.parameters.values()][1:])
_DEFAULTS = {name: option.default for name, option in Variable.__signature__.parameters.items()}
