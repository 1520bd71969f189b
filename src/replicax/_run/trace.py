"""How does a user's function become data? It is traced once, into a `Step`.

The user writes a function for one replica and reads and assigns variables in it as plain objects. A `Step` is what
remains of it: a jaxpr of one replica's work, where each of its inputs comes from, which variables it writes, and which of its
results differ between replicas. `program.py` makes a compiled program of it.
"""

# Why `check_vma=False` and an analysis of our own?
#
# With the checks that shard_map brings, JAX sums the gradient of a mirrored weight over the replicas by itself, silently,
# so that a step which reduces its gradients (as every tf.distribute step does) would count them twice. And it refuses to
# return a value as mirrored that plain Optax computed, because it knows no proof. Without the checks gradients
# are local, as users expect, and nothing is proven: JAX takes one replica's copy of a wrong result silently. So
# `_locality` walks the jaxpr and is the only guard. The jaxpr that was analysed is the one that runs:
# it is evaluated inside a second `shard_map`, and the user's code is never called again.

from __future__ import annotations

import dataclasses
import re
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context, _errors, _jax, _locality
from replicax._context import Kind, Mode, ReplicaContext
from replicax._given import Alike, Given, padded
from replicax._ledger import Restart, TracedLedger
from replicax._placement import AXIS
from replicax._run import arguments
from replicax._values import ROWS, STACKED, TRACED, PerReplica, is_per_replica

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable

PyTree = Any
_CONCRETE_NEEDED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)
VARIABLE, ARGUMENT, CONSTANT = "variable", "argument", "constant"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one input of the jaxpr comes from: a variable, an argument by position, or a constant."""

    kind: str
    item: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """One leaf of what the function returned: a Python object, or an array by its position among the outputs."""

    static: Any = None
    output: int | None = None


@dataclasses.dataclass(frozen=True)
class Averaged:
    """Padding that counts as data, in a step given a short batch."""

    site: _locality.Site
    masks: tuple[tuple[int, int], ...]
    """Of each argument whose rows were combined: the number of its mask among the leaves, and its rows."""
    asked: frozenset[int]
    """The masks that were asked for. Arguments that share one of them are taken care of."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step: pure, for one replica, in terms of arrays."""

    jaxpr: Any
    sources: tuple[Source, ...]
    results: tuple[Result, ...]
    tree: Any
    cut_arguments: frozenset[int]
    """The argument leaves that are laid over the replicas."""
    written: tuple[Variable, ...]
    """Their new values are the last outputs of the jaxpr."""
    differs: tuple[bool, ...]
    """For each output that is a result: whether it differs between replicas."""
    wrapped: tuple[bool, ...]
    """Likewise: whether cross-replica code returned it as a `PerReplica`, which it stays whatever the analysis says."""
    mirrored_reduces: frozenset[int]
    row_masks: tuple[int | None, ...]
    """For each result: the argument leaf that holds its validity mask, if it still has the row axis."""
    averaged: Averaged | None
    """Rows that were combined although nobody asked which of them are real."""
    alike: tuple[Alike, ...]
    """Arguments that must be padded alike."""

    layouts: Mapping[int, NamedSharding] = dataclasses.field(default_factory=dict)
    """How results lie that are the next state of an argument, by their output's number; see `kept.py`."""
    times: int = 1
    """How often one program carries it out, each time for another batch."""
    created: tuple[Variable, ...] = ()
    """Variables that this trace made from traced values ..."""
    initial: Any = None
    """... and the part of the step that computes those values."""

    def spreads(self, output: int) -> bool:
        """Whether result `output` is laid over the replicas."""
        return self.differs[output] or self.wrapped[output]

    @property
    def variables(self) -> list[Variable]:
        seen = dict.fromkeys(source.item for source in self.sources if source.kind == VARIABLE)
        return list(seen | dict.fromkeys(self.written))


