"""Does the analysis know which values differ between replicas, since which line, and what can never be right?"""

import gc
import linecache
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from replicax._locality import (
    MIRRORED,
    Site,
    assert_mirrored,
    call_site,
    differs,
    origin_of,
    user_site,
)
from replicax._locality import (
    analyse as analyse_jaxpr,
)
from replicax._locality import (
    replicas as tables,
)
from replicax._locality import (
    rows as row_table,
)
from replicax._locality import (
    walk as walk_table,
)
from tests.traced import GRID, MESH, REPLICAS, all_reduce, analyse, sharded, trace

W = jnp.arange(1.0, 4.0)
X = jnp.arange(12.0).reshape(REPLICAS, 3)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def mirrored(fn: Callable[..., Any], *mirrored_args: Any, rows: Any = X, mesh=MESH) -> bool:
    """Whether every output of ``fn(*mirrored_args, x)`` is proven equal; `x` is each replica's own row."""
    analysis = analyse(lambda *args: fn(*args[:-1], args[-1][0]), mirrored_args or (W,), (rows,), mesh)
    return all(origin_of(state) is None for state in analysis.outs)


def why(fn: Callable[..., Any], *args: Any) -> str:
    (state,) = analyse(lambda w, x: fn(w, x[0]), (W,), (X,)).outs
    origin = origin_of(state)
    assert origin is not None, "it is called mirrored"
    return origin.why


def text_of(site: Site | None) -> str:
    assert site is not None
    return linecache.getline(site.file, site.line)


def first_use(fn: Callable[..., Any]) -> str:
    """The source line where the first output became per-replica."""
    origin = origin_of(analyse(fn, (W,), (X,)).outs[0])
    assert origin is not None
    return text_of(origin.site)


# What stays or becomes equal.

EQUAL = {
    "arithmetic on mirrored values": lambda w, x: jnp.tanh(w * 2) + 1,
    "a constant": lambda w, x: jnp.zeros(3),
    "psum": lambda w, x: lax.psum(x, "replica"),
    "pmean": lambda w, x: lax.pmean(x * w, "replica"),
    "pmax and pmin": lambda w, x: lax.pmax(x, "replica") - lax.pmin(x, "replica"),
    "all_gather": lambda w, x: lax.all_gather(x, "replica")[1],
    "psum over groups of which there is one": lambda w, x: lax.psum(x, "replica", axis_index_groups=[[0, 1, 2, 3]]),
    "psum over both axes of a mesh": lambda w, x: lax.psum(x, ("replica",)),
    "random numbers of a mirrored key": lambda w, x: jax.random.normal(jax.random.key(0), (3,)),
    "pure_callback": lambda w, x: jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct(w.shape, w.dtype), w),
    "a branch on a mirrored value": lambda w, x: lax.cond(w[0] > 0, jnp.sin, jnp.cos, w),
    "a collective in a branch that all take": lambda w, x: lax.cond(
        w[0] > 0, lambda: lax.psum(x, "replica"), lambda: w
    ),
    "a scan that reduces": lambda w, x: lax.scan(lambda c, t: (c + lax.pmean(t * x, "replica"), None), w, w)[0],
    "a while loop on a mirrored value": lambda w, x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, w),
    "jit, checkpoint, custom rules": lambda w, x: jax.jit(jax.checkpoint(jax.nn.silu))(w),
    "vmap of a reduction": lambda w, x: jax.vmap(lambda a: lax.psum(a, "replica"))(x),
    "a reduction, several operands packed": lambda w, x: all_reduce["mean"](x, w * x),
    "max, min and first": lambda w, x: [all_reduce[op](x)[0] for op in ("max", "min", "first")],
    "an optimization barrier, operand by operand": lambda w, x: lax.optimization_barrier((w, x))[0],
}

