"""How long does a save hold the training loop up, and what do digests cost? Against Orbax as its users call it.

Two trees: large leaves, and many small ones. The caller is held up from the call of an asynchronous save to its return,
once with idle devices and once with a step in flight. Then the whole save until it is on disk, and reading back. Beside
what Orbax does we sync files to the disk and digest each value and each file, on the way back both again; the last line is
what the digests of one save take by themselves, as a part of the whole save.

    python -m benchmarks.checkpoint_stall [--rounds 10] [--trees 25x4M,450x64K] [--directory DIRECTORY]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._measure import Ratio, Report, cpu_devices, median_of
from benchmarks.peers.gradients import count_and_bytes


class Ours:
    def __init__(self, strategy: rx.Strategy, tree: dict[str, np.ndarray]) -> None:
        with strategy.scope():
            self.variables = {name: rx.Variable(value, name=name) for name, value in tree.items()}
        self.checkpoint = rx.Checkpoint(tree=self.variables)

    def begin(self, path: Path) -> Callable[[], None]:
        return self.checkpoint.save_async(path).wait

    def restore(self, path: Path) -> None:
        self.checkpoint.restore(path).assert_consumed()
        jax.block_until_ready([variable.value for variable in self.variables.values()])


class Orbax:
    def __init__(self, strategy: rx.Strategy, tree: dict[str, np.ndarray]) -> None:
        self.tree = jax.device_put(tree, NamedSharding(strategy.placement.mesh, PartitionSpec()))
        self.checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def begin(self, path: Path) -> Callable[[], None]:
        self.checkpointer.save(path, args=ocp.args.StandardSave(self.tree))
        return self.checkpointer.wait_until_finished

    def restore(self, path: Path) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.tree)
        jax.block_until_ready(self.checkpointer.restore(path, args=ocp.args.StandardRestore(abstract)))


def measure(leaves: int, size: int, rounds: int, directory: Path, products: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each thing, by who does it."""
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    rng = np.random.default_rng(0)
    tree = {f"leaf{i:03d}": rng.standard_normal(size // 4).astype(np.float32) for i in range(leaves)}
    peers = {"ours": Ours(strategy, tree), "orbax": Orbax(strategy, tree)}
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, products, lambda i, x: jnp.tanh(x @ x), x))
    x = jnp.ones((1024, 1024))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds + 2):

        def timed(what: str, who: str, call: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            result = call()
            if number >= 2:  # noqa: B023
                times[what, who].append(time.perf_counter() - begun)
            return result

        for who, peer in peers.items():
            path = directory / who
            begun = time.perf_counter()
            wait = timed("held up, idle", who, lambda: peer.begin(path))  # noqa: B023
            wait()
            if number >= 2:
                times["until on disk", who].append(time.perf_counter() - begun)
            timed("read back", who, lambda: peer.restore(path))  # noqa: B023
            shutil.rmtree(path)
            step = busy(x)
            wait = timed("held up, step in flight", who, lambda: peer.begin(path))  # noqa: B023
            wait()
            jax.block_until_ready(step)
            shutil.rmtree(path)
        timed("digests", "ours", lambda: [zlib.crc32(leaf.data) for leaf in tree.values() for _ in range(2)])
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trees", default="25x4M,450x64K", help="how many leaves, of how many bytes")
    parser.add_argument("--directory", default=None, help="where to write; by default the system's temporary folder")
    parser.add_argument("--products", type=int, default=20, help="matrix products of the step in flight")
    options = parser.parse_args(argv)
    cpu_devices(2)
    report = Report(
        f"Saving and reading back: ms, {options.rounds} rounds",
        "leaves", "", "replicax", "Orbax", ratio="replicax / Orbax",
    )  # fmt: skip
    for name in options.trees.split(","):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            times = measure(*count_and_bytes(name), options.rounds, Path(directory), options.products)
        for what in ("held up, idle", "held up, step in flight", "until on disk", "read back"):
            ours, orbax = times[what, "ours"], times[what, "orbax"]
            report.add(name, what, median_of(ours, "ms"), median_of(orbax, "ms"), ratio=Ratio.between(ours, orbax))
        digests = Ratio.between(times["digests", "ours"], times["until on disk", "ours"])
        report.add(name, "digests of a save", median_of(times["digests", "ours"], "ms"), "", ratio=f"{digests} of it")
    report.show()


if __name__ == "__main__":
    main()
