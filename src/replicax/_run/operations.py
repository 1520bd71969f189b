"""How is one operation of one replica carried out, so that its result can be printed at once?

In an eager run an array is an `EagerArray`: the array of this replica, on this replica's device, and its place in the
list of operations that led to it. An operation of this replica alone is simply carried out. One that speaks with the
other replicas is brought to the meeting, and all carry it out together, as the program that a compiled run contains.
"""

# Why an interpreter of JAX's operations, and not plain arrays on plain threads?
#
# - `lax.psum` of a plain array takes it for a constant and returns N times the array, without an error.
# - A collective that is a Python function which waits for other threads must bring its own rules for grad, vmap and
#   checkpoint. Here `lax.psum` itself arrives, after JAX has differentiated it, and needs no rules of ours.
# - Whether a result differs between replicas cannot be seen from values that happen to be equal, such as the zeros
#   before the first step. So replica 0 keeps a `Tape` of what it does, a program in the form that `_locality` reads,
#   and the verdict is that of the compiled run.
# - A step may use an array that lies on all devices (a state from an earlier run). Operations see it here and take the
#   copy of their own device.
#
# User code runs under `jax.disable_jit`: jitted functions, loops and branches are Python then, and can be printed from.
# What JAX stages all the same (the body of `jax.checkpoint`) arrives as one operation.
#
# What the tape cannot show:
#
# - The replica's id is a Python int here, and what is computed from it in Python looks equal everywhere. Therefore
#   "equal" is believed only of values whose bits are equal too.
# - The way not taken. Compiled, a value that one branch of a `lax.cond` leaves per-replica is per-replica; here it is
#   what the branch that was taken makes of it.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from replicax import _errors, _jax, _locality
from replicax._locality.marks import spoken
from replicax._placement import AXIS, Placement
from replicax._values import STACKED, PerReplica, components, lay_out


