"""How does a replica function run line by line, replica by replica?

One thread per replica, on that replica's device, replica 0 on the caller's own. `print` and `pdb` work in the function,
a loop is a loop, and an exception comes from the line that raised it. What the function gives, and what it is refused
for, is what the compiled run gives and refuses: `Results` asks the same analyses, and the variables are written at the
end, all or none.

`rendezvous.py` lets replicas wait for each other, `operations.py` carries out one operation, `copies.py` holds the
variables. Here is the ledger that a replica's code talks to, and what goes into and comes out of a run.
"""

# In code across replicas (a merge function) everything lies on one device, that of replica 0: a value per replica as a
# host tuple of N arrays there, anything mirrored as one array. So components can be added up and printed without a
# thought about devices. Reductions lay them out over the replicas again and run the program that the host uses.
#
# `dispatch_lock` is held for the whole run. It is what makes steps from several threads follow one another
# without losing an update; and all programs for several devices come from replica 0, whose thread holds it.

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _context, _errors, _jax
from replicax._context import Kind, Mode, ReplicaContext
from replicax._cross import host, in_step
from replicax._given import Given, GivenRows, padded, refuse_averaged, refuse_unlike
from replicax._host import dispatch_lock
from replicax._locality import Finding, Mirrored, Rows, Site, State, call_site, differs, origin_of
from replicax._options import CommunicationOptions, ReduceOp, RunOptions, VariableAggregation
from replicax._placement import AXIS, Placement
from replicax._run.arguments import RUN, checks, equal, names, refuse_hidden_arrays, refuse_unrun, refuse_unusable
from replicax._run.copies import Copies, same_bits
from replicax._run.operations import EagerArray, EagerTrace, Tape, concrete
from replicax._run.rendezvous import Call, Rendezvous
from replicax._values import PARTS, ROWS, STACKED, PerReplica, _blocks, fits_device, lay_out, parts_of, regroup

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any

_NUMBERS = (int, float, complex, np.generic)