def trace(strategy: Strategy, fn: Callable[..., Any], kind: Kind, args: Any, kwargs: Any, memory: Memory) -> Step:
    """Calls `fn` once, on abstract values, and analyses what it did."""
    for check in arguments.checks:
        check(fn, (args, kwargs))
    leaves, tree = jax.tree.flatten((args, kwargs))
    in_specs = arguments.specs(tree)
    avals = [arguments.aval(leaf) for leaf in leaves]
    while True:
        recording = _Recording(strategy, fn, kind, tree, memory)
        try:
            closed = jax.make_jaxpr(
                jax.shard_map(
                    _called_as(fn, recording.body),
                    mesh=strategy.placement.mesh,
                    in_specs=(in_specs,),
                    out_specs=PartitionSpec(),
                    check_vma=False,
                    axis_names={AXIS},
                )
            )(avals)
            break
        except Restart as restart:
            memory.referenced.add(restart.variable)
        except (TypeError, IndexError, NameError, ValueError) as error:
            explained = _explained(fn, error)
            if explained is None:
                raise
            raise explained from error
    return recording.step(closed, in_specs)


def _called_as(fn: Callable[..., Any], body: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """`body`, which JAX's messages then name as the user's function."""

    def call(leaves: list[Any]) -> list[Any]:
        return body(leaves)

    if isinstance(fn, (types.FunctionType, types.MethodType)):
        call.__wrapped__ = fn  # type: ignore[attr-defined]
    return call


def _explained(fn: Callable[..., Any], error: Exception) -> Exception | None:
    """What JAX says about a step that cannot be traced, with what to write instead; None for what needs no more words."""
    text, site = str(error), site_of(error)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return _errors.leaked(fn, site, next(iter(_MADE_AT.findall(text)), ""))
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return _errors.boolean_index(fn, error, site)
    if isinstance(error, NameError) and "unbound axis name" in text:
        return _errors.unknown_axis(fn, error, site)
    if isinstance(error, ValueError) and "context mesh" in text:
        return _errors.devices_of_its_own(fn, error, site)
    if isinstance(error, TypeError) and "Tracer.__format__" in text:
        return _errors.formatted(fn, error, site)
    if isinstance(error, _CONCRETE_NEEDED) or isinstance(error, TypeError) and "concrete value" in text:
        return _errors.traced_value_used(fn, error, site)
    return None


_MADE_AT = re.compile(r"was created on line (\S+?:\d+)")


@dataclasses.dataclass
class Memory:
    """What one trace of a program leaves for the next: variables that need a Ref, variables that the step made."""

    referenced: set[Variable] = dataclasses.field(default_factory=set)
    created: list[Variable] = dataclasses.field(default_factory=list)
    awaited: set[Variable] = dataclasses.field(default_factory=set)
    """Those among them whose first value has not been computed yet."""


class _Recording:
    """One call of the user's function on tracers, and the ledger that was open meanwhile."""

    def __init__(self, strategy: Strategy, fn: Callable[..., Any], kind: Kind, tree: Any, memory: Memory) -> None:
        self.strategy = strategy
        self.fn = fn
        self.kind = kind
        self.tree = tree
        self.memory = memory

    def body(self, leaves: list[Any]) -> list[Any]:
        self.ledger = ledger = TracedLedger(
            self.strategy, _Recording.body.__code__, self.memory.referenced, self.memory.created, self.memory.awaited
        )
        args, kwargs = self._arguments(leaves)
        if self.kind is Kind.REPLICA:
            mode = Mode(self.strategy, self.kind, ledger, ReplicaContext(self.strategy, None, ledger))
        else:
            mode = Mode(self.strategy, self.kind, ledger)
        with _context.push(mode):
            out = self.fn(*args, **kwargs)
        arguments.refuse_unrun(self.fn, out)
        try:
            leaves, self.out_tree = jax.tree.flatten(out, is_leaf=is_per_replica)
        except ValueError as error:
            raise _errors.not_a_tree("a result", error) from error
        arrays: list[Any] = []
        self.wrapped: list[bool] = []
        self.results = [self._result(leaf, arrays) for leaf in leaves]
        self.outputs = len(arrays)
        self.written = tuple(ledger.writes)
        outputs = arrays + [ledger.final(v) for v in self.written] + list(ledger.initial.values())
        ledger.close()
        return outputs

    def _arguments(self, leaves: list[Any]) -> Any:
        """The local leaves as the function expects them, with the validity masks bound to the ledger."""

        def open_up(leaf: Any, numbers: Any) -> Any:
            if isinstance(leaf, arguments.Static):
                return leaf.value
            if not isinstance(leaf, PerReplica):
                return leaf
            if leaf.form == ROWS or leaf.mask is not None:
                label = labels[numbers.data]
                self.ledger.give(Given(numbers.data, leaf.data.shape[0], leaf.mask, numbers.mask, label), leaf.data)
            data = leaf.data[0] if leaf.form == STACKED else leaf.data
            return data if self.kind is Kind.REPLICA else PerReplica(data, TRACED)

        labels = arguments.names(self.fn, self.tree)
        tree = jax.tree.unflatten(self.tree, leaves)
        numbered = jax.tree.unflatten(self.tree, range(len(leaves)))
        return jax.tree.map(open_up, tree, numbered, is_leaf=arguments.is_special)

    def _result(self, leaf: Any, arrays: list[Any]) -> Result:
        if isinstance(leaf, PerReplica) and leaf.form != TRACED:
            return Result(static=leaf)  # made on the host: it is already what it shall be
        value = leaf.data if isinstance(leaf, PerReplica) else leaf
        if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
            arguments.refuse_hidden_arrays(self.fn, leaf)
            return Result(static=leaf)
        arrays.append(jax.numpy.asarray(value))
        self.wrapped.append(isinstance(leaf, PerReplica))
        return Result(output=len(arrays) - 1)

    def step(self, closed: Any, in_specs: list[PartitionSpec]) -> Step:
        (equation,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
        jaxpr = equation.params["jaxpr"]
        sources = self._sources(closed, equation)
        made = len(self.ledger.initial)
        initial = jaxpr.replace(outvars=jaxpr.outvars[-made:]) if made else None
        states = self._states(sources, in_specs)
        if self.strategy.placement.replicas == 1:
            differs, mirrored_reduces = (False,) * self.outputs, frozenset()
        else:
            analysis = _locality.analyse(jaxpr, states, self.strategy.placement.replicas)
            self._refuse(analysis)
            differs = tuple(_locality.origin_of(state) is not None for state in analysis.outs[: self.outputs])
            mirrored_reduces = analysis.mirrored_reduces
        if made:
            jaxpr = jaxpr.replace(outvars=jaxpr.outvars[:-made])
        row_masks, averaged = self._rows(jaxpr, sources)
        cut = frozenset(i for i, spec in enumerate(in_specs) if spec == PartitionSpec(AXIS))
        return Step(
            jaxpr=jaxpr,
            sources=tuple(sources),
            results=tuple(self.results),
            tree=self.out_tree,
            cut_arguments=cut,
            written=self.written,
            differs=differs,
            wrapped=tuple(self.wrapped),
            mirrored_reduces=mirrored_reduces,
            row_masks=row_masks,
            averaged=averaged,
            alike=tuple(self.ledger.given.alike),
            created=tuple(self.ledger.initial),
            initial=initial,
        )

    def _sources(self, closed: Any, equation: Any) -> list[Source]:
        arguments_at = {var: i for i, var in enumerate(closed.jaxpr.invars)}
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        sources = []
        for atom in equation.invars:
            if hasattr(atom, "val"):
                sources.append(Source(CONSTANT, atom.val))
            elif atom in arguments_at:
                sources.append(Source(ARGUMENT, arguments_at[atom]))
            else:
                value = constants[atom]
                if isinstance(value, Tracer) and _jax.trace_context.trace is _jax.no_trace:
                    raise _errors.leaked(self.fn, _first_use(equation, atom), str(_jax.made_at(value) or ""))
                known = self.ledger.stand_ins.get(id(value))
                sources.append(Source(VARIABLE, known[0]) if known else Source(CONSTANT, value))
        return sources

    def _states(self, sources: Sequence[Source], in_specs: list[PartitionSpec]) -> list[Any]:
        names = arguments.names(self.fn, self.tree)
        states = []
        for source in sources:
            if source.kind == VARIABLE and source.item.on_read:
                states.append(_locality.differs(f"variable '{source.item.name}' has a component of each replica's own"))
            elif source.kind == ARGUMENT and in_specs[source.item] == PartitionSpec(AXIS):
                states.append(_locality.differs(f"argument {names[source.item]} differs per replica"))
            else:
                states.append(_locality.MIRRORED)
        return states

    def _refuse(self, analysis: _locality.Analysis) -> None:
        for finding in analysis.findings:
            raise _errors.wrong_collective(self.fn, finding)
        for variable, state in zip(self.written, analysis.outs[self.outputs :], strict=False):
            origin = _locality.origin_of(state)
            if origin is not None and not variable.on_read:
                raise _errors.unreduced_write(self.fn, variable, self.ledger.writes[variable], origin)
        made = list(self.ledger.initial)
        for variable, state in zip(made, analysis.outs[len(analysis.outs) - len(made) :], strict=True):
            origin = _locality.origin_of(state)
            if origin is not None:
                raise _errors.per_replica_initial_value(self.fn, variable, origin)

    def _rows(self, jaxpr: Any, sources: Sequence[Source]) -> tuple[tuple[int | None, ...], Averaged | None]:
        """Which results still have the row axis of a padded batch, and what padding was averaged."""
        given = self.ledger.given
        short = padded(given.all)
        if not short:
            return (None,) * self.outputs, None
        rows = _follow(jaxpr, sources, short)
        origins = _origins(jaxpr, sources)
        carries = tuple(
            given.mask_of(jaxpr.outvars[i].aval.shape[0], origins[i]) if rows.axis[i] == 0 else None
            for i in range(self.outputs)
        )
        asked = frozenset(given.asked)
        unasked = [each for each in short if each.mask_leaf not in asked]
        if asked and unasked:
            rows = _follow(jaxpr, sources, unasked)
        site = next((site for site in rows.reduced if site is not None), None)
        if site is None or not unasked:
            return carries, None
        return carries, Averaged(site, tuple((each.mask_leaf or 0, each.rows) for each in unasked), asked)


def _follow(jaxpr: Any, sources: Sequence[Source], given: Sequence[Given]) -> _locality.Rows:
    leaves = {each.leaf for each in given}
    return _locality.analyse_rows(jaxpr, [0 if s.kind == ARGUMENT and s.item in leaves else None for s in sources])


def _origins(jaxpr: Any, sources: Sequence[Source]) -> list[frozenset[int]]:
    """For each output: the argument leaves from which it was computed."""
    nothing: frozenset[int] = frozenset()
    known = {
        var: frozenset({source.item})
        for var, source in zip(jaxpr.invars, sources, strict=True)
        if source.kind == ARGUMENT
    }

    def origins(atom: Any) -> frozenset[int]:
        return nothing if hasattr(atom, "val") else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        known.update(dict.fromkeys(eqn.outvars, nothing.union(*map(origins, eqn.invars))))
    return list(map(origins, jaxpr.outvars))


def _first_use(equation: Any, operand: Any) -> _locality.Site | None:
    """The user's line that first computes with an operand of the traced step."""
    body = equation.params["jaxpr"]
    inside = body.invars[equation.invars.index(operand)]
    uses = (eqn for eqn in body.eqns if any(atom is inside for atom in eqn.invars))
    return next((site for eqn in uses if (site := _locality.user_site(eqn)) is not None), None)


def site_of(error: BaseException) -> _locality.Site | None:
    """The user's line at which `error` was raised."""
    site = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _locality.is_users(frame.f_code.co_filename):
            site = _locality.Site(frame.f_code.co_filename, line)
    return site
