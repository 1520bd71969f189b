"""What is saved under one strategy is restored under any other, and nothing is restored half."""

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax import (
    Checkpoint,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    CheckpointMismatchError,
    ContextError,
    NotConsumedError,
    VariableError,
)
from replicax.train import _store, latest_checkpoint
from tests.strategies import COMPILED
from tests.strategies import STRATEGIES as ALL_STRATEGIES

STRATEGIES = {
    "default": rx.get_strategy,
    "one-device": lambda: rx.OneDeviceStrategy(jax.devices()[3]),
    "mirrored-2": lambda: rx.MirroredStrategy(jax.devices()[:2]),
    "mirrored-3": lambda: rx.MirroredStrategy(jax.devices()[:3]),
    "mirrored-2-eager": lambda: rx.MirroredStrategy(jax.devices()[:2], eager=True),
    "mirrored-8": lambda: rx.MirroredStrategy(jax.devices()),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(params=STRATEGIES)
def other(request):
    return STRATEGIES[request.param]()


def variable(strategy, value, **options):
    with strategy.scope():
        return rx.Variable(value, **options)


def mirrored(count):
    return rx.MirroredStrategy(jax.devices()[:count])


def on_read(count, aggregation, components):
    """A variable with these components, made by a step as users do."""
    strategy = mirrored(count)
    made = variable(strategy, np.zeros_like(components[0]), synchronization="on_read", aggregation=aggregation)
    held = jnp.asarray(components)
    strategy.run(lambda: made.assign(held[rx.get_replica_context().replica_id_in_sync_group], read_value=False))
    assert [float(component) for component in made.values] == list(map(float, components))
    return made


# -- variables


def test_a_mirrored_variable_is_one_value_everywhere(tmp_path, strategy, other):
    saved, restored = variable(strategy, [3.0, 4.0]), variable(other, [0.0, 0.0])

    path = Checkpoint(w=saved).save(tmp_path / "c")
    Checkpoint(w=restored).restore(path).assert_consumed()

    assert all(component.tolist() == [3.0, 4.0] for component in restored.values)


def test_restoring_undoes_what_happened_since_the_save(tmp_path, strategy):
    w = variable(strategy, 3.0)
    checkpoint = Checkpoint(w=w)
    path = checkpoint.save(tmp_path / "c")

    w.assign(5.0)
    checkpoint.restore(path)

    assert [float(component) for component in w.values] == [3.0] * len(w.values)


SHARDED = {"mirrored_2", "mirrored_4", "tpu_2"}


@pytest.mark.parametrize("name", ALL_STRATEGIES)
def test_what_is_restored_under_a_strategy_is_saved_by_it_bit_for_bit(tmp_path, name, half_trained):
    """Files tell nothing of strategies: if each one passes these digests on, each one's files load under each other."""
    path, expected, _ = half_trained

    saved = restored(name, path).checkpoint.save(tmp_path / "again")

    assert {name: leaf.digest for name, leaf in _store.read_manifest(saved).leaves.items()} == expected


@pytest.mark.parametrize("name", COMPILED)
def test_the_step_after_a_restore_is_the_same_under_every_strategy(name, half_trained):
    path, _, after = half_trained
    run = restored(name, path)

    run.step()

    np.testing.assert_allclose(run.w.numpy(), after, rtol=0, atol=1e-5 * np.abs(after).max())
    assert float(run.seen) == 12 + 8 + 12


def restored(name, path):
    run = Training(ALL_STRATEGIES[name](), shard_state=name in SHARDED)
    run.checkpoint.restore(path).assert_consumed()
    return run


class Training:
    """A model with everything that can be saved differently: slots, an on-read count, a key, a position in the data."""

    def __init__(self, strategy, shard_state=False):
        self.strategy = strategy
        with strategy.scope():
            self.w = rx.Variable(np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12), name="w")
            self.seen = rx.Variable(0, synchronization="on_read", aggregation="sum", trainable=False, name="seen")
            self.key = rx.Variable(jax.random.key(1), trainable=False, name="key")
            self.opt = rx.Optimizer(optax.adam(0.1), gradients="mean", shard_state=shard_state)
            self.opt.build([self.w])
        rows = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
        self.data = strategy.distribute_dataset(rx.data.from_arrays(rows, batch_size=12, shuffle=1, epochs=2))
        self.batches = iter(self.data)
        self.checkpoint = Checkpoint(w=self.w, seen=self.seen, key=self.key, opt=self.opt, data=self.batches)

    def step(self):
        self.strategy.run(self._step, (next(self.batches),))

    def _step(self, x):
        key, sub = jax.random.split(self.key.value)
        target = jax.random.normal(sub, (12,))
        gradients = rx.grad(lambda: rx.mean(((x @ self.w.value - target) ** 2).sum(1)), [self.w])()
        self.opt.apply_gradients(zip(gradients, [self.w], strict=True))
        self.key.assign(key)
        counts = rx.valid_counts()
        self.seen.assign_add(len(x) if counts is None else counts[0], read_value=False)


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory):
    """A checkpoint after two of three batches, the digests in it, and a weight after the third."""
    run = Training(mirrored(3))
    for _ in range(2):
        run.step()
    path = run.checkpoint.save(tmp_path_factory.mktemp("half") / "c")
    digests = {name: leaf.digest for name, leaf in _store.read_manifest(path).leaves.items()}
    run.step()
    return path, digests, run.w.numpy()


