"""How does a fact about values travel through a traced program?

Both analyses of this folder know some fact about the inputs of a jaxpr and want it for the outputs. `Walk` goes
through the equations once, steps into calls, branches and loops, follows mutable references, and knows which line of
the user it is at. What one equation does to the fact is for the two to say (`replicas.py`, `rows.py`).
"""

# Loops run to a fixpoint: the carry's facts go round until they no longer change. It ends because `join` only moves
# upwards among finitely many states, and because a reference created inside a loop has one cell for all turns and
# all passes (one cell per turn would be new each time, and the walk would never come to rest).
#
# What is noticed on the way (findings) is kept from the last pass alone: earlier passes saw facts that were not final.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from replicax._locality.marks import mark_of
from replicax._locality.sites import Site, is_library, user_site

S = TypeVar("S")
_Turn = Callable[[list[Any]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True, slots=True)
class Scope:
    """What holds for all equations of a body."""

    body: Jaxpr
    line: Site | None = None
    """The user's line, when the body is a library's and its equations may name another caller."""
    backward: bool = False
    """In the backward pass of a gradient. The equations inside a rematerialised or scanned one do not say so."""
    weak: bool = False
    """In a branch or a loop: a write here may happen not at all or many times."""
    mark: str | None = None
    """The name of the replicax equation that this is the inside of."""
    control: Any = None
    """Why not every replica gets here (`replicas.py`); None if all do."""

    def site(self, eqn: JaxprEqn) -> Site | None:
        return self.line or user_site(eqn)


@dataclass(slots=True, eq=False)
class Cell(Generic[S]):
    """A mutable reference, as the state of what it may hold."""

    content: S


class Walk(ABC, Generic[S]):
    """One pass of an analysis. A subclass says what an equation does; `run` goes through the program."""

    def __init__(self, constant: S) -> None:
        self.constant = constant
        self.noticed: list[Any] = []
        self._time = 0
        self._writes = 0
        self._cells: dict[int, Cell[S]] = {}

    # What an analysis has to say.

    @abstractmethod
    def join(self, a: S, b: S, eqn: JaxprEqn, scope: Scope) -> S:
        """The least state that covers both."""

    @abstractmethod
    def leaf(self, eqn: JaxprEqn, states: Sequence[S], scope: Scope) -> Sequence[S]:
        """What an equation computes."""

    @abstractmethod
    def unknown(self, eqn: JaxprEqn, states: Sequence[S], scope: Scope) -> S:
        """What an equation may compute of which no more is known than its operands."""

    @abstractmethod
    def call(self, eqn: JaxprEqn, states: Sequence[Any], scope: Scope, walk: Callable[[Scope], list[S]]) -> Sequence[S]:
        """What an equation computes that wraps a body; ``walk(scope)`` is what the body computes."""

    @abstractmethod
    def choose(self, eqn: JaxprEqn, predicate: S, scope: Scope) -> tuple[Scope, Callable[[S], S]]:
        """The scope of what `predicate` decides about, and what its decision makes of every result."""

    @abstractmethod
    def window(self, eqn: JaxprEqn, state: S, indices: Sequence[S], scope: Scope) -> S:
        """What becomes of `state` when it is read from a reference, or written to one, at `indices`."""

    @abstractmethod
    def element(self, eqn: JaxprEqn, state: S, scope: Scope) -> S:
        """What one turn of a scan gets of an array that it runs over."""

    @abstractmethod
    def stacked(self, eqn: JaxprEqn, state: S, scope: Scope) -> S:
        """What the results of all turns of a scan are as one array."""

    def inward(self, state: S) -> S:
        """What a state from outside of a scan is inside, where it is the same for all turns."""
        return state

    def outward(self, state: S) -> S:
        """The other way round."""
        return state

    def handed_on(self, eqn: JaxprEqn, state: S, scope: Scope) -> S:
        """What a turn of a scan hands on to the next."""
        return state

    # What is the same for both.

    def tick(self) -> int:
        """Numbers that grow in program order."""
        self._time += 1
        return self._time

    def run(self, body: Jaxpr, states: Iterable[Any], scope: Scope) -> dict[Var, Any]:
        """The state of every variable of `body`, given those of its inputs."""
        known: dict[Var, Any] = dict.fromkeys(body.constvars, self.constant)
        known.update(zip(body.invars, states, strict=True))
        for eqn in body.eqns:
            rule = _STRUCTURE.get(eqn.primitive.name, Walk._leaf)
            results = rule(self, eqn, self.read(eqn.invars, known), scope)
            known.update(zip(eqn.outvars, results, strict=True))
        return known

    def read(self, atoms: Iterable[Any], known: dict[Var, Any]) -> list[Any]:
        return [self.constant if isinstance(atom, Literal) else known[atom] for atom in atoms]

    def _outputs(self, body: Jaxpr, states: Iterable[Any], scope: Scope) -> list[Any]:
        return self.read(body.outvars, self.run(body, states, replace(scope, body=body)))

    def _leaf(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        cells = [state for state in states if isinstance(state, Cell)]
        if not cells:
            return self.leaf(eqn, states, scope)
        # A primitive that is not in the table below holds a reference, and may have written there what it computed.
        state = self.unknown(eqn, _contents(states), scope)
        for cell in cells:
            self._write(cell, self.window(eqn, state, [], scope), eqn, scope)
        return [state] * len(eqn.outvars)

    def _call(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        body = next(iter(jaxprs_in_params(eqn.params)))
        if len(body.invars) != len(states) or len(body.outvars) != len(eqn.outvars):
            return self._leaf(eqn, states, scope)
        line = scope.site(eqn) if is_library(body) or mark_of(eqn) else None
        inner = replace(scope, line=line, backward=scope.backward or is_backward(eqn))
        return self.call(eqn, states, inner, lambda scope: self._outputs(body, states, scope))

    def _cond(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        inner, decide = self.choose(eqn, states[0], _nested(eqn, scope))
        first, *others = [self._outputs(branch.jaxpr, states[1:], inner) for branch in eqn.params["branches"]]
        for other in others:
            first = self._joined(first, other, eqn, scope)
        return [decide(result) for result in first]

    def _scan(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        body: Jaxpr = eqn.params["jaxpr"].jaxpr
        inner = _nested(eqn, scope)
        consts, carry, xs = _split(states, eqn.params["num_consts"], eqn.params["num_carry"])
        consts, carry = [[self.inward(state) for state in states] for states in (consts, carry)]
        elements = [self.element(eqn, x, scope) for x in xs]

        def turn(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._outputs(body, [*consts, *carry, *elements], inner)
            handed_on = [self.handed_on(eqn, state, scope) for state in results[: len(carry)]]
            return self._joined(carry, handed_on, eqn, scope), results[len(carry) :]

        carry, ys = self._until_stable(carry, turn)
        return [*map(self.outward, carry), *(self.stacked(eqn, y, scope) for y in ys)]

    def _linear_solve(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        before = lengths.matvec + lengths.vecmat
        b = states[sum(lengths) :]
        return self._outputs(solve.jaxpr, [*states[before : before + lengths.solve], *b], scope)

    def _while(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        test: Jaxpr = eqn.params["cond_jaxpr"].jaxpr
        body: Jaxpr = eqn.params["body_jaxpr"].jaxpr
        nested = _nested(eqn, scope)
        test_consts, body_consts, carry = _split(states, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])

        # The test is run again after each turn, so it stands under its own verdict, which therefore goes round as well.
        def turn(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            inner, *carry = carry
            (predicate,) = self._outputs(test, [*test_consts, *carry], inner)
            inner, decide = self.choose(eqn, predicate, nested)
            results = self._outputs(body, [*body_consts, *carry], inner)
            return [inner, *(decide(result) for result in self._joined(carry, results, eqn, scope))], []

        (_, *carry), _ = self._until_stable([nested, *carry], turn)
        return carry

    def _until_stable(self, carry: list[Any], turn: _Turn) -> tuple[list[Any], list[Any]]:
        noticed = len(self.noticed)
        while True:
            writes = self._writes
            after, results = turn(carry)
            if after == carry and self._writes == writes:
                return after, results
            carry = after
            del self.noticed[noticed:]

    def _joined(self, before: Sequence[S], after: Sequence[S], eqn: JaxprEqn, scope: Scope) -> list[S]:
        return [self.join(a, b, eqn, scope) for a, b in zip(before, after, strict=True)]

    def _new_ref(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[Any]:
        (content,) = states or [self.unknown(eqn, [], scope)]  # an empty reference holds whatever was in memory
        if not scope.weak:
            return [Cell(content)]
        cell = self._cells.setdefault(id(eqn), Cell(content))
        self._write(cell, content, eqn, scope)
        return [cell]

    def _freeze(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        return _contents(states)[: len(eqn.outvars)]

    def _get(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        cell, *indices = states
        return [self.window(eqn, cell.content, indices, scope)]

    def _swap(self, eqn: JaxprEqn, states: list[Any], scope: Scope) -> Sequence[S]:
        cell, value, *indices = states
        before = self.window(eqn, cell.content, indices, scope)
        written = self.window(eqn, value, indices, scope)
        if eqn.primitive.name == "swap" and is_whole(eqn) and not scope.weak:
            cell.content = written
        else:
            self._write(cell, written, eqn, scope)
        return [before][: len(eqn.outvars)]

    def _write(self, cell: Cell[S], state: S, eqn: JaxprEqn, scope: Scope) -> None:
        content = self.join(cell.content, state, eqn, scope)
        if content != cell.content:
            cell.content = content
            self._writes += 1


_Rule = Callable[[Walk[Any], JaxprEqn, list[Any], Scope], Sequence[Any]]
_STRUCTURE: dict[str, _Rule] = {
    **dict.fromkeys(("jit", "closed_call", "remat2", "shard_map"), Walk._call),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"), Walk._call),
    "cond": Walk._cond,
    "scan": Walk._scan,
    "while": Walk._while,
    "custom_linear_solve": Walk._linear_solve,
    **dict.fromkeys(("new_ref", "empty_ref"), Walk._new_ref),
    **dict.fromkeys(("freeze", "free_ref"), Walk._freeze),
    "get": Walk._get,
    **dict.fromkeys(("swap", "addupdate"), Walk._swap),
}


def is_whole(eqn: JaxprEqn) -> bool:
    """Whether this equation reads or writes a reference as a whole, so that positions stay what they are."""
    atoms: list[Any] = eqn.invars + eqn.outvars if eqn.primitive.name == "get" else list(eqn.invars)
    return eqn.primitive.name in ("get", "swap", "addupdate") and [atom.aval.shape for atom in atoms[1:]] == [
        atoms[0].aval.shape
    ]


def is_transformed(eqn: JaxprEqn) -> bool:
    """Whether `grad`, `vmap` or the like rewrote this equation: the name stack then reads "jvp(…)" or "vmap(…)"."""
    return "(" in str(eqn.source_info.name_stack)


def is_differentiated(eqn: JaxprEqn) -> bool:
    return "jvp(" in str(eqn.source_info.name_stack)


def is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _nested(eqn: JaxprEqn, scope: Scope) -> Scope:
    return replace(scope, weak=True, backward=scope.backward or is_backward(eqn))


def _contents(states: Iterable[Any]) -> list[Any]:
    return [state.content if isinstance(state, Cell) else state for state in states]


def _split(states: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return states[:first], states[first : first + second], states[first + second :]
