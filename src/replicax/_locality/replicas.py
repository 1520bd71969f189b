"""Which values of a replica function differ between the replicas?

Everything that is computed from equal values by a deterministic program is equal. So a value differs if it was computed
from one that differs, or from a *source*: the replica's id, a host callback, a permutation among the replicas. Only a
collective that leaves the same bits everywhere (`psum`, `pmax`, `all_gather`, …) makes equal what was not.

The engine compiles with `check_vma=False`, where JAX believes what it is told about outputs and silently takes one
replica's copy. This analysis is the only guard, so wherever it does not know, the answer is "differs".
"""

# What is assumed, because no jaxpr can show it:
#
# - XLA computes the same bits from the same bits on each device. (Scatter-add with atomics on a GPU does not; run such
#   a model with XLA's deterministic ops.)
# - `pure_callback` and FFI calls without side effects do what their contract says: equal results for equal arguments.
#
# Things that don't work:
#
# - Trusting our own reductions by their name alone. Differentiated and split by JAX, an equation named
#   rx_reduce_first also hands out residuals, such as "am I replica 0?", and the transpose of a gather is a
#   reduce-scatter under the gather's name. So the body is walked, and inside a reduction the name
#   vouches only for collectives over groups of replicas, which `hierarchical` strings together.
#
# - Judging by effects alone what talks to other replicas: `ppermute` declares none. We look at the axis names as well.
#
# Why branches matter twice: if the predicate differs, then the results differ (and what the branches wrote), and
# a collective in there waits for replicas that never come.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from replicax._locality.marks import ASSERT, REDUCE, mark_of, reduction_kind, spoken
from replicax._locality.sites import Site
from replicax._locality.states import MIRRORED, Differs, Mirrored, Origin, State
from replicax._locality.walk import Scope, Walk, is_backward, is_differentiated, is_transformed


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong whatever becomes of the outputs."""

    kind: str
    """``diverging-collective``: under a condition that differs between replicas, so that some would wait for ever.
    ``double-reduce``: the sum over the replicas of what is already their sum or mean."""
    site: Site | None
    origin: Origin | None
    """Where the condition became per-replica, or where the value was reduced before."""
    primitive: str

    @property
    def spoken(self) -> str:
        """The collective in the user's words."""
        return spoken(self.primitive)


@dataclass(frozen=True, slots=True)
class Analysis:
    outs: tuple[State, ...]
    findings: tuple[Finding, ...]
    mirrored_reduces: frozenset[int]
    """Top-level equations that take the mean, min, max or first of what is mirrored: each result is its operand."""


def analyse(jaxpr: Jaxpr, ins: Sequence[State], replicas: int, axis: str = "replica") -> Analysis:
    """Decides for each output of `jaxpr`, the body of a traced `shard_map`, whether it is equal on all replicas.

    >>> import jax
    >>> from jax.sharding import PartitionSpec as P
    >>> from replicax._locality import MIRRORED, analyse, differs, origin_of
    >>> def step(w, x):
    ...     return w * 2, jax.lax.pmean(w * x, "replica"), w * x
    >>> mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    >>> traced = jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(),
    ...                                       check_vma=False))(1.0, jax.numpy.ones(2))
    >>> body = traced.jaxpr.eqns[-1].params["jaxpr"]
    >>> states = analyse(body, [MIRRORED, differs("argument 1 (x) differs per replica")], replicas=2).outs
    >>> [origin.why if (origin := origin_of(state)) else "mirrored" for state in states]
    ['mirrored', 'mirrored', 'argument 1 (x) differs per replica']
    """
    walk = _Replicas(replicas, axis)
    inputs = [walk.unused(state, index - len(ins)) for index, state in enumerate(ins)]
    known = walk.run(jaxpr, inputs, Scope(jaxpr))
    needless = (
        index
        for index, eqn in enumerate(jaxpr.eqns)
        if _may_return_operands(eqn) and all(isinstance(state, Mirrored) for state in walk.read(eqn.invars, known))
    )
    outs = tuple(walk.settled(state) for state in walk.read(jaxpr.outvars, known))
    return Analysis(outs, tuple(dict.fromkeys(walk.noticed)), frozenset(needless))


