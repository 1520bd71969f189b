"""Keras 3 on JAX under `keras.distribution.DataParallel`: a custom loop with `stateless_call` and `stateless_apply`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "4")
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

from benchmarks.peers.work import B1, B2, EPS, MOMENTUM, REPLICAS, WORK, batches, params

jax.config.update("jax_num_cpu_devices", REPLICAS)

from benchmarks.peers.jax_model import loss_fn  # noqa: E402


class _Model(keras.Model):
    """The workload's weights as Keras's own, with the loss in plain JAX, so that only placement and update are Keras's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.loss_of = loss_fn(name)
        self.weight_of = {}
        for key, value in params(name).items():
            self.weight_of[key] = self.add_weight(shape=value.shape, name=key)
            self.weight_of[key].assign(value)
        self.built = True

    def call(self, x: Any, y: Any) -> Any:
        return self.loss_of({key: weight.value for key, weight in self.weight_of.items()}, x, y)


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    work = WORK[name]
    placement = keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))
    keras.distribution.set_distribution(placement)
    model = _Model(name)
    opt = (
        keras.optimizers.SGD(work.rate, momentum=MOMENTUM)
        if work.optimizer == "sgd"
        else keras.optimizers.Adam(work.rate, beta_1=B1, beta_2=B2, epsilon=EPS)
    )
    opt.build(model.trainable_variables)

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, kept = state
        value, gradients = jax.value_and_grad(lambda t: model.stateless_call(t, [], x, y)[0])(trainable)
        trainable, kept = opt.stateless_apply(kept, gradients, trainable)
        return (trainable, kept), value

    fn = jax.jit(step, donate_argnums=0)
    state = ([v.value + 0 for v in model.trainable_variables], [v.value + 0 for v in opt.variables])

    def put(a: Any) -> Any:
        return jax.device_put(a, placement.get_data_layout(a.shape).backend_layout)

    data = [(put(x), put(y)) for x, y in batches(name)]

    def one(i: int) -> Any:
        nonlocal state
        state, value = fn(state, *data[i % len(data)])
        return value

    return one, float
