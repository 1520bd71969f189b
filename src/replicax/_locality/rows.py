"""Does a step mix the rows of its batch?

A short batch is padded. As long as every row goes its own way, the padding harms nobody: whoever holds the result drops
it. Where rows are combined (a mean, a matrix product over them, batch normalisation), padding would count as data.
So for each output we want to know whether one of its axes is still the row axis, and if rows were combined on the
way to it, at which line of the user's that happened first.
"""

# A value's `_Fate` says where its rows lie. Most of the file is a table: for each primitive, given that an operand has
# its rows on some axis, on which axis of the results do they lie? A primitive that is not in the table has combined
# them. Operands whose rows would come to lie on different axes (the Gram matrix x @ x.T) have been combined as well.
#
# `reshape` may merge the row axis with those behind it and split it again later, as layers do that know only one batch
# axis: (rows, time, features) -> (rows * time, features) -> (rows, time, features). Hence `block`, the number of
# neighbours on the axis that belong to one row.
#
# A scan over the rows (`jax.lax.map`) takes them one by one. What belongs to the row of the present turn has it on axis
# -1, to that of the scan around it on axis -2, and so on: taking an element lowers an axis by one, stacking the results
# raises it again. Inside its turn a row may be treated in any way, but what is handed on to the next turn is lost.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from replicax._locality.sites import Site
from replicax._locality.walk import Scope, Walk, is_whole


@dataclass(frozen=True, slots=True)
class Rows:
    """What became of the rows, for each output."""

    axis: tuple[int | None, ...]
    """The axis of the output that is the row axis; None if none is, or if that is not certain."""
    reduced: tuple[Site | None, ...]
    """Where rows were first combined on the way to it; None if they were not."""


def analyse_rows(jaxpr: Jaxpr, row_inputs: Sequence[int | None]) -> Rows:
    """Follows the row axes of some inputs of `jaxpr` (None for inputs without rows) to its outputs.

    >>> import jax, jax.numpy as jnp
    >>> from replicax._locality import analyse_rows
    >>> def predict(weights, images):
    ...     logits = images.reshape(8, -1) @ weights
    ...     return jnp.argmax(logits, axis=1), logits.mean()
    >>> traced = jax.make_jaxpr(predict)(jnp.ones((784, 10)), jnp.ones((8, 28, 28)))
    >>> rows = analyse_rows(traced.jaxpr, [None, 0])
    >>> rows.axis, [site is not None for site in rows.reduced]
    ((0, None), [False, True])
    """
    walk = _RowWalk()
    inputs = [_NO_ROWS if axis is None else _Fate(_Place(axis)) for axis in row_inputs]
    known = walk.run(jaxpr, inputs, Scope(jaxpr))
    fates: list[_Fate] = walk.read(jaxpr.outvars, known)
    return Rows(tuple(fate.certain_axis for fate in fates), tuple(fate.reduced for fate in fates))


