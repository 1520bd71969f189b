"""A step gives the same values, of the same kinds, compiled and line by line.

`STEPS` is a table of small steps. Each is a function that makes the step's variables and the step itself; it is called
once for the compiled run and once for the eager one, under the same strategy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax as rx
from tests.strategies import COMPILED, EAGER_TWIN

STEPS: dict[str, Callable[[], tuple[list[rx.Variable], Callable[..., Any]]]] = {}

RUNS = 2


def step(make):
    STEPS[make.__name__.removeprefix("_")] = make
    return make


def pure(function):
    """A step without variables."""
    STEPS[function.__name__.removeprefix("_")] = lambda: ([], function)
    return function


def context():
    return rx.get_replica_context()


# -- reductions


@pure
def _sum(x):
    return context().all_reduce("sum", x)


@pure
def _mean_of_a_tree(x):
    return context().all_reduce("mean", {"a": x, "b": [x.sum(), (x[:, :0], None)]})


@pure
def _min_and_max_of_integers(x):
    whole = x.astype(int)
    return context().all_reduce("min", whole), context().all_reduce("max", whole)


@pure
def _mean_of_integers_and_sum_of_booleans(x):
    return context().all_reduce("mean", x.astype(int)), context().all_reduce("sum", x > 3)


@pure
def _half_precision(x):
    return context().all_reduce("mean", x.astype(jnp.bfloat16)), context().all_reduce("max", x.astype(jnp.float16))


@pure
def _reductions_of_what_is_mirrored(x):
    return [context().all_reduce(op, jnp.float32(3)) for op in ("sum", "mean", "min", "max")]


@pure
def _gathers(x):
    return context().all_gather(x, 0), context().all_gather(x, -1), context().all_gather({"a": x.sum()[None]}, 0)


@pure
def _rows_of_a_table(x):
    return context().all_reduce("mean", rx.IndexedSlices(x, jnp.array([0, 1]), (4, 3)))


@pure
def _the_collectives_of_lax(x):
    return lax.psum(x, "replica"), lax.pmean(x.sum(), "replica"), lax.psum(1, "replica"), lax.axis_index("replica")


@pure
def _lax_reduce_scatter_and_rotation(x):
    replicas = context().num_replicas_in_sync
    shift = [(i, (i + 1) % replicas) for i in range(replicas)]
    scattered = lax.psum_scatter(jnp.tile(x, (replicas, 1)), "replica", tiled=True)
    return scattered, lax.ppermute(x, "replica", shift)


# -- gradients


@pure
def _gradients_through_every_reduction(x):
    def loss(op):
        return lambda x: (context().all_reduce(op, x * x) * (context().replica_id_in_sync_group + 1.0)).sum()

    return [jax.grad(loss(op))(x) for op in ("sum", "mean", "min", "max")]


@pure
def _gradient_through_a_gather(x):
    return jax.grad(lambda x: (context().all_gather(x, 1) ** 2).sum())(x)


@pure
def _forward_mode_and_second_derivatives(x):
    def total(x):
        return (context().all_reduce("sum", x) ** 2).sum()

    return jax.jvp(total, (x,), (x,)), jax.grad(lambda x: jax.grad(total)(x).sum())(x)


@pure
def _vmap_over_a_reduction(x):
    return jax.vmap(lambda row: context().all_reduce("sum", row) * row)(x)


@pure
def _checkpoint_around_a_reduction(x):
    return jax.grad(jax.checkpoint(lambda x: (jnp.sin(context().all_reduce("sum", x)) * x).sum()))(x)


# -- control flow


@pure
def _scan_with_a_reduction(x):
    start = context().all_reduce("sum", x)
    return lax.scan(lambda carry, row: (carry + context().all_reduce("mean", row), row * 2), start, x)


@pure
def _loops_with_a_reduction(x):
    start = context().all_reduce("mean", x)
    grown = lax.while_loop(lambda y: context().all_reduce("max", y.sum()) < 1000, lambda y: y * 2, start)
    return grown, lax.fori_loop(0, 3, lambda i, y: y + context().all_reduce("sum", x), start)


@pure
def _cond_with_a_reduction(x):
    agreed = context().all_reduce("sum", x.sum()) > 0
    return lax.cond(agreed, lambda y: context().all_reduce("mean", y), lambda y: context().all_reduce("sum", y), x)


@pure
def _a_branch_that_differs(x):
    return lax.cond(x.sum() > 20, lambda y: y * 2, lambda y: y, x)


@pure
def _jitted_parts(x):
    return jax.jit(lambda x: jnp.where(x > 3, context().all_reduce("sum", x), 0))(x)


# -- results


@pure
def _values_that_happen_to_be_equal(x):
    return x * 0, jnp.zeros_like(x), x.sum() > -1


@pure
def _objects_and_empty_arrays(x):
    return {"none": None, "words": ("a", f"{x.ndim}"), "number": 5, "empty": x[:0], "flat": x[:, :0], "scalar": x[0, 0]}


@pure
def _constants(x):
    return jnp.arange(3), np.float32(2.5), np.ones((2, 2)), jnp.float32(1) / 3


@pure
def _noise(x):
    key = jax.random.key(1)
    own = context().replica_key(key)
    return jax.random.uniform(key, (2,)), x + jax.random.uniform(own, (3,)), jax.random.key_data(jax.random.split(key))


@pure
def _library_functions(x):
    y = jax.nn.softmax(jax.nn.gelu(x) @ jnp.linspace(-1, 1, 9).reshape(3, 3))
    return y.var(), jnp.linalg.norm(y, axis=1), jnp.sort(y)[::-1], jax.lax.top_k(y, 2), jnp.einsum("ij,kj->ik", y, x)


# -- cross-replica code


@pure
def _merge_call_with_reductions(x):
    def merge(strategy, x, word, *, scale):
        parts = strategy.experimental_local_results(x)
        return strategy.reduce("sum", x) * scale, strategy.reduce("mean", x, axis=0), parts[0] + parts[-1], word

    return context().merge_call(merge, (x, "word"), {"scale": 2.0})


@pure
def _merge_call_hands_back(x):
    def merge(strategy, x, mean):
        return x, mean, strategy.gather(x, 0), None

    return context().merge_call(merge, (x, context().all_reduce("mean", x)))


@pure
def _a_run_inside_a_merge_call(x):
    def inner(y, factor):
        return y * factor, context().all_reduce("sum", y), "inner"

    return context().merge_call(lambda strategy, y: strategy.run(inner, (y, 2.0)), (x,))


# -- variables


def _variable_step(synchronization, aggregation):
    def make():
        v = rx.Variable(jnp.ones((2, 3)), name="v", synchronization=synchronization, aggregation=aggregation)

        def assign(x):
            may_differ = synchronization == "on_read" or aggregation != "none"
            x = x if may_differ else context().all_reduce("sum", x)
            return v.assign(x), v.assign_add(x), v.assign_sub(3 * x), v.value

        return [v], assign

    return make


for _sync in ("on_write", "on_read"):
    for _aggregation in ("none", "sum", "mean", "only_first_replica"):
        STEPS[f"variable_{_sync}_{_aggregation}"] = _variable_step(_sync, _aggregation)


@step
def _reads_and_writes_across_replicas():
    w = rx.Variable(jnp.ones((2, 3)), name="w")
    seen = rx.Variable(0.0, name="seen", synchronization="on_read", aggregation="sum")
    average = rx.Variable(0.0, name="average", synchronization="on_read", aggregation="mean")

    def merge(strategy, x):
        w.assign_add(strategy.reduce("sum", x))
        average.assign_add(1.0)
        strategy.extended.update(w, lambda w, g: w.assign_sub(0.5 * g), (strategy.reduce("mean", x),))
        return seen.value, average.value, w.value, strategy.reduce("sum", seen)

    def both(x):
        seen.assign_add(x.sum())
        average.assign(x.mean())
        return context().merge_call(merge, (x,)), w.value, seen.value

    return [w, seen, average], both


@step
def _update_of_each_kind():
    w = rx.Variable(jnp.ones((2, 3)), name="w")
    own = rx.Variable(1.0, name="own", synchronization="on_read", aggregation="sum")

    def merge(strategy, g):
        update = strategy.extended.update
        return update(w, lambda w, g: w.assign_sub(g), (g,)), update(own, lambda own, g: own.assign_add(g.sum()), (g,))

    return [w, own], lambda x: context().merge_call(merge, (context().all_reduce("mean", x),))


@step
def _training():
    w = rx.Variable(jnp.full((3, 2), 0.5), name="w")
    optimizer = rx.Optimizer(optax.adamw(0.1), gradients="mean")

    def train(x):
        loss, gradients = rx.value_and_grad(lambda: ((x @ w.value - 1.0) ** 2).mean(), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss, gradients

    return [w], train


@step
def _a_running_mean_under_checkpoint():
    w = rx.Variable(jnp.ones((3, 2)), name="w")
    mean = rx.Variable(jnp.zeros(2), name="mean", aggregation="mean")

    @jax.checkpoint
    def layer(x):
        y = x @ w.value
        mean.assign(0.9 * mean.value + 0.1 * context().all_reduce("mean", y.mean(0)))
        return ((y - mean.value) ** 2).sum()

    def train(x):
        loss, gradients = rx.value_and_grad(lambda: layer(x), [w])()
        return loss, context().all_reduce("mean", gradients), mean.value

    return [w, mean], train


@step
def _assigned_in_a_loop():
    total = rx.Variable(jnp.zeros(3), name="total")

    def body(carry, row):
        total.assign_add(context().all_reduce("sum", row))
        return carry + 1, total.value

    return [total], lambda x: lax.scan(body, jnp.int32(0), x)


@step
def _made_in_the_step():
    made: list[rx.Variable] = []

    def create(x):
        if not made:
            made[:] = [rx.Variable(lambda: jax.random.uniform(jax.random.key(0), (3,)), name="made")]
        made[0].assign_add(context().all_reduce("sum", x.sum(0)))
        return made[0].value

    return made, create


# -- the law


def kind(leaf: Any) -> str:
    if isinstance(leaf, rx.PerReplica):
        return f"one {jax.typeof(leaf.data).dtype} per replica"
    return f"mirrored {leaf.dtype}{leaf.shape}" if isinstance(leaf, jax.Array) else type(leaf).__name__


def assert_same(compiled: Any, eager: Any) -> None:
    is_leaf = lambda leaf: leaf is None or isinstance(leaf, rx.PerReplica)  # noqa: E731
    flat, tree = jax.tree.flatten(compiled, is_leaf=is_leaf)
    flat_eager, tree_eager = jax.tree.flatten(eager, is_leaf=is_leaf)
    assert tree_eager == tree
    for one, other in zip(flat, flat_eager, strict=True):
        assert kind(other) == kind(one)
        if isinstance(one, rx.PerReplica):
            for part, part_eager in zip(one.values, other.values, strict=True):
                assert_close(part, part_eager)
        elif isinstance(one, jax.Array):
            assert_close(one, other)
        else:
            assert other == one


def assert_close(one: Any, other: Any) -> None:
    """Equal but for the order in which floats are added up: compiled, XLA fuses; line by line it cannot."""
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape
    if one.dtype.kind not in "fV":
        np.testing.assert_array_equal(other, one)
        return
    one, other = one.astype(np.float32), other.astype(np.float32)
    np.testing.assert_allclose(other, one, rtol=2e-6, atol=2e-6 * max(1.0, np.abs(one).max(initial=0)))


PLAIN = [name for name in EAGER_TWIN if name.startswith(("default", "one_device", "mirrored"))]
# Where variables rest elsewhere, what matters are the steps that have some.
ELSEWHERE = [name for name in EAGER_TWIN if name not in PLAIN]
WITH_VARIABLES = ["reads_and_writes_across_replicas", "update_of_each_kind", "training", "made_in_the_step"]
CASES = [(step, on) for on in PLAIN for step in STEPS] + [(step, on) for on in ELSEWHERE for step in WITH_VARIABLES]


# There is one default strategy, so it meets many functions of one code.
@pytest.mark.filterwarnings("ignore:(?s).*was made anew and compiled")
@pytest.mark.parametrize(("name", "strategy_name"), CASES)
def test_a_step_gives_the_same_compiled_and_line_by_line(name, strategy_name):
    strategy = COMPILED[strategy_name]()
    outcomes = []
    for eager in (False, True):
        with strategy.scope():
            variables, function = STEPS[name]()
        x = strategy.experimental_distribute_values_from_function(
            lambda value: np.arange(6, dtype=np.float32).reshape(2, 3) + 5 * value.replica_id_in_sync_group
        )
        options = rx.RunOptions(eager=eager)

        results = [strategy.run(function, (x,), options=options) for _ in range(RUNS)]

        outcomes.append((results, [variable.values for variable in variables]))
    assert_same(*outcomes)