TOWERS = {"sum": ([3.0, 4.0], 7.0), "mean": ([3.0, 4.0], 3.5), "only_first_replica": ([3.0, 4.0], 3.0)}


@pytest.mark.parametrize("aggregation", TOWERS)
def test_an_on_read_variable_is_saved_combined_and_restored_in_shares(tmp_path, aggregation):
    components, combined = TOWERS[aggregation]
    path = Checkpoint(v=on_read(2, aggregation, components)).save(tmp_path / "c")

    plain, three = rx.Variable(0.0), on_read(3, aggregation, [0.0, 0.0, 0.0])
    Checkpoint(v=plain).restore(path).assert_consumed()
    Checkpoint(v=three).restore(path).assert_consumed()

    share = combined / 3 if aggregation == "sum" else combined
    assert float(plain) == combined
    assert [float(component) for component in three.values] == [np.float32(share)] * 3
    assert float(three) == combined


@pytest.mark.parametrize(("aggregation", "share"), [("sum", 1.75), ("mean", 3.5)])
def test_a_plain_variable_is_restored_into_an_on_read_one(tmp_path, aggregation, share):
    path = Checkpoint(v=rx.Variable(3.5)).save(tmp_path / "c")
    two = on_read(2, aggregation, [0.0, 0.0])

    Checkpoint(v=two).restore(path).assert_consumed()

    assert [float(component) for component in two.values] == [share, share]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_a_count_on_any_number_of_replicas_loses_nothing(tmp_path, count):
    """Equal shares of 7 cannot be integers on 3 replicas: the first one holds the rest."""
    path = Checkpoint(seen=rx.Variable(np.array([7, -7, 0]))).save(tmp_path / "c")
    strategy = mirrored(count)
    seen = variable(strategy, np.zeros(3, int), synchronization="on_read", aggregation="sum")

    Checkpoint(seen=seen).restore(path).assert_consumed()

    assert seen.numpy().tolist() == [7, -7, 0]


def test_components_without_an_aggregation_cannot_be_saved(tmp_path):
    made = on_read(2, "none", [1.0, 2.0])

    with pytest.raises(VariableError):
        Checkpoint(v=made).save(tmp_path / "c")

    assert not (tmp_path / "c").exists()


def test_a_save_does_not_make_the_next_step_copy_or_compile(tmp_path, compilations):
    strategy = mirrored(2)
    w = variable(strategy, np.zeros((256, 256), np.float32))
    step = functools.partial(w.assign_add, 1.0, read_value=False)
    for _ in range(2):
        strategy.run(step)

    pending = Checkpoint(w=w).save_async(tmp_path / "c")
    shared = w._shared
    with compilations() as names:
        strategy.run(step)
    pending.wait()

    assert not shared
    assert names == []
    fresh = rx.Variable(np.zeros((256, 256), np.float32))
    Checkpoint(w=fresh).restore(tmp_path / "c")
    assert (fresh.numpy() == 2).all()


def test_an_asynchronous_save_holds_the_values_of_the_call(tmp_path, strategy):
    w = variable(strategy, np.zeros((300, 300), np.float32))
    seen = variable(strategy, 0.0, synchronization="on_read", aggregation="sum")
    checkpoint = Checkpoint(w=w, seen=seen)

    def step():
        w.assign_add(jnp.ones(()))
        seen.assign_add(1.0 / strategy.num_replicas_in_sync)

    pending = []
    for i in range(6):
        pending.append(checkpoint.save_async(tmp_path / str(i)))
        strategy.run(step)
    for save in pending:
        save.wait()

    for i in range(6):
        checkpoint.restore(tmp_path / str(i)).assert_consumed()
        assert (w.numpy() == i).all()
        assert float(seen) == pytest.approx(i, rel=1e-6)


# -- objects


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    params: Any
    step: jax.Array
    opt: Any


def train_state(seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (4, 3)), "b": jnp.full(3, float(seed))}
    return TrainState(params, jnp.asarray(seed), optax.adam(0.1).init(params))


