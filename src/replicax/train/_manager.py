"""Which checkpoints are kept, and which one is the newest good one? `CheckpointManager`.

The directory is the only memory: `ckpt-<step>` is a checkpoint if it has a manifest, and metrics are in that manifest.
A manager that starts in a directory therefore knows what its predecessor, killed at whatever moment, has left.
"""

import functools
import glob
import math
import operator
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from replicax._errors import CheckpointDamagedError, CheckpointError, message
from replicax._options import is_count
from replicax.train import _store
from replicax.train._checkpoint import Checkpoint, RestoreStatus
from replicax.train._store import PendingSave, StrPath

Better = Literal["max", "min"]


class CheckpointManager:
    """Saves as training goes along, deletes what is no longer needed, and finds the checkpoint to go on from.

    ``restore_latest`` is what makes a job restartable: it goes to the newest checkpoint whose every byte is
    the one that was saved. Whatever was cut short by a crash or damaged since is passed over with a warning that
    names the file.

    Args:
      checkpoint: What is saved.
      directory: Where; each checkpoint is a folder ``ckpt-<step>`` in it.
      max_to_keep: How many checkpoints stay; None keeps all. A checkpoint is deleted once a newer one is on disk.
      keep_best: ``("accuracy", "max")`` or ``("loss", "min")``: the `max_to_keep` best ones by that metric stay, and
        the newest one in any case.
      save_interval_steps: `save` skips steps that are closer than this to the last saved one.
      async_save: Whether `save` returns while files are being written. If the disk is slower than the
        training loop, the next `save` waits for the one before.
      checkpoint_name: What stands before the step in the folder's name.
      init_fn: Called by `restore_or_initialize` if there is nothing to restore.

    >>> import tempfile, replicax as rx
    >>> w = rx.Variable(0.0)
    >>> with rx.CheckpointManager(rx.Checkpoint(w=w), tempfile.mkdtemp(), max_to_keep=2) as manager:
    ...     for step in range(1, 6):
    ...         _ = w.assign_add(1.0)
    ...         _ = manager.save(step)
    >>> manager.all_steps
    [4, 5]
    >>> _ = w.assign(0.0)
    >>> manager.restore_latest(), float(w)
    (5, 5.0)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: StrPath,
        max_to_keep: int | None = 5,
        *,
        keep_best: tuple[str, Better] | None = None,
        save_interval_steps: int = 1,
        async_save: bool = True,
        checkpoint_name: str = "ckpt",
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise _no_checkpoint(checkpoint)
        if max_to_keep is not None and not is_count(max_to_keep):
            raise _bad_count("max_to_keep", max_to_keep, "keep all: `max_to_keep=None`")
        if not is_count(save_interval_steps):
            raise _bad_count("save_interval_steps", save_interval_steps, "save whenever asked: leave it out")
        if keep_best is not None and not (isinstance(keep_best, tuple) and keep_best[1:] in (("max",), ("min",))):
            raise _bad_keep_best(keep_best)
        folder = Path(directory).absolute()
        if folder.exists() and not folder.is_dir() or _store.is_finished(folder):
            raise _no_directory(folder)
        self.checkpoint = checkpoint
        self.max_to_keep = max_to_keep
        self.keep_best = keep_best
        self.save_interval_steps = save_interval_steps
        self.async_save = async_save
        self.init_fn = init_fn
        self._directory = folder
        self._name = checkpoint_name
        self._pending: PendingSave | None = None
        self._last_saved: int | None = None
        self._damaged: set[int] = set()

    def __repr__(self) -> str:
        return f"<rx.CheckpointManager {str(self._directory)!r}: steps {self._finished()}>"

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait_until_finished()

    # -- saving

    def save(
        self,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
        checkpoint_number: int | None = None,
    ) -> str | None:
        """Saves the state as of `step`.

        With several processes all of them call it, at the same step; the first one writes.

        Args:
          step: How many steps are done; by default one more than the last saved one.
          metrics: Numbers that describe it; `keep_best` looks here.
          force: Save even if the last saved step is closer than `save_interval_steps`, and even without the metric that
            `keep_best` goes by: such a checkpoint is never the best, and stays as long as it is the newest.
          checkpoint_number: What tf.train.CheckpointManager calls `step`.

        Returns:
          The path, or None if this step was skipped. Whoever restores it, or asks which checkpoints there are, waits
          for the files.

        Raises:
          CheckpointError: If this save, or the one before it, could not be written; if there is a checkpoint of a
            later step, which `restore_latest` would prefer.
        """
        step = checkpoint_number if step is None else step
        number = self._next_step() if step is None else _step_number(step)
        if not force and not self.should_save(number):
            return None
        self.wait_until_finished()
        self._require_newest(number)
        path = self._path(number)
        notes = {"step": number, "metrics": self._described(metrics, force)}
        pending = self.checkpoint.begin(path, notes, functools.partial(self._delete_old, number))
        self._last_saved = number
        self._damaged.discard(number)
        if self.async_save:
            self._pending = pending
            pending.start()
        else:
            pending.run()
        return os.fspath(path)

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would save, by `save_interval_steps`."""
        last = self._last_saved if self._last_saved is not None else self.latest
        return last is None or step < last or step >= last + self.save_interval_steps

    def wait_until_finished(self, timeout: float | None = _store.SAVE_DEADLINE) -> None:
        """Returns when everything that was saved is on disk; raises if it could not be written."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait(timeout)
        finally:
            if pending.done():
                self._pending = None

    # -- what there is

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return os.fspath(self._directory)

    @property
    def all_steps(self) -> list[int]:
        """The steps of all finished checkpoints, oldest first; without those that were found to be damaged."""
        _store.settle(self._directory)
        return self._finished()

    def _finished(self) -> list[int]:
        """Without a save that is under way, for the thread in which it is."""
        finished = [step for step, path in _numbered(self._directory, self._name) if _store.is_finished(path)]
        return [step for step in finished if step not in self._damaged]

    @property
    def latest(self) -> int | None:
        """The newest saved step."""
        return max(self.all_steps, default=None)

    @property
    def best(self) -> int | None:
        """The step with the best metric, by `keep_best`; the newest of equals; None if none has that metric."""
        if self.keep_best is None:
            raise _no_keep_best()
        _store.settle(self._directory)
        return next(iter(self._by_merit()), None)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all finished checkpoints, oldest first."""
        return [os.fspath(self._path(step)) for step in self.all_steps]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint."""
        return None if (latest := self.latest) is None else os.fspath(self._path(latest))

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the checkpoint with the best metric, by `keep_best`."""
        return None if (best := self.best) is None else os.fspath(self._path(best))

    def metrics(self, step: int) -> dict[str, float]:
        """What `save` was told about this step."""
        _store.settle(self._path(step))
        return self._saved_metrics(step)

    def _saved_metrics(self, step: int) -> dict[str, float]:
        return _store.read_manifest(self._path(step)).metadata["notes"]["metrics"]

    # -- restoring

    def restore_latest(self) -> int | None:
        """Restores the newest checkpoint that is whole, and returns its step; None if nothing was ever saved.

        Raises:
          CheckpointDamagedError: If there are checkpoints and none of them is whole.
          CheckpointMismatchError: If the newest whole one does not fit the objects.
        """
        self.wait_until_finished()
        for step, path in reversed(_numbered(self._directory, self._name)):
            try:
                status = self.checkpoint.restore(path)
            except CheckpointDamagedError as error:
                self._damaged.add(step)
                warnings.warn(f"Passed over: {_what_is_wrong(error)}", RuntimeWarning, stacklevel=2)
            else:
                if status.missing:
                    warnings.warn(_without_a_value(status), RuntimeWarning, stacklevel=2)
                self._last_saved = step
                return step
        damaged = [path.name for _, path in _numbered(self._directory, self._name) if _store.is_finished(path)]
        if damaged:
            raise _none_whole(self._directory, damaged)
        return None

    def restore_or_initialize(self) -> str | None:
        """Restores the newest whole checkpoint and returns its path; without one calls `init_fn` and returns None."""
        step = self.restore_latest()
        if step is not None:
            return os.fspath(self._path(step))
        if self.init_fn is not None:
            self.init_fn()
        return None

    # -- keeping and deleting

    def _path(self, step: int) -> Path:
        return self._directory / f"{self._name}-{step}"

    def _described(self, metrics: Mapping[str, float] | None, force: bool) -> dict[str, float]:
        numbers = _numbers(metrics)
        if self.keep_best is not None and self.keep_best[0] not in numbers and not (force and metrics is None):
            raise _no_metric(self.keep_best[0], list(numbers))
        return numbers

    def _next_step(self) -> int:
        last = self._last_saved if self._last_saved is not None else self.latest
        return 1 if last is None else last + 1

    def _require_newest(self, step: int) -> None:
        later = [other for other in self._finished() if other > step]
        if later:
            raise _later_exists(step, self._directory, [self._path(other).name for other in later])

    def _by_merit(self) -> list[int]:
        """Steps that have the metric of `keep_best`, best first."""
        if self.keep_best is None:
            return []
        metric, better = self.keep_best
        sign = 1 if better == "max" else -1
        merits = {step: self._readable_metrics(step) for step in self._finished()}
        known = [(values[metric], step) for step, values in merits.items() if metric in values]
        scored = [(sign * value, step) for value, step in known if not math.isnan(value)]  # NaN is no merit
        return [step for _, step in sorted(scored, reverse=True)]

    def _readable_metrics(self, step: int) -> dict[str, float]:
        try:
            return self._saved_metrics(step)
        except CheckpointDamagedError:  # a damaged one has no merit
            return {}

    def _delete_old(self, newest: int) -> None:
        """Runs when a new checkpoint is on disk: never are there fewer whole ones than before the save."""
        steps = self._finished()
        ranked = self._by_merit() if self.keep_best is not None else steps[::-1]
        keep = {newest, *ranked[: self.max_to_keep]}
        for step, path in _numbered(self._directory, self._name):
            if step in steps and step not in keep or not _store.is_finished(path):  # a save that was killed
                _delete(path)


