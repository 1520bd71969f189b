"""`jax.pmap` with donated, stacked state."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "4")

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers.work import REPLICAS, batches, params

jax.config.update("jax_num_cpu_devices", REPLICAS)

from benchmarks.peers.jax_model import loss_fn, optimizer  # noqa: E402


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    loss, opt = loss_fn(name), optimizer(name)

    def step(state: Any, x: Any, y: Any) -> Any:
        p, s = state
        value, gradients = jax.value_and_grad(loss)(p, x, y)
        updates, s = opt.update(jax.lax.pmean(gradients, "r"), s, p)
        return (optax.apply_updates(p, updates), s), jax.lax.pmean(value, "r")

    fn = jax.pmap(step, axis_name="r", donate_argnums=0)
    stacked = NamedSharding(Mesh(np.array(jax.local_devices()), ("r",)), PartitionSpec("r"))

    def stack(a: Any) -> Any:
        return a.reshape(REPLICAS, a.shape[0] // REPLICAS, *a.shape[1:])

    initial = params(name)
    first = (initial, opt.init(initial))
    state = jax.device_put(jax.tree.map(lambda a: np.stack([a] * REPLICAS), first), stacked)
    data = [jax.device_put((stack(x), stack(y)), stacked) for x, y in batches(name)]

    def one(i: int) -> Any:
        nonlocal state
        state, value = fn(state, *data[i % len(data)])
        return value

    return one, lambda value: float(np.asarray(value.addressable_shards[0].data).reshape(-1)[0])
