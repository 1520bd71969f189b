"""Does input keep up? A step on batches from NumPy arrays, against the same step on one batch that stays where it is.

Four questions. How much slower is a step whose batch is gathered, copied and sent each time (`fed`) than one whose
batch is on the devices already (`resident`)? And in a loop that reads each loss, so that the next batch is asked for
only when the step is over? There, of a wait of 5 ms for each batch, as for a disk, how much does reading ahead hide?
And, with --tensorflow and the benchmark environment, what does feeding cost `tf.distribute` on the same rows?

    python -m benchmarks.input_keeps_up [--rounds 30] [--models mlp,cnn] [--tensorflow]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from benchmarks._measure import (
    BENCH_PYTHON,
    Claim,
    Ratio,
    Report,
    Times,
    at_least,
    at_most,
    cpu_devices,
    in_turns,
    median_of,
)
from benchmarks.peers.driver import Member
from benchmarks.peers.feeding import examples

STEPS = 10
WAIT = 0.005
AHEAD = 2


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tensorflow", action="store_true")
    parser.add_argument("--python", default=str(BENCH_PYTHON), help="where TensorFlow lives")
    asked = parser.parse_args(argv)
    cpu_devices(asked.replicas)
    report = Report(
        f"Feeding batches of {asked.rows} rows to {asked.replicas} replicas: ms per step, "
        f"{asked.rounds} rounds of {STEPS} steps",
        "", "this", "that",
    )  # fmt: skip
    for model in asked.models.split(","):
        with contextlib.ExitStack() as stack:
            ways = ways_to_feed(model, asked.rows, asked.replicas, stack)
            timers = {name: timer(ways[name]) for name in ("resident", "fed")}
            timers |= {f"{name}, read": timer(way, wait=True) for name, way in ways.items()}
            for way in ("resident", "fed") if asked.tensorflow else ():
                member = Member("feeding_tf", f"{model}:{way}:{asked.rows}:{asked.replicas}", asked.python)
                stack.callback(member.close)
                timers[f"tf {way}"] = member.seconds
            tell(report, model, in_turns(timers, asked.rounds))
    report.show()


def tell(report: Report, model: str, times: Times) -> None:
    def compare(what: str, this: Sequence[float], that: Sequence[float], claim: Claim | None = None) -> None:
        report.add(f"{model}: {what}", *cells(this, that), ratio=Ratio.between(this, that), claim=claim)

    def cells(*columns: Sequence[float]) -> list[str]:
        return [median_of(seconds, "ms") for seconds in columns]

    compare("fed / resident", times["fed"], times["resident"], claim=at_most(1.10))
    compare("the same, the loss of each step read", times["fed, read"], times["resident, read"])
    hidden = [a - b for a, b in zip(times["waiting, read"], times["ahead, read"], strict=True)]
    possible = [min(WAIT, seconds) for seconds in times["resident, read"]]
    compare("wait hidden by reading ahead / hideable", hidden, possible, claim=at_least(0.8))
    if "tf fed" in times:
        ours, theirs = (
            [a - b for a, b in zip(times[f"{of}fed"], times[f"{of}resident"], strict=True)] for of in ("", "tf ")
        )
        compare("tf fed / tf resident", times["tf fed"], times["tf resident"])
        added = statistics.median(ours) / statistics.median(theirs)  # of single rounds it is mostly noise
        report.add(f"{model}: feeding adds / adds in tf", *cells(ours, theirs), ratio=added, claim=at_most(1))
        compare("fed / tf fed", times["fed"], times["tf fed"])


def timer(step: Callable[[], Any], wait: bool = False) -> Callable[[], float]:
    """The seconds of a step, in a loop that reads its loss at the end, or of every step (`wait`).

    A few steps go before, on the batches that were read ahead while the other ways had their turns.
    """

    def timed() -> float:
        for _ in range(AHEAD + 1):
            float(step())
        begun = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
            if wait:
                float(loss)
        float(loss)
        return (time.perf_counter() - begun) / STEPS

    return timed


def waiting(batches: Any) -> Callable[[], Iterator[Any]]:
    """The same batches, each after a wait in which the processor is free."""

    def read() -> Iterator[Any]:
        for batch in batches:
            time.sleep(WAIT)
            yield batch

    return read


def ways_to_feed(name: str, rows: int, replicas: int, stack: contextlib.ExitStack) -> dict[str, Callable[[], Any]]:
    strategy = rx.MirroredStrategy(jax.devices()[:replicas])
    x, y = examples(name)
    random = np.random.default_rng(1)

    def weight(*shape: int) -> Any:
        return rx.Variable((random.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32))

    with strategy.scope():
        if name == "mlp":
            layers = [weight(784, 512), weight(512, 512), weight(512, 10)]
        else:
            layers = [weight(3, 3, 1, 16), weight(3, 3, 16, 32), weight(7 * 7 * 32, 10)]

    def scores(h: Any) -> Any:
        for layer in layers[:-1]:
            if name == "mlp":
                h = h @ layer.value
            else:
                numbers = ("NHWC", "HWIO", "NHWC")
                h = jax.lax.conv_general_dilated(h, layer.value, (2, 2), "SAME", dimension_numbers=numbers)
            h = jax.nn.relu(h)
        return h.reshape(len(h), -1) @ layers[-1].value

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
        stack.callback(elements.close)
        return lambda: strategy.run(step, args=(next(elements),))

    batches = rx.data.from_arrays((x, y), rows, shuffle=0, epochs=None, drop_remainder=True)
    resident = next(iter(strategy.distribute_dataset(batches)))
    return {
        "resident": lambda: strategy.run(step, args=(resident,)),
        "fed": fed(batches),
        "waiting": fed(waiting(batches)),
        "ahead": fed(waiting(batches), ahead=AHEAD),
    }


if __name__ == "__main__":
    main()