DIFFERENT = {
    "an argument": (lambda w, x: w + x, "argument 0 differs per replica"),
    "the replica id": (lambda w, x: lax.axis_index("replica"), "the replica id was read"),
    "a key folded with the id": (
        lambda w, x: jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("replica"))),
        "the replica id was read",
    ),
    "ppermute, of a mirrored value too": (
        lambda w, x: lax.ppermute(w, "replica", [(0, 1)]),
        "lax.ppermute gives each replica another value",
    ),
    "reduce-scatter": (
        lambda w, x: lax.psum_scatter(jnp.tile(x, REPLICAS), "replica", tiled=True),
        "lax.reduce_scatter gives each replica another value",
    ),
    "all_to_all": (
        lambda w, x: lax.all_to_all(jnp.zeros((REPLICAS, 2)), "replica", 0, 0),
        "lax.all_to_all gives each replica another value",
    ),
    "psum over groups": (
        lambda w, x: lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]]),
        "lax.psum gives each replica another value within its group",
    ),
    "io_callback": (
        lambda w, x: io_callback(lambda: np.float32(0), SCALAR),
        "an io_callback may answer differently on each replica",
    ),
    "rng_uniform": (
        lambda w, x: lax.rng_uniform(0.0, 1.0, (3,)),
        "lax.rng_uniform draws from each device's own generator",
    ),
    "an FFI call with side effects": (
        lambda w, x: jax.ffi.ffi_call("unheard_of", SCALAR, has_side_effect=True)(),
        "ffi_call reaches outside of the program and may answer differently on each replica",
    ),
    "memory nobody wrote to": (lambda w, x: lax.empty((3,), jnp.float32), "memory that was not written to was read"),
    "a branch": (lambda w, x: lax.cond(x[0] > 0, lambda: w, lambda: w * 2), "the branch taken differs per replica"),
    "a while loop": (
        lambda w, x: lax.while_loop(lambda c: c[1] < x[0], lambda c: (c[0] * 2, c[1] + 1), (w, 0.0))[0],
        "the number of turns of this loop differs per replica",
    ),
    "a library function with a custom solve inside": (
        lambda w, x: jnp.linalg.solve(jnp.diag(w), x),
        "argument 0 differs per replica",
    ),
    "a source inside what is not stepped into": (
        lambda w, x: lax.reduce(w, 0.0, lambda a, b: a + b + lax.axis_index("replica"), (0,)),
        "the replica id was read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fn", EQUAL.values(), ids=EQUAL.keys())
def test_equal_on_all_replicas(fn):
    assert mirrored(fn)


