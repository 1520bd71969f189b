"""What goes into a tower, what meets in `merge_call`, and what comes out merged."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax.compat import tower

DEVICES = jax.devices()[:3]


def mirrored(towers, **options):
    return tower.MirroredStrategy(devices=DEVICES[:towers], **options)


STRATEGIES = {
    "mirrored-2": lambda: mirrored(2),
    "mirrored-2-eager": lambda: mirrored(2, eager=True),
    "mirrored-1": lambda: mirrored(1),
    "one-device": lambda: tower.OneDeviceStrategy(DEVICES[0]),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def distribution(request):
    return request.param()


def in_towers(distribution, fn, *args, **kwargs):
    with distribution.scope():
        return distribution.call_for_each_tower(fn, *args, **kwargs)


def tower_id():
    return tower.get_tower_context().tower_id


def merge_call(merge_fn, *args, **kwargs):
    return tower.get_tower_context().merge_call(merge_fn, *args, **kwargs)


def test_towers_are_numbered(distribution):
    ids = in_towers(distribution, tower_id)

    assert [int(i) for i in distribution.unwrap(ids)] == list(range(distribution.num_towers))


def test_the_merge_function_runs_once_with_merged_arguments(distribution):
    calls = []

    def merge_fn(merged, word, *, value):
        calls.append((merged, word, len(merged.unwrap(value))))

    in_towers(distribution, lambda: merge_call(merge_fn, "same", value=jnp.asarray(tower_id())))

    assert calls == [(distribution, "same", distribution.num_towers)]


def test_each_tower_gets_its_part_of_what_was_merged():
    def merge_fn(distribution, x):
        return x, "all", None, tower.PerDevice((10, 20))

    def fn(x):
        own, word, nothing, made = merge_call(merge_fn, x)
        assert word == "all" and nothing is None
        return own, made

    distribution = mirrored(2)
    own, made = in_towers(distribution, fn, tower.PerDevice((1.0, 2.0)))

    assert [float(x) for x in distribution.unwrap(own)] == [1.0, 2.0]
    assert [int(x) for x in distribution.unwrap(made)] == [10, 20]


def test_towers_and_merge_functions_nest():
    def merge_fn(distribution, x):
        doubled = distribution.call_for_each_tower(lambda x: 2 * x, x)
        return distribution.reduce("sum", doubled)

    assert in_towers(mirrored(2), lambda x: merge_call(merge_fn, x), tower.PerDevice((1.0, 2.0))) == 6.0


class Oops(Exception):
    pass


def fail(*args):
    raise Oops


@pytest.mark.parametrize(
    "fn",
    [
        fail,
        lambda: merge_call(fail),
        lambda: merge_call(lambda d: d.call_for_each_tower(fail)),
        lambda: merge_call(lambda d: d.call_for_each_tower(lambda: merge_call(fail))),
    ],
    ids=["in-a-tower", "in-a-merge", "in-a-tower-of-a-merge", "in-a-merge-of-that"],
)
def test_an_exception_reaches_the_caller_as_it_is(distribution, fn):
    with pytest.raises(Oops):
        in_towers(distribution, fn)
    assert tower.get_cross_tower_context() is None


@pytest.mark.parametrize("run_concurrently", [True, False, None])
def test_run_concurrently_is_not_passed_on(distribution, run_concurrently):
    ids = in_towers(distribution, lambda: tower_id(), run_concurrently=run_concurrently)

    assert len(distribution.unwrap(ids)) == distribution.num_towers


def test_keywords_reach_the_towers(distribution):
    assert in_towers(distribution, lambda x, *, y: x + y, 1.0, y=2.0) == 3.0


def test_what_is_the_same_everywhere_comes_back_as_it_is():
    Point = namedtuple("Point", "x, y")
    distribution = mirrored(3)

    def fn():
        v = rx.Variable(0.0, name="v")
        return Point("same", tower_id()), [None, 5], {"v": v}

    point, rest, variables = in_towers(distribution, fn)

    assert type(point) is Point and point.x == "same"
    assert [int(i) for i in distribution.unwrap(point.y)] == [0, 1, 2]
    assert rest == [None, 5]
    assert isinstance(variables["v"], rx.Variable)


def test_unwrap_gives_components_in_tower_order():
    distribution = mirrored(2)

    with distribution.scope():
        v = rx.Variable(4.0)
        total = distribution.reduce("sum", tower.PerDevice((1.0, 2.0)), ["cpu:1", "cpu:0"])
        elsewhere = distribution.reduce("sum", tower.PerDevice((1.0, 2.0)), ["cpu:2", "cpu:1"])

        assert distribution.unwrap(tower.PerDevice(("a", "b"))) == ["a", "b"]
        assert distribution.unwrap("x") == ["x"]
        assert distribution.unwrap(None) == [None]
        assert distribution.unwrap(v) == [4.0, 4.0]
        assert [(float(x), *x.devices()) for x in distribution.unwrap(total)] == [(3.0, d) for d in DEVICES[:2]]
        assert [(float(x), *x.devices()) for x in distribution.unwrap(elsewhere)] == [(3.0, d) for d in DEVICES[1:]]


def test_unwrap_of_one_tower_is_a_list_of_one():
    for distribution in (mirrored(1), tower.OneDeviceStrategy("cpu:0"), tower.get_distribution_strategy()):
        assert distribution.unwrap("x") == ["x"]
        assert distribution.unwrap({"x": 1}) == [{"x": 1}]


def test_unwrap_in_a_merge_function_has_an_entry_per_tower():
    def merge_fn(distribution, x):
        total = distribution.reduce("sum", x)
        return len(distribution.unwrap(x)), len(distribution.unwrap(total)), len(distribution.unwrap(7))

    assert in_towers(mirrored(2), lambda: merge_call(merge_fn, jnp.asarray(tower_id()))) == (2, 2, 1)


def test_group_waits_and_returns_a_single_value():
    distribution = mirrored(2)
    ids = in_towers(distribution, tower_id)
    single = tower.OneDeviceStrategy("cpu:0")

    assert distribution.group(ids) is None
    assert single.group(jnp.ones(())) == 1.0
    assert single.group(jnp.ones(()), name="train") is None


def test_experimental_run_takes_one_element():
    distribution = mirrored(2)
    iterator = distribution.make_dataset_iterator([jnp.arange(4.0)])

    sums = distribution.experimental_run(lambda x: x.sum(), iterator)

    assert [float(x) for x in distribution.unwrap(sums)] == [1.0, 5.0]
    assert distribution.experimental_run(lambda: 3) == 3


# -- line by line


def test_towers_take_turns_between_merge_calls():
    order = []

    def fn():
        order.append(f"before {tower_id()}")
        merge_call(lambda distribution: order.append("merge"))
        order.append(f"after {tower_id()}")

    in_towers(mirrored(2, eager=True), fn, run_concurrently=False)

    assert order == ["before 0", "before 1", "merge", "after 0", "after 1"]


def test_towers_that_meet_a_different_number_of_times_are_refused():
    def fn():
        if tower_id() == 0:
            merge_call(lambda distribution: None)

    with pytest.raises(RuntimeError, match="different number of .*merge_call"):
        in_towers(mirrored(2, eager=True), fn)


def test_each_tower_runs_on_its_device():
    distribution = mirrored(2, eager=True)

    ids = in_towers(distribution, lambda: (tower_id(), str(tower.get_tower_context().device)))

    assert distribution.unwrap(ids) == [(i, str(device)) for i, device in enumerate(distribution.worker_devices)]


def test_creators_of_a_tower_are_its_own():
    distribution = mirrored(2, eager=True)

    def outer(next_creator, **options):
        return "main_thread"

    def fn():
        def inner(next_creator, **options):
            return f"{next_creator(**options)}:thread_{tower_id()}"

        with rx.variable_creator_scope(inner):
            merge_call(lambda distribution: None)
            return rx.Variable(1.0)

    with distribution.scope(), rx.variable_creator_scope(outer):
        made = distribution.call_for_each_tower(fn)

    assert distribution.unwrap(made) == ["main_thread:thread_0", "main_thread:thread_1"]


def test_a_variable_that_one_tower_makes_alone_is_refused():
    def fn():
        if tower_id() == 1:
            rx.Variable(1.0, name="alone")

    with pytest.raises(RuntimeError, match="alone"):
        in_towers(mirrored(2, eager=True), fn)


def test_a_variable_that_each_tower_names_is_called_as_tower_0_calls_it():
    names = ["foo_0", "foo_1"]

    v = in_towers(mirrored(2, eager=True), lambda: rx.Variable(1.0, name=names[tower_id()]))

    assert v.name == "foo_0"


def test_an_update_in_a_run_is_made_component_by_component():
    distribution = mirrored(2, eager=True)
    seen = []

    def update(component, x):
        seen.append((tower.get_tower_context(), tower.get_update_device()))
        component.assign_add(x)

    def merge_fn(distribution, x):
        total = distribution.reduce("sum", x, v)
        assert len(distribution.unwrap(total)) == 2
        distribution.update(v, update, total)

    with distribution.scope():
        v = rx.Variable(1.0)
        distribution.call_for_each_tower(lambda: merge_call(merge_fn, jnp.asarray(1.0)))

    assert seen == [(None, device) for device in distribution.worker_devices]
    assert distribution.unwrap(v) == [3.0, 3.0], "each component grew once"
