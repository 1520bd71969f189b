"""A training run that saves after every step and is killed by plan.

    python -m tests.faults.checkpoint_child DIRECTORY STEPS [options]

`--kill-at N` kills the process at its N-th event below the directory, counted from the first step: a file that is
opened, a folder that is made, a rename, a removal. `--kill-at-byte N` has the kernel kill it when a file grows beyond N
bytes, which is in the middle of a write, inside TensorStore's own threads. `--full-at-byte N` makes that write fail
instead, as on a full disk.
"""

import argparse
import json
import os
import resource
import signal
import sys
import warnings
import zlib
from typing import Any

import numpy as np

import replicax as rx
from replicax.train import Checkpoint, CheckpointManager

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Run:
    """State whose values at step n are known: two leaves with files of their own, small ones in a pack, a generator."""

    def __init__(self) -> None:
        self.large = rx.Variable(np.arange(1 << 18, dtype=np.float32))
        self.larger = rx.Variable(np.arange(3 << 17, dtype=np.float32))
        self.small = [rx.Variable(np.full(i + 1, 0.5, np.float32)) for i in range(5)]
        self.noise = np.random.default_rng(0)
        self.done = rx.Variable(0)

    def step(self) -> None:
        for variable in (self.large, self.larger, *self.small):
            variable.assign(variable.value * np.float32(1.01) + np.float32(self.noise.random()))
        self.done.assign_add(1)

    def digest(self) -> int:
        crc = 0
        for variable in (self.large, self.larger, *self.small, self.done):
            crc = zlib.crc32(variable.numpy().tobytes(), crc)
        return zlib.crc32(repr(self.noise.bit_generator.state).encode(), crc)


def kill_at(event_number: int, directory: str) -> None:
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and args and str(args[0]).startswith(directory):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def limit_files(to_bytes: int, *, deadly: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (to_bytes, to_bytes))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-at-byte", type=int)
    parser.add_argument("--full-at-byte", type=int)
    parser.add_argument("--async-save", action="store_true")
    options = parser.parse_args()

    run = Run()
    manager = CheckpointManager(Checkpoint(run=run), options.directory, max_to_keep=2, async_save=options.async_save)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.restore_latest()
    told = [str(warning.message).splitlines()[0] for warning in caught if warning.category is RuntimeWarning]
    print(json.dumps({"step": int(run.done), "digest": run.digest(), "told": told}), flush=True)

    if options.kill_at:
        kill_at(options.kill_at, options.directory)
    if options.kill_at_byte or options.full_at_byte:
        limit_files(options.kill_at_byte or options.full_at_byte, deadly=bool(options.kill_at_byte))
    with manager:
        while int(run.done) < options.steps:
            run.step()
            manager.save(int(run.done))
    print(json.dumps({"step": int(run.done), "digest": run.digest(), "told": []}), flush=True)


if __name__ == "__main__":
    main()
