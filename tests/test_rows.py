"""Does the analysis see which outputs still have rows, and at which line rows were combined?"""

import linecache
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from replicax._locality import analyse_rows
from tests.traced import GRID, REPLICAS, all_reduce, trace

ROWS = 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 7)), jnp.float32)
IMAGES = jnp.ones((ROWS, 2, 8, 8))
LABELS = jnp.arange(ROWS) % 3
W = jnp.asarray(np.random.default_rng(1).normal(size=(7, 7)), jnp.float32)
KERNEL = jnp.ones((3, 2, 3, 3))


def rows_of(fn: Callable[..., Any], *args: Any, rows: Sequence[int | None] | None = None):
    """The analysis of ``fn(*args)``; unless said otherwise, every argument of `ROWS` rows is a batch."""
    if rows is None:
        rows = [0 if jnp.ndim(arg) and jnp.shape(arg)[0] == ROWS else None for arg in args]
    return analyse_rows(jax.make_jaxpr(fn)(*args).jaxpr, rows)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def rnn(x, w):
    return lax.scan(lambda h, t: (jnp.tanh(h + t), h), jnp.zeros(ROWS), x.T)[1]


def attention(x):
    q = x[:, :6].reshape(ROWS, 3, 2, 1)
    return jax.nn.dot_product_attention(q, q, q)


def own_noise(row):
    key = jax.random.fold_in(jax.random.key(0), row[0].astype(int))
    return jax.random.normal(key, (2,))


def one_step_of_descent(x):
    """On each row on its own."""
    return x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(x @ W) ** 2))(x)


def left_behind(x):
    last = jax.new_ref(jnp.zeros(7))

    def turn(row):
        before = last[...]
        last[...] = row
        return before

    return lax.map(turn, x)


KEPT = {
    "elementwise": (lambda x: jnp.where(x > 0, jnp.exp(x), -x) + 1, 0),
    "a row vector broadcast over the rows": (lambda x: x + W[0], 0),
    "a mean over features": (lambda x: x.mean(axis=1), 0),
    "softmax": (lambda x: jax.nn.softmax(x), 0),
    "layer norm": (lambda x: (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5), 0),
    "a dense layer": (lambda x: jax.nn.relu(x @ W), 0),
    "a dense layer, weights first": (lambda x: W @ x.T, 1),
    "einsum with the rows as batch": (lambda x: jnp.einsum("bi,bj->bij", x, x), 0),
    "transpose": (lambda x: x.T, 1),
    "a new axis in front": (lambda x: x[None], 1),
    "a flattened image": (lambda x: x.reshape(ROWS, -1)[:, None, :], 0),
    "rows merged with time and split again": (lambda x: (x.reshape(-1, 1) * 2).reshape(ROWS, 7), 0),
    "concatenated features": (lambda x: jnp.concatenate([x, x * 2], axis=1), 0),
    "stacked": (lambda x: jnp.stack([x, x]), 1),
    "unstacked": (lambda x: jnp.unstack(x, axis=1)[2], 0),
    "split": (lambda x: jnp.split(x, [3], axis=1)[1], 0),
    "padded features": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), 0),
    "some features": (lambda x: x[:, 1:3], 0),
    "one feature": (lambda x: x[:, 2], 0),
    "sorted features": (lambda x: jnp.sort(x, axis=1), 0),
    "the best feature": (lambda x: jnp.argmax(x, axis=-1), 0),
    "the two best features": (lambda x: lax.top_k(x, 2)[1], 0),
    "cumulative over features": (lambda x: jnp.cumsum(x, axis=1), 0),
    "reversed features": (lambda x: x[:, ::-1], 0),
    "a spectrum": (lambda x: jnp.fft.rfft(x, axis=1).real, 0),
    "a decomposition of each row's own": (lambda x: jnp.linalg.eigvalsh(jax.vmap(jnp.outer)(x, x)), 0),
    "attention inside each row": (attention, 0),
    "vmap": (lambda x: jax.vmap(lambda row: row @ row)(x), 0),
    "jit, checkpoint and custom rules": (lambda x: jax.jit(jax.checkpoint(jax.nn.silu))(x), 0),
    "dropout": (lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 0),
    "a random number of each row's own": (lambda x: jax.vmap(own_noise)(x), 0),
    "a branch that all rows take": (lambda x: lax.cond(W[0, 0] > 0, jnp.sin, jnp.cos, x), 0),
    "a loop over features": (lambda x: rnn(x, W), 1),
    "a while loop": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1], 0),
    "one row written over": (lambda x: x.at[0].set(0.0), 0),
    "one feature written over": (lambda x: x.at[:, 0].set(x[:, 1]), 0),
    "a gradient with respect to the rows": (one_step_of_descent, 0),
    "a linear system of each row's own": (lambda x: jnp.linalg.solve(jax.vmap(jnp.outer)(x, x) + jnp.eye(7), x[..., None]), 0),
    "one row after the other": (lambda x: lax.map(lambda row: row @ W, x), 0),
    "a branch of each row's own": (lambda x: lax.map(lambda row: lax.cond(row[0] > 0, lambda: 1.0, lambda: 0.0), x), 0),
    "a loop of each row's own": (
        lambda x: lax.map(lambda row: lax.while_loop(lambda c: c[0] < row[0], lambda c: c + 1, row), x), 0
    ),
    "a scan inside each row": (lambda x: lax.map(lambda row: lax.scan(lambda c, f: (c + f, c * f), row[0], row)[1], x), 0),
    "what a scan inside each row ends with": (
        lambda x: lax.map(lambda row: lax.scan(lambda c, f: (c + f * row, None), row, W[0])[0], x), 0
    ),
    "each row writes into itself": (lambda x: x.at[jnp.arange(ROWS), LABELS % 7].set(0.0), 0),
    "a label turned into a row": (lambda x: jnp.zeros((ROWS, 7)).at[jnp.arange(ROWS), jnp.argmax(x, axis=1)].set(1.0), 0),
    "a reference": (lambda x: jax.new_ref(jnp.zeros_like(x))[...] + x, 0),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "axis"), KEPT.values(), ids=KEPT.keys())