@pytest.mark.parametrize(("fn", "reason"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_on_each_replica(fn, reason):
    assert why(fn) == reason


def test_debugging_is_neither_refused_nor_a_source():
    def step(w, x):
        jax.debug.print("{}", x)
        jax.debug.callback(lambda x: None, x)
        lax.cond(x[0, 0] > 0, lambda: jax.debug.print("positive"), lambda: None)
        return w * 2

    analysis = analyse(step, (W,), (X,))

    assert analysis.outs == (MIRRORED,)
    assert analysis.findings == ()


def test_an_axis_inside_a_replica_is_not_the_replica_axis():
    def step(w, x):
        def shard(w, x):
            id = lax.axis_index("model")
            return lax.psum(w + id, "model"), lax.psum(x, "model"), lax.pmean(lax.psum(x, "model"), "replica")

        return jax.shard_map(shard, in_specs=P(), out_specs=P(), axis_names={"model"}, check_vma=False)(w, x)

    states = analyse(step, (W,), (X,), GRID).outs

    assert [origin_of(state) is None for state in states] == [True, False, True]


def test_a_carry_that_differs_only_from_the_second_turn_on():
    def step(w, x):
        (a, b, c), ys = lax.scan(lambda s, _: ((s[1], s[2], x[0]), s[0]), (w, w, w), None, length=5)
        return a, ys, lax.psum(c, "replica")

    states = analyse(step, (W,), (X,)).outs

    assert [origin_of(state) is None for state in states] == [False, False, True]


# Gradients.


def loss(w, x):
    return jnp.sum(jnp.tanh(w * x) ** 2)


def test_gradients_are_local_until_they_are_reduced():
    assert not mirrored(lambda w, x: jax.grad(loss)(w, x))
    assert mirrored(lambda w, x: all_reduce["mean"](jax.grad(loss)(w, x)))
    assert mirrored(lambda w, x: lax.pmean(jax.grad(loss)(w, x), "replica"))


@pytest.mark.parametrize("op", ["sum", "mean", "first", "max", "min"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_through_a_reduction_the_value_is_mirrored_and_the_gradient_is_not(op, wrap):
    def step(w, x):
        value, grad = jax.value_and_grad(wrap(lambda w: all_reduce[op](w * x[0])[0].sum()))(w)
        return value, grad, all_reduce["mean"](grad)[0]

    analysis = analyse(step, (W,), (X,))

    assert [origin_of(state) is None for state in analysis.outs] == [True, False, True]
    assert analysis.findings == ()


def test_what_a_split_reduction_hands_out_besides_its_result_is_not_mirrored():
    """Under `grad` JAX returns "am I replica 0?" from the same equation that returns replica 0's value."""

    def step(w, x):
        return jax.vjp(lambda w: all_reduce["first"](w * x[0])[0], w)[1](jnp.ones(3))[0]

    (eqn,) = [e for e in trace(step, (W,), (X,)).eqns if e.params.get("name") == "rx_reduce_first"][:1]
    assert len(eqn.outvars) > len(eqn.invars), "the case that this test is about has gone"
    assert not mirrored(lambda w, x: step(w, x[None]))


def test_the_transpose_of_a_gather_is_a_scatter_under_the_same_name():
    def gather(x):
        return lax.all_gather(x, "replica", tiled=True)

    gather.__name__ = "rx_gather"

    assert mirrored(lambda w, x: jax.jit(gather)(x))
    assert not mirrored(lambda w, x: jax.grad(lambda w: (jax.jit(gather)(w) * jnp.arange(12.0)).sum())(w))


def test_two_levels_of_groups_make_a_reduction_if_we_say_so():
    def two_levels(x):
        inner = lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]])
        return lax.psum(inner, "replica", axis_index_groups=[[0, 2], [1, 3]])

    assert not mirrored(lambda w, x: two_levels(x))
    two_levels.__name__ = "rx_reduce_sum"
    assert mirrored(lambda w, x: jax.jit(two_levels)(x))


def test_a_reduction_in_a_differentiated_scan():
    def step(w, x):
        def turn(c, t):
            return all_reduce["mean"](jnp.sin(c * t * x))[0], None

        value, grad = jax.value_and_grad(lambda w: lax.scan(jax.checkpoint(turn), w, jnp.arange(4.0))[0].sum())(w)
        return all_reduce["mean"](grad)[0], value

    assert mirrored(step)


def test_the_residual_of_an_untaken_branch_is_no_source():
    def step(w, x):
        return jax.grad(lambda w: lax.cond(w[0] > 0, lambda w: jnp.sin(w).sum(), lambda w: w.prod(), w))(w)

    assert mirrored(lambda w, x: step(w, x))
    assert mirrored(lambda w, x: jax.checkpoint(step)(w, x))


def test_jvp_doubles_the_operands():
    def step(w, x):
        return jax.jvp(lambda w: all_reduce["mean"](w * x, w)[0], (w,), (x,))

    assert mirrored(step)


# References.


def test_a_reference_is_followed():
    def step(w, x):
        kept, lost, found, partly = (jax.new_ref(w) for _ in range(4))
        kept[...] = w * 2
        lost[...] = x[0]
        found[...] = x[0]
        found[...] = w
        partly[...] = x[0]
        partly[0] = 1.0
        return kept[...], lost[...], found[...], partly[...], jax.freeze(lost)

    states = analyse(step, (W,), (X,)).outs

    assert [origin_of(state) is None for state in states] == [True, False, True, False, False]


def test_a_reference_written_in_a_branch_or_a_loop():
    def step(w, x):
        branch, some, loop, reduced = (jax.new_ref(w, kind="no_grad_no_remat") for _ in range(4))
        perhaps = jax.new_ref(x[0])
        lax.cond(w[0] > 0, lambda: perhaps.__setitem__(..., w), lambda: None)
        lax.cond(w[0] > 0, lambda: branch.__setitem__(..., x[0]), lambda: None)
        lax.cond(x[0, 0] > 0, lambda: some.__setitem__(..., w), lambda: None)

        def turn(c, t):
            before = loop[...]
            loop[...] = t * x[0]
            reduced[...] += lax.pmean(before, "replica")
            return c, before

        _, seen = lax.scan(turn, 0.0, w)
        return branch[...], some[...], loop[...], seen, perhaps[...], reduced[...]

    states = analyse(step, (W,), (X,)).outs

    assert [origin_of(state) is None for state in states] == [False, False, False, False, False, True]
    origin = origin_of(states[1])
    assert origin is not None and origin.why == "it is written on some replicas only"


def test_a_reference_made_in_a_loop_does_not_keep_the_walk_from_ending():
    def step(w, x):
        def turn(c, t):
            ref = jax.new_ref(c, kind="no_grad_no_remat")
            lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, x[0, i]), None)
            return ref[...] * t, None

        return lax.scan(turn, w, w)[0]

    assert not mirrored(lambda w, x: step(w, x[None]))


def test_a_write_in_a_function_of_ones_own():
    def step(w, x):
        ref = jax.new_ref(w)
        jax.jit(lambda v: ref.__setitem__(..., v))(x)
        return ref[...]

    assert not mirrored(step)


