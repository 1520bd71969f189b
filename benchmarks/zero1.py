"""What does it save, and cost, to cut the optimizer's state over the replicas (ZeRO-1)?

Adam on a multi-layer perceptron, with whole slots and with cut ones. Memory is what the shards of the slots on one
device take, as a part of what whole ones take.

    python -m benchmarks.zero1 [--rounds 20] [--devices 2,4] [--width 1024]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from benchmarks._measure import Ratio, Report, at_most, cpu_devices, in_turns, median_of, timer

ROWS = 128


class Model:
    def __init__(self, strategy: rx.Strategy, widths: Sequence[int], shard_state: bool) -> None:
        rng = np.random.default_rng(0)
        self.strategy = strategy
        with strategy.scope():
            self.weights = [
                rx.Variable(jnp.asarray(rng.standard_normal((m, n)) / m**0.5, jnp.float32), name=f"w{i}")
                for i, (m, n) in enumerate(itertools.pairwise(widths))
            ]
            self.optimizer = rx.Optimizer(optax.adam(1e-3), gradients="mean", shard_state=shard_state)
        rows = strategy.num_replicas_in_sync * ROWS
        (self.x,) = strategy.distribute_dataset([rng.standard_normal((rows, widths[0])).astype(np.float32)])

    def replica_step(self, x: Any) -> Any:
        def loss() -> Any:
            h = x
            for w in self.weights:
                h = jnp.tanh(h @ w.value)
            return rx.mean((h**2).sum(1))

        value, gradients = rx.value_and_grad(loss, self.weights)()
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        return value

    def step(self) -> Any:
        return self.strategy.run(self.replica_step, (self.x,)), [w._array for w in self.weights]

    @property
    def bytes_per_device(self) -> int:
        return sum(slot._array.addressable_shards[0].data.nbytes for slot in self.optimizer.slots)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--width", type=int, default=1024)
    asked = parser.parse_args(argv)
    devices = list(map(int, asked.devices.split(",")))
    cpu_devices(max(devices))
    widths = (asked.width, asked.width, asked.width, 16)
    report = Report(
        f"Adam, weights {widths}, {ROWS} rows per replica, {asked.rounds} rounds",
        "devices", "step, ms", "cut, ms", "cut / whole", "largest difference", "slots per device, MB", "cut, MB",
        ratio="memory, cut / whole",
    )  # fmt: skip
    for number in devices:
        strategy = rx.MirroredStrategy(jax.devices()[:number])
        models = {name: Model(strategy, widths, name == "cut") for name in ("whole", "cut")}
        times = in_turns({name: timer(model.step) for name, model in models.items()}, asked.rounds)
        pairs = zip(*(model.weights for model in models.values()), strict=True)
        difference = max(np.abs(a.numpy() - b.numpy()).max() for a, b in pairs)
        whole, cut = (model.bytes_per_device for model in models.values())
        report.add(
            str(number), median_of(times["whole"], "ms"), median_of(times["cut"], "ms"),
            str(Ratio.between(times["cut"], times["whole"])), f"{difference:.1e}",
            f"{whole / 2**20:.2f}", f"{cut / 2**20:.2f}", ratio=cut / whole, claim=at_most(round(1 / number + 0.01, 3)),
        )  # fmt: skip
    report.show()


if __name__ == "__main__":
    main()
