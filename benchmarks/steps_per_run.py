"""What do K steps in one program cost over a hand-written `lax.scan`, and over K calls of `strategy.run`?

The step trains a small linear model with momentum on a batch that lies on the devices. By hand: one
`jit(shard_map(scan))` that is given the K batches (and stacks them, as `run_steps` does), and one that is given them
stacked already, which no program that reads its data batch by batch has.

    python -m benchmarks.steps_per_run [--rounds 60] [--devices 1,2,4] [--steps 10,50]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._measure import Ratio, Report, Times, at_most, cpu_devices, in_turns, median_of, timer

CALLS = 5
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


def measure(devices: int, count: int, rounds: int) -> Times:
    """Seconds of `count` steps, each way."""
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    data = batches(strategy, count)
    together, one_by_one = ours(strategy, data)
    ways = {
        "run_steps": together,
        "run": one_by_one,
        "scan": by_hand(strategy, data, stacked=False),
        "stacked": by_hand(strategy, data, stacked=True),
    }
    return in_turns({name: timer(way, CALLS) for name, way in ways.items()}, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--devices", default="1,2,4")
    parser.add_argument("--steps", default="10,50", help="K")
    asked = parser.parse_args(argv)
    devices, counts = (list(map(int, text.split(","))) for text in (asked.devices, asked.steps))
    cpu_devices(max(devices))
    report = Report(
        f"K steps in one program: µs per step, {asked.rounds} rounds of {CALLS} calls",
        "devices", "K", "K times run", "run_steps", "scan by hand", "stacked before", "run / run_steps",
        ratio="run_steps / scan by hand",
    )  # fmt: skip
    for number in devices:
        for count in counts:
            times = {
                name: [s / count for s in seconds] for name, seconds in measure(number, count, asked.rounds).items()
            }
            report.add(
                str(number), str(count),
                *(median_of(times[name], "µs") for name in ("run", "run_steps", "scan", "stacked")),
                str(Ratio.between(times["run"], times["run_steps"])),
                ratio=Ratio.between(times["run_steps"], times["scan"]),
                claim=at_most(1.2) if (number, count) == (1, 50) else None,
            )  # fmt: skip
    report.show()


if __name__ == "__main__":
    main()
