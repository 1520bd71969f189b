"""Which private names of JAX and XLA do we lean on?

Everything replicax uses that JAX does not promise to keep is reached through this file, one function each, with the
reason why no public name would do. A new JAX release that breaks replicax breaks it here.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import numpy as np
from jax._src import array, config, core, distributed, dtypes, source_info_util, xla_bridge
from jax._src.interpreters import partial_eval, pxla
from jax.sharding import NamedSharding


def backend_started() -> bool:
    """Whether JAX has created its devices, asked without creating them.

    Every public question about devices (`jax.devices()`, `jax.default_backend()`) starts the backend, after which the
    size of its thread pool and the number of CPU devices cannot change any more.
    """
    return xla_bridge.backends_are_initialized()


def cpu_devices_setting() -> int | None:
    """The value of `jax_num_cpu_devices` (also JAX_NUM_CPU_DEVICES); None if nobody set it.

    `jax.config` can be written by name in public, but has no typed way to read a setting.
    """
    setting = xla_bridge.num_cpu_devices.value
    return setting if setting >= 0 else None


def cpu_pool_size() -> int | None:
    """How many threads the running CPU backend computes and communicates with; None where that cannot be seen.

    XLA has no call that tells. It names its threads "tf_XLAEigen", and Linux shows the names. A thread names itself
    once it runs, so that for some milliseconds after the backend started the number may be too small. (If TensorFlow
    is in the same process, threads of its own XLA bear the same name.)
    """
    if sys.platform != "linux":
        return None
    return sum(_thread_name(task) == "tf_XLAEigen" for task in Path("/proc/self/task").iterdir()) or None


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # the thread ended while we were looking
        return ""


def current_trace() -> Any:
    """The innermost trace under way; compared by identity to learn whether code runs inside a nested one.

    `jax.extend.core.get_opaque_trace_state` is public, but a new object at each call and slower to compare.
    """
    return core.trace_ctx.trace


def in_trace(trace: Any) -> Any:
    """A context manager that records operations in `trace`, an outer trace of the one under way.

    A variable that is first read inside a `scan` body becomes an input of the whole step, not of the body.
    """
    return core.set_current_trace(trace)


trace_context = core.trace_ctx
"""This thread's state of tracing; ``trace_context.trace is no_trace`` at the top level. As names, to be compared fast."""
no_trace = core.eval_trace


def inputs_of(value: Any) -> list[Any]:
    """The inputs of traces from which `value` was computed, as tracers, seen through gradients and `vmap`.

    A program that is being traced cannot be asked in public where one of its values comes from.
    """
    found, seen, left = [], set(), [value]
    while left:
        x = left.pop()
        if id(x) in seen or not isinstance(x, core.Tracer):
            continue
        seen.add(id(x))
        if not isinstance(x, partial_eval.DynamicJaxprTracer):
            under = getattr(x, "primal", getattr(x, "val", None))
            (found if under is None else left).append(x if under is None else under)
        elif x.parent is not None:
            left.extend(x.parent.in_tracers)
        else:
            outside = x._trace.get_const(x)
            (found if outside is None else left).append(x if outside is None else outside)
    return found


