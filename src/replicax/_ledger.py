"""What did this step read and write? The ledger that is open while a compiled step is traced.

A variable that is read or assigned while a ledger is open enters itself here. It becomes an input of the program and, if
it was written, a result.
"""

# How does a variable that the step reaches by closure become an input of a program that is being traced already?
#
# Things that don't work:
#
# - Let JAX close over the variable's array. It becomes a constant: step 2 sees the weights of step 1, without an error.
# - Trace once to discover variables and again to build. The user's Python runs twice, prints appear twice.
# - Pass every variable of the strategy, used or not. It works until somebody has ten thousand.
# - Hold variables as `jax.Ref`. Twice as slow per step (docs/log.md).
#
# What we do: read a *stand-in*, a concrete array with the shape that a replica sees. JAX hoists it out of `shard_map` as a
# constant operand, also from inside scan and grad, and there `_run/trace.py` recognises it by identity and puts a real
# argument in its place.
#
# A variable assigned inside a nested trace (scan, cond, a foreign grad) cannot simply be rebound: the loop would see its first
# value for ever. Such a variable lives in a `jax.Ref` for the length of the step. Since a Ref must exist before the loop
# begins, and we learn of the assignment inside it, the trace starts over, once, knowing which variables need one.

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from replicax import _context, _errors, _jax
from replicax._context import Kind, Mode
from replicax._cross import host, in_step
from replicax._given import Given, GivenRows
from replicax._locality import Site, call_site
from replicax._options import CommunicationOptions, ReduceOp, VariableAggregation
from replicax._placement import AXIS
from replicax._values import PARTS, ROWS, TRACED, PerReplica, is_per_replica
from replicax._variables import storage

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any


class Restart(Exception):
    """The trace must start over: these variables are assigned inside a nested trace."""

    def __init__(self, variable: Variable) -> None:
        self.variable = variable


