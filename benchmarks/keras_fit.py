"""Does `fit` under `strategy.scope()` cost what it costs under Keras's own `DataParallel`?

The same model, from the same weights, on the same rows and the same devices of one process, so with the same threads and
the same allocator. Batches divide evenly: with others `DataParallel` fails. The two take turns, an epoch each, and printed is
the median of the ratios of neighbours.

    python -m benchmarks.keras_fit [--replicas 2] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np
from rich.console import Console
from rich.table import Table

import replicax as rx

STEPS, ROWS = 40, 128


def mlp(layers: Any) -> tuple[tuple[int, ...], list[Any]]:
    return (784,), [layers.Dense(256, "relu"), layers.Dense(256, "relu"), layers.Dense(10)]


def cnn(layers: Any) -> tuple[tuple[int, ...], list[Any]]:
    convolved = [layers.Conv2D(8, 3, 2), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(16, 3, 2)]
    return (28, 28, 1), [*convolved, layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(10)]


def tiny(layers: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Hardly any arithmetic: what is left is the loop around it."""
    return (8,), [layers.Dense(10)]


def compiled(parts: Callable[[Any], tuple[tuple[int, ...], list[Any]]], steps_per_execution: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    shape, layers = parts(keras.layers)
    model = keras.Sequential([keras.Input(shape), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def measure(parts: Callable[..., Any], replicas: int, rounds: int, steps_per_execution: int) -> list[str]:
    import jax
    import keras

    strategy = rx.MirroredStrategy(jax.devices()[:replicas])
    parallel = keras.distribution.DataParallel(devices=jax.devices()[:replicas])
    with strategy.scope():
        ours = compiled(parts, steps_per_execution)
    with parallel.scope():
        theirs = compiled(parts, steps_per_execution)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * ROWS, *ours.input_shape[1:])).astype(np.float32)
    y = rng.integers(0, 10, len(x))

    def epoch(model: Any) -> float:
        begun = time.perf_counter()
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        return time.perf_counter() - begun

    def theirs_too() -> float:
        with parallel.scope():
            return epoch(theirs)

    times = [(epoch(ours), theirs_too()) for _ in range(rounds + 2)][2:]  # two warm up
    ratios = sorted(a / b for a, b in times)
    medians = [statistics.median(column) / STEPS * 1e3 for column in zip(*times, strict=True)]
    pairs = zip(ours.get_weights(), theirs.get_weights(), strict=True)
    difference = max(np.abs(a - b).max() for a, b in pairs)
    middle, low, high = statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return [*(f"{ms:.3f}" for ms in medians), f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{difference:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rx.host.configure(cpu_devices=options.replicas)
    table = Table(
        title=f"{options.replicas} replicas, {ROWS} rows, {STEPS} steps an epoch, {options.rounds} rounds in turns"
    )
    for column in (
        "model",
        "steps per execution",
        "fit, ms per step",
        "DataParallel, ms",
        "ratio",
        "middle half",
        "difference",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for parts, steps in ((tiny, 1), (tiny, 10), (mlp, 1), (cnn, 1)):
        table.add_row(parts.__name__, str(steps), *measure(parts, options.replicas, options.rounds, steps))
    Console().print(table)


if __name__ == "__main__":
    main()
