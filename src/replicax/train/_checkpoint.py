"""What is saved, and does it load under another strategy? `Checkpoint`.

`_objects.py` says which values there are and what they are called, `_store.py` turns them into files. This file brings
the two together: it reads all values between two steps, and on the way back decides which saved value belongs to
which object, also to one that does not exist yet.
"""

import base64
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax import _context
from replicax._errors import CheckpointError, ContextError, NotConsumedError, message
from replicax._host import dispatch_lock
from replicax.train import _store
from replicax.train._objects import Composite, Found, find
from replicax.train._store import Manifest, PendingSave, StrPath


class Checkpoint:
    """Saves the state of a training run, and restores it under whatever strategy the next run uses.

    A run that was killed should go on as if nothing had happened: weights, optimizer slots, step counter, random keys
    and the position in the data. Name the objects once; the files know nothing of devices or replicas, so what
    eight replicas saved, one device or a parameter server loads.

    Objects may be variables, optimizers, metrics, distributed datasets, pytrees of arrays, models of NNX, Equinox and
    Keras, dicts and lists of those, your own objects that have them as attributes, and other checkpoints. Values that
    cannot be changed in place (an array, a dataclass of arrays) are replaced where they are held: in the dict, or as an
    attribute of the checkpoint.

    A mirrored variable is saved as one value. An on-read variable is saved as its components combined, and
    restored so that they combine to the same: under ``"sum"`` every replica gets an equal share.

    >>> import tempfile, jax, replicax as rx
    >>> with rx.MirroredStrategy(jax.devices()[:2]).scope():
    ...     w = rx.Variable([1.0, 2.0])
    >>> path = rx.Checkpoint(model={"w": w}).save(tempfile.mkdtemp() + "/checkpoint")
    >>> alone = rx.Variable([0.0, 0.0])  # on one device
    >>> _ = rx.Checkpoint(model={"w": alone}).restore(path).assert_consumed()
    >>> print(alone.numpy())
    [1. 2.]
    """

    _objects: dict[str, Any]
    _waiting: "_Waiting | None"
    _restore_later: Callable[[], None] | None

    def __init__(self, *unnamed: Any, **objects: Any) -> None:
        if unnamed:
            raise _unnamed(unnamed)
        _store.import_orbax()  # now, so that the first save holds nobody up
        object.__setattr__(self, "_objects", {})
        object.__setattr__(self, "_waiting", None)
        object.__setattr__(self, "_restore_later", None)
        for name, value in objects.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise _reserved(name)
        self._objects[name] = value
        if self._waiting is not None and self._waiting.has_under(name):
            self._waiting.give(find({name: value}, self.checkpoint_replace))
        if self._restore_later is not None:
            self._restore_later()

    def __getattr__(self, name: str) -> Any:
        try:
            return self._objects[name]
        except KeyError:
            raise AttributeError(f"This checkpoint holds {', '.join(self._objects)} and no {name!r}.") from None

    def __repr__(self) -> str:
        return f"rx.Checkpoint({', '.join(self._objects)})"

    def save(self, path: StrPath) -> str:
        """Writes all values to the folder `path` and returns it. A checkpoint that is there is replaced in one step.

        Raises:
          CheckpointError: If something cannot be saved or written. What was at `path` is then still whole.
        """
        self.begin(path).run()
        return os.fspath(path)

    def save_async(self, path: StrPath) -> PendingSave:
        """Like `save`, without waiting for the disk: returns as soon as the values cannot be changed any more.

        The training loop goes on at once; ``.wait()`` on the result when the files are needed.
        """
        pending = self.begin(path)
        pending.start()
        return pending

    def restore(self, path: StrPath | None) -> "RestoreStatus":
        """Puts the saved values into the objects, after checking that every byte is the one that was saved.

        Saved values without an object wait: whoever is attached later under that name (``checkpoint.model = Model()``),
        or made later by an object that is there (an optimizer's slots), begins with the saved value. Ask the returned
        status whether all went as you expect, most strictly with ``.assert_consumed()``.

        Args:
          path: What `save` was given. None restores nothing, so that ``restore(manager.latest_checkpoint)``
            also works before the first save.

        Raises:
          CheckpointDamagedError: If the checkpoint is damaged, incomplete or absent; no object has been changed then.
          CheckpointMismatchError: If a value has another shape or dtype than its object, listing all that do.
        """
        _require_host("restore")
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise _no_path(path)
        found = find(self._objects, self.checkpoint_replace, may_be_empty=True)
        if path is None:
            return RestoreStatus(None, sorted([*found.entries, *found.states]), None)
        folder = Path(path).absolute()
        _store.settle(folder)
        waiting = _Waiting(folder)
        waiting.give(found)
        object.__setattr__(self, "_waiting", waiting)
        missing = [name for name in (*found.entries, *found.states) if name not in waiting.given]
        return RestoreStatus(os.fspath(path), missing, waiting)

    def write(self, path: StrPath) -> str:
        """`save` under the name that tf.train.Checkpoint has for it."""
        return self.save(path)

    def read(self, path: StrPath) -> "RestoreStatus":
        """`restore` under the name that tf.train.Checkpoint has for it."""
        return self.restore(path)

    def holds(self, thing: Any) -> bool:
        """Whether the state of `thing`, say of a distributed dataset, is among what is saved."""
        found = find(self._objects, self.checkpoint_replace)
        return any(state is thing for state in found.states.values())

    def checkpoint_items(self) -> Mapping[str, Any]:
        """The objects by name. With this method a checkpoint can itself be part of another one."""
        return dict(self._objects)

    def checkpoint_replace(self, name: str, value: Any) -> None:
        """Puts a restored value in the place of an object that could not be changed."""
        self._objects[name] = value

    def checkpoint_later(self, restore: Callable[[], None]) -> None:
        """As part of another checkpoint: objects attached from now on ask that one for their values."""
        object.__setattr__(self, "_restore_later", restore)

    def begin(
        self, path: StrPath, notes: Mapping[str, Any] | None = None, then: Callable[[], None] | None = None
    ) -> PendingSave:
        """The first part of a save: takes copies. `notes` are kept beside the values; `then` runs at the end."""
        _require_host("save")
        with dispatch_lock:  # no thread steps meanwhile: all values are of one moment
            found = find(self._objects, self.checkpoint_replace)
            self._tell_what_came_too_late(found)
            arrays: dict[str, Any] = {name: entry.value() for name, entry in found.entries.items()}
            states = {name: _encode(thing.get_state(), name, arrays) for name, thing in found.states.items()}
            metadata = {"states": states, "aliases": found.aliases, "notes": dict(notes or {})}
            return _store.begin(path, arrays, metadata, then)

    def _tell_what_came_too_late(self, found: Found) -> None:
        waiting = self._waiting
        late = [] if waiting is None else [name for name in found.entries if waiting.is_free(name)]
        if waiting is not None and late:
            warnings.warn(_too_late(waiting, late), RuntimeWarning, stacklevel=4)
            waiting.close()


