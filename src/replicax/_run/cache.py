"""Which program belongs to this function?"""

from __future__ import annotations

import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax import _errors
from replicax._context import Kind
from replicax._locality import warn_user
from replicax._run.captured import global_names
from replicax._run.program import Program

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

MOST = 512
"""Programs kept per strategy; the oldest go first."""

MANY_COPIES = 8

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
"""Values that a partial may bind and still be recognised when it is made anew."""


class Programs:
    """The programs of one strategy.

    A function object has its program, as long as the data that it captures stays what it is. A lambda or inner function
    that is made anew at every step is a new object each time, so it is also looked up by what it consists of: its code,
    the objects in its closure, its defaults and the globals that it names.
    """

    def __init__(self, strategy: Strategy, kind: Kind = Kind.REPLICA, make: type[Program] = Program) -> None:
        self._strategy = strategy
        self._kind = kind
        self._make = make
        self._by_call: dict[Any, Program] = {}
        self._by_contents: dict[Any, tuple[Program, Any]] = {}
        self._copies: Counter[Any] = Counter()

    def get(self, fn: Any) -> Program | None:
        """The program of a function that was called before, without statics or options. The fast path."""
        try:
            program = self._by_call.get(fn)
        except TypeError:  # a callable object that has no hash
            return None
        if program is not None and program.captured.places and program.captured.changed():
            return None
        return program

    def find(self, fn: Callable[..., Any], statics: tuple[Any, ...] = (), donate: Sequence[int] = ()) -> Program:
        """The program of this function for these static arguments; made if need be."""
        own = fn if _is_hashable(fn) else _Itself(fn)
        key = (own, statics, tuple(donate)) if statics or donate else own
        program = self._by_call.get(key)
        if program is None or program.captured.changed():
            program = self._by_call[key] = self._look_up(fn, statics, tuple(donate), program)
            self._trim()
        return program

    def forget(self, fn: Callable[..., Any]) -> None:
        """Drops the programs of a function that turned out to belong to another strategy, as if they had never been."""
        self._by_call = {key: program for key, program in self._by_call.items() if program.fn is not fn}
        self._by_contents = {key: entry for key, entry in self._by_contents.items() if entry[0].fn is not fn}
        self._copies[_code(fn)] = max(0, self._copies[_code(fn)] - 1)

    def _look_up(
        self, fn: Callable[..., Any], statics: tuple[Any, ...], donate: tuple[int, ...], before: Program | None
    ) -> Program:
        """A program of a function that looks the same, or a new one."""
        contents = _Contents()
        key = (contents.of(fn), statics, donate)
        known = self._by_contents.get(key)
        if known is not None and not known[0].captured.changed():
            return known[0]
        program = self._make(self._strategy, fn, self._kind, donate)
        if before is not None and fn in (before.fn, getattr(before.fn, "__wrapped__", None)):
            program.memory = before.memory  # the variables that the step made are still those
        if key[0] is not None:
            self._by_contents[key] = program, contents.kept
        self._count(fn, statics, before.captured.changed() if before is not None else [])
        return program

    def _count(self, fn: Any, statics: tuple[Any, ...], changed: list[str]) -> None:
        if statics and not changed or not changed and not isinstance(fn, types.FunctionType):
            return
        self._copies[_code(fn)] += 1
        if self._copies[_code(fn)] == MANY_COPIES:
            warn_user(_errors.many_copies(fn, MANY_COPIES, changed))

    def _trim(self) -> None:
        for programs in (self._by_call, self._by_contents):
            while len(programs) > MOST:
                programs.pop(next(iter(programs)))


def _code(fn: Any) -> Any:
    """What functions have in common that were made by the same lines."""
    return getattr(fn, "__code__", type(fn))


class _Itself:
    """A callable that has no hash, as a key: it is equal to itself alone."""

    __slots__ = ("fn",)

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.fn is self.fn

    def __hash__(self) -> int:
        return id(self.fn)


def _is_hashable(fn: Any) -> bool:
    try:
        hash(fn)
    except TypeError:
        return False
    return True


class _Contents:
    """What a function or a `functools.partial` consists of, as a key.

    Plain values count as what they are and everything else as the object that it is; those objects are `kept`, so that
    their ids stay taken as long as the key is in use.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def of(self, fn: Any) -> Any:
        """The key; None for other callables and what cannot be compared."""
        if isinstance(fn, functools.partial):
            inner = self.of(fn.func)
            bound = [*enumerate(fn.args), *fn.keywords.items()]
            if inner is None or not all(isinstance(value, _PLAIN) for _, value in bound):
                return None
            return inner, tuple((name, self._part(value)) for name, value in bound)
        if not isinstance(fn, types.FunctionType):
            return None
        try:
            cells = tuple(self._part(cell.cell_contents) for cell in fn.__closure__ or ())
        except ValueError:  # a cell that is still empty: a function that refers to itself before it is bound
            return None
        defaults = tuple(map(self._part, fn.__defaults__ or ()))
        keywords = tuple((name, self._part(value)) for name, value in (fn.__kwdefaults__ or {}).items())
        space = fn.__globals__
        named = tuple(self._part(space[name]) for name in global_names(fn.__code__) if name in space)
        return fn.__code__, cells, defaults, keywords, named, id(space)

    def _part(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        self.kept.append(value)
        return id(value)
