"""Where in the program am I: across replicas, inside one, or updating a variable?

Each thread has a stack of *modes*. Entering `strategy.scope()` pushes a cross-replica mode, running a replica function
pushes a replica mode, `merge_call` and `update` push again. The empty stack means the bare top level, which is a replica
context: that of the default strategy, which has one replica.

A mode may carry a *ledger*, the object that knows how reads, writes and reductions happen in the run under way
(`_ledger.py` when compiled, `_run/eager.py` when threaded). On the host there is none.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from replicax import _errors
from replicax._options import CommunicationOptions, ReduceOp
from replicax._placement import AXIS

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any


class Kind(enum.Enum):
    CROSS = "cross-replica"
    REPLICA = "replica"
    UPDATE = "update"


class Ledger(Protocol):
    """What a run under way can be asked. There are two: the traced one and the threaded one."""

    def read(self, variable: Variable) -> Any: ...
    def write(self, variable: Variable, value: Any) -> None: ...
    def replica_id(self) -> Any: ...
    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def all_reduce(self, op: ReduceOp, value: PyTree, options: CommunicationOptions | None) -> PyTree: ...
    def all_gather(self, value: PyTree, axis: int, options: CommunicationOptions | None) -> PyTree: ...
    def first(self, value: PyTree) -> PyTree: ...
    def own(self, value: Any) -> Any: ...
    def components(self, value: Any) -> list[Any]: ...
    def read_across(self, variable: Variable) -> Any: ...
    def create(self, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any: ...
    def gradients_across(self, gradients: list[Any]) -> list[Any]: ...
    def reduce_across(
        self, op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None, options: CommunicationOptions | None
    ) -> list[Any]: ...
    def gather_across(self, value: Any, axis: int) -> Any: ...
    def update(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]: ...
    def valid_counts(self, rows: int | None, of: Any = None) -> tuple[Any, Any] | None: ...
    def batch_rows(self) -> int: ...
    def refuse_foreign_jit(self, variable: Variable, method: str) -> None: ...
    def belongs_to(self, strategy: Strategy) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class Mode:
    strategy: Strategy
    kind: Kind
    ledger: Ledger | None = None
    replica: ReplicaContext | None = None
    update_id: int | None = None
    """In an eager update: whose component is being updated."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.creators: list[Any] = []
        self.overlays: list[Any] = []


thread = _Thread()


def current() -> Mode | None:
    """The innermost mode, or None at the bare top level."""
    modes = thread.modes
    return modes[-1] if modes else None


class push:
    """``with push(mode):`` makes `mode` the innermost one."""

    __slots__ = ("mode",)

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def __enter__(self) -> Mode:
        thread.modes.append(self.mode)
        return self.mode

    def __exit__(self, *exc: object) -> None:
        thread.modes.pop()


# The default strategy is made on first use, since making it starts the backend.
_make_default: Callable[[], Strategy] | None = None
_default: Strategy | None = None
_default_lock = threading.Lock()


def register_default(make: Callable[[], Strategy]) -> None:
    global _make_default
    _make_default = make


def default_strategy() -> Strategy:
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                assert _make_default is not None
                _default = _make_default()
    return _default


def get_strategy() -> Strategy:
    """The strategy in force here; the default one if none was entered.

    Library code asks it how many replicas there are without being handed a strategy:

    >>> import replicax as rx
    >>> rx.get_strategy().num_replicas_in_sync
    1
    """
    mode = current()
    return default_strategy() if mode is None else mode.strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default one is in force here.

    >>> import replicax as rx
    >>> rx.has_strategy()
    False
    """
    mode = current()
    return mode is not None and mode.strategy is not _default


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica this code runs for, or None where code runs once for all replicas.

    Layers call it to reduce a statistic over the replicas. At the bare top level it is the one replica of the
    default strategy, so the same layer works in a program that never heard of strategies.

    >>> import replicax as rx
    >>> rx.get_replica_context().replica_id_in_sync_group
    0
    """
    mode = current()
    if mode is None:
        return _top_level_context()
    return mode.replica


def in_cross_replica_context() -> bool:
    """Whether this code runs once for all replicas: in a scope, in a merge function, in an update function.

    >>> import replicax as rx
    >>> rx.in_cross_replica_context()
    False
    """
    mode = current()
    return mode is not None and mode.replica is None


