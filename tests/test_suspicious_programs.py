"""Programs that look as if they were wrong and are right: none may be refused, and each gives the right numbers."""

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax as rx
from tests.test_wrong_programs import Bench, me

pytestmark = pytest.mark.timeout(60)

RIGHT = []

X = np.stack([np.arange(4.0), np.arange(4.0) + 1])
MEAN, SUM = X.mean(0), X.sum(0)


def right(expected):
    def add(program):
        RIGHT.append(pytest.param(program, expected, id=program.__name__.replace("_", "-")))
        return program

    return add


@right(1 - 0.1 * MEAN)
def plain_optax_after_a_reduce(b):
    optimizer = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(0.1))
    state = optimizer.init(b.w.value)

    def step(x):
        gradient = me().all_reduce("mean", jax.grad(lambda w: (w * x).sum())(b.w.value))
        updates, _ = optimizer.update(gradient, state, b.w.value)
        b.w.assign(optax.apply_updates(b.w.value, updates))

    b.s.run(step, (b.x,))
    return b.w.numpy()


@right(2 * np.ones(4))
def a_sum_of_a_mirrored_value_counts_each_replica(b):
    return b.s.run(lambda: me().all_reduce("sum", b.w.value))


@right(6.0)
def a_sum_of_a_constant(b):
    return b.s.run(lambda: me().all_reduce("sum", 3.0))


@right(MEAN)
def the_mean_of_a_mean(b):
    return b.s.run(lambda x: me().all_reduce("mean", me().all_reduce("mean", x)), (b.x,))


@right(SUM)
def the_largest_of_a_sum(b):
    return b.s.run(lambda x: me().all_reduce("max", me().all_reduce("sum", x)), (b.x,))


@right((X * SUM).sum(0))
def a_sum_with_something_per_replica_since(b):
    return b.s.run(lambda x: me().all_reduce("sum", x * me().all_reduce("sum", x)), (b.x,))


@right(MEAN)
def raw_pmean_of_a_pmean(b):
    return b.s.run(lambda x: lax.pmean(lax.pmean(x, "replica"), "replica"), (b.x,))


@right(2 * SUM)
def the_gradient_of_a_sum_is_a_sum_of_gradients(b):
    def step(x):
        return jax.grad(lambda v: (me().all_reduce("sum", v) ** 2).sum() / 2)(x)

    return b.s.reduce("mean", b.s.run(step, (b.x,)))


@right(2 * SUM)
def a_reduction_in_remat_under_grad(b):
    def step(x):
        return jax.grad(jax.checkpoint(lambda v: (me().all_reduce("sum", v) ** 2).sum() / 2))(x)

    return b.s.reduce("mean", b.s.run(step, (b.x,)))


@right(SUM)
def a_reduction_inside_a_cond_that_all_replicas_take(b):
    def step(x):
        return lax.cond(b.n.value == 0, lambda: me().all_reduce("sum", x), lambda: jnp.zeros(4))

    return b.s.run(step, (b.x,))


@right(4 * SUM)
def a_reduction_inside_a_scan(b):
    def step(x):
        def body(carry, factor):
            return carry + me().all_reduce("sum", x * factor), None

        return lax.scan(body, jnp.zeros(4), jnp.ones(4))[0]

    return b.s.run(step, (b.x,))


@right(SUM)
def a_reduction_inside_a_while_of_mirrored_length(b):
    def step(x):
        first = (0, jnp.zeros(4))
        return lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, me().all_reduce("sum", x)), first)[1]

    return b.s.run(step, (b.x,))


@right(MEAN)
def a_mean_inside_vmap(b):
    def step(x):
        return jax.vmap(lambda row: me().all_reduce("mean", row))(x[:, None])[:, 0]

    return b.s.run(step, (b.x,))


@right(np.array([2.0, 5.0, 8.0, 11.0]) - 1)
def assigned_inside_a_scan(b):
    def step():
        def body(carry, _):
            b.w.assign_add(b.w.value * 0 + jnp.arange(4.0))
            return carry, None

        lax.scan(body, 0.0, None, length=3)
        b.w.assign_add(jnp.zeros(4))

    b.s.run(step)
    return b.w.numpy()


@right(2 * np.ones(4))
def assigned_inside_a_cond(b):
    b.s.run(lambda: lax.cond(b.n.value == 0, lambda: b.w.assign_add(jnp.ones(4)), lambda: b.w.value))
    return b.w.numpy()


@right(0.9 + 0.1 * MEAN)
def batch_statistics_assigned_inside_the_loss(b):
    def step(x):
        def loss():
            b.w.assign(0.9 * b.w.value + 0.1 * me().all_reduce("mean", x))
            return (b.average.value * x).sum()

        return rx.value_and_grad(loss, [b.average])()[0]

    b.s.run(step, (b.x,))
    return b.w.numpy()


