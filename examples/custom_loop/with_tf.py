"""A training loop of one's own in tf.distribute: the twin of with_replicax.py."""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--directory", default="custom_loop_checkpoints")
options = parser.parse_args()

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)])
BATCH, STEPS = 100, 15 * options.epochs

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500])).shuffle(1500, seed=0).batch(BATCH)
train = strategy.experimental_distribute_dataset(train)
test = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).batch(BATCH))

layers = tf.keras.layers
with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.Input((64,)), layers.Dense(128, "relu"), layers.Dropout(0.2), layers.Dense(10)]
    )
    schedule = tf.keras.optimizers.schedules.CosineDecay(
        0.0, STEPS - STEPS // 10, warmup_target=5e-3, warmup_steps=STEPS // 10
    )
    optimizer = tf.keras.optimizers.Adam(schedule, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    train_loss, accuracy = tf.keras.metrics.Mean(), tf.keras.metrics.SparseCategoricalAccuracy()
    epoch = tf.Variable(0, name="epoch", trainable=False)


def train_step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
    train_loss.update_state(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_step(x, y):
    accuracy.update_state(y, model(x, training=False))


@tf.function
def distributed_train_step(x, y):
    strategy.run(train_step, args=(x, y))


@tf.function
def distributed_test_step(x, y):
    strategy.run(test_step, args=(x, y))


checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
manager = tf.train.CheckpointManager(checkpoint, options.directory, max_to_keep=2)
manager.restore_or_initialize()
while (done := int(epoch.numpy())) < options.epochs:
    train_loss.reset_state()
    for x, y in train:
        distributed_train_step(x, y)
    accuracy.reset_state()
    for x, y in test:
        distributed_test_step(x, y)
    epoch.assign(done + 1)
    manager.save(done + 1)
    print(f"epoch {done + 1}  loss {float(train_loss.result()):.4f}  test accuracy {float(accuracy.result()):.2%}")
