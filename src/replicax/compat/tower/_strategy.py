"""What could every strategy of 2018 do? `DistributionStrategy`: each name it has had, over one engine strategy."""

# A strategy of that time is a *front*: it holds the strategy of today that does the work, and nothing else. Code may
# ask for the front of any strategy that is in force (`get_distribution_strategy()` in the scope of an `rx.Strategy`),
# so there is a table from strategies to fronts. It holds neither of them alive.
#
# Signatures changed three times. Each method takes what any of the releases took; where two of them gave one argument
# different names, both work.

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import jax

from replicax import _context, _jax
from replicax._context import Kind, Mode, Scope
from replicax._devices import resolve
from replicax._input.options import InputReplicationMode
from replicax._options import RunOptions, VariableSynchronization
from replicax._strategy import sessions
from replicax._strategy import update as _update
from replicax._strategy.base import Strategy
from replicax._strategy.destinations import checked_pair
from replicax._strategy.extended import StrategyExtended
from replicax._values import PARTS, PerReplica, is_per_replica
from replicax._variables import creation, sync
from replicax._variables.variable import Variable
from replicax.compat.tower import _input, _reduce, _refusals
from replicax.compat.tower._update_context import UpdateContext
from replicax.compat.tower._values import MapOutput, copies_of, lies_on

PyTree = Any

_fronts: weakref.WeakKeyDictionary[Strategy, weakref.ref[DistributionStrategy]] = weakref.WeakKeyDictionary()


def front_of(strategy: Strategy) -> DistributionStrategy:
    """The strategy of 2018 that speaks for `strategy`."""
    known = _fronts.get(strategy)
    front = known() if known is not None else None
    if front is None:
        front = object.__new__(DistributionStrategy)
        front._over(strategy)
    return front


