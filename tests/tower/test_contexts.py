"""Tower context, cross-tower context, and which calls belong where."""

import threading

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax.compat import tower

D0, D1 = jax.devices()[:2]


@pytest.fixture
def distribution():
    return tower.MirroredStrategy(devices=[D0, D1])


@pytest.fixture
def other():
    return tower.MirroredStrategy(devices=[D0, D1])


def where():
    """What the four questions answer here."""
    return (
        tower.get_tower_context(),
        tower.get_cross_tower_context(),
        tower.get_distribution_strategy(),
        tower.has_distribution_strategy(),
    )


def test_the_bare_top_level_is_the_tower_of_the_default_strategy():
    context, across, strategy, entered = where()

    assert context is not None and context is tower.get_tower_context()
    assert (context.tower_id, context.num_towers, context.is_single_tower) == (0, 1, True)
    assert context.distribution_strategy is strategy is tower.get_distribution_strategy()
    assert across is None and not entered


def test_a_scope_is_cross_tower_context(distribution):
    before = where()

    with distribution.scope() as entered:
        assert entered is distribution
        assert where() == (None, distribution, distribution, True)

    assert where() == before


def test_a_tower_function_is_tower_context(distribution):
    seen = []

    with distribution.scope():
        distribution.call_for_each_tower(lambda: seen.append(where()))

    ((context, across, strategy, entered),) = seen
    assert isinstance(context, tower.TowerContext)
    assert across is None and strategy is distribution and entered


def test_merge_call_of_the_default_strategy_needs_no_scope():
    default, before, seen = tower.get_distribution_strategy(), where(), []

    def merge_fn(distribution, s):
        seen.append(where())
        assert distribution is default
        return "foo_" + s

    assert tower.get_tower_context().merge_call(merge_fn, "bar") == "foo_bar"
    assert seen == [(None, default, default, False)]
    assert where() == before


def test_the_default_strategys_scope_is_cross_tower_context():
    default = tower.get_distribution_strategy()

    with default.scope():
        assert where() == (None, default, default, False)
        assert default.call_for_each_tower(lambda x: x, "as it is") == "as it is"
        assert default.reduce("sum", 3.0) == 3.0
        assert default.broadcast(3.0) == 3.0
        with pytest.raises(NotImplementedError):
            default.broadcast(3.0, "cpu:0")


def test_the_default_strategys_scope_does_not_nest(distribution):
    default = tower.get_distribution_strategy()

    with distribution.scope(), pytest.raises(RuntimeError, match="Must not nest"), default.scope():
        pass


def test_a_scope_can_be_entered_again_and_again(distribution):
    def merge_fn(merged):
        with merged.scope():
            return "in the scope"

    with distribution.scope(), distribution.scope():
        result = distribution.call_for_each_tower(lambda: tower.get_tower_context().merge_call(merge_fn))
    assert result == "in the scope"


def test_one_scope_serves_several_blocks(distribution):
    for front in (distribution, tower.get_distribution_strategy()):
        scope = front.scope()
        for _ in range(2):
            with scope as entered:
                assert entered is tower.get_cross_tower_context() is front


def test_a_strategy_is_put_in_force_without_a_block(distribution, other):
    for front in (distribution, other, distribution):
        rx.experimental_set_strategy(front)
        assert tower.get_distribution_strategy() is front
    rx.experimental_set_strategy(None)

    assert not tower.has_distribution_strategy()


def test_scopes_of_two_strategies_do_not_mix(distribution, other):
    with distribution.scope(), pytest.raises(RuntimeError, match="Mixing"), other.scope():
        pass


def test_a_scope_is_not_entered_inside_a_tower(distribution):
    def fn():
        with distribution.scope():
            pass

    with distribution.scope(), pytest.raises(RuntimeError, match="merge_call"):
        distribution.call_for_each_tower(fn)


ACROSS = {
    "reduce": lambda d: d.reduce("sum", rx.PerReplica((1.0, 2.0))),
    "batch_reduce": lambda d: d.batch_reduce("sum", [(rx.PerReplica((1.0, 2.0)), None)]),
    "broadcast": lambda d: d.broadcast(1.0),
    "update": lambda d: d.update(rx.Variable(1.0), lambda v: None),
    "update_non_slot": lambda d: d.update_non_slot(d.non_slot_devices([]), lambda: None),
    "call_for_each_tower": lambda d: d.call_for_each_tower(lambda: None),
    "worker_device_index": lambda d: d.worker_device_index,
    "fetch": lambda d: d.fetch(1.0),
    "map": lambda d: d.map([1.0], lambda x: x),
    "run_steps_on_dataset": lambda d: d.run_steps_on_dataset(lambda context, x: None, iter([jnp.ones(2)] * 2)),
}


