"""What does a step under central storage cost, compared with the same step written by hand?

By hand: broadcast the weights, one `jit(shard_map)` for losses and reduced gradients, one update on the parameter device.
Both do the same arithmetic on the same devices. The models are multi-layer perceptrons, Adam, `layers x width`.

    python -m benchmarks.central_storage [--rounds 30] [--replicas 2,4] [--models 4x64,4x256,20x64]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import replicax as rx
from benchmarks._measure import Ratio, Report, at_most, cpu_devices, in_turns, median_of, timer

CALLS = 10


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--models", default="4x64,4x256,20x64")
    parser.add_argument("--rows", type=int, default=64, help="per replica")
    options = parser.parse_args(argv)
    replicas = list(map(int, options.replicas.split(",")))
    cpu_devices(max(replicas))
    report = Report(
        f"A step with central storage: µs, {options.rows} rows per replica, {options.rounds} rounds of {CALLS} steps",
        "layers x width", "replicas", "replicax", "by hand", ratio="replicax / by hand",
    )  # fmt: skip
    for model in options.models.split(","):
        options.layers, options.width = map(int, model.split("x"))
        for options.replicas in replicas:
            ways = {"by hand": by_hand(options), "replicax": with_replicax(options)}
            losses = {name: float(step()) for name, step in ways.items()}
            assert abs(losses["by hand"] - losses["replicax"]) <= 1e-5 * abs(losses["by hand"]), losses
            times = in_turns({name: timer(step, CALLS) for name, step in ways.items()}, options.rounds)
            report.add(
                model, str(options.replicas), median_of(times["replicax"], "µs"), median_of(times["by hand"], "µs"),
                ratio=Ratio.between(times["replicax"], times["by hand"]), claim=at_most(1.15),
            )  # fmt: skip
    report.show()


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
