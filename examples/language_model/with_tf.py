"""A small transformer that learns a text letter by letter, in tf.distribute: the twin of with_replicax.py."""

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.devices)])
LENGTH, HEADS, LAYERS, WIDTH, BATCH = 64, 4, 2, options.width, 32

text = Path(__file__).with_name("text.txt").read_text()
letters = sorted(set(text))
codes = np.array([letters.index(letter) for letter in text], np.int32)
starts = np.random.default_rng(0).integers(0, len(codes) - LENGTH - 1, 4096)
windows = np.stack([codes[start : start + LENGTH + 1] for start in starts])
batches = tf.data.Dataset.from_tensor_slices(windows).shuffle(4096, seed=0).repeat().batch(BATCH, drop_remainder=True)
batches = strategy.experimental_distribute_dataset(batches)

layers = tf.keras.layers


class Transformer(tf.keras.Model):
    def __init__(self):
        super().__init__()
        normal = tf.keras.initializers.RandomNormal(stddev=0.02)
        self.letters = self.add_weight(shape=(len(letters), WIDTH), initializer=normal, name="letters")
        self.places = self.add_weight(shape=(LENGTH, WIDTH), initializer=normal, name="places")
        self.blocks = [
            (
                layers.LayerNormalization(),
                layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False),
                layers.LayerNormalization(),
                layers.Dense(4 * WIDTH, "gelu", use_bias=False),
                layers.Dense(WIDTH, use_bias=False),
            )
            for _ in range(LAYERS)
        ]
        self.norm = layers.LayerNormalization()

    def call(self, tokens):
        x = tf.gather(self.letters, tokens) + self.places
        for norm, attend, norm_again, up, down in self.blocks:
            h = norm(x)
            x = x + attend(h, h, use_causal_mask=True)
            x = x + down(up(norm_again(x)))
        return tf.matmul(self.norm(x), self.letters, transpose_b=True)


with strategy.scope():
    model = Transformer()
    model(np.zeros((1, LENGTH), np.int32))  # makes the variables
    optimizer = tf.keras.optimizers.AdamW(3e-3, weight_decay=1e-4, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)


def step(windows):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(windows[:, 1:], model(windows[:, :-1]))
        loss = tf.nn.compute_average_loss(tf.reduce_mean(losses, -1), global_batch_size=BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def distributed_step(windows):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(windows,)), axis=None)


for number, windows in zip(range(options.steps), batches):  # noqa: B905
    loss = distributed_step(windows)
    if number % 50 == 0:
        print(f"step {number}  loss {float(loss):.4f}")
print(f"last loss {float(loss):.4f}, a guess costs {np.log(len(letters)):.4f}")