def same(a, b):
    def data(x):
        return jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else np.asarray(x)

    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(data(x), data(y)) and jnp.asarray(x).dtype == jnp.asarray(y).dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_pytree_is_rebuilt_where_it_is_held(tmp_path):
    path = Checkpoint(state=train_state(1), held={"state": train_state(2)}).save(tmp_path / "c")
    held = {"state": train_state(0), "settings": None}
    checkpoint = Checkpoint(state=train_state(0), held=held)

    checkpoint.restore(path).assert_consumed()

    assert same(checkpoint.state, train_state(1))
    assert same(held["state"], train_state(2))


def test_restored_arrays_lie_where_the_old_ones_lay(tmp_path):
    path = Checkpoint(x=jnp.arange(8.0)).save(tmp_path / "c")
    placed = jax.device_put(jnp.zeros(8), mirrored(4).placement.split)
    free = jnp.zeros(8)
    spread, loose = Checkpoint(x=placed), Checkpoint(x=free)

    spread.restore(path)
    loose.restore(path)

    assert spread.x.sharding == placed.sharding
    assert not loose.x.committed
    assert same([spread.x, loose.x], [jnp.arange(8.0)] * 2)


def test_numbers_random_keys_and_generators_come_back_as_they_were(tmp_path):
    generator = np.random.default_rng(7)
    generator.random(5)
    path = Checkpoint(
        step=3, rate=0.5, done=True, key=jax.random.key(4), numpy=np.float16(2), noise=generator
    ).save(tmp_path / "c")  # fmt: skip
    expected = generator.random(3)

    other = np.random.default_rng(0)
    checkpoint = Checkpoint(step=0, rate=0.0, done=False, key=jax.random.key(0), numpy=np.float16(0), noise=other)
    checkpoint.restore(path).assert_consumed()

    assert (checkpoint.step, checkpoint.rate, checkpoint.done) == (3, 0.5, True)
    assert (type(checkpoint.step), type(checkpoint.done), type(checkpoint.numpy)) == (int, bool, np.float16)
    assert same(checkpoint.key, jax.random.key(4))
    assert other.random(3).tolist() == expected.tolist()


class Layer:
    """Callable, as layers are, and with a function among its attributes."""

    def __call__(self, x):
        return self.activation(x @ self.kernel.value)

    def __init__(self, width):
        self.width = width  # a setting, not state
        self.activation = jax.nn.relu
        self.kernel = rx.Variable(np.full((width, width), float(width)))
        self._cache = rx.Variable(0.0)


class Model:
    def __init__(self, *widths):
        self.name = "model"
        self.layers = [Layer(width) for width in widths]
        self.mean = rx.metrics.Mean()
        self.itself = self


def test_the_users_own_objects_are_walked_by_their_public_attributes(tmp_path):
    path = Checkpoint(model=Model(1, 2)).save(tmp_path / "c")
    model = Model(1, 2)
    for layer in model.layers:
        layer.kernel.assign(layer.kernel.value * 0)

    status = Checkpoint(model=model).restore(path).assert_consumed()

    assert sorted(status.restored) == ["model/layers/0/kernel", "model/layers/1/kernel", "model/mean/variable"]
    assert [float(layer.kernel.value[0, 0]) for layer in model.layers] == [1.0, 2.0]


def test_functions_in_a_pytree_are_settings_and_stay(tmp_path):
    path = Checkpoint(model=(jnp.ones(2), jax.nn.relu)).save(tmp_path / "c")
    checkpoint = Checkpoint(model=(jnp.zeros(2), jax.nn.tanh))

    status = checkpoint.restore(path).assert_consumed()

    assert status.restored == ["model/0"]
    assert checkpoint.model[0].tolist() == [1.0, 1.0]
    assert checkpoint.model[1] is jax.nn.tanh


def test_a_variable_with_two_names_is_saved_once_and_found_under_either(tmp_path):
    w = rx.Variable([1.0, 2.0])
    path = Checkpoint(model={"w": w}, best=[w]).save(tmp_path / "c")

    by_first, by_second, by_both = (rx.Variable([0.0, 0.0]) for _ in range(3))
    Checkpoint(model={"w": by_first}).restore(path).assert_consumed()
    Checkpoint(best=[by_second]).restore(path).assert_consumed()
    Checkpoint(best=[by_both], model={"w": by_both}).restore(path).assert_consumed()

    assert [v.numpy().tolist() for v in (by_first, by_second, by_both)] == [[1.0, 2.0]] * 3


def test_checkpoints_can_be_nested(tmp_path):
    def nested(value):
        return Checkpoint(model=Checkpoint(w=rx.Variable(value), state=(jnp.asarray(value), value)), step=int(value))

    path = nested(2.0).save(tmp_path / "c")
    outer = nested(0.0)
    outer.restore(path).assert_consumed()

    assert float(outer.model.w) == 2.0
    assert same(outer.model.state, (jnp.asarray(2.0), 2.0))
    assert outer.step == 2


