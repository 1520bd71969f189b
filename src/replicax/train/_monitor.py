"""Who calls the step again and again, and what happens when one fails? `Monitor`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from replicax._errors import InputError, OutOfRangeError, message
from replicax._options import is_count
from replicax.train._manager import CheckpointManager

PASSING = (jax.errors.JaxRuntimeError, OSError, FloatingPointError)
"""Errors that may be gone when the step is tried again; a wrong program is not among them."""


class Monitor:
    """Calls a step until there is no more data, and goes on from the last checkpoint when one fails.

    A long run meets a file system that is away for a minute, or a loss that becomes NaN once. With a `manager` the
    monitor saves every few steps, and after such an error restores what was saved last and goes on from there. Put
    the data's iterator into the checkpoint, and the same batches come again.

    With a `manager` it begins with the newest checkpoint there is, so that a program started again continues.

    Args:
      step_callable: Takes one step when called; raises `rx.OutOfRangeError` (or StopIteration) when the data has ended.
      session: There are no sessions here; giving one is an error.
      manager: Where to save, and what.
      save_every: After how many steps to save.
      max_restarts: How many errors to survive; each further one is raised.
      restart_on: The classes of errors to survive.

    >>> import replicax as rx
    >>> w = rx.Variable(0.0)
    >>> monitor = rx.train.Monitor(lambda: w.assign_add(1.0))
    >>> monitor.run_steps(3)
    3
    >>> float(w)
    3.0
    """

    def __init__(
        self,
        step_callable: Callable[[], Any],
        session: None = None,
        *,
        manager: CheckpointManager | None = None,
        save_every: int | None = None,
        max_restarts: int = 0,
        restart_on: tuple[type[Exception], ...] = PASSING,
    ) -> None:
        if session is not None:
            raise InputError(
                "Monitor(step, session=...): Should not provide a session. Steps are carried out when called."
            )
        if not callable(step_callable):
            raise _no_step(step_callable)
        if manager is None and (save_every is not None or max_restarts):
            raise _no_manager(save_every, max_restarts)
        self.steps_done = 0
        """How many steps the variables have behind them, those before a restart included."""
        self.restarts = 0
        self._step = step_callable
        self._manager = manager
        self._save_every = save_every
        self._max_restarts = max_restarts
        self._restart_on = restart_on
        if manager is not None:
            self._begin(manager)

    def _begin(self, manager: CheckpointManager) -> None:
        step = manager.restore_latest()
        if step is not None:
            self.steps_done = step
        elif self._max_restarts:
            manager.save(0, force=True)  # so that an error before the first save can be survived too

    def run_steps(self, num_steps: int | None = None) -> int:
        """Takes `num_steps` steps, or as many as there is data for; None goes on until the data ends.

        Returns:
          How many steps further the variables are.
        """
        if num_steps is not None and not is_count(num_steps, 0):
            raise _no_count(num_steps)
        start = self.steps_done
        goal = None if num_steps is None else start + num_steps
        while goal is None or self.steps_done < goal:
            try:
                jax.block_until_ready(self._step())
            except (OutOfRangeError, StopIteration):
                break
            except self._restart_on as error:
                self._recover(error)
                continue
            self.steps_done += 1
            self._save_if_due()
        if self._manager is not None:
            self._manager.wait_until_finished()
        return self.steps_done - start

    def _save_if_due(self) -> None:
        if self._manager is not None and self._save_every and self.steps_done % self._save_every == 0:
            self._manager.save(self.steps_done, force=True)

    def _recover(self, error: Exception) -> None:
        """Goes back to the last checkpoint, or raises `error` again."""
        if self._manager is None or self.restarts >= self._max_restarts:
            raise error
        failed = self.steps_done + 1
        step = self._manager.restore_latest()
        if step is None:
            raise error
        self.restarts += 1
        self.steps_done = step
        warnings.warn(
            f"Step {failed} failed ({type(error).__name__}: {error}). Going on from step {step}; restart "
            f"{self.restarts} of {self._max_restarts}.",
            RuntimeWarning,
            stacklevel=3,
        )


def _no_step(given: Any) -> InputError:
    why = "A step is called without arguments and takes one step."
    return InputError(message(f"`rx.train.Monitor({type(given).__name__})` has nothing to call", why=why))


def _no_count(given: Any) -> InputError:
    ways = ["`monitor.run_steps(100)`", "until the data ends: `monitor.run_steps()`"]
    return InputError(message(f"`monitor.run_steps({given!r})` takes a number of steps", instead=ways))


def _no_manager(save_every: int | None, max_restarts: int) -> InputError:
    return InputError(
        message(
            f"`rx.train.Monitor(step, save_every={save_every}, max_restarts={max_restarts})` has nowhere to save",
            why="To go back to a step it must have been saved.",
            instead=["`rx.train.Monitor(step, manager=rx.CheckpointManager(checkpoint, directory), ...)`"],
        )
    )