@right(0.9 + 0.1 * MEAN)
def assigned_inside_a_foreign_gradient(b):
    def step(x):
        def loss(v):
            b.w.assign(0.9 * b.w.value + 0.1 * me().all_reduce("mean", x))
            return (v * x).sum()

        return jax.grad(loss)(1.0)

    b.s.run(step, (b.x,))
    return b.w.numpy()


@right(np.ones(4) * 3)
def read_after_being_assigned(b):
    def step():
        b.w.assign(b.w.value + 1)
        b.w.assign(b.w.value + 1)
        return b.w.value

    return b.s.run(step)


@right(np.ones(4) * 2)
def a_merge_call_that_updates(b):
    def merge(strategy, value):
        strategy.extended.update(b.w, lambda v, g: v.assign_add(g), args=(strategy.reduce("mean", value) * 0 + 1,))

    b.s.run(lambda x: me().merge_call(merge, (x,)), (b.x,))
    return b.w.numpy()


@right(SUM)
def a_run_inside_a_merge_call(b):
    def merge(strategy, value):
        return strategy.reduce("sum", strategy.run(lambda v: v * 1.0, (value,)))

    return b.s.run(lambda x: me().merge_call(merge, (x,)), (b.x,))


@right(SUM)
def two_runs_in_one_function(b):
    @rx.function
    def both(x):
        half = b.s.run(lambda v: v / 2, (x,))
        return b.s.reduce("sum", b.s.run(lambda v: v * 2, (half,)))

    return both(b.x)


@right(np.zeros(4))
def the_same_noise_everywhere(b):
    def step():
        noise = jax.random.normal(jax.random.key(0), (4,))
        b.w.assign(noise - jax.random.normal(jax.random.key(0), (4,)))

    b.s.run(step)
    return b.w.numpy()


@right(MEAN)
def noise_per_replica_that_is_averaged_away(b):
    def step(x):
        noise = jax.random.normal(me().replica_key(jax.random.key(0)), (4,))
        b.w.assign(me().all_reduce("mean", x + noise) - me().all_reduce("mean", noise))

    b.s.run(step, (b.x,))
    return b.w.numpy().round(5)


@right(np.ones(4) * 7)
def a_promise_that_a_value_is_equal(b):
    def step():
        (value,) = (rx.assert_mirrored(me().replica_id_in_sync_group * 0 + 7),)
        b.w.assign(jnp.ones(4) * jnp.asarray(value, jnp.float32).reshape(()))

    b.s.run(step)
    return b.w.numpy()


@right(X[0])
def all_gather_and_take_the_first(b):
    def step(x):
        b.w.assign(me().all_gather(x[None], axis=0)[0])

    b.s.run(step, (b.x,))
    return b.w.numpy()


@right(1.0)
def a_branch_per_replica_without_a_meeting(b):
    out = b.s.run(lambda x: lax.cond(x.sum() > 7, lambda: 1.0, lambda: 0.0), (b.x,))
    return b.s.reduce("sum", out)


@right(SUM.sum())
def printing_from_a_step(b):
    def step(x):
        jax.debug.print("x = {}", x)
        jax.debug.callback(lambda value: None, x)
        return me().all_reduce("sum", x.sum())

    return b.s.run(step, (b.x,))


@right(np.float32(X[1].sum()))
def a_pure_callback_on_a_replicas_value(b):
    def step(x):
        return jax.pure_callback(lambda v: np.asarray(v).sum(), jax.ShapeDtypeStruct((), jnp.float32), x)

    return b.s.run(step, (b.x,)).values[1]


@right(np.ones(4))
def a_mirrored_argument_written_back(b):
    b.s.run(lambda v: b.w.assign(v), (jnp.ones(4),))
    return b.w.numpy()


@right(5)
def a_changing_step_number(b):
    for number in range(6):
        out = b.s.run(lambda n: b.n.assign(n), (number,))
    return out


@right(np.zeros((0, 3)))
def nothing_at_all_per_replica(b):
    empty = b.s.experimental_distribute_values_from_function(lambda c: jnp.zeros((0, 3)))
    return b.s.gather(b.s.run(lambda x: x * 2, (empty,)), axis=0)


@right(2)
def booleans_are_counted(b):
    return b.s.run(lambda x: me().all_reduce("sum", x.sum() > 0), (b.x,))


@right(0.5)
def integers_have_a_mean(b):
    return b.s.run(lambda: me().all_reduce("mean", me().replica_id_in_sync_group))


@right(X[1][::-1])
def a_function_with_none_and_strings_in_its_result(b):
    out = b.s.run(lambda x: {"a": None, "b": ("text", x[::-1])}, (b.x,))
    assert out["a"] is None and out["b"][0] == "text"
    return out["b"][1].values[1]


