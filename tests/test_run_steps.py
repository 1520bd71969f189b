"""K steps in one program are K steps: the same numbers, the same end of the data, one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

STRATEGIES = {
    "default": rx.get_strategy,
    "one-device": lambda: rx.OneDeviceStrategy("cpu:0"),
    **{f"mirrored-{n}": (lambda n=n: rx.MirroredStrategy(jax.devices()[:n])) for n in (1, 2, 4)},
    "mirrored-2-eager": lambda: rx.MirroredStrategy(jax.devices()[:2], eager=True),
    "central-2": lambda: rx.experimental.CentralStorageStrategy(jax.devices()[:2], jax.devices()[2]),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request):
    return request.param()


@pytest.fixture
def two():
    return rx.MirroredStrategy(jax.devices()[:2])


class Model:
    """A linear model, trained with momentum; `seen` counts rows on each replica."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = rx.Variable(jnp.full(3, 0.5))
            self.seen = rx.Variable(0, synchronization="on_read", aggregation="sum")
            self.optimizer = rx.Optimizer(optax.sgd(0.05, momentum=0.9), gradients="mean")

    def replica_step(self, x, y):
        loss, gradients = rx.value_and_grad(lambda: rx.mean((x @ self.w.value - y) ** 2), [self.w])()
        self.optimizer.apply_gradients(zip(gradients, [self.w], strict=True))
        mask = rx.valid_rows(x.shape[0])
        self.seen.assign_add(x.shape[0] if mask is None else mask.sum())
        return loss

    def step(self, context, x, y):
        loss = self.strategy.run(self.replica_step, (x, y))
        context.set_last_step_output("loss", loss, "mean")
        context.set_last_step_output("each", loss)


def batches(count, rows=8):
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((rows, 3)).astype(np.float32), rng.standard_normal(rows).astype(np.float32))
        for _ in range(count)
    ]


def one_by_one(model, data):
    for x, y in model.strategy.distribute_dataset(data):
        loss = model.strategy.run(model.replica_step, (x, y))
    return model.strategy.reduce("mean", loss)


