"""A wrong program is refused before it runs, in the user's words, naming the user's line.

Each function below is a program with one mistake. Where a line of it is to blame, that line is marked HERE and the
message must name it. Nothing may hang: each has a deadline.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax as rx

pytestmark = pytest.mark.timeout(60)

WRONG = []


def wrong(error, *says):
    def add(program):
        WRONG.append(pytest.param(program, error, says, id=program.__name__.replace("_", "-")))
        return program

    return add


class Bench:
    """What every program starts with: a strategy of two replicas, a value per replica, some variables."""

    def __init__(self):
        self.s = rx.MirroredStrategy(jax.devices()[:2])
        self.x = self.s.experimental_distribute_values_from_function(
            lambda c: jnp.arange(4.0) + c.replica_id_in_sync_group
        )
        with self.s.scope():
            self.w = rx.Variable(jnp.ones(4), name="w")
            self.n = rx.Variable(0, name="n")
            self.total = rx.Variable(0.0, name="total", aggregation="sum")
            self.average = rx.Variable(0.0, name="average", aggregation="mean")
            self.seen = rx.Variable(0.0, name="seen", synchronization="on_read", aggregation="sum")
            self.apart = rx.Variable(0.0, name="apart", synchronization="on_read")
        self.before = [v.numpy() for v in (self.w, self.n, self.total, self.average, self.seen)]

    def step_that_writes(self):
        self.w.assign(self.w.value * 1.0)

    def unchanged(self):
        after = [v.numpy() for v in (self.w, self.n, self.total, self.average, self.seen)]
        return all(np.array_equal(a, b) for a, b in zip(self.before, after, strict=True))


def me():
    return rx.get_replica_context()


# -- one number where replicas have several


@wrong(rx.LocalityError, "mirrored variable 'w'", "argument 'x' differs per replica")
def forgotten_reduce(b):
    def step(x):
        gradient = jax.grad(lambda w: (w * x).sum())(b.w.value)
        b.w.assign_sub(0.1 * gradient)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def one_of_two_terms_is_not_reduced(b):
    def step(x):
        good = me().all_reduce("mean", x)
        b.w.assign(good + x)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "the replica id was read")
def replica_id_goes_into_a_mirrored_variable(b):
    def step():
        b.n.assign(me().replica_id_in_sync_group)  # HERE

    b.s.run(step)


@wrong(rx.LocalityError, "'w'", "the replica id was read")
def per_replica_noise_goes_into_a_mirrored_variable(b):
    def step():
        key = me().replica_key(jax.random.key(0))
        b.w.assign_add(jax.random.normal(key, (4,)))  # HERE

    b.s.run(step)


@wrong(rx.LocalityError, "'w'")
def dropout_with_a_key_per_replica_outside_the_loss(b):
    def step(x):
        mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), me().replica_id_in_sync_group), 0.5, (4,))
        b.w.assign(b.w.value * mask)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def plain_optax_with_unreduced_gradients(b):
    optimizer = optax.adam(0.1)
    state = optimizer.init(b.w.value)

    def step(x):
        gradient = jax.grad(lambda w: (w * x).sum())(b.w.value)
        updates, _ = optimizer.update(gradient, state, b.w.value)
        b.w.assign(optax.apply_updates(b.w.value, updates))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def gradients_said_to_be_reduced_already(b):
    with b.s.scope():
        optimizer = rx.Optimizer(optax.sgd(0.1), gradients="mean")

    def step(x):
        gradients = rx.grad(lambda: (b.w.value * x).sum(), [b.w])()
        optimizer.apply_gradients(zip(gradients, [b.w], strict=True), aggregate=False)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def permuted_values_are_not_reduced(b):
    def step(x):
        b.w.assign(lax.ppermute(x, "replica", [(0, 1), (1, 0)]))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def a_group_of_replicas_is_not_all_of_them(b):
    def step(x):
        b.w.assign(lax.psum(x, "replica", axis_index_groups=[[0], [1]]))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def a_branch_chosen_per_replica(b):
    def step(x):
        b.w.assign(lax.cond(x.sum() > 7, lambda: jnp.ones(4), lambda: jnp.zeros(4)))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def a_loop_as_long_as_the_replica_likes(b):
    def step(x):
        grown = lax.while_loop(lambda v: v.sum() < x.sum(), lambda v: v + 1.0, jnp.zeros(4))
        b.w.assign(grown)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def an_unreduced_write_inside_a_scan(b):
    def step(x):
        def body(carry, _):
            b.w.assign(b.w.value + x)  # HERE
            return carry, None

        lax.scan(body, 0.0, None, length=3)

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def a_callback_may_answer_differently_on_each_replica(b):
    def step(x):
        answer = jax.experimental.io_callback(lambda: np.ones(4, np.float32), jax.ShapeDtypeStruct((4,), jnp.float32))
        b.w.assign(answer)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'", "has a component of each replica's own")
def an_on_read_variable_is_copied_into_a_mirrored_one(b):
    def step():
        b.w.assign(b.w.value * b.seen.value)  # HERE

    b.s.run(step)


@wrong(rx.LocalityError, "'w'")
def batch_statistics_that_were_not_reduced(b):
    def step(x):
        def loss():
            b.w.assign(0.9 * b.w.value + 0.1 * x)  # HERE
            return (b.w.value * x).sum()

        return rx.value_and_grad(loss, [b.average])()[0]

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "'w'")
def an_unreduced_value_leaves_a_merge_call(b):
    def merge(strategy, value):
        return value

    def step(x):
        b.w.assign(me().merge_call(merge, (x,)))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "makes the variable 'a'")
def a_variable_made_from_a_replicas_own_value(b):
    b.s.run(lambda x: rx.Variable(x * 2, name="a"), (b.x,))


# -- reduced twice, or where replicas would wait for each other


@wrong(rx.LocalityError, "a second time")
def summed_twice(b):
    def step(x):
        once = me().all_reduce("sum", x)
        return me().all_reduce("sum", once)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "a second time")
def the_sum_of_a_mean(b):
    def step(x):
        mean = me().all_reduce("mean", x)
        return me().all_reduce("sum", mean * 2.0)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "a second time")
def reduced_by_hand_and_by_the_optimizer(b):
    with b.s.scope():
        optimizer = rx.Optimizer(optax.sgd(0.1), gradients="sum")

    def step(x):
        (gradient,) = rx.grad(lambda: (b.w.value * x).sum(), [b.w])()
        gradient = me().all_reduce("sum", gradient)
        optimizer.apply_gradients([(gradient, b.w)])  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "a second time")
def reduced_and_then_assigned_with_aggregation(b):
    def step(x):
        b.total.assign(me().all_reduce("sum", x.sum()))  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "would wait for ever")
def a_reduction_inside_a_diverging_cond(b):
    def step(x):
        return lax.cond(x.sum() > 7, lambda: me().all_reduce("sum", x), lambda: x)  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "would wait for ever")
def a_raw_psum_inside_a_diverging_switch(b):
    def step(x):
        branch = me().replica_id_in_sync_group
        return lax.switch(branch, [lambda: x, lambda: lax.psum(x, "replica")])  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "would wait for ever")
def a_reduction_in_a_loop_of_diverging_length(b):
    def step(x):
        def body(state):
            count, value = state
            return count + 1, me().all_reduce("mean", value)  # HERE

        return lax.while_loop(lambda state: state[0] < x.sum(), body, (0.0, x))

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "would wait for ever")
def an_aggregating_assign_inside_a_diverging_cond(b):
    def step(x):
        lax.cond(x.sum() > 7, lambda: b.average.assign(x.sum()), lambda: b.average.value)  # HERE

    b.s.run(step, (b.x,))


# -- the wrong place


@wrong(rx.ContextError, "inside a replica", "merge_call")
def run_inside_run(b):
    b.s.run(lambda: b.s.run(lambda: 1))


@wrong(rx.ContextError, "inside a replica")
def reduce_inside_a_replica(b):
    b.s.run(lambda x: b.s.reduce("sum", x), (b.x,))


@wrong(rx.ContextError, "all_gather")
def gather_inside_a_replica(b):
    b.s.run(lambda x: b.s.gather(x, axis=0), (b.x,))


@wrong(rx.ContextError, "inside a replica")
def scope_inside_a_replica(b):
    def step():
        with b.s.scope():
            return 1

    b.s.run(step)


@wrong(rx.ContextError, "Mixing different")
def another_strategys_scope(b):
    with rx.MirroredStrategy(jax.devices()[2:4]).scope():
        b.s.run(lambda: 1)


@wrong(rx.ContextError, "Mixing different")
def another_strategys_variable(b):
    other = rx.MirroredStrategy(jax.devices()[2:4])
    other.run(lambda: b.w.value + 1)


@wrong(rx.ContextError, "Need to be inside")
def a_replica_context_kept_for_later(b):
    kept = []
    b.s.run(lambda: kept.append(me()))
    with b.s.scope():
        kept[0].all_reduce("sum", 1.0)


@wrong(rx.ContextError, "cross-replica context")
def apply_gradients_across_replicas(b):
    with b.s.scope():
        optimizer = rx.Optimizer(optax.sgd(0.1), gradients="mean")
        optimizer.apply_gradients([(jnp.ones(4), b.w)])


@wrong(rx.ContextError, "rx.function")
def a_foreign_jit_reads_a_variable(b):
    jax.jit(lambda x: x * b.w.value)(1.0)


@wrong(rx.ContextError, "rx.function")
def a_foreign_jit_assigns_a_variable(b):
    jax.jit(lambda x: b.total.assign(x))(1.0)


@wrong(rx.ContextError, "rx.function")
def a_jit_inside_the_step_reads_a_variable(b):
    b.s.run(lambda x: jax.jit(lambda y: y * b.w.value)(x), (b.x,))


# -- wrong values


@wrong(rx.LocalityError, "PerReplica object")
def a_value_per_replica_as_one_array(b):
    jnp.sin(b.x)


@wrong(TypeError, "strategy.run(fn, args=(value,))")
def arithmetic_on_a_value_per_replica(b):
    b.x + 1


@wrong(rx.LocalityError, "counted once")
def the_sum_of_a_value_that_is_the_same_everywhere(b):
    b.s.reduce("sum", 3.0)


@wrong(rx.LocalityError, "differs per replica")
def a_value_per_replica_assigned_across_replicas(b):
    b.w.assign(b.x)


@wrong(rx.VariableError, "another shape", "[4]", "[3]")
def an_assignment_of_another_shape(b):
    b.s.run(lambda: b.w.assign(jnp.ones(3)))


@wrong(rx.VariableError, "A Python number is the same on every replica")
def a_python_number_into_a_summing_variable(b):
    b.s.run(lambda: b.total.assign_add(1.0))


@wrong(rx.VariableError, "does not support `assign_add`")
def adding_to_a_summed_on_read_variable_across_replicas(b):
    b.seen.assign_add(1.0)


@wrong(rx.VariableError, "Could not convert")
def reading_components_that_have_no_aggregation(b):
    b.apart.numpy()


@wrong(rx.VariableError, "non-floating dtype")
def the_mean_of_integers(b):
    with b.s.scope():
        rx.Variable(0, aggregation="mean")


@wrong(rx.InputError, "differ in shape", "replica 1")
def uneven_inputs_for_a_compiled_step(b):
    b.s.run(lambda x: x.sum(), (rx.PerReplica((jnp.ones(3), jnp.ones(2))),))


@wrong(rx.StaticArgumentError, "functools.partial")
def a_number_argument_as_a_shape(b):
    def step(x, k):
        return x.sum() + jnp.zeros(k)  # HERE

    b.s.run(step, (b.x, 3))


@wrong(rx.StaticArgumentError, "jnp.where")
def an_if_on_a_traced_value(b):
    def step(x):
        if x.sum() > 0:  # HERE
            return x
        return -x

    b.s.run(step, (b.x,))


@wrong(rx.StaticArgumentError, "hashable")
def an_argument_that_is_neither_array_nor_hashable(b):
    b.s.run(lambda x, table: x, (b.x, {1, 2}))


@wrong(rx.InputError, "list or tuple")
def arguments_that_are_no_tuple(b):
    b.s.run(lambda x: x, jnp.ones(3))


@wrong(rx.InputError, "of other replicas")
def a_value_of_another_strategy(b):
    rx.MirroredStrategy(jax.devices()[2:4]).run(lambda x: x, (b.x,))


@wrong(ValueError, "not a valid ReduceOp", "mean")
def an_unknown_reduction(b):
    b.s.reduce("median", b.x)


@wrong(TypeError, "gradients")
def an_optimizer_without_the_choice(b):
    rx.Optimizer(optax.sgd(0.1))


@wrong(rx.LocalityError, "combines the rows of a padded batch", "rx.mean")
def a_mean_over_padding(b):
    def step(x):
        return x.mean()  # HERE

    dataset = b.s.distribute_dataset(rx.data.from_arrays(np.ones((6, 2), np.float32), batch_size=4))
    b.s.run(step, (next(iter(dataset)),))  # a full one: the short one is yet to come


@wrong(rx.InputError, "from_arrays")
def a_bare_array_as_a_dataset(b):
    b.s.distribute_dataset(np.ones((6, 2)))


@wrong(rx.ContextError, "rx.function", "`w.read`")
def a_run_inside_a_foreign_jit_reads_a_variable(b):
    jax.jit(lambda x: b.s.run(lambda x: x * b.w.value, (x,)))(b.x)


@wrong(rx.ContextError, "rx.function", "`w.assign`")
def a_run_inside_a_foreign_jit_assigns_a_variable(b):
    b.s.run(b.step_that_writes)
    jax.jit(lambda: b.s.run(b.step_that_writes))()


@wrong(rx.ContextError, "rx.function", "`w.read`")
def a_loop_around_a_run_reads_a_variable(b):
    jax.lax.fori_loop(0, 3, lambda i, x: b.s.run(lambda x: x * b.w.value, (x,)), jnp.ones(4))


@wrong(rx.ContextError, "jax.vmap", "'w'")
def a_vmapped_run_assigns_a_variable(b):
    jax.vmap(lambda a: b.s.run(lambda a: b.w.assign(b.w.value * a), (a,)))(jnp.arange(3.0))


@wrong(rx.ContextError, "line by line inside jax.jit")
def a_run_line_by_line_inside_a_jit(b):
    eager = rx.MirroredStrategy(jax.devices()[:2], eager=True)
    jax.jit(lambda x: eager.run(lambda x: x * 2, (x,)))(jnp.ones(4))


@wrong(rx.StaticArgumentError, "a generator", "has not run")
def a_step_with_yield(b):
    def step(x):
        b.w.assign(b.w.value + 1)
        yield x

    b.s.run(step, (b.x,))


@wrong(rx.StaticArgumentError, "a coroutine", "has not run")
def a_step_that_is_async(b):
    async def step(x):
        b.w.assign(b.w.value + 1)

    b.s.run(step, (b.x,))


@wrong(rx.InputError, "got an iterator as args[0]", "next(iterator)")
def an_iterator_as_an_argument(b):
    batches = iter(b.s.distribute_dataset([np.ones(4, np.float32)] * 3))

    @rx.function
    def train(iterator):
        return b.s.run(lambda x: x.sum(), (next(iterator),))

    train(batches)


@wrong(rx.InputError, "being compiled", "run_steps")
def an_iterator_read_while_a_program_is_traced(b):
    batches = iter(b.s.distribute_dataset([np.ones(4, np.float32)] * 3))
    rx.function(lambda: b.s.run(lambda x: x.sum(), (next(batches),)))()


@wrong(rx.StructureError, "Box.content", "register_dataclass")
def a_result_hidden_in_an_object(b):
    class Box:
        def __init__(self, content):
            self.content = content

    b.s.run(lambda x: Box({"x": x * 2}), (b.x,))


@wrong(rx.StructureError, "holds arrays of the step")
def a_result_hidden_in_a_function(b):
    b.s.run(lambda x: lambda: x + 1, (b.x,))


@wrong(rx.StructureError, "compared with each other")
def keys_of_several_kinds(b):
    b.s.run(lambda table: 1, ({"a": 1.0, 3: 2.0},))


@wrong(rx.StructureError, "compared with each other")
def results_under_keys_of_several_kinds(b):
    b.s.run(lambda x: {"a": x, 3: x}, (b.x,))


@wrong(rx.InputError, "an array that JAX cannot hold", "args[0]['text']")
def text_in_an_array(b):
    b.s.run(lambda batch: 1, ({"text": np.array(["a", "b"])},))


@wrong(rx.InputError, "does not fit into int32", "args[1] = 1099511627776")
def a_number_that_does_not_fit(b):
    def step(x, number):
        return x * number

    b.s.run(step, (b.x, 3))
    b.s.run(step, (b.x, 2**40))


@wrong(rx.InputError, "3 components, 2 replicas")
def too_many_components(b):
    b.s.run(lambda x: x, (rx.PerReplica((1.0, 2.0, 3.0)),))


@wrong(rx.InputError, "has been deleted", "args[0]", "donate")
def a_donated_argument_passed_again(b):
    def step(x):
        return x + 1

    x = b.s.run(step, (b.x,))
    b.s.run(step, (x,), options=rx.RunOptions(donate=(0,)))
    b.s.run(step, (x,))


@wrong(rx.InputError, "has been deleted", "donate")
def a_donated_value_opened(b):
    x = b.s.run(lambda x: x + 1, (b.x,))
    b.s.run(lambda x: x + 1, (x,), options=rx.RunOptions(donate=(0,)))
    assert "deleted" in repr(x)
    b.s.experimental_local_results(x)


@wrong(rx.InputError, "several times", "args[0]", "args[1]['again']")
def a_donated_argument_that_is_passed_twice(b):
    x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(b.x.data.sharding.mesh, jax.sharding.PartitionSpec()))
    b.s.run(lambda x, y: x + y["again"], (x, {"again": x}), options=rx.RunOptions(donate=(0,)))


@wrong(rx.InputError, "with 1 positional arguments")
def a_donated_argument_that_does_not_exist(b):
    b.s.run(lambda x: x + 1, (b.x,), options=rx.RunOptions(donate=(1,)))


@wrong(ValueError, "positions of arguments")
def a_donated_argument_by_name(b):
    rx.RunOptions(donate=("x",))


@wrong(TypeError, "not an rx.RunOptions")
def options_that_are_none(b):
    b.s.run(lambda x: x, (b.x,), options={"eager": True})


@wrong(TypeError, "the step is not a function")
def the_result_of_a_call_in_place_of_the_step(b):
    b.s.run((lambda: 3.0)(), (b.x,))


@wrong(rx.InputError, "keyword args must be a dictionary")
def keywords_as_pairs(b):
    b.s.run(lambda k: k, (), [("k", 2.0)])


@wrong(rx.InputError, "merge_call(fn, args=float32[4])", "list or tuple")
def arguments_of_a_merge_call_that_are_no_tuple(b):
    b.s.run(lambda x: me().merge_call(lambda strategy, *values: len(values), x), (b.x,))


@wrong(rx.LocalityError, "strategy.gather(value, axis)")
def components_asked_for_inside_a_jit(b):
    jax.jit(lambda x: b.s.experimental_local_results(x)[0])(b.x)


def result(b):
    return b.s.run(lambda x: x.sum(), (b.x,))


@wrong(rx.LocalityError, 'strategy.reduce("mean", value)')
def a_result_in_a_python_condition(b):
    print("good" if result(b) < 3.0 else "bad")


@wrong(TypeError, 'strategy.reduce("mean", value)')
def a_result_as_a_python_number(b):
    float(result(b))


@wrong(ValueError, 'strategy.reduce("mean", value)')
def a_result_in_a_formatted_text(b):
    print(f"loss {result(b):.3f}")


@wrong(rx.LocalityError, 'strategy.reduce("mean", value)')
def a_result_added_to_a_total(b):
    total = 0.0
    total += result(b)


@wrong(AttributeError, "item", "strategy.")
def a_method_of_arrays_on_a_result(b):
    result(b).item()


@wrong(rx.LocalityError, "strategy.experimental_local_results(value)")
def an_element_of_a_result(b):
    result(b)[0]


@wrong(rx.LocalityError, 'strategy.reduce("mean", value)')
def a_result_inside_a_foreign_jit(b):
    jax.jit(lambda r: r + 1)(result(b))


@wrong(rx.StaticArgumentError, "left behind", "variable.assign(x)")
def a_value_kept_from_an_earlier_step(b):
    kept = []
    b.s.run(lambda x: kept.append(x.sum()), (b.x,))

    def step(x):
        return kept[0] + x  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.StaticArgumentError, "left behind")
def a_value_kept_from_a_loop_body(b):
    def step(x):
        kept = []
        lax.scan(lambda total, row: (total + row, kept.append(row)), 0.0, x)
        return kept[0] + 1  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.StaticArgumentError, "jnp.where(mask, x, 0)")
def elements_picked_by_a_mask(b):
    def step(x):
        return x[x > 1].sum()  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.StaticArgumentError, "jax.debug.print")
def a_number_formatted_while_it_is_traced(b):
    def step(x):
        print(f"{x.sum():.2f}")  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.ContextError, 'jax.lax.pmean(x, "replica")')
def an_axis_from_a_program_for_pmap(b):
    def step(x):
        return lax.pmean(x, "batch")  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.ContextError, "jax.vmap")
def a_pmap_inside_a_step(b):
    def step(x):
        return jax.pmap(lambda row: row * 2)(x[None])  # HERE

    b.s.run(step, (b.x,))


@wrong(TypeError, "variable.assign(variable.value.at[index].set(x))")
def an_item_of_a_variable_is_assigned(b):
    b.w[0] = 1.0


@wrong(rx.VariableError, "x is no array and no number", "x = None")
def nothing_is_assigned(b):
    def step():
        b.w.assign(None)

    b.s.run(step)


@wrong(rx.VariableError, "jnp.broadcast_to(x, variable.shape)")
def a_scalar_is_assigned_to_a_vector(b):
    b.w.assign(1.0)


@wrong(rx.LocalityError, "a second time", "summed or averaged before at")
def summed_by_hand_and_by_an_optimizer_that_runs_line_by_line(b):
    b.s = rx.MirroredStrategy(jax.devices()[:2], eager=True)
    with b.s.scope():
        w = rx.Variable(jnp.ones(4), name="w")
    optimizer = rx.Optimizer(optax.sgd(0.1), gradients="sum")

    def step(x):
        gradient = me().all_reduce("sum", jax.grad(lambda v: (v * x).sum())(w.value))
        optimizer.apply_gradients([(gradient, w)])  # HERE

    b.s.run(step, (b.x,))


@wrong(rx.LocalityError, "a second time")
def a_second_sum_that_is_weighted_line_by_line(b):
    def step(x):
        total = me().all_reduce("sum", x)
        return me().all_reduce("sum", total) * jnp.array([0.1, 0.2, 0.3, 0.4])  # not divided by 2 replicas

    b.s.run(step, (b.x,), options=rx.RunOptions(eager=True))


@wrong(rx.LocalityError, "a second time")
def a_sum_of_a_sum_in_a_merge_function_that_runs_line_by_line(b):
    def step(x):
        total = me().all_reduce("sum", x)
        return me().merge_call(lambda strategy, v: strategy.reduce("sum", v), (total,))  # HERE

    b.s.run(step, (b.x,), options=rx.RunOptions(eager=True))


@wrong(rx.LocalityError, "mirrored variable 'w'", "the replica id was read")
def noise_per_replica_in_a_step_that_runs_line_by_line(b):
    def step():
        noise = jax.random.normal(me().replica_key(jax.random.key(0)), (4,))
        b.w.assign(noise)  # HERE

    b.s.run(step, options=rx.RunOptions(eager=True))


@wrong(rx.ContextError, "strategy.lower(...) inside a replica")
def lowering_inside_a_replica(b):
    b.s.run(lambda: b.s.lower(lambda: 1))


@pytest.mark.parametrize(("program", "error", "says"), WRONG)
def test_is_refused_before_it_runs(program, error, says):
    bench = Bench()

    with pytest.raises(error) as raised:
        program(bench)

    text = str(raised.value)
    for fragment in says:
        assert fragment in text
    lines, start = inspect.getsourcelines(program)
    for i, line in enumerate(lines):
        if "# HERE" in line:
            assert f"{__file__}:{start + i}" in text
    assert bench.unchanged()


def test_messages_speak_of_collectives_as_users_write_them():
    bench = Bench()

    def step(x):
        return lax.cond(x.sum() > 0, lambda: me().all_reduce("mean", x), lambda: x)

    with pytest.raises(rx.LocalityError, match=r'lets replicas meet \(all_reduce\("mean"\)\)'):
        bench.s.run(step, (bench.x,))


def test_what_jax_says_of_a_kept_value_names_the_users_function():
    bench, kept = Bench(), []

    def keeping_step(x):
        kept.append(x.sum())

    bench.s.run(keeping_step, (bench.x,))

    with pytest.raises(jax.errors.UnexpectedTracerError, match=f"keeping_step at {__file__}"):
        kept[0] + 1


def test_there_are_enough_of_them():
    assert len(WRONG) >= 40


def test_the_strategy_works_on_after_a_refusal():
    bench = Bench()
    with pytest.raises(rx.LocalityError):
        bench.s.run(lambda x: bench.w.assign(x), (bench.x,))

    bench.s.run(lambda x: bench.w.assign(me().all_reduce("mean", x)), (bench.x,))

    np.testing.assert_allclose(bench.w.numpy(), [0.5, 1.5, 2.5, 3.5])


def test_a_partial_is_the_way_out_that_the_message_promises():
    bench = Bench()

    out = bench.s.run(functools.partial(lambda x, k: x.sum() + jnp.zeros(k), k=3), (bench.x,))

    assert out.values[0].shape == (3,)