class DistributionStrategy:
    """A way of placing towers and variables on devices, with the names it had in 2018.

    A *tower* is what is called a replica now. Make one of the subclasses, `tower.MirroredStrategy` say.

    >>> import jax
    >>> from replicax.compat import tower
    >>> distribution = tower.MirroredStrategy(devices=jax.devices()[:2])
    >>> def merge_fn(distribution, three_plus_tower_id):
    ...     return sum(distribution.unwrap(three_plus_tower_id))
    >>> def fn(three):
    ...     tower_ctx = tower.get_tower_context()
    ...     v = three + tower_ctx.tower_id
    ...     return tower_ctx.merge_call(merge_fn, v) + v
    >>> with distribution.scope():
    ...     merged_results = distribution.call_for_each_tower(fn, 3)
    ...     print([int(x) for x in distribution.unwrap(merged_results)])
    [10, 11]
    """

    _strategy: Strategy | None = None

    def __init__(self) -> None:
        pass

    def _over(self, strategy: Strategy) -> None:
        self._strategy = strategy
        _fronts[strategy] = weakref.ref(self)

    @property
    def _engine(self) -> Strategy:
        if self._strategy is None:
            raise _refusals.no_engine(self)
        return self._strategy

    @property
    def _is_default(self) -> bool:
        return self._strategy is _context.default_strategy()

    def _across(self, call: str) -> Mode:
        """Where we are, which must be across this strategy's towers."""
        engine = self._engine
        if _context.current() is None:
            raise _refusals.needs_scope(call, self)
        mode = _context.require_cross(engine, f"`{call}`")
        assert mode is not None
        return mode

    def __repr__(self) -> str:
        return f"<tower.{type(self).__name__} over {self._strategy!r}>"

    # -- scopes

    def scope(self) -> Scope[Self]:
        """Puts this strategy in force and enters its cross-tower context."""
        scope = _Scope(self._engine, self)
        scope.require_place()  # in 2018 this was decided here, and not when the block began
        return scope

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Variables made in this block lie where the given variable, device or list of devices lies."""
        return creation.colocated(self._engine, colocate_with_variable)

    def tower_local_var_scope(self, reduce_method: Any) -> AbstractContextManager[None]:
        """Variables made in this block have a component for each tower; read across, they are combined."""
        aggregation = _reduce.as_aggregation(reduce_method)
        _context.require_scope(self._engine, "`tower_local_var_scope(reduce_method)`")
        kind = {"synchronization": VariableSynchronization.ON_READ, "aggregation": aggregation, "trainable": False}
        return creation.variable_creator_scope(lambda next_creator, **options: next_creator(**options | kind))

    # -- running

    def call_for_each_tower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        """Runs `fn` once per tower and merges the results.

        A keyword argument ``run_concurrently=False`` is not passed on: it lets one tower at a time proceed in an eager
        run. A compiled one is a single program.
        """
        concurrent = kwargs.pop("run_concurrently", True)
        self._across("call_for_each_tower(fn, ...)")
        in_turn = concurrent is not None and not concurrent
        return self._engine.run(fn, args, kwargs or None, RunOptions(concurrent=False) if in_turn else None)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> PyTree:
        """Runs `fn` once per tower, in the strategy's scope, on the next element of `input_iterator`."""
        return self._engine.experimental_run(fn, input_iterator)

    def run_steps_on_dataset(
        self, fn: Callable[..., Any], iterator: Any, iterations: int = 1, initial_loop_values: Any = None
    ) -> Any:
        """Calls ``fn(context, *inputs)`` across towers for the next `iterations` elements of `iterator`.

        Returns:
          The context, which has the outputs that the last call of `fn` set in it.
        """
        self._across("run_steps_on_dataset(fn, iterator, ...)")
        return self._engine.run_steps(fn, iterator, iterations, initial_loop_values)

    def map(self, map_over: Iterable[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(item, *args, **kwargs)`` for each item, going round the devices; `reduce` combines the results."""
        self._across("map(map_over, fn, ...)")
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_per_replica):
            if is_per_replica(leaf):
                raise _refusals.not_mirrored("map(map_over, fn, ...)", leaf)
        devices = self._engine.placement.local_devices
        outputs = [MapOutput() for _ in devices]
        for i, item in enumerate(map_over):
            with jax.default_device(devices[i % len(devices)]):
                outputs[i % len(devices)].append(fn(item, *args, **kwargs))
        return outputs[0] if len(devices) == 1 else PerReplica(tuple(filter(len, outputs)), PARTS)

    # -- combining and taking apart

    def reduce(
        self,
        aggregation: Any = None,
        value: PyTree = _reduce.REQUIRED,
        destinations: Any = None,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> PyTree:
        """Combines a value per tower into one, with a copy on each device of `destinations`.

        Args:
          aggregation: ``VariableAggregation.SUM``, ``MEAN`` or ``ONLY_FIRST_TOWER``, or as a word. It has also been
            called `method_string` and `reduce_op`.
          value: A value with one component per tower.
          destinations: A variable, a value, a device or a list of devices; by default all towers.
        """
        self._across("reduce(aggregation, value, destinations)")
        method = _reduce.method(aggregation, method_string, reduce_op)
        if value is _reduce.REQUIRED:
            raise _refusals.missing_argument("reduce(aggregation, value, destinations)", "value")
        return value if self._is_default else _reduce.reduce(self._engine, method, value, destinations)

    def batch_reduce(
        self,
        aggregation: Any = None,
        value_destination_pairs: Any = _reduce.REQUIRED,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> list[PyTree]:
        """As `reduce` for a list of pairs ``(value, destinations)``; inside a run small values travel together."""
        self._across("batch_reduce(aggregation, value_destination_pairs)")
        method = _reduce.method(aggregation, method_string, reduce_op)
        if value_destination_pairs is _reduce.REQUIRED:
            raise _refusals.missing_argument("batch_reduce(aggregation, pairs)", "value_destination_pairs")
        pairs = [checked_pair(pair) for pair in value_destination_pairs]
        return [value for value, _ in pairs] if self._is_default else _reduce.batch_reduce(self._engine, method, pairs)

    def broadcast(self, tensor: PyTree, destinations: Any = None) -> PyTree:
        """A copy of one value on each device of `destinations`, by default of all towers."""
        self._across("broadcast(tensor, destinations)")
        if self._is_default and destinations is not None:
            raise _refusals.not_available(
                "broadcast(tensor, destinations)", "The default strategy has no devices to send it to.",
                "leave `destinations` out",
            )  # fmt: skip
        return tensor if self._is_default else _reduce.broadcast(self._engine, tensor, destinations)

    def unwrap(self, value: PyTree) -> list[Any]:
        """The components of `value`, in tower order; ``[value]`` for what has none."""
        engine = self._engine
        if engine.num_replicas_in_sync == 1 or lies_on(engine.placement.mesh.devices.flat, value):
            return list(engine.experimental_local_results(value))
        return copies_of(value)

    def group(self, value: PyTree, name: str | None = None) -> Any:
        """Waits until `value` has been computed on all towers; returns it if it is a single one without a name."""
        values = jax.tree.leaves(self.unwrap(value))
        jax.block_until_ready([leaf for leaf in values if not isinstance(leaf, _jax.Tracer)])
        return values[0] if len(values) == 1 and name is None else None

    def fetch(self, val: Any, destination: Any = "/device:CPU:0", fn: Callable[[Any], Any] = lambda x: x) -> Any:
        """``fn(val)`` on one device; a tower-local variable is combined first."""
        mode = self._across("fetch(val, destination, fn)")
        if is_per_replica(val):
            raise _refusals.not_mirrored("fetch(val, destination, fn)", val)
        result = fn(self.read_var(val) if isinstance(val, Variable) else val)
        return result if mode.ledger is not None else jax.device_put(result, resolve(destination))

    # -- variables

    def read_var(self, tower_local_var: Variable) -> jax.Array:
        """The value of a variable across towers: the components of a tower-local one are combined."""
        return sync.read_across(tower_local_var)

    def value_container(self, value: Any) -> Any:
        """What `value` is a component of. Components are plain arrays here, so it is `value` itself."""
        return value

    def update(self, var: Variable, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        """Runs ``fn(var, *args, **kwargs)`` where assignments change exactly the component that is updated.

        A keyword argument ``grouped=False`` is not passed on: the result then is a list with one entry per tower in
        place of each leaf.
        """
        self._across("update(var, fn, ...)")
        grouped = _grouped(kwargs)
        devices = (var,) if self._is_default else getattr(var, "devices", ())
        within = _within(fn, devices)
        merged = _update.update(self._engine, var, within, args, kwargs)
        alone = isinstance(var, Variable) and var.placement.parameter_device is not None
        return merged if grouped else _update.ungrouped(self._engine, merged, alone, list)

    def update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        """Runs ``fn(*args, **kwargs)`` for state that lies where `non_slot_devices` said."""
        self._across("update_non_slot(colocate_with, fn, ...)")
        grouped = _grouped(kwargs)
        alone = isinstance(colocate_with, Variable)
        within = _within(fn, (colocate_with,) if alone else self._engine.placement.local_devices)
        merged = _update.update_non_slot(self._engine, colocate_with, within, args, kwargs)
        return merged if grouped else _update.ungrouped(self._engine, merged, alone, list)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Where state that belongs to no one variable should lie: a list of devices, or beside one variable."""
        where = _update.non_slot_devices(self._engine, var_list)
        return where if isinstance(where, Variable) else list(where)

    # -- input

    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> _input.PerDeviceDataset:
        """The dataset that `dataset_fn` returns, handed out to the towers: each takes whole batches of it in turn.

        An incomplete last group is padded and masked, so that no batch is dropped.
        """
        return _input.distribute_dataset(self._engine, dataset_fn)

    def make_dataset_iterator(self, dataset: Any) -> _input.InputIterator:
        """A pass over global batches, each of which is divided over the towers."""
        return _input.dataset_iterator(self._engine, dataset)

    def make_input_fn_iterator(
        self, input_fn: Callable[..., Any], replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    ) -> _input.InputIterator:
        """A pass over what `input_fn` returns for this worker; each tower takes whole batches of it in turn."""
        return _input.input_fn_iterator(self._engine, input_fn, replication_mode)

    # -- places

    @property
    def worker_devices(self) -> list[jax.Device]:
        """The devices of the towers, in tower order."""
        return list(self._placed("worker_devices").extended.worker_devices)

    @property
    def parameter_devices(self) -> list[jax.Device]:
        """The devices that hold the variables."""
        return list(self._placed("parameter_devices").extended.parameter_devices)

    @property
    def worker_device_index(self) -> Any:
        """A value that is ``i`` on tower ``i``, to pass to `call_for_each_tower`; 0 for a single tower."""
        engine = self._placed("worker_device_index")
        self._across("worker_device_index")
        if engine.num_replicas_in_sync == 1:
            return 0
        return PerReplica(tuple(engine.placement.local_replicas), PARTS)

    def _placed(self, what: str) -> Strategy:
        if self._is_default:
            raise _refusals.unsupported_by_default(what)
        return self._engine

    @property
    def num_towers(self) -> int:
        """How many towers there are, to average over."""
        return self._engine.num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """The later name of `num_towers`."""
        return self._engine.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower, so that `call_for_each_tower` calls its function once, on plain values."""
        return self._engine.num_replicas_in_sync == 1

    @property
    def extended(self) -> StrategyExtended:
        """The names of 2019; see `rx.StrategyExtended`."""
        return self._engine.extended

    # -- what this process is to the others

    @property
    def between_graph(self) -> bool:
        """Whether every process runs the program for itself."""
        return self._answering("between_graph").experimental_between_graph

    @property
    def should_init(self) -> bool:
        """Whether this process must initialize variables."""
        return self._answering("should_init").experimental_should_init

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process should write checkpoints."""
        return self._answering("should_checkpoint").should_checkpoint

    @property
    def should_save_summary(self) -> bool:
        """Whether this process should write summaries."""
        return self._answering("should_save_summary").should_save_summary

    def _answering(self, what: str) -> StrategyExtended:
        if self._is_default:
            raise _refusals.default_has_none(what)
        return self._engine.extended

    # -- starting and ending

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Turns the strategy into one task of a cluster; without one it stays what it is.

        Args:
          session_config: Any mapping; it is given what `update_config_proto` says.
          cluster_spec: The cluster, if there is one.
          task_type: The job of this process in it.
          task_id: The number of its task.
        """
        if cluster_spec:
            self._join(cluster_spec, task_type, task_id)
        sessions.settle(session_config, self._session_settings)

    def _join(self, cluster_spec: Any, task_type: str | None, task_id: int | None) -> None:
        raise _refusals.not_available(
            f"{type(self).__name__}.configure(cluster_spec=...)",
            "This strategy works on the devices of one process.",
            "configure() without a cluster",
        )

    def initialize(self) -> None:
        """Does what has to happen before anything else: nothing, on devices that are ready."""

    def finalize(self) -> None:
        """Does what has to happen at the end: nothing."""

    def experimental_initialize(self) -> list[Any]:
        """As `initialize`; returns the operations left to run, of which there are none."""
        self.initialize()
        return []

    def experimental_finalize(self) -> list[Any]:
        """As `finalize`; returns the operations left to run, of which there are none."""
        self.finalize()
        return []

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of a session's configuration with what this strategy needs in it. Nothing here reads it.

        Args:
          config_proto: Any mapping, or an object with the fields of a ``tf.ConfigProto``.
        """
        return sessions.updated(config_proto, self._session_settings)

    @property
    def _session_settings(self) -> Mapping[str, Any]:
        """What a session of this strategy needs."""
        return {} if self._strategy is None else self._strategy.session_settings

    def __copy__(self) -> Strategy:
        return copy.copy(self._engine)  # refuses, in the words of the engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ |= {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_strategy"}
        twin._over(copy.deepcopy(self._engine, memo))
        return twin


_Front = TypeVar("_Front")


class _Scope(Scope[_Front]):
    """The default strategy's scope changes nothing any more; in 2018 it was cross-tower ground like any other."""

    def of_default(self, mode: Mode | None) -> Mode | None:
        return Mode(self._strategy, Kind.CROSS) if mode is None else None


def _grouped(kwargs: dict[str, Any]) -> bool:
    """The two names under which an update was asked for one result, taken out of the arguments for its function."""
    return all([kwargs.pop("grouped", True), kwargs.pop("group", True)])


def _within(fn: Callable[..., Any], devices: Sequence[Any]) -> Callable[..., Any]:
    """`fn`, in the update context of the component that it is called for."""

    def update(*args: Any, **kwargs: Any) -> Any:
        mode = _context.current()
        component = mode.update_id if mode is not None and mode.update_id is not None else 0
        with UpdateContext(devices[component] if component < len(devices) else None):
            return fn(*args, **kwargs)

    return update