# Real steps.


def training_step(reduce: Callable[[Any], Any]) -> Callable[..., Any]:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 100)))

    def step(params, x):
        state = tx.init(params)
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["kernel"] + p["bias"]) ** 2))(params)
        updates, state = tx.update(reduce(grads), state, params)
        return optax.apply_updates(params, updates), state

    return step


PARAMS = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}


def flat(step):
    """`step` on the leaves of the parameters."""
    leaves, tree = jax.tree.flatten(PARAMS)
    return (lambda *args: jax.tree.leaves(step(tree.unflatten(args[:-1]), args[-1]))), leaves


@pytest.mark.parametrize(
    "reduce",
    [
        lambda grads: lax.pmean(grads, "replica"),
        lambda grads: jax.tree.unflatten(jax.tree.structure(grads), all_reduce["mean"](*jax.tree.leaves(grads))),
    ],
    ids=["pmean", "all_reduce"],
)
def test_an_optax_update_after_a_reduce_is_proven(reduce):
    step, leaves = flat(training_step(reduce))

    analysis = analyse(step, leaves, (X,))

    assert all(origin_of(state) is None for state in analysis.outs)
    assert analysis.findings == ()


def test_a_forgotten_reduce_is_found_with_the_users_line():
    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["kernel"]) ** 2))(params)  # x is used here
        return optax.apply_updates(params, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))[0])

    fn, leaves = flat(step)
    bias, kernel = analyse(fn, leaves, (X,)).outs

    assert origin_of(bias) is None  # it has no gradient in this loss
    origin = origin_of(kernel)
    assert origin is not None and origin.why == "argument 0 differs per replica"
    assert "x is used here" in text_of(origin.site)


# Lines.


def test_the_earliest_line_counts():
    def step(w, x):
        a = w * lax.axis_index("replica")  # earliest
        b = w * x
        return a + b

    assert "earliest" in first_use(step)


def test_an_input_begins_to_differ_at_its_first_use_even_if_that_was_reduced():
    def step(w, x):
        total = lax.psum(x, "replica")  # first use
        return total * x

    assert "first use" in first_use(step)


def test_an_unused_input_has_no_line():
    (state,) = analyse(lambda w, x: x, (W,), (X,)).outs
    origin = origin_of(state)
    assert origin is not None and origin.site is None


def test_a_line_given_for_an_input_is_kept():
    given = Site("train.py", 12)
    body = trace(lambda w, x: w * x, (W,), (X,))
    (state,) = analyse_jaxpr(body, [MIRRORED, differs("it was read here", given)], REPLICAS).outs
    assert getattr(origin_of(state), "site", None) == given


def test_the_line_inside_a_function_that_jax_traced_for_another_caller():
    def first(x):
        return jnp.where(x > 0, x, 0.0)

    def step(w, x):
        return jnp.where(x > 0, x, 0.0)  # this call

    jax.jit(first)(X)
    assert "this call" in first_use(step)


def test_user_site_and_call_site():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns  # sine
    assert "# sine" in text_of(user_site(eqn))
    assert "this very line" in text_of(call_site())  # this very line
    sites = []
    jax.tree.map(lambda _: sites.append(call_site()), [0])  # through a library
    assert "through a library" in text_of(sites[0])


# What can never be right.


def findings(fn: Callable[..., Any]) -> list[tuple[str, str, str]]:
    analysis = analyse(lambda w, x: fn(w, x[0]), (W,), (X,))
    return [(f.kind, f.primitive, text_of(f.site).split("#")[-1].strip()) for f in analysis.findings]


def test_a_collective_in_a_branch_that_not_all_take():
    def step(w, x):
        return lax.cond(
            x[0] > 0,  # the condition
            lambda: lax.psum(x, "replica"),  # waits
            lambda: w,
        )

    assert findings(step) == [("diverging-collective", "psum", "waits")]
    (finding,) = analyse(lambda w, x: step(w, x[0]), (W,), (X,)).findings
    assert finding.origin is not None and finding.origin.why == "argument 0 differs per replica"


def test_a_reduction_in_a_loop_of_which_replicas_make_different_numbers_of_turns():
    def step(w, x):
        return lax.while_loop(lambda c: c[0] < x[0], lambda c: all_reduce["mean"](c * x)[0], w)  # waits

    assert findings(step) == [("diverging-collective", "rx_reduce_mean", "waits")]


