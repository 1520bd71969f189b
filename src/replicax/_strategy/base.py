"""What can every strategy do? The verbs, written once. A strategy differs from another in its `Placement` and in few hooks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from replicax import _context, _errors, _run, _values
from replicax._context import Kind, Ledger, Mode, Scope
from replicax._cross import axes, host
from replicax._cross.ops import CrossDeviceOps, chosen
from replicax._cross.slices import is_slices
from replicax._host import require_threads
from replicax._input import distribute
from replicax._input.dataset import DistributedDataset, DistributedIterator
from replicax._input.explain import Explanation
from replicax._input.options import InputContext, InputOptions, InputReplicationMode
from replicax._options import CommunicationOptions, ReduceOp, RunOptions
from replicax._placement import Placement
from replicax._run import steps as _steps
from replicax._run.cache import Programs
from replicax._strategy import layout, sessions
from replicax._strategy.describe import Description, describe
from replicax._strategy.extended import StrategyExtended
from replicax._strategy.layout import LayoutPolicy
from replicax._values import TRACED, PerReplica, ValueContext
from replicax._variables.creation import placed_beside
from replicax._variables.variable import Variable

PyTree = Any


class Strategy:
    """A way of placing replicas and variables on devices, and the verbs to work with it.

    You do not make one of this class but of a subclass, `rx.MirroredStrategy` say. What you do with it is always the
    same: make variables under `scope`, `run` a function once per replica, `reduce` what comes back.
    """

    placement: Placement

    def __init__(
        self,
        placement: Placement,
        *,
        eager: bool = False,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        variables: LayoutPolicy | None = None,
    ) -> None:
        require_threads(placement.local_devices)
        self.placement = placement
        self.eager = eager
        self.cross_device_ops = chosen(cross_device_ops)
        self.communication_options = communication_options or CommunicationOptions()
        self.layouts = layout.checked(variables, f"rx.{type(self).__name__}(variables=...)")
        self._begin_empty()

    def _begin_empty(self) -> None:
        """A new strategy has made no variable and compiled no program."""
        self.made: weakref.WeakSet[Variable] = weakref.WeakSet()
        self.programs = Programs(self)
        self.functions = Programs(self, Kind.CROSS)
        self.loops = Programs(self, Kind.CROSS, _steps.Loop)

    # -- hooks: what a strategy may answer differently

    between_graph: bool = False
    """Whether every process runs the program for itself and meets the others in variables or reductions."""

    session_settings: Mapping[str, Any] = {}
    """What programs of 2018 wanted in a session's configuration; nothing here reads it."""

    def place_variable(self, variable: Variable, colocate_with: Any) -> Placement:
        """Where a new variable belongs."""
        return placed_beside(self.placement, colocate_with)

    def rest_sharding(self, variable: Variable) -> Sharding:
        """How a mirrored variable lies between steps."""
        placement = variable.placement
        if variable.layout is None or placement.apart:
            return placement.rest
        return NamedSharding(placement.mesh, variable.layout)

    def settle_layout(self, variable: Variable) -> PartitionSpec | None:
        """How a new variable is cut over the devices, if it is."""
        return layout.settled(variable, self.layouts)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what only one should write."""
        return True

    # -- contexts

    def scope(self) -> Scope[Self]:
        """Puts this strategy in force: variables made inside belong to it.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     w = rx.Variable(1.0)
        >>> w.distribute_strategy is strategy
        True
        """
        return Scope(self, self)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas step together; a global batch is split over so many."""
        return self.placement.replicas

    @property
    def extended(self) -> StrategyExtended:
        """The members that tf.distribute keeps under ``strategy.extended``."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver this strategy was made from; None for strategies of one process."""
        return None

    # -- running

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica and merges what the replicas return.

        `fn` is ordinary code for one replica. It is compiled into one program for all of them, at the first call with
        arguments of this shape. Each replica gets its own component of every `PerReplica` argument; everything else,
        variables included, is the same for all.

        Args:
          fn: The step. It may read and assign variables, take gradients and call `rx.get_replica_context()`.
          args: Its positional arguments. Arrays and numbers are traced; bools, strings and other objects are part of
            the program, so that another value compiles another program.
          kwargs: Its keyword arguments.
          options: See `rx.RunOptions`.

        Returns:
          What `fn` returned. A leaf that is equal on all replicas is a plain array, any other a `PerReplica`.

        Raises:
          LocalityError: The step would give replicas different copies of a variable, would reduce twice or deadlock.
          ContextError: Called inside a replica.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * 10)
        PerReplica:{
          0: Array(0, dtype=int32),
          1: Array(10, dtype=int32)
        }
        """
        if _context.thread.modes:
            mode = _context.require_cross(self, "strategy.run(...)")
            if mode is not None and mode.ledger is not None:
                return _run.nested(mode.ledger, self, fn, args, kwargs)
        return _run.run(self, fn, args, kwargs, options)

    def experimental_run_v2(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """The former name of `run`."""
        return self.run(fn, args, kwargs)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """As `run`, in the strategy's scope, on the next element of `input_iterator`, which is one argument of `fn`."""
        with self.scope():
            return self.run(fn, () if input_iterator is None else (input_iterator.get_next(),))

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        steps: int,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> _steps.MultiStepContext:
        """Takes `steps` steps in one compiled program, for models so small that starting a step costs more than it does.

        Calls ``fn(context, *inputs)`` with the next elements of `iterator`; an element that is a tuple is several
        inputs. `fn` is code that speaks for all replicas, so it calls `run`. What it wants to be seen afterwards it
        gives to the context; see `rx.MultiStepContext`.

        Args:
          initial_loop_values: What ``last_step_outputs`` holds under names that no step sets.

        Raises:
          OutOfRangeError: The data ended before; the steps up to there were taken.

        >>> import jax, numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> with strategy.scope():
        ...     total = rx.Variable(0, aggregation="sum")
        >>> def step(context, rows):
        ...     strategy.run(lambda rows: total.assign_add(rows.sum()), (rows,))
        >>> iterator = iter(strategy.distribute_dataset([np.array([1, 2]), np.array([3, 4])]))
        >>> context = strategy.run_steps(step, iterator, steps=2)
        >>> print(total.numpy())
        10
        """
        return _steps.run_steps(self, fn, iterator, steps, initial_loop_values)

    def lower(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> jax.stages.Lowered:
        """The program that `run` would execute, for reading: ``.as_text()``, ``.compile().cost_analysis()``.

        >>> import jax, jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> step = lambda x: rx.get_replica_context().all_reduce("sum", x)
        >>> "all_reduce" in strategy.lower(step, (jnp.ones(3),)).as_text()
        True
        """
        _context.require_cross(self, "strategy.lower(...)")
        call = _run.arguments.check_call(fn, args, kwargs)
        positional, named, statics = _run.arguments.prepared(self.placement, *call)
        return self.programs.find(fn, statics).lower(positional, named)

    # -- combining

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Combines one value per replica into a single value.

        Use it after `run`, where each replica handed back its own loss, metric or count. Inside a replica use
        `ReplicaContext.all_reduce`, which gives every replica the result and can be differentiated.

        With ``axis=None`` the replicas are combined element by element. With an `axis` that axis of each replica's
        value is reduced as well, and ``"mean"`` divides by the number of elements over all replicas: that is the one
        for a loss per example, since replicas with fewer rows then weigh less. Padding rows never count.

        Args:
          reduce_op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
          value: What `run` returned, or any structure of such.
          axis: An axis, or several, inside each replica's value to reduce too.

        Raises:
          LocalityError: ``"sum"`` without an axis of a value that is the same everywhere: is ``x`` meant, or N·x?

        >>> import jax.numpy as jnp, jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> losses = rx.PerReplica((jnp.array([2.0, 4.0, 6.0]), jnp.array([8.0])))
        >>> print(strategy.reduce("mean", losses, axis=0))
        5.0

        The mean of the two means would have been 6.0.
        """
        op = ReduceOp.parse(reduce_op)
        mode = _context.require_cross(self, "strategy.reduce(...)")
        along = axes.several("strategy.reduce", axis)
        merged = self.communication_options.merge(options)
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_value)
        leaves = [_variable_as_value(leaf, mode) if isinstance(leaf, Variable) else leaf for leaf in leaves]
        if mode is None or mode.ledger is None:
            results = host.reduce(self.cross_device_ops, self.placement, op, leaves, along, merged)
        else:
            results = _reduce_in_run(mode.ledger, op, leaves, along, options, self.num_replicas_in_sync)
        return jax.tree.unflatten(tree, results)

    def gather(self, value: PyTree, axis: int, options: CommunicationOptions | None = None) -> PyTree:
        """Concatenates the replicas' values along `axis`, in replica order. Padding rows are left out.

        What is equal on all replicas is there once for each; an array that no replica computed is returned as it is.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group[None])
        >>> print(strategy.gather(ids, axis=0))
        [0 1]
        """
        mode = _context.current()
        if mode is not None and mode.replica is not None:
            raise _errors.gather_in_replica()
        mode = _context.require_cross(self, "strategy.gather(...)")
        CommunicationOptions.parse(options)

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                leaf = _one_for_each(leaf, self.num_replicas_in_sync)
            if isinstance(leaf, PerReplica) and mode is not None and mode.ledger is not None:
                return mode.ledger.gather_across(leaf, axis)
            return host.gather(self.placement, leaf, axis)

        return jax.tree.map(one, value, is_leaf=_is_value)

    # -- input

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Splits every global batch of `dataset` over the replicas; iterate over the result and `run` a step on each.

        Args:
          dataset: Any iterable of global batches (pytrees of arrays with a common leading axis): a list, a generator, Grain,
            `tf.data`, a torch `DataLoader`; `rx.data.from_arrays` makes one from arrays.
          options: See `rx.InputOptions`.

        >>> import jax, numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> batches = rx.data.from_arrays(np.arange(6.0, dtype=np.float32), batch_size=4)
        >>> for x in strategy.distribute_dataset(batches):
        ...     print(strategy.reduce("mean", strategy.run(rx.mean, (x,))))
        1.5
        4.5
        """
        made = distribute.distribute_dataset(self, dataset, options)
        made.strategy = self
        return made

    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Data from a function that makes each input pipeline's own dataset, in batches for one replica.

        `dataset_fn` gets an `rx.InputContext`, which says which pipeline it makes and how large a replica's batch is.
        """
        made = distribute.distribute_from_function(self, dataset_fn, options)
        made.strategy = self
        return made

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """As `distribute_dataset`, giving an iterator that can be initialised again."""
        return distribute.make_dataset_iterator(self, dataset)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """As `distribute_datasets_from_function`, giving an iterator that can be initialised again."""
        return distribute.make_input_fn_iterator(self, input_fn, replication_mode)

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: Any = None) -> Any:
        """The rows of arrays as a dataset on the host; batch it, then distribute it."""
        return distribute.make_numpy(self, numpy_input)

    def explain(self, dataset: Any) -> Explanation:
        """Who reads which rows of `dataset`, how its short batch is split, and why. Print it."""
        return distribute.explain(self, dataset)

    # -- taking apart and putting together

    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """One entry per replica of this process: its part of a value per replica, or its copy of one that all have.

        A structure becomes one structure per replica. A number, an object or an array that lies on no replica in particular
        is not a replica's: it is the only entry.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
        >>> [int(i) for i in strategy.experimental_local_results(ids)]
        [0, 1]
        """
        if isinstance(value, PerReplica):
            return tuple(self.local_entries(value))
        if self.num_replicas_in_sync == 1 or self._is_of_no_replica(value):
            return (value,)
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_per_replica)
        opened = [self.local_entries(leaf, "a part of the structure") for leaf in leaves]
        return tuple(
            jax.tree.unflatten(tree, [entries[i] for entries in opened])
            for i in range(len(self.placement.local_replicas))
        )

    def unwrap(self, value: PyTree) -> tuple[Any, ...]:
        """The former name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    def _is_of_no_replica(self, value: Any) -> bool:
        """Whether `value` is one thing that the replicas have no copies of."""
        if isinstance(value, jax.Array):
            mode = _context.current()
            in_run = mode is not None and mode.ledger is not None  # where arrays lie on all replicas
            return not (in_run or isinstance(value, Tracer) or host.lies_on_all(self.placement, value))
        return value is None or not isinstance(value, Variable) and jax.tree_util.all_leaves([value])

    def local_entries(self, leaf: Any, name: str = "value") -> Sequence[Any]:
        """One entry per replica of this process: its own component, its copy of a mirrored array, or what all share."""
        mode, call = _context.current(), "strategy.experimental_local_results(...)"
        if isinstance(leaf, PerReplica) and (leaf.form == TRACED or _is_across_in_run(mode)):
            mode = _context.require_cross(self, call)
            assert mode is not None and mode.ledger is not None
            return mode.ledger.components(leaf)
        if isinstance(leaf, PerReplica):
            return host.check_replicas(call, self.placement, leaf, name).values
        if isinstance(leaf, Variable) and self.num_replicas_in_sync > 1:
            return leaf.values
        copies = {}
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            copies = {s.device: s.data for s in leaf.addressable_shards if s.data.shape == leaf.shape}
        return [copies.get(device, leaf) for device in self.placement.local_devices]

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> PyTree:
        """Makes a value per replica from a function of `rx.ValueContext`, called once for each replica of this process.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> ids = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        >>> [int(x) for x in ids.values]
        [0, 1]
        """
        replicas = self.num_replicas_in_sync
        _context.require_cross(self, "strategy.experimental_distribute_values_from_function(...)")
        if not callable(value_fn):
            raise _errors.not_a_function(
                "strategy.experimental_distribute_values_from_function({})", "value_fn", value_fn
            )
        made = [value_fn(ValueContext(i, replicas)) for i in self.placement.local_replicas]
        if replicas == 1:
            return made[0]
        with jax.ensure_compile_time_eval():  # in an rx.function they are constants of the program
            return _values.regroup(made, lambda parts: _values.lay_out(self.placement, parts), always_wrap=True)

    # -- names of 2019 that are found elsewhere now, or have nothing left to do

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """The former place of ``extended.colocate_vars_with``."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(self, session_config: Any = None) -> None:
        """Puts into a session's configuration, any mapping, what `update_config_proto` says."""
        sessions.settle(session_config, self.session_settings)

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of a session's configuration with what this strategy wants in it. Nothing here reads it."""
        return sessions.updated(config_proto, self.session_settings)

    # -- looking at it

    def describe(self) -> Description:
        """Which devices, which replicas, which variables: a table for a terminal, and its numbers as data.

        >>> import jax, jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> with strategy.scope():
        ...     w = rx.Variable(jnp.zeros((2, 3)), name="w")
        >>> strategy.describe().variables
        (VariablePlace(name='w', type='float32[2, 3]', kind='mirrored', layout='copies', bytes_per_device=24),)
        """
        return describe(self)

    # -- being a Python object

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.placement.devices)
        return f"<rx.{type(self).__name__} {self.num_replicas_in_sync} x [{devices}]>"

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            "copy.copy(strategy): two strategies would share one set of programs and variables. Must only deepcopy a "
            "strategy: copy.deepcopy(strategy) makes an independent one on the same devices."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        memo |= {id(device): device for device in jax.devices()}  # there is one of each
        for name, value in self.__dict__.items():
            if not isinstance(value, (Programs, weakref.WeakSet)):
                twin.__dict__[name] = value if isinstance(value, Placement) else copy.deepcopy(value, memo)
        twin._begin_empty()
        return twin


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)