class Counter:
    """Something with a state of its own, as a data iterator has."""

    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STATES = {
    "numbers": {"epoch": 1, "batch": 2**70, "loss": 0.1, "name": "train", "none": None, "yes": True},
    "nested": [1, (2, [3, {"x": (4,)}])],
    "bytes": b"\x00\xff",
    "keys that are no strings": {1: "a", (2, 3): "b"},
    "keys that look like ours": {"@array": 1},
    "numpy scalar": np.int64(3),
    "empty": {},
}


@pytest.mark.parametrize("kind", STATES)
def test_any_state_made_of_plain_values_comes_back_as_it_was(tmp_path, kind):
    path = Checkpoint(data=Counter(STATES[kind])).save(tmp_path / "c")
    counter = Counter()

    Checkpoint(data=counter).restore(path).assert_consumed()

    assert counter.state == STATES[kind]


def test_a_state_may_hold_arrays(tmp_path):
    state = {"order": np.arange(5), "at": (1, jnp.ones(2)), "more": [{"x": np.zeros(300_000)}]}
    path = Checkpoint(data=Counter(state), w=rx.Variable(1.0)).save(tmp_path / "c")
    counter = Counter()

    Checkpoint(data=counter, w=rx.Variable(0.0)).restore(path).assert_consumed()

    assert same(counter.state, state)


REFUSED = {
    "text": ("hello", "name  str  is not an array"),
    "a function": (len, "name  builtin_function_or_method  is not an array"),
    "a compiled function": (jax.jit(jnp.sin), "name  PjitFunction  is not an array"),
    "functions in a tuple": ((len, jnp.sin), "name  tuple  holds nothing but functions"),
    "a strategy": (rx.OneDeviceStrategy("cpu:0"), "name  OneDeviceStrategy  holds no variable"),
    "an empty object": (Counter.__new__(type("Empty", (), {})), "name  Empty  holds no variable"),
    "a per-replica value": (rx.PerReplica((1.0, 2.0)), "name  PerReplica  differs per replica"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path, kind):
    value, words = REFUSED[kind]

    with pytest.raises(CheckpointError, match=words):
        Checkpoint(name=value).save(tmp_path / "c")


def test_a_state_that_cannot_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"data/seen/1  set\n(?s:.*)`get_state\(\)` may return"):
        Checkpoint(data=Counter({"seen": [1, {2}]})).save(tmp_path / "c")


def test_two_values_under_one_path_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a/b/c  is the path of two different values"):
        Checkpoint(a={"b/c": 1, "b": {"c": 2}}).save(tmp_path / "c")


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_files_are_not_touched_inside_a_step(tmp_path, verb, strategy):
    checkpoint = Checkpoint(w=variable(strategy, 1.0))

    with pytest.raises(ContextError, match=rf"`checkpoint.{verb}\(...\)` was called inside a step"):
        strategy.run(lambda: getattr(checkpoint, verb)(tmp_path / "c"))


def test_a_scope_may_be_entered_around_save_and_restore(tmp_path, strategy):
    with strategy.scope():
        w = rx.Variable(2.0)
        path = Checkpoint(w=w).save(tmp_path / "c")
        w.assign(0.0)
        Checkpoint(w=w).restore(path).assert_consumed()

    assert float(w) == 2.0


def test_what_is_no_checkpoint_is_named_for_what_it_is(tmp_path):
    checkpoint = Checkpoint(w=rx.Variable(1.0))
    with CheckpointManager(checkpoint, tmp_path / "m") as manager:
        manager.save(1)
        manager.save(2)
    (tmp_path / "file").write_text("notes")
    (tmp_path / "folder").mkdir()
    part = next((tmp_path / "m" / "ckpt-2").glob("arrays-*"))

    for path, words in {
        "m": r"m is not a checkpoint, but a directory of checkpoints:\n\n  ckpt-1, ckpt-2\n(?s:.*)m/ckpt-2\"\)",
        part: r"is a part of a checkpoint(?s:.*)restore\(\".*m/ckpt-2\"\)",
        "m/ckpt-3": r"There is no checkpoint at .*/ckpt-3:\n\n  .*m holds ckpt-1, ckpt-2\n",
        "nowhere/at/all": "There is no checkpoint at .*/nowhere/at/all",
        "file": r"What is there was not written by `rx.Checkpoint`",
        "folder": r"What is there was not written by `rx.Checkpoint`",
    }.items():
        with pytest.raises(CheckpointDamagedError, match=words):
            checkpoint.restore(tmp_path / path)
    with pytest.raises(TypeError, match=r"`checkpoint.restore\(3\)` takes the path"):
        checkpoint.restore(3)
    for path, words in {"m/ckpt-1": r"is itself a checkpoint(?s:.*)/m\"\)", "file": "is a file"}.items():
        with pytest.raises(CheckpointError, match=words):
            CheckpointManager(checkpoint, tmp_path / path)


