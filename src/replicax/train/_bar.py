"""How far is the run, and when will it be done? A line on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """Steps done, steps per second, time that is left, and the last reported numbers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=None, rate="", numbers="")

    def begin(self, done: int, total: int | None) -> None:
        """`done` steps were taken by earlier runs; `total` is None if nobody knows how many there will be."""
        self._progress.reset(self._task, total=total, completed=done)
        if done:
            self.say(f"Going on after step {done}.")

    def show(self, done: int, numbers: Mapping[str, float]) -> None:
        """Draws the line anew."""
        self._progress.update(self._task, completed=done)
        rate = _rate(self._progress.tasks[0].speed)
        words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self._progress.update(self._task, rate=rate, numbers=words)
        self._progress.refresh()

    def say(self, words: str) -> None:
        """Writes a line above the bar."""
        self._progress.print(words, markup=False, highlight=False, soft_wrap=True)


def _rate(speed: float | None) -> str:
    """Nothing at first: the time until the first report goes into compiling."""
    if not speed:
        return ""
    return f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"


@contextlib.contextmanager
def drawn(shown: bool) -> Iterator[Bar]:
    """A bar on the terminal, or one that nobody sees."""
    columns = (
        BarColumn(bar_width=14), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    # Refreshed when there are numbers to show: a thread that draws would compete with the step. Speed is that of the last
    # thousand reports, however far apart: over a span of time there may be one report or none.
    options: dict[str, Any] = {"auto_refresh": False, "speed_estimate_period": float("inf")}
    with Progress(*columns, console=Console(stderr=True), disable=not shown, **options) as progress:
        yield Bar(progress)
