"""Where is the next element made: in the loop that asks for it, or ahead of it by a thread?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax._input.ahead import Ahead, Depths
from replicax._input.feed import Gathered
from replicax._input.steps import State, Steps

PyTree = Any


class Reading:
    """The elements of one pass in order, each with the place after it, which is where to resume once it is used."""

    def __init__(self, steps: Steps, depths: Depths) -> None:
        self._threads: list[Ahead[Any]] = []
        self.take = _sent(self._ahead(_gathered(steps), depths.host))
        self.take = self._ahead(self.take, depths.device)

    def close(self) -> None:
        """Ends the threads."""
        for thread in reversed(self._threads):
            thread.close()

    def _ahead(self, produce: Callable[[], Any], depth: int) -> Callable[[], Any]:
        if not depth:
            return produce
        self._threads.append(Ahead(produce, depth))
        return self._threads[-1].take


def _gathered(steps: Steps) -> Callable[[], tuple[Gathered, State] | None]:
    def read() -> tuple[Gathered, State] | None:
        gathered = steps.read()
        return None if gathered is None else (gathered, steps.get_state())

    return read


def _sent(read: Callable[[], tuple[Gathered, State] | None]) -> Callable[[], tuple[PyTree, State] | None]:
    def send() -> tuple[PyTree, State] | None:
        gathered = read()
        return None if gathered is None else (gathered[0](), gathered[1])

    return send
