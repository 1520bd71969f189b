"""How does a traced step run on a mesh? As the body of one `shard_map`, with the results laid out as the analysis says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from replicax._placement import AXIS, Placement
from replicax._run.trace import Step

CUT, WHOLE = PartitionSpec(AXIS), PartitionSpec()


def local(step: Step) -> Any:
    """The step as a function of one replica's arrays, for use inside `shard_map`."""
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(without_needless_reduces(step), []))


def run(step: Step, placement: Placement, values: Sequence[Any], cut: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Carries out `step` on global arrays: the results' arrays, and the new values of the variables it writes.

    Args:
      values: One array for each of the step's sources.
      cut: Which of them are laid over the replicas along axis 0.
    """
    function = local(step)
    spread = [step.spreads(i) for i in range(len(step.differs))]
    on_read = [variable.on_read for variable in step.written]

    def body(*inputs: Any) -> tuple[list[Any], list[Any]]:
        outs = function(*inputs)
        results = [x[None] if s and x.ndim == 0 else x for x, s in zip(outs, spread, strict=False)]
        new = [x[None] if per_replica else x for x, per_replica in zip(outs[len(spread) :], on_read, strict=True)]
        return results, new

    return jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=tuple(CUT if c else WHOLE for c in cut),
        out_specs=([CUT if s else WHOLE for s in spread], [CUT if p else WHOLE for p in on_read]),
        check_vma=False,
        axis_names={AXIS},
    )(*values)


def initial_values(step: Step, placement: Placement, values: Sequence[Any], cut: Sequence[bool]) -> list[Any]:
    """What the variables made in the step start from."""
    function = jex.jaxpr_as_fun(jex.ClosedJaxpr(step.initial, []))
    return jax.shard_map(
        lambda *inputs: function(*inputs),
        mesh=placement.mesh,
        in_specs=tuple(CUT if c else WHOLE for c in cut),
        out_specs=WHOLE,
        check_vma=False,
        axis_names={AXIS},
    )(*values)


def without_needless_reduces(step: Step) -> Any:
    """The step's jaxpr with each mean, min, max or first of already mirrored values replaced by those values.

    Not only cheaper: the mean of three equal floats is not always that float.
    """
    if not step.mirrored_reduces:
        return step.jaxpr
    jaxpr = step.jaxpr
    instead: dict[Any, Any] = {}
    equations = []
    for i, eqn in enumerate(jaxpr.eqns):
        inputs = [_follow(instead, atom) for atom in eqn.invars]
        same_type = all(
            getattr(a, "aval", None) == out.aval for a, out in zip(inputs, eqn.outvars, strict=False)
        )  # the mean of integers is a float: that conversion has to stay
        if i in step.mirrored_reduces and same_type and len(inputs) == len(eqn.outvars):
            instead.update(zip(eqn.outvars, inputs, strict=True))
        else:
            equations.append(eqn.replace(invars=inputs))
    outvars = [_follow(instead, atom) for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _follow(instead: dict[Any, Any], atom: Any) -> Any:
    return atom if hasattr(atom, "val") else instead.get(atom, atom)