class RestoreStatus:
    """What a restore did: which names got their value, which had none, which saved values nobody has taken yet."""

    def __init__(self, path: str | None, missing: list[str], waiting: "_Waiting | None") -> None:
        self.path = path
        self.missing = missing
        self._waiting = waiting

    def __repr__(self) -> str:
        return (
            f"<RestoreStatus {self.path!r}: {len(self.restored)} restored, {len(self.missing)} without a saved value, "
            f"{len(self.unused)} saved values unused>"
        )

    @property
    def restored(self) -> list[str]:
        """Names that got their saved value so far."""
        return [] if self._waiting is None else list(self._waiting.given)

    @property
    def unused(self) -> list[str]:
        """Saved names that no object has taken so far."""
        return [] if self._waiting is None else self._waiting.unused()

    def assert_consumed(self) -> "RestoreStatus":
        """Raises `NotConsumedError` unless every object got a value and every saved value found its object."""
        return self._require(self.missing, self.unused)

    def assert_existing_objects_matched(self) -> "RestoreStatus":
        """Raises `NotConsumedError` unless every object got a value; saved values may be left over."""
        return self._require(self.missing, [])

    def assert_nontrivial_match(self) -> "RestoreStatus":
        """Raises `NotConsumedError` if nothing at all was restored."""
        return self if self.restored else self._require(self.missing, self.unused)

    def expect_partial(self) -> "RestoreStatus":
        """Says that leftovers are intended: saved values without an object are let go."""
        if self._waiting is not None:
            self._waiting.close()
        return self

    def _require(self, missing: list[str], unused: list[str]) -> "RestoreStatus":
        if missing or unused or self.path is None:
            raise _not_consumed(self.path, missing, unused)
        return self


