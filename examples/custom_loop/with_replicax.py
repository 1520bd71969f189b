"""A training loop of one's own around a Flax NNX model: schedule, clipping, dropout, metrics, checkpoints to go on from."""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--directory", default="custom_loop_checkpoints")
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()
BATCH, STEPS = 100, 15 * options.epochs

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
train = strategy.distribute_dataset(rx.data.from_arrays((x[:1500], y[:1500]), BATCH, shuffle=0))
test = strategy.distribute_dataset(rx.data.from_arrays((x[1500:], y[1500:]), BATCH))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.inner(x))))


with strategy.scope():
    model = Model(nnx.Rngs(0))
    weights = rx.nnx.adopt(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, STEPS // 10, STEPS)
    optimizer = rx.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)), gradients="mean")
    optimizer.build(weights)
    train_loss, accuracy = rx.metrics.Mean(), rx.metrics.Accuracy()
    epoch = rx.Variable(jnp.zeros((), jnp.int32), name="epoch", trainable=False)


def train_step(x, y):
    def loss():
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        train_loss.update(losses)
        return rx.mean(losses)

    gradients = rx.grad(loss, weights)()
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


def test_step(x, y):
    accuracy.update(model(x), y)


checkpoint = rx.Checkpoint(model=rx.nnx.variables(model), optimizer=optimizer, epoch=epoch)
manager = rx.CheckpointManager(checkpoint, options.directory, max_to_keep=2)
manager.restore_or_initialize()
while (done := int(epoch)) < options.epochs:
    model.train()
    train_loss.reset()
    for x, y in train:
        strategy.run(train_step, args=(x, y))
    model.eval()
    accuracy.reset()
    for x, y in test:
        strategy.run(test_step, args=(x, y))
    epoch.assign(done + 1)
    manager.save(done + 1)
    print(f"epoch {done + 1}  loss {float(train_loss.result()):.4f}  test accuracy {float(accuracy.result()):.2%}")
