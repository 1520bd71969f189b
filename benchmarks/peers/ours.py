"""replicax, as its README says: a scope, variables, an optimizer, `strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import replicax as rx
from benchmarks.peers.work import REPLICAS, batches, params

rx.host.configure(cpu_devices=REPLICAS)

from benchmarks.peers.jax_model import loss_fn, optimizer  # noqa: E402


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    strategy = rx.MirroredStrategy()
    loss = loss_fn(name)
    with strategy.scope():
        variables = {key: rx.Variable(value, name=key) for key, value in params(name).items()}
        opt = rx.Optimizer(optimizer(name), gradients="mean")
    flat = list(variables.values())

    def step(x: Any, y: Any) -> Any:
        def here() -> Any:
            return loss({key: variable.value for key, variable in variables.items()}, x, y)

        value, gradients = rx.value_and_grad(here, flat)()
        opt.apply_gradients(zip(gradients, flat, strict=True))
        return rx.get_replica_context().all_reduce("mean", value)

    data = list(strategy.distribute_dataset(batches(name)))
    return lambda i: strategy.run(step, args=data[i % len(data)]), float
