"""A small transformer that learns a text letter by letter, the JAX way: a pytree of state goes in and comes out."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2, help="CPU devices to make where there is no accelerator")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

rx.host.configure(cpu_devices=options.devices)
strategy = rx.MirroredStrategy()
LENGTH, HEADS, LAYERS, WIDTH = 64, 4, 2, options.width

text = Path(__file__).with_name("text.txt").read_text()
letters = sorted(set(text))
codes = np.array([letters.index(letter) for letter in text], np.int32)
starts = np.random.default_rng(0).integers(0, len(codes) - LENGTH - 1, 4096)
windows = np.stack([codes[start : start + LENGTH + 1] for start in starts])
batches = strategy.distribute_dataset(rx.data.from_arrays(windows, 32, shuffle=0, epochs=None, drop_remainder=True))


def init(key):
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * 0.02

    return {
        "letters": normal(len(letters), WIDTH),
        "places": normal(LENGTH, WIDTH),
        "layers": [
            {
                "qkv": normal(WIDTH, 3 * WIDTH),
                "out": normal(WIDTH, WIDTH),
                "up": normal(WIDTH, 4 * WIDTH),
                "down": normal(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
    }


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def logits(params, tokens):
    x = params["letters"][tokens] + params["places"]
    mask = jnp.tri(LENGTH, dtype=bool)
    for layer in params["layers"]:
        shape = (*tokens.shape, 3 * HEADS, WIDTH // HEADS)
        q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(shape).swapaxes(1, 2), 3, axis=1)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5, -1e9)
        heads = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(*tokens.shape, WIDTH)
        x = x + heads @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["letters"].T


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def step(params, state, windows):
    def loss(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, windows[:, :-1]), windows[:, 1:])
        return rx.mean(losses.mean(-1))

    value, gradients = jax.value_and_grad(loss)(params)  # this replica's own
    gradients = rx.get_replica_context().all_reduce("mean", gradients)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value  # proven equal on all replicas; the loss is not


params = init(jax.random.key(0))
state = optimizer.init(params)
for number, windows in zip(range(options.steps), batches, strict=False):
    params, state, loss = strategy.run(step, args=(params, state, windows))
    if number % 50 == 0:
        print(f"step {number}  loss {float(strategy.reduce('mean', loss)):.4f}")
print(f"last loss {float(strategy.reduce('mean', loss)):.4f}, a guess costs {np.log(len(letters)):.4f}")
