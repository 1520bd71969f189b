"""How far is the run, and when will it be done? A line on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """Steps done, steps per second, time that is left, and the last reported numbers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=None, rate="", numbers="")
        self._begun = 0

    def begin(self, done: int, total: int | None) -> None:
        """`done` steps were taken by earlier runs; `total` is None if nobody knows how many there will be."""
        self._begun = done
        self._progress.update(self._task, total=total, completed=done)

    def show(self, done: int, numbers: Mapping[str, float]) -> None:
        """Draws the line anew."""
        task = self._progress.tasks[0]
        rate = (done - self._begun) / task.elapsed if task.elapsed else 0.0
        words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self._progress.update(self._task, completed=done, rate=f"{rate:.1f} steps/s", numbers=words)
        self._progress.refresh()


@contextlib.contextmanager
def drawn(shown: bool) -> Iterator[Bar]:
    """A bar on the terminal, or one that nobody sees."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    # Refreshed when there are numbers to show: a thread that draws would compete with the step.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=not shown) as progress:
        yield Bar(progress)
