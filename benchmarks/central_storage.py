"""What does a step under central storage cost, compared with the same step written by hand?

By hand: broadcast the weights, one `jit(shard_map)` for losses and reduced gradients, one update on the parameter
device. Both do the same arithmetic on the same devices, in turns, so that whatever
else the machine does slows both alike.

    python benchmarks/central_storage.py [--replicas 4] [--layers 4] [--width 256]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import replicax as rx

ROUNDS, STEPS = 15, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    rx.host.configure(cpu_devices=options.replicas)

    ways = {"by hand": by_hand(options), "replicax": with_replicax(options)}
    losses = {name: float(step()) for name, step in ways.items()}
    assert abs(losses["by hand"] - losses["replicax"]) <= 1e-5 * abs(losses["by hand"]), losses
    times = interleaved(ways)
    for name, seconds in times.items():
        print(f"{name:10} {1e6 * seconds:9.1f} us per step")
    print(f"ratio      {times['replicax'] / times['by hand']:9.3f}")


def interleaved(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median time of one step, each way measured in turns with the others."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                last = step()
            last.block_until_ready()
            if turn:  # the first round warms up
                taken[name].append((time.perf_counter() - start) / STEPS)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def data(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    square = (options.width, options.width)
    weights = [random.normal(size=square).astype(np.float32) / options.width for _ in range(options.layers)]
    x = random.normal(size=(options.rows * options.replicas, options.width)).astype(np.float32)
    return weights, x, random.normal(size=x.shape).astype(np.float32)


def loss_of(weights: list[Any], x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def by_hand(options: argparse.Namespace) -> Callable[[], Any]:
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    devices = jax.devices()[: options.replicas]
    mesh = Mesh(devices, ("replica",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    home = SingleDeviceSharding(devices[0])
    transform = optax.adam(1e-3)
    weights, x, y = data(options)
    weights = jax.device_put(weights, home)
    state = transform.init(weights)
    x, y = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("replica")))

    def replica(weights: Any, x: Any, y: Any) -> Any:
        return jax.lax.pmean(jax.value_and_grad(loss_of)(weights, x, y), "replica")

    specs = (PartitionSpec(), PartitionSpec("replica"), PartitionSpec("replica"))
    gradients = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))

    def update(weights: Any, state: Any, grads: Any) -> Any:
        change, state = transform.update(grads, state, weights)
        return optax.apply_updates(weights, change), state

    update = jax.jit(update, donate_argnums=(0, 1))

    def step() -> Any:
        nonlocal weights, state
        loss, grads = gradients(jax.device_put(weights, everywhere), x, y)
        grads = jax.device_put(jax.tree.map(lambda g: g.addressable_data(0), grads), home)
        weights, state = update(weights, state, grads)
        return loss

    return step


def with_replicax(options: argparse.Namespace) -> Callable[[], Any]:
    import jax
    import optax

    strategy = rx.experimental.CentralStorageStrategy(jax.devices()[: options.replicas], jax.devices()[0])
    initial, x, y = data(options)
    with strategy.scope():
        weights = [rx.Variable(w, name=f"w{i}") for i, w in enumerate(initial)]
        optimizer = rx.Optimizer(optax.adam(1e-3), gradients="mean")
        optimizer.build(weights)
    x, y = (strategy.experimental_distribute_values_from_function(_rows_of(a, options)) for a in (x, y))

    def train(x: Any, y: Any) -> Any:
        loss, grads = rx.value_and_grad(lambda: loss_of([w.value for w in weights], x, y), weights)()
        optimizer.apply_gradients(zip(grads, weights, strict=True))
        return rx.get_replica_context().all_reduce("mean", loss)

    return lambda: strategy.run(train, (x, y))


def _rows_of(array: Any, options: argparse.Namespace) -> Callable[[rx.ValueContext], Any]:
    def rows(context: rx.ValueContext) -> Any:
        start = context.replica_id_in_sync_group * options.rows
        return array[start : start + options.rows]

    return rows


if __name__ == "__main__":
    main()
