"""Does input keep up? A step on batches from NumPy arrays, against the same step on one batch that stays where it is.

Three questions. How much slower is a step whose batch is gathered, copied and sent each time (`fed`) than one whose
batch is on the devices already (`resident`)? Of a wait of 5 ms for each batch, as for a disk, how much does reading
ahead hide? And, with --tensorflow and TensorFlow installed, what does `tf.distribute` lose on the same rows?

    python -m benchmarks.input_keeps_up [--replicas 2] [--rows 256] [--rounds 40] [--only mlp [--tensorflow]]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import replicax as rx

Way = tuple[str, str]
"""A library, and how it gets its batches."""

STEPS = 5
WAIT = 0.005

SHAPES = {"mlp": (784,), "cnn": (28, 28, 1)}
EXAMPLES = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--tensorflow", action="store_true")
    options = parser.parse_args()
    if options.tensorflow and not options.only:
        parser.error("--tensorflow needs --only: two models of different shape confuse its collectives in one process")
    rx.host.configure(cpu_devices=options.replicas)
    for name in [options.only] if options.only else SHAPES:
        x, y = examples(name)
        libraries = {"replicax": with_replicax(name, x, y, options)}
        if options.tensorflow:
            libraries["tf.distribute"] = with_tensorflow(name, x, y, options)
        report(name, libraries, options.rounds)


def report(name: str, libraries: dict[str, dict[str, Callable[[], Any]]], rounds: int) -> None:
    ways = {(library, way): step for library, steps in libraries.items() for way, step in steps.items()}
    taken = in_turns(ways, rounds)
    for library, steps in libraries.items():
        times = {way: taken[library, way] for way in steps}
        print(f"{name} in {library}: ms per step " + "  ".join(f"{way} {1e3 * times[way]:.2f}" for way in times))
        feeding = times["fed"] - times["resident"]
        print(f"  fed / resident {times['fed'] / times['resident']:.3f}; feeding costs {1e3 * feeding:.2f} ms per step")
        if "waiting" in times:
            hidden = (times["waiting"] - times["ahead"]) / min(WAIT, times["resident"])
            print(f"  reading ahead hides {hidden:.0%} of the smaller of wait and step")


def in_turns(ways: dict[Way, Callable[[], Any]], rounds: int) -> dict[Way, float]:
    """The time of one step, each way measured in turns with the others.

    The lower quartile: whatever else the machine does only ever adds time.
    """
    taken: dict[Way, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                float(step())  # as a loop that prints its loss: the next batch is asked for when this step is over
            if turn:  # the first round warms up
                taken[name].append((time.perf_counter() - start) / STEPS)
    return {name: statistics.quantiles(seconds, n=4)[0] for name, seconds in taken.items()}


def examples(name: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, *SHAPES[name])).astype(np.float32)
    return x, random.integers(0, 10, size=EXAMPLES).astype(np.int32)


def waiting(batches: Any) -> Callable[[], Iterator[Any]]:
    """The same batches, each after a wait in which the processor is free."""

    def read() -> Iterator[Any]:
        for batch in batches:
            time.sleep(WAIT)
            yield batch

    return read


def with_replicax(name: str, x: np.ndarray, y: np.ndarray, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    import optax

    strategy = rx.MirroredStrategy(jax.devices()[: options.replicas])
    random = np.random.default_rng(1)

    def weight(*shape: int) -> Any:
        return rx.Variable((random.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32))

    with strategy.scope():
        if name == "mlp":
            layers = [weight(784, 512), weight(512, 512), weight(512, 10)]
        else:
            layers = [weight(3, 3, 1, 16), weight(3, 3, 16, 32), weight(7 * 7 * 32, 10)]

    def scores(rows: Any) -> Any:
        if name == "mlp":
            for layer in layers[:-1]:
                rows = jax.nn.relu(rows @ layer.value)
            return rows @ layers[-1].value
        for layer in layers[:-1]:
            rows = jax.lax.conv_general_dilated(
                rows, layer.value, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            rows = jax.nn.relu(rows)
        return rows.reshape(len(rows), -1) @ layers[-1].value

    def step(batch: Any) -> Any:
        images, labels = batch

        def loss() -> Any:
            return rx.mean(optax.softmax_cross_entropy_with_integer_labels(scores(images), labels))

        value, gradients = rx.value_and_grad(loss, layers)()
        context = rx.get_replica_context()
        for layer, gradient in zip(layers, context.all_reduce("mean", gradients), strict=True):
            layer.assign_sub(0.01 * gradient)
        return context.all_reduce("mean", jnp.asarray(value))

    def fed(dataset: Any, ahead: int = 0) -> Callable[[], Any]:
        elements = iter(strategy.distribute_dataset(dataset, rx.InputOptions(prefetch=ahead)))
        return lambda: strategy.run(step, args=(next(elements),))

    batches = rx.data.from_arrays((x, y), options.rows, shuffle=0, epochs=None, drop_remainder=True)
    resident = next(iter(strategy.distribute_dataset(batches)))
    return {
        "resident": lambda: strategy.run(step, args=(resident,)),
        "fed": fed(batches),
        "waiting": fed(waiting(batches)),
        "ahead": fed(waiting(batches), ahead=2),
    }


def with_tensorflow(
    name: str, x: np.ndarray, y: np.ndarray, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * options.replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    dense, convolution = tf.keras.layers.Dense, tf.keras.layers.Conv2D
    with strategy.scope():
        if name == "mlp":
            stack = [dense(512, "relu", use_bias=False), dense(512, "relu", use_bias=False)]
        else:
            stack = [convolution(n, 3, 2, "same", activation="relu", use_bias=False) for n in (16, 32)]
            stack.append(tf.keras.layers.Flatten())
        model = tf.keras.Sequential([tf.keras.Input(x.shape[1:]), *stack, dense(10, use_bias=False)])

    def one(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_sum(losses) / options.rows
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(one, args=batch), axis=None)

    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=0).repeat()
    dataset = strategy.experimental_distribute_dataset(rows.batch(options.rows, drop_remainder=True).prefetch(2))
    elements, resident = iter(dataset), next(iter(dataset))
    return {"resident": lambda: step(resident), "fed": lambda: step(next(elements))}


if __name__ == "__main__":
    main()