def latest_checkpoint(directory: StrPath, name: str = "ckpt") -> str | None:
    """The path of the newest finished checkpoint in a manager's directory, without a manager.

    >>> import replicax as rx
    >>> rx.train.latest_checkpoint("/nowhere") is None
    True
    """
    _store.settle(Path(directory).absolute())
    finished = [path for _, path in _numbered(Path(directory), name) if _store.is_finished(path)]
    return os.fspath(finished[-1]) if finished else None


def _numbered(directory: Path, name: str) -> list[tuple[int, Path]]:
    """The folders `<name>-<step>` by step, finished or not."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [(pattern.fullmatch(path.name), path) for path in directory.glob(f"{glob.escape(name)}-*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _delete(path: Path) -> None:
    """The manifest first: half deleted must look unfinished, not damaged."""
    (path / _store.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _step_number(step: Any) -> int:
    """A step may be held in a variable or an array."""
    try:
        number = operator.index(np.asarray(step).item())
    except (TypeError, ValueError):
        raise _bad_step(step) from None
    if number < 0:
        raise _bad_step(step)
    return number


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    numbers, bad = {}, []
    for name, value in (metrics or {}).items():
        try:
            numbers[name] = float(np.asarray(value))
        except (TypeError, ValueError) as error:
            bad.append(f"{name}  {type(value).__name__}  {error}")
    if bad:
        raise _bad_metrics(bad)
    return numbers


def _what_is_wrong(error: CheckpointDamagedError) -> str:
    """The first two parts of the message: which checkpoint, which files."""
    return "\n\n".join(str(error).split("\n\n")[:2])


def _none_whole(directory: Path, damaged: list[str]) -> CheckpointDamagedError:
    why = "Starting again from nothing would hide that, so it is left to you."
    ways = ["bring back the files from elsewhere", f"start anew: use another directory than {directory}"]
    return CheckpointDamagedError(message(f"No checkpoint in {directory} is whole", damaged, why, ways))


def _later_exists(step: int, directory: Path, later: list[str]) -> CheckpointError:
    why = "After a restart `restore_latest()` would go on from the latest step, not from what is being saved now."
    ways = ["call `manager.restore_latest()` before training", "use another directory", "delete the later ones"]
    call = f"`manager.save({step})` would not be the newest checkpoint in {directory}"
    return CheckpointError(message(call, later, why, ways))


def _without_a_value(status: RestoreStatus) -> str:
    bad = [f"{name}  has no saved value and keeps the one it has" for name in status.missing]
    bad += [f"{name}  was saved and is used by no object so far" for name in status.unused]
    why = "If this is meant, restore once by `checkpoint.restore(path)` and go on in another directory."
    return message(f"The checkpoint {status.path} does not hold everything", bad, why)


def _no_checkpoint(given: Any) -> TypeError:
    call = f"`rx.CheckpointManager({type(given).__name__}, ...)` was not told what to save"
    return TypeError(message(call, instead=["`rx.CheckpointManager(rx.Checkpoint(model=model, ...), directory)`"]))


def _no_directory(folder: Path) -> CheckpointError:
    what = "is itself a checkpoint" if folder.is_dir() else "is a file"
    ways = [
        f'the directory that it is in: `rx.CheckpointManager(checkpoint, "{folder.parent}")`',
        "a directory of its own",
    ]
    call = f"`rx.CheckpointManager(checkpoint, directory)` takes a directory for checkpoints, and {folder} {what}"
    return CheckpointError(message(call, instead=ways))


def _bad_count(name: str, number: object, otherwise: str) -> ValueError:
    call = f"`rx.CheckpointManager(..., {name}={number!r})` takes a whole number from 1 on"
    return ValueError(message(call, instead=[f"`{name}=1`, or more", otherwise]))


def _bad_step(step: object) -> ValueError:
    call = f"`manager.save({step!r})` takes the number of steps that are done, a whole number from 0 on"
    return ValueError(message(call, instead=["`manager.save(1000)`", "leave it out to count up from the last one"]))


def _bad_metrics(bad: list[str]) -> ValueError:
    return ValueError(message("`manager.save(step, metrics=...)` takes numbers by name", bad))


def _bad_keep_best(keep_best: object) -> ValueError:
    call = f"`rx.CheckpointManager(..., keep_best={keep_best!r})` does not say what is better"
    metric = keep_best[0] if isinstance(keep_best, tuple) and keep_best else keep_best
    ways = [f"`keep_best=({metric!r}, {better!r})`" for better in ("max", "min")]
    return ValueError(message(call, instead=ways))


def _no_keep_best() -> ValueError:
    call = "`manager.best` needs to know what is better"
    return ValueError(message(call, instead=['`rx.CheckpointManager(..., keep_best=("loss", "min"))`']))


def _no_metric(metric: str, given: list[str]) -> ValueError:
    call = f"`manager.save(step, metrics=...)` was not given the metric {metric!r} that `keep_best` goes by"
    bad = [f"given: {', '.join(given) or 'none'}"]
    return ValueError(message(call, bad, "", [f"`manager.save(step, metrics={{{metric!r}: value}})`"]))
