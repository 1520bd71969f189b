"""How does a step run whose variables lie apart from its replicas? Cut in two: the replicas' half, and the update.

Under central storage the variables rest on a parameter device and the replicas compute elsewhere. What follows the
reductions (the optimizer, the counters) is the same on every replica, so it is done once, where the variables are. The
replicas get copies of the variables that they read and nothing else; an optimizer's slots never travel.
"""

# Where is the cut? Walk the traced step backwards. An equation moves to the update if all it computes with is mirrored,
# it needs neither the other replicas nor the outside world, and nothing that stays with the replicas uses its results.
# So whatever the forward pass needs stays, collectives stay, and all that only leads to new values of variables (or to
# mirrored results) moves. What the update uses of the replicas' half is the *frontier*: mostly the reduced gradients.
#
# Not worth it: summing the gradients on the parameter device as well. The frontier would be N times as large.
#
# Copies of a variable (each read makes one) belong to both halves. Otherwise the weights would travel to the replicas
# for the forward pass and back again for the update.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import core as jex
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from replicax import _jax, _locality
from replicax._placement import Placement
from replicax._run import arguments, emit, trace
from replicax._run.trace import Result, Step
from replicax._variables import storage

if TYPE_CHECKING:
    from replicax._variables.variable import Variable

_COPIES = frozenset({"copy", "copy_p", "reshard", "stop_gradient"})
_BOUND_TO_THE_REPLICAS = frozenset({"axis_index", "sharding_constraint", "shard_map"})


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The half of a step that runs once, on the parameter device."""

    program: Callable[..., tuple[list[Any], list[Any]]]
    """New values of the written variables and the results, from: written variables, read ones, the frontier."""
    written: tuple[Variable, ...]
    read: tuple[Variable, ...]
    results: int
    """How many leaves the user's function returned."""
    tree: Any


@dataclasses.dataclass(frozen=True)
class _Later:
    """Stands among the replicas' results for one that the update computes, by its number there."""

    index: int


def cut(step: Step, placement: Placement) -> Step:
    """The replicas' half of `step`. It returns the update first, then the results, then the frontier; see `finish`."""
    jaxpr = emit.without_needless_reduces(step)
    count = len(step.differs)
    central = [i for i, variable in enumerate(step.written) if not variable.on_read]
    outs = jaxpr.outvars
    new_values = [outs[count + i] for i in central]
    bound = [outs[i] for i in range(count) if step.spreads(i)]
    bound += [outs[count + i] for i, variable in enumerate(step.written) if variable.on_read]
    moved = _movable(jaxpr, _mirrored(step, jaxpr, placement), bound)

    made_later = {var for i in moved for var in jaxpr.eqns[i].outvars}
    later = [i for i in range(count) if _is_in(outs[i], made_later)]
    half = _half(jaxpr, [jaxpr.eqns[i] for i in moved], [*new_values, *(outs[i] for i in later)])
    source_of = dict(zip(jaxpr.invars, step.sources, strict=True))
    at_home = [var for var in half.invars if _kind(source_of, var) in (trace.VARIABLE, trace.CONSTANT)]
    frontier = [var for var in half.invars if var not in at_home]

    stay = [i for i in range(count) if i not in later]
    results = [_relocated(result, stay, later) for result in step.results]
    update = _update(step, half, at_home, frontier, source_of, central)
    on_read = tuple(variable for variable in step.written if variable.on_read)
    there = _half(
        jaxpr,
        [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in moved],
        [*(outs[i] for i in stay), *frontier, *bound[len(bound) - len(on_read) :]],
        follow_copies=False,
    )
    rest = len(frontier)
    out = [Result(static=update), *results, *(Result(output=len(stay) + i) for i in range(rest))]
    return dataclasses.replace(
        step,
        jaxpr=there,
        sources=tuple(source_of[var] for var in there.invars),
        results=tuple(out),
        tree=jax.tree.structure(tuple(range(len(out)))),
        written=on_read,
        differs=(*(step.differs[i] for i in stay), *(False,) * rest),
        wrapped=(*(step.wrapped[i] for i in stay), *(False,) * rest),
        row_masks=(*(step.row_masks[i] for i in stay), *(None,) * rest),
        mirrored_reduces=frozenset(),
    )


def finish(out: tuple[Any, ...], placement: Placement) -> Any:
    """Carries out the update on what the replicas' half returned, and gives the user's function its result."""
    update: Update = out[0].value
    results, frontier = out[1 : 1 + update.results], out[1 + update.results :]
    device = placement.parameter_device
    assert device is not None
    nearest = placement.local_devices.index(device) if device in placement.local_devices else 0
    for variable in update.written:
        storage.unshare(variable)
    new, made = update.program(
        [_at(device, variable) for variable in update.written],
        [_at(device, variable) for variable in update.read],
        jax.device_put([array.addressable_data(nearest) for array in frontier], device),
    )
    for variable, array in zip(update.written, new, strict=True):
        _jax.forget_mesh(array)
        at_home = variable.placement.parameter_device is device
        variable._array = array if at_home else jax.device_put(array, variable.strategy.rest_sharding(variable))
    made = jax.device_put(made, placement.mirrored) if made else made
    return jax.tree.unflatten(update.tree, [_settled(result, made) for result in results])


