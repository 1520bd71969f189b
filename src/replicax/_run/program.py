"""How does a step become one compiled program that costs what hand-written `jit(shard_map)` costs?

A program belongs to one function of one strategy. It holds one `jax.jit` function, whose arguments are the arrays of the
variables the step writes (donated), those it only reads, and the user's arguments. JAX's own dispatch, in C++, tells
shapes apart; Python is asked again only for a call of a kind that was never seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from replicax import _context, _errors, _jax
from replicax._context import Kind
from replicax._given import Alike, refuse_averaged, refuse_unlike
from replicax._host import dispatch_lock
from replicax._locality import warn_user
from replicax._placement import Placement
from replicax._run import arguments, central, emit, kept, trace
from replicax._run.captured import Captured
from replicax._run.trace import Memory, Step
from replicax._values import PerReplica, _blocks, uniform
from replicax._variables import storage

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any

HOIST_ABOVE = 64
"""Constants with more elements than this become arguments, so that XLA does not compile them in."""

MANY_TRACES = 8
"""After this many traces of one function the user is told what keeps changing."""


class _Unseen(Exception):
    """The compiled function was called with arguments of a kind that was never traced."""


_TROUBLES = (_Unseen, ValueError, TypeError, OverflowError, RuntimeError)
"""What a compiled function raises before or instead of doing its work: about its arguments, most of the time."""


class Program:
    """One function under one strategy, traced and compiled as calls ask for it."""

    def __init__(
        self, strategy: Strategy, fn: Callable[..., Any], kind: Kind = Kind.REPLICA, donate: Sequence[int] = ()
    ) -> None:
        self.strategy = strategy
        self.placement: Placement = strategy.placement
        self.fn = fn
        self.kind = kind
        self.donate = tuple(donate)
        self.memory = Memory()
        self.captured = Captured()
        self._steps: dict[Any, Step] = {}
        self._written: list[Variable] = []
        self._read: list[Variable] = []
        self._hoisted: list[Any] = []
        self._constants: list[Any] = []
        self._compiled: Any = _unseen
        self._simple = True
        """Whether the variables' arrays go in and out as they are and nothing about the arguments needs looking at."""
        self._divided = self.placement.apart
        """Whether the update is carried out by a program of its own, where the variables are."""
        self._returns_statics = False
        self._minds_padding = False
        self._exports = -1

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatch_lock:
            if self._minds_padding:
                self._look_at_masks(args, kwargs)
            if (
                self._exports != storage.Exports.count
                or not self._simple
                or _jax.trace_context.trace is not _jax.no_trace
            ):
                return self._call_with_care(args, kwargs)
            try:
                new, out = self._compiled(
                    [v._array for v in self._written], (), [v._array for v in self._read], self._constants, args, kwargs
                )
            except _TROUBLES as error:
                trouble = error
            else:
                for variable, array in zip(self._written, new, strict=False):
                    variable._array = array
                return _with_statics(out) if self._returns_statics else out
            return self(*self._overcome(trouble, args, kwargs))

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        """The program for these arguments, before XLA compiles it."""
        with dispatch_lock:
            if self._key(*jax.tree.flatten((args, kwargs))) not in self._steps:
                self._learn(args, kwargs)
            donated, args = self._split_donated(args)
            return self._compiled.lower(
                self._brought(self._written), donated, self._brought(self._read),
                self._constants, args, kwargs,
            )  # fmt: skip

    # -- the slower ways in and out

    def _call_with_care(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `__call__`, for variables that were handed out or rest elsewhere, donated arguments, padded batches, and calls
        from inside a transformation."""
        _refuse_foreign_trace(self._written, self._read)
        self._take_back_exports()
        donated, rest = self._split_donated(args)
        if self.donate:
            arguments.refuse_donated_twice(self.fn, donated, (args, kwargs))
            storage.release(donated)
        try:
            new, out = self._compiled(
                self._brought(self._written), donated, self._brought(self._read),
                self._constants, rest, kwargs,
            )  # fmt: skip
        except _TROUBLES as error:
            trouble = error
        else:
            _delete(donated)
            for variable, array in zip(self._written, new, strict=True):
                if isinstance(array, Tracer):
                    raise _errors.assigned_under_transformation(variable)
            for variable, array in zip(self._written, new, strict=True):
                self._send(variable, array)
            if self._divided:
                return central.finish(out, self.placement)
            return _with_statics(out) if self._returns_statics else out
        return self(*self._overcome(trouble, args, kwargs))

    def _overcome(self, trouble: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Does what is needed for the same call to go through: traces it, or moves its arguments to our devices."""
        if isinstance(trouble, _Unseen):
            self._learn(args, kwargs)
            return args, kwargs
        arguments.refuse_unusable(self.fn, args, kwargs, trouble)
        for variable in [*self._written, *self._read]:
            if not isinstance(variable._array, Tracer) and variable._array.is_deleted():
                raise _errors.variable_without_value(variable) from trouble
        return self._placed(args, kwargs, trouble)

    def _rests_here(self, variable: Variable) -> bool:
        return variable.placement.mesh is self.placement.mesh and not variable.placement.apart

    def _brought(self, variables: Sequence[Variable]) -> list[Any]:
        """The arrays of variables on the replicas' devices; what rests elsewhere is copied in one go."""
        away = [variable for variable in variables if not self._rests_here(variable)]
        if not away:
            return [variable._array for variable in variables]
        on_read = next((variable for variable in away if variable.on_read), None)
        if on_read is not None:
            raise _errors.on_read_of_other_strategy(on_read, self.strategy)
        copies = jax.device_put([variable._array for variable in away], self.placement.mirrored)
        copy_of = dict(zip(away, copies, strict=True))
        return [copy_of.get(variable, variable._array) for variable in variables]

    def _send(self, variable: Variable, array: Any) -> None:
        if not self._rests_here(variable):
            array = jax.device_put(array, variable.strategy.rest_sharding(variable))
        variable._array = array

    def _take_back_exports(self) -> None:
        """Arrays that were handed out are copied before the next step donates them."""
        for variable in self._written:
            storage.unshare(variable)
        self._exports = storage.Exports.count

    def _split_donated(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        if not self.donate:
            return (), args
        if not all(0 <= i < len(args) for i in self.donate):
            raise _errors.donated_position(self.donate, len(args))
        donated = tuple(_with_masks(args[i], itertools.repeat(None)) for i in self.donate)
        return donated, tuple(_masks(arg) if i in self.donate else arg for i, arg in enumerate(args))

    def _join_donated(self, donated: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        joined = list(args)
        for i, arg in zip(self.donate, donated, strict=True):
            joined[i] = _with_masks(arg, iter(joined[i]))
        return tuple(joined)

    def _placed(self, args: PyTree, kwargs: PyTree, error: Exception) -> tuple[Any, Any]:
        """The arguments once more, mirrored over the replicas' devices, if their devices were the trouble."""
        if "incompatible devices" not in str(error):
            raise error
        mirrored, here = self.placement.mirrored, set(self.placement.mesh.devices.flat)

        def place(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):
                return leaf  # it does lie here, or it would not have come so far
            if isinstance(leaf, jax.Array) and set(leaf.devices()) != here:
                return jax.device_put(leaf, mirrored)
            return leaf

        before = (args, kwargs)
        after = jax.tree.map(place, before, is_leaf=lambda x: isinstance(x, PerReplica))
        if all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)):
            raise error
        return after

    def _look_at_masks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses batches whose padding this step would count as data."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        step = self._steps.get(self._key(leaves, tree))
        if step is None or not (step.averaged or step.alike):
            return
        size = len(leaves) // step.times
        for batch in (leaves[i : i + size] for i in range(0, len(leaves), size)):
            if step.averaged is not None:
                self._refuse_padding(step.averaged, batch)
            for group in step.alike:
                self._refuse_unlike(group, batch)

    def _refuse_padding(self, averaged: trace.Averaged, leaves: list[Any]) -> None:
        asked = [leaves[i] for i in averaged.asked]
        for number, rows in averaged.masks:
            if not any(leaves[number] is mask for mask in asked):
                refuse_averaged(self.fn, averaged.site, rows, _here(leaves[number]))

    def _refuse_unlike(self, group: Alike, leaves: list[Any]) -> None:
        masks = [None if i is None else leaves[i] for i in group.masks]
        if all(mask is masks[0] for mask in masks) or any(isinstance(mask, Tracer) for mask in masks):
            return
        here = [None if mask is None else _here(mask) for mask in masks]
        refuse_unlike(self.fn, group, here, len(self.placement.local_replicas))

    # -- calls of a new kind

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Traces the function for arguments like these and makes room for the variables it turned out to use."""
        arguments.refuse_unusable(self.fn, args, kwargs)
        arguments.refuse_misfits(self.placement, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        made = len(self.memory.created)
        try:
            whole = self._trace(args, kwargs)
            if whole.times == 1 and not self._divided:
                whole = dataclasses.replace(whole, layouts=kept.layouts(whole, self.placement, args, kwargs))
            self._take_in(whole, leaves, tree)
            if whole.created:
                self._initialise(whole, leaves)
                for hook in _context.creation_hooks:
                    hook()
        except BaseException:
            self._abandon(made)
            raise

    def _abandon(self, made: int) -> None:
        """Forgets the variables of a first call that failed. Those that were to start from traced values have none."""
        for variable in self.memory.created[made:]:
            if variable in self.memory.awaited:
                variable._array.delete()
        del self.memory.created[made:]

    def _take_in(self, whole: Step, leaves: list[Any], tree: Any) -> None:
        """Makes room for the variables of a step that has been traced, and for its constants."""
        _refuse_foreign_trace(whole.written, whole.variables)
        self.captured = Captured(self.fn)
        step = central.cut(whole, self.placement) if self._divided else whole
        self._steps[self._key(leaves, tree)] = step
        if len(self._steps) == MANY_TRACES:
            warn_user(_errors.many_traces(self.fn, list(self._steps)))
        self._returns_statics |= any(result.output is None for result in step.results)
        self._minds_padding |= step.averaged is not None or bool(step.alike)
        written = dict.fromkeys([*self._written, *step.written])
        read = [v for v in dict.fromkeys([*self._read, *step.variables]) if v not in written]
        grown = len(written) != len(self._written) or read != self._read
        self._written, self._read = list(written), read
        resting = all(self._rests_here(v) for v in [*self._written, *self._read])
        self._simple = resting and not self.donate and not self._divided
        if self._hoist(step) or grown or self._compiled is _unseen:
            self._compiled = self._build()
        self._take_back_exports()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        return trace.trace(self.strategy, self.fn, self.kind, args, kwargs, self.memory)

    def _hoist(self, step: Step) -> bool:
        known = {id(constant) for constant in self._hoisted}
        new = [s.item for s in step.sources if _is_large(s) and id(s.item) not in known]
        self._hoisted += new
        with _jax.on_host():
            self._constants += [jax.device_put(constant, self.placement.mirrored) for constant in new]
        return bool(new)

    def _key(self, leaves: list[Any], tree: Any) -> Any:
        avals = [arguments.aval(leaf) for leaf in leaves]
        return tree, tuple((a.shape, a.dtype, a.weak_type) for a in avals)

    def _build(self) -> Any:
        def entry(
            written: list[Any], donated: tuple[Any, ...], read: list[Any], constants: list[Any], args: Any, kwargs: Any
        ) -> tuple[list[Any], Any]:
            if _jax.trace_context.trace is _jax.no_trace:
                # JAX found a NaN and calls this as plain Python, to see where it comes from. `_run` finds it better.
                raise FloatingPointError("a value that is not a number")
            leaves, tree = jax.tree.flatten((self._join_donated(donated, args), kwargs))
            step = self._steps.get(self._key(leaves, tree))
            if step is None:
                raise _Unseen
            arrays = dict(zip([*self._written, *self._read], [*written, *read], strict=True))
            return self._emit(step, arrays, constants, leaves)

        entry.__name__ = entry.__qualname__ = getattr(self.fn, "__name__", type(self.fn).__name__)
        return jax.jit(entry, donate_argnums=(0, 1))

    def _emit(self, step: Step, arrays: dict[Variable, Any], constants: list[Any], leaves: list[Any]) -> Any:
        values, cut = self._inputs(step, arrays, constants, leaves)
        results, new = emit.run(step, self.placement, values, cut)
        return self._finished(step, arrays, results, new, leaves)

    def _finished(
        self, step: Step, arrays: dict[Variable, Any], results: list[Any], new: list[Any], leaves: list[Any]
    ) -> Any:
        """What the compiled function hands back: the variables' arrays, and the results in the user's structure."""
        new_of = dict(zip(step.written, new, strict=True))
        results = [
            self._apart(array) if step.spreads(i)
            else lax.with_sharding_constraint(array, step.layouts[i]) if i in step.layouts
            else array
            for i, array in enumerate(results)
        ]  # fmt: skip
        return (
            [self._at_rest(v, new_of.get(v, arrays[v])) for v in self._written],
            jax.tree.unflatten(step.tree, [_result(step, r, results, leaves) for r in step.results]),
        )

    def _inputs(
        self, step: Step, arrays: dict[Variable, Any], constants: list[Any], leaves: list[Any]
    ) -> tuple[list[Any], list[bool]]:
        """One array for each source of the step, and whether it is cut over the replicas."""
        hoisted = {id(item): array for item, array in zip(self._hoisted, constants, strict=True)}
        values, cut = [], []
        for source in step.sources:
            match source.kind:
                case trace.VARIABLE:
                    values.append(arrays[source.item])
                    cut.append(source.item.on_read)
                case trace.ARGUMENT:
                    values.append(leaves[source.item])
                    cut.append(source.item in step.cut_arguments)
                case _:
                    values.append(hoisted.get(id(source.item), source.item))
                    cut.append(False)
        return values, cut

    def _initialise(self, step: Step, leaves: list[Any]) -> None:
        """Computes, once, the first values of variables that the step made."""
        arrays = dict(zip(step.variables, self._brought(step.variables), strict=True))
        values, cut = self._inputs(step, arrays, self._constants, leaves)
        program = jax.jit(lambda values: emit.initial_values(step, self.placement, values, cut))
        for variable, value in zip(step.created, program(values), strict=True):
            storage.host_write(variable, value)
            self.memory.awaited.discard(variable)

    def _at_rest(self, variable: Variable, array: Any) -> Any:
        """Leaves a variable in its own layout, where XLA might choose another one."""
        if variable.on_read:
            return self._apart(array)
        sharding = variable.strategy.rest_sharding(variable)
        free = bool(self.placement.auto_axes) or not sharding.is_fully_replicated
        return lax.with_sharding_constraint(array, sharding) if free and self._rests_here(variable) else array

    def _apart(self, array: Any) -> Any:
        """Gives each device of a replica the replica's whole block of a per-replica value."""
        return lax.with_sharding_constraint(array, self.placement.split) if self.placement.auto_axes else array


def _masks(tree: PyTree) -> list[Any]:
    """The validity masks of an argument. All leaves of a batch share one, so it is not donated with them."""
    return [leaf.mask for leaf in jax.tree.leaves(tree, is_leaf=arguments.is_special) if isinstance(leaf, PerReplica)]


def _with_masks(tree: PyTree, masks: Iterator[Any]) -> PyTree:
    """An argument with these masks in place of its own."""

    def one(leaf: Any) -> Any:
        return PerReplica(leaf.data, leaf.form, next(masks)) if isinstance(leaf, PerReplica) else leaf

    return jax.tree.map(one, tree, is_leaf=arguments.is_special)


def _delete(donated: Any) -> None:
    """Makes donated arrays say that they are gone. Their buffers are, but handed to JAX again, such an array of several
    devices ends the process (jax 0.10)."""
    for leaf in jax.tree.leaves(donated):
        if type(leaf) is _jax.ConcreteArray:
            leaf.delete()


def _refuse_foreign_trace(written: Sequence[Variable], read: Sequence[Variable]) -> None:
    """A `jax.jit` around the run would take the variables' values for constants and leave its own arrays in them."""
    if (written or read) and _jax.is_staging():
        raise _errors.foreign_jit((*written, *read)[0], "assign" if written else "read")


def _unseen(*args: Any) -> Any:
    raise _Unseen


def _here(mask: jax.Array) -> np.ndarray:
    """The part of a mask that is about the replicas of this process."""
    return np.concatenate([np.asarray(block) for block in _blocks(mask)])


def _is_large(source: Any) -> bool:
    return source.kind == trace.CONSTANT and getattr(source.item, "size", 0) > HOIST_ABOVE


def _result(step: Step, result: Any, arrays: list[Any], leaves: list[Any]) -> Any:
    if result.output is None:
        return arguments.Static(result.static)
    array = arrays[result.output]
    if not step.spreads(result.output):
        return array
    mask = step.row_masks[result.output]
    form = uniform(step.jaxpr.outvars[result.output].aval.shape)
    return PerReplica(array, form, None if mask is None else leaves[mask])


def _with_statics(out: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, arguments.Static) else leaf, out, is_leaf=arguments.is_special
    )
