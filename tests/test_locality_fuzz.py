"""Is what the analysis calls mirrored really equal on all replicas? Random programs, run and compared bit for bit.

This is the test that matters most here: the engine trusts the analysis and nothing else (`check_vma=False`), so one
value wrongly called mirrored is a silently wrong program.
"""

import random
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from replicax import _locality
from tests.traced import MESH, REPLICAS, all_reduce, sharded, trace

Pool = list[jax.Array]
"""The values made so far: vectors of three floats. A step takes some of them and appends its results."""

WEIGHTS = jnp.asarray([0.3, -0.2, 0.5])
ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(REPLICAS, 3)), jnp.float32)


@jax.custom_vjp
def _sine(x):
    return jnp.sin(x)


_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def _tame(x):
    return jnp.tanh(x)


_tame.defjvp(lambda primals, tangents: (_tame(*primals), tangents[0] * 0.5))


class Dice:
    """One random program. Where JAX traces a function more than once, each tracing must make the same choices."""

    def __init__(self, seed: float, depth: int) -> None:
        self.random = random.Random(seed)
        self.depth = depth

    def steps(self, pool: Pool) -> None:
        for _ in range(self.random.randint(1, 3)):
            makers = SIMPLE + CROSSING + (NESTED if self.depth else [])
            self.random.choice(makers)(self, pool)

    def pick(self, pool: Pool) -> jax.Array:
        return self.random.choice(pool)

    def body(self) -> Callable[..., jax.Array]:
        """A random function of some vectors that returns one."""
        seed = self.random.random()

        def run(*values: jax.Array) -> jax.Array:
            pool = list(values)
            Dice(seed, self.depth - 1).steps(pool)
            return jnp.tanh(pool[-1])

        return run


def arithmetic(dice: Dice, pool: Pool) -> None:
    op = dice.random.choice([jnp.add, jnp.multiply, jnp.minimum, lambda a, b: jnp.where(a.sum() > b.sum(), a, b)])
    pool.append(op(dice.pick(pool), dice.pick(pool)) * 0.5)


def library(dice: Dice, pool: Pool) -> None:
    a, b = dice.pick(pool), dice.pick(pool)
    fn = dice.random.choice(
        [
            lambda: jnp.sort(a) + b[jnp.argmax(a)],
            lambda: jax.nn.softmax(a) + jax.nn.relu(b),
            lambda: jax.vmap(lambda r, q: jnp.cos(r) * q)(a, b),
            lambda: jnp.cumsum(a) + _tame(b),
            lambda: lax.optimization_barrier((a, b))[dice.random.randrange(2)],
        ]
    )
    pool.append(fn())


def randomness(dice: Dice, pool: Pool) -> None:
    data = jnp.abs(dice.pick(pool).sum() * 100).astype(int)
    pool.append(jax.random.normal(jax.random.fold_in(jax.random.key(0), data), (3,)))


def collective(dice: Dice, pool: Pool) -> None:
    a = dice.pick(pool)
    groups = [[0, 1], [2, 3]]
    fn = dice.random.choice(
        [
            lambda: lax.pmean(a, "replica"),
            lambda: jnp.tanh(lax.psum(a, "replica")),
            lambda: lax.pmax(a, "replica"),
            lambda: lax.all_gather(a, "replica")[dice.random.randrange(REPLICAS)],
            lambda: lax.psum(a, "replica", axis_index_groups=groups),
            lambda: lax.psum(a, "replica", axis_index_groups=[list(range(REPLICAS))]),
            lambda: lax.ppermute(a, "replica", [(i, (i + 1) % REPLICAS) for i in range(REPLICAS)]),
            lambda: lax.psum_scatter(jnp.stack([a, a * 2, a * 3, a * 4]), "replica"),
            lambda: a + lax.axis_index("replica") * 0.1,
        ]
    )
    pool.append(fn())


def reduction(dice: Dice, pool: Pool) -> None:
    pool += all_reduce[dice.random.choice(list(all_reduce))](dice.pick(pool), dice.pick(pool))


def branch(dice: Dice, pool: Pool) -> None:
    predicate = dice.pick(pool).sum() > 0.1
    pool.append(lax.cond(predicate, dice.body(), dice.body(), dice.pick(pool), dice.pick(pool)))


def scan(dice: Dice, pool: Pool) -> None:
    body, outer, xs = dice.body(), dice.pick(pool), jnp.stack([dice.pick(pool), dice.pick(pool)])

    def turn(carry, x):
        after = body(carry[0], carry[1], outer, x)
        return (after, carry[0]), after * x

    (first, second), ys = lax.scan(turn, (dice.pick(pool), dice.pick(pool)), xs)
    pool += [first, second, ys[1]]


def loop(dice: Dice, pool: Pool) -> None:
    body, limit, start = dice.body(), dice.pick(pool).sum() + 1, dice.pick(pool)
    carry = lax.while_loop(
        lambda carry: (carry[0] < 4) & (carry[1].sum() < limit),
        lambda carry: (carry[0] + 1, body(carry[1])),
        (0, start),
    )
    pool.append(carry[1])


def jitted(dice: Dice, pool: Pool) -> None:
    pool.append(jax.jit(dice.body())(dice.pick(pool), dice.pick(pool)))


