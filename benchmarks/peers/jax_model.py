"""The workloads' loss in plain JAX: the mean over the rows it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.work import B1, B2, EPS, HEADS, LAYERS, LENGTH, MOMENTUM, WIDTH, WORK


def loss_fn(name: str) -> Callable[[dict[str, Any], Any, Any], Any]:
    """``loss(params, x, y)``."""
    logits = {"mlp": _mlp, "cnn": _cnn, "lm": _transformer}[WORK[name].kind]

    def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(logits(p, x))
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

    return loss


def optimizer(name: str) -> optax.GradientTransformation:
    work = WORK[name]
    if work.optimizer == "sgd":
        return optax.sgd(work.rate, momentum=MOMENTUM)
    return _adam(work.rate)


def _adam(rate: float) -> optax.GradientTransformation:
    """Adam as Keras computes it: epsilon is added before the bias is corrected, which Optax's own does after."""

    def update(gradients: Any, state: optax.ScaleByAdamState, params: Any = None) -> Any:
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: B1 * m + (1 - B1) * g, gradients, state.mu)
        nu = jax.tree.map(lambda g, v: B2 * v + (1 - B2) * g**2, gradients, state.nu)
        step = rate * jnp.sqrt(1 - B2**count) / (1 - B1**count)
        updates = jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + EPS), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(B1, B2).init, update)


def _mlp(p: dict[str, Any], x: Any) -> Any:
    layers = len(p) // 2
    for i in range(layers):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = jax.nn.relu(x) if i < layers - 1 else x
    return x


def _cnn(p: dict[str, Any], x: Any) -> Any:
    for i in range(2):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, p[f"k{i}"], (1, 1), "VALID", dimension_numbers=numbers) + p[f"kb{i}"]
        x = jax.nn.relu(x)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ p["w0"] + p["b0"])
    return x @ p["w1"] + p["b1"]


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def _transformer(p: dict[str, Any], tokens: Any) -> Any:
    rows, size = tokens.shape[0], WIDTH // HEADS
    x = p["emb"][tokens] + p["pos"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        h = _norm(x, p[f"g1_{i}"], p[f"c1_{i}"]) @ p[f"qkv_{i}"] + p[f"qkvb_{i}"]
        q, k, v = jnp.split(h.reshape(rows, LENGTH, 3 * HEADS, size).transpose(0, 2, 1, 3), 3, axis=1)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) * size**-0.5, -1e9)
        h = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(rows, LENGTH, WIDTH)
        x = x + h @ p[f"o_{i}"] + p[f"ob_{i}"]
        h = jax.nn.gelu(_norm(x, p[f"g2_{i}"], p[f"c2_{i}"]) @ p[f"u_{i}"] + p[f"ub_{i}"], approximate=True)
        x = x + h @ p[f"v_{i}"] + p[f"vb_{i}"]
    return _norm(x, p["gf"], p["cf"]) @ p["head"]
