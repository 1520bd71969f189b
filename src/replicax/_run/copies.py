"""What does each replica hold of a variable while an eager run lasts, and what becomes of it at the end?

Each replica reads and writes its own copy, an array on its own device. When the run has ended well the copies become
the variable's array again; when it has failed, the variables are as they were.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _errors, _jax
from replicax._locality import MIRRORED, Site, State, differs
from replicax._run.operations import EagerArray, EagerTrace, concrete
from replicax._values import lay_out
from replicax._variables import storage

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy
    from replicax._variables.variable import Variable


@dataclasses.dataclass
class _Held:
    """One variable, as each replica has it."""

    now: list[Any]
    """The arrays, or mutable references for replicas that wrote inside code that JAX stages."""
    written: Site | None = None


class Copies:
    def __init__(self, strategy: Strategy, traces: Sequence[EagerTrace]) -> None:
        self._strategy = strategy
        self._traces = traces
        self._held: dict[Variable, _Held] = {}
        self._opening = threading.Lock()

    def read(self, variable: Variable, index: int) -> Any:
        now = self._open(variable).now[index]
        return now if isinstance(now, EagerArray) else now[...]

    def write(self, variable: Variable, index: int, value: Any, site: Site) -> None:
        held = self._open(variable)
        trace = self._traces[index]
        if isinstance(held.now[index], EagerArray) and not _is_plain(value):
            with _jax.in_trace(trace):
                held.now[index] = jax.new_ref(held.now[index], kind="no_grad_no_remat")
        if isinstance(held.now[index], EagerArray):
            held.now[index] = value if isinstance(value, EagerArray) else trace.enter(value)
        else:
            held.now[index][...] = value
        held.written = site

    def last(self, variable: Variable) -> Any:
        """What replica 0 has of it now."""
        with _jax.in_trace(self._traces[0]):
            return self.read(variable, 0)

    def concrete(self, variable: Variable) -> list[jax.Array]:
        """All copies, each on its own device."""
        with _jax.in_trace(self._traces[0]):
            return [concrete(self.read(variable, index)) for index in range(len(self._traces))]

    @property
    def written(self) -> dict[Variable, Site]:
        return {variable: held.written for variable, held in self._held.items() if held.written is not None}

    def commit(self, fn: Callable[..., Any]) -> None:
        """Gives the variables that were written their new arrays; all of them, or an error and none."""
        arrays = {variable: self._joined(fn, variable, site) for variable, site in self.written.items()}
        for variable, array in arrays.items():
            variable._array = array
            storage.share(variable)  # the copies may be in the user's hands as well

    def _open(self, variable: Variable) -> _Held:
        held = self._held.get(variable)
        if held is None:
            with self._opening:
                held = self._held.get(variable)
                if held is None:
                    held = self._held[variable] = _Held(self._initial(variable))
        return held

    def _initial(self, variable: Variable) -> list[Any]:
        if not variable.on_read:
            storage.share(variable)  # what replicas read may be the variable's own buffer, and they may return it
            return [trace.enter(variable._array) for trace in self._traces]
        if variable.strategy is not self._strategy:
            raise _errors.on_read_of_other_strategy(variable, self._strategy)
        state: State = differs(f"variable '{variable.name}' has a component of each replica's own")
        with _jax.outside_of_traces():
            parts = storage.components(variable)
        return [
            trace.enter(part, state if len(parts) > 1 else MIRRORED)
            for trace, part in zip(self._traces, parts, strict=True)
        ]

    def _joined(self, fn: Callable[..., Any], variable: Variable, site: Site) -> jax.Array:
        parts = self.concrete(variable)
        if variable.on_read:
            return lay_out(variable.placement, [part[None] for part in parts]).data
        if not same_bits(parts):
            raise _errors.unequal_copies(fn, variable, site, parts)
        sharding = variable.strategy.rest_sharding(variable)
        devices = [trace.device for trace in self._traces]
        if sharding.is_fully_replicated and sharding.device_set == set(devices):
            return jax.make_array_from_single_device_arrays(variable.shape, sharding, parts)
        return jax.device_put(parts[0], sharding)


def same_bits(parts: Sequence[Any]) -> bool:
    """Whether all arrays are equal, bit for bit."""
    raw = [_numbers(part) for part in parts]
    return all(
        array.dtype == raw[0].dtype and array.shape == raw[0].shape and array.tobytes() == raw[0].tobytes()
        for array in raw
    )


def _numbers(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _is_plain(value: Any) -> bool:
    return isinstance(value, EagerArray) or not isinstance(value, _jax.Tracer)
