"""Does `fit` under `strategy.scope()` cost what it costs under Keras's own `DataParallel`?

The same model, from the same weights, on the same rows and the same devices of one process, so with the same threads and
the same allocator. Batches divide evenly: with others `DataParallel` fails. One call is one epoch.

    python -m benchmarks.keras_fit [--rounds 15] [--devices 2] [--models tiny,mlp,cnn]
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of keras

import jax
import numpy as np

import replicax as rx
from benchmarks._measure import Ratio, Report, at_most, cpu_devices, in_turns, median_of, timer

STEPS, ROWS = 40, 128

Layers = Callable[[Any], list[Any]]


def tiny(layers: Any) -> list[Any]:
    """Hardly any arithmetic: what is left is the loop around it."""
    return [layers.Input((8,)), layers.Dense(10)]


def mlp(layers: Any) -> list[Any]:
    return [layers.Input((784,)), layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)]


def cnn(layers: Any) -> list[Any]:
    convolved = [layers.Conv2D(8, 3, 2), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(16, 3, 2)]
    return [layers.Input((28, 28, 1)), *convolved, layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(10)]


MODELS: dict[str, Layers] = {"tiny": tiny, "mlp": mlp, "cnn": cnn}


class Fitted:
    """A model made in a scope, and an epoch of it in that scope."""

    def __init__(self, layers: Layers, scope: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        import keras

        self._scope = scope
        with scope():
            keras.utils.set_random_seed(0)
            self.model: Any = keras.Sequential(layers(keras.layers))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile("adam", loss, metrics=["accuracy"])
        rng = np.random.default_rng(0)
        self._x = rng.standard_normal((STEPS * ROWS, *self.model.input_shape[1:])).astype(np.float32)
        self._y = rng.integers(0, 10, len(self._x))

    def epoch(self) -> Any:
        with self._scope():
            self.model.fit(self._x, self._y, batch_size=ROWS, shuffle=False, verbose=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    asked = parser.parse_args(argv)
    cpu_devices(asked.devices)
    import keras

    devices = jax.devices()[: asked.devices]
    scopes = {
        "ours": rx.MirroredStrategy(devices).scope,
        "theirs": keras.distribution.DataParallel(devices=devices).scope,
    }
    report = Report(
        f"Keras's fit, {asked.devices} replicas, {STEPS} batches of {ROWS} rows per epoch, {asked.rounds} rounds",
        "model", "under a strategy, ms per batch", "DataParallel, ms", "largest difference", ratio="strategy / DataParallel",
    )  # fmt: skip
    for name in asked.models.split(","):
        ways = {who: Fitted(MODELS[name], scope) for who, scope in scopes.items()}
        times = in_turns({who: timer(way.epoch) for who, way in ways.items()}, asked.rounds)
        per_batch = {who: [seconds / STEPS for seconds in taken] for who, taken in times.items()}
        pairs = zip(*(way.model.get_weights() for way in ways.values()), strict=True)
        difference = max(np.abs(a - b).max() for a, b in pairs)
        report.add(
            name, median_of(per_batch["ours"], "ms"), median_of(per_batch["theirs"], "ms"), f"{difference:.1e}",
            ratio=Ratio.between(times["ours"], times["theirs"]), claim=at_most(1.05),
        )  # fmt: skip
    report.show()


if __name__ == "__main__":
    main()