class _Replicas(Walk[State]):
    """States are `Mirrored` and `Differs`; the further up, the less is known."""

    def __init__(self, replicas: int, axis: str) -> None:
        super().__init__(constant=MIRRORED)
        self._replicas = replicas
        self._axis = axis
        self._first_use: dict[int, Differs] = {}

    # Inputs become per-replica where they are first used, which is known only on the way.

    def unused(self, state: State, seq: int) -> State:
        return Differs(replace(state.origin, seq=seq)) if isinstance(state, Differs) else state

    def settled(self, state: State) -> State:
        return self._first_use.get(state.origin.seq, state) if isinstance(state, Differs) else state

    def _used(self, state: Differs, eqn: JaxprEqn, scope: Scope) -> Differs:
        origin = state.origin
        if origin.seq >= 0:
            return state
        if origin.seq not in self._first_use:
            used = Origin(self.tick(), origin.site or scope.site(eqn), origin.why)
            self._first_use[origin.seq] = Differs(used)
        return self._first_use[origin.seq]

    # The rules.

    def join(self, a: State, b: State, eqn: JaxprEqn, scope: Scope) -> State:
        if isinstance(a, Differs):
            return b if isinstance(b, Differs) and b.origin.seq < a.origin.seq else a
        if isinstance(b, Differs):
            return b
        return Mirrored(_earliest(a.reduced, b.reduced))

    def leaf(self, eqn: JaxprEqn, states: Sequence[State], scope: Scope) -> Sequence[State]:
        name = eqn.primitive.name
        if self._crosses(eqn):
            return self._cross(eqn, states, scope)
        if name == "optimization_barrier":
            return [self._computed(eqn, [state], scope) for state in states]
        if name == "name" and eqn.params["name"] == ASSERT:
            return [MIRRORED]
        return [self.unknown(eqn, states, scope)] * len(eqn.outvars)

    def unknown(self, eqn: JaxprEqn, states: Sequence[State], scope: Scope) -> State:
        why = self._source(eqn, scope)
        for inner in _inside(eqn):
            if self._crosses(inner):
                self._notice_divergence(inner, scope)
            why = why or self._source(inner, scope)
        return self._starts(eqn, scope, why) if why else self._computed(eqn, states, scope)

    def window(self, eqn: JaxprEqn, state: State, indices: Sequence[State], scope: Scope) -> State:
        if scope.control is not None and eqn.primitive.name != "get":
            return self._starts(eqn, scope, "it is written on some replicas only")
        return self._computed(eqn, [state, *indices], scope)

    def choose(self, eqn: JaxprEqn, predicate: State, scope: Scope) -> tuple[Scope, Callable[[State], State]]:
        if isinstance(predicate, Mirrored):
            return scope, lambda result: result
        cause = self._used(predicate, eqn, scope).origin
        why = "the branch taken" if eqn.primitive.name == "cond" else "the number of turns of this loop"
        choice = self._starts(eqn, scope, f"{why} differs per replica")
        inner = scope if scope.control is not None else replace(scope, control=cause)
        return inner, lambda result: self.join(result, choice, eqn, scope)

    def element(self, eqn: JaxprEqn, state: State, scope: Scope) -> State:
        return state

    def stacked(self, eqn: JaxprEqn, state: State, scope: Scope) -> State:
        return state

    def call(
        self, eqn: JaxprEqn, states: Sequence[Any], scope: Scope, walk: Callable[[Scope], list[State]]
    ) -> Sequence[State]:
        mark = mark_of(eqn)
        if mark is None:
            return walk(scope)
        if mark == ASSERT and len(states) == len(eqn.outvars) and not (scope.backward or is_differentiated(eqn)):
            return [state if isinstance(state, Mirrored) else MIRRORED for state in states]
        kind = reduction_kind(eqn)
        if kind == "sum":
            self._notice_double_reduce(eqn, states, scope)
        results = walk(replace(scope, mark=mark))
        if kind not in ("sum", "mean") or len(results) != len(states):
            return results
        return [self._reduced(eqn, *pair, scope) for pair in zip(states, results, strict=True)]

    def _computed(self, eqn: JaxprEqn, states: Sequence[State], scope: Scope) -> State:
        first: Differs | None = None
        for state in states:
            if isinstance(state, Differs):
                used = self._used(state, eqn, scope)
                if first is None or used.origin.seq < first.origin.seq:
                    first = used
        return first or _linear(eqn, states)  # type: ignore[arg-type]

    def _starts(self, eqn: JaxprEqn, scope: Scope, why: str) -> State:
        return Differs(Origin(self.tick(), scope.site(eqn), why))

    # Collectives and sources.

    def _crosses(self, eqn: JaxprEqn) -> bool:
        """Whether the equation itself (not its body) speaks with the other replicas or asks which one this is."""
        params = eqn.params
        axes = params["axes"] if "axes" in params else params.get("axis_name")
        return axes == self._axis or (isinstance(axes, tuple | list | frozenset | set) and self._axis in axes)

    def _clears(self, eqn: JaxprEqn, scope: Scope) -> bool:
        """Whether all replicas hold the same bits afterwards."""
        groups = eqn.params.get("axis_index_groups")
        everyone = groups is None or (len(groups) == 1 and len(groups[0]) == self._replicas)
        ours = scope.mark is not None and scope.mark.startswith(REDUCE)
        return eqn.primitive.name in _CLEARING and (everyone or ours)

    def _source(self, eqn: JaxprEqn, scope: Scope) -> str | None:
        """Why the results differ even if the operands do not; None if they do not."""
        name = eqn.primitive.name
        if name in _SOURCES:
            return _SOURCES[name]
        if self._crosses(eqn):
            if self._clears(eqn, scope):
                return None
            if name == "axis_index":
                return "the replica id was read"
            among = " within its group" if name in _CLEARING else ""
            return f"lax.{name} gives each replica another value{among}"
        if any(type(effect).__name__ not in _HARMLESS_EFFECTS for effect in eqn.effects):
            return f"{name} reaches outside of the program and may answer differently on each replica"
        return None

    def _cross(self, eqn: JaxprEqn, states: Sequence[State], scope: Scope) -> Sequence[State]:
        self._notice_divergence(eqn, scope)
        self._computed(eqn, states, scope)  # counts as a use of the operands
        why = self._source(eqn, scope)
        if why is not None:
            return [self._starts(eqn, scope, why)] * len(eqn.outvars)
        if eqn.primitive.name not in _SUMS or scope.mark is not None:
            return [MIRRORED] * len(eqn.outvars)
        self._notice_double_reduce(eqn, states, scope)
        return [self._reduced(eqn, state, MIRRORED, scope) for state in states]

    def _reduced(self, eqn: JaxprEqn, operand: Any, result: State, scope: Scope) -> State:
        """`result`, remembering if it is the sum or mean of an operand that differs, or is linear in an earlier one."""
        if isinstance(result, Differs) or isinstance(operand, Mirrored):
            return operand if isinstance(result, Mirrored) else result
        return Mirrored(Origin(self.tick(), scope.site(eqn), "it was reduced over the replicas"))

    # Findings.

    def _notice_divergence(self, eqn: JaxprEqn, scope: Scope) -> None:
        name = eqn.primitive.name
        if scope.control is not None and name != "axis_index":
            self.noticed.append(Finding("diverging-collective", scope.site(eqn), scope.control, scope.mark or name))

    def _notice_double_reduce(self, eqn: JaxprEqn, states: Sequence[Any], scope: Scope) -> None:
        # The transpose of a sum is a sum: in a backward pass it is no mistake of the user's.
        if scope.backward or is_backward(eqn):
            return
        for state, result in zip(states, eqn.outvars, strict=False):
            if isinstance(state, Mirrored) and state.reduced and not _averaged(result, scope.body, self._replicas):
                name = mark_of(eqn) or eqn.primitive.name
                self.noticed.append(Finding("double-reduce", scope.site(eqn), state.reduced, name))