def test_the_names_of_methods_are_not_names_of_objects():
    with pytest.raises(CheckpointError, match=r"`rx.Checkpoint\(save=...\)` uses a name that is taken"):
        Checkpoint(save=1)


# -- what does not cover each other


def test_what_is_missing_and_what_is_left_over_is_told(tmp_path):
    path = Checkpoint(a=rx.Variable(1.0), b=rx.Variable(2.0), data=Counter(1)).save(tmp_path / "c")
    a, c = rx.Variable(0.0), rx.Variable(0.0)

    status = Checkpoint(a=a, c=c).restore(path)

    assert (status.restored, status.missing, status.unused) == (["a"], ["c"], ["b", "data"])
    with pytest.raises(
        NotConsumedError, match="c  has no saved value\n  b  was saved and is used by no object\n  data"
    ):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="c  has no saved value\n\n"):
        status.assert_existing_objects_matched()
    assert status.assert_nontrivial_match().expect_partial().unused == []
    assert float(a) == 1.0


def test_a_restore_without_a_checkpoint_changes_nothing_and_is_not_taken_for_one():
    w = rx.Variable(1.0)

    status = Checkpoint(w=w).restore(None)

    assert (status.path, status.missing) == (None, ["w"])
    with pytest.raises(NotConsumedError, match="there was no checkpoint"):
        status.assert_consumed()


def test_values_that_do_not_fit_are_all_listed_and_none_is_restored(tmp_path):
    path = Checkpoint(a=rx.Variable(1.0), b=rx.Variable([1.0]), c=rx.Variable(1)).save(tmp_path / "c")
    a, b, c = rx.Variable(0.0), rx.Variable([0.0, 0.0]), rx.Variable(0.0)

    with pytest.raises(CheckpointMismatchError, match=r"b  saved float32\[1\], wanted float32\[2\]\n  c  saved int32"):
        Checkpoint(a=a, b=b, c=c).restore(path)

    assert float(a) == 0.0


# -- restored before it is made


def test_an_object_attached_after_the_restore_begins_with_the_saved_values(tmp_path, strategy):
    path = Checkpoint(model={"w": rx.Variable(3.0)}, data=Counter(7)).save(tmp_path / "c")
    checkpoint = Checkpoint()
    status = checkpoint.restore(path)
    assert status.unused == ["model/w", "data"]

    checkpoint.model = {"w": variable(strategy, 0.0)}
    checkpoint.data = Counter()

    assert [float(component) for component in checkpoint.model["w"].values] == [3.0] * len(checkpoint.model["w"].values)
    assert checkpoint.data.state == 7
    status.assert_consumed()


def test_an_object_attached_to_a_nested_checkpoint_begins_with_the_saved_values(tmp_path):
    path = Checkpoint(model=Checkpoint(w=rx.Variable(3.0))).save(tmp_path / "c")
    outer = Checkpoint(model=Checkpoint())
    status = outer.restore(path)

    outer.model.w = rx.Variable(0.0)

    assert float(outer.model.w) == 3.0
    status.assert_consumed()


class Lazy:
    """Makes its weight when it is first called."""

    def __init__(self):
        self.weight = None

    def __call__(self, x):
        if self.weight is None:
            self.weight = rx.Variable(jnp.zeros(2), name="weight")
        return (x * self.weight.value).sum()


def test_a_variable_that_a_step_makes_begins_with_the_saved_value(tmp_path):
    path = Checkpoint(model={"weight": rx.Variable([5.0, 6.0])}).save(tmp_path / "c")
    strategy, model = mirrored(4), Lazy()
    status = Checkpoint(model=model).restore(path)
    assert (status.restored, status.unused) == ([], ["model/weight"])

    with strategy.scope():
        result = strategy.run(lambda: model(jnp.ones(2)))

    assert float(result) == 11.0
    assert [component.tolist() for component in model.weight.values] == [[5.0, 6.0]] * 4
    assert status.assert_consumed().restored == ["model/weight"]


def test_a_variable_made_too_late_for_its_saved_value_is_told_at_the_next_save(tmp_path):
    path = Checkpoint(model={"weight": rx.Variable([5.0, 6.0])}).save(tmp_path / "c")
    model = Lazy()
    checkpoint = Checkpoint(model=model)
    checkpoint.restore(path)
    model(jnp.ones(2))

    with pytest.warns(RuntimeWarning, match=r"were not given to what was made for them:\n\n  model/weight"):
        checkpoint.save(tmp_path / "d")


