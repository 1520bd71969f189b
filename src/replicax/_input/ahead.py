"""How are batches read while the step runs? By a thread that stays a few batches ahead."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Depths:
    """How many batches wait for their step in host memory, and how many on the devices."""

    host: int = 0
    device: int = 0

    def __str__(self) -> str:
        places = (self.host, "in host memory"), (self.device, "on the devices")
        waiting = [f"{n} batch{'es' * (n > 1)} {where}" for n, where in places if n]
        return f"{' and '.join(waiting)}, by a thread" if waiting else "no"


class Ahead(Generic[T]):
    """The results of calling `produce` again and again until it returns None, up to `depth` calls ahead.

    An exception comes out of the `take` whose result it stands for, not earlier. The thread ends with the data, with
    `close`, or when nobody holds this object any more: `produce` must not lead back to it.
    """

    def __init__(self, produce: Callable[[], T | None], depth: int) -> None:
        self._produce = produce
        self._depth = depth
        self._pending: deque[Future[T | None]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="replicax-input")
        self._stop = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)

    def take(self) -> T | None:
        """The next result; None once the data has ended."""
        if not self._stop.alive:
            return None
        while len(self._pending) <= self._depth:
            self._pending.append(self._executor.submit(self._produce))
        result = self._pending.popleft().result()
        if result is None:
            self.close()
        return result

    def close(self) -> None:
        """Ends the thread, after the call that it is in."""
        self._stop()
        self._executor.shutdown(wait=True)
