"""What do the laws train? Small models in plain JAX, Linen and Equinox, each as a loss of one replica.

A model is a pytree of parameters, a pytree of running statistics, a batch, and ``apply(params, stats, batch)`` which returns
the loss per row and the new statistics. BatchNorm and dropout ask the replica context, so that the same code runs
under every strategy: statistics are averaged over replicas, dropout masks belong to rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS = 16


@dataclasses.dataclass(frozen=True)
class Model:
    params: Any
    stats: Any
    batch: Any
    apply: Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def over_replicas(x: Any) -> Any:
    """The mean over replicas of a statistic of the rows at hand."""
    return rx.get_replica_context().all_reduce("mean", x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def mlp() -> Model:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=shape).astype(np.float32) / 3 for shape in ((8, 16), (16,), (16, 4), (4,))]

    def apply(params, stats, batch):
        w1, b1, w2, b2 = params
        return cross_entropy(jnp.tanh(batch["x"] @ w1 + b1) @ w2 + b2, batch["y"]), stats

    batch = {"x": rng.normal(size=(ROWS, 8)).astype(np.float32), "y": rng.integers(0, 4, ROWS).astype(np.int32)}
    return Model(params, {}, batch, apply)


class _Normed(nn.Module):
    """A convolution and a BatchNorm whose statistics are those of the global batch."""

    @nn.compact
    def __call__(self, x, mean, var):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        moments = over_replicas((x.mean((0, 1, 2)), (x**2).mean((0, 1, 2))))
        here, square = moments
        x = (x - here) / jnp.sqrt(square - here**2 + 1e-5)
        x = nn.relu(
            x * self.param("scale", nn.initializers.ones, (4,)) + self.param("bias", nn.initializers.zeros, (4,))
        )
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        return nn.Dense(4)(x), 0.9 * mean + 0.1 * here, 0.9 * var + 0.1 * (square - here**2)


def cnn_linen() -> Model:
    rng = np.random.default_rng(1)
    module = _Normed()
    batch = {"x": rng.normal(size=(ROWS, 6, 6, 1)).astype(np.float32), "y": rng.integers(0, 4, ROWS).astype(np.int32)}
    stats = {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}
    params = module.init(jax.random.key(0), batch["x"][:1], **stats)

    def apply(params, stats, batch):
        logits, mean, var = module.apply(params, batch["x"], **stats)
        return cross_entropy(logits, batch["y"]), {"mean": mean, "var": var}

    return Model(jax.tree.map(np.asarray, params), stats, batch, apply)


def transformer_with_dropout() -> Model:
    """One block over twelve tokens; the dropout mask of a row hangs on the row's number, not on its replica."""
    rng = np.random.default_rng(2)
    size, vocabulary = 8, 11
    shapes = {
        "embed": (vocabulary, size),
        "qkv": (size, 3 * size),
        "proj": (size, size),
        "up": (size, 16),
        "down": (16, size),
    }
    params = {name: rng.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    tokens = rng.integers(0, vocabulary, (ROWS, 13)).astype(np.int32)
    batch = {"tokens": tokens, "row": np.arange(ROWS, dtype=np.int32)}

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def one(params, tokens, row):
        x = params["embed"][tokens[:-1]]
        q, k, v = jnp.split(norm(x) @ params["qkv"], 3, -1)
        scores = jnp.where(jnp.tri(12, dtype=bool), q @ k.T / size**0.5, -1e9)
        x = x + jax.nn.softmax(scores) @ v @ params["proj"]
        keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), row), 0.9, x.shape)
        x = x + jax.nn.gelu(norm(jnp.where(keep, x / 0.9, 0.0)) @ params["up"]) @ params["down"]
        return cross_entropy(norm(x) @ params["embed"].T, tokens[1:]).mean()

    def apply(params, stats, batch):
        return jax.vmap(one, (None, 0, 0))(params, batch["tokens"], batch["row"]), stats

    return Model(params, {}, batch, apply)


def mlp_equinox() -> Model:
    rng = np.random.default_rng(4)
    model = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(4))
    params, static = eqx.partition(model, eqx.is_array)
    batch = {"x": rng.normal(size=(ROWS, 8)).astype(np.float32), "y": rng.integers(0, 4, ROWS).astype(np.int32)}

    def apply(params, stats, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"]), stats

    return Model(jax.tree.map(np.asarray, params), {}, batch, apply)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "cnn_batchnorm_linen": cnn_linen,
    "transformer_dropout": transformer_with_dropout,
    "mlp_equinox": mlp_equinox,
}