def test_a_value_is_given_once(tmp_path):
    path = Checkpoint(state={"x": jnp.ones(2)}).save(tmp_path / "c")
    checkpoint = Checkpoint()
    checkpoint.restore(path).expect_partial()
    checkpoint.state = {"x": jnp.zeros(2)}
    assert checkpoint.state["x"].tolist() == [0.0, 0.0], "after expect_partial nothing is given any more"

    checkpoint.restore(path)
    checkpoint.state = {"x": jnp.full(2, 5.0)}
    assert checkpoint.state["x"].tolist() == [5.0, 5.0], "the place had its value already"


def train_step(w, b, opt):
    x = jnp.linspace(-1.0, 1.0, 3)
    gradients = rx.grad(lambda: jnp.sum(jnp.square(x @ w.value + b.value - 1.0)), [w, b])()
    opt.apply_gradients(zip(gradients, [w, b], strict=True))


def trained(strategy, steps, path=None, build=False):
    """A model trained for so many steps, or restored from `path` before its optimizer has slots."""
    with strategy.scope():
        w, b = rx.Variable(np.ones((3, 2), np.float32), name="w"), rx.Variable(np.zeros(2, np.float32), name="b")
        opt = rx.Optimizer(optax.adam(0.1), gradients="mean")
    checkpoint = Checkpoint(model=[w, b], opt=opt)
    status = checkpoint.restore(path) if path is not None else None
    if build:
        opt.build([w, b])
        status.assert_consumed()

    for _ in range(steps):
        strategy.run(functools.partial(train_step, w, b, opt))
    if status is not None:
        status.assert_consumed()
    return checkpoint


def numbers(checkpoint):
    return [v.numpy() for v in (*checkpoint.model, *checkpoint.opt.slots)]


@functools.cache
def undisturbed(steps):
    return numbers(trained(mirrored(2), steps))


