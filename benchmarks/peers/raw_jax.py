"""JAX by hand: `jit(shard_map(step))` with donated state and Optax. Nothing tuned but what it needs to run at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "4")  # with fewer threads the in-process collectives stand still

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.peers.work import REPLICAS, batches, params

jax.config.update("jax_num_cpu_devices", REPLICAS)

from benchmarks.peers.jax_model import loss_fn, optimizer  # noqa: E402


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    mesh = jax.make_mesh((REPLICAS,), ("r",), axis_types=(AxisType.Auto,))
    whole, cut = PartitionSpec(), PartitionSpec("r")
    loss, opt = loss_fn(name), optimizer(name)

    def step(state: Any, x: Any, y: Any) -> Any:
        p, s = state
        varying = jax.tree.map(lambda a: jax.lax.pcast(a, "r", to="varying"), p)
        value, gradients = jax.value_and_grad(loss)(varying, x, y)
        updates, s = opt.update(jax.lax.pmean(gradients, "r"), s, p)
        return (optax.apply_updates(p, updates), s), jax.lax.pmean(value, "r")

    fn = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, cut, cut), out_specs=(whole, whole)), donate_argnums=0)
    initial = params(name)
    state = jax.device_put((initial, opt.init(initial)), NamedSharding(mesh, whole))
    data = [jax.device_put(batch, NamedSharding(mesh, cut)) for batch in batches(name)]

    def one(i: int) -> Any:
        nonlocal state
        state, value = fn(state, *data[i % len(data)])
        return value

    return one, float