@dataclass(frozen=True, slots=True)
class _Mix:
    """An equation that combined rows."""

    seq: int
    site: Site


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the rows of a value lie."""

    axis: int
    """Below 0: nowhere, the value belongs to the one row that a scan is at."""
    block: int = 1
    merged: _Mix | None = None
    """Where `block` came to be more than one: for whom the rows end here, this is where they were lost."""


@dataclass(frozen=True, slots=True)
class _Fate:
    place: _Place | None = None
    mixed: _Mix | None = None

    @property
    def certain_axis(self) -> int | None:
        return self.place.axis if self.place and self.place.block == 1 else None

    @property
    def reduced(self) -> Site | None:
        mix = _first(self.mixed, self.place.merged if self.place and self.place.block > 1 else None)
        return mix and mix.site


_NO_ROWS = _Fate()


def _first(*mixes: _Mix | None) -> _Mix | None:
    first = None
    for mix in mixes:
        if mix is not None and (first is None or mix.seq < first.seq):
            first = mix
    return first


class _RowWalk(Walk[_Fate]):
    def __init__(self) -> None:
        super().__init__(constant=_NO_ROWS)

    def join(self, a: _Fate, b: _Fate, eqn: JaxprEqn, scope: Scope) -> _Fate:
        # From the bottom: no rows, rows in a known place, rows lost. Were a lost place to come back, a loop's carry
        # could be credited with a row axis that it has only after the first turn.
        if _NO_ROWS in (a, b):
            return b if a == _NO_ROWS else a
        if a.place and b.place:
            return self._aligned(eqn, [a, b], [a.place, b.place], scope)
        return self.unknown(eqn, [a, b], scope)

    def leaf(self, eqn: JaxprEqn, states: Sequence[_Fate], scope: Scope) -> Sequence[_Fate]:
        if eqn.primitive.name == "optimization_barrier":
            return states
        places = []
        for index, state in enumerate(states):
            if state.place:
                place = self._moved(eqn, index, state.place, scope)
                if place is None:
                    return [self.unknown(eqn, states, scope)] * len(eqn.outvars)
                places.append(place)
        return [self._aligned(eqn, states, places, scope)] * len(eqn.outvars)

    def unknown(self, eqn: JaxprEqn, states: Sequence[_Fate], scope: Scope) -> _Fate:
        here = self._mix(eqn, scope) if any(state.place for state in states) else None
        return _Fate(None, _first(here, *(state.mixed for state in states)))

    def call(
        self, eqn: JaxprEqn, states: Sequence[Any], scope: Scope, walk: Callable[[Scope], list[_Fate]]
    ) -> Sequence[_Fate]:
        return walk(scope)

    def choose(self, eqn: JaxprEqn, predicate: _Fate, scope: Scope) -> tuple[Scope, Callable[[_Fate], _Fate]]:
        def decide(result: _Fate) -> _Fate:
            if not predicate.place:
                return replace(result, mixed=_first(result.mixed, predicate.mixed))
            places = [fate.place for fate in (result, predicate) if fate.place]
            return self._aligned(eqn, [result, predicate], places, scope)

        return scope, decide

    def window(self, eqn: JaxprEqn, state: _Fate, indices: Sequence[_Fate], scope: Scope) -> _Fate:
        kept = is_whole(eqn) and not (state.place and state.place.axis < 0)  # a reference outlives the turn
        return state if kept else self.unknown(eqn, [state, *indices], scope)

    def element(self, eqn: JaxprEqn, state: _Fate, scope: Scope) -> _Fate:
        if state.place and state.place.axis == 0 and state.place.block > 1:
            return self.unknown(eqn, [state], scope)
        return _shifted(state, -1)

    def inward(self, state: Any) -> Any:
        return _shifted(state, -1) if _of_one_row(state) else state

    def outward(self, state: Any) -> Any:
        return _shifted(state, +1) if _of_one_row(state) else state

    def handed_on(self, eqn: JaxprEqn, state: _Fate, scope: Scope) -> _Fate:
        return self.unknown(eqn, [state], scope) if state.place and state.place.axis == -1 else state

    def stacked(self, eqn: JaxprEqn, state: _Fate, scope: Scope) -> _Fate:
        return _shifted(state, +1)

    def _aligned(self, eqn: JaxprEqn, states: Sequence[_Fate], places: Sequence[_Place], scope: Scope) -> _Fate:
        """The fate of what is computed position by position from operands whose rows come to lie on `places`."""
        place = places[0] if places else None
        if any((other.axis, other.block) != (place.axis, place.block) for other in places[1:] if place):
            return self.unknown(eqn, states, scope)
        mixed = _first(*(state.mixed for state in states))
        return _Fate(place, mixed) if place or mixed else _NO_ROWS

    def _moved(self, eqn: JaxprEqn, index: int, place: _Place, scope: Scope) -> _Place | None:
        """Where the rows of operand `index` lie in the results; None if they were combined."""
        if place.axis < 0:
            return place
        if eqn.primitive.name == "reshape":
            return self._reshaped(eqn, place, scope)
        rule = _RULES.get(eqn.primitive.name)
        axis = rule(eqn, index, place.axis) if rule else None
        if axis is None and eqn.primitive.name == "gather" and index == 0:
            axis = _own_row(eqn, place.axis, scope.body)
        if axis is None and eqn.primitive.name.startswith("scatter") and index > 0:
            axis = _written_to_own_row(eqn, index, place.axis, scope.body)
        if axis is None:
            return None
        # Whatever the rule says, an axis of another length (a slice, one row broadcast to many) is not the row axis.
        length = _shape(eqn.invars[index])[place.axis]
        kept = all(axis < len(_shape(out)) and _shape(out)[axis] == length for out in eqn.outvars)
        if not kept:
            return None
        return place if axis == place.axis else replace(place, axis=axis)

    def _reshaped(self, eqn: JaxprEqn, place: _Place, scope: Scope) -> _Place | None:
        before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
        rows = before[place.axis] // place.block
        if eqn.params["dimensions"] is not None or rows == 0:
            return None
        # Row-major order: the axis stays recognisable if as many elements stand before it, and it is whole rows long.
        found = {
            axis: length // rows
            for axis, length in enumerate(after)
            if prod(after[:axis]) == prod(before[: place.axis]) and length % rows == 0
        }
        if not found:
            return None
        # Several fit if there is just one row. Then the first that keeps the block is what the program will have meant.
        axis = next((axis for axis, block in found.items() if block == place.block), min(found))
        merged = place.merged or self._mix(eqn, scope)
        return _Place(axis, found[axis], merged if found[axis] > 1 else None)

    def _mix(self, eqn: JaxprEqn, scope: Scope) -> _Mix:
        return _Mix(self.tick(), scope.site(eqn) or Site("<unknown>", 0))


def _of_one_row(state: Any) -> bool:
    return isinstance(state, _Fate) and state.place is not None and state.place.axis < 0


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _shifted(state: _Fate, by: int) -> _Fate:
    return replace(state, place=replace(state.place, axis=state.place.axis + by)) if state.place else state


# The table. A rule gets the equation, which operand has rows and on which of its axes; it answers on which axis of the
# results they lie, or None if the equation combines them.

_Rule = Callable[[JaxprEqn, int, int], int | None]


def _same(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return axis


def _except(param: str) -> _Rule:
    """The row axis stays unless it is the one that the equation works along."""

    def rule(eqn: JaxprEqn, index: int, axis: int) -> int | None:
        along = eqn.params[param]
        return None if axis == along or (isinstance(along, tuple) and axis in along) else axis

    return rule


def _without(param: str) -> _Rule:
    """The results lack the axes that the equation works along."""

    def rule(eqn: JaxprEqn, index: int, axis: int) -> int | None:
        along = eqn.params[param]
        gone = along if isinstance(along, tuple) else (along,)
        return None if axis in gone else axis - sum(other < axis for other in gone)

    return rule


def _before_the_last(count: int) -> _Rule:
    """The last `count` axes are worked on, the others are a batch."""

    def rule(eqn: JaxprEqn, index: int, axis: int) -> int | None:
        return axis if axis < len(_shape(eqn.invars[index])) - count else None

    return rule


def _fft(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return _before_the_last(len(eqn.params["fft_lengths"]))(eqn, index, axis)


def _broadcast(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return int(eqn.params["broadcast_dimensions"][axis])


def _transpose(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return eqn.params["permutation"].index(axis)


def _stack(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return axis + (axis >= eqn.params["axis"])


def _pad(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    return axis if eqn.params["padding_config"][axis] == (0, 0, 0) else None


def _collective(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    """Over the replicas, row i of one meets row i of another; over the devices inside a replica, its own shards."""
    return axis if all(isinstance(name, str) and name != "replica" for name in eqn.params["axes"]) else None


def _dot_general(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    contracting, batch = eqn.params["dimension_numbers"]
    if axis in contracting[index]:
        return None
    if axis in batch[index]:
        return batch[index].index(axis)
    taken = (*contracting[index], *batch[index])
    free = axis - sum(other < axis for other in taken)
    lhs_free = len(_shape(eqn.invars[0])) - len(contracting[0]) - len(batch[0])
    return len(batch[0]) + free + (lhs_free if index == 1 else 0)


def _convolution(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    numbers = eqn.params["dimension_numbers"]
    batch = index == 0 and axis == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1
    return numbers.out_spec[0] if batch else None


def _windowed(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    """Pooling: the row axis stays if each window holds one row."""
    params = eqn.params
    steps = [params[name][axis] for name in ("window_strides", "base_dilation", "window_dilation") if name in params]
    alone = params["window_dimensions"][axis] == 1 and tuple(params["padding"][axis]) == (0, 0)
    return axis if alone and all(step == 1 for step in steps) else None


def _gather(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    numbers = eqn.params["dimension_numbers"]
    batch_axes = [a for a in range(len(_shape(eqn.outvars[0]))) if a not in numbers.offset_dims]
    if index == 1:  # each row looks something up, as in an embedding
        return batch_axes[axis] if axis < len(batch_axes) else None
    if axis in numbers.operand_batching_dims:  # each row looks something up in itself
        twin = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return batch_axes[twin]
    if axis in numbers.start_index_map or axis in numbers.collapsed_slice_dims:
        return None
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    return numbers.offset_dims[axis - sum(other < axis for other in dropped)]


def _own_row(eqn: JaxprEqn, axis: int, body: Jaxpr) -> int | None:
    """``logits[jnp.arange(rows), labels]``: each row looks something up in itself, by its own number.

    The indices of a gather are columns, one per indexed axis. The one for the row axis must count the rows.
    """
    numbers = eqn.params["dimension_numbers"]
    if axis not in numbers.start_index_map or axis not in numbers.collapsed_slice_dims:
        return None
    counted = _counting_column(eqn, numbers.start_index_map.index(axis), _shape(eqn.invars[0])[axis], body)
    return None if counted is None else _gather(eqn, 1, counted)


def _written_to_own_row(eqn: JaxprEqn, index: int, axis: int, body: Jaxpr) -> int | None:
    """``x.at[jnp.arange(rows), labels].set(...)``: each row writes into itself, by its own number."""
    numbers = eqn.params["dimension_numbers"]
    if index == 2:  # where the rows of the updates stand among the indices
        if axis in numbers.update_window_dims:
            return None
        axis -= sum(other < axis for other in numbers.update_window_dims)
    for column, target in enumerate(numbers.scatter_dims_to_operand_dims):
        if target in numbers.inserted_window_dims:
            counted = _counting_column(eqn, column, _shape(eqn.invars[0])[target], body)
            if counted == axis:
                return int(target)
    return None


def _counting_column(eqn: JaxprEqn, column: int, rows: int, body: Jaxpr) -> int | None:
    """The axis along which one column of the indices of a gather or scatter counts the rows."""
    made_by = {out: maker for maker in body.eqns for out in maker.outvars}
    columns = made_by.get(eqn.invars[1])  # type: ignore[arg-type]
    if columns is None or columns.primitive.name != "concatenate":
        return None
    return _counted_axis(columns.invars[column], rows, made_by)


def _counted_axis(atom: Any, rows: int, made_by: dict[Any, JaxprEqn]) -> int | None:
    """The axis along which `atom` counts from 0 to `rows` - 1; None if it is not seen to."""
    maker = made_by.get(atom)
    if maker is None:
        return None
    match maker.primitive.name:
        case "iota":
            axis: int = maker.params["dimension"]
            return axis if maker.params["shape"][axis] == rows else None
        case "broadcast_in_dim":
            axis_before = _counted_axis(maker.invars[0], rows, made_by)
            return None if axis_before is None else _broadcast(maker, 0, axis_before)
        case "select_n":  # where(i < 0, i + rows, i), with which jax.numpy treats negative indices
            test, index = made_by.get(maker.invars[0]), maker.invars[1]
            if test is None or test.primitive.name != "lt":
                return None
            same = test.invars[0] is index and _is_zero(test.invars[1])
            return _counted_axis(index, rows, made_by) if same else None
        case "convert_element_type":
            return _counted_axis(maker.invars[0], rows, made_by)
    return None


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and bool(atom.val == 0)


def _scatter(eqn: JaxprEqn, index: int, axis: int) -> int | None:
    if index == 0:  # what is written over does not reach other rows
        return axis
    numbers = eqn.params["dimension_numbers"]
    twins = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    if index == 1:
        return twins.get(axis)
    if axis not in numbers.update_window_dims:
        return twins.get(axis - sum(other < axis for other in numbers.update_window_dims))
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [a for a in range(len(_shape(eqn.invars[0]))) if a not in gone]
    target = window[numbers.update_window_dims.index(axis)]
    return None if target in numbers.scatter_dims_to_operand_dims else target


_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne "
    "neg nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round "
    "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub "
    "tan tanh xor zeta threefry2x32 name device_put reshard sharding_constraint"
).split()
_SIZE_TELLS = "slice dynamic_slice dynamic_update_slice concatenate split tile bitcast_convert_type".split()
"""They keep the row axis if they keep its length, which `_moved` looks at."""
_LEADING = "random_bits random_wrap random_unwrap random_fold_in random_seed random_split random_clone".split()
"""Each key goes its own way; other axes are added or dropped behind."""

_RULES: dict[str, _Rule] = {
    **dict.fromkeys([*_ELEMENTWISE, *_SIZE_TELLS, *_LEADING], _same),
    **dict.fromkeys(
        "reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor".split(), _without("axes")
    ),
    **dict.fromkeys("argmax argmin".split(), _without("axes")),
    "reduce": _without("dimensions"),
    "squeeze": _without("dimensions"),
    "unstack": _without("axis"),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp top_k".split(), _except("axis")),
    "approx_top_k": _except("reduction_dimension"),
    "sort": _except("dimension"),
    "rev": _except("dimensions"),
    **dict.fromkeys(
        "cholesky eig eigh lu qr geqrf householder_product svd triangular_solve".split(), _before_the_last(2)
    ),
    "lu_pivots_to_permutation": _before_the_last(1),
    "fft": _fft,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "stack": _stack,
    "pad": _pad,
    **dict.fromkeys("psum psum_invariant pmax pmin".split(), _collective),
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys("reduce_window reduce_window_sum reduce_window_max reduce_window_min".split(), _windowed),
    **dict.fromkeys("select_and_scatter_add select_and_gather_add".split(), _windowed),
    "gather": _gather,
    **dict.fromkeys("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(), _scatter),
}
