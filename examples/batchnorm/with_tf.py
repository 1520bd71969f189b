"""A CNN whose BatchNorm sees the whole global batch, in tf.distribute: the twin of with_replicax.py."""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)])

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1), y.astype(np.int32)
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500])).shuffle(1500, seed=0).repeat()
train = strategy.experimental_distribute_dataset(train.batch(128, drop_remainder=True))
test = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).batch(128))

layers = tf.keras.layers
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((8, 8, 1))])
    for features in (16, 32):
        model.add(layers.Conv2D(features, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9, synchronized=True))
        model.add(layers.ReLU())
        model.add(layers.MaxPool2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


def train_step(x, y):
    with tf.GradientTape() as tape:
        per_example = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=128)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def test_step(x, y):
    accuracy.update_state(y, model(x, training=False))


@tf.function
def distributed_train_step(x, y):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(x, y)), axis=None)


@tf.function
def distributed_test_step(x, y):
    strategy.run(test_step, args=(x, y))


for number, (x, y) in zip(range(options.steps), train):  # noqa: B905
    loss = distributed_train_step(x, y)
    if number % 20 == 0:
        print(f"step {number}  loss {float(loss):.4f}")
for x, y in test:
    distributed_test_step(x, y)
print(f"test accuracy {float(accuracy.result()):.2%}")
