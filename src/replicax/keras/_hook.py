"""When does Keras learn which strategy is in force? On entering a scope, or when it is imported inside one.

Keras keeps its *distribution* for each thread. Entering a scope sets it, leaving the scope puts back what was there. A
program that never imports Keras pays one dictionary lookup for each scope.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from replicax import _context

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy


def follow_scopes() -> None:
    if _entered not in _context.scope_hooks:
        _context.scope_hooks.append(_entered)


def _entered(strategy: Strategy) -> Callable[[], None]:
    if "keras" in sys.modules:
        before = _put_in_force(strategy)
        return lambda: sys.modules["keras"].distribution.set_distribution(before)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    return _left


def _left() -> None:
    """After a scope that was entered before Keras was imported; another such scope may be around it."""
    if "keras" not in sys.modules:
        return
    if _context.has_strategy():
        _put_in_force(_context.get_strategy())
    else:
        sys.modules["keras"].distribution.set_distribution(None)


def _put_in_force(strategy: Strategy) -> Any:
    """Prepares Keras and returns the distribution it had so far."""
    from replicax.keras import _trainer

    return _trainer.put_in_force(strategy)


class _Watcher(importlib.abc.MetaPathFinder):
    """Sees ``import keras``, lets it happen, and then tells Keras of the scope it happened in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)  # or we would find ourselves; a later scope watches again if this import fails
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _call_afterwards(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if _context.has_strategy():
            _put_in_force(_context.get_strategy())


def _call_afterwards(loader: Any, then: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then()

    loader.exec_module = exec_module


_watcher = _Watcher()
