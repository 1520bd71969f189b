"""One process of a job of several: joins it, trains the model of the laws, prints what came out as JSON."""

import json
import sys

import jax

coordinator, number, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", int(sys.argv[4]))
jax.distributed.initialize(coordinator, number, index, local_device_ids=None, initialization_timeout=60)

import numpy as np
import optax

import replicax as rx

strategy = rx.MirroredStrategy(jax.devices())
with strategy.scope():
    w = rx.Variable(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), name="w")
    v = rx.Variable(np.linspace(-1, 1, 3, dtype=np.float32).reshape(3, 1), name="v")
    seen = rx.Variable(0.0, name="seen", synchronization="on_read", aggregation="sum")
    optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), gradients="mean")

x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)
share = 8 // strategy.num_replicas_in_sync


def mine(rows):
    return strategy.experimental_distribute_values_from_function(
        lambda c: rows[c.replica_id_in_sync_group * share : (c.replica_id_in_sync_group + 1) * share]
    )


def step(x, y):
    def loss():
        return ((jax.numpy.tanh(x @ w.value) @ v.value - y) ** 2).mean()

    value, gradients = rx.value_and_grad(loss, [w, v])()
    optimizer.apply_gradients(zip(gradients, [w, v], strict=True))
    seen.assign_add(float(share))
    return value, rx.get_replica_context().all_reduce("mean", value)


losses = []
for _ in range(5):
    apart, together = strategy.run(step, (mine(x), mine(y)))
    losses.append([float(strategy.reduce("mean", apart)), float(together)])
print(
    json.dumps(
        {
            "process": index,
            "replicas": strategy.num_replicas_in_sync,
            "local": len(strategy.experimental_local_results(apart)),
            "losses": losses,
            "w": w.numpy().tolist(),
            "seen": float(seen.numpy()),
        }
    ),
    flush=True,
)
jax.distributed.shutdown()
