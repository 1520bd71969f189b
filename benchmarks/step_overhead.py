"""What does `strategy.run` cost over hand-written `jit(shard_map)` with donation?

The step is nearly empty: it averages one number over the replicas and writes every variable. Rounds are interleaved; printed
is the median time to completion, and the median over rounds of the ratio.

    python -m benchmarks.step_overhead --rounds 2000
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import replicax as rx

rx.host.configure(cpu_devices=4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

SHAPE = (8, 8)


def ours(strategy: rx.Strategy, count: int, x: Any) -> Callable[[], Any]:
    with strategy.scope():
        variables = [rx.Variable(jnp.full(SHAPE, float(i)), name=f"v{i}") for i in range(count)]

    def step(x: Any) -> Any:
        mean = rx.get_replica_context().all_reduce("mean", x.sum())
        for variable in variables:
            variable.assign(variable.value * 0.5 + mean)
        return mean

    args = (x,)
    return lambda: strategy.run(step, args)


def by_hand(strategy: rx.Strategy, count: int, x: Any) -> Callable[[], Any]:
    mesh, whole, cut = strategy.placement.mesh, PartitionSpec(), PartitionSpec("replica")

    def body(values: list[Any], x: Any) -> Any:
        mean = jax.lax.pmean(x.sum(), "replica")
        return [value * 0.5 + mean for value in values], mean

    fn = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(whole, cut), out_specs=whole, check_vma=False, axis_names={"replica"}),
        donate_argnums=0,
    )
    state = [jax.device_put(jnp.full(SHAPE, float(i)), NamedSharding(mesh, whole)) for i in range(count)]
    rows = x.data if isinstance(x, rx.PerReplica) else jax.device_put(x, NamedSharding(mesh, cut))

    def one() -> Any:
        nonlocal state
        state, mean = fn(state, rows)
        return mean

    return one


def measure(devices: int, count: int, rounds: int) -> tuple[float, float, float]:
    """Median microseconds of both, and the median of the paired ratios."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((4, 8)))
    both = [ours(strategy, count, x), by_hand(strategy, count, x)]
    times: list[list[float]] = [[], []]
    for number in range(rounds + 50):
        for fn, seen in zip(both, times, strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(fn())
            if number >= 50:
                seen.append(time.perf_counter() - begun)
    mine, raw = (statistics.median(seen) * 1e6 for seen in times)
    return mine, raw, mine / raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    table = Table(title=f"strategy.run against jit(shard_map), {rounds} interleaved rounds")
    for column in ("devices", "variables", "ours, µs", "by hand, µs", "ratio"):
        table.add_column(column, justify="right")
    for devices in (1, 2, 4):
        for count in (2, 20, 200):
            mine, raw, ratio = measure(devices, count, rounds if count < 200 else rounds // 4)
            table.add_row(str(devices), str(count), f"{mine:.1f}", f"{raw:.1f}", f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
