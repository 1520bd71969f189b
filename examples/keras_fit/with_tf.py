"""Keras's `fit`, `evaluate` and `predict` on several devices, in tf.distribute: the twin of with_replicax.py."""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)])
tf.keras.utils.set_random_seed(0)

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1), y.astype(np.int32)

layers = tf.keras.layers
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

stop = tf.keras.callbacks.EarlyStopping("val_accuracy", patience=3, restore_best_weights=True)
model.fit(
    x[:1300], y[:1300], 128, options.epochs, verbose=2, callbacks=[stop], validation_data=(x[1300:1500], y[1300:1500])
)
_, accuracy = model.evaluate(x[1500:], y[1500:], 128, verbose=0)
guesses = model.predict(x[1500:], 128, verbose=0).argmax(1)

print(f"test accuracy {accuracy:.2%}, of {len(guesses)} guesses {np.sum(guesses == y[1500:])} are right")