def _at(device: jax.Device, variable: Variable) -> jax.Array:
    at_home = variable.placement.parameter_device is device
    return variable._array if at_home else jax.device_put(variable._array, device)


def _settled(result: Any, made: Sequence[Any]) -> Any:
    if not isinstance(result, arguments.Static):
        return result
    return made[result.value.index] if isinstance(result.value, _Later) else result.value


def _relocated(result: Result, stay: Sequence[int], later: Sequence[int]) -> Result:
    if result.output is None:
        return result
    if result.output in later:
        return Result(static=_Later(later.index(result.output)))
    return Result(output=stay.index(result.output))


def _mirrored(step: Step, jaxpr: Jaxpr, placement: Placement) -> set[Var]:
    """The values of the step that are equal on all replicas."""
    states = [_locality.differs("") if _is_cut(step, source) else _locality.MIRRORED for source in step.sources]
    values = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    found = _locality.analyse(jaxpr.replace(outvars=values), states, placement.replicas).outs
    return {var for var, state in zip(values, found, strict=True) if isinstance(state, _locality.Mirrored)}


def _is_cut(step: Step, source: trace.Source) -> bool:
    if source.kind == trace.VARIABLE:
        return source.item.on_read
    return source.kind == trace.ARGUMENT and source.item in step.cut_arguments


def _movable(jaxpr: Jaxpr, mirrored: set[Var], bound: Iterable[Any]) -> list[int]:
    """Which equations only lead to what the update computes, and can be carried out away from the replicas."""
    needed_there = {var for var in bound if not isinstance(var, Literal)}
    moved = []
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        values = {*eqn.outvars, *(atom for atom in eqn.invars if not isinstance(atom, Literal))}
        if values <= mirrored and not _is_bound(eqn) and needed_there.isdisjoint(eqn.outvars):
            moved.append(i)
        else:
            needed_there.update(values)
    return moved[::-1]


def _is_bound(eqn: JaxprEqn) -> bool:
    """Whether an equation speaks with other replicas, with their devices or with the outside world."""
    if eqn.effects or eqn.primitive.name in _BOUND_TO_THE_REPLICAS:
        return True
    return any(_is_bound(inner) for body in jaxprs_in_params(eqn.params) for inner in body.eqns)


def _half(jaxpr: Jaxpr, equations: Sequence[JaxprEqn], outs: Sequence[Any], follow_copies: bool = True) -> Jaxpr:
    """Those of `equations` that `outs` need, as a program of its own whose inputs are what they do not compute."""
    original: dict[Var, Any] = {}
    if follow_copies:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _COPIES:
                original[eqn.outvars[0]] = _follow(original, eqn.invars[0])
    outs = [_follow(original, atom) for atom in outs]
    needed = {atom for atom in outs if not isinstance(atom, Literal)}
    kept, inputs = [], dict.fromkeys(needed)
    for eqn in reversed(equations):
        if needed.isdisjoint(eqn.outvars) and (follow_copies or not eqn.effects):
            continue
        eqn = eqn.replace(invars=[_follow(original, atom) for atom in eqn.invars])
        kept.append(eqn)
        used = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        needed.update(used)
        inputs |= dict.fromkeys(used)
    computed = {var for eqn in kept for var in eqn.outvars}
    return jaxpr.replace(
        invars=[var for var in inputs if var not in computed],
        outvars=list(outs),
        eqns=kept[::-1],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _follow(original: dict[Var, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else original.get(atom, atom)


def _is_in(atom: Any, variables: set[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _kind(source_of: dict[Var, trace.Source], var: Var) -> str | None:
    return source_of[var].kind if var in source_of else None


def _update(
    step: Step,
    half: Jaxpr,
    at_home: Sequence[Var],
    frontier: Sequence[Var],
    source_of: dict[Var, trace.Source],
    central: Sequence[int],
) -> Update:
    written = tuple(step.written[i] for i in central)
    variable_of = {var: source_of[var].item for var in at_home if source_of[var].kind == trace.VARIABLE}
    constant_of = {var: source_of[var].item for var in at_home if source_of[var].kind == trace.CONSTANT}
    read = tuple(variable for variable in dict.fromkeys(variable_of.values()) if variable not in written)
    function = jex.jaxpr_as_fun(jex.ClosedJaxpr(half, []))

    def update(old: list[Any], others: list[Any], arrived: list[Any]) -> tuple[list[Any], list[Any]]:
        value_of = dict(zip([*written, *read], [*old, *others], strict=True))
        values = constant_of | {var: value_of[item] for var, item in variable_of.items()}
        values |= dict(zip(frontier, arrived, strict=True))
        out = function(*[values[var] for var in half.invars])
        return list(out[: len(written)]), list(out[len(written) :])

    program = jax.jit(update, donate_argnums=0)
    return Update(program, written, read, len(step.results), step.tree)