class EagerArray(_jax.Tracer):
    """An array of one replica. What can be asked of an array can be asked of it, and is answered by its value."""

    # The names must not be those of methods that arrays have, such as `var`.
    __slots__ = ("concrete", "atom", "given")

    def __init__(
        self, trace: EagerTrace, concrete: jax.Array, atom: Any = None, given: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(trace, jax.typeof(concrete))
        self.concrete = concrete
        self.atom = atom
        self.given = given
        """The leaves of the call with rows that it was computed from."""

    def to_concrete_value(self) -> Any:
        return self.concrete

    def full_lower(self) -> Any:
        return self.concrete

    def __str__(self) -> str:
        return str(self.concrete)


def _forward(name: str) -> Any:
    if callable(getattr(_jax.ConcreteArray, name)):
        return lambda self, *args, **kwargs: getattr(self.concrete, name)(*args, **kwargs)
    return property(lambda self: getattr(self.concrete, name))


# A tracer has these too, as errors that explain why an abstract value has no numbers.
for _name in (
    "__array__ __repr__ __format__ __float__ __complex__ __reduce__ __deepcopy__ __dlpack__ __dlpack_device__ item "
    "tolist tobytes sharding committed device devices addressable_shards addressable_data global_shards "
    "is_fully_addressable is_fully_replicated is_deleted block_until_ready copy_to_host_async "
    "on_device_size_in_bytes unsafe_buffer_pointer"
).split():
    setattr(EagerArray, _name, _forward(_name))


def concrete(x: Any) -> Any:
    """The value of an eager array; anything else as it is."""
    return x.concrete if isinstance(x, EagerArray) else x


class Tape:
    """What a replica did, as the straight-line program that the analyses read."""

    def __init__(self) -> None:
        self._equations: list[Any] = []
        self._inputs: list[Any] = []
        self._states: list[_locality.State] = []
        self._leaves: list[int | None] = []
        self._references: dict[int, tuple[Any, Any]] = {}

    def enter(self, value: Any, state: _locality.State, leaf: int | None = None) -> Any:
        """Makes `value`, which comes from outside of the program, one of its inputs: `leaf` of the call, if it has rows."""
        var = jex.Var(jax.typeof(value))
        self._inputs.append(var)
        self._states.append(state)
        self._leaves.append(leaf)
        return var

    def record(self, primitive: Any, params: dict[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> None:
        out = [jex.Var(jax.typeof(result)) for result in results]
        self._equations.append(_jax.equation(primitive, [self._atom(x) for x in operands], out, params))
        for result, var in zip(results, out, strict=True):
            if isinstance(result, EagerArray):
                result.atom = var
            else:
                self._references[id(result)] = result, var

    def analyse(self, outputs: Sequence[Any], replicas: int) -> _locality.Analysis:
        return _locality.analyse(self._program(outputs), self._states, replicas)

    def analyse_rows(self, outputs: Sequence[Any], leaves: Collection[int]) -> _locality.Rows:
        """Follows the rows of these leaves of the call."""
        return _locality.analyse_rows(self._program(outputs), [0 if leaf in leaves else None for leaf in self._leaves])

    def _program(self, outputs: Sequence[Any]) -> Any:
        return _jax.straight_line(self._inputs, [self._atom(x) for x in outputs], self._equations)

    def _atom(self, x: Any) -> Any:
        if isinstance(x, EagerArray) and x.atom is not None:
            return x.atom
        if id(x) in self._references:
            return self._references[id(x)][1]
        value = concrete(x)
        return jex.Literal(value, jax.typeof(value))


class EagerTrace(_jax.Trace):
    """The operations of one replica.

    Args:
      meet: Carries out an operation together with the other replicas: gets its name, what to do with the operands of
        all of them, and this one's operands; returns this one's results.
      check: Raises if the run is over because another replica failed.
    """

    __slots__ = ("replica", "device", "tape", "_meet", "_check", "_copies")

    def __init__(
        self,
        replica: int,
        device: jax.Device,
        tape: Tape | None,
        meet: Callable[[str, Callable[[Placement, list[Any]], list[Any]], list[Any]], Any],
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self.replica = replica
        self.device = device
        self.tape = tape
        self._meet = meet
        self._check = check
        self._copies: dict[int, tuple[jax.Array, jax.Array]] = {}

    def enter(self, value: Any, state: _locality.State = _locality.MIRRORED, leaf: int | None = None) -> EagerArray:
        """An array from outside, as an array of this replica."""
        with _jax.outside_of_traces():
            value = jax.device_put(value, self.device)
        given = frozenset() if leaf is None else frozenset({leaf})
        return EagerArray(self, value, self.tape and self.tape.enter(value, state, leaf), given)

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /) -> Any:
        self._check()
        operands = [self._here(concrete(arg)) for arg in args]
        if not _crosses(primitive, params):
            found = _jax.carry_out(primitive, operands, params)
        elif primitive.name == "axis_index":
            found = jax.device_put(np.int32(self.replica), self.device)
        else:
            found = self._meet(_what(primitive, params), functools.partial(_together, primitive, params), operands)
        given = frozenset().union(*(arg.given for arg in args if isinstance(arg, EagerArray)))
        results = [
            EagerArray(self, x, given=given) if isinstance(x, jax.Array) else x
            for x in (found if primitive.multiple_results else [found])
        ]
        if self.tape is not None:
            self.tape.record(primitive, params, args, results)
        return results if primitive.multiple_results else results[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with _jax.in_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with _jax.in_trace(self):
            return fun.call_wrapped(*tracers)

    def process_call(self, call_primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        with _jax.in_trace(self):
            return f.call_wrapped(*tracers)

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, EagerArray) else self.enter(val)

    def cur_qdd(self, x: Any) -> Any:
        return x.cur_qdd()

    def _here(self, x: Any) -> Any:
        """An operand on this replica's device. Arrays that the step captured are copied once."""
        if not isinstance(x, jax.Array) or isinstance(x, _jax.Tracer) or x.devices() == {self.device}:
            return x
        if id(x) not in self._copies:
            self._copies[id(x)] = x, jax.device_put(x, self.device)
        return self._copies[id(x)][1]


def _crosses(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether the operation, or one inside it, names the axis of the replicas."""
    axes = params["axes"] if "axes" in params else params.get("axis_name")
    if axes == AXIS or (isinstance(axes, (tuple, list)) and AXIS in axes):
        return True
    return any(_crosses(eqn.primitive, eqn.params) for body in jex.jaxprs_in_params(params) for eqn in body.eqns)


def _what(primitive: Any, params: dict[str, Any]) -> str:
    return spoken(params["name"] if primitive.name == "jit" else primitive.name)


def _together(primitive: Any, params: dict[str, Any], placement: Placement, brought: list[list[Any]]) -> list[Any]:
    """One operation of all replicas, as one program: what each brought → what each gets."""
    kinds = [", ".join(jax.typeof(operand).str_short() for operand in operands) for operands in brought]
    if len(set(kinds)) > 1:
        raise _errors.different_operands(_what(primitive, params), kinds)
    # JAX would look for a NaN's origin inside of the program, line by line, and come to no end.
    with _jax.outside_of_traces(), jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        laid = [lay_out(placement, parts) for parts in zip(*brought, strict=True)]
        program = _program(placement, primitive, _Params(str(params), params), tuple(value.form for value in laid))
        columns = [components(PerReplica(result, STACKED)) for result in program(*(value.data for value in laid))]
    for name, is_wrong in (("nan", jnp.isnan), ("inf", jnp.isinf)):
        if getattr(jax.config, f"jax_debug_{name}s") and any(_holds(is_wrong, part) for part in chain(*columns)):
            raise FloatingPointError(f"invalid value ({name}) encountered in {_what(primitive, params)}")
    shares = [list(share) for share in zip(*columns, strict=True)]
    return shares if primitive.multiple_results else [share[0] for share in shares]


def _holds(is_wrong: Callable[..., jax.Array], array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact) and bool(is_wrong(array).any())


@dataclasses.dataclass(frozen=True)
class _Params:
    """The parameters of an operation, compared by what they say: JAX traces a gradient anew each time."""

    text: str
    params: dict[str, Any] = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _program(placement: Placement, primitive: Any, params: _Params, forms: tuple[str, ...]) -> Callable[..., list[Any]]:
    def body(*blocks: jax.Array) -> list[jax.Array]:
        operands = [block[0] if form == STACKED else block for block, form in zip(blocks, forms, strict=True)]
        results = primitive.bind(*operands, **params.params)
        return [result[None] for result in (results if primitive.multiple_results else [results])]

    split = PartitionSpec(AXIS)
    mesh = placement.mesh
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False, axis_names={AXIS}))