class _Waiting:
    """An opened checkpoint: its values, and which of them were given to an object.

    A value may have several saved names, if its object could be reached in several ways, and each may be asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest: Manifest = _store.verify(path)
        self._states: dict[str, Any] = self._manifest.metadata["states"]
        aliases: dict[str, str] = self._manifest.metadata["aliases"]
        inside_states = {leaf for state in self._states.values() for leaf in _arrays_in(state)}
        values = [name for name in self._manifest.leaves if name not in inside_states] + list(self._states)
        self._value_of = {name: name for name in values} | aliases
        self._used: set[str] = set()
        self.given: dict[str, None] = {}

    def unused(self) -> list[str]:
        return [name for name in dict.fromkeys(self._value_of.values()) if name not in self._used]

    def has_under(self, name: str) -> bool:
        """Whether something saved at or below this name has not been given yet."""
        waiting = (saved for saved in self._value_of if saved not in self.given)
        return any(saved == name or saved.startswith(f"{name}/") for saved in waiting)

    def close(self) -> None:
        self._value_of.clear()

    def give(self, found: Found) -> None:
        """Restores what these objects and the checkpoint have in common. All is read and checked before any is put."""
        pairs = [(name, value) for name in found.entries if (value := self._value_for(name, found)) is not None]
        states = {name: self._states[name] for name in found.states if name in self._states and self.is_free(name)}
        _store.require_match(
            self.path, self._manifest, [(value, found.entries[name].target()) for name, value in pairs]
        )
        inside_states = {leaf for state in states.values() for leaf in _arrays_in(state)}
        wanted = sorted({value for _, value in pairs} | inside_states)
        values = _store.read_leaves(self.path, self._manifest, wanted)
        with dispatch_lock:
            for name, value in pairs:
                found.entries[name].put(values[value])
        for name, state in states.items():
            found.states[name].set_state(_decode(state, values))
        found.finish()
        self._note([*pairs, *((name, name) for name in states)], found)
        self._promise(found)

    def _value_for(self, name: str, found: Found) -> str | None:
        """What was saved for an object, which may then have been known by another of its present names."""
        for candidate in (name, *(alias for alias, first in found.aliases.items() if first == name)):
            value = self._value_of.get(candidate)
            if value in self._manifest.leaves and self.is_free(candidate):
                return value
        return None

    def is_free(self, name: str) -> bool:
        """Whether something was saved under this very name and has not been given yet."""
        return name in self._value_of and name not in self.given

    def _note(self, pairs: Iterable[tuple[str, str]], found: Found) -> None:
        for name, value in pairs:
            self._used.add(value)
            self.given[name] = None
        self.given.update(dict.fromkeys(alias for alias, first in found.aliases.items() if first in self.given))

    def _promise(self, found: Found) -> None:
        """Lets objects that make variables later know that values for these may be waiting."""
        for prefix, composite in found.composites.items():
            later = getattr(composite, "checkpoint_later", None)
            if later is not None and self.has_under(prefix):
                later(functools.partial(self._give_to_one, prefix, composite))
        for prefix, thing in found.objects.items():
            if self.has_under(prefix):
                _making.append((weakref.ref(thing), prefix, self))

    def give_to_new_parts(self, prefix: str, thing: Any) -> None:
        """Restores variables that an object has made since the restore."""
        found = find({prefix: thing}, _refuse_replacement, may_be_empty=True)
        if any(self.is_free(name) for name in found.entries):
            self.give(found)

    def _give_to_one(self, prefix: str, composite: Composite) -> None:
        if self.has_under(prefix):
            self.give(find({prefix: composite}, _refuse_replacement))


_making: list[tuple[weakref.ref[Any], str, _Waiting]] = []
"""Objects of users that may have variables later for which values are waiting, and where those are."""


def _give_to_new_parts() -> None:
    """Called when a step has made variables and not run yet."""
    now, _making[:] = _making[:], []
    for ref, prefix, waiting in now:
        thing = ref()
        if thing is not None and waiting.has_under(prefix):
            waiting.give_to_new_parts(prefix, thing)
            _making.append((ref, prefix, waiting))


_context.creation_hooks.append(_give_to_new_parts)


def _refuse_replacement(name: str, value: Any) -> None:
    raise AssertionError(f"{name} replaces its parts itself")


# A state is whatever `get_state` returned. JSON keeps most of it; arrays go among the arrays, and what JSON would
# change (tuples, bytes, keys that are not strings) is wrapped in a dict with one telling key.

_ARRAY, _BYTES, _TUPLE, _PAIRS = "@array", "@bytes", "@tuple", "@pairs"


def _encode(state: Any, name: str, arrays: dict[str, Any]) -> Any:
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, (np.ndarray, jax.Array)):
        arrays[name] = state
        return {_ARRAY: name}
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, (list, tuple)):
        parts = [_encode(part, f"{name}/{i}", arrays) for i, part in enumerate(state)]
        return {_TUPLE: parts} if isinstance(state, tuple) else parts
    if isinstance(state, dict):
        parts = {key: _encode(part, f"{name}/{key}", arrays) for key, part in state.items()}
        plain = all(isinstance(key, str) and not key.startswith("@") for key in parts)
        return parts if plain else {_PAIRS: [[_encode(key, name, arrays), part] for key, part in parts.items()]}
    raise _bad_state(name, state)


def _decode(state: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(state, list):
        return [_decode(part, arrays) for part in state]
    if not isinstance(state, dict):
        return state
    match next(iter(state.items()), None):
        case ("@array", name):
            return arrays[name]
        case ("@bytes", text):
            return base64.b64decode(text)
        case ("@tuple", parts):
            return tuple(_decode(part, arrays) for part in parts)
        case ("@pairs", pairs):
            return {_decode(key, arrays): _decode(part, arrays) for key, part in pairs}
    return {key: _decode(part, arrays) for key, part in state.items()}


def _arrays_in(state: Any) -> Iterable[str]:
    if isinstance(state, dict):
        if _ARRAY in state:
            yield state[_ARRAY]
            return
        state = list(state.values())
    if isinstance(state, list):
        for part in state:
            yield from _arrays_in(part)


def _require_host(verb: str) -> None:
    mode = _context.current()
    if mode is not None and (mode.ledger is not None or mode.replica is not None):
        raise _inside_a_step(verb)


def _inside_a_step(verb: str) -> ContextError:
    why = "A step is compiled and runs once per replica; files are written and read once, between steps."
    return ContextError(
        message(f"`checkpoint.{verb}(...)` was called inside a step", (), why, ["call it after `strategy.run(...)`"])
    )


def _no_path(path: Any) -> TypeError:
    call = f"`checkpoint.restore({path!r})` takes the path of a checkpoint"
    ways = ["what `checkpoint.save(path)` was given", "of a manager: `manager.restore_latest()`"]
    return TypeError(message(call, instead=ways))


def _too_late(waiting: "_Waiting", late: list[str]) -> str:
    why = "They were made after the restore, and went on with the values they were made with."
    ways = ["make them before `checkpoint.restore(...)`", "attach what holds them after it: `checkpoint.model = model`"]
    return message(f"Saved values in {waiting.path} were not given to what was made for them", late, why, ways)


def _reserved(name: str) -> CheckpointError:
    why = "That is a method of `rx.Checkpoint`."
    return CheckpointError(
        message(f"`rx.Checkpoint({name}=...)` uses a name that is taken", (), why, [f"call it `{name}_`"])
    )


def _unnamed(things: tuple[Any, ...]) -> CheckpointError:
    bad = [type(thing).__name__ for thing in things]
    why = "What is saved is found again by its name."
    ways = ["`rx.Checkpoint(model=model, optimizer=optimizer)`", "from a dict: `rx.Checkpoint(**objects)`"]
    return CheckpointError(message("`rx.Checkpoint(...)` was given objects without names", bad, why, ways))


def _bad_state(name: str, state: Any) -> CheckpointError:
    why = "`get_state()` may return numbers, strings, bytes, arrays, None, and lists, tuples and dicts of those."
    bad = [f"{name}  {type(state).__name__}"]
    return CheckpointError(message("A state cannot be saved", bad, why))


def _not_consumed(path: str | None, missing: list[str], unused: list[str]) -> NotConsumedError:
    bad = [f"{name}  has no saved value" for name in missing] + [
        f"{name}  was saved and is used by no object" for name in unused
    ]
    call = (
        "Nothing was restored: there was no checkpoint"
        if path is None
        else f"The checkpoint {path} and the objects do not cover each other"
    )
    ways = [
        "name and nest the objects in `rx.Checkpoint(...)` as when they were saved",
        "accept it: `.expect_partial()`",
    ]
    return NotConsumedError(message(call, bad, "", ways))