def test_rows_go_their_own_way_through(fn, axis):
    rows = rows_of(fn, X)

    assert rows.axis == (axis,)
    assert rows.reduced == (None,)


COMBINED = {
    "the sum over rows": lambda x: x.sum(0),
    "the mean of everything": lambda x: x.mean(),
    "the largest row": lambda x: x.max(0),
    "the row with the largest": lambda x: jnp.argmax(x, axis=0),
    "a matrix product over the rows": lambda x: x.T @ W[:ROWS],
    "every row with every row": lambda x: x @ x.T,
    "sorted rows": lambda x: jnp.sort(x, axis=0),
    "cumulative over rows": lambda x: jnp.cumsum(x, axis=0),
    "the first row": lambda x: x[0],
    "a row by number": lambda x: x[LABELS[0]],
    "all rows but one": lambda x: x[1:],
    "reversed rows": lambda x: x[::-1],
    "shifted rows": lambda x: jnp.roll(x, 1, axis=0),
    "rows put below one another": lambda x: jnp.concatenate([x, x]),
    "rows picked by a table": lambda x: x[LABELS],
    "rows that are swallowed": lambda x: x.reshape(-1),
    "rows that are swallowed from behind": lambda x: x.T.reshape(-1),
    "a scan over the rows": lambda x: lax.scan(lambda c, row: (c + row, None), W[0], x)[0],
    "what one row leaves in a reference": lambda x: left_behind(x),
    "rows added to rows of a table": lambda x: jnp.zeros((ROWS, 7)).at[jnp.flip(jnp.arange(ROWS))].add(x),
    "one row after the other, beside all of them": lambda x: lax.map(lambda row: row + x, x),
    "a loop for as long as any row says": lambda x: lax.while_loop(
        lambda i: (x > i).any(), lambda i: i + 1, jnp.float32(0)
    ),
    "a branch on a mean": lambda x: lax.cond(x.mean() > 0, lambda: 1.0, lambda: 0.0),
    "a host callback": lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "scattered rows": lambda x: W.at[LABELS].add(x),
    "a gradient with respect to weights": lambda x: jax.grad(lambda w: jnp.sum(x @ w))(W),
}


@pytest.mark.parametrize("fn", COMBINED.values(), ids=COMBINED.keys())
def test_rows_are_combined(fn):
    rows = rows_of(fn, X)

    assert rows.axis == (None,)
    assert rows.reduced[0] is not None


def test_batch_normalisation_keeps_the_rows_and_combines_them():
    rows = rows_of(lambda x: (x - x.mean(0)) / x.std(0), X)

    assert rows.axis == (0,)
    assert rows.reduced[0] is not None


def test_what_one_row_hands_on_to_the_next_combines_them():
    rows = rows_of(lambda x: lax.scan(lambda c, row: (c + row, c + row), W[0], x)[1], X)

    assert rows.axis == (0,)
    assert rows.reduced[0] is not None


