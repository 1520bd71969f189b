"""How do K steps become one program? `Strategy.run_steps`: a loop whose carry is the variables that a step writes.

A step on a small model takes less time than it takes Python to start it. The loop reads K batches, stacks them inside
the program and scans over them, so that Python is asked once.
"""

# Why is what was proven for one step true for K?
#
# The analysis of a step takes it that mirrored variables are equal everywhere before the step and proves that they
# are equal after it. So they are after the next one.
#
# Why are the batches stacked inside the program, not before it?
#
# Outside, a stack of K arrays that lie on several devices is a program of its own, and a copy. Inside, each replica
# stacks its own blocks, and batches that are on the devices already stay there.

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _context, _jax
from replicax._errors import ContextError, InputError, LocalityError, OutOfRangeError, message
from replicax._options import ReduceOp, VariableAggregation, is_count
from replicax._placement import AXIS, Placement
from replicax._run import arguments, emit, trace
from replicax._run.program import Program
from replicax._run.trace import Step
from replicax._values import PARTS, PerReplica, of_first

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any
_DIRECT = arguments.DIRECT


class UnreducedOutputError(LocalityError, AssertionError):
    """An output set inside a replica without saying how the replicas' values become one."""


class MultiStepContext:
    """What a step of `strategy.run_steps` tells the program around it; also what `run_steps` returns.

    Of outputs that are set in each step the last one survives.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> def step(context, rows):
    ...     total = strategy.run(lambda rows: rows.sum(), (rows,))
    ...     context.set_last_step_output("total", total, "sum")
    >>> dataset = strategy.distribute_dataset([np.array([1, 2]), np.array([3, 4])])
    >>> print(strategy.run_steps(step, iter(dataset), steps=2).last_step_outputs["total"])
    7
    """

    def __init__(self) -> None:
        self._outputs: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    @property
    def run_op(self) -> None:
        """Nothing is left to be carried out when `run_steps` has returned. Kept for callers of tf.distribute."""

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """By name: what the last step set, combined over the replicas if it was set with an op."""
        return self._outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """By name: Python objects."""
        return self._objects

    def set_last_step_output(
        self,
        name: str,
        output: PyTree,
        reduce_op: ReduceOp | VariableAggregation | str | None = None,
        *,
        aggregation: VariableAggregation | str | None = None,
    ) -> None:
        """Makes `output` known as ``last_step_outputs[name]``.

        Across replicas it may stay a value per replica. Inside a replica, where all replicas call this, `reduce_op`
        says how their values become one. `aggregation` is its name in 2018; it may also be ONLY_FIRST_TOWER.
        """
        op = _parse(reduce_op if reduce_op is not None else aggregation)
        mode = _context.current()
        replica = _context.get_replica_context() if mode is None or mode.replica is not None else None
        if replica is None:
            strategy = _context.get_strategy()
            self._outputs[name] = output if op is None else _combined(strategy, op, output)
            return
        if op is None:
            raise _unreduced(name)

        def merge(strategy: Strategy, output: PyTree) -> None:
            self._outputs[name] = _combined(strategy, op, output)

        replica.merge_call(merge, (jax.tree.map(jnp.asarray, output),))

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Makes the Python object `output` known as ``non_tensor_outputs[name]``.

        From inside a replica it becomes a list: of one entry if all replicas set the same object, else one for each.
        """
        mode = _context.current()
        replica = _context.get_replica_context() if mode is None or mode.replica is not None else None
        if replica is None:
            self._objects[name] = output
            return

        def merge(strategy: Strategy, output: Any) -> None:
            each = strategy.experimental_local_results(output) if isinstance(output, PerReplica) else [output]
            self._objects[name] = list(each)

        replica.merge_call(merge, (output,))

    def _set_last_step_outputs(self, outputs: dict[str, Any]) -> None:
        if not isinstance(outputs, dict):
            raise ValueError(f"Need a dictionary to set last_step_outputs, got {type(outputs).__name__}.")
        self._outputs = outputs


_Combining = ReduceOp | Literal[VariableAggregation.ONLY_FIRST_REPLICA]


def _parse(word: Any) -> _Combining | None:
    """How replicas' outputs become one; None if they should not."""
    if isinstance(word, str) and word.upper() not in ReduceOp.__members__:
        word = VariableAggregation.__members__.get(word.upper(), word)
    if word is None or word is VariableAggregation.NONE:
        return None
    if word is VariableAggregation.ONLY_FIRST_REPLICA:
        return word
    return ReduceOp.from_variable_aggregation(word) if isinstance(word, VariableAggregation) else ReduceOp.parse(word)


def _combined(strategy: Strategy, how: _Combining, output: PyTree) -> PyTree:
    return strategy.reduce(how, output) if isinstance(how, ReduceOp) else of_first(output)


