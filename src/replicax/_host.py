"""How must this process be set up so that many CPU devices work well?

XLA fixes its thread pool when the CPU backend starts, and with the pool it chooses by itself a program that runs on
several CPU devices can wait for ever. The allocator of the C library, left alone, gives large buffers back to the
kernel after each step and asks for them again. Both are cheap to set right before the backend starts and impossible
after. So `import replicax` does it, `configure` does it in words, and `require_threads` says so when it is too late.
"""

# Why two threads per device?
#
# An all-reduce between devices of one process is a rendezvous: the thread that runs device 0's program blocks until the
# programs of all other devices arrive. The same pool runs the matrix products inside those programs, so a product may
# wait for a thread that waits for the product. XLA's default is a thread per core, or per device if that is more. On
# 2 cores: 2 devices hang with 2 threads, sometimes with 3, never with 4; 4 devices need 8, and 8 devices 16. Twice the
# devices was also the fastest: an MLP step on 2 devices took 3.0, 3.6, 4.4, 4.9 ms with 4, 8, 16, 32 threads.
#
# Things that don't work:
#
# - A large pool alone. Two host threads that dispatch at the same time can queue their programs in another order on one
#   device than on the next, and then each device waits in another rendezvous. Hence `dispatch_lock`.
# - NPROC set after the first array: the backend reads it once.
# - NPROC set always. On a machine with 64 cores it would take threads away: only a pool that is too small is changed.
#
# Why touch the allocator?
#
# XLA takes a program's temporaries in one piece. For glibc a large piece is a mapping of its own: unmapped after the
# step, mapped and zeroed by page faults in the next. Without mappings, without trimming and with one arena the piece is
# found again. docs/host.md has the figures: the time won and the memory paid.

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from replicax import _jax
from replicax._errors import DeviceError, HostError, message

THREADS_PER_DEVICE = 2

# XLA asks these variables, in this order.
NPROC_VARIABLES = ("PJRT_NPROC", "NPROC")

# Set beside NPROC when replicax chose it. A child process inherits both, and may need more threads than its parent.
MARK = "REPLICAX_NPROC"

# From <malloc.h>. Values are C ints, so 2 GB is as good as "never trim".
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MALLOPT = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1))

# Held around every dispatch of a program for more than one device. Re-entrant, because writing back a step's results
# may itself dispatch a copy; that costs nothing, a plain lock is as slow (0.1 µs).
dispatch_lock = threading.RLock()

TOO_LATE = "untouched: the backend was running when replicax was imported"

_allocator = "untouched: replicax did not set up this process"


@dataclass(frozen=True, repr=False)
class HostReport:
    """What `describe` found out about this process."""

    cpu_devices: int
    backend_started: bool
    threads: int
    nproc: str
    allocator: str
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        state = "running" if self.backend_started else "not started"
        lines = [
            f"CPU devices  {self.cpu_devices} (backend {state})",
            f"threads      {self.threads} ({self.nproc})",
            f"allocator    {self.allocator}",
            f"advice       {self.advice[0] if self.advice else 'nothing to do'}",
            *(f"             {line}" for line in self.advice[1:]),
        ]
        return "\n".join(lines)


def configure(*, cpu_devices: int) -> None:
    """Gives this process `cpu_devices` CPU devices, with the threads and the allocator that they need.

    A laptop has one CPU device as JAX sees it, so a strategy over four replicas has nothing to run on. Call this first
    thing in a script or notebook, before anything asks JAX for a device or an array; calling it again with the same
    number does nothing. It is for trying out and testing programs, and for machines whose CPUs do the training.

    `REPLICAX_HOST_TUNING=0` in the environment leaves threads and allocator alone. A smaller `NPROC` in the environment
    gives way: what you write in the program counts more.

    Args:
      cpu_devices: How many, at least 1.

    Raises:
      DeviceError: If `cpu_devices` is less than 1.
      HostError: If the backend runs already, with another number of devices or too few threads.

    Example:
      >>> import replicax as rx
      >>> rx.host.configure(cpu_devices=8)
      >>> strategy = rx.MirroredStrategy()
      >>> strategy.num_replicas_in_sync
      8
    """
    call = f"`rx.host.configure(cpu_devices={cpu_devices})`"
    if cpu_devices < 1:
        raise DeviceError(message(f"{call} asks for less than one device"))
    if _jax.backend_started():
        cpus = _running_cpus()
        if len(cpus) != cpu_devices:
            raise _backend_runs(call, cpu_devices, len(cpus))
        require_threads(cpus, call)
        return
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    _tune(cpu_devices, override=True)


def describe() -> HostReport:
    """Says how this process is set up for several CPU devices, and what to change.

    The first thing to look at when a program on CPU devices hangs, or is slower than it should be. It starts nothing:
    asked before the backend runs, it tells what would come.

    Example:
      >>> import replicax as rx
      >>> report = rx.host.describe()
      >>> report.cpu_devices
      8
      >>> report.threads >= 2 * report.cpu_devices
      True
    """
    started = _jax.backend_started()
    devices = len(_running_cpus()) if started else _devices_asked_for()
    need = THREADS_PER_DEVICE * devices
    threads = _threads_running(need) if started else _threads_to_come(devices)
    return HostReport(devices, started, threads, _nproc_in_words(), _allocator, tuple(_advice(devices, threads)))


def tune_at_import() -> None:
    """Sets this process up for the number of CPU devices that was asked for; the package calls it once."""
    _tune(_devices_asked_for())


