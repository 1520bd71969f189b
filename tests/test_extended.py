"""`strategy.extended` and what lies behind it: updates, destinations, colocation, creators, localities."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

D0, D1, D2 = jax.devices()[:3]


@pytest.fixture
def strategy():
    return rx.MirroredStrategy([D0, D1])


@pytest.fixture
def one():
    return rx.OneDeviceStrategy(D0)


def variable(strategy, value, **options):
    with strategy.scope():
        return rx.Variable(value, **options)


def differing(*parts):
    return rx.PerReplica(parts)


def merged(fn):
    """A step that hands its arguments to `fn(strategy, ...)` in cross-replica context."""
    return lambda *args: rx.get_replica_context().merge_call(fn, args)


# -- contexts: each verb works at top level and in the scope, not in another strategy's

VERBS = {
    "reduce_to": lambda s, v: s.extended.reduce_to("sum", differing(1.0, 2.0), v),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("sum", [(differing(1.0, 2.0), v)]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(jnp.ones(2), v),
    "update": lambda s, v: s.extended.update(v, lambda v: v.assign(1.0)),
    "update_non_slot": lambda s, v: s.extended.update_non_slot(s.extended.non_slot_devices([v]), lambda: 1.0),
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: 1.0),
    "experimental_make_numpy_dataset": lambda s, v: s.extended.experimental_make_numpy_dataset(np.arange(4)),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_a_verb_works_at_top_level_and_in_the_scope(strategy, verb):
    v = variable(strategy, 0.0)

    verb(strategy, v)
    with strategy.scope():
        verb(strategy, v)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_a_verb_is_refused_in_the_scope_of_another_strategy(strategy, one, verb):
    v = variable(strategy, 0.0)

    with one.scope(), pytest.raises(rx.ContextError, match="Mixing different"):
        verb(strategy, v)


@pytest.mark.parametrize(
    "verb",
    [
        verb
        for name, verb in VERBS.items()
        if name not in ("update", "update_non_slot", "experimental_make_numpy_dataset")
    ],
)
def test_a_verb_that_speaks_for_all_is_refused_inside_a_replica(strategy, verb):
    v = variable(strategy, 0.0)

    with pytest.raises(rx.ContextError, match="merge_call"):
        strategy.run(lambda: verb(strategy, v))


def test_a_copy_is_refused_and_a_deep_copy_works(strategy):
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(strategy)

    twin = copy.deepcopy(strategy)

    assert twin is not strategy and twin.num_replicas_in_sync == 2
    assert twin.extended.reduce_to("sum", differing(1.0, 2.0), D0) == 3.0
    assert not strategy.extended.variable_created_in_scope(variable(twin, 1.0))


# -- destinations


@pytest.mark.parametrize(
    ("destination", "devices"),
    [("cpu:2", {D2}), (D1, {D1}), ("variable", {D0, D1}), ("value", {D0, D1})],
    ids=["word", "device", "variable", "per-replica-value"],
)
def test_a_reduction_lies_where_its_destination_lies(strategy, destination, devices):
    v = variable(strategy, 0.0)
    value = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group + 1.0)
    where = {"variable": v, "value": value}.get(destination, destination)

    total = strategy.extended.reduce_to("sum", value, where)

    assert total == 3.0
    assert total.devices() == devices
    assert not any(np.asarray(copy.data) != 3.0 for copy in total.addressable_shards)


def test_many_reductions_come_back_in_order(strategy):
    v = variable(strategy, 0.0)

    halves = strategy.extended.batch_reduce_to("MEAN", [(differing(0.0, 1.0), v)] * 2)
    mixed = strategy.extended.batch_reduce_to("sum", [(differing(1, 2), v), (differing(0.5, 0.25), "cpu:1")])

    assert [float(x) for x in halves] == [0.5, 0.5]
    assert all(x.devices() == {D0, D1} for x in halves)
    assert [float(x) for x in mixed] == [3, 0.75], "integers and floats may stand in one batch"


def test_reductions_of_a_merge_call_travel_together(strategy):
    def merge(strategy, a, b):
        return strategy.extended.batch_reduce_to("sum", [(a, v), (b, v)])

    v = variable(strategy, 0.0)
    args = (differing(1.0, 2.0), differing(3.0, 4.0))

    assert [float(x) for x in strategy.run(merged(merge), args)] == [3.0, 7.0]
    assert strategy.lower(merged(merge), args).as_text().count("stablehlo.all_reduce") == 1


def test_nests_and_sparse_rows_are_reduced(strategy):
    nest = {"a": differing(1.0, 2.0), "b": [differing(3.0, 5.0)]}
    rows = rx.IndexedSlices(
        differing(jnp.ones((1, 2)), jnp.full((1, 2), 3.0)), differing(np.array([1]), np.array([1])), (3, 2)
    )

    assert strategy.extended.reduce_to("mean", nest, D0) == {"a": 1.5, "b": [4.0]}
    summed = strategy.extended.reduce_to("sum", rows, D0).to_dense()
    np.testing.assert_array_equal(summed, [[0, 0], [4, 4], [0, 0]])


def test_what_is_the_same_everywhere_is_its_own_mean_and_has_no_sum(strategy):
    assert strategy.extended.reduce_to("mean", 5.0, D0) == 5.0
    assert strategy.extended.reduce_to("sum", 0, D0) == 0
    with pytest.raises(AssertionError, match="A non-DistributedValues value"):
        strategy.extended.reduce_to("sum", 5.0, D0)


@pytest.mark.parametrize(
    ("destination", "error", "text"),
    [
        (["cpu:0"], AssertionError, "one destination"),
        (None, AssertionError, "one destination"),
        (3, ValueError, "destinations must be one of a `DistributedValues` object"),
        ("", ValueError, "destinations can not be empty"),
    ],
)
def test_a_destination_that_is_none_is_refused(strategy, destination, error, text):
    with pytest.raises(error, match=text):
        strategy.extended.reduce_to("sum", differing(1.0, 2.0), destination)


@pytest.mark.parametrize(
    ("pair", "text"),
    [([1.0, D0], "should be a tuple"), ((1.0,), "tuple of size 2"), ((1.0, D0, D1), "tuple of size 2")],
)
def test_a_pair_that_is_none_is_refused(strategy, pair, text):
    with pytest.raises(ValueError, match=text):
        strategy.extended.batch_reduce_to("sum", [pair])


def test_an_aggregation_is_not_a_reduction(strategy):
    with pytest.raises(AssertionError, match="aggregation"):
        strategy.extended.reduce_to(rx.VariableAggregation.SUM, differing(1.0, 2.0), D0)


def test_a_value_is_copied_to_its_destination(strategy):
    v = variable(strategy, 0.0)

    assert strategy.extended.broadcast_to(jnp.ones(2), v).devices() == {D0, D1}
    assert strategy.extended.broadcast_to(jnp.ones(2), D2).devices() == {D2}
    assert type(strategy.extended.broadcast_to(7, v)) is int, "a number stays what it is"
    for nowhere in (None, [D0]):
        with pytest.raises(AssertionError):
            strategy.extended.broadcast_to(jnp.ones(2), nowhere)
    with pytest.raises(rx.LocalityError, match="which of these"):
        strategy.extended.broadcast_to(differing(1.0, 2.0), v)
    copy = strategy.extended.broadcast_to(v, D2)
    assert isinstance(copy, jax.Array) and copy.devices() == {D2}, "of a variable, its value"


def test_a_value_is_copied_by_the_strategys_own_op():
    class Doubling(rx.ReductionToOneDevice):
        def broadcast_implementation(self, tensor, destinations):
            return super().broadcast_implementation(tensor * 2, destinations)

    strategy = rx.MirroredStrategy([D0, D1], cross_device_ops=Doubling())

    assert strategy.extended.broadcast_to({"a": jnp.ones(1), "b": 3}, D2) == {"a": 2.0, "b": 3}


# -- updates


def test_an_update_from_the_host_changes_all_copies(strategy):
    v = variable(strategy, 1.0)

    result = strategy.extended.update(v, lambda v, x, *, factor: v.assign_add(factor * x), (2.0,), {"factor": 3.0})

    assert result is v
    assert [float(x) for x in v.values] == [7.0, 7.0]


def test_an_ungrouped_update_has_one_component_per_replica(strategy, one):
    v, single = variable(strategy, 1.0), variable(one, 1.0)

    assert strategy.extended.update(v, lambda v: v.value + 1, group=False) == (2.0, 2.0)
    assert strategy.extended.update(v, lambda v: None, group=False) == (None, None)
    assert one.extended.update(single, lambda v: v.value + 1, group=False) == (2.0,)


def test_an_update_with_a_value_per_replica_is_refused(strategy):
    v = variable(strategy, 0.0, name="v")

    with pytest.raises(rx.LocalityError, match=r"update\(v, fn, ...\) got an argument that differs per replica"):
        strategy.extended.update(v, lambda v, x: v.assign(x), (differing(0.0, 1.0),))
    with pytest.raises(rx.LocalityError, match=rf"writes a per-replica value to .* 'v' at {__file__}"):
        strategy.run(
            merged(lambda s, x: s.extended.update(v, lambda v, x: v.assign(x), (x,), group=False)),
            (differing(0.0, 1.0),),
        )
    assert v.numpy() == 0.0


@pytest.mark.parametrize("not_ours", [3.0, "foreign"], ids=["number", "variable-of-another-strategy"])
def test_what_is_no_variable_of_the_strategy_is_not_updated(strategy, one, not_ours):
    target = variable(one, 1.0) if not_ours == "foreign" else not_ours

    with pytest.raises(AssertionError, match="update"):
        strategy.extended.update(target, lambda v: None)


def test_a_step_reduces_and_updates(strategy):
    def apply(strategy, gradient):
        gradient = strategy.extended.reduce_to("mean", gradient, v)
        return strategy.extended.update(v, lambda v, g: v.assign_sub(g), (gradient,), group=False)

    v = variable(strategy, 10.0)

    components = strategy.run(merged(apply), (differing(1.0, 3.0),))

    assert [float(x) for x in components] == [8.0, 8.0]
    assert v.numpy() == 8.0


def test_an_update_inside_a_replica_meets_the_others_first(strategy):
    def step(x):
        total = rx.get_replica_context().all_reduce("sum", x)
        strategy.extended.update(v, lambda v, t: v.assign_add(t), (total,))

    v = variable(strategy, 1.0)
    strategy.run(step, (differing(2.0, 3.0),))

    assert v.numpy() == 6.0


def test_an_update_function_runs_across_replicas(strategy):
    seen = []
    v = variable(strategy, 1.0)

    strategy.extended.update(v, lambda v: seen.append((rx.get_replica_context(), rx.in_cross_replica_context())))

    assert seen == [(None, True)]


def test_components_of_an_on_read_variable_are_updated_one_by_one(strategy):
    v = variable(strategy, 0.0, synchronization="on_read", aggregation="sum")

    strategy.extended.update(v, lambda v: v.assign(5.0))
    assert v.numpy() == 10.0, "each component took the value itself"

    read = strategy.extended.update(v, lambda v, x: v.assign_add(x).value, (differing(0.0, 1.0),), group=False)
    assert [float(x) for x in read] == [5.0, 6.0]
    assert [float(x) for x in v.values] == [5.0, 6.0]


def test_components_of_an_on_read_variable_are_updated_in_a_step(strategy):
    def add(strategy, x):
        return strategy.extended.update(v, lambda v, x: v.assign_add(x), (x,), group=False)

    v = variable(strategy, 1.0, synchronization="on_read", aggregation="mean")

    assert [float(x) for x in strategy.run(merged(add), (differing(2.0, 4.0),))] == [3.0, 5.0]
    assert strategy.extended.read_var(v) == 4.0


def test_names_of_2019_are_found_on_the_strategy(strategy):
    config = {"allow_soft_placement": True}
    iterator = strategy.make_dataset_iterator([np.arange(4.0)])
    with strategy.scope():
        beside = rx.Variable(1.0)
        with strategy.colocate_vars_with(beside):
            assert rx.Variable(2.0).devices == beside.devices

    rows = strategy.experimental_run(lambda x: x.sum(), iterator)
    strategy.configure(config)

    assert float(strategy.reduce("sum", rows)) == 6.0
    assert strategy.update_config_proto({"allow_soft_placement": True}) == config
    assert config.get("isolate_session_state", False) == isinstance(
        strategy, rx.MirroredStrategy | rx.TPUStrategy | rx.experimental.CentralStorageStrategy
    )


def test_only_variables_and_plain_values_are_read(strategy):
    assert strategy.extended.read_var(3.0) == 3.0
    with pytest.raises(AssertionError, match="(?s)not an rx.Variable.*PerReplica"):
        strategy.extended.read_var(differing(1.0, 2.0))


@pytest.mark.parametrize(("aggregation", "read"), [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)])
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_an_on_read_variable_is_read_combined_from_inside_a_replica(aggregation, read, eager):
    strategy = rx.MirroredStrategy([D0, D1], eager=eager)

    def step():
        v.assign(rx.get_replica_context().replica_id_in_sync_group + 1.0)
        return strategy.extended.read_var(v)

    v = variable(strategy, 0.0, synchronization="on_read", aggregation=aggregation)

    assert strategy.run(step) == read


def test_state_of_no_variable_is_updated_once(strategy, one):
    devices = strategy.extended.non_slot_devices([])
    calls = []

    assert strategy.extended.update_non_slot(devices, lambda x: calls.append(x) or x + 1, (1.0,)) == 2.0
    assert calls == [1.0]
    assert strategy.extended.update_non_slot(devices, lambda: 3, group=False) == (3, 3)
    assert one.extended.update_non_slot(one.extended.non_slot_devices([]), lambda: 3) == 3
    for wrong in ("cpu:0", (), (D2,), 3):
        with pytest.raises(AssertionError, match="non_slot_devices"):
            strategy.extended.update_non_slot(wrong, lambda: 1)
    with pytest.raises(ValueError, match="of no variables"):
        rx.get_strategy().extended.non_slot_devices([])


def test_an_update_is_given_a_function_and_its_arguments(strategy):
    v = variable(strategy, 1.0)

    for update in (
        lambda *args: strategy.extended.update(v, *args),
        lambda *args: strategy.extended.update_non_slot((D0, D1), *args),
    ):
        for args, text in (
            ((None,), r"\(\w+, None, ...\): the fn is not a function"),
            ((print, 3.0), r"args=3.0\): positional args must be a list or tuple"),
            ((print, (), 3.0), r"kwargs=3.0\): keyword args must be a dictionary"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                update(*args)


# -- places


def test_places_are_devices(strategy, one):
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices == (D0, D1)
    assert strategy.extended.non_slot_devices([]) == (D0, D1)
    assert one.extended.worker_devices == one.extended.non_slot_devices([]) == (D0,)


def test_the_default_strategy_places_nothing():
    default = rx.get_strategy().extended
    second, first = rx.Variable(0.0, name="b"), rx.Variable(0.0, name="a")

    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match="unsupported by default"):
            getattr(default, name)
    assert default.non_slot_devices([second, first]) is first
    assert default.broadcast_to(3.0, None) == 3.0
    with pytest.raises(NotImplementedError, match="of the default strategy"):
        default.broadcast_to(3.0, D0)
    assert default.update(first, lambda v: v.assign(4.0), group=False) == (first,)
    assert first.numpy() == 4.0


def test_what_a_process_is_to_the_others(strategy):
    extended = strategy.extended

    assert not extended.experimental_between_graph
    assert extended.experimental_should_init and extended.should_checkpoint and extended.should_save_summary
    assert not extended.experimental_require_static_shapes


def test_a_variable_knows_whose_it_is(strategy, one):
    ours, theirs, plain = variable(strategy, 1.0), variable(one, 1.0), rx.Variable(1.0)

    assert strategy.extended.variable_created_in_scope(ours)
    assert not strategy.extended.variable_created_in_scope(theirs)
    assert not strategy.extended.variable_created_in_scope(plain)
    assert rx.get_strategy().extended.variable_created_in_scope(plain)
    assert strategy.extended.value_container(ours) is ours


# -- making variables


def test_a_variable_lies_beside_another(strategy):
    with strategy.scope():
        w = rx.Variable(1.0)
        with strategy.extended.colocate_vars_with(w):
            beside = rx.Variable(2.0)
        with strategy.extended.colocate_vars_with("cpu:1"):
            apart = rx.Variable(3.0)
            with strategy.extended.colocate_vars_with(w):
                nested = rx.Variable(4.0)
        with strategy.extended.colocate_vars_with(apart):
            beside_apart = rx.Variable(5.0)

    assert beside.devices == (D0, D1)
    assert apart.devices == beside_apart.devices == (D1,)
    assert nested.devices == (D1,), "the outermost block decides"


def test_a_variable_on_one_device_works_in_a_step(strategy):
    with strategy.scope(), strategy.extended.colocate_vars_with(D1):
        v = rx.Variable(1.0, aggregation="sum")

    strategy.run(lambda x: v.assign_add(x), (differing(2.0, 3.0),))

    assert v.numpy() == 6.0
    assert v.devices == (D1,)
    assert strategy.extended.update(v, lambda v: v.assign_add(1.0).value, group=False) == (7.0,)


@pytest.mark.parametrize("beside", ["foreign", 3.0, [], [D0, D2]], ids=["foreign", "number", "nothing", "some-devices"])
def test_a_place_that_is_none_of_the_strategys_is_refused(strategy, one, beside):
    beside = variable(one, 1.0) if beside == "foreign" else beside

    with strategy.scope(), pytest.raises(ValueError, match="colocate_vars_with"):
        with strategy.extended.colocate_vars_with(beside):
            rx.Variable(1.0)


def test_colocation_is_for_the_scope(strategy):
    v = variable(strategy, 1.0)

    with pytest.raises(rx.ContextError, match="strategy.scope"), strategy.extended.colocate_vars_with(v):
        pass


def test_creators_are_asked_from_the_inside_out(strategy):
    asked = []

    def creator(name):
        def create(next_creator, **options):
            asked.append(name)
            return next_creator(**options | {"name": f"{options['name']}/{name}"})

        return create

    with rx.variable_creator_scope(creator("outer")), strategy.scope():
        with rx.variable_creator_scope(creator("inner")):
            v = rx.Variable(1.0, name="v")

    assert asked == ["inner", "outer"]
    assert v.name == "v/inner/outer"
    assert strategy.extended.variable_created_in_scope(v)


def test_a_creator_may_return_anything(strategy):
    with strategy.scope(), rx.variable_creator_scope(lambda next_creator, **options: "instead"):
        assert rx.Variable(1.0) == "instead"


def test_a_scope_that_ends_before_its_creator_is_refused_and_can_end_later(strategy):
    scope = strategy.scope()
    creator = rx.variable_creator_scope(lambda next_creator, **options: next_creator(**options))
    scope.__enter__()
    creator.__enter__()

    with pytest.raises(RuntimeError, match="Variable creator scope nesting error"):
        scope.__exit__(None, None, None)

    creator.__exit__(None, None, None)
    scope.__exit__(None, None, None)
    assert not rx.has_strategy()


# -- running


def test_results_go_back_in(strategy):
    ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group + 1)
    powers = strategy.run(lambda x: {"a": x * 2, "b": x * x}, (ids,))
    sums = strategy.run(lambda a, b: a + 2 * b + 2, kwargs=powers)

    assert [int(x) for x in ids.values] == [1, 2]
    assert [int(x) for x in powers["a"].values] == [2, 4]
    assert [int(x) for x in powers["b"].values] == [1, 4]
    assert [int(x) for x in sums.values] == [6, 14]


def test_a_single_replica_returns_plain_values(one):
    powers = one.run(lambda x: {"a": x * 2, "b": x * x}, (4.0,))

    assert powers == {"a": 8.0, "b": 16.0}
    assert one.run(lambda a, b: a + 2 * b + 2, kwargs=powers) == 42.0


@pytest.mark.parametrize("args", [3.0, jnp.ones(2), {"x": 1}, None], ids=["number", "array", "dict", "none"])
def test_arguments_are_a_list_or_a_tuple(strategy, args):
    with pytest.raises(ValueError, match="positional args must be a list or tuple"):
        strategy.run(lambda x: x, args)


def test_a_step_is_traced_once(strategy):
    traced = []

    @rx.function
    def outer():
        return strategy.run(step)

    def step():
        traced.append(rx.get_replica_context().num_replicas_in_sync)
        return rx.get_replica_context().replica_id_in_sync_group

    for _ in range(10):
        strategy.run(step)
    assert traced == [2]
    outer()
    outer()
    assert traced == [2, 2], "a second time inside the program around it"


def test_a_merge_call_inside_a_loop_is_carried_out(strategy):
    """tf.distribute refuses it; here all replicas go round the loop together."""

    def step(x):
        def body(i, total):
            return total + rx.get_replica_context().merge_call(lambda s, x: s.reduce("sum", x), (x,))

        return jax.lax.fori_loop(0, 3, body, 0.0)

    assert strategy.run(step, (differing(1.0, 2.0),)) == 9.0


def test_each_replica_gets_its_component_of_what_the_merge_function_returns(strategy):
    def merge(strategy, x):
        return x, strategy.reduce("sum", x), "all", None

    own, total, word, nothing = strategy.run(merged(merge), (differing(1.0, 2.0),))

    assert [float(x) for x in own.values] == [1.0, 2.0]
    assert (float(total), word, nothing) == (3.0, "all", None)


def test_local_results_of_a_structure(strategy, one):
    structure = {"a": differing(0, 1), "b": 3}

    assert strategy.experimental_local_results(structure) == ({"a": 0, "b": 3}, {"a": 1, "b": 3})
    assert one.experimental_local_results({"a": 1}) == ({"a": 1},)


def test_values_from_a_function_are_one_per_replica(strategy):
    ids = strategy.experimental_distribute_values_from_function(lambda c: jnp.asarray(c.replica_id_in_sync_group))

    assert [int(x) for x in strategy.run(lambda x: x**2, (ids,)).values] == [0, 1]


def test_a_variable_made_in_a_step_starts_equal_everywhere(strategy):
    def step():
        v = rx.Variable(lambda: jax.random.normal(jax.random.key(0), (3,)), name="foo")
        return v, v.value

    v, value = strategy.run(step)

    assert isinstance(v, rx.Variable) and v.name == "foo"
    first, second = v.values
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(value, first)
    assert strategy.run(step)[0] is v, "made at the first call only"


# -- localities


def test_localities(strategy):
    v = variable(strategy, 1.0)
    ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)

    with strategy.scope():
        assert rx.locality(ids) == "T"
        assert rx.locality({"a": ids, "b": 1.0}) == "T"
        assert rx.locality(strategy.reduce("sum", ids)) == "M"
        assert rx.locality(3.0) == "M"
        assert rx.locality(v) == "V"
        assert rx.locality(strategy.extended.reduce_to("sum", ids, D2)) == "N"


def test_localities_across_replicas_of_a_run(strategy):
    seen = []
    strategy.run(
        merged(lambda s, x: seen.extend([rx.locality(x), rx.locality(s.reduce("sum", x))])), (differing(1.0, 2.0),)
    )

    assert seen == ["T", "M"]


def test_a_replica_cannot_tell_localities(strategy):
    with pytest.raises(rx.ContextError, match="assert_mirrored"):
        strategy.run(lambda x: rx.locality(x), (differing(1.0, 2.0),))