_SUMS = frozenset({"psum", "psum_invariant"})
_CLEARING = _SUMS | {"pmax", "pmin", "all_gather", "all_gather_invariant", "pbroadcast"}
# Not a source: `empty2`, with which `cond` fills the residuals of the branch that was not taken, and nobody reads them.
_SOURCES = {
    "io_callback": "an io_callback may answer differently on each replica",
    "rng_uniform": "lax.rng_uniform draws from each device's own generator",
    "empty": "memory that was not written to was read",
    "empty_ref": "memory that was not written to was read",
}
_HARMLESS_EFFECTS = frozenset({"NamedAxisEffect", "ReadEffect", "WriteEffect", "AccumEffect"})


def _inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations in the bodies of one that we do not know how to step into."""
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            yield inner
            yield from _inside(inner)


def _may_return_operands(eqn: JaxprEqn) -> bool:
    """Whether this is a reduction whose results, of mirrored operands, are the operands.

    Not if it changes the type, like the mean of integers. Nor if it was transformed: a differentiated one may return
    residuals, a vmapped one may move axes, and by chance with the operands' types.
    """
    if reduction_kind(eqn) not in ("mean", "min", "max", "first") or is_transformed(eqn):
        return False
    return bool(eqn.invars) and _types(eqn.invars) == _types(eqn.outvars)


def _types(atoms: Sequence[Any]) -> list[Any]:
    return [(atom.aval.shape, atom.aval.dtype) for atom in atoms]


# Linearity, to tell a sum of what was summed before from, say, the sum of a squared norm.

_LINEAR = frozenset(
    "neg add sub add_any convert_element_type reduce_precision reshape broadcast_in_dim transpose squeeze reduce_sum "
    "cumsum copy slice dynamic_slice dynamic_update_slice gather concatenate split stack unstack tile pad rev "
    "select_n real imag conj stop_gradient device_put reshard sharding_constraint optimization_barrier name".split()
)
_BILINEAR = frozenset({"mul", "dot_general", "conv_general_dilated"})


def _linear(eqn: JaxprEqn, states: Sequence[Mirrored]) -> State:
    reduced = [state.reduced for state in states if state.reduced]
    if not reduced:
        return MIRRORED
    name = eqn.primitive.name
    if name in _LINEAR or (name in _BILINEAR and len(reduced) == 1):
        return Mirrored(_earliest(*reduced))
    if name == "div" and states[1].reduced is None:
        return states[0]
    return MIRRORED


def _earliest(*origins: Origin | None) -> Origin | None:
    return min((origin for origin in origins if origin), key=lambda origin: origin.seq, default=None)


def _averaged(var: Any, body: Jaxpr, replicas: int) -> bool:
    """Whether every use of `var` in `body` divides it by the number of replicas, as `lax.pmean` does."""
    if any(out is var for out in body.outvars):
        return False
    uses = [eqn for eqn in body.eqns if any(atom is var for atom in eqn.invars)]
    return all(
        _divides(eqn, var, body, replicas)
        or (eqn.primitive.name == "convert_element_type" and _averaged(eqn.outvars[0], body, replicas))
        for eqn in uses
    )


def _divides(eqn: JaxprEqn, var: Any, body: Jaxpr, replicas: int) -> bool:
    name = eqn.primitive.name
    if name not in ("div", "mul") or (name == "div" and eqn.invars[0] is not var):
        return False
    number = _number(eqn.invars[1] if eqn.invars[0] is var else eqn.invars[0], body)
    if number is None:
        return False
    return abs(number - replicas) < 1e-6 * replicas if name == "div" else abs(number * replicas - 1) < 1e-6


def _number(atom: Any, body: Jaxpr) -> float | None:
    """The number that an operand is in every one of its elements, if that can be seen."""
    if isinstance(atom, Literal):
        scalar = np.size(atom.val) == 1 and np.isrealobj(atom.val)
        return float(np.asarray(atom.val).item()) if scalar else None
    made = next((eqn for eqn in body.eqns if any(out is atom for out in eqn.outvars)), None)
    spreads = made is not None and made.primitive.name in ("convert_element_type", "broadcast_in_dim")
    return _number(made.invars[0], body) if made is not None and spreads else None