@pytest.mark.parametrize(
    "call", [v for k, v in ACROSS.items() if k != "update"], ids=[k for k in ACROSS if k != "update"]
)
def test_what_speaks_for_all_towers_works_in_the_scope(distribution, call):
    with distribution.scope():
        call(distribution)


@pytest.mark.parametrize("call", ACROSS.values(), ids=ACROSS.keys())
def test_what_speaks_for_all_towers_needs_the_scope(distribution, call):
    with pytest.raises(rx.ContextError, match='Need to be inside "with distribution_strategy.scope'):
        call(distribution)


@pytest.mark.parametrize("call", ACROSS.values(), ids=ACROSS.keys())
def test_what_speaks_for_all_towers_is_refused_in_another_strategys_scope(distribution, other, call):
    with other.scope(), pytest.raises(rx.ContextError, match="Mixing"):
        call(distribution)


@pytest.mark.parametrize("call", ACROSS.values(), ids=ACROSS.keys())
def test_what_speaks_for_all_towers_is_refused_in_a_tower(distribution, call):
    with distribution.scope(), pytest.raises(rx.ContextError, match="merge_call"):
        distribution.call_for_each_tower(lambda: call(distribution))


def test_the_default_strategy_reduces_across_towers_only():
    with pytest.raises(rx.ContextError):
        tower.get_distribution_strategy().reduce("sum", 1.0)


def test_colocation_needs_the_scope(distribution):
    with pytest.raises(rx.ContextError), distribution.colocate_vars_with("cpu:0"):
        pass
    with tower.get_distribution_strategy().colocate_vars_with(rx.Variable(1.0)):
        assert rx.Variable(2.0).devices == (D0,)


def test_a_tower_context_is_for_its_tower(distribution):
    kept = []

    def fn():
        context = tower.get_tower_context()
        tower.require_tower_context(context)
        kept.append(context)
        return context.merge_call(lambda distribution: context.tower_id)

    with distribution.scope(), pytest.raises(rx.ContextError, match="call_for_each_tower"):
        distribution.call_for_each_tower(fn)
    with pytest.raises(rx.ContextError, match="Mismatching DistributionStrategy"):
        tower.require_tower_context(kept[0])
    with distribution.scope():
        with pytest.raises(rx.ContextError, match="Mismatching tower context"):
            distribution.call_for_each_tower(lambda: tower.require_tower_context(kept[0]))


def test_a_tower_context_can_be_entered(distribution):
    context = tower.TowerContext(distribution, tower_id=1)

    with context as nothing:
        assert nothing is None
        assert tower.get_tower_context() is context
        assert (context.tower_id, context.num_towers, context.is_single_tower) == (1, 2, False)
        assert context.device == D1
        assert context.distribution_strategy is distribution

    assert tower.get_tower_context() is not context


def test_update_contexts_nest():
    seen = []

    with tower.UpdateContext("a"):
        with tower.UpdateContext("b"):
            seen.append(tower.get_update_device())
        seen.append(tower.get_update_device())
    with pytest.raises(ZeroDivisionError), tower.UpdateContext("c"):
        raise ZeroDivisionError

    assert seen == ["b", "a"]
    assert tower.get_update_device() is None


def test_another_thread_starts_at_the_top_level(distribution):
    seen = []

    with distribution.scope():
        thread = threading.Thread(target=lambda: seen.append((where()[1], where()[3])))
        thread.start()
        thread.join()

    assert seen == [(None, False)]


def test_both_eras_share_one_context(distribution):
    seen = []

    with distribution.scope():
        assert rx.get_strategy().num_replicas_in_sync == 2
        rx.get_strategy().run(lambda: seen.append(tower.get_tower_context().num_towers))
    strategy = rx.MirroredStrategy([D0, D1])
    with strategy.scope():
        front = tower.get_distribution_strategy()
        assert front is tower.get_cross_tower_context() and front.num_towers == 2
        front.call_for_each_tower(lambda: seen.append(rx.get_replica_context().strategy is strategy))

    assert seen == [2, True]


@pytest.mark.parametrize(
    "open_scope",
    [
        lambda distribution: distribution.scope(),
        lambda distribution: distribution.colocate_vars_with("cpu:0"),
        lambda distribution: distribution.tower_local_var_scope("sum"),
    ],
    ids=["scope", "colocate_vars_with", "tower_local_var_scope"],
)
def test_whether_a_block_may_begin_is_decided_by_the_call_before_it(open_scope):
    distribution, other = (tower.MirroredStrategy(devices=jax.devices()[:2]) for _ in range(2))

    with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
        open_scope(distribution)
    with distribution.scope():
        open_scope(distribution)