def meet(w):
    return lax.psum(w, "replica")


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: lax.while_loop(lambda c: lax.psum(c, "replica")[0] < x[0], lambda c: c + 1, w),
        lambda w, x: lax.switch(x[0].astype(int), [lambda: w, lambda: lax.all_gather(w, "replica")[0]]),
        lambda w, x: lax.cond(x[0] > 0, lambda: lax.ppermute(w, "replica", [(0, 1)]), lambda: w),
        lambda w, x: lax.cond(x[0] > 0, lambda: lax.fori_loop(0, 2, lambda i, c: lax.pmax(c, "replica"), w), lambda: w),
        lambda w, x: lax.cond(x[0] > 0, lambda w: lax.cond(w[0] > 0, meet, jnp.sin, w), jnp.sin, w),
        lambda w, x: jax.grad(lambda w: lax.cond(x[0] > 0, lambda: lax.psum(w, "replica").sum(), lambda: 0.0))(w),
        lambda w, x: lax.fori_loop(0, 3, lambda i, c: lax.cond(c[0] > 0, lambda: lax.psum(c, "replica"), lambda: x), w),
    ],
    ids=["loop test", "switch", "ppermute", "loop inside", "branch inside", "gradient", "from the second turn on"],
)  # fmt: skip
def test_also_diverges(fn):
    assert "diverging-collective" in {kind for kind, *_ in findings(fn)}


def test_a_sum_of_a_sum():
    def step(w, x):
        mean = all_reduce["mean"](x)[0]  # first
        return lax.psum(mean * 2 + w, "replica")  # again

    assert findings(step) == [("double-reduce", "psum", "again")]
    (finding,) = analyse(lambda w, x: step(w, x[0]), (W,), (X,)).findings
    assert finding.origin is not None and "first" in text_of(finding.origin.site)


DOUBLE = {
    "sum of sum": lambda w, x: all_reduce["sum"](*all_reduce["sum"](x)),
    "sum of mean": lambda w, x: all_reduce["sum"](all_reduce["mean"](x)[0] / 3),
    "psum of pmean": lambda w, x: lax.psum(lax.pmean(x, "replica"), "replica"),
    "one of two packed operands": lambda w, x: all_reduce["sum"](x, all_reduce["sum"](w, x)[1]),
    "accumulated in a scan": lambda w, x: lax.psum(
        lax.scan(lambda c, t: (c + lax.psum(t * x, "replica"), None), jnp.zeros(3), w)[0], "replica"
    ),
    "in a function of one's own": lambda w, x: jax.jit(lambda y: lax.psum(y, "replica"))(lax.psum(x, "replica")),
}

NOT_DOUBLE = {
    "a sum of a constant": lambda w, x: lax.psum(jnp.ones(3), "replica"),
    "a sum of a variable": lambda w, x: all_reduce["sum"](w),
    "a mean of a mean": lambda w, x: all_reduce["mean"](*all_reduce["mean"](x)),
    "a pmean of a pmean": lambda w, x: lax.pmean(lax.pmean(x, "replica"), "replica"),
    "a pmean of a sum of integers": lambda w, x: lax.pmean(lax.psum(x.astype(int), "replica"), "replica"),
    "a sum, divided by the number of replicas": lambda w, x: lax.psum(lax.psum(x, "replica"), "replica") * (1 / 4),
    "a max of a sum": lambda w, x: all_reduce["max"](*all_reduce["sum"](x)),
    "with a per-replica value between": lambda w, x: all_reduce["sum"](x - all_reduce["mean"](x)[0]),
    "the square of a sum": lambda w, x: lax.psum(lax.psum(x, "replica") ** 2, "replica"),
    "a product of two sums": lambda w, x: all_reduce["sum"](lax.psum(x, "replica") * lax.psum(w * x, "replica")),
    "a sum of replica 0's value": lambda w, x: all_reduce["sum"](*all_reduce["first"](x)),
    "a gradient": lambda w, x: jax.grad(lambda w: (lax.psum(w * x, "replica") ** 2).sum())(w),
    "a gradient through checkpoint and scan": lambda w, x: jax.grad(
        lambda w: lax.scan(jax.checkpoint(lambda c, t: (lax.psum(jnp.sin(c * t * x), "replica"), None)), w, w)[0].sum()
    )(w),
    "a value and a gradient of two sums": lambda w, x: jax.value_and_grad(
        lambda w: (all_reduce["sum"](w * x)[0] * all_reduce["sum"](x * w * w)[0]).sum()
    )(w),
}


