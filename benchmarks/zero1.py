"""What does it save, and cost, to cut the optimizer's state over the replicas (ZeRO-1)?

Adam on a multi-layer perceptron, with whole slots and with cut ones. Memory is what the shards of the slots on one
device take; times are medians of interleaved rounds.

    python -m benchmarks.zero1 --rounds 30
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import replicax as rx

rx.host.configure(cpu_devices=4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

WIDTHS = (1024, 1024, 1024, 10)
ROWS = 128


class Model:
    def __init__(self, strategy: rx.Strategy, shard_state: bool) -> None:
        rng = np.random.default_rng(0)
        self.strategy = strategy
        with strategy.scope():
            self.weights = [
                rx.Variable(jnp.asarray(rng.standard_normal((m, n)) / m**0.5, jnp.float32), name=f"w{i}")
                for i, (m, n) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False))
            ]
            self.optimizer = rx.Optimizer(optax.adam(1e-3), gradients="mean", shard_state=shard_state)
        rows = strategy.num_replicas_in_sync * ROWS
        (self.x,) = strategy.distribute_dataset([rng.standard_normal((rows, WIDTHS[0])).astype(np.float32)])

    def replica_step(self, x: Any) -> Any:
        def loss() -> Any:
            h = x
            for w in self.weights:
                h = jnp.tanh(h @ w.value)
            return rx.mean((h**2).sum(1))

        value, gradients = rx.value_and_grad(loss, self.weights)()
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return value

    def step(self) -> None:
        jax.block_until_ready(self.strategy.run(self.replica_step, (self.x,)))
        jax.block_until_ready([w._array for w in self.weights])

    @property
    def bytes_per_device(self) -> int:
        return sum(slot._array.addressable_shards[0].data.nbytes for slot in self.optimizer.slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    table = Table(title=f"Adam, weights {WIDTHS}, {ROWS} rows per replica, {rounds} interleaved rounds")
    for column in (
        "devices",
        "slots per device, MB",
        "cut, MB",
        "step, ms",
        "cut, ms",
        "cut / whole",
        "largest difference",
    ):
        table.add_column(column, justify="right")
    for devices in (2, 4):
        models = [Model(rx.MirroredStrategy(jax.devices()[:devices]), cut) for cut in (False, True)]
        times: list[list[float]] = [[], []]
        for number in range(rounds + 5):
            for model, seen in zip(models, times, strict=True):
                begun = time.perf_counter()
                model.step()
                if number >= 5:
                    seen.append(time.perf_counter() - begun)
        whole, cut = (statistics.median(seen) * 1e3 for seen in times)
        pairs = zip(models[0].weights, models[1].weights, strict=True)
        difference = max(np.abs(a.numpy() - b.numpy()).max() for a, b in pairs)
        memory = [f"{model.bytes_per_device / 2**20:.2f}" for model in models]
        table.add_row(str(devices), *memory, f"{whole:.1f}", f"{cut:.1f}", f"{cut / whole:.2f}", f"{difference:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