def _is_across_in_run(mode: Mode | None) -> bool:
    return mode is not None and mode.ledger is not None and mode.replica is None


def _is_value(x: Any) -> bool:
    return _is_per_replica(x) or is_slices(x)


def _variable_as_value(variable: Variable, mode: Mode | None) -> Any:
    """An on-read variable counts as its components, a mirrored one as its value."""
    if variable.on_read and variable.strategy.num_replicas_in_sync > 1:
        if mode is not None and mode.ledger is not None:
            return PerReplica(variable.values)
        return _values.lay_out(variable.placement, variable.values)
    return variable.value


def _one_for_each(variable: Variable, replicas: int) -> Any:
    """A variable as one value per replica: its components, or its value once for each."""
    if replicas == 1:
        return variable.value
    return PerReplica(variable.values if variable.on_read else (variable.value,) * replicas)


def _reduce_in_run(
    ledger: Ledger,
    op: ReduceOp,
    values: list[Any],
    along: axes.Axes,
    options: CommunicationOptions | None,
    replicas: int,
) -> list[Any]:
    """Reduces in cross-replica code that is part of a run, a merge function say: values per replica in one exchange."""
    apart = [i for i, value in enumerate(values) if _is_value(value)]
    reduced = ledger.reduce_across(op, [values[i] for i in apart], along, options) if apart else []
    results = dict(zip(apart, reduced, strict=True))
    return [
        results[i] if i in results else host.reduce_plain(op, value, along, replicas) for i, value in enumerate(values)
    ]
