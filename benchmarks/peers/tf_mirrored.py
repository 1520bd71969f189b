"""`tf.distribute.MirroredStrategy` over two logical CPU devices, the step in one `tf.function`, Keras's optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

from benchmarks.peers.work import (
    B1,
    B2,
    EPS,
    HEADS,
    LAYERS,
    LENGTH,
    MOMENTUM,
    REPLICAS,
    WIDTH,
    WORK,
    batches,
    params,
)  # fmt: skip


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    work = WORK[name]
    logits = {"mlp": _mlp, "cnn": _cnn, "lm": _transformer}[work.kind]
    with strategy.scope():
        p = {key: tf.Variable(value, name=key) for key, value in params(name).items()}
        opt = (
            tf.keras.optimizers.SGD(work.rate, momentum=MOMENTUM)
            if work.optimizer == "sgd"
            else tf.keras.optimizers.Adam(work.rate, beta_1=B1, beta_2=B2, epsilon=EPS)
        )
        opt.build(list(p.values()))

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(p, x))) / REPLICAS
        gradients = tape.gradient(loss, list(p.values()))
        # Repeated rows of a sparse gradient are squared one by one in Keras's Adam, which is other training: make it dense.
        opt.apply_gradients([(tf.convert_to_tensor(g), v) for g, v in zip(gradients, p.values(), strict=True)])
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    share = work.batch // REPLICAS

    def put(a: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda c: tf.constant(a[c.replica_id_in_sync_group * share : (c.replica_id_in_sync_group + 1) * share])
        )

    data = [(put(x), put(y)) for x, y in batches(name)]
    return lambda i: step(*data[i % len(data)]), float


def _mlp(p: dict[str, Any], x: Any) -> Any:
    layers = len(p) // 2
    for i in range(layers):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = tf.nn.relu(x) if i < layers - 1 else x
    return x


def _cnn(p: dict[str, Any], x: Any) -> Any:
    for i in range(2):
        x = tf.nn.relu(tf.nn.conv2d(x, p[f"k{i}"], 1, "VALID") + p[f"kb{i}"])
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.reshape(x, (x.shape[0], -1)) @ p["w0"] + p["b0"])
    return x @ p["w1"] + p["b1"]


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, -1, keepdims=True) + 1e-5) * scale + shift


def _transformer(p: dict[str, Any], tokens: Any) -> Any:
    rows, size = tokens.shape[0], WIDTH // HEADS

    def times(a: Any, w: Any) -> Any:
        return tf.reshape(tf.reshape(a, (rows * LENGTH, a.shape[-1])) @ w, (rows, LENGTH, w.shape[-1]))

    x = tf.gather(p["emb"], tokens) + p["pos"]
    mask = tf.linalg.band_part(tf.ones((LENGTH, LENGTH), tf.bool), -1, 0)
    for i in range(LAYERS):
        h = times(_norm(x, p[f"g1_{i}"], p[f"c1_{i}"]), p[f"qkv_{i}"]) + p[f"qkvb_{i}"]
        h = tf.transpose(tf.reshape(h, (rows, LENGTH, 3 * HEADS, size)), (0, 2, 1, 3))
        q, k, v = tf.split(h, 3, axis=1)
        scores = tf.where(mask, tf.matmul(q, k, transpose_b=True) * size**-0.5, -1e9)
        h = tf.reshape(tf.transpose(tf.nn.softmax(scores) @ v, (0, 2, 1, 3)), (rows, LENGTH, WIDTH))
        x = x + times(h, p[f"o_{i}"]) + p[f"ob_{i}"]
        h = tf.nn.gelu(times(_norm(x, p[f"g2_{i}"], p[f"c2_{i}"]), p[f"u_{i}"]) + p[f"ub_{i}"], approximate=True)
        x = x + times(h, p[f"v_{i}"]) + p[f"vb_{i}"]
    return times(_norm(x, p["gf"], p["cf"]), p["head"])
