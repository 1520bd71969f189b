"""What do K steps in one program cost over a hand-written `lax.scan`, and over K calls of `strategy.run`?

The step trains a small linear model with momentum on a batch that lies on the devices. By hand: one
`jit(shard_map(scan))` that is given the K batches (and stacks them, as `run_steps` does), and one that is given them
stacked already, which no program that reads its data batch by batch has. Rounds are interleaved; printed are medians
per step.

    python -m benchmarks.steps_per_run --rounds 300
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import replicax as rx

rx.host.configure(cpu_devices=4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

ROWS, FEATURES = 16, 8
WHOLE, CUT = PartitionSpec(), PartitionSpec("replica")


def batches(strategy: rx.Strategy, count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((ROWS, FEATURES)).astype(np.float32) for _ in range(count)]
    return [jax.device_put(x, strategy.placement.split) for x in data]


def ours(strategy: rx.Strategy, data: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """K steps in one program, and K programs."""
    with strategy.scope():
        w = rx.Variable(jnp.zeros(FEATURES))
        optimizer = rx.Optimizer(optax.sgd(0.01, momentum=0.9), gradients="mean")
    given = data if strategy.num_replicas_in_sync == 1 else [rx.PerReplica(x, "rows") for x in data]
    forever = itertools.cycle(given)

    def replica_step(x: Any) -> Any:
        gradients = rx.grad(lambda: ((x @ w.value - 1) ** 2).mean(), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    def step(context: rx.MultiStepContext, x: Any) -> None:
        strategy.run(replica_step, (x,))

    def together() -> Any:
        strategy.run_steps(step, forever, len(data))
        return w._array

    def one_by_one() -> Any:
        for x in given:
            strategy.run(replica_step, (x,))
        return w._array

    return together, one_by_one


def by_hand(strategy: rx.Strategy, data: list[Any], stacked: bool) -> Callable[[], Any]:
    mesh = strategy.placement.mesh
    tx = optax.sgd(0.01, momentum=0.9)

    def body(state: Any, xs: Any) -> Any:
        def one(state: Any, x: Any) -> Any:
            w, slots = state
            gradient = jax.lax.pmean(jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w), "replica")
            updates, slots = tx.update(gradient, slots, w)
            return (optax.apply_updates(w, updates), slots), None

        return jax.lax.scan(one, state, xs if stacked else jnp.stack(xs))[0]

    spec = PartitionSpec(None, "replica") if stacked else CUT
    fn = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(WHOLE, spec), out_specs=WHOLE, check_vma=False), donate_argnums=0
    )
    w = jnp.zeros(FEATURES)
    state = jax.device_put((w, tx.init(w)), NamedSharding(mesh, WHOLE))
    xs = jax.device_put(jnp.stack(data), NamedSharding(mesh, spec)) if stacked else data

    def run() -> Any:
        nonlocal state
        state = fn(state, xs)
        return state[0]

    return run


def measure(devices: int, count: int, rounds: int) -> list[float]:
    """Median microseconds per step of each way."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    data = batches(strategy, count)
    ways = [*ours(strategy, data), by_hand(strategy, data, False), by_hand(strategy, data, True)]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 10):
        for way, seen in zip(ways, times, strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(way())
            if number >= 10:
                seen.append(time.perf_counter() - begun)
    return [statistics.median(seen) * 1e6 / count for seen in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    table = Table(title=f"µs per step, {rounds} interleaved rounds")
    for column in ("devices", "K", "run_steps", "K x run", "scan by hand", "stacked before", "run_steps / by hand"):
        table.add_column(column, justify="right")
    for devices in (1, 2, 4):
        for count in (10, 50):
            together, one_by_one, scan, stacked = measure(devices, count, rounds)
            numbers = [f"{x:.2f}" for x in (together, one_by_one, scan, stacked, together / scan)]
            table.add_row(str(devices), str(count), *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
