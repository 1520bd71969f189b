"""What does replicax do, in one minute? One script, several strategies, the same numbers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import replicax as rx

BATCH = 256
WARM_UP = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one strategy's training came to."""

    name: str
    replicas: int
    losses: list[float]
    accuracy: float
    steps_per_second: float
    weights: list[np.ndarray]

    def largest_difference(self, other: Outcome) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(self.weights, other.weights, strict=True))


def run(steps: int, devices: int, output: Path) -> None:
    """Trains under each strategy, prints the table and writes the plot."""
    console = Console()
    rx.host.configure(cpu_devices=devices)
    data = _digits(console)
    outcomes = []
    with Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        for name, make in _strategies().items():
            bar = progress.add_task(name, total=steps)
            outcomes.append(train(name, make(), data, steps, lambda bar=bar: progress.advance(bar)))
    console.print(_table(outcomes))
    console.print(f"Loss curves: {_plot(outcomes, output)}")


def train(
    name: str, strategy: rx.Strategy, data: dict[str, Any], steps: int, tick: Callable[[], None] = lambda: None
) -> Outcome:
    """A two-layer network, trained for `steps` steps. Nothing in here knows how many replicas there are."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        hidden = rx.Variable((rng.normal(size=(64, 128)) / 8).astype(np.float32), name="hidden")
        bias = rx.Variable(np.zeros(128, np.float32), name="bias")
        out = rx.Variable((rng.normal(size=(128, 10)) / 11).astype(np.float32), name="out")
        weights = [hidden, bias, out]
        optimizer = rx.Optimizer(optax.adam(3e-3), gradients="mean")
        accuracy = rx.metrics.Accuracy()

    def logits(x: Any) -> Any:
        return jax.nn.relu(x @ hidden.value + bias.value) @ out.value

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return rx.mean(optax.softmax_cross_entropy_with_integer_labels(logits(x), y))

        value, gradients = rx.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return value

    def evaluate(x: Any, y: Any) -> None:
        accuracy.update(logits(x), y)

    batches = rx.data.from_arrays(data["train"], batch_size=BATCH, shuffle=0, epochs=None)
    losses: list[Any] = []
    begun = time.perf_counter()
    for number, batch in enumerate(strategy.distribute_dataset(batches)):
        if number == steps:
            break
        if number == WARM_UP:  # the first steps compile, one kind of batch each
            jax.block_until_ready(losses)
            begun = time.perf_counter()
        losses.append(strategy.reduce("mean", strategy.run(step, args=tuple(batch))))
        tick()
    jax.block_until_ready(losses)
    elapsed = time.perf_counter() - begun
    for batch in strategy.distribute_dataset(rx.data.from_arrays(data["test"], batch_size=BATCH)):
        strategy.run(evaluate, args=tuple(batch))
    return Outcome(
        name,
        strategy.num_replicas_in_sync,
        [float(loss) for loss in losses],
        float(accuracy.result()),
        max(steps - WARM_UP, 1) / elapsed,
        [w.numpy() for w in weights],
    )


def _strategies() -> dict[str, Callable[[], rx.Strategy]]:
    devices = jax.devices()
    made: dict[str, Callable[[], rx.Strategy]] = {"one device": lambda: rx.OneDeviceStrategy(devices[0])}
    for count in (2, 4, 8):
        if count <= len(devices):
            made[f"mirrored, {count} devices"] = lambda count=count: rx.MirroredStrategy(devices[:count])
    if len(devices) > 1:
        made["mirrored, fixed order"] = lambda: rx.MirroredStrategy(
            devices[:2], cross_device_ops=rx.ReductionToOneDevice()
        )
        made["central storage"] = lambda: rx.experimental.CentralStorageStrategy(devices[:2], devices[0])
        rules = rx.partition_rules([
            ("hidden", PartitionSpec(None, "model")),
            ("bias", PartitionSpec("model")),
            ("out", PartitionSpec("model", None)),
        ])  # fmt: skip
        made["two devices a replica"] = lambda: rx.MirroredStrategy(
            devices[:2], replica_mesh={"model": 2}, variables=rules
        )
    return made


def _digits(console: Console) -> dict[str, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("`replicax demo` needs scikit-learn's digits: pip install 'replicax[demo]'") from None
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    y = y.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1500], order[1500:]
    console.print(f"{len(train)} digits to learn from, {len(test)} to test with, global batch {BATCH}.")
    return {"train": (x[train], y[train]), "test": (x[test], y[test])}


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="One script, every strategy")
    table.add_column("strategy", no_wrap=True)
    for column in ("replicas", "test accuracy", "steps/s", "largest difference from one device"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            str(outcome.replicas),
            f"{outcome.accuracy:.1%}",
            f"{outcome.steps_per_second:.0f}",
            f"{outcome.largest_difference(outcomes[0]):.1e}",
        )
    return table


def _plot(outcomes: list[Outcome], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, (curves, apart) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    first = outcomes[0]
    for i, outcome in enumerate(outcomes):
        curves.plot(outcome.losses, label=outcome.name, linewidth=6 - 5 * i / max(len(outcomes) - 1, 1), alpha=0.7)
        if outcome is not first:
            apart.plot(np.abs(np.subtract(outcome.losses, first.losses)), color=f"C{i}", linewidth=0.8)
    curves.set(xlabel="step", ylabel="loss (mean over the global batch)", yscale="log")
    curves.set_title("Handwritten digits: one script under each strategy")
    curves.legend()
    apart.set(xlabel="step", ylabel="difference of the loss", ylim=(0, 1))
    apart.set_yscale("symlog", linthresh=1e-8)
    apart.set_title("... and how far it is from one device")
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
