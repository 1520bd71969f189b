"""What does the loop around a step do? `fit`: progress, logs, evaluation, saving, stopping, going on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from replicax import _context
from replicax._errors import InputError, NotAvailableError, message
from replicax._input.dataset import is_distributed
from replicax._options import is_count
from replicax._values import PerReplica
from replicax.metrics import Metric
from replicax.train._manager import CheckpointManager

Numbers = dict[str, float]


@dataclasses.dataclass
class Run:
    """How far a call of `fit` came."""

    step: int
    """How many steps are done, those of earlier runs included."""
    numbers: Numbers
    """The last reported ones: of the step, and of the evaluation."""
    ended: Literal["steps", "data", "stop", "interrupt"]
    """Why it ended: all steps were taken, the data ended, `stop` said so, or a signal (Ctrl-C) asked for it."""


def fit(
    step: Callable[..., Any],
    dataset: Any,
    *,
    steps: int | None = None,
    manager: CheckpointManager | None = None,
    save_every: int = 1000,
    evaluate: Callable[[], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    report_every: int = 50,
    stop: Callable[[Numbers], bool] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Run:
    """Runs `step` on batch after batch, under the strategy in force, or else the one that made the dataset.

    For the loop that would otherwise be written anew in each program; there is nothing in it that you could not write.
    With a `manager` it begins with the newest checkpoint, so that the same command goes on where it was; put the
    dataset into the checkpoint too, and it also goes on at the same batch. Ctrl-C ends the run after the step under way
    and saves it; a second one breaks off. SIGTERM, with which schedulers announce the end, saves in the same way if there
    is a `manager`; the program then exits with code 143, so that whoever started it knows to start it again.

    Args:
      step: A replica function. What it returns is reported: a number, called ``loss``, or a dict of numbers, each
        averaged over the replicas.
      dataset: A distributed dataset, or what `strategy.distribute_dataset` takes. A tuple is several arguments.
      steps: How many steps there shall be, those of earlier runs included. The data is gone through again as often as
        it takes; None goes through it once.
      manager: Where to save: after every `save_every` steps and at the end. The numbers of that step are saved with it;
        if the manager keeps the best ones by a number that is not reported then, it is measured first.
      evaluate: Returns numbers; called after every `evaluate_every` steps and at the end. See `evaluation`.
      report_every: After how many steps the numbers are fetched from the devices, which waits for the step to finish.
      stop: Told the numbers whenever there are new ones; True ends the run.
      log_dir: Where to write TensorBoard events.
      progress: Whether to draw a progress bar; by default if somebody is watching.

    >>> import jax.numpy as jnp, replicax as rx
    >>> w = rx.Variable(4.0)
    >>> def step(x):
    ...     w.assign_sub(0.5 * w.value)
    ...     return w.value
    >>> run = rx.train.fit(step, [jnp.ones(2)] * 2, steps=5, progress=False)
    >>> run.step, run.numbers
    (5, {'loss': 0.125})
    """
    _require_sensible(
        step=step, steps=steps, manager=manager, save_every=save_every, evaluate=evaluate,
        evaluate_every=evaluate_every, report_every=report_every, stop=stop, log_dir=log_dir,
    )  # fmt: skip
    strategy, data = _distributed(dataset)
    loop = _Loop(strategy, report_every, manager, save_every, evaluate, evaluate_every, stop)
    done = 0 if manager is None else manager.restore_latest() or 0
    if done and manager is not None and not manager.checkpoint.holds(data):
        _tell_that_data_begins_anew(done)
    shown = strategy.is_chief and (sys.stderr.isatty() if progress is None else progress)
    from replicax.train._bar import drawn  # rich is for those who watch

    signals = (signal.SIGINT,) if manager is None else (signal.SIGINT, signal.SIGTERM)
    with (
        drawn(shown) as bar,
        _events(log_dir if strategy.is_chief else None) as events,
        _Interrupt(signals) as interrupt,
    ):
        loop.show, loop.log = bar.show, events
        bar.begin(done, steps if steps is not None else _length(data))
        run = loop.run(step, data, done, steps, interrupt)
        if run.ended == "interrupt":
            bar.say(_where_it_goes_on(run.step, manager))
    interrupt.carry_on()
    return run


def evaluation(step: Callable[..., Any], dataset: Any, metrics: Mapping[str, Metric]) -> Callable[[], Numbers]:
    """What `fit` calls to evaluate: metrics over a whole dataset, exact also where its last batch is short.

    >>> import jax.numpy as jnp, replicax as rx
    >>> mean = rx.metrics.Mean()
    >>> evaluate = rx.train.evaluation(lambda x: mean.update(x), [jnp.arange(4.0), jnp.array([9.0])], {"mean": mean})
    >>> evaluate()
    {'mean': 3.0}

    Args:
      step: A replica function that updates the metrics.
      dataset: Gone through from the beginning each time.
      metrics: What to report, by name.
    """
    if not callable(step):
        raise _no_step(step)
    if not isinstance(metrics, Mapping) or not all(isinstance(metric, Metric) for metric in metrics.values()):
        raise _no_metrics(metrics)
    strategy, data = _distributed(dataset)

    def evaluate() -> Numbers:
        for metric in metrics.values():
            metric.reset()
        for batch in data:
            strategy.run(step, _arguments(batch))
        return {name: float(metric.result()) for name, metric in metrics.items()}

    return evaluate


class _Loop:
    def __init__(
        self,
        strategy: Any,
        report_every: int,
        manager: CheckpointManager | None,
        save_every: int,
        evaluate: Callable[[], Mapping[str, Any]] | None,
        evaluate_every: int | None,
        stop: Callable[[Numbers], bool] | None,
    ) -> None:
        self.strategy = strategy
        self.report_every = report_every
        self.manager = manager
        self.save_every = save_every
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        self.stop = stop
        self.show: Callable[[int, Numbers], None] = _nowhere
        self.log: Callable[[int, Numbers], None] = _nowhere
        self.numbers: Numbers = {}
        self.alone = len({device.process_index for device in strategy.placement.mesh.devices.flat}) == 1
        # The last step at which each of these was done, so that none is done twice.
        self._reported = self._evaluated = self._saved = -1
        self._of_this_step: Numbers = {}

    def run(self, step: Callable[..., Any], data: Any, done: int, steps: int | None, interrupt: _Interrupt) -> Run:
        begun, ended, out = done, "data" if steps is None else "steps", None
        for batch in _batches(data, done, steps):
            out = self.strategy.run(step, _arguments(batch))
            done += 1
            self._of_this_step = {}
            if done % self.report_every == 0:
                self._report(done, out)
            if self.evaluate_every is not None and done % self.evaluate_every == 0:
                self._evaluate(done)
            if done % self.save_every == 0:
                self._save(done, out)
            wish = self._wish(done in (self._reported, self._evaluated), interrupt)
            if wish:
                ended = wish
                break
        if done > begun:
            self._finish(done, out, in_a_hurry=ended == "interrupt")
        return Run(done, self.numbers, ended)  # type: ignore[arg-type]

    def _finish(self, done: int, out: Any, in_a_hurry: bool) -> None:
        self._report(done, out)
        if not in_a_hurry:
            self._evaluate(done)
        self._save(done, out, in_a_hurry)
        if self.manager is not None:
            self.manager.wait_until_finished()

    def _wish(self, news: bool, interrupt: _Interrupt) -> str | None:
        """Why the run should end now, on all processes or on none."""
        if not (self.alone or news):
            return None  # the others are not asking either
        stopping = news and self.stop is not None and bool(self.stop(dict(self.numbers)))
        if not self.alone:
            interrupt.asked, stopping = self._largest([interrupt.asked, stopping])
        return "interrupt" if interrupt.asked else "stop" if stopping else None

    def _largest(self, numbers: list[int]) -> list[int]:
        """Each number, or a larger one that another process has."""
        here = tuple(np.array(numbers, np.int32) for _ in self.strategy.placement.local_replicas)
        return [int(number) for number in np.asarray(self.strategy.run(_most, (PerReplica(here),)))]

    def _report(self, done: int, out: Any) -> None:
        if self._reported < done:
            self._reported = done
            self._tell(done, self._fetched(out))

    def _evaluate(self, done: int) -> None:
        if self.evaluate is not None and self._evaluated < done:
            self._evaluated = done
            self._tell(done, _numbers("evaluate", self.evaluate()))

    def _save(self, done: int, out: Any, in_a_hurry: bool = False) -> None:
        if self.manager is None or self._saved == done:
            return
        self._saved = done
        if self.manager.keep_best is not None and not in_a_hurry:
            metric, _ = self.manager.keep_best
            for measure in (lambda: self._report(done, out), lambda: self._evaluate(done)):
                if metric not in self._of_this_step:
                    measure()
        self.manager.save(done, None if in_a_hurry else self._of_this_step, force=True)

    def _fetched(self, out: Any) -> Numbers:
        if out is None:
            return {}
        return _numbers("step", out if isinstance(out, Mapping) else {"loss": out}, self._mean)

    def _mean(self, value: Any) -> Any:
        return self.strategy.reduce("mean", value)

    def _tell(self, done: int, numbers: Numbers) -> None:
        self.numbers |= numbers
        self._of_this_step |= numbers
        self.show(done, self.numbers)
        self.log(done, numbers)


def _distributed(dataset: Any) -> tuple[Any, Any]:
    """The strategy to run under, and the dataset handed out to its replicas."""
    made_by = getattr(dataset, "strategy", None) if is_distributed(dataset) else None
    strategy = _context.get_strategy() if made_by is None or _context.has_strategy() else made_by
    return strategy, dataset if is_distributed(dataset) else strategy.distribute_dataset(dataset)


def _numbers(who: str, named: Any, of: Callable[[Any], Any] = lambda value: value) -> Numbers:
    """What a step or an evaluation reports, as Python numbers."""
    if not isinstance(named, Mapping):
        raise _no_numbers(who, [f"{type(named).__name__}, which is no dict"])
    numbers, bad = {}, []
    for name, value in named.items():
        try:
            numbers[str(name)] = float(np.asarray(of(value)))
        except (TypeError, ValueError) as error:
            bad.append(f"{name}  {_described(value)}  {error}")
    if bad:
        raise _no_numbers(who, bad)
    return numbers


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__


def _most(flags: Any) -> Any:
    context = _context.get_replica_context()
    assert context is not None
    return context.all_reduce("max", jnp.asarray(flags))


def _batches(data: Any, done: int, steps: int | None) -> Iterator[Any]:
    """The batches that are left, pass after pass; one pass if there is no number of steps."""
    fruitless = 0
    while steps is None or done < steps:
        fruitless += 1
        for batch in data:
            yield batch
            fruitless = 0
            done += 1
            if steps is not None and done >= steps:
                return
        if steps is None:
            return
        if fruitless > 1:  # one pass may be: what was saved after the last batch of a pass goes on at its end
            raise _no_data(steps, done)


def _arguments(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # never ends, or nobody knows where
        return None


class _Interrupt:
    """Notes a signal instead of breaking off in the middle of a step. The second one does what it did before."""

    def __init__(self, signals: Sequence[int]) -> None:
        self.asked = 0
        """The signal that came."""
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._installed = False

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
            # One that is ignored stays ignored (`nohup`); None is a handler that is not Python's and cannot be put back.
            before = {number: signal.getsignal(number) for number in self._signals}
            self._before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}
            self._installed = True
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _note(self, number: int, frame: object) -> None:
        self.asked = number
        self._restore()

    def _restore(self) -> None:
        if self._installed:
            self._installed = False
            for number, before in self._before.items():
                signal.signal(number, before)

    def carry_on(self) -> None:
        """What a program does that was asked to end, and has saved: Ctrl-C only ends the loop, SIGTERM the program."""
        if self.asked != signal.SIGTERM:
            return
        before = self._before.get(signal.SIGTERM)
        if callable(before):
            before(self.asked, None)
        else:
            raise SystemExit(128 + signal.SIGTERM)


def _where_it_goes_on(step: int, manager: CheckpointManager | None) -> str:
    if manager is None:
        return f"Interrupted after step {step}."
    return f"Interrupted after step {step}, which is saved in {manager.directory}. The same command goes on from there."


def _nowhere(done: int, numbers: Numbers) -> None:
    """Nobody wants to know."""


@contextlib.contextmanager
def _events(log_dir: str | os.PathLike[str] | None) -> Iterator[Callable[[int, Numbers], None]]:
    """Writes numbers as TensorBoard events; nothing without a directory."""
    if log_dir is None:
        yield _nowhere
        return
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise NotAvailableError(
            "rx.train.fit(log_dir=...) writes with tensorboardX: pip install 'replicax[tensorboard]'"
        ) from None
    with SummaryWriter(os.fspath(log_dir)) as writer:

        def write(done: int, numbers: Numbers) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, done)

        yield write


def _require_sensible(**given: Any) -> None:
    """Refuses arguments of `fit` that would fail only after some steps, all at once."""
    bad = [
        f"{name}={given[name]!r}  takes {kind}"
        for kind, fits, names in (
            ("a function", callable, ("step",)),
            ("a function, or None", _optional(callable), ("evaluate", "stop")),
            ("a number of steps, or None", _optional(lambda x: is_count(x, 0)), ("steps",)),
            ("a number of steps from 1 on", is_count, ("save_every", "report_every")),
            ("a number of steps from 1 on, or None", _optional(is_count), ("evaluate_every",)),
            ("an rx.CheckpointManager, or None", _optional(_is_manager), ("manager",)),
            ("a folder, or None", _optional(_is_path), ("log_dir",)),
        )
        for name in names
        if not fits(given[name])
    ]
    if given["evaluate_every"] is not None and given["evaluate"] is None:
        bad.append(f"evaluate_every={given['evaluate_every']!r}  has nothing to call without `evaluate=`")
    if bad:
        ways = ["`rx.train.fit(step, dataset, steps=1000, manager=rx.CheckpointManager(checkpoint, directory))`"]
        raise InputError(message("`rx.train.fit(...)` cannot work with these arguments", bad, "", ways))


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or fits(x)


def _is_path(x: Any) -> bool:
    return isinstance(x, (str, os.PathLike))


def _is_manager(x: Any) -> bool:
    return isinstance(x, CheckpointManager)


def _no_numbers(who: str, bad: list[str]) -> InputError:
    why = "It is called `loss` if the step returns it alone." if who == "step" else ""
    ways = {
        "step": ["return a scalar: `rx.mean(per_example)`", "return a dict of scalars", "return nothing"],
        "evaluate": ["return a dict of numbers", 'use `rx.train.evaluation(step, dataset, {"accuracy": metric})`'],
    }
    return InputError(message(f"`rx.train.fit(...)`: what {who} returned cannot be reported", bad, why, ways[who]))


def _no_metrics(metrics: Any) -> InputError:
    return InputError(
        message(
            "`rx.train.evaluation(step, dataset, metrics)` takes metrics by name",
            [repr(metrics)[:200]],
            instead=['`{"accuracy": rx.metrics.Accuracy()}`, and update it in the step'],
        )
    )


def _no_step(given: Any) -> InputError:
    call = f"`rx.train.evaluation({type(given).__name__}, ...)` was not given a step to call"
    return InputError(message(call, instead=["pass a function of a batch that updates the metrics"]))


def _tell_that_data_begins_anew(done: int) -> None:
    warnings.warn(
        f"rx.train.fit goes on after step {done}, but its data begins anew: the checkpoint does not hold the dataset. Save "
        "it with the rest: `dataset = strategy.distribute_dataset(batches)`, `rx.Checkpoint(..., data=dataset)`.",
        RuntimeWarning,
        stacklevel=3,
    )


def _no_data(steps: int, done: int) -> InputError:
    return InputError(
        message(
            f"`rx.train.fit(step, dataset, steps={steps})` found no batch in the dataset after {done} steps",
            why="More steps are to be taken, so the data was begun again, and ended before its first batch.",
            instead=[
                "pass a dataset that can be gone through again: a list, `rx.data.from_arrays`, not a generator",
                f"take as many steps as there is data for: `steps={done}`, or leave `steps` out",
            ],
        )
    )