def run(
    strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: RunOptions
) -> Any:
    """Runs `fn` once per replica, each on a thread of its own, and merges what they return."""
    if _jax.trace_context.trace is not _jax.no_trace:
        raise _errors.eager_under_transformation(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    with dispatch_lock, jax.profiler.TraceAnnotation(name):
        return EagerRun(strategy, fn, options.concurrent).carry_out(args, kwargs)


class EagerRun:
    """What the replicas of one run have in common."""

    def __init__(self, strategy: Strategy, fn: Callable[..., Any], concurrent: bool) -> None:
        self.strategy = strategy
        self.placement = strategy.placement
        self.fn = fn
        self.concurrent = concurrent
        self.tape = Tape()
        self.asked_who = False
        """Whether the step looked at its replica's id, from which values may have been computed that no tape shows."""
        self.made: dict[str, list[Variable]] = {}
        self.initial: list[tuple[Variable, Any]] = []
        self.known: dict[int, tuple[PerReplica, Sequence[Any]]] = {}
        """The replicas' own arrays behind the per-replica values that were shown to code across replicas."""
        self.summed: list[tuple[Site, Any]] = []
        """What replica 0 brought to each sum that code across replicas took, and where."""
        self.ledgers = [EagerLedger(self, index) for index in range(len(self.placement.local_replicas))]
        self.copies = Copies(strategy, [ledger.trace for ledger in self.ledgers])
        self.meeting = Rendezvous(len(self.ledgers), concurrent)

    def carry_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for check in checks:
            check(self.fn, (args, kwargs))
        refuse_unusable(self.fn, args, kwargs)
        outs = self.each(self.fn, self._handed_out(args, kwargs))
        refuse_unrun(self.fn, outs[0])
        results = Results(self, outs)
        self.copies.commit(self.fn)
        return results.merged()

    def each(self, fn: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Runs `fn` for every replica: from the host, or from code across replicas, while those of `outer` wait."""
        outer, self.meeting = self.meeting, Rendezvous(len(self.ledgers), self.concurrent)
        replicas = [functools.partial(ledger.live, fn, *call) for ledger, call in zip(self.ledgers, calls, strict=True)]
        try:
            return self.meeting.run(replicas, enter=_thread_like_this_one())
        finally:
            self.meeting = outer

    # -- into the run

    def _handed_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The call as each replica gets it."""
        tree = jax.tree.structure((args, kwargs))
        numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
        labels = names(self.fn, tree)

        def give(ledger: EagerLedger, leaf: Any, numbers: Any) -> Any:
            return ledger.take(leaf, numbers, next((labels[number] for number in jax.tree.leaves(numbers)), ""))

        return [
            jax.tree.map(functools.partial(give, ledger), (args, kwargs), numbered, is_leaf=_is_per_replica)
            for ledger in self.ledgers
        ]

    # -- across replicas

    @contextmanager
    def across(self) -> Iterator[None]:
        """Inside it, code speaks for all replicas."""
        with _jax.outside_of_traces(), _context.push(Mode(self.strategy, Kind.CROSS, self.ledgers[0])):
            yield

    def merge(self, fn: Callable[..., Any], brought: Sequence[Any]) -> list[Any]:
        """A merge function, called once with what all replicas brought; its result, split again."""
        args, kwargs = self.to_across(brought)
        with self.across():
            result = fn(self.strategy, *args, **kwargs)
        return self.to_replicas(result)

    def to_across(self, trees: Sequence[PyTree]) -> PyTree:
        """What each replica has → one structure. Arrays become per-replica values, whether they are equal or not."""
        device = self.ledgers[0].trace.device

        def show(parts: tuple[Any, ...]) -> Any:
            if any(isinstance(part, jax.Array) for part in parts):
                moved = tuple(jax.device_put(concrete(part), device) if _is_array(part) else part for part in parts)
                if self.placement.replicas == 1:
                    return moved[0]
                value = PerReplica(moved, PARTS)
                self.known[id(value)] = value, parts
                return value
            return parts[0] if _all_equal(parts) else PerReplica(parts, PARTS)

        with _jax.outside_of_traces():
            return regroup(trees, show, always_wrap=True)

    def to_replicas(self, tree: PyTree) -> list[PyTree]:
        """One structure → what each replica has of it: its own component, or its own copy."""
        return [
            jax.tree.map(functools.partial(self._share, ledger), tree, is_leaf=_is_per_replica)
            for ledger in self.ledgers
        ]

    def _share(self, ledger: EagerLedger, leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return ledger.trace.enter(concrete(leaf)) if isinstance(leaf, jax.Array) else leaf
        part = self.known[id(leaf)][1][ledger.index] if id(leaf) in self.known else leaf.values[ledger.index]
        if isinstance(part, EagerArray) or not isinstance(part, jax.Array):
            return part
        return ledger.trace.enter(part, differs("code across replicas gave each replica a value of its own"))


class EagerLedger:
    """One replica of an eager run; that of replica 0 also answers to code across replicas."""

    def __init__(self, run: EagerRun, index: int) -> None:
        self.run = run
        self.strategy = run.strategy
        self.index = index
        self.replica = run.placement.local_replicas[index]
        self.trace = EagerTrace(
            self.replica,
            run.placement.local_devices[index],
            run.tape if index == 0 else None,
            self._meet,
            lambda: run.meeting.raise_if_cancelled(),
        )
        self.given = GivenRows(run.placement.replicas, _sources_of)
        self._masks: dict[int, tuple[Any, EagerArray]] = {}
        self._creations: Counter[str] = Counter()

    def live(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `fn` as this replica, on the thread it is called on."""
        with (
            jax.disable_jit(),
            jax.default_device(self.trace.device),
            _jax.named_axis(AXIS, self.run.placement.replicas),
            _jax.traces_kept_for(self),
            _jax.in_trace(self.trace),
            _Context(self.strategy, self.replica, self),
        ):
            return fn(*args, **kwargs)

    def take(self, leaf: Any, numbers: Any, label: str) -> Any:
        """One argument of the step, as this replica gets it."""
        state = None
        if isinstance(leaf, PerReplica):
            state = differs(f"argument {label} differs per replica")
            if leaf.mask is not None:
                mask = self._mask(leaf.mask, label, state)
                leaf = _component(leaf.data, self, label)
                self.given.all.append(Given(numbers.data, leaf.shape[0], mask, numbers.mask, label))
                return self.trace.enter(leaf, state, leaf=numbers.data)
            form, leaf = leaf.form, _component(leaf, self, label)
            if form == ROWS:
                self.given.all.append(Given(numbers.data, leaf.shape[0], label=label))
                return self.trace.enter(leaf, state, leaf=numbers.data)
        if isinstance(leaf, np.ndarray) and fits_device(leaf.dtype):
            leaf = jnp.array(leaf)  # a copy: the user may fill his buffer again
        elif isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool):
            leaf = jnp.asarray(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        return self.trace.enter(leaf) if state is None else self.trace.enter(leaf, state)

    def _mask(self, mask: Any, label: str, state: State) -> EagerArray:
        """A validity mask, entered once. Leaves of one batch share it, by which it is seen that they are one batch's."""
        if id(mask) not in self._masks:
            self._masks[id(mask)] = mask, self.trace.enter(_component(mask, self, label), state)
        return self._masks[id(mask)][1]

    def own(self, value: PerReplica) -> Any:
        """This replica's component of a value that the step did not get as an argument."""
        if value.mask is not None:
            raise _errors.captured_per_replica(value)
        part = _component(value, self, "captured")
        if isinstance(part, EagerArray):
            return part
        with _jax.outside_of_traces():
            part = jnp.asarray(part)
        return self.trace.enter(part, differs("it was captured"))

    # -- variables

    def read(self, variable: Variable) -> Any:
        self.refuse_foreign_jit(variable, "read")
        if not self._speaks_for_all():
            return self.run.copies.read(variable, self.index)
        parts = self.components(variable)
        return jnp.stack(parts) if variable.on_read else parts[0]

    def read_across(self, variable: Variable) -> Any:
        """An on-read variable as code across replicas sees it: its components combined."""
        mode = _context.current()
        if mode is not None and mode.replica is not None:
            return self.merge_call(lambda _: self.run.ledgers[0].read_across(variable), (), {})
        parts = self.components(variable)
        if self.run.placement.replicas == 1 or variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return parts[0]
        if variable.aggregation is VariableAggregation.NONE:
            raise _errors.on_read_none(variable)
        op = ReduceOp.from_variable_aggregation(variable.aggregation)
        (result,) = self.reduce_across(op, [PerReplica(tuple(parts), PARTS)], None, None)
        return result.astype(variable.dtype)

    def write(self, variable: Variable, value: Any) -> None:
        self.refuse_foreign_jit(variable, "assign")
        site = call_site()
        if not self._speaks_for_all():
            return self.run.copies.write(variable, self.index, lax.stop_gradient(value), site)
        for ledger in self.run.ledgers:
            own = value if value.shape == variable.shape else value[ledger.index]
            self.run.copies.write(variable, ledger.index, ledger.trace.enter(own), site)

    def create(self, make: Callable[..., Variable], kwargs: dict[str, Any]) -> Variable:
        """A variable made in the step: replica 0 makes it, the others are given the same one."""
        if self._speaks_for_all():
            return self._make(make, kwargs)
        name = _canonical(kwargs.get("name"))
        number = self._creations[name]
        self._creations[name] += 1
        made = self.run.made
        if self.index == 0:
            made.setdefault(name, []).append(self._make(make, kwargs))
            self.run.meeting.announce()
        elif not self.run.meeting.wait_for_first(lambda: len(made.get(name, ())) > number):
            of_first = [variable.name for variables in made.values() for variable in variables]
            raise _errors.created_by_this_replica_only(kwargs.get("name") or name, self.replica, of_first)
        return made[name][number]

    def _make(self, make: Callable[..., Variable], kwargs: dict[str, Any]) -> Variable:
        initial = kwargs.get("initial_value")
        with _jax.outside_of_traces():
            if callable(initial) and not hasattr(initial, "shape"):
                initial = initial()
            variable = make(**kwargs | {"initial_value": concrete(initial)})
        if isinstance(initial, EagerArray):
            self.run.initial.append((variable, initial))
        return variable

    def refuse_foreign_jit(self, variable: Variable, method: str) -> None:
        """Jitted functions are Python here, unless the step itself switches them on again."""
        if _jax.inside_jit(self.trace, EagerLedger.live.__code__):
            raise _errors.foreign_jit(variable, method)

    def belongs_to(self, strategy: Strategy) -> None:
        """A run of the default strategy stays one, whatever its merge functions call."""

    # -- in a replica

    def replica_id(self) -> int:
        self.run.asked_who = True
        return self.replica

    def all_reduce(self, op: ReduceOp, value: PyTree, options: CommunicationOptions | None) -> PyTree:
        merged = self.strategy.communication_options.merge(options)
        with _as_one_operation():
            return in_step.all_reduce(self.strategy.cross_device_ops, self.run.placement, op, value, merged)

    def first(self, value: PyTree) -> PyTree:
        with _as_one_operation():
            return in_step.first(self.run.placement, value)

    def all_gather(self, value: PyTree, axis: int, options: CommunicationOptions | None) -> PyTree:
        return jax.tree.map(functools.partial(self._gather, axis=axis), value, is_leaf=in_step.is_one)

    def _gather(self, leaf: Any, axis: int) -> Any:
        array, axis = in_step.gatherable(leaf, axis)
        shapes = self._meet("all_gather", lambda _, shapes: [shapes] * len(shapes), array.shape)
        sizes = [shape[axis] for shape in _gatherable(shapes, axis, array.dtype)]
        padding = [(0, max(sizes) - array.shape[axis] if i == axis else 0) for i in range(array.ndim)]
        even = array if len(set(sizes)) == 1 else jnp.pad(array, padding)
        with _as_one_operation():
            whole = in_step.all_gather(self.run.placement, even, axis)
        if len(set(sizes)) == 1:
            return whole
        blocks = jnp.split(whole, len(sizes), axis)
        return jnp.concatenate(
            [lax.slice_in_dim(block, 0, size, axis=axis) for block, size in zip(blocks, sizes, strict=True)], axis
        )

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in jax.tree.leaves((args, kwargs)):
            if isinstance(leaf, _jax.Tracer) and not isinstance(leaf, EagerArray):
                raise _errors.merge_of_a_transformed_value(leaf, call_site())
        return self._meet("merge_call", lambda _, brought: self.run.merge(fn, brought), (args, kwargs))

    def _meet(self, what: str, work: Callable[[Placement, list[Any]], Sequence[Any]], brought: Any) -> Any:
        call = Call(what, call_site(), brought)
        return self.run.meeting.meet(self.index, call, functools.partial(work, self.run.placement))

    def valid_counts(self, rows: int | None, of: Any = None) -> tuple[Any, Any] | None:
        return self.given.counts(rows, of)

    def batch_rows(self) -> int:
        return self.given.padded_rows()

    # -- across replicas

    def _speaks_for_all(self) -> bool:
        mode = _context.current()
        return mode is not None and mode.kind is Kind.CROSS

    def reduce_across(
        self, op: ReduceOp, values: Sequence[Any], axes: tuple[int, ...] | None, options: CommunicationOptions | None
    ) -> list[Any]:
        """`strategy.reduce` in code across replicas."""
        strategy, laid = self.strategy, [self._laid(value) for value in values]
        merged = strategy.communication_options.merge(options)
        if op is ReduceOp.SUM:
            shown = (self.run.known.get(id(leaf)) for leaf in jax.tree.leaves(values, is_leaf=_is_per_replica))
            self.run.summed += [(call_site(), parts[0]) for _, parts in filter(None, shown)]
        with jax.disable_jit(False):
            reduced = host.reduce(strategy.cross_device_ops, strategy.placement, op, laid, axes, merged)
        return jax.device_put(reduced, self.trace.device)

    def gradients_across(self, gradients: list[Any]) -> list[Any]:
        """Gradients of a function that speaks for all replicas, which is called once."""
        return gradients

    def gather_across(self, value: PerReplica, axis: int) -> Any:
        """`strategy.gather` in code across replicas."""
        with jax.disable_jit(False):
            return jax.device_put(host.gather(self.run.placement, self._laid(value), axis), self.trace.device)

    def _laid(self, value: Any) -> Any:
        def lay(leaf: Any) -> Any:
            return (
                lay_out(self.run.placement, leaf.data) if isinstance(leaf, PerReplica) and leaf.form == PARTS else leaf
            )

        return jax.tree.map(lay, value, is_leaf=_is_per_replica)

    def components(self, value: PerReplica | Variable) -> list[Any]:
        """The component of every replica, side by side."""
        parts = value.values if isinstance(value, PerReplica) else self.run.copies.concrete(value)
        return [self._bring(part) if isinstance(part, jax.Array) else part for part in parts]

    def _bring(self, array: jax.Array) -> jax.Array:
        """An array as code across replicas sees it."""
        with _jax.outside_of_traces():
            return jax.device_put(concrete(array), self.trace.device)

    def update(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Runs an update function once for each component, as whose variable its variables then answer."""
        results = []
        for ledger, (own, own_kwargs) in zip(self.run.ledgers, self.run.to_replicas((args, kwargs)), strict=True):
            mode = Mode(self.strategy, Kind.UPDATE, ledger, update_id=ledger.replica)
            with jax.default_device(ledger.trace.device), _jax.in_trace(ledger.trace), _context.push(mode):
                results.append(fn(*own, **own_kwargs))
        inputs = jax.tree.leaves((args, kwargs), is_leaf=_is_per_replica)
        if any(isinstance(leaf, PerReplica) or getattr(leaf, "on_read", False) for leaf in inputs):
            return [self.run.to_across(results)]
        return [jax.tree.map(lambda leaf: self._bring(leaf) if isinstance(leaf, jax.Array) else leaf, results[0])]

    def run_nested(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`strategy.run` in code across replicas."""
        return self.run.to_across(self.run.each(fn, self.run.to_replicas((args, kwargs))))


@contextmanager
def _as_one_operation() -> Iterator[None]:
    """Inside it a reduction is not gone through line by line: the analysis knows it by its name."""
    with jax.disable_jit(False), _jax.traces_kept_for(None):
        yield


class _Context(ReplicaContext):
    """A replica context that notices who looks at its number."""

    __slots__ = ()

    @property
    def replica_id_in_sync_group(self) -> int:
        self._require("replica_id_in_sync_group")
        assert self._ledger is not None
        return self._ledger.replica_id()


class Results:
    """What the replicas returned, judged: what is equal everywhere, and whether the step may stand as it is."""

    def __init__(self, run: EagerRun, outs: Sequence[PyTree]) -> None:
        self._run = run
        self._outs = outs
        self._columns: list[tuple[Any, ...]] = []
        regroup(outs, self._columns.append, always_wrap=True)
        self._differs, self._masks = [False] * len(self._columns), [None] * len(self._columns)
        if run.placement.replicas > 1:
            self._differs = self._localities()
        if padded(run.ledgers[0].given.all):
            self._masks = self._row_masks()

    def merged(self) -> PyTree:
        verdicts = iter(zip(self._differs, self._masks, strict=True))
        return regroup(self._outs, lambda parts: self._leaf(parts, *next(verdicts)), always_wrap=True)

    def _leaf(self, parts: tuple[Any, ...], differs: bool, mask: Any) -> Any:
        placement = self._run.placement
        values = [concrete(part) for part in parts]
        if not all(map(_is_array, values)):
            refuse_hidden_arrays(self._run.fn, parts[0])
            return parts[0] if _all_equal(parts) else lay_out(placement, values)
        if not differs and same_bits(values):
            return jax.device_put(values[0], placement.mirrored)
        value = lay_out(placement, values)
        value.mask = mask
        return value

    def _localities(self) -> list[bool]:
        run = self._run
        results = [parts[0] if _is_array(parts[0]) else 0 for parts in self._columns]
        written = [variable for variable in run.copies.written if not variable.on_read]
        values = [run.copies.last(variable) for variable in written] + [initial for _, initial in run.initial]
        summed = [value for _, value in run.summed]
        analysis = run.tape.analyse([*results, *values, *summed], run.placement.replicas)
        if not run.asked_who:
            for finding in chain(analysis.findings, self._summed_twice(analysis.outs[len(results) + len(values) :])):
                raise _errors.wrong_collective(run.fn, finding)
        origins = [origin_of(state) for state in analysis.outs]
        for variable, origin in zip(written, origins[len(results) :], strict=False):
            if origin is not None:
                raise _errors.unreduced_write(run.fn, variable, run.copies.written[variable], origin)
        for (variable, _), origin in zip(run.initial, origins[len(results) + len(written) :], strict=False):
            if origin is not None:
                raise _errors.per_replica_initial_value(run.fn, variable, origin)
        return [origin is not None for origin in origins[: len(results)]]

    def _summed_twice(self, states: Sequence[State]) -> Iterator[Finding]:
        """Sums that merge functions took, of what is a sum already. They are on no replica's tape."""
        for (site, _), state in zip(self._run.summed, states, strict=True):
            if isinstance(state, Mirrored) and state.reduced is not None:
                yield Finding("double-reduce", site, state.reduced, "rx_reduce_sum")

    def _row_masks(self) -> list[Any]:
        """For each result that still has the rows of a padded batch: which of them are real."""
        run = self._run
        results: list[Any] = [parts[0] if _is_array(parts[0]) else 0 for parts in self._columns]
        outputs = [*results, *map(run.copies.last, run.copies.written)]
        given = run.ledgers[0].given
        short = padded(given.all)
        rows = run.tape.analyse_rows(outputs, {each.leaf for each in short})
        self._refuse_padding(outputs, rows)
        numbers = [
            given.mask_of(part.shape[0], part.given) if axis == 0 else None
            for part, axis in zip(results, rows.axis, strict=False)
        ]
        for group in given.alike:
            refuse_unlike(run.fn, group, [None if i is None else self._mask(i) for i in group.masks], len(run.ledgers))
        masks = {i: lay_out(run.placement, self._parts(i)).data for i in set(numbers) - {None}}
        return [masks.get(i) for i in numbers]

    def _refuse_padding(self, outputs: Sequence[Any], rows: Rows) -> None:
        """Looks at the batches that nobody asked about; `rows` is what became of the rows of all of them."""
        run, given = self._run, self._run.ledgers[0].given
        short = padded(given.all)
        asked = [each.mask for each in short if each.mask_leaf in given.asked]
        unasked = [each for each in short if not any(each.mask is mask for mask in asked)]
        if asked:
            rows = run.tape.analyse_rows(outputs, {each.leaf for each in unasked})
        site = next((site for site in rows.reduced if site is not None), None)
        if site is not None:
            for each in unasked:
                refuse_averaged(run.fn, site, each.rows, self._mask(each.mask_leaf))

    def _mask(self, mask: int | None) -> np.ndarray:
        """The mask of all replicas of this process."""
        return np.concatenate([np.asarray(part) for part in self._parts(mask)])

    def _parts(self, mask: int | None) -> list[Any]:
        return [
            concrete(next(given.mask for given in ledger.given.all if given.mask_leaf == mask))
            for ledger in self._run.ledgers
        ]


def _sources_of(value: Any) -> set[int] | None:
    """The leaves of the call with rows from which `value` was computed; None if that cannot be seen."""
    inputs = _jax.inputs_of(value)
    if not all(isinstance(x, EagerArray) for x in inputs):
        return None
    return {leaf for x in inputs for leaf in x.given}


def _thread_like_this_one() -> Callable[[], None]:
    """What a new thread does first, so that code on it finds what it would find on this one."""
    apply_settings = _jax.thread_settings()
    creators, overlays = list(_context.thread.creators), list(_context.thread.overlays)

    def enter() -> None:
        apply_settings()
        _context.thread.creators[:] = creators
        _context.thread.overlays[:] = overlays

    return enter


def _component(value: Any, ledger: EagerLedger, label: str) -> Any:
    """A replica's part of a per-replica argument or of its mask, padding included."""
    if isinstance(value, PerReplica) and value.form != PARTS:
        value = host.check_replicas(RUN, ledger.run.placement, value, f"argument {label}")
    if not isinstance(value, PerReplica):
        parts: Sequence[Any] = _blocks(value)
    elif value.form == PARTS:
        parts = parts_of(value)
    else:
        parts = [block.reshape(block.shape[1:]) if value.form == STACKED else block for block in _blocks(value.data)]
    if len(parts) != len(ledger.run.ledgers):
        raise _errors.wrong_number_of_components(f"argument {label}", len(parts), len(ledger.run.ledgers))
    return parts[ledger.index]


def _gatherable(shapes: Sequence[tuple[int, ...]], axis: int, dtype: Any) -> Sequence[tuple[int, ...]]:
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        what = "rank" if len({len(shape) for shape in shapes}) > 1 else "shape"
        raise _errors.gather_shapes(what, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    return shapes


def _canonical(name: str | None) -> str:
    """``dense_1/kernel_2`` → ``dense/kernel``: the name without the numbers that made it unique."""
    return re.sub(r"_\d(?=/|$)", "", name or "Variable")


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and fits_device(x.dtype)


def _all_equal(parts: Sequence[Any]) -> bool:
    if all(isinstance(part, (np.ndarray, np.generic)) for part in parts):
        return same_bits(parts)
    return all(equal(part, parts[0]) for part in parts)