def tune_before_start() -> None:
    """The same once more for `jax_num_cpu_devices` set after the import; call it before asking JAX for devices."""
    if not _jax.backend_started():
        _tune(_devices_asked_for())


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Puts off garbage collection while modules are imported.

    JAX has made so many objects by then that a full collection falls due among our own imports. It takes longer than all
    of them, 40 ms and more, and finds nothing: what an import makes is there to stay.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def require_threads(devices: Sequence[jax.Device], call: str = "A strategy") -> None:
    """Refuses to go on if programs over `devices` could wait for ever.

    Args:
      devices: The devices of the strategy. Only the CPU devices of this process matter.
      call: The user's call, for the message.

    Raises:
      HostError: If the CPU backend runs with fewer than two threads for each of them.
    """
    cpus = [d for d in devices if d.platform == "cpu" and d.process_index == jax.process_index()]
    need = THREADS_PER_DEVICE * len(cpus)
    if len(cpus) > 1 and (threads := _threads_running(need)) < need:
        raise _too_few_threads(call, len(cpus), threads)


def keeps_buffers() -> bool:
    """Whether large buffers stay with this process between steps; else each step takes them from the kernel anew."""
    return _allocator.startswith("tuned")


def _switched_off() -> bool:
    return os.environ.get("REPLICAX_HOST_TUNING") == "0"


def _tune(devices: int, override: bool = False) -> None:
    global _allocator
    if _switched_off():
        _allocator = "untouched: REPLICAX_HOST_TUNING=0"
    elif _jax.backend_started():
        _allocator = TOO_LATE
    else:
        _provide_threads(THREADS_PER_DEVICE * devices, override)
        _allocator = _tune_allocator() if devices > 1 else "untouched: there is one CPU device"


def _provide_threads(need: int, override: bool) -> None:
    name, value = _nproc()
    chosen_by_replicax = value is not None and value == os.environ.get(MARK)
    if value is not None and not (chosen_by_replicax or override):
        return
    if _as_count(value, _cores()) < need:
        os.environ[name] = os.environ[MARK] = str(need)


def _tune_allocator() -> str:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "gnu_get_libc_version"):
        return "untouched: only glibc's can be tuned"
    if not all(libc.mallopt(option, value) for option, value in MALLOPT):
        return "untouched: the process has an allocator that is not glibc's"
    return "tuned: keeps large buffers between steps"


def _devices_asked_for() -> int:
    """How many CPU devices the backend will make. JAX's setting beats XLA's flag."""
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return _jax.cpu_devices_setting() or (int(flags[-1]) if flags else 1)


def _running_cpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS names other platforms only
        return []


def _threads_to_come(devices: int) -> int:
    return max(_as_count(_nproc()[1], _cores()), devices)


def _threads_running(enough: int) -> int:
    """The size of the pool. A short count may mean that threads have only just started, so look again for a moment."""
    deadline = time.monotonic() + 0.25
    while (threads := _jax.cpu_pool_size()) is not None and threads < enough and time.monotonic() < deadline:
        time.sleep(0.005)
    return _threads_to_come(len(_running_cpus())) if threads is None else threads


def _nproc() -> tuple[str, str | None]:
    name = next((name for name in NPROC_VARIABLES if name in os.environ), "NPROC")
    return name, os.environ.get(name)


def _nproc_in_words() -> str:
    name, value = _nproc()
    if value is None:
        return f"NPROC is not set, {_cores()} cores"
    return f"{name}={value}, {'chosen by replicax' if value == os.environ.get(MARK) else 'from the environment'}"


def _as_count(value: str | None, default: int) -> int:
    return int(value) if value is not None and value.isdecimal() else default


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _advice(devices: int, threads: int) -> list[str]:
    advice = []
    if devices == 1:
        advice.append("for more CPU devices write `rx.host.configure(cpu_devices=n)` before anything asks JAX for one")
    if devices > 1 and threads < THREADS_PER_DEVICE * devices:
        advice += [f"collectives can hang: {line}" for line in _ways_to_threads(devices)]
    if devices > 1 and _allocator == TOO_LATE:
        advice.append("import replicax before anything asks JAX for a device, so that it can tune the allocator")
    return advice


def _ways_to_threads(devices: int) -> list[str]:
    from_outside = f"start the program with `NPROC={THREADS_PER_DEVICE * devices}` in its environment"
    if _switched_off():
        return [from_outside, "remove `REPLICAX_HOST_TUNING=0` from its environment"]
    return [
        from_outside,
        f"write `rx.host.configure(cpu_devices={devices})` before anything that asks JAX for a device or an array",
    ]


def _too_few_threads(call: str, devices: int, threads: int) -> HostError:
    need = THREADS_PER_DEVICE * devices
    return HostError(
        message(
            f"{call} needs {need} threads for its {devices} CPU devices, and JAX's CPU backend runs with {threads}",
            [
                f"now: {threads} ({_nproc_in_words()})",
                f"needed: {need}, {THREADS_PER_DEVICE} for each device",
            ],
            "In an all-reduce every device keeps a thread waiting for the other devices, so with fewer threads the"
            " program can wait for ever. The number is fixed when the backend starts.",
            _ways_to_threads(devices),
        )
    )


def _backend_runs(call: str, asked: int, have: int) -> HostError:
    return HostError(
        message(
            f"{call} comes too late: JAX's CPU backend runs already",
            [f"asked for: {asked} CPU devices", f"running: {have}"],
            "The number of devices is fixed when the backend starts, which the first array or `jax.devices()` does.",
            [
                "move the call to the top of the program, right after `import replicax as rx`",
                f"start the program with `JAX_NUM_CPU_DEVICES={asked}` in its environment",
            ],
        )
    )
