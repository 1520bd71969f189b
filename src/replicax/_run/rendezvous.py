"""How do the replicas of an eager run wait for each other, and how does the run always come to an end?

Each replica has a thread, replica 0 the caller's own. Where all must be there (a `merge_call`, a reduction) a replica
posts what it brings and waits. Once all have posted, replica 0 does the common work, on the caller's thread, and each
replica goes on with its share of the result. Nothing in here knows about JAX.
"""

# When is a wait hopeless?
#
# A deadline cannot tell: a replica may be away for minutes because its user sits in a debugger. So nobody waits for an
# amount of time. A replica is running, waiting or done, and whoever changes its own state looks at those of the others:
# if no replica is running any more and not all wait for the same thing, then nothing can ever happen, and that is an
# error, at once. A replica that does run is waited for, in short slices so that Ctrl-C gets through.
#
# Things that don't work: `threading.Barrier` (no result, no way to tell who is missing); one event per replica (two
# replicas that fail at once each wait for the other's event); `Thread.join` while a replica may run for long (Python
# 3.11, interrupted there by Ctrl-C, takes the thread for ended).

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from replicax import _errors
from replicax._locality import Site

T = TypeVar("T")

SLICE_SECONDS = 0.2


class Cancelled(BaseException):
    """Another replica failed; this one unwinds. Never reaches the user."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a replica waits for."""

    what: str
    """In the user's words: ``merge_call``, ``all_reduce``. Replicas that wait for different things do not meet."""
    site: Site
    brought: Any
    """What this replica brings along."""


RETURNED = "returned"


class Rendezvous:
    """N replicas, and the places where they meet.

    >>> from replicax._run.rendezvous import Rendezvous
    >>> from replicax._locality import call_site
    >>> meeting = Rendezvous(2)
    >>> def replica(number):
    ...     return meeting.meet(number, Call("sum", call_site(), number + 1), lambda both: [sum(both)] * 2)
    >>> meeting.run([lambda: replica(0), lambda: replica(1)])
    [3, 3]
    """

    def __init__(self, replicas: int, concurrent: bool = True) -> None:
        self._replicas = replicas
        self._concurrent = concurrent
        self._changed = threading.Condition()
        self._states: list[Call | str | None] = [None] * replicas
        """For each replica: what it waits for, `RETURNED`, or None while it runs."""
        self._living = replicas
        self._turn = 0
        self._rounds = 0
        self._shares: Sequence[Any] = ()
        self._error: BaseException | None = None

    def run(self, replicas: Sequence[Callable[[], T]], enter: Callable[[], None] = lambda: None) -> list[T]:
        """Runs one function per replica to its end; the first exception any of them raises is raised here, once.

        Args:
          enter: Called first on each new thread, to make it like the caller's.
        """
        results: list[Any] = [None] * self._replicas

        def live(replica: int) -> None:
            try:
                self._take_turn(replica)
                results[replica] = replicas[replica]()
                self._finish(replica)
            except Cancelled:
                pass
            # Whatever it is, an exit or Ctrl-C included: it is the caller's, and `run` hands it over.
            except BaseException as error:
                self._fail(error)
            finally:
                self._depart()

        def live_on_new_thread(replica: int) -> None:
            enter()
            live(replica)

        threads = [
            threading.Thread(
                target=functools.partial(contextvars.copy_context().run, live_on_new_thread, replica),
                name=f"replica-{replica}",
                daemon=True,
            )
            for replica in range(1, self._replicas)
        ]
        for thread in threads:
            thread.start()
        live(0)
        self._wait_for_departures()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def meet(self, replica: int, call: Call, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits for all replicas, and returns this one's share of ``work([what each one brought])``.

        `work` runs once, on the caller's thread: the one that replica 0 passed.
        """
        with self._changed:
            self.raise_if_cancelled()
            if self._states[replica] is not None:
                raise _errors.met_while_meeting(call, self._states[replica])
            self._states[replica] = call
            rounds = self._rounds
            self._pass_turn()
            self._settle()
            self._wait(lambda: self._all_wait() if replica == 0 else self._rounds != rounds)
        if replica == 0:
            try:
                shares = work([state.brought for state in self._states if isinstance(state, Call)])
            except BaseException as error:  # the run is over even if the step catches it: the others wait for a result
                self._fail(error)
                raise
            with self._changed:
                self._shares = shares
                self._states = [None] * self._replicas
                self._rounds += 1
                self._turn = 0
                self._changed.notify_all()
        self._take_turn(replica)
        return self._shares[replica]

    def wait_for_first(self, ready: Callable[[], bool]) -> bool:
        """Waits, in a replica, until replica 0 has made something `ready`; False if it no longer can."""
        with self._changed:
            self._wait(lambda: ready() or self._states[0] is not None)
            return ready()

    def announce(self) -> None:
        """Tells those in `wait_for_first` to look again."""
        with self._changed:
            self._changed.notify_all()

    def raise_if_cancelled(self) -> None:
        """Ends this replica if another one failed. Cheap: it is asked before each operation."""
        if self._error is not None:
            raise Cancelled

    # -- turns: one replica after the other, each until it waits or is done

    def _take_turn(self, replica: int) -> None:
        if not self._concurrent:
            with self._changed:
                self._wait(lambda: self._turn == replica)

    def _pass_turn(self) -> None:
        running = [replica for replica, state in enumerate(self._states) if state is None]
        if running and self._states[self._turn] is not None:
            self._turn = next((replica for replica in running if replica > self._turn), running[0])
        self._changed.notify_all()

    # -- states; all of these hold the lock

    def _wait(self, condition: Callable[[], bool]) -> None:
        while True:
            self.raise_if_cancelled()
            if condition():
                return
            self._changed.wait(SLICE_SECONDS)

    def _all_wait(self) -> bool:
        return all(isinstance(state, Call) for state in self._states)

    def _settle(self) -> None:
        """Raises if nobody runs and those who wait will not meet."""
        waiting = [state for state in self._states if isinstance(state, Call)]
        if waiting and None not in self._states:
            if len(waiting) < self._replicas or len({call.what for call in waiting}) > 1:
                error = _errors.replicas_do_not_meet(self._states)
                self._fail(error)
                raise error

    def _finish(self, replica: int) -> None:
        with self._changed:
            self._states[replica] = RETURNED
            self._pass_turn()
            self._settle()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _depart(self) -> None:
        with self._changed:
            self._living -= 1
            self._changed.notify_all()

    def _wait_for_departures(self) -> None:
        while self._living:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._living, SLICE_SECONDS)
            except KeyboardInterrupt as error:
                self._fail(error)
