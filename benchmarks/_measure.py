"""How are several ways to do the same compared? In turns, so that whatever else the machine does slows all alike.

What counts is the ratio of two ways in the same round, and its median over the rounds. Beside it stand the quartiles:
half of all rounds lie between them.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import replicax as rx

ROOT = Path(__file__).resolve().parent.parent
BENCH_PYTHON = ROOT / ".bench-venv/bin/python"
"""Where TensorFlow and torch live; `make bench-env` builds it."""

Times = Mapping[str, list[float]]
"""Seconds per call of each way, one number for each round."""


def cpu_devices(count: int) -> None:
    """Gives this process `count` CPU devices, unless it runs with at least as many."""
    host = rx.host.describe()
    if not host.backend_started or host.cpu_devices < count:
        rx.host.configure(cpu_devices=count)


def timer(way: Callable[[], Any], calls: int = 1) -> Callable[[], float]:
    """Makes `calls` calls and tells the seconds of one. A call is over when the arrays that it returns are there."""

    def timed() -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(way())
        return (time.perf_counter() - begun) / calls

    return timed


def in_turns(timers: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> Times:
    """Asks every timer once in each round; every second round goes through them backwards."""
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(-warm_up, rounds):
        for name in reversed(list(timers)) if number % 2 else timers:
            seconds = timers[name]()
            if number >= 0:
                taken[name].append(seconds)
    return taken


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median over the rounds, and its quartiles."""

    value: float
    low: float
    high: float

    @classmethod
    def between(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        return cls.of([a / b for a, b in zip(over, under, strict=True)])

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(middle, low, high)

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2 if self.value >= 1.3 else 3
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What we say about a ratio."""

    bound: float
    at_least: bool = False

    def held(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


def at_most(bound: float) -> Claim:
    return Claim(bound)


def at_least(bound: float) -> Claim:
    return Claim(bound, at_least=True)


def median_of(seconds: Sequence[float], unit: str) -> str:
    value = statistics.median(seconds) * {"s": 1, "ms": 1e3, "µs": 1e6}[unit]
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value >= 100 else f"{value:.2f}"


class Report:
    """A table that ends with a ratio and with what was claimed of it; printed so that it can be pasted into a page."""

    def __init__(self, title: str, *columns: str, ratio: str = "ratio") -> None:
        self._title = title
        self._table = Table(box=box.MARKDOWN)
        for column in (*columns, ratio, "claim"):
            self._table.add_column(column, justify="left" if column == columns[0] else "right", overflow="fold")
        self.claims: list[bool] = []

    def add(self, *cells: str, ratio: Ratio | float | str, claim: Claim | None = None) -> None:
        verdict = Text("")
        if claim is not None and not isinstance(ratio, str):
            held = claim.held(ratio.value if isinstance(ratio, Ratio) else ratio)
            self.claims.append(held)
            verdict = Text(f"{claim} {'held' if held else 'not held'}", "green" if held else "bold red")
        shown = f"{ratio:.3g}" if isinstance(ratio, float) else str(ratio)
        self._table.add_row(*cells, shown, verdict)

    def show(self) -> None:
        """Prints the table. The last line says how many claims held; `python -m benchmarks` looks for it."""
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(f"\n{self._title}\n{where()}", highlight=False, soft_wrap=True)
        console.print(self._table)
        if self.claims:
            console.print(f"claims held: {sum(self.claims)} of {len(self.claims)}", highlight=False)


def where() -> str:
    """The command, the commit and the machine, as `docs/log.md` wants them."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    script = Path(sys.argv[0])
    command = f"benchmarks.{script.stem}" if script.parent.name == "benchmarks" else script.name
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return (
        f"python -m {' '.join([command, *sys.argv[1:]])} · commit {found.stdout.strip() or 'unknown'} · "
        f"jax {jax.__version__} · Python {platform.python_version()} · {cores} cores"
    )
