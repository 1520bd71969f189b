"""Handwritten digits with a custom loop, in tf.distribute: the twin of with_replicax.py."""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=4, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)])
GLOBAL_BATCH = 64 * strategy.num_replicas_in_sync

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500])).shuffle(1500, seed=0).batch(GLOBAL_BATCH)
test = tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).batch(GLOBAL_BATCH)
train, test = strategy.experimental_distribute_dataset(train), strategy.experimental_distribute_dataset(test)

rng = np.random.default_rng(0)
with strategy.scope():
    w1 = tf.Variable((rng.normal(size=(64, 128)) / 8).astype(np.float32), name="w1")
    b1 = tf.Variable(np.zeros(128, np.float32), name="b1")
    w2 = tf.Variable((rng.normal(size=(128, 10)) / 11).astype(np.float32), name="w2")
    optimizer = tf.keras.optimizers.Adam(3e-3)
    optimizer.build([w1, b1, w2])
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
weights = [w1, b1, w2]


def logits(x):
    return tf.nn.relu(x @ w1 + b1) @ w2


def train_step(x, y):
    with tf.GradientTape() as tape:
        per_example = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(x))
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return loss


def test_step(x, y):
    accuracy.update_state(y, logits(x))


@tf.function
def distributed_train_step(x, y):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(x, y)), axis=None)


@tf.function
def distributed_test_step(x, y):
    strategy.run(test_step, args=(x, y))


for epoch in range(options.epochs):
    losses = [distributed_train_step(x, y) for x, y in train]
    accuracy.reset_state()
    for x, y in test:
        distributed_test_step(x, y)
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}  test accuracy {float(accuracy.result()):.2%}")
