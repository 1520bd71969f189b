"""A Keras model made under a strategy's scope gives the results of one device, whatever the batches."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of keras, here or in a plugin

import subprocess
import sys
import textwrap

import jax
import keras
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from keras.layers import BatchNormalization, Dense, Dropout

import replicax as rx

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((9, 6)).astype(np.float32)
Y = RANDOM.integers(0, 3, 9)
WEIGHT = RANDOM.uniform(0.1, 2.0, 9).astype(np.float32)

RULES = rx.partition_rules([("kernel", PartitionSpec(None, "model")), (".*", PartitionSpec())])

STRATEGIES = {
    "mirrored-1": lambda: rx.MirroredStrategy(jax.devices()[:1]),
    "mirrored-4": lambda: rx.MirroredStrategy(jax.devices()[:4]),
    "one-device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "central-storage": lambda: rx.experimental.CentralStorageStrategy(jax.devices()[1:3], "cpu:0"),
    "tpu": lambda: rx.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local"), num_cores=2),
    "replicas-of-two": lambda: rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2}, variables=RULES),
    "fully-sharded": lambda: rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded(min_size=2)),
}


def make_model(layers=lambda: [BatchNormalization(), Dropout(0.3), Dense(4)], **compiled):
    """By default, everything that sees several rows at once or draws random numbers."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), *layers()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy(
        name="accuracy"
    )  # an object: it has variables from the beginning
    model.compile(optimizer, loss, metrics=[accuracy], weighted_metrics=[], **compiled)
    return model


def make_small():
    return make_model(lambda: [Dense(4)])


def under(strategy, make=make_model, **compiled):
    with strategy.scope():
        return make(**compiled)


def same(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def trained(model, *data, **options):
    history = model.fit(*data, **{"epochs": 2, "verbose": 0} | options)
    return history.history, model.get_weights()


def two_devices():
    return rx.MirroredStrategy(jax.devices()[:2])


def use_everything(model):
    """Nine rows in batches of four: 4, 4, 1; and seven: 4, 3."""
    return (
        trained(model, X, Y, batch_size=4, validation_data=(X[:7], Y[:7])),
        model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0),
        model.predict(X, batch_size=4, verbose=0),
        model.train_on_batch(X[:1], Y[:1]),
        model.test_on_batch(X[:3], Y[:3]),
        model.predict_on_batch(X[:1]),
        model.get_weights(),
    )


@pytest.fixture(scope="module")
def expected():
    return use_everything(make_model())


def test_everything_is_as_on_one_device_inside_the_scope(expected):
    with two_devices().scope():
        same(use_everything(make_model()), expected)


def test_everything_is_as_on_one_device_outside_the_scope(expected):
    same(use_everything(under(two_devices())), expected)
    assert keras.distribution.distribution() is None


@pytest.fixture(scope="module")
def fitted():
    return trained(make_model(), X[:5], Y[:5], batch_size=4)


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_every_placement_gives_the_numbers_of_one_device(make, fitted):
    strategy = make()
    model = under(strategy)

    same(trained(model, X[:5], Y[:5], batch_size=4), fitted)
    assert_laid_out(model, strategy)


def assert_laid_out(model, strategy):
    """Each parameter lies as a variable of ours would, and an optimizer's slot as its parameter."""
    with strategy.scope():
        ours = {v.path: rx.Variable(v.value, name=v.path) for v in model.trainable_variables}
    (slot,) = [v for v in model.optimizer.variables if v.path.endswith("kernel_momentum")]
    kernel = model.layers[-1].kernel
    for variable in model.trainable_variables:
        assert variable.value.sharding.is_equivalent_to(ours[variable.path].value.sharding, len(variable.shape))
    assert slot.value.sharding.is_equivalent_to(kernel.value.sharding, 2)
    assert set(kernel.value.devices()) == set(ours[kernel.path].devices)


def test_several_steps_per_execution(fitted):
    same(trained(under(two_devices(), steps_per_execution=2), X[:5], Y[:5], batch_size=4), fitted)


