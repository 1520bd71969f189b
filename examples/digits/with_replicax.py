"""Handwritten digits with a custom loop, on every device of this machine."""

import argparse

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=4, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()
GLOBAL_BATCH = 64 * strategy.num_replicas_in_sync

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
train = strategy.distribute_dataset(rx.data.from_arrays((x[:1500], y[:1500]), GLOBAL_BATCH, shuffle=0))
test = strategy.distribute_dataset(rx.data.from_arrays((x[1500:], y[1500:]), GLOBAL_BATCH))

rng = np.random.default_rng(0)
with strategy.scope():
    w1 = rx.Variable((rng.normal(size=(64, 128)) / 8).astype(np.float32), name="w1")
    b1 = rx.Variable(np.zeros(128, np.float32), name="b1")
    w2 = rx.Variable((rng.normal(size=(128, 10)) / 11).astype(np.float32), name="w2")
    optimizer = rx.Optimizer(optax.adam(3e-3), gradients="mean")
    accuracy = rx.metrics.Accuracy()
weights = [w1, b1, w2]


def logits(x):
    return jax.nn.relu(x @ w1.value + b1.value) @ w2.value


def train_step(x, y):
    def loss():
        return rx.mean(optax.softmax_cross_entropy_with_integer_labels(logits(x), y))

    value, gradients = rx.value_and_grad(loss, weights)()
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return value


def test_step(x, y):
    accuracy.update(logits(x), y)


for epoch in range(options.epochs):
    losses = [strategy.reduce("mean", strategy.run(train_step, args=(x, y))) for x, y in train]
    accuracy.reset()
    for x, y in test:  # 297 rows: the last batch is short, and every row counts once
        strategy.run(test_step, args=(x, y))
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}  test accuracy {float(accuracy.result()):.2%}")