def test_outputs_that_know_nothing_of_the_rows_are_left_alone():
    rows = rows_of(lambda x, w: (w.sum(0), jnp.zeros(ROWS), x), X, W)

    assert rows.axis == (None, None, 0)
    assert rows.reduced == (None, None, None)


def test_a_convolution_has_the_rows_as_its_batch():
    rows = rows_of(lambda x, k: pool(conv(x, k)).reshape(ROWS, -1), IMAGES, KERNEL)
    assert (rows.axis, rows.reduced) == ((0,), (None,))

    vmapped = rows_of(lambda x, k: jax.vmap(lambda image: conv(image[None], k)[0])(x), IMAGES, KERNEL)
    assert (vmapped.axis, vmapped.reduced) == ((0,), (None,))


def test_the_gradient_of_a_convolution():
    def gradients(x, k):
        return jax.grad(lambda x, k: pool(conv(x, k)).sum(), argnums=(0, 1))(x, k)

    rows = rows_of(gradients, IMAGES, KERNEL)

    assert rows.axis == (0, None)
    assert rows.reduced[0] is None and rows.reduced[1] is not None


@pytest.mark.parametrize(
    "loss",
    [
        optax.softmax_cross_entropy_with_integer_labels,
        lambda x, y: -jax.nn.log_softmax(x)[jnp.arange(ROWS), y],
        lambda x, y: -(jax.nn.one_hot(y, 7) * jax.nn.log_softmax(x)).sum(-1),
        lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], axis=1)[:, 0],
        lambda x, y: jnp.take(W, y, axis=0).sum(1) - x[:, 0],
    ],
    ids=["optax", "by row number", "one-hot", "take_along_axis", "embedding"],
)
def test_a_loss_per_row_is_per_row(loss):
    rows = rows_of(loss, X, LABELS)

    assert rows.axis == (0,)
    assert rows.reduced == (None,)


def test_numbers_that_only_look_like_row_numbers_do_not_count():
    def someone_elses(x, y):
        return x[jnp.where(y > 0, 0, jnp.arange(ROWS)), y]

    assert rows_of(someone_elses, X, LABELS).reduced[0] is not None


def test_the_line_is_the_one_that_combined_first():
    def step(x):
        centred = x - x.mean(axis=0)  # here
        return jnp.mean(centred**2)

    (site,) = rows_of(step, X).reduced
    assert site is not None and linecache.getline(site.file, site.line).strip().endswith("# here")


def test_the_line_inside_a_function_that_jax_traced_for_another_caller():
    def first(x):
        return jnp.cumsum(x, axis=0)

    def second(x):
        return jnp.cumsum(x, axis=0)  # this call, not the one that JAX traced

    jax.jit(first)(X)
    (site,) = rows_of(second, X).reduced
    assert site is not None and "this call" in linecache.getline(site.file, site.line)


def test_other_replicas_rows_are_other_rows():
    def step(x):
        return all_reduce["mean"](x)[0], lax.pmean(x, "replica"), lax.all_gather(x, "replica"), x

    rows = analyse_rows(trace(step, [], [jnp.ones((REPLICAS * ROWS, 7))]), [0])

    assert rows.axis == (None, None, None, 0)
    assert [site is not None for site in rows.reduced] == [True, True, True, False]


def test_the_devices_inside_a_replica_share_its_rows():
    def step(x):
        def shard(x):
            return lax.psum(x * 2, "model")

        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(shard, in_specs=spec, out_specs=spec, axis_names={"model"}, check_vma=False)(x)

    rows = analyse_rows(trace(step, [], [jnp.ones((REPLICAS * ROWS, 7))], GRID), [0])

    assert (rows.axis, rows.reduced) == ((0,), (None,))


def test_a_carry_that_gains_rows_on_another_axis_is_not_certain():
    square = X[:, :ROWS]

    def step(x):
        return lax.scan(lambda c, _: (c.T, None), x, None, length=3)[0]

    rows = rows_of(step, square)

    assert rows.axis == (None,)
    assert rows.reduced[0] is not None


def test_an_array_that_is_moved_to_another_mesh_keeps_its_rows():
    everywhere = jax.sharding.PartitionSpec(None, None)
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert rows_of(lambda x: jax.sharding.reshard(x, everywhere) * 2, X).axis == (0,)


def test_what_a_reference_holds_is_followed():
    def step(x):
        whole, part = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros(3))
        whole[...] = x
        part[0] = x.sum()
        return whole[...], part[...], whole[0]

    rows = rows_of(step, X)

    assert rows.axis == (0, None, None)
    assert [site is not None for site in rows.reduced] == [False, True, True]