@pytest.mark.parametrize("build", [False, True], ids=["slots-made-in-the-step", "slots-built-first"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_optimizer_slots_made_after_the_restore_begin_with_the_saved_values(tmp_path, name, build):
    path = trained(mirrored(2), 3).save(tmp_path / "c")

    again = trained(STRATEGIES[name](), 2, path, build)

    for found, expected in zip(numbers(again), undisturbed(5), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_slots_are_named_after_their_variables(tmp_path):
    status = trained(mirrored(2), 1, trained(mirrored(2), 1).save(tmp_path / "c"))

    saved = Checkpoint().restore(tmp_path / "c").unused
    assert sorted(saved) == [
        "model/0", "model/1", "opt/state/0/count", "opt/state/0/mu/b", "opt/state/0/mu/w", "opt/state/0/nu/b",
        "opt/state/0/nu/w",
    ]  # fmt: skip
    assert numbers(status)


# -- the position in the data


def test_the_next_batch_after_a_restore_is_the_one_that_was_next_at_the_save(tmp_path):
    def batches():
        return rx.data.from_arrays({"x": np.arange(40)}, batch_size=8, shuffle=3)

    def rows(strategy, iterator):
        return [
            sorted(np.concatenate([np.asarray(part) for part in strategy.experimental_local_results(batch["x"])]))
            for batch in iterator
        ]

    two, four = mirrored(2), mirrored(4)
    iterator = iter(two.distribute_dataset(batches()))
    next(iterator)
    path = Checkpoint(data=iterator).save(tmp_path / "c")
    rest = rows(two, iterator)

    resumed = iter(four.distribute_dataset(batches()))
    Checkpoint(data=resumed).restore(path).assert_consumed()

    assert rows(four, resumed) == rest
    assert len(rest) == 4


# -- the manager


def managed(directory, **options):
    w = rx.Variable(0.0)
    return w, CheckpointManager(Checkpoint(w=w), directory, **options)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request):
    return request.param


def test_the_newest_checkpoints_are_kept(tmp_path, asynchronous):
    w, manager = managed(tmp_path / "m", max_to_keep=3, async_save=asynchronous)
    with manager:
        for step in range(1, 8):
            w.assign(float(step))
            assert manager.save(step) == str(tmp_path / "m" / f"ckpt-{step}")

    assert manager.all_steps == [5, 6, 7]
    assert manager.latest == 7
    assert manager.checkpoints == [str(tmp_path / "m" / f"ckpt-{step}") for step in (5, 6, 7)]
    assert manager.latest_checkpoint == latest_checkpoint(tmp_path / "m") == str(tmp_path / "m" / "ckpt-7")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["ckpt-5", "ckpt-6", "ckpt-7"]


def test_all_are_kept_if_that_is_wanted(tmp_path):
    _, manager = managed(tmp_path / "m", max_to_keep=None)
    with manager:
        for step in range(8):
            manager.save(step)

    assert manager.all_steps == list(range(8))


@pytest.mark.parametrize(("better", "kept", "best"), [("min", [2, 4, 6], 4), ("max", [1, 3, 6], 3)])
def test_the_best_checkpoints_are_kept_and_the_newest_one_too(tmp_path, better, kept, best):
    _, manager = managed(tmp_path / "m", max_to_keep=2, keep_best=("loss", better))
    losses = {1: 5.0, 2: 1.0, 3: 9.0, 4: 1.0, 5: 3.0, 6: 2.0}
    with manager:
        for step, loss in losses.items():
            manager.save(step, metrics={"loss": loss})

    assert (manager.all_steps, manager.best) == (kept, best)
    assert manager.best_checkpoint == str(tmp_path / "m" / f"ckpt-{best}")
    assert manager.metrics(best) == {"loss": losses[best]}


@pytest.mark.parametrize("better", ["min", "max"])
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, better):
    _, manager = managed(tmp_path / "m", max_to_keep=1, keep_best=("loss", better))
    with manager:
        for step, loss in enumerate([2.0, float("nan"), 2.0, float("nan")]):
            manager.save(step, metrics={"loss": loss})

    assert (manager.best, manager.all_steps) == (2, [2, 3])


def test_what_the_newest_checkpoint_does_not_hold_is_told(tmp_path):
    _, manager = managed(tmp_path / "m", async_save=False)
    manager.save(1)
    renamed = CheckpointManager(Checkpoint(weights=rx.Variable(5.0)), tmp_path / "m")

    with pytest.warns(RuntimeWarning, match=r"weights  has no saved value(?s:.*)w  was saved and is used by no object"):
        assert renamed.restore_latest() == 1


def test_a_best_one_needs_its_metric(tmp_path):
    _, manager = managed(tmp_path / "m", keep_best=("loss", "min"))

    with pytest.raises(ValueError, match=r"was not given the metric 'loss'(?s:.*)given: accuracy"):
        manager.save(1, metrics={"accuracy": 1.0})
    with pytest.raises(ValueError, match="given: none"):
        manager.save(1)


def test_steps_between_are_not_saved_unless_forced(tmp_path):
    _, manager = managed(tmp_path / "m", save_interval_steps=10, max_to_keep=None)
    with manager:
        saved = [step for step in range(1, 32) if manager.save(step) is not None]
        assert manager.save(33) is None
        assert manager.save(33, force=True) is not None

    assert saved == [1, 11, 21, 31]
    assert manager.all_steps == [1, 11, 21, 31, 33]


def test_steps_count_up_by_themselves(tmp_path):
    _, manager = managed(tmp_path / "m")
    with manager:
        manager.save()
        manager.save()
    with managed(tmp_path / "m")[1] as later:
        later.save()

    assert later.all_steps == [1, 2, 3]


def test_a_second_run_goes_on_from_the_newest_checkpoint(tmp_path, asynchronous):
    w, manager = managed(tmp_path / "m", async_save=asynchronous)
    assert manager.restore_or_initialize() is None
    with manager:
        for step in (1, 2):
            w.assign(float(step))
            manager.save(step)

    again, second = managed(tmp_path / "m")
    assert second.restore_or_initialize() == str(tmp_path / "m" / "ckpt-2")
    assert float(again) == 2.0


def test_without_a_checkpoint_the_initializer_is_called(tmp_path):
    called = []
    _, manager = managed(tmp_path / "m", init_fn=lambda: called.append("init"))

    assert manager.restore_or_initialize() is None
    assert called == ["init"]


def test_a_save_under_way_is_finished_before_the_newest_is_restored(tmp_path):
    w, manager = managed(tmp_path / "m")
    w.assign(4.0)
    manager.save(4)
    w.assign(0.0)

    assert manager.restore_latest() == 4
    assert float(w) == 4.0


def test_what_was_saved_last_can_be_asked_for_and_restored_at_once(tmp_path, monkeypatch):
    """As with tf.train.CheckpointManager, where a save is over when it returns."""
    write, may_write = _store._write, threading.Event()
    monkeypatch.setattr(_store, "_write", lambda *given: (may_write.wait(60), write(*given)))
    w, manager = managed(tmp_path / "m")
    asked = {
        "path": lambda path: path,
        "manager": lambda _: manager.latest_checkpoint,
        "folder": lambda _: latest_checkpoint(tmp_path / "m"),
    }
    for number, which in enumerate(asked.values(), start=1):
        w.assign(float(number))
        may_write.clear()
        path = manager.save(checkpoint_number=number)
        may_write.set()  # not before: nothing has been written when we ask
        assert which(path) == path
        w.assign(0.0)
        manager.checkpoint.restore(path)
        assert float(w) == number

    manager.save(7)
    assert (manager.latest, manager.metrics(7)) == (7, {})


def test_a_failed_save_is_raised_by_the_next_call(tmp_path):
    _, manager = managed(tmp_path / "m")
    (tmp_path / "m").write_text("a file where a folder should be")
    manager.save(1)

    with pytest.raises(CheckpointError, match="ckpt-1 was not written"):
        manager.save(2)
    manager.wait_until_finished()


def test_a_step_that_would_not_be_the_newest_is_refused(tmp_path):
    _, manager = managed(tmp_path / "m")
    with manager:
        manager.save(5)
        with pytest.raises(CheckpointError, match=r"`manager.save\(3\)` would not be the newest(?s:.*)ckpt-5"):
            manager.save(3)


def test_what_a_killed_save_left_is_removed_by_the_next_one(tmp_path):
    (tmp_path / "m" / "ckpt-3" / "arrays-0").mkdir(parents=True)
    _, manager = managed(tmp_path / "m")
    with pytest.warns(RuntimeWarning, match="ckpt-3 is incomplete"):
        assert manager.restore_latest() is None
    with manager:
        manager.save(1)

    assert [path.name for path in (tmp_path / "m").iterdir()] == ["ckpt-1"]


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "ckpt-notes.txt").write_text("mine")
    (tmp_path / "m" / "events").mkdir()
    with managed(tmp_path / "m", max_to_keep=1)[1] as manager:
        for step in range(3):
            manager.save(step)

    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["ckpt-2", "ckpt-notes.txt", "events"]