def run_steps(
    strategy: Strategy,
    fn: Callable[..., Any],
    iterator: Iterator[Any],
    steps: int,
    initial_loop_values: dict[str, Any] | None,
) -> MultiStepContext:
    """Calls ``fn(context, *inputs)`` for the next `steps` elements, in one program."""
    call = "strategy.run_steps(...)"
    mode = _context.require_cross(strategy, call)
    if mode is not None and mode.ledger is not None:
        raise ContextError(
            message(
                f"`{call}` was called inside a run",
                why="It reads batches, which happens on the host, and the step under way is being compiled.",
                instead=["call it between steps, from ordinary code", "loop inside the step: `jax.lax.scan`"],
            )
        )
    if not is_count(steps):
        raise _no_count(steps)
    if not callable(fn):
        raise _no_function(fn)
    context = MultiStepContext()
    context._outputs |= initial_loop_values or {}
    read = _reader(iterator)
    if strategy.eager or _jax.jit_disabled():
        with strategy.scope():
            for done in range(steps):
                fn(context, *_next(read, done, steps))
        return context
    batches, end = _take(strategy.placement, read, steps)
    if batches:
        for outputs, objects in _carried_out(strategy, fn, batches):
            context._outputs |= outputs
            context._objects |= objects
    if end is not None:
        raise end
    return context


def _carried_out(strategy: Strategy, fn: Callable[..., Any], batches: tuple[Any, ...]) -> Iterator[Any]:
    """What each program returned: one program, unless the batches are of several kinds."""
    loop = strategy.loops.find(fn)
    try:
        yield loop(batches, {})
    except _Mixed as mixed:
        for group in mixed.groups:
            yield loop(group, {})


class _Mixed(Exception):
    """The batches cannot be one program: they differ in structure, shape or type. `groups` can be one each."""

    def __init__(self, groups: list[tuple[Any, ...]]) -> None:
        self.groups = groups


