"""Keras's `fit`, `evaluate` and `predict` on several devices: only the first lines know of them."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of keras

import keras
import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()
keras.utils.set_random_seed(0)

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32).reshape(-1, 8, 8, 1), y.astype(np.int32)

layers = keras.layers
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),  # sees the global batch
            layers.ReLU(),
            layers.MaxPool2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

stop = keras.callbacks.EarlyStopping("val_accuracy", patience=3, restore_best_weights=True)
# Neither 1300 nor 200 nor 297 rows are whole batches of 128, and 41 rows do not divide by two. Every row counts once.
model.fit(
    x[:1300], y[:1300], 128, options.epochs, verbose=2, callbacks=[stop], validation_data=(x[1300:1500], y[1300:1500])
)
_, accuracy = model.evaluate(x[1500:], y[1500:], 128, verbose=0)
guesses = model.predict(x[1500:], 128, verbose=0).argmax(1)

print(f"test accuracy {accuracy:.2%}, of {len(guesses)} guesses {np.sum(guesses == y[1500:])} are right")
