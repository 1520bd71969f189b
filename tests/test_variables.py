"""What does a variable hold, and what does an assignment mean? The tables of synchronization and aggregation."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

R2 = 2


@pytest.fixture(params=["compiled", "eager"])
def strategy(request):
    return rx.MirroredStrategy(jax.devices()[:R2], eager=request.param == "eager")


@pytest.fixture
def compiled():
    return rx.MirroredStrategy(jax.devices()[:R2])


def me():
    return rx.get_replica_context().replica_id_in_sync_group


def make(strategy, value, **options):
    with strategy.scope():
        return rx.Variable(value, name="v", **options)


def held(variable):
    return [np.asarray(component).tolist() for component in variable.values]


# -- making one


def test_creation_rules(compiled):
    with compiled.scope():
        assert rx.Variable(1.0).trainable
        assert not rx.Variable(1.0, synchronization="on_read").trainable
        assert rx.Variable(1.0, synchronization="on_read", trainable=True).trainable
        assert rx.Variable(lambda: jnp.ones(3)).shape == (3,)
        assert rx.Variable(1, dtype=jnp.float32).dtype == jnp.float32
        assert rx.Variable(0.0).name == "Variable"
        for options, says in (
            ({"synchronization": "none"}, "`NONE` variable synchronization mode is not supported"),
            ({"synchronization": "sometimes"}, "Invalid variable synchronization mode"),
            ({"aggregation": "product"}, "Invalid variable aggregation mode"),
        ):
            with pytest.raises(ValueError, match=says):
                rx.Variable(0.0, **options)
        with pytest.raises(ValueError, match="non-floating dtype is not supported"):
            rx.Variable(0, aggregation="mean")
        with pytest.raises(ValueError, match="needs an initial value"):
            rx.Variable(name="empty")


def test_a_variable_belongs_to_the_strategy_in_force(compiled):
    variable = make(compiled, 1.0)

    assert variable.distribute_strategy is compiled
    assert compiled.extended.variable_created_in_scope(variable)
    assert not rx.MirroredStrategy(jax.devices()[2:4]).extended.variable_created_in_scope(variable)
    assert rx.get_strategy().extended.variable_created_in_scope(rx.Variable(1.0))


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_random_initial_values_are_equal_everywhere(strategy, synchronization):
    made = []

    def step():
        made.append(
            rx.Variable(
                lambda: np.random.default_rng().normal(size=3).astype(np.float32),
                synchronization=synchronization, aggregation="mean", name="noise",
            )
        )  # fmt: skip

    strategy.run(step)

    first, second = held(made[0])
    assert first == second
    assert all(variable is made[0] for variable in made)


def test_a_variable_made_in_a_step_is_returned_as_itself(strategy):
    variable = strategy.run(lambda: rx.Variable(1.0, name="foo"))

    assert isinstance(variable, rx.Variable) and variable.name == "foo"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_independent(strategy, duplicate):
    variable = make(strategy, 1.0, aggregation="sum", trainable=False)
    made = []
    with rx.variable_creator_scope(lambda create, **options: made.append(options) or create(**options)):
        twin = duplicate(variable)
    strategy.run(lambda: twin.assign_add(jnp.ones(())))

    assert (held(variable), held(twin)) == ([1.0, 1.0], [3.0, 3.0])
    assert (twin.name, twin.aggregation, twin.trainable) == (variable.name, variable.aggregation, False)
    assert twin.distribute_strategy is strategy and twin.devices == variable.devices
    assert not made, "no creator has a say in it"


@pytest.mark.parametrize("aggregation", ["sum", "none"])
def test_a_copy_has_the_same_components(strategy, aggregation):
    variable = make(strategy, 0.0, synchronization="on_read", aggregation=aggregation)
    strategy.run(lambda: variable.assign(me() + 1.0))

    twin = copy.deepcopy({"v": variable, "again": variable})

    assert twin["v"] is twin["again"] is not variable
    assert held(twin["v"]) == [1.0, 2.0]


def test_a_variable_is_not_copied_in_a_run_and_not_pickled(strategy):
    variable = make(strategy, 1.0)

    with pytest.raises(rx.ContextError, match=r"copy.deepcopy\(v\) inside a run"):
        strategy.run(lambda: copy.deepcopy(variable))
    with rx.MirroredStrategy(jax.devices()[2:4]).scope(), pytest.raises(rx.ContextError, match="`v.copy`"):
        copy.copy(variable)
    with pytest.raises(TypeError, match=r"(?s)cannot be pickled.*rx.Checkpoint"):
        pickle.dumps(variable)


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        ("abc", {}, "initial_value  'abc'"),
        ([[1.0], [1.0, 2.0]], {}, "no array can be made"),
        ([None], {}, "no array can be made"),
        (1.0, {"dtype": "foo"}, "data type 'foo' not understood"),
        ([1.0, 2.0], {"shape": (3,)}, r"(?s)shape=\(3,\).*float32\[2\]"),
    ],
    ids=["text", "ragged", "none", "dtype", "shape"],
)
def test_what_is_no_initial_value(compiled, value, options, text):
    with pytest.raises(ValueError, match=text) as raised:
        make(compiled, value, **options)
    assert isinstance(raised.value, TypeError) and "name='v'" in str(raised.value)


def test_options_of_a_variable_are_words(compiled):
    with pytest.raises(TypeError, match=r"(?s)by position:.*False"):
        rx.Variable(1.0, False)
    assert list(inspect.signature(rx.Variable).parameters)[:3] == ["initial_value", "trainable", "name"]
    assert make(compiled, 1.0, caching_device="cpu:0", experimental_batch_initialization=True).devices == tuple(
        jax.devices()[:2]
    )
    assert make(compiled, 2.0, shape=(3,)).numpy().tolist() == [2.0] * 3


# -- mirrored


@pytest.mark.parametrize(
    ("aggregation", "start", "method", "expected"),
    [
        ("sum", 0.0, "assign", 3.0),
        ("mean", 1.0, "assign", 1.5),
        ("mean", 1.0, "assign_add", 2.5),
        ("mean", 5.0, "assign_sub", 3.5),
        ("only_first_replica", 3.0, "assign", 1.0),
        ("only_first_replica", 3.0, "assign_add", 4.0),
        ("sum", 1.0, "assign_add", 4.0),
    ],
)
def test_an_assignment_in_a_replica_is_aggregated(strategy, aggregation, start, method, expected):
    variable = make(strategy, start, aggregation=aggregation)

    result = strategy.run(lambda: getattr(variable, method)(me() + 1.0))

    assert held(variable) == [expected, expected]
    assert float(np.asarray(strategy.experimental_local_results(result)[1])) == expected


@pytest.mark.parametrize(
    ("method", "start", "number", "expected"),
    [("assign", 1.0, 5.0, 5.0), ("assign_add", 1.0, 5.0, 6.0), ("assign_sub", 5.0, 1.0, 4.0)],
)
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_a_python_number_is_taken_once(strategy, aggregation, method, start, number, expected):
    variable = make(strategy, start, aggregation=aggregation)

    strategy.run(lambda: getattr(variable, method)(number))

    assert held(variable) == [expected, expected]


def test_an_array_is_summed_and_a_number_refused(strategy):
    variable = make(strategy, 0.0, aggregation="sum")

    strategy.run(lambda: variable.assign(jnp.float32(2.0)))

    assert held(variable) == [4.0, 4.0]
    with pytest.raises(ValueError, match="cannot be reduced with the given reduce op"):
        strategy.run(lambda: variable.assign(5.0))


def test_without_aggregation_a_value_that_is_equal_everywhere_is_stored(strategy):
    variable = make(strategy, 0.0)

    strategy.run(lambda: variable.assign(rx.get_replica_context().all_reduce("sum", me() + 1.0)))

    assert held(variable) == [3.0, 3.0]
    with pytest.raises(TypeError):
        strategy.run(lambda: variable.assign(me() + 1.0))
    assert held(variable) == [3.0, 3.0]


def test_across_replicas_all_copies_are_assigned(compiled):
    variable = make(compiled, 1.0, aggregation="mean")

    assert variable.assign(6.0) is variable
    assert held(variable) == [6.0, 6.0]
    variable.assign_add(6.0)
    assert variable.assign_sub(2.0, read_value=False) is None
    assert held(variable) == [10.0, 10.0]
    with pytest.raises(TypeError, match="differs per replica"):
        variable.assign(rx.PerReplica((1.0, 2.0)))


# -- on read


@pytest.mark.parametrize(("aggregation", "read"), [("sum", 7.0), ("mean", 3.5), ("only_first_replica", 3.0)])
def test_components_are_assigned_apart_and_read_together(strategy, aggregation, read):
    variable = make(strategy, 1.0, synchronization="on_read", aggregation=aggregation)

    inside = strategy.run(lambda: variable.assign_add(2.0 + me()))

    assert held(variable) == [3.0, 4.0]
    assert float(variable.value) == read
    assert [float(x) for x in strategy.experimental_local_results(inside)] == [3.0, 4.0]
    assert [float(x) for x in strategy.experimental_local_results(strategy.run(lambda: variable + 1))] == [4.0, 5.0]
    assert float(variable + 1) == read + 1


@pytest.mark.parametrize(("aggregation", "components"), [("sum", [3.0, 3.0]), ("mean", [6.0, 6.0])])
def test_assigning_components_across_replicas(compiled, aggregation, components):
    variable = make(compiled, 0.0, synchronization="on_read", aggregation=aggregation)

    variable.assign(6.0)

    assert held(variable) == components
    assert float(variable.value) == 6.0
    if aggregation == "sum":
        with pytest.raises(ValueError, match="SyncOnReadVariable does not support `assign_sub`"):
            variable.assign_sub(1.0)
    else:
        variable.assign_add(1.0)
        assert held(variable) == [7.0, 7.0]


def test_components_without_aggregation_have_no_common_value(compiled):
    variable = make(compiled, 1.0, synchronization="on_read")

    variable.assign(2.0, read_value=False)

    assert held(variable) == [2.0, 2.0]
    with pytest.raises(ValueError, match="Could not convert"):
        variable.read_value()


def test_integer_components_of_a_sum_add_up_to_what_was_assigned(strategy):
    variable = make(strategy, [0, 0], synchronization="on_read", aggregation="sum")

    variable.assign([7, 8])
    assert held(variable) == [[4, 4], [3, 4]] and variable.numpy().tolist() == [7, 8]

    strategy.run(lambda: rx.get_replica_context().merge_call(lambda _: variable.assign([-5, 1])))
    assert variable.numpy().tolist() == [-5, 1]


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_an_assignment_across_replicas_of_a_run_returns_what_is_read_there(strategy, aggregation):
    variable = make(strategy, 1.0, synchronization="on_read", aggregation=aggregation)

    def step():
        return rx.get_replica_context().merge_call(lambda _: variable.assign(6.0))

    result = strategy.run(step)

    assert rx.locality(result) == "M" and float(result) == float(variable.value) == 6.0


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("where", ["host", "scope", "merge"])
def test_what_nothing_combines_is_assigned_across_replicas_without_being_read(strategy, where, method):
    variable = make(strategy, 1.0, synchronization="on_read", aggregation="none")

    def assign(read_value):
        if where == "host":
            return getattr(variable, method)(2.0, read_value=read_value)
        if where == "scope":
            with strategy.scope():
                return getattr(variable, method)(2.0, read_value=read_value)
        merge = lambda _: getattr(variable, method)(2.0, read_value=read_value)  # noqa: E731
        return strategy.run(lambda: rx.get_replica_context().merge_call(merge))

    with pytest.raises(ValueError, match="Could not convert from VariableAggregation.NONE"):
        assign(read_value=True)
    assert held(variable) == [1.0, 1.0]

    assert assign(read_value=False) is None
    assert held(variable) == [{"assign": 2.0, "assign_add": 3.0, "assign_sub": -1.0}[method]] * 2


@pytest.mark.parametrize("aggregation", ["sum", "none"])
def test_a_single_component_is_the_value(aggregation):
    for strategy in (rx.get_strategy(), rx.OneDeviceStrategy("cpu:0"), rx.MirroredStrategy(jax.devices()[:1])):
        variable = make(strategy, 1.0, synchronization="on_read", aggregation=aggregation)
        variable.assign_add(2.0)
        variable.assign_add(rx.PerReplica((3.0,)))

        assert float(variable.value) == 6.0


# -- values per replica that a step did not get as an argument


def laid_out(strategy):
    return {
        "parts": rx.PerReplica((jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))),
        "rows": strategy.run(lambda: jnp.array([1.0, 2.0]) + 2.0 * me()),
    }


@pytest.mark.parametrize("form", ["parts", "rows"])
def test_a_captured_value_per_replica_is_each_replicas_own(strategy, form):
    captured = laid_out(strategy)[form]
    mean = make(strategy, [0.0, 0.0], aggregation="mean")
    first = make(strategy, [0.0, 0.0], aggregation="only_first_replica")
    apart = make(strategy, [0.0, 0.0], synchronization="on_read", aggregation="sum")

    def step():
        context = rx.get_replica_context()
        mean.assign(captured)
        first.assign(captured)
        apart.assign(captured)
        merged = context.merge_call(lambda s, x: s.reduce("sum", x) + sum(s.experimental_local_results(x)), (captured,))
        return jnp.negative(captured), context.all_reduce("sum", captured), context.all_gather(captured, 0), merged

    own, total, gathered, merged = strategy.run(step)

    assert [x.tolist() for x in own.values] == [[-1.0, -2.0], [-3.0, -4.0]]
    assert (total.tolist(), gathered.tolist(), merged.tolist()) == ([4.0, 6.0], [1.0, 2.0, 3.0, 4.0], [8.0, 12.0])
    assert (held(mean), held(first)) == ([[2.0, 3.0]] * 2, [[1.0, 2.0]] * 2)
    assert held(apart) == [[1.0, 2.0], [3.0, 4.0]]


def test_a_captured_value_per_replica_is_still_one_that_differs(strategy):
    captured = laid_out(strategy)["rows"]
    mirrored = make(strategy, [0.0, 0.0])
    mine = make(strategy, [0.0, 0.0, 0.0], aggregation="mean")

    with pytest.raises(rx.LocalityError, match="'v'"):
        strategy.run(lambda: mirrored.assign(captured))
    with pytest.raises(ValueError, match="another shape"):
        strategy.run(lambda: mine.assign(captured))
    with pytest.raises(ValueError, match="2 components|3 components"):
        strategy.run(lambda: jnp.negative(rx.PerReplica((1.0, 2.0, 3.0))))
    short = next(iter(strategy.distribute_dataset([np.arange(3.0)])))
    with pytest.raises(ValueError, match="captured and did not get as an argument"):
        strategy.run(lambda: jnp.negative(short))


# -- being array-like


def test_operators_are_those_of_the_value(compiled):
    v = make(compiled, 7)
    assert [int(x) for x in (v + 1, 3 + v, v - 2, 13 - v, v * 2, v // 3, 15 // v, v % 2, 16 % v)] == [
        8, 10, 5, 6, 14, 2, 2, 1, 2,
    ]  # fmt: skip
    assert [bool(x) for x in (v < 12, v > 12, v <= 7, v >= 8)] == [True, False, True, False]
    assert [int(x) for x in (v & 3, 11 & v, v | 8, 16 | v, v ^ 3, 11 ^ v, v**3, 2**v, -v, ~v, abs(v))] == [
        3, 3, 15, 23, 4, 12, 343, 128, -7, -8, 7,
    ]  # fmt: skip
    assert float(v / 2) == 3.5 and float(v) == 7.0 and int(v) == 7 and complex(v) == 7
    assert [int(x) for x in (pow(v, 3, 10), +v, v << 1, 1 << v, v >> 1, *divmod(v, 2), *divmod(15, v), round(v))] == [
        3, 7, 14, 128, 3, 3, 1, 2, 1, 7,
    ]  # fmt: skip
    assert list(range(v)) == list(range(7))
    with pytest.raises(IndexError):
        _ = v[2]
    assert {v: "a key"}[v] == "a key"
    w = make(compiled, jnp.arange(6.0).reshape(2, 3))
    assert (w @ jnp.ones(3)).tolist() == [3.0, 12.0]
    assert w[1].tolist() == [3.0, 4.0, 5.0] and w.T.shape == (3, 2) and len(w) == 2
    assert float(jnp.asarray(w).sum()) == 15.0


def test_numpy_leaves_operators_to_the_variable(strategy):
    variable = make(strategy, jnp.array([1.0, 2.0]))

    for result in (
        np.ones(2) * variable,
        np.float32(2) * variable / 2,
        strategy.run(lambda: np.ones(2) * variable.value),
        strategy.run(lambda: np.ones((2, 2)) @ variable - np.array([2.0, 1.0])),
    ):
        assert isinstance(result, jax.Array) and result.dtype == jnp.float32 and result.tolist() == [1.0, 2.0]


def test_values_handed_out_outlive_later_steps(compiled):
    variable = make(compiled, jnp.zeros(4), aggregation="mean")
    kept = [variable.value]
    for _ in range(3):
        compiled.run(lambda: variable.assign_add(jnp.ones(4)))
        kept.append(variable.value)

    assert [float(array[0]) for array in kept] == [0.0, 1.0, 2.0, 3.0]


def test_the_users_array_is_never_taken(compiled):
    mine = jnp.ones(4)
    variable = make(compiled, mine)
    compiled.run(lambda: variable.assign(variable.value + 1))
    variable.assign(mine)
    compiled.run(lambda: variable.assign(variable.value + 1))

    assert mine.tolist() == [1.0] * 4
    assert variable.numpy().tolist() == [2.0] * 4


def test_gradients_are_those_of_the_replica(compiled):
    variable = make(compiled, 1.0)

    (gradient,) = compiled.run(lambda: rx.grad(lambda: 2.0 * variable.value * (me() + 1), [variable])())

    assert [float(g) for g in gradient.values] == [2.0, 4.0]
    assert float(rx.grad(lambda: 2.0 * variable.value, variable)()) == 2.0


def test_gradients_across_replicas_are_those_of_the_one_value(strategy):
    variable = make(strategy, 1.0)
    gradient = rx.grad(lambda: 2.0 * variable.value, variable)

    with strategy.scope():
        assert float(gradient()) == 2.0
    assert float(strategy.run(lambda: rx.get_replica_context().merge_call(lambda strategy: gradient()))) == 2.0


@pytest.mark.parametrize(
    "options", [{}, {"synchronization": "on_read", "aggregation": "mean"}], ids=["mirrored", "on-read"]
)
def test_what_lies_on_another_device_is_brought_to_the_variable(strategy, options):
    variable, far = make(strategy, jnp.zeros(2), **options), jax.device_put(jnp.ones(2), jax.devices()[5])

    variable.assign(far)
    variable.assign_add(far)
    strategy.extended.update(variable, lambda v, x: v.assign_sub(3 * x), args=(far,))
    if not options:
        variable.scatter_add(rx.IndexedSlices(far[:1], jax.device_put(jnp.array([1]), jax.devices()[6])))

    assert variable.numpy().tolist() == ([-1.0, -1.0] if options else [-1.0, 0.0])
    assert variable.devices == tuple(jax.devices()[:2])


def test_a_number_that_no_array_holds_is_not_assigned(compiled):
    variable = make(compiled, 1)

    for assign in (lambda: variable.assign(2**40), lambda: compiled.run(lambda: variable.assign(2**40))):
        with pytest.raises(rx.VariableError, match="1099511627776"):
            assign()


def test_reading_under_another_strategy_is_refused(compiled):
    variable = make(compiled, 1.0)
    with rx.MirroredStrategy(jax.devices()[2:4]).scope(), pytest.raises(RuntimeError, match="Mixing"):
        _ = variable.value


def test_a_variable_from_outside_any_scope_is_read_by_every_replica(strategy):
    outside = rx.Variable(2.0, name="outside")

    result = strategy.run(lambda: me() + outside.value)

    assert [float(x) for x in strategy.experimental_local_results(result)] == [2.0, 3.0]


def test_a_creator_sees_all_options(compiled):
    seen = []

    def creator(next_creator, **options):
        seen.append(options)
        return next_creator(**options)

    with compiled.scope(), rx.variable_creator_scope(creator):
        rx.Variable(1.0)
        rx.Variable(1.0, name="w", synchronization="on_read", aggregation=None, trainable=True)

    first, second = seen
    assert first["initial_value"] == 1.0 and first["name"] is first["dtype"] is first["trainable"] is None
    assert first["synchronization"] is rx.VariableSynchronization.AUTO
    assert first["aggregation"] is second["aggregation"] is rx.VariableAggregation.NONE
    assert second["synchronization"] is rx.VariableSynchronization.ON_READ
    assert second["name"] == "w" and second["trainable"] is True


def test_creators_wrap_each_other(compiled):
    order = []

    def creator(name):
        def create(next_creator, **kwargs):
            order.append(name)
            return next_creator(**kwargs)

        return create

    with compiled.scope(), rx.variable_creator_scope(creator("outer")), rx.variable_creator_scope(creator("inner")):
        rx.Variable(1.0)

    assert order == ["inner", "outer"]


def test_a_random_key_is_a_value_like_any_other(strategy):
    key = make(strategy, jax.random.key(0))

    def step():
        mine, following = jax.random.split(key.value)
        key.assign(following)
        return jax.random.normal(mine)

    first, second = float(strategy.run(step)), float(strategy.run(step))

    assert first == float(jax.random.normal(jax.random.split(jax.random.key(0))[0]))
    assert first != second


@pytest.mark.parametrize("where", ["host", "compiled", "eager"])
@pytest.mark.parametrize("function", [jnp.exp, jax.jit(jnp.exp), jax.vmap(jnp.exp)], ids=["jnp", "jit", "vmap"])
def test_a_jax_function_takes_a_variable_for_its_value(function, where):
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=where == "eager")
    with strategy.scope():
        w = rx.Variable(jnp.zeros(3), name="w")

    for expected in (1.0, np.e):  # the second time with the value that it has by then
        result = function(w) if where == "host" else strategy.run(lambda: function(w))

        np.testing.assert_allclose(result, np.full(3, expected), rtol=1e-6)
        w.assign_add(jnp.ones(3))


def test_a_value_that_is_set_says_which_method_writes():
    w = rx.Variable(1.0, name="w")

    with pytest.raises(AttributeError, match=r"write w\.assign\(x\)"):
        w.value = 2.0


def test_a_loss_that_is_no_function_is_refused_with_the_function_to_write():
    w = rx.Variable(1.0)

    with pytest.raises(
        TypeError, match=r"(?s)takes the function that computes the loss:\n\n  f  .*There is no tape.*lambda"
    ):
        rx.value_and_grad(w.value * 2, [w])