def checked_call(call: str, name: str, fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for the function that a verb was given; refuses what is no function and what are no arguments.

    `call` is the verb as the user wrote it, with {} for its arguments, and `name` what it calls the function.
    """
    if not callable(fn):
        raise _errors.not_a_function(call, name, fn)
    if not isinstance(args, (list, tuple)):
        raise _errors.arguments_not_a_list(call, name, args)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _errors.keywords_not_a_mapping(call, name, kwargs)
    return tuple(args), dict(kwargs or {})


def require_cross(strategy: Strategy, call: str) -> Mode | None:
    """Checks that `call` of `strategy` may happen here, and says where "here" is."""
    mode = current()
    if mode is None:
        return None
    if mode.strategy is not strategy:
        if mode.strategy is _default and mode.replica is None and mode.ledger is not None:
            mode.ledger.belongs_to(strategy)
        if mode.strategy is _default:
            raise _errors.needs_scope(call, strategy)
        raise _errors.mixed_strategies(call, strategy, mode.strategy)
    if mode.replica is not None:
        raise _errors.needs_cross_replica(call)
    return mode


def require_scope(strategy: Strategy, call: str) -> None:
    """Checks that `strategy` is the one in force, across replicas or inside one."""
    mode = current()
    active = default_strategy() if mode is None else mode.strategy
    if active is strategy:
        return
    if mode is None or active is _default:
        raise _errors.needs_scope(call, strategy)
    raise _errors.mixed_strategies(call, strategy, active)


scope_hooks: list[Callable[[Strategy], Callable[[], None]]] = []
"""Called whenever a scope is entered; what each returns is called when it is left. How layer libraries are told."""

creation_hooks: list[Callable[[], None]] = []
"""Called when a step has made variables, before it runs for the first time. How restored values reach them."""


class _Entered(threading.local):
    """Where a thread has entered a scope: threads may share one scope object."""

    def __init__(self) -> None:
        self.stack: list[tuple[Mode | None, int, list[Callable[[], None]]]] = []


_Named = TypeVar("_Named")


class Scope(Generic[_Named]):
    """``with strategy.scope():``. Can be entered again and again, nested too.

    `named` is what the block calls the strategy: itself, or the object of 2018 that speaks for it.
    """

    def __init__(self, strategy: Strategy, named: _Named) -> None:
        self._strategy = strategy
        self._named = named
        self._of_thread = _Entered()

    @property
    def _entered(self) -> list[tuple[Mode | None, int, list[Callable[[], None]]]]:
        return self._of_thread.stack

    def __enter__(self) -> _Named:
        self.require_place()
        strategy, mode = self._strategy, current()
        if strategy is _default:
            self._put_in_force(self.of_default(mode), [])
            return self._named
        inner = Mode(strategy, Kind.CROSS) if mode is None else dataclasses.replace(mode)
        self._put_in_force(inner, [hook(strategy) for hook in scope_hooks])
        return self._named

    def require_place(self) -> None:
        """Refuses to be entered inside a replica, and inside another strategy's scope."""
        mode = current()
        if self._strategy is not _default:
            require_cross(self._strategy, "strategy.scope()")
        elif mode is not None and mode.strategy is not _default:
            raise _errors.nested_default_scope(mode.strategy)

    def of_default(self, mode: Mode | None) -> Mode | None:
        """The mode that the default strategy's scope puts in force: none, as it is in force already."""
        return None

    def _put_in_force(self, inner: Mode | None, undo: list[Callable[[], None]]) -> None:
        if inner is not None:
            thread.modes.append(inner)
        self._entered.append((inner, len(thread.creators), undo))

    def __exit__(self, *exc: object) -> None:
        if not self._entered:
            raise _errors.scope_not_entered(self._strategy)
        inner, creators, undo = self._entered[-1]
        if inner is not None:
            if len(thread.creators) != creators:
                raise _errors.scope_nesting("Variable creator")
            if current() is not inner:
                raise _errors.scope_nesting("Strategy")
            thread.modes.pop()
        for leave in reversed(undo):
            leave()
        self._entered.pop()


_global_scope = threading.local()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Puts a strategy in force from here on, without a ``with`` block; None goes back to the default one.

    Handy in a notebook, where a block cannot span cells.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> rx.experimental_set_strategy(strategy)
    >>> rx.get_strategy() is strategy
    True
    >>> rx.experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(getattr(strategy, "scope", None), MethodType):
        raise _errors.not_a_strategy(strategy)
    scope: Scope[Any] | None = getattr(_global_scope, "scope", None)
    if scope is not None and scope._entered and current() is scope._entered[-1][0]:
        scope.__exit__(None, None, None)
        _global_scope.scope = None
    if current() is not None:
        raise _errors.set_strategy_in_scope()
    if strategy is not None:
        scope = strategy.scope()
        scope.__enter__()
        _global_scope.scope = scope


class ReplicaContext:
    """What a step may ask and do while it runs for one replica.

    Get it with `rx.get_replica_context()`. It says which replica this is and lets all replicas exchange values.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> def step():
    ...     context = rx.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
    >>> int(strategy.run(step))
    3
    """

    __slots__ = ("__weakref__", "_strategy", "_replica_id", "_ledger")

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: Any, ledger: Ledger | None = None) -> None:
        if not (replica_id_in_sync_group is None or _is_id(replica_id_in_sync_group)):
            raise ValueError(
                "replica_id_in_sync_group can only be an integer, an integer array or None, not "
                f"{replica_id_in_sync_group!r}."
            )
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._ledger = ledger

    def __enter__(self) -> ReplicaContext:
        thread.modes.append(Mode(self._strategy, Kind.REPLICA, self._ledger, self))
        return self

    def __exit__(self, *exc: object) -> None:
        thread.modes.pop()

    def __repr__(self) -> str:
        return f"<replica context of {self._strategy!r}>"

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas step together."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Which replica this is: an int in an eager run, a traced scalar in a compiled one."""
        if self._replica_id is None and self._ledger is not None:
            self._require("replica_id_in_sync_group")
            return self._ledger.replica_id()
        return 0 if self._replica_id is None else self._replica_id

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this replica; in a compiled run, which is one program for all, those of replica 0."""
        self._require("devices")
        placement = self._strategy.placement
        index = 0 if self._replica_id is None or isinstance(self._replica_id, Tracer) else int(self._replica_id)
        if not 0 <= index < placement.replicas:
            raise _errors.no_such_replica(index, self._strategy)
        return tuple(placement.mesh.devices.reshape(placement.replicas, -1)[index])

    def experimental_logical_device(self, logical_device_id: int) -> AbstractContextManager[None]:
        """As ``strategy.extended.experimental_logical_device``, for a replica of several devices."""
        self._require("experimental_logical_device")
        return self._strategy.extended.experimental_logical_device(logical_device_id)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Meets the other replicas, runs `merge_fn(strategy, *args, **kwargs)` once for all of them, and goes on.

        Inside `merge_fn` the arrays among `args` are `PerReplica` values that hold what each replica passed; it may
        reduce them and update variables. Its result comes back to every replica, component by component.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> def merge(strategy, value):
        ...     return sum(strategy.experimental_local_results(value))
        >>> def step(three):
        ...     context = rx.get_replica_context()
        ...     value = three + context.replica_id_in_sync_group
        ...     return context.merge_call(merge, (value,)) + value
        >>> [int(x) for x in strategy.experimental_local_results(strategy.run(step, (3,)))]
        [10, 11]
        """
        self._require("merge_call")
        args, kwargs = checked_call("merge_call({})", "fn", merge_fn, args, kwargs)
        if self._ledger is not None:
            return self._ledger.merge_call(merge_fn, args, kwargs)
        self._refuse_alone("merge_call")
        with push(Mode(self._strategy, Kind.CROSS)):
            return merge_fn(self._strategy, *args, **kwargs)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Combines `value` over all replicas and gives every replica the result. Can be differentiated.

        The gradient of an all-reduce is the all-reduce, with the same op, of the gradients that come back.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> float(strategy.run(lambda: rx.get_replica_context().all_reduce("mean", 2.5)))
        2.5
        """
        self._require("all_reduce")
        op, options = ReduceOp.parse(reduce_op), CommunicationOptions.parse(options)
        if self._ledger is not None:
            return self._ledger.all_reduce(op, value, options)
        self._refuse_alone("all_reduce")
        return value

    def all_gather(self, value: PyTree, axis: int = 0, options: CommunicationOptions | None = None) -> PyTree:
        """Concatenates `value` of all replicas along `axis`, in replica order, on every replica.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> def step():
        ...     context = rx.get_replica_context()
        ...     return context.all_gather(context.replica_id_in_sync_group[None], axis=0)
        >>> print(strategy.run(step))
        [0 1]
        """
        self._require("all_gather")
        options = CommunicationOptions.parse(options)
        if self._ledger is not None:
            return self._ledger.all_gather(value, axis, options)
        self._refuse_alone("all_gather")
        return value

    def replica_key(self, key: jax.Array) -> jax.Array:
        """A random key of this replica's own, for dropout and other noise that must differ between replicas.

        The key passed in is the same everywhere, so what is drawn from it directly is mirrored.
        """
        self._require("replica_key")
        if self._ledger is None:
            return jax.random.fold_in(key, self._replica_id or 0)
        # Line by line `replica_id_in_sync_group` is an int, and the analysis would not see that the key differs.
        return jax.random.fold_in(key, lax.axis_index(AXIS))

    def _refuse_alone(self, what: str) -> None:
        """Outside of a run there are no other replicas to meet."""
        if self._strategy.num_replicas_in_sync > 1:
            raise _errors.replica_alone(what, self._strategy)

    def _require(self, what: str) -> None:
        mode = current()
        active = _top_level_context() if mode is None else mode.replica
        if active is self or self._strategy is _default and active is _top_level:
            return
        raise _errors.wrong_replica_context(what, self, active)


def _is_id(x: Any) -> bool:
    if isinstance(x, (jax.Array, np.generic)):
        return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, int) and not isinstance(x, bool)


_top_level: ReplicaContext | None = None


def _top_level_context() -> ReplicaContext:
    global _top_level
    if _top_level is None:
        _top_level = ReplicaContext(default_strategy(), 0)
    return _top_level


def require_replica_context(context: ReplicaContext) -> None:
    """Raises unless `context` is the replica context in force here."""
    context._require("require_replica_context")
