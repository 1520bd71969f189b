"""Which plain values did a function take from its surroundings, and are they still what they were?

A compiled step is traced once, and the numbers and arrays that it reaches by closure, as globals or as attributes of its
object become constants of the program. If one of them is given another value (``lr *= 0.5``), the program would go on
with the old one, where the same step run line by line would not. So a program remembers them, and is made anew when they
have changed.
"""

# Only data is watched: numbers, strings and arrays. What a step reads of a model or a list is a matter of its own;
# watching every object would mean tracing again whenever somebody appends to a history.
#
# What this does not see: values inside of containers and other objects, those of functions that the user did not write,
# and a NumPy array that is filled anew. There it is as with `jax.jit`: pass what changes as an argument.

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._locality import is_users
from replicax._values import PerReplica

_EQUAL_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
_DATA = (*_EQUAL_BY_VALUE, np.ndarray, np.generic, jax.Array, PerReplica)

Place = tuple[Any, str, Any]
"""A cell of a closure or a namespace, the name in it, and what was found there."""


class Captured:
    """The data that a function reaches, and where it was found."""

    __slots__ = ("places",)

    def __init__(self, fn: Callable[..., Any] | None = None) -> None:
        self.places = [] if fn is None else list(_data_of(fn, set()))

    def changed(self) -> list[str]:
        """The names of what is no longer as it was."""
        return [name for where, name, value in self.places if not _is_still(_look(where, name), value)]


_GONE = object()


def _look(where: Any, name: str) -> Any:
    if type(where) is dict:
        return where.get(name, _GONE)
    try:
        return where.cell_contents
    except ValueError:  # the name was deleted
        return _GONE


def _is_still(now: Any, value: Any) -> bool:
    if now is value or now is _GONE:
        return True
    by_value = type(now) is type(value) and isinstance(value, _EQUAL_BY_VALUE)
    return by_value and (now == value or now != now and value != value)


def _data_of(fn: Any, seen: set[int]) -> Iterator[Place]:
    """The data that `fn` names, and that the user's functions name which it names."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    if id(fn) in seen:
        return
    seen.add(id(fn))
    body, owner = (fn, None) if isinstance(fn, types.FunctionType) else _method(fn)
    if body is None or not _is_the_users(body.__code__):
        return
    names = global_names(body.__code__)
    places = [(cell, name) for name, cell in zip(body.__code__.co_freevars, body.__closure__ or (), strict=True)]
    places += [(body.__globals__, name) for name in names]
    if owner is not None:
        places += [(owner, name) for name in body.__code__.co_names]
    for where, name in places:
        value = _look(where, name)
        if isinstance(value, _DATA):
            yield where, name, value
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            yield from _data_of(value, seen)


def _method(fn: Any) -> tuple[types.FunctionType | None, dict[str, Any] | None]:
    """The function behind a bound method or a callable object, and the attributes of its object."""
    owner, body = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, type(fn).__call__)
    attributes = getattr(owner, "__dict__", None)
    return (body if isinstance(body, types.FunctionType) else None), attributes if type(attributes) is dict else None


def _is_the_users(code: types.CodeType) -> bool:
    return is_users(code.co_filename) or code.co_filename.startswith("<")  # a prompt or a notebook


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function and those inside it read. (`co_names` has the attributes as well.)"""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (global_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(own.union(*inner)))
