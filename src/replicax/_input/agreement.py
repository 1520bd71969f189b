"""Do the other processes still have data, and how much? Numbers exchanged on the host, with a deadline.

Only needed where each process reads data of its own. Processes then come to the end at different steps; one that is
done goes on with masked batches until all are, since all must carry out every step together.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Protocol

import jax

from replicax import _jax
from replicax._errors import AbsentProcessError, message

DEADLINE_SECONDS = 600
"""How long to wait for the slowest process to read its next batch."""

_passes = itertools.count()
"""Numbers the passes of this process. Processes run one program, so that pass n is the same one everywhere."""


class Agreement(Protocol):
    """What all processes say in one step."""

    def exchange(self, mine: dict[int, int]) -> dict[int, int]:
        """The numbers of all replicas, given those of this process's."""
        ...


class Alone:
    """One process: nobody to ask."""

    def exchange(self, mine: dict[int, int]) -> dict[int, int]:
        return mine


class Together:
    """Several processes, which leave each other notes in the job's key-value store."""

    def __init__(self, processes: tuple[int, ...], what: str) -> None:
        self._processes = processes
        self._what = what
        self._deadline = DEADLINE_SECONDS
        self._name = f"replicax/input/{next(_passes)}"
        self._step = 0

    def exchange(self, mine: dict[int, int]) -> dict[int, int]:
        store = _jax.key_value_store()
        me = jax.process_index()
        store.key_value_set(self._key(self._step, me), json.dumps(list(mine.items())))
        everyone: dict[int, int] = {}
        for process in self._processes:
            everyone.update(mine if process == me else self._note_of(store, process))
        if self._step:  # whoever left a note for this step has read all those of the step before
            store.key_value_delete(self._key(self._step - 1, me))
        self._step += 1
        return everyone

    def _note_of(self, store: Any, process: int) -> dict[int, int]:
        try:
            note = store.blocking_key_value_get(self._key(self._step, process), round(self._deadline * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise self._absent(process) from error
        return dict(json.loads(note))

    def _key(self, step: int, process: int) -> str:
        return f"{self._name}/{step}/{process}"

    def _absent(self, process: int) -> AbsentProcessError:
        return AbsentProcessError(
            message(
                f"Process {process} did not ask for batch {self._step} of {self._what} within {self._deadline:g} s",
                why="Every process must take every step, so the others wait for the slowest. It may have left the loop "
                "early, failed, or still be reading.",
                instead=[
                    f"look at the output of process {process}",
                    "leave the loop on all processes at the same step, or on none",
                ],
            )
        )