def is_staging() -> bool:
    """Whether operations are recorded into a program instead of carried out (jit, scan, eval_shape; not grad or vmap)."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def jit_disabled() -> bool:
    """Whether `jax.disable_jit()` is in force; its public spelling looks the flag up by name, in microseconds."""
    return config.disable_jit.value


def stands_for(kind: type, value: Callable[[Any], Any]) -> None:
    """Lets JAX's functions take objects of class `kind`: they compute with ``value(x)``, asked for where they are called.

    The protocol `__jax_array__` does as much for operators and a few functions; jitted ones, which most of `jax.numpy` are,
    refuse such objects (jax 0.10).
    """
    core.pytype_aval_mappings[kind] = lambda x: core.typeof(value(x))
    dtypes.register_canonicalize_value_handler(kind, value)


ConcreteArray = array.ArrayImpl
"""The class of every concrete array; `jax.Array` is an interface that tracers answer to as well."""


def inside_jit(outer: Any, entry: CodeType) -> bool:
    """Whether a `jax.jit` of the user's own is being traced inside the trace `outer`, which `entry` is the code of.

    Loops, branches and gradients are traced anew each time and do no harm; a jitted function keeps its traced form between
    calls, with whatever tracers of ours it saw the first time. JAX does not tell them apart, but its stack does.
    """
    if core.trace_ctx.trace is outer:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        if frame.f_code.co_name == "_trace_for_jit":
            return True
        frame = frame.f_back
    return False


_REFUSES_OBJECTS = {fn.__code__ for fn in (core.typeof, core.shaped_abstractify, core.Primitive.bind)}


def about_to_refuse() -> bool:
    """Whether JAX looks an object's `__jax_array__` up only to say that such objects are no arguments.

    To be asked in the property of that name. `jnp.asarray(x)` calls what it gets; a jitted function, as `jnp.exp`, raises if
    it gets anything, and its message names neither the object nor what to write. An object for which `stands_for` was
    called is never asked.
    """
    return sys._getframe(2).f_code in _REFUSES_OBJECTS


def key_value_store() -> Any:
    """The store in which the processes of this job leave each other notes; None before `jax.distributed.initialize`.

    JAX keeps it for its own rendezvous. In public it offers no exchange on the host, only collectives on devices.
    """
    return distributed.global_state.client


def forget_mesh(array: jax.Array) -> None:
    """Says of an array on one device that it is on no mesh.

    What equations that were traced inside a `shard_map` compute is marked as belonging to its mesh, wherever they are
    carried out. JAX would keep that mark in its caches and give it to the arrays of another strategy, which it then
    refuses to combine. No public function changes the mark without copying the array.
    """
    aval = array.aval
    if not aval.sharding.mesh.empty:
        array.aval = core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)  # type: ignore[misc]


def put(arrays: Sequence[Any], sharding: NamedSharding) -> list[jax.Array]:
    """`jax.device_put(arrays, sharding)` on devices of this process, by the shortest way there is for arrays of NumPy.

    It is the call that `jax.device_put` ends in. A batch of two arrays on two devices takes 10 µs instead of 60 where
    nothing else happens, and 100 instead of 370 after a step that has emptied the processor's caches of all that code.
    """
    with config.explicit_device_put_scope():
        return [_put(array, sharding) if _is_plain(array) else jax.device_put(array, sharding) for array in arrays]


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    aval, indices, devices = _parts(array.shape, array.dtype, sharding)
    return pxla.batched_device_put(aval, sharding, [array[index] for index in indices], devices)


@functools.lru_cache(maxsize=256)
def _parts(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> tuple[Any, list[Any], list[jax.Device]]:
    part_of = sharding.addressable_devices_indices_map(shape)
    return core.ShapedArray(shape, dtype), list(part_of.values()), list(part_of)


def _is_plain(array: Any) -> bool:
    """Whether JAX would hold it in the type that it has; of 64 bits that depends on a setting."""
    return type(array) is np.ndarray and array.dtype.itemsize < 8


def on_host() -> Any:
    """A context manager inside which operations are carried out now, whatever trace is under way around it.

    `jax.ensure_compile_time_eval` folds what is concrete but leaves the trace in place.
    """
    return core.set_current_trace(core.eval_trace)


# What the eager run is made of: an interpreter of JAX's operations, as `jax.grad` and `jax.vmap` are. They are written
# against these classes, for which JAX has no public names; `jax.extend` covers programs, not their execution.

Trace = core.Trace
Tracer = core.Tracer


def carry_out(primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    """One operation, here and now, on concrete arrays."""
    with outside_of_traces():
        return core.eval_trace.process_primitive(primitive, operands, params)


traces_kept_for = jax.make_user_context(None)
"""``with traces_kept_for(owner):`` what JAX traces inside is not found again by anyone else, nor for anyone else here.

JAX keeps the traced form of a function under `jax.checkpoint`, with whatever tracers the function captured. Another thread
that runs the same function must not be handed those.
"""


class outside_of_traces:
    """Inside it, code runs as at the top level: no trace is under way, no axis has a name, and traces are for everyone."""

    __slots__ = ("trace", "axes", "traces")

    def __enter__(self) -> None:
        self.trace, self.axes = core.trace_ctx.trace, core.trace_ctx.axis_env
        core.trace_ctx.set_trace(core.eval_trace)
        core.trace_ctx.set_axis_env(core.top_axis_env)
        self.traces = traces_kept_for(None)
        self.traces.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.traces.__exit__(*exc)
        core.trace_ctx.set_trace(self.trace)
        core.trace_ctx.set_axis_env(self.axes)


def made_at(tracer: Any) -> str | None:
    """The user's line that computed an abstract value; JAX tells it in one of its messages only."""
    info = getattr(tracer, "_line_info", None)
    frame = None if info is None else source_info_util.user_frame(info.traceback)
    return None if frame is None else f"{frame.file_name}:{frame.start_line}"


def named_axis(name: str, size: int) -> Any:
    """A context manager inside which collectives over `name` can be written, for `size` participants."""
    return core.extend_axis_env_nd([(name, size)])


def equation(primitive: Any, operands: list[Any], results: list[Any], params: dict[str, Any]) -> Any:
    """One operation as an equation that remembers the Python stack; `jax.extend` would want that stack from us."""
    return core.new_jaxpr_eqn(operands, results, primitive, params, core.no_effects, source_info_util.current())


def straight_line(inputs: list[Any], outputs: list[Any], equations: list[Any]) -> Any:
    """Equations as a program. The public constructor wants debug information that only JAX can make."""
    info = core.DebugInfo("eager run", "step", None, None)
    return core.Jaxpr([], inputs, outputs, equations, core.no_effects, info)


def thread_settings() -> Callable[[], None]:
    """Copies what this thread has set of JAX's settings (`jax.default_matmul_precision(...)`, `jax.debug_nans(...)`).

    JAX keeps a setting made by a ``with`` block per thread and has no call that lists them.

    Returns:
      A function that makes them those of the thread that calls it.
    """
    unset = config.config_ext.unset
    mine = [(state, state.get_local()) for state in config.config_states.values()]
    mine = [(state, value) for state, value in mine if value is not unset]

    def apply() -> None:
        for state, value in mine:
            state.set_local(value)
            if state._update_thread_local_hook is not None:
                state._update_thread_local_hook(value)

    return apply
