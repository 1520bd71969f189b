"""A process is set up for many CPU devices before the backend starts, or says that it is too late."""

import gc
import sys
import threading

import jax
import pytest

from replicax import _host, _jax
from replicax._errors import DeviceError, HostError
from tests.fresh import python

# `import replicax` calls `tune_at_import`; the programs below do it by its name, because it is what they are about.
TUNED = "from replicax import _host; _host.tune_at_import()\n"

# A dispatch per step, as in training: no step waits for the one before, and every step has a collective.
PSUM_LOOP = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def psum_loop(steps):
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("replica",), axis_types=(AxisType.Auto,))
    def mean(x):
        return jax.lax.psum(x, "replica") / devices
    step = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False))
    x = jax.device_put(jnp.arange(float(devices)), NamedSharding(mesh, P("replica")))
    for _ in range(steps):
        with _host.dispatch_lock:
            x = step(x)
    return x.tolist()
"""


@pytest.mark.parametrize(
    ("devices", "steps"), [(2, 100_000), (4, 20_000), (8, 3_000)], ids=["2-devices", "4-devices", "8-devices"]
)
def test_a_long_loop_of_all_reduces_comes_to_its_end(devices, steps):
    program = TUNED + PSUM_LOOP + f"print(psum_loop({steps}))"

    printed = python(program, deadline=240, JAX_NUM_CPU_DEVICES=str(devices))

    assert printed == str([(devices - 1) / 2] * devices)


def test_two_threads_that_dispatch_under_the_lock_come_to_their_end():
    program = """
import threading
results = [None, None]
def work(i):
    results[i] = psum_loop(3000)
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(results)
"""
    printed = python(TUNED + PSUM_LOOP + program, JAX_NUM_CPU_DEVICES="4")

    assert printed == str([[1.5] * 4] * 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"JAX_NUM_CPU_DEVICES": "4"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_NUM_CPU_DEVICES": "4"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_force_host_platform_device_count=4"},
    ],
    ids=["jax-setting", "xla-flag", "jax-setting-beats-xla-flag", "last-xla-flag"],
)
def test_threads_follow_the_number_of_devices_that_was_asked_for(settings):
    program = "import jax; from replicax import _jax; print(len(jax.devices()), _jax.cpu_pool_size())"

    assert python(TUNED + program, **settings) == f"4 {max(8, _host._cores())}"


def test_importing_replicax_sets_the_process_up():
    program = "import replicax, jax; from replicax import _host; _host.require_threads(jax.devices()); print('ready')"

    assert python(program, JAX_NUM_CPU_DEVICES="8") == "ready"


def test_one_device_leaves_the_process_alone():
    program = "import os; print(os.environ.get('NPROC')); print(_host.describe().allocator)"

    assert python(TUNED + program) == "None\nuntouched: there is one CPU device"


def test_the_switch_leaves_the_process_alone():
    program = "import os; print(os.environ.get('NPROC')); print(_host.describe().allocator)"

    printed = python(TUNED + program, JAX_NUM_CPU_DEVICES="8", REPLICAX_HOST_TUNING="0")

    assert printed == "None\nuntouched: REPLICAX_HOST_TUNING=0"


def test_nproc_from_the_environment_is_kept_at_import():
    program = "import os; print(os.environ['NPROC'])"

    assert python(TUNED + program, JAX_NUM_CPU_DEVICES="8", NPROC="40") == "40"


def test_a_child_gets_its_own_number_of_threads_not_its_parents():
    program = "import os; print(os.environ['NPROC'])"

    printed = python(TUNED + program, JAX_NUM_CPU_DEVICES="64", NPROC="4", REPLICAX_NPROC="4")

    assert printed == "128"


def test_devices_asked_for_after_the_import_get_their_threads_before_the_start():
    program = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
_host.tune_before_start()
_host.require_threads(jax.devices())
print(len(jax.devices()), _host.describe().allocator)
"""
    assert python(TUNED + program) == "4 tuned: keeps large buffers between steps"


def test_nothing_is_changed_once_the_backend_runs():
    program = """
import os, jax
jax.devices()
from replicax import _host
_host.tune_at_import()
print(os.environ.get("NPROC"), _host.describe().allocator)
"""
    assert python(program, JAX_NUM_CPU_DEVICES="64") == f"None {_host.TOO_LATE}"


