"""Which program belongs to this function?"""

from __future__ import annotations

import dis
import enum
import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax import _errors
from replicax._context import Kind
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

    A function object has its program. A lambda or inner function that is made anew at every step is a new object each
    time, so it is also looked up by what it consists of: its code, the objects in its closure, its defaults and the
    globals that it reads. In a notebook it is these that change from one making to the next.
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
        return self._by_call.get(fn)

    def find(self, fn: Callable[..., Any], statics: tuple[Any, ...] = (), donate: Sequence[int] = ()) -> Program:
        """The program of this function for these static arguments; made if need be."""
        key = (fn, statics, tuple(donate)) if statics or donate else fn
        program = self._by_call.get(key)
        if program is not None:
            return program
        contents = _contents(fn)
        if contents is not None:
            contents = (contents, statics, tuple(donate))
            known = self._by_contents.get(contents)
            program = known[0] if known else None
        if program is None:
            program = self._make(self._strategy, fn, self._kind, donate)
            if contents is not None:
                # What the key knows by its id is kept, so that the id stays taken as long as the entry lives.
                self._by_contents[contents] = (program, (fn, _globals_read(fn)))
            self._count(fn, statics)
        self._by_call[key] = program
        self._trim()
        return program

    def _count(self, fn: Any, statics: tuple[Any, ...]) -> None:
        code = getattr(fn, "__code__", None)
        if code is None or statics:
            return
        self._copies[code] += 1
        if self._copies[code] == MANY_COPIES:
            warnings.warn(_errors.many_copies(fn, MANY_COPIES), stacklevel=5)

    def _trim(self) -> None:
        while len(self._by_call) > MOST:
            gone = self._by_call.pop(next(iter(self._by_call)))
            for contents in [key for key, (program, _) in self._by_contents.items() if program is gone]:
                del self._by_contents[contents]


def _contents(fn: Any) -> Any:
    """What a function or a `functools.partial` consists of; None for other callables and what cannot be compared."""
    if isinstance(fn, functools.partial):
        inner = _contents(fn.func)
        bound = [*enumerate(fn.args), *fn.keywords.items()]
        if inner is None or not all(isinstance(value, _PLAIN) for _, value in bound):
            return None
        return inner, tuple((name, type(value), value) for name, value in bound)
    if not isinstance(fn, types.FunctionType):
        return None
    try:
        cells = tuple(id(cell.cell_contents) for cell in fn.__closure__ or ())
    except ValueError:  # a cell that is still empty: a function that refers to itself before it is bound
        return None
    defaults = tuple(map(id, fn.__defaults__ or ()))
    keywords = tuple((name, id(value)) for name, value in (fn.__kwdefaults__ or {}).items())
    return fn.__code__, cells, defaults, keywords, id(fn.__globals__), tuple(map(id, _globals_read(fn)))


def _globals_read(fn: Any) -> list[Any]:
    """What the globals that a function mentions, or its inner functions do, stand for now."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return [fn.__globals__.get(name) for name in _global_names(fn.__code__)]


@functools.lru_cache(maxsize=4 * MOST)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *(name for constant in inner for name in _global_names(constant))]))