WAYS_TO_FIT = {
    "sample-weight": dict(x=X, y=Y, sample_weight=WEIGHT, batch_size=4),
    "class-weight": dict(x=X, y=Y, class_weight={0: 0.5, 1: 2.0, 2: 1.0}, batch_size=4),
    "validation-split": dict(x=X, y=Y, batch_size=4, validation_split=0.3),
    "no-shuffle-one-row-more": dict(x=X, y=Y, batch_size=8, shuffle=False),
    "batch-larger-than-data": dict(x=X, y=Y, batch_size=32),
}


@pytest.mark.parametrize("options", WAYS_TO_FIT.values(), ids=WAYS_TO_FIT.keys())
def test_options_of_fit_mean_the_same(options):
    same(trained(under(two_devices(), make_small), **options), trained(make_small(), **options))


def test_batches_are_computed_on_all_devices():
    seen = []

    class Watch(keras.layers.Layer):
        def call(self, x):
            jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append(sharding.shard_shape(x.shape)))
            return x

    with two_devices().scope():
        model = keras.Sequential([keras.Input((6,)), Watch()])

    model.predict(X[:5], batch_size=4, verbose=0)

    assert seen == [(2, 6), (1, 6)]


def test_batch_statistics_are_those_of_the_rows_and_of_nothing_else():
    with two_devices().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse")

    model.fit(X[:3], X[:3], batch_size=4, verbose=0)

    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), X[:3].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance.numpy(), X[:3].var(0), rtol=1e-5, atol=1e-6)


def in_batches(*arrays):
    while True:
        for start in range(0, 9, 4):
            yield tuple(array[start : start + 4] for array in arrays)


@pytest.fixture(scope="module")
def in_order():
    return trained(make_small(), X, Y, batch_size=4, shuffle=False)


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda strategy: dict(x=Rows(), shuffle=False),
        lambda strategy: dict(x=in_batches(X, Y), steps_per_epoch=3, shuffle=False),
        lambda strategy: dict(x=rx.data.from_arrays((X, Y), batch_size=4)),
        lambda strategy: dict(x=rx.data.from_arrays((X, Y), batch_size=4, epochs=None), steps_per_epoch=3),
        lambda strategy: dict(x=strategy.distribute_dataset(rx.data.from_arrays((X, Y), batch_size=4))),
    ],
    ids=["py-dataset", "generator", "from_arrays", "endless", "distributed"],
)
def test_data_may_come_from_elsewhere(make, in_order):
    strategy = two_devices()

    same(trained(under(strategy, make_small), **make(strategy)), in_order)


def test_a_dataset_serves_validation_prediction_and_class_weights():
    data = rx.data.from_arrays((X, Y), batch_size=4)
    weights = {0: 0.5, 1: 2.0, 2: 1.0}
    plain, model = make_small(), under(two_devices(), make_small)

    expected = trained(plain, X, Y, batch_size=4, shuffle=False, class_weight=weights, validation_data=(X, Y))
    found = trained(model, data, class_weight=weights, validation_data=data)

    same(found, expected)
    same(model.predict(data, verbose=0), plain.predict(X, batch_size=4, verbose=0))


def test_callbacks_read_write_and_stop(tmp_path):
    def run(model, path):
        sums = []
        watch = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: sums.append([float(np.sum(w)) for w in model.get_weights()])
        )
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        keep = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True)
        found = trained(model, X[:5], Y[:5], batch_size=4, epochs=5, callbacks=[watch, rate, keep, stop]), sums
        model.load_weights(path)
        return found, model.get_weights()

    paths = tmp_path / "ours.weights.h5", tmp_path / "plain.weights.h5"
    found, expected = run(under(two_devices(), make_small), paths[0]), run(make_small(), paths[1])

    same(found, expected)
    assert len(found[0][1]) < 5


