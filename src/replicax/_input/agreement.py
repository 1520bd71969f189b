"""Do the other processes still have data, and how much? Numbers exchanged on the host, with a deadline.

Only needed where each process reads data of its own. Processes then come to the end at different steps; one that is
done goes on with masked batches until all are, since all must carry out every step together.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, Protocol

import jax

from replicax import _jax
from replicax._errors import AbsentProcessError, InputError, message

DEADLINE_SECONDS = 600
"""How long to wait for the slowest process to read its next batch."""

POLL_SECONDS = 0.02

_FAILED = -1

_passes = itertools.count()
"""Numbers the passes of this process. Processes run one program, so that pass n is the same one everywhere."""


class Agreement(Protocol):
    """What all processes say in one step."""

    def exchange(self, mine: dict[int, Any]) -> dict[int, Any]:
        """What all replicas say, given what this process's do."""
        ...

    def failed(self, error: Exception) -> None:
        """Lets the others know, instead of what they wait for, that this process could not read."""
        ...


class Alone:
    """One process: nobody to ask."""

    def exchange(self, mine: dict[int, Any]) -> dict[int, Any]:
        return mine

    def failed(self, error: Exception) -> None:
        pass


class Together:
    """Several processes, which leave each other notes in the job's key-value store."""

    def __init__(self, processes: tuple[int, ...], what: str) -> None:
        self._processes = processes
        self._what = what
        self._deadline = DEADLINE_SECONDS
        self._name = f"replicax/input/{next(_passes)}"
        self._step = 0

    def exchange(self, mine: dict[int, Any]) -> dict[int, Any]:
        store = _jax.key_value_store()
        me = jax.process_index()
        store.key_value_set(self._key(self._step, me), json.dumps(list(mine.items())), allow_overwrite=True)
        everyone: dict[int, Any] = {}
        for process in self._processes:
            everyone.update(mine if process == me else self._note_of(store, process))
        if self._step:  # whoever left a note for this step has read all those of the step before
            store.key_value_delete(self._key(self._step - 1, me))
        self._step += 1
        return everyone

    def failed(self, error: Exception) -> None:
        store, me, said = _jax.key_value_store(), jax.process_index(), f"{type(error).__name__}: {error}"
        store.key_value_set(self._key(self._step, me), json.dumps(said), allow_overwrite=True)
        store.key_value_set(self._key("end", me), f"{_FAILED}", allow_overwrite=True)

    def handed_out(self, number: int) -> None:
        """Lets the others know that this process has batch `number`."""
        _jax.key_value_store().key_value_set(self._key("at", jax.process_index()), f"{number}", allow_overwrite=True)

    def ended(self, number: int) -> None:
        """Lets the others know that this process has no batch `number`; refuses to end here if one of them has."""
        store, me = _jax.key_value_store(), jax.process_index()
        store.key_value_set(self._key("end", me), f"{number}", allow_overwrite=True)
        deadline = time.monotonic() + self._deadline
        for process in self._processes:
            while process != me:
                end, at = (_look(store, self._key(which, process)) for which in ("end", "at"))
                if end == number:
                    break
                if end is not None or at is not None and at >= number:
                    raise self._ended_apart(number, process, end, at)
                if time.monotonic() > deadline:
                    raise self._absent(process, number)
                time.sleep(POLL_SECONDS)

    def _note_of(self, store: Any, process: int) -> dict[int, Any]:
        try:
            note = store.blocking_key_value_get(self._key(self._step, process), round(self._deadline * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._absent(process, self._step) from error
        said = json.loads(note)
        if isinstance(said, str):
            raise self._failed_there(process, said)
        return dict(said)

    def _key(self, step: int | str, process: int) -> str:
        return f"{self._name}/{step}/{process}"

    def _failed_there(self, process: int, said: str) -> InputError:
        return InputError(
            message(
                f"Process {process} could not read its part of batch {self._step} of {self._what}",
                said.splitlines(),
                "All processes take every step together, so this one cannot go on alone.",
                [f"look at the output of process {process}"],
            )
        )

    def _ended_apart(self, number: int, process: int, end: int | None, at: int | None) -> InputError:
        me = jax.process_index()
        has = f"has batch {at}, counted from 0" if end is None else f"has {end} batches"
        return InputError(
            message(
                f"{self._what} does not end at the same step on all processes",
                [
                    f"process {me} has {number} batches",
                    f"process {process} {'could not read on' if end == _FAILED else has}",
                ],
                "Every process goes through the same global batches and keeps the rows of its replicas. The steps after "
                "the end of the shortest would wait for it for ever, and their rows would be lost.",
                [
                    "give all processes the same batches, or the same number: `itertools.islice(batches, n)`",
                    'if every process has data of its own on purpose: `rx.InputOptions(shard="off")`, or '
                    "`strategy.distribute_datasets_from_function(make)`; there the end waits for the longest",
                ],
            )
        )

    def _absent(self, process: int, number: int) -> AbsentProcessError:
        return AbsentProcessError(
            message(
                f"Process {process} did not ask for batch {number} of {self._what} within {self._deadline:g} s",
                why="Every process must take every step, so the others wait for the slowest. It may have left the loop "
                "early, failed, or still be reading.",
                instead=[
                    f"look at the output of process {process}",
                    "leave the loop on all processes at the same step, or on none",
                ],
            )
        )


def _look(store: Any, key: str) -> int | None:
    """The number that stands there now."""
    try:
        return int(store.key_value_try_get(key))
    except jax.errors.JaxRuntimeError:
        return None
