"""A CNN whose BatchNorm sees the whole global batch, in Flax Linen."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            # The mesh axis over which replicas lie is called "replica": Linen averages its statistics over it.
            x = nn.BatchNorm(use_running_average=not training, momentum=0.9, axis_name="replica")(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


model = CNN()
x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1), y.astype(np.int32)
train = strategy.distribute_dataset(
    rx.data.from_arrays((x[:1500], y[:1500]), 128, shuffle=0, epochs=None, drop_remainder=True)
)
test = strategy.distribute_dataset(rx.data.from_arrays((x[1500:], y[1500:]), 128))

initial = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), training=False)
with strategy.scope():
    params = jax.tree.map(rx.Variable, initial["params"])
    stats = jax.tree.map(lambda value: rx.Variable(value, trainable=False), initial["batch_stats"])
    optimizer = rx.Optimizer(optax.adam(1e-3), gradients="mean")
    accuracy = rx.metrics.Accuracy()
weights = jax.tree.leaves(params)


def values(variables):
    return jax.tree.map(lambda variable: variable.value, variables)


def train_step(x, y):
    def loss():
        state = {"params": values(params), "batch_stats": values(stats)}
        logits, new = model.apply(state, x, training=True, mutable=["batch_stats"])
        jax.tree.map(lambda variable, value: variable.assign(value), stats, new["batch_stats"])
        return rx.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    value, gradients = rx.value_and_grad(loss, weights)()
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return value


def test_step(x, y):
    state = {"params": values(params), "batch_stats": values(stats)}
    accuracy.update(model.apply(state, x, training=False), y)


for number, (x, y) in zip(range(options.steps), train, strict=False):
    loss = strategy.reduce("mean", strategy.run(train_step, args=(x, y)))
    if number % 20 == 0:
        print(f"step {number}  loss {float(loss):.4f}")
for x, y in test:
    strategy.run(test_step, args=(x, y))
print(f"test accuracy {float(accuracy.result()):.2%}")