def test_asking_how_the_process_is_set_up_starts_nothing():
    program = "print(_host.describe()); from replicax import _jax; print(_jax.backend_started())"

    printed = python(TUNED + program, JAX_NUM_CPU_DEVICES="64")

    assert printed.splitlines() == [
        "CPU devices  64 (backend not started)",
        "threads      128 (NPROC=128, chosen by replicax)",
        "allocator    tuned: keeps large buffers between steps",
        "advice       nothing to do",
        "False",
    ]


def test_too_few_threads_are_refused_with_the_way_out():
    program = """
import jax
from replicax import _errors
try:
    _host.require_threads(jax.devices(), "`rx.MirroredStrategy()`")
except _errors.HostError as error:
    print(error)
"""
    printed = python(TUNED + program, JAX_NUM_CPU_DEVICES="64", NPROC="2")

    assert printed.startswith("`rx.MirroredStrategy()` needs 128 threads for its 64 CPU devices")
    assert "now: 64 (NPROC=2, from the environment)" in printed
    assert "`NPROC=128`" in printed
    assert "`rx.host.configure(cpu_devices=64)`" in printed


def test_configure_gives_devices_and_threads_and_can_be_repeated():
    program = """
from replicax import host, _host
host.configure(cpu_devices=4)
import jax
_host.require_threads(jax.devices())
host.configure(cpu_devices=4)
print(len(jax.devices()), host.describe().allocator)
"""
    assert python(program, NPROC="2") == "4 tuned: keeps large buffers between steps"


def test_configure_is_refused_when_the_backend_runs_with_other_devices():
    program = """
import jax
from replicax import host, _errors
jax.devices()
try:
    host.configure(cpu_devices=4)
except _errors.HostError as error:
    print(error)
"""
    printed = python(program)

    assert "comes too late" in printed
    assert "running: 1" in printed
    assert "JAX_NUM_CPU_DEVICES=4" in printed


@pytest.mark.parametrize("devices", [0, -1])
def test_configure_wants_at_least_one_device(devices):
    with pytest.raises(DeviceError, match="less than one device"):
        _host.configure(cpu_devices=devices)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults and tunes glibc")
def test_the_tuned_allocator_keeps_large_buffers_between_steps():
    """A step with a result of 40 MB: 10,240 pages, which untouched glibc maps anew each time. The tuned heap has gaps in
    the beginning that a buffer of the same size does not fit into, because it has to be aligned; so it grows for a while."""
    program = """
import resource
import jax, jax.numpy as jnp
step = jax.jit(lambda x: x + 1)
x = jnp.zeros((10 << 20,))
for _ in range(80): step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    tuned = int(python(TUNED + program, JAX_NUM_CPU_DEVICES="2"))
    untouched = int(python(TUNED + program, JAX_NUM_CPU_DEVICES="2", REPLICAX_HOST_TUNING="0"))

    assert tuned * 5 < untouched


def test_an_allocator_that_is_not_glibcs_is_left_alone(monkeypatch):
    monkeypatch.setattr(_host.sys, "platform", "darwin")

    assert _host._tune_allocator() == "untouched: only glibc's can be tuned"


def test_the_pool_is_estimated_where_threads_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(_jax, "cpu_pool_size", lambda: None)
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setenv("NPROC", "9")

    with pytest.raises(HostError, match=r"needs 16 threads for its 8 CPU devices, and JAX's CPU backend runs with 9"):
        _host.require_threads(jax.devices())


def test_enough_threads_and_single_devices_are_accepted():
    _host.require_threads(jax.devices())
    _host.require_threads(jax.devices()[:1])


def test_the_dispatch_lock_lets_its_owner_in_again_and_keeps_others_out():
    entered = []
    with _host.dispatch_lock, _host.dispatch_lock:
        other = threading.Thread(target=lambda: entered.append(_host.dispatch_lock.acquire(blocking=False)))
        other.start()
        other.join()

    assert entered == [False]


def test_garbage_is_collected_again_after_imports_also_after_one_that_fails():
    with _host.collecting_later():
        assert not gc.isenabled()
    assert gc.isenabled()

    with pytest.raises(ImportError), _host.collecting_later():
        raise ImportError
    assert gc.isenabled()
