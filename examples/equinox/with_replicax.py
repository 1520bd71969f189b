"""An Equinox model trained the JAX way: the arrays of the model go into the step and come out of it."""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
train = strategy.distribute_dataset(rx.data.from_arrays((x[:1500], y[:1500]), 100, shuffle=0, epochs=None))
test = strategy.distribute_dataset(rx.data.from_arrays((x[1500:], y[1500:]), 100))

model = eqx.nn.Sequential(
    [
        eqx.nn.Linear(64, 128, key=jax.random.key(0)),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.2),
        eqx.nn.Linear(128, 10, key=jax.random.key(1)),
    ]
)
arrays, rest = eqx.partition(model, eqx.is_array)  # what the step may be given, and the layers' Python objects
optimizer = optax.adam(3e-3)
state = optimizer.init(arrays)
with strategy.scope():
    accuracy = rx.metrics.Accuracy()


def train_step(arrays, state, number, x, y):
    context = rx.get_replica_context()
    key = context.replica_key(jax.random.fold_in(jax.random.key(2), number))  # each replica drops other units

    def loss(arrays):
        model = eqx.combine(arrays, rest)
        logits = jax.vmap(lambda row, key: model(row, key=key))(x, jax.random.split(key, len(x)))
        return rx.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    value, gradients = jax.value_and_grad(loss)(arrays)
    gradients = context.all_reduce("mean", gradients)
    updates, state = optimizer.update(gradients, state, arrays)
    return optax.apply_updates(arrays, updates), state, value


def test_step(arrays, x, y):
    model = eqx.nn.inference_mode(eqx.combine(arrays, rest))
    accuracy.update(jax.vmap(model)(x), y)


for number, (x, y) in zip(range(options.steps), train, strict=False):
    arrays, state, loss = strategy.run(train_step, args=(arrays, state, number, x, y))
    if number % 20 == 0:
        print(f"step {number}  loss {float(strategy.reduce('mean', loss)):.4f}")
for x, y in test:
    strategy.run(test_step, args=(arrays, x, y))
print(f"test accuracy {float(accuracy.result()):.2%}")