@pytest.mark.parametrize("fn", DOUBLE.values(), ids=DOUBLE.keys())
def test_summed_twice(fn):
    assert [kind for kind, *_ in findings(fn)] == ["double-reduce"]


@pytest.mark.parametrize("fn", NOT_DOUBLE.values(), ids=NOT_DOUBLE.keys())
def test_not_summed_twice(fn):
    assert findings(fn) == []


# Reductions of what is mirrored already.


def test_needless_reductions_are_named():
    def step(w, x):
        a, b = all_reduce["mean"](w, w * 2)
        c = all_reduce["max"](w)[0]
        d, e = all_reduce["mean"](w, x[0])
        f = all_reduce["sum"](w)[0]
        return a, b, c, d, e, f

    analysis = analyse(step, (W,), (X,))
    eqns = trace(step, (W,), (X,)).eqns

    needless = [(eqns[i].params["name"], len(eqns[i].invars)) for i in sorted(analysis.mirrored_reduces)]
    assert needless == [("rx_reduce_mean", 2), ("rx_reduce_max", 1)]


def test_a_reduction_that_jax_transformed_or_that_changes_the_type_is_not_replaced():
    def step(w, x):
        grad = jax.grad(lambda w: all_reduce["mean"](w * 2)[0].sum())(w)
        batched = jax.vmap(lambda w: all_reduce["mean"](w)[0], in_axes=1, out_axes=1)(jnp.outer(w, w))
        return grad, batched, all_reduce["mean"](jnp.arange(3))

    assert analyse(step, (W,), (X,)).mirrored_reduces == frozenset()


# The way out.


def test_an_assertion_is_believed():
    assert mirrored(lambda w, x: assert_mirrored({"a": x, "b": [w * x]}))
    assert mirrored(lambda w, x: jax.jit(jax.checkpoint(lambda x: assert_mirrored(x) * 2))(x))
    assert mirrored(lambda w, x: lax.scan(lambda c, t: (assert_mirrored(c * t * x), None), w, w)[0])


def test_an_assertion_speaks_of_the_value_not_of_its_gradient():
    def step(w, x):
        return jax.value_and_grad(lambda w: jnp.sum(assert_mirrored(w) * x))(w)

    states = analyse(lambda w, x: step(w, x[0]), (W,), (X,)).outs
    assert [origin_of(state) is None for state in states] == [False, False]

    def through(w, x):
        return jax.value_and_grad(lambda w: assert_mirrored(jnp.sum(w * x)))(w)

    states = analyse(lambda w, x: through(w, x[0]), (W,), (X,)).outs
    assert [origin_of(state) is None for state in states] == [True, False]


def test_an_assertion_speaks_of_the_value_not_of_its_tangent():
    def step(w, x):
        return jax.jvp(assert_mirrored, (x[0],), (x[0],))

    states = analyse(step, (W,), (X,)).outs
    assert [origin_of(state) is None for state in states] == [True, False]


@pytest.mark.parametrize("diff", ["plain", "grad", "jvp"])
def test_an_assertion_by_its_bare_name_holds_only_where_nothing_is_differentiated(diff):
    def rx_assert_mirrored(x):
        return x

    claim = jax.jit(rx_assert_mirrored)
    fn = {
        "plain": lambda w, x: claim(x),
        "grad": lambda w, x: jax.grad(lambda w: claim(w * x).sum())(w),
        "jvp": lambda w, x: jax.jvp(lambda w: claim(w), (w,), (x,))[1],
    }[diff]

    assert mirrored(fn) == (diff == "plain")


# The tables.


def test_every_name_in_the_tables_is_a_primitive_of_jax():
    names = {thing.name for thing in gc.get_objects() if isinstance(thing, Primitive)}
    ours = {*row_table._RULES, *walk_table._STRUCTURE, *tables._LINEAR, *tables._BILINEAR}
    ours |= {*tables._CLEARING, *tables._SOURCES}

    assert ours <= names


def test_what_is_refused_here_would_have_gone_wrong_silently():
    """Why the analysis exists: JAX takes one replica's copy of a result that is said to be equal."""
    body = trace(lambda w, x: w * x[0], (W,), (X,))
    fn = jaxpr_as_fun(jax.extend.core.ClosedJaxpr(body, []))

    (out,) = jax.jit(sharded(fn, (P(), P("replica")), P()))(W, X)

    assert len({np.asarray(shard.data).tobytes() for shard in out.addressable_shards}) == REPLICAS
    assert origin_of(analyse(lambda w, x: w * x[0], (W,), (X,)).outs[0]) is not None
