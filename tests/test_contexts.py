"""Where in the program am I? The stack of modes, and what each place refuses."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._context import require_replica_context


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(jax.devices()[:2])


@pytest.fixture
def other():
    return rx.MirroredStrategy(jax.devices()[2:4])


def at_top_level():
    return (
        rx.get_replica_context() is not None
        and not rx.in_cross_replica_context()
        and not rx.has_strategy()
        and rx.get_strategy().num_replicas_in_sync == 1
    )


def test_the_bare_top_level_is_a_replica_of_the_default_strategy():
    assert at_top_level()
    assert rx.get_replica_context().replica_id_in_sync_group == 0
    assert rx.get_replica_context() is rx.get_replica_context()
    assert rx.get_replica_context().all_reduce("sum", 3.0) == 3.0


def test_a_scope_is_cross_replica_ground(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert rx.get_replica_context() is None
        assert rx.in_cross_replica_context()
        assert rx.has_strategy() and rx.get_strategy() is strategy
    assert at_top_level()


def test_a_scope_can_be_entered_again_and_nested(strategy):
    scope = strategy.scope()
    with scope, scope, strategy.scope():
        assert rx.get_strategy() is strategy
    with scope:
        assert rx.in_cross_replica_context()
    assert at_top_level()


def test_a_scope_ends_when_its_body_raises(strategy):
    with pytest.raises(ZeroDivisionError), strategy.scope():
        _ = 1 / 0
    assert at_top_level()


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_step_runs_in_a_replica_context_and_a_merge_call_leaves_it(eager):
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=eager)
    seen = []

    def merge(inside, value):
        seen.append((inside is strategy, rx.get_replica_context() is None, rx.in_cross_replica_context()))
        return value

    def step():
        context = rx.get_replica_context()
        seen.append((context.strategy is strategy, rx.get_strategy() is strategy, not rx.in_cross_replica_context()))
        context.merge_call(merge, (jnp.ones(()),))
        seen.append((rx.get_replica_context() is not None, rx.has_strategy(), True))

    strategy.run(step)

    assert seen and all(all(each) for each in seen)
    assert at_top_level()


def test_another_thread_starts_at_the_top_level(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(at_top_level()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_strategies_can_be_set_without_a_block(strategy, other):
    for chosen in (strategy, other, strategy):
        rx.experimental_set_strategy(chosen)
        assert rx.get_strategy() is chosen and rx.in_cross_replica_context()
    rx.experimental_set_strategy(None)
    assert at_top_level()


@pytest.mark.parametrize("chosen", ["same", "other", "none"])
def test_a_strategy_cannot_be_set_inside_a_scope(strategy, other, chosen):
    argument = {"same": strategy, "other": other, "none": None}[chosen]
    with strategy.scope(), pytest.raises(RuntimeError, match="Must not be called inside"):
        rx.experimental_set_strategy(argument)


def test_two_strategies_cannot_be_mixed(strategy, other):
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.scope().__enter__()
        for call in (
            lambda: other.run(lambda: 1),
            lambda: other.reduce("mean", 1.0),
            lambda: other.extended.reduce_to("mean", 1.0, jax.devices()[2]),
            lambda: other.extended.broadcast_to(1.0, jax.devices()[2]),
            lambda: other.experimental_distribute_values_from_function(lambda c: 1.0),
            lambda: other.experimental_make_numpy_dataset(jnp.ones(3)),
        ):
            with pytest.raises(RuntimeError, match="Mixing different"):
                call()


def test_cross_replica_verbs_work_at_the_top_level_and_in_their_own_scope(strategy):
    def verbs():
        values = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group + 1.0)
        return float(strategy.reduce("sum", values)), len(strategy.experimental_local_results(values))

    assert verbs() == (3.0, 2)
    with strategy.scope():
        assert verbs() == (3.0, 2)


def test_a_replica_cannot_speak_for_all(strategy):
    calls = [
        lambda: strategy.run(lambda: 1),
        lambda: strategy.reduce("sum", 1.0),
        lambda: strategy.scope().__enter__(),
        lambda: strategy.gather(1.0, axis=0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            strategy.run(call)


def test_the_default_strategys_scope_changes_nothing_and_does_not_nest(strategy):
    default = rx.get_strategy()
    with default.scope():
        assert at_top_level()
    with strategy.scope(), pytest.raises(RuntimeError, match="Must not nest"):
        default.scope().__enter__()


def test_a_replica_context_is_that_of_its_own_replica_only(strategy):
    kept = []

    def step():
        context = rx.get_replica_context()
        require_replica_context(context)
        kept.append(context)

    strategy.run(step)
    with strategy.scope(), pytest.raises(RuntimeError, match="Need to be inside"):
        require_replica_context(kept[0])
    with pytest.raises(RuntimeError, match="Mismatching tf.distribute.Strategy"):
        kept[0].all_reduce("sum", 1.0)

    def another():
        with pytest.raises(RuntimeError, match="Mismatching ReplicaContext"):
            kept[0].merge_call(lambda strategy: None)

    strategy.run(another)


def test_a_replica_context_knows_its_devices(strategy):
    devices = strategy.run(lambda: rx.get_replica_context().devices)
    assert devices == (jax.devices()[0],)
    assert rx.get_replica_context().devices == (jax.devices()[0],)


def test_a_replica_context_takes_only_an_id(strategy):
    for wrong in ("0", 1.5, True):
        with pytest.raises(ValueError, match="can only be an integer"):
            rx.ReplicaContext(strategy, wrong)
    for wrong in (jnp.array(1.5), jnp.array([1]), np.float32(1)):
        with pytest.raises(ValueError, match="can only be an integer"):
            rx.ReplicaContext(strategy, wrong)
    for one in (1, np.int32(1), jnp.array(1)):
        with rx.ReplicaContext(strategy, one) as context:
            assert rx.get_replica_context() is context
            assert context.replica_id_in_sync_group == 1
            assert context.devices == (jax.devices()[1],)
    with rx.ReplicaContext(strategy, 2) as context, pytest.raises(rx.InputError, match="of replica 2 has no devices"):
        _ = context.devices
    assert at_top_level()


def test_a_replica_context_entered_by_hand_meets_nobody(strategy):
    with rx.ReplicaContext(strategy, 0) as context:
        for call in (
            lambda: context.all_reduce("sum", 1.0),
            lambda: context.all_gather(jnp.ones(1), axis=0),
            lambda: context.merge_call(lambda strategy: None),
        ):
            with pytest.raises(rx.ContextError, match="(?s)entered by hand.*has 2 replicas"):
                call()
    with rx.ReplicaContext(rx.OneDeviceStrategy("cpu:0"), 0) as context:
        assert context.all_reduce("sum", 1.0) == 1.0


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_the_id_of_a_replica_is_asked_for_in_that_replica(eager):
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=eager)
    kept = []

    def step():
        context = rx.get_replica_context()
        kept.append(context)
        return context.merge_call(lambda strategy: context.replica_id_in_sync_group)

    with pytest.raises(
        rx.ContextError, match="`replica_id_in_sync_group` of a replica context was used where code runs once"
    ):
        strategy.run(step)
    with pytest.raises(rx.ContextError, match="Mismatching tf.distribute.Strategy"):
        _ = kept[0].replica_id_in_sync_group


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.merge_call(3), TypeError, r"merge_call\(3, ...\): the fn is not a function"),
        (lambda c: c.merge_call(print, 3), ValueError, r"args=3\): positional args must be a list or tuple"),
        (lambda c: c.merge_call(print, (), [3]), ValueError, r"kwargs=\[3\]\): keyword args must be a dictionary"),
    ],
    ids=["function", "args", "kwargs"],
)
def test_a_merge_call_is_given_a_function_and_its_arguments(strategy, call, error, text):
    with pytest.raises(error, match=text):
        call(rx.get_replica_context())
    for runner in (rx.OneDeviceStrategy("cpu:0"), strategy):
        with pytest.raises(error, match=text):
            runner.run(lambda: call(rx.get_replica_context()))


def test_a_variable_creator_left_open_keeps_the_scope_from_ending(strategy):
    scope, creator = strategy.scope(), rx.variable_creator_scope(lambda create, **kwargs: create(**kwargs))
    scope.__enter__()
    creator.__enter__()
    with pytest.raises(RuntimeError, match="Variable creator scope nesting error"):
        scope.__exit__(None, None, None)
    creator.__exit__(None, None, None)
    scope.__exit__(None, None, None)
    assert at_top_level()


def test_strategies_are_deep_copied_or_not_at_all(strategy):
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(strategy)
    with pytest.raises(RuntimeError, match="default strategy"):
        copy.deepcopy(rx.get_strategy())
    twin = copy.deepcopy(strategy)
    assert twin.num_replicas_in_sync == 2
    assert float(twin.reduce("sum", twin.run(lambda: rx.get_replica_context().replica_id_in_sync_group))) == 1
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing"):
        twin.run(lambda: 1)


def test_an_exception_in_a_merge_function_reaches_the_caller(strategy):
    class Mine(Exception):
        pass

    def merge(strategy):
        def nested():
            raise Mine

        strategy.run(nested)

    with pytest.raises(Mine):
        strategy.run(lambda: rx.get_replica_context().merge_call(merge))
    assert at_top_level()


def test_a_single_replica_merges_with_plain_values():
    def merge(strategy, text):
        return text + strategy.__class__.__name__

    assert rx.get_replica_context().merge_call(merge, ("in ",)) == "in DefaultStrategy"
    assert (
        rx.OneDeviceStrategy("cpu:0").run(lambda: rx.get_replica_context().merge_call(lambda s, x: x, ("as is",)))
        == "as is"
    )


def test_what_was_made_outside_the_scope_is_told_to_be_made_inside():
    seen = rx.Variable(0.0, synchronization="on_read", aggregation="sum")
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    with pytest.raises(rx.ContextError, match=r"make it under the scope .* `with strategy\.scope\(\):`"):
        strategy.run(lambda: seen.assign_add(1.0))
