"""What machine do the tests run on, and did this test leave anything behind?

Eight CPU devices with the thread pool that their collectives need. After each test the process must be as it was
before: no new thread, no changed environment variable, no new file in the working directory, no strategy still entered, and no
more memory taken than one process of several may have.
"""

import os

os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "16", "REPLICAX_HOST_TUNING": "0", "KERAS_BACKEND": "jax"}

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from replicax import _context

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # the backend starts here, so that no test decides by accident how

# Pools that a library starts on first use and keeps for the whole process, by the beginning of the thread's name.
LASTING_THREADS = ("asyncio_", "orbax", "ts_pool")

MOST_MEMORY = 2 * 2**30
"""What a process may hold on to after a test, in bytes. Thousands of tests leave tens of gigabytes of compiled code."""

# Variables that a library sets when it is imported, which may happen inside a test.
LIBRARY_VARIABLES = ("KMP_", "PYTEST_", "TF_FORCE_GPU_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run it with `pytest --slow`"))


@pytest.fixture
def compilations() -> Callable[[], AbstractContextManager[list[str]]]:
    """Records the names of the programs that XLA compiles inside a ``with`` block.

    ``with compilations() as names: strategy.run(step)`` and then ``assert names == []`` says that the call compiled
    nothing. Small programs that JAX makes for itself, like ``jit(broadcast_in_dim)``, are recorded as well.
    """
    return record_compilations


@contextmanager
def record_compilations() -> Iterator[list[str]]:
    names: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def memory_within_bounds() -> Iterator[None]:
    """JAX keeps what it compiled, line-by-line steps compile a lot, and glibc keeps what JAX gives back."""
    yield
    if _resident() > MOST_MEMORY:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    new = [t for t in threading.enumerate() if t not in before and not t.name.startswith(LASTING_THREADS)]
    _join(new, 0.5)  # a thread that has been told to end may still be on its way
    if any(thread.is_alive() for thread in new):
        gc.collect()  # the pool of a Keras call that failed is told to end when it is collected
        _join(new, 5)
    left = [t.name for t in new if t.is_alive()]
    assert not left, f"threads still running after the test: {left}"


@pytest.fixture(autouse=True)
def no_variable_left_behind() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    for name in changed:  # so that the next test is not blamed
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"environment variables changed by the test: {changed}"


@pytest.fixture(autouse=True)
def no_file_left_behind() -> Iterator[None]:
    directory = Path.cwd()
    before = _names_in(directory)
    yield
    assert Path.cwd() == directory, f"the test left the working directory at {Path.cwd()}"
    left = _names_in(directory) - before
    assert not left, f"files left in {directory} by the test (use tmp_path): {sorted(left)}"


@pytest.fixture(autouse=True)
def no_strategy_left_entered() -> Iterator[None]:
    yield
    stacks = (_context.thread.modes, _context.thread.creators, _context.thread.overlays)
    left = [repr(entry) for stack in stacks for entry in stack]
    for stack in stacks:
        stack.clear()
    assert not left, f"still entered after the test: {left}"


def _resident() -> int:
    """The memory of this process in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}


def _names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir() if not entry.name.startswith(".")}
