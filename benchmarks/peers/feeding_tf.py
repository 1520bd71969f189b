"""`tf.distribute`: a step on a distributed dataset, or on one batch of it again and again: ``mlp:fed:256:2``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

from benchmarks.peers.feeding import EXAMPLES, examples


def calls_for(_: str) -> int:
    return 10


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    model_name, way, rows, replicas = name.split(":")
    x, y = examples(model_name)
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * int(replicas))
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(int(replicas))])
    dense, convolution = tf.keras.layers.Dense, tf.keras.layers.Conv2D
    with strategy.scope():
        if model_name == "mlp":
            stack = [dense(512, "relu", use_bias=False), dense(512, "relu", use_bias=False)]
        else:
            stack = [convolution(n, 3, 2, "same", activation="relu", use_bias=False) for n in (16, 32)]
            stack.append(tf.keras.layers.Flatten())
        model = tf.keras.Sequential([tf.keras.Input(x.shape[1:]), *stack, dense(10, use_bias=False)])

    def one(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_sum(losses) / int(rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(one, args=batch), axis=None)

    examples_one_by_one = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=0).repeat()
    batches = examples_one_by_one.batch(int(rows), drop_remainder=True).prefetch(2)
    elements = iter(strategy.experimental_distribute_dataset(batches))
    resident = next(elements)
    if way == "resident":
        return lambda _: step(resident), float
    return lambda _: step(next(elements)), float