class Doubled(keras.Model):
    """A user's own `train_step`, in the form that Keras's JAX backend asks for."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, kept, optimizer, metrics = state
        x, y = data

        def loss(trainable):
            predicted, _ = self.stateless_call(trainable, kept, x)
            return 2.0 * keras.ops.mean((predicted[:, 0] - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, kept, optimizer, metrics)


def test_a_train_step_of_ones_own_and_a_model_built_by_fit():
    def run(model):
        model.compile(optimizer="sgd")
        return trained(model, X[:5], Y[:5].astype(np.float32), batch_size=4, shuffle=False)

    with two_devices().scope():
        model = Doubled()

    same(run(model), run(Doubled()))


def test_optimizer_metrics_and_build_outside_the_scope():
    """As far as Keras is concerned these variables lie on the first device."""

    def run(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        model.build((None, 6))
        model.set_weights([np.ones((6, 1)), np.zeros(1)])
        return trained(model, X[:5], Y[:5].astype(np.float32), batch_size=4, shuffle=False)

    with two_devices().scope():
        model = keras.Sequential([keras.layers.Dense(1)])

    same(run(model), run(keras.Sequential([keras.layers.Dense(1)])))


def test_a_saved_model_goes_on_under_another_strategy(tmp_path):
    """Slots of the optimizer included. (Keras does not save where the random stream of a Dropout stands.)"""
    path, data = tmp_path / "model.keras", (X[:4], Y[:4].astype(np.float32))

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    def loaded():
        return keras.models.load_model(path)

    with two_devices().scope():
        model = make()
    trained(model, *data)
    model.save(path)
    rx.Checkpoint(model=model).save(tmp_path / "checkpoint")
    of_another = make()  # whose optimizer has no slots so far
    rx.Checkpoint(model=of_another).restore(tmp_path / "checkpoint").assert_consumed()

    with STRATEGIES["mirrored-4"]().scope():
        elsewhere = loaded()
    plain = make()
    trained(plain, *data)

    expected = trained(plain, *data)
    same(trained(elsewhere, *data), expected)
    same(trained(loaded(), *data), expected)
    same(trained(of_another, *data), expected)


def test_a_distribution_of_the_users_own_is_put_back():
    own = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])

    with own.scope():
        with two_devices().scope():
            assert keras.distribution.distribution() is not own
        assert keras.distribution.distribution() is own


def test_under_central_storage_variables_rest_on_the_parameter_device():
    model = under(STRATEGIES["central-storage"](), make_small)
    home = {jax.devices()[0]}
    inside = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            inside.append(model.layers[0].kernel.value.devices())

    before = model.layers[0].kernel.value.devices()
    model.fit(X[:4], Y[:4], verbose=0, callbacks=[Watch()])

    assert inside == [set(jax.devices()[1:3])]
    assert before == home
    assert all(v.value.devices() == home for v in [*model.variables, *model.optimizer.variables])


# -- what goes wrong


class Fails(keras.layers.Layer):
    """Fails on batches of one row."""

    def call(self, x):
        if x.shape[0] == 1:
            raise ArithmeticError("one row")
        return x


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_call_that_fails_spoils_no_later_one(method):
    """Whether it fails at once or after a good batch. (Keras alone leaves the model without values.)"""

    def make():
        return make_model(lambda: [Fails(), Dense(4)])

    plain, model = make(), under(two_devices(), make)
    order = {"shuffle": False} if method == "fit" else {}

    for rows in 1, 5:
        data = (X[:rows],) if method == "predict" else (X[:rows], Y[:rows])
        with pytest.raises((ArithmeticError, RuntimeError), match="one row"):
            getattr(model, method)(*data, batch_size=4, verbose=0, **order)

    if method == "fit":  # the good batch counts
        trained(plain, X[:4], Y[:4], shuffle=False, epochs=1)
    same(trained(model, X[:4], Y[:4], shuffle=False), trained(plain, X[:4], Y[:4], shuffle=False))


def test_a_model_made_outside_is_refused_inside():
    model = make_model()

    with two_devices().scope(), pytest.raises(rx.ContextError, match=r"model\.predict.*made outside"):
        model.predict(X, verbose=0)


def test_a_model_of_another_strategy_is_refused():
    model = under(two_devices())

    with two_devices().scope(), pytest.raises(RuntimeError, match="model.evaluate"):
        model.evaluate(X, Y, verbose=0)


def test_a_layer_of_another_strategy_is_refused():
    with two_devices().scope():
        layer = Dense(4)
        layer.build((None, 6))

    with pytest.raises(rx.ContextError, match="devices of another strategy"):
        under(STRATEGIES["mirrored-4"](), lambda: make_model(lambda: [layer])).predict(X, verbose=0)


def test_targets_beside_a_dataset_are_refused():
    with pytest.raises(rx.InputError, match="bring their own targets"):
        under(two_devices()).fit(rx.data.from_arrays((X, Y), batch_size=4), Y)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_model_that_was_not_adopted_is_refused_in_a_step(eager):
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=eager)
    model = under(strategy)

    def forward():
        return model(X[:4])

    def write():
        model.layers[-1].bias.assign(np.ones(4))

    for step in forward, write:
        with pytest.raises(rx.ContextError, match="not adopted"):
            strategy.run(step)


def test_an_adopted_model_of_central_storage_is_refused_by_fit():
    strategy = STRATEGIES["central-storage"]()
    model = under(strategy, make_small)
    with strategy.scope():
        rx.keras.adopt(model)

    with pytest.raises(rx.NotAvailableError, match="adopted under central storage"):
        model.predict(X, verbose=0)


# -- how it gets there


def in_fresh_process(program, **environment):
    environment = os.environ | {"NPROC": "4", "KERAS_BACKEND": "jax"} | environment
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_keras_may_be_imported_inside_nested_scopes_and_is_not_by_us():
    in_fresh_process(
        """
        import sys, jax, numpy as np, replicax as rx
        rx.host.configure(cpu_devices=2)
        strategy = rx.MirroredStrategy()
        with strategy.scope():
            with strategy.scope():
                assert "keras" not in sys.modules
                import keras
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        assert keras.distribution.distribution() is None
        assert len(model.weights[0].value.devices()) == 2
        assert model.predict(np.ones((3, 2)), batch_size=2, verbose=0).shape == (3, 1)
        """
    )


def test_keras_may_be_imported_after_a_scope():
    in_fresh_process(
        """
        import jax, replicax as rx
        rx.host.configure(cpu_devices=2)
        strategy = rx.MirroredStrategy()
        with strategy.scope():
            pass
        import keras
        assert keras.distribution.distribution() is None
        assert len(keras.Variable([1.0]).value.devices()) == 1
        with strategy.scope():
            assert len(keras.Variable([1.0]).value.devices()) == 2
        """
    )


def test_another_backend_is_refused():
    in_fresh_process(
        """
        import keras, replicax as rx
        with rx.OneDeviceStrategy("cpu:0").scope():
            try:
                keras.Sequential([keras.layers.Dense(1)])
            except rx.NotAvailableError as error:
                assert "'numpy'" in str(error) and '"jax"' in str(error)
            else:
                raise AssertionError("not refused")
        keras.Sequential([keras.layers.Dense(1)])
        """,
        KERAS_BACKEND="numpy",
    )


# -- steps of one's own


def test_an_adopted_model_in_a_step():
    strategy = two_devices()
    x, y = X[:8], Y[:8].astype(np.float32)

    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    with strategy.scope():
        model = make()
        weights = rx.keras.adopt(model)
        optimizer = rx.Optimizer(optax.sgd(0.1), gradients="mean")
    before = [w.numpy() for w in weights]

    def step(x, y):
        def loss():
            return rx.mean((model(x, training=True)[:, 0] - y) ** 2)

        value, gradients = rx.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return value

    # Each replica normalises its own rows, so the expectation is the mean over both halves of the batch.
    half = make()
    trainable, kept = ([v.value for v in part] for part in (half.trainable_variables, half.non_trainable_variables))

    def half_loss(trainable, x, y):
        predicted, new = half.stateless_call(trainable, kept, x, training=True)
        return ((predicted[:, 0] - y) ** 2).mean(), new

    (one, other) = (jax.value_and_grad(half_loss, has_aux=True)(trainable, x[i : i + 4], y[i : i + 4]) for i in (0, 4))
    (values, stats), gradients = jax.tree.map(lambda a, b: (a + b) / 2, one, other)

    for batch in strategy.distribute_dataset(rx.data.from_arrays((x, y), batch_size=8)):
        value = strategy.reduce("mean", strategy.run(step, batch))

    same(value, values)
    same([w.numpy() for w in weights], [w - 0.1 * g for w, g in zip(before, gradients, strict=True)])
    same([v.numpy() for v in model.non_trainable_variables], stats)
    half.set_weights(model.get_weights())
    same(model.evaluate(x, y, verbose=0), half.evaluate(x, y, verbose=0))
    same(trained(model, x, y, batch_size=4, shuffle=False), trained(half, x, y, batch_size=4, shuffle=False))
    assert rx.keras.adopt(model) == weights
