"""Which private names of JAX and XLA do we lean on?

Everything replicax uses that JAX does not promise to keep is reached through this file, one function each, with the
reason why no public name would do. A new JAX release that breaks replicax breaks it here.
"""

import sys
from pathlib import Path

from jax._src import xla_bridge


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