def test_a_checkpoint_that_does_not_fit_is_not_passed_over(tmp_path):
    with managed(tmp_path / "m")[1] as manager:
        manager.save(1)
    other = CheckpointManager(Checkpoint(w=rx.Variable([0.0, 0.0])), tmp_path / "m")

    with pytest.raises(CheckpointMismatchError):
        other.restore_latest()


@pytest.mark.parametrize("step", [-1, 1.5, "five", np.ones(2)])
def test_a_step_that_is_no_count_is_refused(tmp_path, step):
    _, manager = managed(tmp_path / "m")

    with pytest.raises(ValueError, match="takes the number of steps that are done"):
        manager.save(step)


def test_a_step_may_be_held_in_a_variable(tmp_path):
    with managed(tmp_path / "m")[1] as manager:
        manager.save(rx.Variable(5))

    assert manager.all_steps == [5]


def test_metrics_that_are_no_numbers_are_named(tmp_path):
    with pytest.raises(ValueError, match="takes numbers by name:\n\n  loss  ndarray(?s:.*)\n  name  str  could not"):
        managed(tmp_path / "m")[1].save(1, metrics={"loss": np.ones(2), "acc": 1, "name": "x"})


def test_a_manager_is_told_what_to_save(tmp_path):
    with pytest.raises(TypeError, match=r"rx.Checkpoint\(model=model"):
        CheckpointManager({"w": rx.Variable(0.0)}, tmp_path)


def test_objects_without_names_are_refused():
    with pytest.raises(CheckpointError, match=r"without names:\n\n  dict\n(?s:.*)rx.Checkpoint\(\*\*objects\)"):
        Checkpoint({"w": rx.Variable(0.0)})


def test_an_array_that_was_given_away_is_named(tmp_path):
    given = jnp.ones(3)
    given.delete()

    with pytest.raises(CheckpointError, match=r"no longer there:\n\n  state/x  float32\[3\]"):
        Checkpoint(state={"x": given}).save(tmp_path / "c")


@pytest.mark.parametrize(
    "options",
    [
        {"max_to_keep": 0},
        {"max_to_keep": "3"},
        {"save_interval_steps": 0},
        {"keep_best": ("loss", "lowest")},
        {"keep_best": "loss"},
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"`rx.CheckpointManager\("):
        managed(tmp_path / "m", **options)


def test_a_damaged_checkpoint_is_refused_before_any_object_changes(tmp_path):
    path = Checkpoint(a=rx.Variable(1.0), b=rx.Variable(np.ones(1 << 18))).save(tmp_path / "c")
    file = next((tmp_path / "c").glob("arrays-*/0000-b/0"))
    file.write_bytes(file.read_bytes()[:-4])
    a, b = rx.Variable(0.0), rx.Variable(np.zeros(1 << 18))

    with pytest.raises(CheckpointDamagedError, match=r"0000-b/0  1048572 bytes, were 1048576  \(holds b\)"):
        Checkpoint(a=a, b=b).restore(path)

    assert float(a) == 0.0


def test_a_python_number_takes_a_saved_number_of_its_kind(tmp_path):
    path = Checkpoint(state={"step": jnp.int32(7)}).save(tmp_path / "c")
    fresh = {"step": 0}

    Checkpoint(state=fresh).restore(path).assert_consumed()

    assert fresh == {"step": 7}
    with pytest.raises(CheckpointMismatchError, match=r"saved int32\[\], wanted float64\[\]"):
        Checkpoint(state={"step": 0.5}).restore(path)