class OtherStrategy(Exception):
    """The program under way was traced for the default strategy and turned out to belong to this one."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy


class Cell:
    """One variable during one trace: its present value, held directly or in a Ref."""

    __slots__ = ("now", "ref")

    def __init__(self, now: Any, ref: Any) -> None:
        self.now = now
        self.ref = ref


class TracedLedger:
    def __init__(
        self,
        strategy: Strategy,
        entry: CodeType,
        referenced: set[Variable],
        created: list[Variable],
        awaited: set[Variable],
    ) -> None:
        self.strategy = strategy
        self.placement = strategy.placement
        self.entry = entry
        self.referenced = referenced
        self.created = created
        self.awaited = awaited
        self.creations = 0
        self.initial: dict[Variable, Any] = {}
        self.cells: dict[Variable, Cell] = {}
        self.stand_ins: dict[int, tuple[Variable, jax.Array]] = {}
        self.writes: dict[Variable, Site] = {}
        self.given = GivenRows(self.placement.replicas, self._sources_of)
        self.leaf_of: dict[int, int] = {}
        self.trace = _jax.current_trace()

    # -- variables

    def read(self, variable: Variable) -> Any:
        self.refuse_foreign_jit(variable, "read")
        cell = self.cells.get(variable) or self._open(variable)
        return cell.now if cell.ref is None else cell.ref[...]

    def read_across(self, variable: Variable) -> Any:
        """An on-read variable as cross-replica code sees it: its components combined."""
        component = self.read(variable)
        if self.placement.replicas == 1:
            return component
        if variable.aggregation is VariableAggregation.NONE:
            raise _errors.on_read_none(variable)
        if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.first(component)
        op = ReduceOp.from_variable_aggregation(variable.aggregation)
        return self.all_reduce(op, component, None).astype(variable.dtype)

    def write(self, variable: Variable, value: Any) -> None:
        self.refuse_foreign_jit(variable, "assign")
        cell = self.cells.get(variable) or self._open(variable)
        value = lax.stop_gradient(value if value.shape == variable.shape else value[self.replica_id()])
        if cell.ref is not None:
            cell.ref[...] = value
        elif _jax.current_trace() is self.trace:
            cell.now = value
        else:
            raise Restart(variable)
        self.writes[variable] = call_site()

    def _open(self, variable: Variable) -> Cell:
        if variable.strategy is not self.strategy and self.is_default_cross():
            raise OtherStrategy(variable.strategy)
        array = storage.stand_in(variable)
        self.stand_ins[id(array)] = (variable, array)
        with _jax.in_trace(self.trace):
            now = jnp.copy(array)
            if variable.on_read:
                now = now[0]
            ref = jax.new_ref(now, kind="no_grad_no_remat") if variable in self.referenced else None
        cell = self.cells[variable] = Cell(now, ref)
        return cell

    def refuse_foreign_jit(self, variable: Variable, method: str) -> None:
        """A `jax.jit` inside the step would keep our tracers and hand them to the next trace."""
        if _jax.inside_jit(self.trace, self.entry):
            raise _errors.foreign_jit(variable, method)

    def is_default_cross(self) -> bool:
        mode = _context.current()
        return mode is not None and mode.replica is None and self.strategy is _context.default_strategy()

    def final(self, variable: Variable) -> Any:
        cell = self.cells[variable]
        return cell.now if cell.ref is None else cell.ref[...]

    def create(self, make: Callable[..., Variable], kwargs: dict[str, Any]) -> Variable:
        """A variable made inside the step: made at the first trace, handed back at every later one."""
        index = self.creations
        self.creations += 1
        if index < len(self.created):
            return self.created[index]
        initial = kwargs.get("initial_value")
        if callable(initial) and not hasattr(initial, "shape"):
            with jax.ensure_compile_time_eval():
                initial = initial()
            kwargs = kwargs | {"initial_value": initial}
        if isinstance(initial, Tracer):
            kwargs = kwargs | {"initial_value": np.zeros(initial.shape, initial.dtype)}
        with jax.ensure_compile_time_eval():
            variable = make(**kwargs)
        self.created.append(variable)
        if isinstance(initial, Tracer):
            self.awaited.add(variable)
            self.initial[variable] = jnp.asarray(initial, variable.dtype)
        return variable

    def close(self) -> None:
        """Lets go of the trace, which is over; what was learnt stays."""
        self.cells.clear()
        self.given.let_go()
        self.initial = dict.fromkeys(self.initial)
        self.trace = None

    # -- replicas

    def replica_id(self) -> Any:
        return lax.axis_index(AXIS)

    def all_reduce(self, op: ReduceOp, value: PyTree, options: CommunicationOptions | None) -> PyTree:
        merged = self.strategy.communication_options.merge(options)
        return in_step.all_reduce(self.strategy.cross_device_ops, self.placement, op, value, merged)

    def first(self, value: PyTree) -> PyTree:
        return in_step.first(self.placement, value)

    def all_gather(self, value: PyTree, axis: int, options: CommunicationOptions | None) -> PyTree:
        return in_step.all_gather(self.placement, value, axis)

    def reduce_across(
        self, op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None, options: CommunicationOptions | None
    ) -> list[Any]:
        """`strategy.reduce` in cross-replica code of this run."""
        own = self.to_replica(values)
        if axes is None:
            return self.all_reduce(op, own, options)
        return [host.reduce_local(lambda which, x: self.all_reduce(which, x, options), op, x, axes) for x in own]

    def gradients_across(self, gradients: list[Any]) -> list[Any]:
        """Gradients of a function that speaks for all replicas. Each differentiated its own copy of it, which makes N."""
        return self.all_reduce(ReduceOp.MEAN, gradients, None)

    def gather_across(self, value: PerReplica, axis: int) -> Any:
        """`strategy.gather` in cross-replica code of this run."""
        return in_step.all_gather(self.placement, self.own(value), axis)

    def components(self, value: PerReplica | Variable) -> list[Any]:
        """A per-replica value or an on-read variable opened in cross-replica code: the component of every replica."""
        return in_step.stack(self.placement, self.own(value) if isinstance(value, PerReplica) else self.read(value))

    def own(self, value: PerReplica) -> Any:
        """This replica's component. What was laid out on the host before becomes part of the program."""
        if value.form == TRACED:
            return value.data
        value = host.check_replicas("strategy.run(step)", self.placement, value)
        if value.mask is not None or len(self.placement.local_replicas) < self.placement.replicas:
            raise _errors.captured_per_replica(value)
        if value.form == PARTS:
            parts = [part if isinstance(part, Tracer) else np.asarray(part) for part in value.data]
            if len({(part.shape, part.dtype) for part in parts}) > 1 or parts[0].dtype.kind in "OSU":
                raise _errors.ragged_argument("", value)
            whole = jnp.stack(parts)
        else:
            whole = value.data if isinstance(value.data, Tracer) else np.asarray(value.data)
            if value.form == ROWS:
                whole = whole.reshape(self.placement.replicas, -1, *whole.shape[1:])
        return jnp.asarray(whole)[self.replica_id()]

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.to_cross((args, kwargs))
        with _context.push(Mode(self.strategy, Kind.CROSS, self)):
            result = fn(self.strategy, *args, **kwargs)
        return self.to_replica(result)

    def update(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        """What an update function returned for each component; a traced one is the same program for all of them."""
        inputs = jax.tree.leaves((args, kwargs), is_leaf=is_per_replica)
        differs = any(isinstance(leaf, PerReplica) or getattr(leaf, "on_read", False) for leaf in inputs)
        args, kwargs = self.to_replica((args, kwargs))
        with _context.push(Mode(self.strategy, Kind.UPDATE, self)):
            result = fn(*args, **kwargs)
        return [self.to_cross(result) if differs else result]

    def to_cross(self, tree: PyTree) -> PyTree:
        """A replica's values as cross-replica code sees them: whether an array differs is not known while tracing."""
        if self.placement.replicas == 1:
            return tree
        return jax.tree.map(
            lambda leaf: PerReplica(leaf, TRACED) if isinstance(leaf, jax.Array) else leaf, tree, is_leaf=is_per_replica
        )

    def to_replica(self, tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: self.own(leaf) if isinstance(leaf, PerReplica) else leaf,
            tree,
            is_leaf=is_per_replica,
        )

    def belongs_to(self, strategy: Strategy) -> None:
        """Cross-replica code traced for the default strategy met a verb of another one: it is that one's code."""
        raise OtherStrategy(strategy)

    # -- padding

    def give(self, given: Given, array: Any) -> None:
        """Enters an argument that has rows."""
        self.given.all.append(given)
        self.leaf_of[id(array)] = given.leaf

    def valid_counts(self, rows: int | None, of: Any = None) -> tuple[Any, Any] | None:
        return self.given.counts(rows, of)

    def batch_rows(self) -> int:
        return self.given.padded_rows()

    def _sources_of(self, value: Any) -> set[int] | None:
        """The arguments with rows from which `value` was computed; None if part of the way cannot be seen."""
        inputs = _jax.inputs_of(value)
        if any(x._trace is not self.trace for x in inputs):
            return None
        return {self.leaf_of[id(x)] for x in inputs if id(x) in self.leaf_of}
