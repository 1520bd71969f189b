"""How long does a save hold the training loop up, and what do digests cost? Against Orbax as its users call it.

Two trees: large leaves, and many small ones. The caller is held up from the call of an asynchronous save to its return,
once with idle devices and once with a step in flight. Then the whole save until it is on disk, and reading back. Beside
what Orbax does we sync files to the disk and digest each value and each file, on the way back both again; the last line is
what the digests of one save take by themselves. Rounds are interleaved; printed are medians, and ratios of medians.

    python -m benchmarks.checkpoint_stall --rounds 15 --directory /tmp
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import replicax as rx

rx.host.configure(cpu_devices=2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

TREES = {"25 x 4 MB": (25, 1 << 20), "450 x 64 KB": (450, 1 << 14)}
"""How many leaves, of how many float32 numbers."""


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


def measure(leaves: int, size: int, rounds: int, directory: Path) -> dict[tuple[str, str], float]:
    """Median milliseconds of each thing, by who does it."""
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    rng = np.random.default_rng(0)
    tree = {f"leaf{i:03d}": rng.standard_normal(size).astype(np.float32) for i in range(leaves)}
    peers = {"ours": Ours(strategy, tree), "orbax": Orbax(strategy, tree)}
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, x: jnp.tanh(x @ x), x))
    x = jnp.ones((1024, 1024))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds + 2):

        def timed(what: str, who: str, call: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            result = call()
            if number >= 2:  # noqa: B023
                times[what, who].append((time.perf_counter() - begun) * 1e3)
            return result

        for who, peer in peers.items():
            path = directory / who
            begun = time.perf_counter()
            wait = timed("held up, idle", who, lambda: peer.begin(path))  # noqa: B023
            wait()
            if number >= 2:
                times["until on disk", who].append((time.perf_counter() - begun) * 1e3)
            timed("read back", who, lambda: peer.restore(path))  # noqa: B023
            shutil.rmtree(path)
            step = busy(x)
            wait = timed("held up, step in flight", who, lambda: peer.begin(path))  # noqa: B023
            wait()
            jax.block_until_ready(step)
            shutil.rmtree(path)
        timed("digests", "ours", lambda: [zlib.crc32(leaf.data) for leaf in tree.values() for _ in range(2)])
    return {key: statistics.median(seen) for key, seen in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", default=None, help="where to write; by default the system's temporary folder")
    options = parser.parse_args()
    table = Table(title=f"ms, {options.rounds} interleaved rounds")
    for column in ("leaves", "", "replicax", "Orbax", "replicax / Orbax"):
        table.add_column(column, justify="right" if column else "left")
    for name, (leaves, size) in TREES.items():
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            medians = measure(leaves, size, options.rounds, Path(directory))
        for what in ("held up, idle", "held up, step in flight", "until on disk", "read back"):
            ours, orbax = medians[what, "ours"], medians[what, "orbax"]
            table.add_row(name, what, f"{ours:.1f}", f"{orbax:.1f}", f"{ours / orbax:.2f}")
        digests = medians["digests", "ours"]
        table.add_row(
            name, "digests of a save", f"{digests:.1f}", "", f"{digests / medians['until on disk', 'ours']:.2f} of it"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