# Random programs. What "row i goes its own way" means can be tried: change one row of the batch and see what changes.


def _steps(dice: random.Random, values: list[jax.Array], depth: int) -> None:
    for _ in range(dice.randint(2, 5)):
        a, b = dice.choice(values), dice.choice(values)
        makers = [
            lambda a=a: jnp.tanh(a @ W),
            lambda a=a, b=b: a * b + 1,
            lambda a=a: jax.nn.softmax(a, axis=dice.choice([1, 1, 1, 0])),
            lambda a=a: a - a.mean(axis=dice.choice([1, 1, 0]), keepdims=True),
            lambda a=a: (a.reshape(-1) * 2).reshape(a.shape),
            lambda a=a: (a.T @ jnp.eye(ROWS)).T,
            lambda a=a: a.reshape(7, ROWS).T,
            lambda a=a: jnp.flip(a, axis=dice.choice([1, 1, 0])),
            lambda a=a, b=b: jnp.where(a > 0, a, jnp.sort(b, axis=1)),
            lambda a=a, b=b: jnp.concatenate([a[:, :3], b[:, 3:]], axis=1),
            lambda a=a: jnp.take_along_axis(a, jnp.argsort(a, axis=1), axis=1),
            lambda a=a: a[jnp.arange(ROWS)[:, None], jnp.argsort(a, axis=1)],
            lambda a=a: a.at[:, 2].add(a[:, 1]),
            lambda a=a: jax.vmap(jnp.cumsum)(a),
            lambda a=a: jax.grad(lambda a: jnp.sum(jnp.sin(a @ W)))(a),
            lambda a=a, b=b: lax.scan(lambda c, t: (c + t[:, None], c[:, 0]), a, b.T)[1].T,
            lambda a=a, b=b: lax.cond(a.mean() > 0, lambda: b, lambda: b * 2),
            lambda a=a, b=b: lax.map(lambda rows: jnp.cumsum(rows[0]) * rows[1], (a, b)),
            lambda a=a, b=b: lax.scan(lambda c, row: (c + dice.choice([0, 1]) * row, row * c), b[0], a)[1],
            lambda a=a: lax.map(lambda r: lax.scan(lambda c, f: (c + f, c * f), r[0], r)[1], a),
            lambda a=a: a.at[jnp.arange(ROWS), jnp.argmax(a, axis=1)].add(1.0),
        ]
        if depth:
            inner = dice.random()

            def body(a, b, inner=inner):
                pool = [a, b]
                _steps(random.Random(inner), pool, depth - 1)
                return pool[-1]

            makers += [
                lambda a=a, b=b, f=body: jax.jit(f)(a, b),
                lambda a=a, b=b, f=body: lax.cond(W[0, 0] > 0, f, lambda a, b: a, a, b),
                lambda a=a, b=b, f=body: lax.fori_loop(0, 2, lambda i, c: f(c, b), a),
            ]
        values.append(dice.choice(makers)())


def _program(seed: int) -> jax.extend.core.ClosedJaxpr:
    def program(x):
        values = [x, jnp.ones((ROWS, 7)), x * 2]
        _steps(random.Random(seed), values, depth=1)
        return [*values[3:], *(value.sum(dtype=float) for value in values[3:4])]

    return jax.make_jaxpr(program)(X)


def test_a_row_that_changes_changes_only_itself():
    tally = Counter()
    programs = [_program(seed) for seed in range(60)]
    # All in one compilation, which is what costs time.
    run = jax.jit(lambda x: [jax.extend.core.jaxpr_as_fun(program)(x) for program in programs])
    before, changed = run(X), [run(X.at[row].add(0.5)) for row in range(2)]

    for seed, program in enumerate(programs):
        rows = analyse_rows(program.jaxpr, [0])
        for index, (axis, site) in enumerate(zip(rows.axis, rows.reduced, strict=True)):
            for row in range(2):
                differs = np.asarray(before[seed][index]) != np.asarray(changed[row][seed][index])
                if site is None and axis is None:
                    assert not differs.any(), f"seed {seed}, output {index}: said to know nothing of the rows"
                elif site is None:
                    others = np.delete(np.moveaxis(differs, axis, 0), row, axis=0)
                    assert not others.any(), f"seed {seed}, output {index}: said to have its rows on axis {axis}"
            tally[axis is not None, site is None] += 1
    assert tally[True, True] > 0.3 * tally.total(), "the analysis gives up too often to be of use"