class Loop(Program):
    """A program whose arguments are K batches, each the inputs of one step."""

    def __init__(self, strategy: Strategy, fn: Callable[..., Any], *rest: Any) -> None:
        super().__init__(strategy, _with_context(fn), *rest)
        self._divided = False  # for the length of the loop, variables that rest elsewhere stay with the replicas
        self._known: dict[Any, Step] = {}

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        if self.placement.parameter_device is not None and len(args) > 1:
            raise _Mixed([(batch,) for batch in args])  # an update that happens elsewhere ends a program
        keys = [self._key(*jax.tree.flatten(batch)) for batch in args]
        if any(key != keys[0] for key in keys):
            pairs = itertools.groupby(zip(keys, args, strict=True), key=lambda pair: pair[0])
            raise _Mixed([tuple(batch for _, batch in group) for _, group in pairs])
        first, *_ = list(args)
        step = self._known.get(keys[0])
        if step is None:
            step = self._known[keys[0]] = super()._trace(first, kwargs)
        return dataclasses.replace(step, times=len(args))

    def _emit(self, step: Step, arrays: dict[Variable, Any], constants: list[Any], leaves: list[Any]) -> Any:
        if step.times == 1:
            return super()._emit(step, arrays, constants, leaves)
        size = len(leaves) // step.times
        columns = [tuple(leaves[i::size]) for i in range(size)]
        values, cut = self._inputs(step, arrays, constants, columns)
        written = [arrays[variable] for variable in step.written]
        results, new = _repeat(step, self.placement, values, cut, written)
        return self._finished(step, arrays, results, new, leaves[-size:])

    def _initialise(self, step: Step, leaves: list[Any]) -> None:
        super()._initialise(step, leaves[: len(leaves) // step.times])


def _repeat(
    step: Step, placement: Placement, values: Sequence[Any], cut: Sequence[bool], written: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Carries out `step` for each batch: the last one's results, and the new values of the variables.

    Args:
      values: One for each of the step's sources: an array, or the K arrays of a part of the batches.
      cut: Which of them are laid over the replicas along axis 0.
      written: The arrays of the variables that the step writes.
    """
    function = emit.local(step)
    outputs = len(step.differs)
    on_read = [variable.on_read for variable in step.written]
    carried = {variable: i for i, variable in enumerate(step.written)}
    blank = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in step.jaxpr.outvars[:outputs]]

    def body(written: list[Any], *inputs: Any) -> tuple[list[Any], list[Any]]:
        batches = [jnp.stack(x) if isinstance(x, tuple) else None for x in inputs]

        def one(carry: Any, batch: list[Any]) -> tuple[Any, None]:
            now, _ = carry
            outs = function(*map(choose, step.sources, inputs, batch, itertools.repeat(now)))
            return _like(carry, (_components(outs[outputs:], on_read), outs[:outputs])), None

        def choose(source: trace.Source, given: Any, part: Any, now: list[Any]) -> Any:
            if source.kind == trace.VARIABLE and source.item in carried:
                return now[carried[source.item]]
            return given if part is None else part

        (new, results), _ = lax.scan(one, (written, blank), batches, length=step.times)
        return [x[None] if step.spreads(i) and x.ndim == 0 else x for i, x in enumerate(results)], new

    spread = [step.spreads(i) for i in range(outputs)]
    state = [emit.CUT if per_replica else emit.WHOLE for per_replica in on_read]
    return jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=(state, *[emit.CUT if c else emit.WHOLE for c in cut]),
        out_specs=([emit.CUT if s else emit.WHOLE for s in spread], state),
        check_vma=False,
        axis_names={AXIS},
    )(list(written), *values)


def _components(arrays: list[Any], on_read: list[bool]) -> list[Any]:
    """New values as they rest: a component with its replica axis."""
    return [x[None] if per_replica else x for x, per_replica in zip(arrays, on_read, strict=True)]


def _like(carry: PyTree, new: PyTree) -> PyTree:
    """`new` without weak types, which a loop's carry must not change to."""
    return jax.tree.map(lambda old, x: lax.convert_element_type(x, old.dtype), carry, new)


def _with_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a function of the batch alone that returns what it told its context."""

    @functools.wraps(fn)
    def step(*inputs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        context = MultiStepContext()
        fn(context, *inputs)
        return context._outputs, context._objects

    try:  # messages name an argument by the parameter that takes it
        signature = inspect.signature(fn)
        step.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore
    except (TypeError, ValueError):  # a callable that tells nothing about its parameters
        pass
    return step


# -- reading


def _reader(iterator: Any) -> Callable[[], Any]:
    """What gives the next element, whatever the iterator calls it."""
    if hasattr(iterator, "__next__"):
        return iterator.__next__
    if hasattr(iterator, "get_next"):
        return iterator.get_next
    raise InputError(
        message(
            f"`strategy.run_steps(fn, {type(iterator).__name__}, ...)` needs an iterator",
            why="A dataset would begin anew at each call. An iterator knows where the last call ended.",
            instead=["make one, before the loop: `iterator = iter(dataset)`"],
        )
    )


def _next(read: Callable[[], Any], done: int, steps: int) -> tuple[Any, ...]:
    """The inputs of the next step. A tuple is several inputs, anything else is one."""
    try:
        element = read()
    except (StopIteration, OutOfRangeError) as error:
        raise _ended(done, steps) from error
    return element if isinstance(element, tuple) else (element,)


def _take(placement: Placement, read: Callable[[], Any], steps: int) -> tuple[tuple[Any, ...], OutOfRangeError | None]:
    """The next batches, at most `steps`, and the error to raise once they were used if there were fewer."""
    batches: list[Any] = []
    for done in range(steps):
        try:
            inputs = _next(read, done, steps)
        except OutOfRangeError as end:
            return tuple(batches), end
        for leaf in inputs:
            if type(leaf) not in _DIRECT or type(leaf) is PerReplica and leaf.form == PARTS:
                inputs, _, _ = arguments.prepared(placement, inputs, {})
                break
        batches.append(inputs)
    return tuple(batches), None


# -- errors


def _unreduced(name: str) -> UnreducedOutputError:
    call = f"`context.set_last_step_output({name!r}, output)`"
    return UnreducedOutputError(
        message(
            f"{call} inside a replica does not say how the replicas' outputs become one",
            why="Each replica has an output of its own, and the context keeps one value under this name.",
            instead=[
                f'`context.set_last_step_output({name!r}, output, "mean")`, or `"sum"`',
                "keep a value for each replica: return it from the step, and set it in the code that calls "
                "`strategy.run`",
            ],
        )
    )


def _no_count(steps: Any) -> InputError:
    why = "It takes at least one step, and the number shapes the program."
    return InputError(message(f"`strategy.run_steps(fn, iterator, steps={steps!r})` takes a number of steps", why=why))


def _no_function(fn: Any) -> InputError:
    way = "`def step(context, *inputs): strategy.run(replica_step, inputs)`"
    return InputError(
        message(f"`strategy.run_steps({type(fn).__name__}, ...)` needs a function to call", instead=[way])
    )


def _ended(done: int, steps: int) -> OutOfRangeError:
    return OutOfRangeError(
        message(
            f"`strategy.run_steps(fn, iterator, steps={steps})` came to the end of the data after {done} steps",
            why="The steps before it were carried out, and their updates are in the variables.",
            instead=["begin again: `iterator = iter(dataset)`", "let the data repeat without end"],
        )
    )