@right(MEAN)
def the_same_buffer_passed_twice(b):
    return b.s.run(lambda x, y: me().all_reduce("mean", (x + y) / 2), (b.x, b.x))


@right(np.ones(4) * 2)
def a_variables_value_kept_while_the_variable_moves_on(b):
    kept = b.w.value
    b.s.run(lambda: b.w.assign(b.w.value + 1))
    b.s.run(lambda: b.w.assign(b.w.value + 1))
    return kept + b.w.value * 0 + 1


@right(np.ones(4) * 2)
def a_variables_value_passed_to_the_step_that_writes_it(b):
    b.s.run(lambda v: b.w.assign(v + 1), (b.w.value,))
    return b.w.numpy()


@right(np.ones(4) * 3)
def a_variable_as_an_argument(b):
    b.s.run(lambda v: v.assign(v.value + 2), (b.w,))
    return b.w.numpy()


@right(np.ones(4))
def state_in_state_out(b):
    state = {"w": np.zeros(4, np.float32), "step": 0}

    def step(state, x):
        gradient = me().all_reduce("mean", x * 0 + 1)
        return {"w": state["w"] + gradient, "step": state["step"] + 1}

    state = b.s.run(step, (state, b.x))
    assert isinstance(state["w"], jax.Array)
    return state["w"]


@right(4.0)
def a_lambda_made_anew_each_time(b):
    for _ in range(3):
        out = b.s.run(lambda x: me().all_reduce("mean", x.size), (b.x,))
    return out


@right(9.0)
def a_partial_made_anew_each_time(b):
    def step(x, k):
        return jnp.ones((k, k)).sum() + 0 * x.sum()

    return b.s.run(functools.partial(step, k=3), (b.x,)).values[0]


@right(3.0)
def an_on_read_variable_counts_apart_and_reads_together(b):
    b.s.run(lambda: b.seen.assign_add(1.0 + me().replica_id_in_sync_group))
    return b.seen.numpy()


@right(np.ones(4) * 8)
def a_custom_gradient_around_a_reduction(b):
    @jax.custom_vjp
    def total(v):
        return me().all_reduce("sum", v)

    total.defvjp(lambda v: (total(v), None), lambda _, g: (g * 8,))
    return b.s.run(lambda x: jax.grad(lambda v: total(v).sum())(x), (b.x,))


# -- what a step takes from its surroundings


@right([1.0, 2.0, 4.0])
def a_captured_number_that_is_rebound(b):
    rate = 1.0

    def step():
        return rate * jnp.ones(())

    out = []
    for _ in range(3):
        out.append(b.s.run(step))
        rate *= 2
    return out


@right([0.0, 0.1, 0.2, 0.3, 0.4])
def a_function_made_anew_around_another_number_each_time(b):
    out = []
    for i in range(5):
        rate = 0.1 * i  # a float that lives where the last one lived
        out.append(b.s.run(lambda: rate * jnp.ones(())))  # noqa: B023
    return out


RATE = 1.0


@right([1.0, 3.0, 1.0])
def a_global_that_is_rebound(b):
    global RATE
    out = []
    for rate in (1.0, 3.0, 1.0):
        RATE = rate
        out.append(b.s.run(lambda: half_the_rate() * 2))
    return out


def half_the_rate():
    return RATE * jnp.full((), 0.5)


@right([1.0, 5.0])
def an_attribute_that_is_set(b):
    class Model:
        scale = 1.0

        def __init__(self):
            self.scale = 1.0

        def step(self):
            return self.scale * jnp.ones(())

    model = Model()
    first = b.s.run(model.step)
    model.scale = 5.0
    return [first, b.s.run(model.step)]


@right([1.0, 2.0, 3.0])
def a_captured_array_that_is_rebound_around_a_compiled_function(b):
    shift = jnp.zeros(())

    @rx.function
    def outer():
        return b.s.reduce("mean", b.s.run(lambda: jnp.ones(()) + shift))

    out = []
    for i in range(3):
        shift = jnp.float32(i)
        out.append(outer())
    return out


@right(1.0)
def a_variable_made_in_a_step_whose_surroundings_change(b):
    made, rate = [], 1.0

    def step():
        variable = rx.Variable(jnp.ones(()), name="made")
        made.append(variable)
        return variable.value * rate

    b.s.run(step)
    rate = 2.0
    b.s.run(step)
    return float(made[0] is made[1])


@right(6.0)
def a_callable_object_without_a_hash(b):
    class Scale:
        __hash__ = None

        def __call__(self, x):
            return x.sum()

    scale = Scale()
    return [b.s.run(scale, (b.x,)).values[0] for _ in range(2)][1]


