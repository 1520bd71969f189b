"""`tf.distribute.MirroredStrategy` over two logical CPU devices: gradients of no depth are summed and weights updated."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

from benchmarks.peers.gradients import calls_for as calls_for
from benchmarks.peers.gradients import count_and_bytes
from benchmarks.peers.work import REPLICAS


def prepare(job: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    count, size = count_and_bytes(job)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])

    def values(number: float) -> Any:
        make = strategy.experimental_distribute_values_from_function
        return [make(lambda _: tf.fill([size // 4], number)) for _ in range(count)]

    def replica_step(weights: Any, targets: Any) -> Any:
        gradients = [weight - target for weight, target in zip(weights, targets, strict=True)]
        reduced = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, reduced, strict=True)]

    @tf.function
    def step(weights: Any, targets: Any) -> Any:
        return strategy.run(replica_step, args=(weights, targets))

    weights, targets = values(0.0), values(1.0)

    def one(_: int) -> Any:
        nonlocal weights
        weights = step(weights, targets)
        return weights

    return one, lambda weights: float(strategy.experimental_local_results(weights[-1])[0][0])
