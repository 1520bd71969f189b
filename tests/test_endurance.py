"""Many steps and many threads: nothing stalls, nothing is lost, memory does not grow."""

import threading

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.fresh import python

TRAINING = """
import os
import replicax as rx
rx.host.configure(cpu_devices=4)
import jax, jax.numpy as jnp, optax

strategy = rx.MirroredStrategy(jax.devices())
with strategy.scope():
    w, b = rx.Variable(jnp.ones((8, 4)), name="w"), rx.Variable(jnp.zeros(4), name="b")
    seen = rx.Variable(0.0, name="seen", synchronization="on_read", aggregation="sum")
optimizer = rx.Optimizer(optax.sgd(1e-3, momentum=0.9), gradients="mean")

def step(x, number):
    loss, gradients = rx.value_and_grad(lambda: ((x @ w.value + b.value) ** 2).mean(), [w, b])()
    optimizer.apply_gradients(zip(gradients, [w, b]))
    seen.assign_add(1.0)
    return loss * number

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

x = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones((2, 8)) * c.replica_id_in_sync_group)
for number in range(STEPS):
    loss = strategy.run(step, (x, number))
    if number % 1000 == 0:
        float(strategy.reduce("mean", loss)), w.numpy(), seen.numpy()
    if number == STEPS // 5:
        early = resident()
print(seen.numpy(), resident() - early)
"""


@pytest.mark.slow
def test_a_hundred_thousand_steps_of_four_replicas_come_to_their_end_in_flat_memory():
    seen, growth = python(TRAINING.replace("STEPS", "100_000"), deadline=500).split()

    assert float(seen) == 400_000
    assert float(growth) < 32  # MB; a leak of one small array per step would be hundreds


def test_threads_that_run_steps_at_once_lose_no_update():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        count = rx.Variable(0, name="count")
        total = rx.Variable(0.0, name="total", aggregation="sum")

    def step(x):
        count.assign_add(1)
        total.assign_add(x)

    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group))

    def work():
        for _ in range(250):
            strategy.run(step, (x,))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)

    assert (int(count.numpy()), float(total.numpy())) == (2000, 2000.0)