@right(1.0)
def an_argument_whose_equality_says_nothing(b):
    class Holder:
        def __init__(self):
            self.array = np.ones(3)

        def __eq__(self, other):
            return self.array == other.array

        def __hash__(self):
            return 7

    return [b.s.run(lambda holder: holder.array[0], (Holder(),)) for _ in range(2)][1]


# -- values that pass through


@right(X)
def a_value_per_replica_that_the_step_reached_by_closure(b):
    return np.stack(b.s.run(lambda: b.x).values)


@right(X)
def a_value_per_replica_returned_by_a_compiled_function(b):
    return np.stack(rx.function(lambda: b.x)().values)


@right(np.ones(4))
def a_variables_value_donated(b):
    b.s.run(lambda v: v + 1, (b.w.value,), options=rx.RunOptions(donate=(0,)))
    return b.w.numpy()


@right(SUM)
def a_gradient_across_replicas(b):
    @rx.function
    def gradient():
        def loss():
            return b.s.reduce("sum", b.s.run(lambda x: (b.w.value * x).sum(), (b.x,)))

        return rx.grad(loss, b.w)()

    return gradient()


@right(X[1] * 2)
def a_run_without_variables_inside_a_foreign_jit(b):
    def step(x):
        return x * 2 + jnp.zeros(100)[:1]

    inside = jax.jit(lambda x: b.s.run(step, (x,)))(b.x)
    np.testing.assert_array_equal(b.s.run(step, (b.x,)).values[1], inside.values[1])
    return inside.values[1]


@right(np.ones(4) * 5)
def a_scope_object_shared_by_threads(b):
    scope, out = b.s.scope(), []

    def make(number, go):
        with scope:
            go.wait()
            out.append((number, rx.get_strategy() is b.s))

    go = threading.Event()
    threads = [threading.Thread(target=make, args=(i, go)) for i in range(4)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(out) == [(i, True) for i in range(4)]
    return np.ones(4) * 5


@right(7.0)
def a_step_that_failed_before_it_was_mended(b):
    broken, made = [True], []

    def step():
        made.append(rx.Variable(jnp.full((), 7.0), name="made"))
        if broken.pop() if broken else False:
            raise ValueError("not yet")
        return made[-1].value

    with pytest.raises(ValueError, match="not yet"):
        b.s.run(step)
    return b.s.run(step)


@right(1 - 0.1 * MEAN / 2 + 0.5)
def a_variable_as_an_array_of_jitted_functions(b):
    def step(x):
        gradient = jax.grad(lambda w: (jnp.square(w) * x).sum() / 4)(b.w)
        finite = jnp.isfinite(b.w).all()
        b.w.assign(jnp.where(finite, b.w - 0.1 * me().all_reduce("mean", gradient), b.w) + jnp.minimum(b.w, 0.5))

    b.s.run(step, (b.x,))
    return jnp.asarray(b.w)


@right(20.0)
def a_variable_as_an_argument_of_a_foreign_jit(b):
    double = jax.jit(lambda w: 2 * w.sum())
    before = double(b.w)
    b.w.assign(b.w * 1.5)
    return before + double(b.w)


@right(4.0)
def a_gradient_through_a_jitted_function_of_a_variable(b):
    gradient = b.s.run(lambda: rx.grad(lambda: jnp.sum(jax.nn.relu(b.w)), [b.w])())
    return jnp.sum(gradient[0])


@right(X[0].sum())
def a_value_per_replica_that_was_captured_and_is_computed_with(b):
    apart = b.s.run(lambda: (b.x * 2 - b.x)[0:4] @ jnp.ones(4))
    return b.s.experimental_local_results(apart)[0]


@right(SUM)
def a_second_sum_that_is_divided_by_the_replicas_line_by_line(b):
    def step(x):
        return lax.psum(lax.psum(x, "replica"), "replica") / lax.psum(1, "replica")

    return b.s.run(step, (b.x,), options=rx.RunOptions(eager=True))


@right(SUM)
def a_dictionary_with_defaults_comes_back_as_one(b):
    def step(x):
        sums = collections.defaultdict(float)
        sums["x"] += me().all_reduce("sum", x)
        return sums

    eager, compiled = (b.s.run(step, (b.x,), options=rx.RunOptions(eager=eager)) for eager in (True, False))
    assert eager.default_factory is compiled.default_factory is float
    np.testing.assert_array_equal(eager["x"], compiled["x"])
    return eager["x"]


@right(2.0)
def what_a_value_per_replica_lacks_is_asked_for(b):
    return 2.0 - hasattr(b.x, "shape") - hasattr(b.x, "no_such_thing")


@pytest.mark.parametrize(("program", "expected"), RIGHT)
def test_is_accepted_and_right(program, expected):
    np.testing.assert_allclose(np.asarray(program(Bench())), expected, rtol=1e-6, atol=1e-6)


def test_there_are_enough_of_them():
    assert len(RIGHT) >= 40
