"""How is a replica function carried out, compiled or line by line?

Both ways promise the same: the same values, the same errors. Compiled is the default; eager is for looking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax import _context, _errors, _jax
from replicax._context import Kind, Mode, ReplicaContext
from replicax._ledger import TracedLedger
from replicax._options import RunOptions
from replicax._run import arguments, eager
from replicax._run.trace import site_of

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy


def run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    options: RunOptions | None,
) -> Any:
    """Runs `fn` once per replica, from the host.

    Line by line if that was asked for. Else a function that was called before goes straight to its program, if each argument
    is an array or a value that lies on this strategy's mesh: this is the way of every step but the first, and microseconds
    count here. Any other call is prepared first, and its program looked for or made.
    """
    if type(args) is not tuple:
        args = arguments.check_call(fn, args, kwargs)[0]
    if options is not None or strategy.eager or _jax.jit_disabled():
        options = options or RunOptions()
        if not isinstance(options, RunOptions):
            raise _errors.not_run_options(options)
        args, kwargs = arguments.check_call(fn, args, kwargs)
        if options.eager or _jax.jit_disabled() or (options.eager is None and strategy.eager):
            if strategy.placement.auto_axes:
                raise _errors.eager_over_several_devices(strategy.placement)
            try:
                return eager.run(strategy, fn, args, kwargs, options)
            except FloatingPointError as error:
                raise _errors.not_a_number(fn, site_of(error), error) from error
    elif not kwargs:
        program = strategy.programs.get(fn)
        if program is not None and arguments.are_direct(args, strategy.placement.mesh):
            try:
                return program(args, {})
            except FloatingPointError as error:
                raise _located(strategy, fn, args, {}, error) from None
    args, kwargs = arguments.check_call(fn, args, kwargs)
    positional, named, statics = arguments.prepared(strategy.placement, args, kwargs)
    program = strategy.programs.find(fn, statics, options.donate if options else ())
    try:
        return program(positional, named)
    except FloatingPointError as error:
        raise _located(strategy, fn, args, kwargs, error) from None


def _located(strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> Exception:
    """Under `jax_debug_nans`: the line of the step that made the NaN, found by running it line by line."""
    try:
        eager.run(strategy, fn, args, kwargs, RunOptions(concurrent=False))
    except FloatingPointError as located:
        return _errors.not_a_number(fn, site_of(located), located)
    return error


def nested(ledger: Any, strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Runs `fn` for every replica from cross-replica code that is itself part of a run: a merge function, say."""
    args, kwargs = arguments.check_call(fn, args, kwargs)
    if not isinstance(ledger, TracedLedger):
        return ledger.run_nested(fn, args, kwargs)
    args, kwargs = ledger.to_replica((args, kwargs))
    context = ReplicaContext(strategy, None, ledger)
    with _context.push(Mode(strategy, Kind.REPLICA, ledger, context)):
        out = fn(*args, **kwargs)
    return ledger.to_cross(out)