def test_gives_the_numbers_of_single_steps(strategy):
    data = batches(5)
    looped, stepped = Model(strategy), Model(strategy)
    expected = one_by_one(stepped, data)

    context = strategy.run_steps(looped.step, iter(strategy.distribute_dataset(data)), steps=5)

    np.testing.assert_allclose(context.last_step_outputs["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(looped.w.numpy(), stepped.w.numpy(), rtol=1e-6)
    assert int(looped.seen) == int(stepped.seen) == 40


def test_an_output_without_an_op_has_one_entry_for_each_replica(strategy):
    model = Model(strategy)

    context = strategy.run_steps(model.step, iter(strategy.distribute_dataset(batches(2))), steps=2)

    each = strategy.experimental_local_results(context.last_step_outputs["each"])
    assert len(each) == strategy.num_replicas_in_sync
    np.testing.assert_allclose(np.mean(each), context.last_step_outputs["loss"], rtol=1e-6)
    assert context.run_op is None


def test_padded_batches_are_counted_by_their_valid_rows(two):
    data = batches(3, rows=8) + batches(1, rows=3)
    looped, stepped = Model(two), Model(two)
    expected = one_by_one(stepped, data)

    context = two.run_steps(looped.step, iter(two.distribute_dataset(data)), steps=4)

    np.testing.assert_allclose(context.last_step_outputs["loss"], expected, rtol=1e-6)
    assert int(looped.seen) == 27


def test_a_step_that_averages_padding_is_refused(two):
    def step(context, x, y):
        context.set_last_step_output("mean", two.run(lambda x: jnp.mean(x), (x,)), "mean")

    iterator = iter(two.distribute_dataset(batches(1) + batches(1, rows=3)))

    with pytest.raises(rx.LocalityError, match="test_run_steps.py"):
        two.run_steps(step, iterator, steps=2)


def test_batches_of_two_shapes_are_two_programs_and_no_row_is_lost():
    strategy = rx.OneDeviceStrategy("cpu:0")
    data = batches(3, rows=8) + batches(1, rows=3)
    looped, stepped = Model(strategy), Model(strategy)
    for x, y in data:
        strategy.run(stepped.replica_step, (x, y))

    strategy.run_steps(looped.step, iter(data), steps=4)

    np.testing.assert_allclose(looped.w.numpy(), stepped.w.numpy(), rtol=1e-6)
    assert int(looped.seen) == 27


def test_at_the_end_of_the_data_the_steps_before_it_were_taken(strategy):
    data = batches(7)
    looped, stepped = Model(strategy), Model(strategy)
    one_by_one(stepped, data)
    iterator = iter(strategy.distribute_dataset(data))

    strategy.run_steps(looped.step, iterator, steps=4)
    with pytest.raises(rx.OutOfRangeError, match="after 3 steps"):
        strategy.run_steps(looped.step, iterator, steps=4)

    np.testing.assert_allclose(looped.w.numpy(), stepped.w.numpy(), rtol=1e-6)


def test_second_call_compiles_nothing_and_traces_nothing(strategy, compilations):
    model, traces = Model(strategy), []

    def step(context, x, y):
        traces.append(x)
        model.step(context, x, y)

    strategy.run_steps(step, iter(strategy.distribute_dataset(batches(3))), steps=3)
    iterator = iter(strategy.distribute_dataset(batches(3)))
    with compilations() as names:
        strategy.run_steps(step, iterator, steps=3)

    assert names == []
    assert len(traces) == (6 if strategy.eager else 1)


def test_another_number_of_steps_does_not_trace_again(two):
    traces = []

    def step(context, x, y):
        traces.append(x)

    iterator = iter(two.distribute_dataset(batches(7)))
    for steps in (4, 2, 1):
        two.run_steps(step, iterator, steps)

    assert len(traces) == 1


def test_outputs_set_inside_replicas_and_across_them(two):
    def replica(x):
        context.set_last_step_output("inside", jnp.mean(x), "mean")
        context.set_non_tensor_output("foo", "bar")
        return jnp.mean(x)

    def step(given, x):
        nonlocal context
        context = given
        x_mean = two.run(replica, (x,))
        given.set_last_step_output("across", x_mean, aggregation=rx.VariableAggregation.MEAN)
        given.set_last_step_output("raw", x_mean, rx.VariableAggregation.NONE)
        given.set_non_tensor_output("object", ("any", 1))

    context = None
    data = [np.array([1.0, 3.0], np.float32), np.array([2.0, 6.0], np.float32)]
    done = two.run_steps(step, iter(two.distribute_dataset(data)), 2)

    assert float(done.last_step_outputs["inside"]) == float(done.last_step_outputs["across"]) == 4.0
    assert [float(x) for x in two.experimental_local_results(done.last_step_outputs["raw"])] == [2.0, 6.0]
    assert done.non_tensor_outputs == {"foo": ["bar"], "object": ("any", 1)}


def test_an_output_of_a_replica_needs_an_op(two):
    def step(context, x):
        two.run(lambda x: context.set_last_step_output("loss", x.sum()), (x,))

    with pytest.raises(AssertionError, match="does not say how"):
        two.run_steps(step, iter([np.ones(2, np.float32)]), 1)


def test_names_that_no_step_sets_keep_their_initial_value(two):
    def step(context, x):
        context.set_last_step_output("set", x)

    done = two.run_steps(step, iter([1.0, 2.0]), 2, initial_loop_values={"set": 0.0, "unset": 5.0})

    assert float(done.last_step_outputs["set"]) == 2.0
    assert done.last_step_outputs["unset"] == 5.0


def test_a_tuple_is_several_inputs_and_a_dict_is_one():
    strategy = rx.OneDeviceStrategy("cpu:0")

    def step(context, *inputs):
        context.set_last_step_output("x", inputs[0]["a"] if len(inputs) == 1 else inputs[1])

    one = strategy.run_steps(step, iter([{"a": np.ones(2), "b": np.zeros(2)}]), 1)
    two = strategy.run_steps(step, iter([(np.zeros(2), np.full(2, 7.0))]), 1)

    assert one.last_step_outputs["x"].tolist() == [1, 1]
    assert two.last_step_outputs["x"].tolist() == [7, 7]


def test_a_variable_assigned_inside_a_scan_of_the_step(two):
    with two.scope():
        total = rx.Variable(0.0)

    def replica(x):
        jax.lax.scan(lambda carry, _: (carry, total.assign_add(1.0)), 0.0, length=3)

    two.run_steps(lambda context, x: two.run(replica, (x,)), iter([1.0, 2.0]), 2)

    assert float(total) == 6.0


def test_a_variable_made_in_the_step_is_made_once(two):
    made = []

    def replica(x):
        if not made:
            made.append(rx.Variable(x * 0.0 + 10.0, name="lazy"))
        made[0].assign_add(x)

    two.run_steps(lambda context, x: two.run(replica, (x,)), iter([1.0, 2.0]), 2)

    assert float(made[0]) == 13.0


def test_an_unreduced_write_is_refused(two):
    with two.scope():
        w = rx.Variable(0.0)

    def step(context, x):
        two.run(lambda x: w.assign(x.sum()), (x,))

    with pytest.raises(rx.LocalityError, match="test_run_steps.py"):
        two.run_steps(step, iter(two.distribute_dataset([np.ones(4)])), 1)


@pytest.mark.parametrize("steps", [0, -1, 2.0, "3", None, True])
def test_a_number_of_steps_is_a_count(two, steps):
    with pytest.raises(ValueError, match="takes a number of steps"):
        two.run_steps(lambda context, x: None, iter([np.ones(2)]), steps)


def test_what_is_no_iterator_is_refused(two):
    with pytest.raises(ValueError, match="needs an iterator"):
        two.run_steps(lambda context, x: None, [1.0, 2.0], 1)
    with pytest.raises(ValueError, match="at least one step"):
        two.run_steps(lambda context, x: None, iter([1.0]), 0)


def test_inside_a_replica_or_a_run_it_is_refused(two):
    steps = lambda: two.run_steps(lambda context, x: None, iter([1.0]), 1)  # noqa: E731

    with pytest.raises(rx.ContextError):
        two.run(steps)
    with two.scope(), pytest.raises(rx.ContextError, match="inside a run"):
        rx.function(steps)()


def test_the_former_name_is_the_same(two):
    done = two.extended.experimental_run_steps_on_iterator(
        lambda context, x: context.set_last_step_output("x", x), iter([1.0, 2.0]), 2
    )

    assert float(done.last_step_outputs["x"]) == 2.0


def test_only_a_dict_replaces_the_outputs():
    with pytest.raises(ValueError, match="dictionary"):
        rx.MultiStepContext()._set_last_step_outputs([])