def gradient(dice: Dice, pool: Pool) -> None:
    body, other = dice.body(), dice.pick(pool)
    wrap = dice.random.choice([lambda f: f, jax.checkpoint, jax.jit])

    def loss(x: jax.Array) -> jax.Array:
        return wrap(body)(_sine(x), other).sum()  # a custom_vjp has no forward mode, so it stands only here

    try:
        value, grad = jax.value_and_grad(loss)(dice.pick(pool))
    except (NotImplementedError, ValueError):  # pmax and while have no gradient
        return
    pool += [jnp.tanh(grad), grad * 0 + value]


def gradient_of_reduction(dice: Dice, pool: Pool) -> None:
    reduce, outer = all_reduce[dice.random.choice(list(all_reduce))], dice.pick(pool)
    value, pull = jax.vjp(lambda x: reduce(x * outer)[0], dice.pick(pool))
    pool += [value, *pull(dice.pick(pool))]


def tangent(dice: Dice, pool: Pool) -> None:
    body, other = dice.body(), dice.pick(pool)
    try:
        primal, out = jax.jvp(lambda x: body(x, other), (dice.pick(pool),), (dice.pick(pool),))
    except (NotImplementedError, ValueError):
        return
    pool += [primal, jnp.tanh(out)]


def reference(dice: Dice, pool: Pool) -> None:
    # The kind that the engine uses; JAX cannot differentiate every program with the default kind.
    ref, new = jax.new_ref(dice.pick(pool), kind="no_grad_no_remat"), lax.stop_gradient(dice.pick(pool))
    how = dice.random.choice(["write", "write in part", "branch", "branch", "scan", "jit"])
    if how == "write":
        ref[...] = new
    elif how == "write in part":
        ref[0] = new[1]
    elif how == "branch":
        lax.cond(dice.pick(pool).sum() > 0, lambda: ref.__setitem__(..., new), lambda: None)
    elif how == "scan":
        body = dice.body()

        def turn(carry, _):
            before = ref[...]
            ref[...] = lax.stop_gradient(body(carry))
            return before, None

        pool.append(lax.scan(turn, new, None, length=2)[0])
    else:
        jax.jit(lambda value: ref.__setitem__(..., value))(new)
    pool.append(ref[...])


SIMPLE = [arithmetic, library, randomness]
CROSSING = [collective, collective, reduction, gradient_of_reduction]
NESTED = [branch, scan, loop, jitted, gradient, tangent, reference, reference, reference]


def program(seed: int) -> Jaxpr:
    """Mostly short ones: in a long program few values are mirrored, and one slip of the analysis hides another."""

    def fn(weights: jax.Array, rows: jax.Array) -> Pool:
        pool = [weights, rows[0], weights * 2]
        Dice(seed, depth=2 if seed % 8 == 0 else 1).steps(pool)
        return pool[3:]

    return trace(fn, [WEIGHTS], [ROWS])


def run(bodies: list[Jaxpr]) -> list[list[np.ndarray]]:
    """For each program, each output of every replica, stacked. All in one compilation, which is what costs time."""

    def stacked(*args: jax.Array) -> list[list[jax.Array]]:
        return [[value[None] for value in jaxpr_as_fun(ClosedJaxpr(body, []))(*args)] for body in bodies]

    outs = jax.jit(sharded(stacked, (P(), P("replica")), P("replica"), MESH))(WEIGHTS, ROWS)
    return jax.tree.map(np.asarray, outs)


def equal(copies: np.ndarray) -> bool:
    return all(copy.tobytes() == copies[0].tobytes() for copy in copies)


def analyse(body: Jaxpr) -> _locality.Analysis:
    return _locality.analyse(body, [_locality.MIRRORED, _locality.differs("rows differ")], REPLICAS)


def diverges(analysis: _locality.Analysis) -> bool:
    """Running it would hang."""
    return any(finding.kind == "diverging-collective" for finding in analysis.findings)


BATCHES, PROGRAMS = 10, 40


@pytest.fixture(scope="module")
def tally() -> Counter[tuple[bool, bool]]:
    """How many values there were, by what they were called and what they are."""
    return Counter()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_is_called_mirrored_is_equal_bit_for_bit(batch, tally):
    programs = {seed: program(seed) for seed in range(batch * PROGRAMS, (batch + 1) * PROGRAMS)}
    analyses = {seed: analyse(body) for seed, body in programs.items()}
    safe = [seed for seed, analysis in analyses.items() if not diverges(analysis)]

    for seed, outputs in zip(safe, run([programs[seed] for seed in safe]), strict=True):
        for index, (state, copies) in enumerate(zip(analyses[seed].outs, outputs, strict=True)):
            mirrored = _locality.origin_of(state) is None
            assert equal(copies) or not mirrored, f"seed {seed}, output {index}: called mirrored, is\n{copies}"
            tally[mirrored, equal(copies)] += 1


def test_the_analysis_is_not_vacuous(tally):
    if not tally.total():
        pytest.skip("counts what the tests above have found")
    recognised, missed = tally[True, True], tally[False, True]
    assert recognised > 400
    assert recognised > 0.7 * (recognised + missed)
