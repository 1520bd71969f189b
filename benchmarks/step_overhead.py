"""What does `strategy.run` cost over hand-written `jit(shard_map)` with donation?

The step is nearly empty: it averages one number over the replicas and writes every variable.

    python -m benchmarks.step_overhead [--rounds 100] [--devices 1,2,4] [--variables 2,20,200]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._measure import Claim, Ratio, Report, at_most, cpu_devices, in_turns, median_of, timer

SHAPE = (8, 8)
CALLS = 20


def claim(devices: int, variables: int) -> Claim | None:
    if devices == 2:
        return at_most(1.08)
    return at_most(1.10) if (devices, variables) == (1, 20) else None


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--devices", default="1,2,4")
    parser.add_argument("--variables", default="2,20,200")
    asked = parser.parse_args(argv)
    devices, counts = (list(map(int, text.split(","))) for text in (asked.devices, asked.variables))
    cpu_devices(max(devices))
    report = Report(
        f"strategy.run against jit(shard_map): µs to completion, {asked.rounds} rounds of {CALLS} steps",
        "devices", "variables", "replicax", "by hand", ratio="replicax / by hand",
    )  # fmt: skip
    for number in devices:
        strategy = rx.MirroredStrategy(jax.devices()[:number])
        x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((4, 8)))
        for count in counts:
            ways = {"ours": ours(strategy, count, x), "by hand": by_hand(strategy, count, x)}
            times = in_turns({name: timer(way, CALLS) for name, way in ways.items()}, asked.rounds)
            report.add(
                str(number), str(count), median_of(times["ours"], "µs"), median_of(times["by hand"], "µs"),
                ratio=Ratio.between(times["ours"], times["by hand"]), claim=claim(number, count),
            )  # fmt: skip
    report.show()


if __name__ == "__main__":
    main()
