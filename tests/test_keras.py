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

import replicax as rx

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((9, 6)).astype(np.float32)
Y = RANDOM.integers(0, 3, 9)
WEIGHT = RANDOM.uniform(0.1, 2.0, 9).astype(np.float32)

STRATEGIES = {
    "mirrored-2": lambda: rx.MirroredStrategy(jax.devices()[:2]),
    "mirrored-4": lambda: rx.MirroredStrategy(jax.devices()[:4]),
    "replicas-of-two": lambda: rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2}),
    "one-device": lambda: rx.OneDeviceStrategy("cpu:1"),
}


def make_model(**compiled):
    """Everything that sees several rows at once, or draws random numbers: BatchNormalization, dropout, metrics."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"], weighted_metrics=[], **compiled)
    return model


def make_under(strategy, **compiled):
    with strategy.scope():
        return make_model(**compiled)


def same(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def trained(model, *data, **options):
    history = model.fit(*data, **{"epochs": 2, "verbose": 0} | options)
    return history.history, model.get_weights()


def two_devices():
    return STRATEGIES["mirrored-2"]()


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request):
    return request.param()


def use_everything(model):
    """Nine rows in batches of four: 4, 4, 1; and seven: 4, 3."""
    return (
        trained(model, X, Y, batch_size=4, validation_data=(X[:7], Y[:7])),
        model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0),
        model.predict(X, batch_size=4, verbose=0),
        model.train_on_batch(X[:5], Y[:5]),
        model.test_on_batch(X, Y),
        model.predict_on_batch(X),
        model.get_weights(),
    )


def test_everything_is_as_on_one_device_inside_the_scope_and_after_it(strategy):
    expected = use_everything(make_model())

    with strategy.scope():
        inside = use_everything(make_model())
    model = make_under(strategy)
    outside = use_everything(model)

    same(inside, expected)
    same(outside, expected)
    assert model.weights[0].value.sharding.is_equivalent_to(strategy.placement.mirrored, 2)
    assert keras.distribution.distribution() is None


WAYS_TO_FIT = {
    "sample-weight": dict(x=X, y=Y, sample_weight=WEIGHT, batch_size=4),
    "class-weight": dict(x=X, y=Y, class_weight={0: 0.5, 1: 2.0, 2: 1.0}, batch_size=4),
    "validation-split": dict(x=X, y=Y, batch_size=4, validation_split=0.3),
    "no-shuffle-one-row-more": dict(x=X, y=Y, batch_size=8, shuffle=False),
    "batch-larger-than-data": dict(x=X, y=Y, batch_size=32),
}


@pytest.mark.parametrize("options", WAYS_TO_FIT.values(), ids=WAYS_TO_FIT.keys())
def test_options_of_fit_mean_the_same(options):
    same(trained(make_under(two_devices()), **options), trained(make_model(), **options))


def test_several_steps_per_execution():
    expected = use_everything(make_model())

    same(use_everything(make_under(two_devices(), steps_per_execution=2)), expected)


def test_batches_are_computed_on_all_devices():
    model = make_under(two_devices())
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs):
            seen.append((logs["outputs"].shape[0], logs["outputs"].sharding.is_fully_replicated))

    model.predict(X, batch_size=4, verbose=0, callbacks=[Watch()])

    assert seen == [(4, False), (4, False), (1, True)]


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


@pytest.mark.parametrize(
    "make",
    [
        lambda strategy: dict(x=in_batches(X, Y), steps_per_epoch=3),
        lambda strategy: dict(x=rx.data.from_arrays((X, Y), batch_size=4)),
        lambda strategy: dict(x=rx.data.from_arrays((X, Y), batch_size=4, epochs=None), steps_per_epoch=3),
        lambda strategy: dict(x=strategy.distribute_dataset(rx.data.from_arrays((X, Y), batch_size=4))),
    ],
    ids=["generator", "from_arrays", "endless", "distributed"],
)
def test_data_may_come_from_elsewhere(make):
    strategy = two_devices()
    expected = trained(make_model(), X, Y, batch_size=4, shuffle=False)

    same(trained(make_under(strategy), **make(strategy)), expected)


def test_a_dataset_serves_validation_prediction_and_class_weights():
    data = rx.data.from_arrays((X, Y), batch_size=4)
    weights = {0: 0.5, 1: 2.0, 2: 1.0}
    plain, model = make_model(), make_under(two_devices())

    expected = trained(plain, X, Y, batch_size=4, shuffle=False, class_weight=weights, validation_data=(X, Y))
    found = trained(model, data, class_weight=weights, validation_data=data)

    same(found, expected)
    same(model.predict(data, verbose=0), plain.predict(X, batch_size=4, verbose=0))


def test_callbacks_read_and_stop():
    def run(model):
        sums = []
        watch = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: sums.append([float(np.sum(w)) for w in model.get_weights()])
        )
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True)
        return trained(model, X, Y, batch_size=4, epochs=5, callbacks=[watch, rate, stop]), sums

    found, expected = run(make_under(two_devices())), run(make_model())

    same(found, expected)
    assert len(found[1]) < 5


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
        return trained(model, X, Y.astype(np.float32), batch_size=4)

    with two_devices().scope():
        model = Doubled()

    same(run(model), run(Doubled()))


def test_optimizer_and_build_outside_the_scope():
    """As far as Keras is concerned these variables lie on the first device."""

    def run(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.build((None, 6))
        model.set_weights([np.ones((6, 1)), np.zeros(1)])
        return trained(model, X, Y.astype(np.float32), batch_size=4)

    with two_devices().scope():
        model = keras.Sequential([keras.layers.Dense(1)])

    same(run(model), run(keras.Sequential([keras.layers.Dense(1)])))


def test_a_saved_model_goes_on_under_another_strategy(tmp_path):
    path = tmp_path / "model.keras"
    model, plain = make_under(two_devices()), make_model()
    trained(model, X, Y, batch_size=4, shuffle=False)
    trained(plain, X, Y, batch_size=4, shuffle=False)
    model.save(path)

    with STRATEGIES["mirrored-4"]().scope():
        loaded = keras.models.load_model(path)

    same(loaded.predict(X, verbose=0), plain.predict(X, verbose=0))
    same(
        trained(loaded, X, Y, batch_size=4, shuffle=False)[0]["loss"][0],
        trained(keras.models.load_model(path), X, Y, batch_size=4, shuffle=False)[0]["loss"][0],
    )


def test_a_distribution_of_the_users_own_is_put_back():
    own = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])

    with own.scope():
        with two_devices().scope():
            assert keras.distribution.distribution() is not own
        assert keras.distribution.distribution() is own


# -- refusals


def test_a_model_made_outside_is_refused_inside():
    model = make_model()

    with two_devices().scope(), pytest.raises(rx.ContextError, match=r"model\.predict.*made outside"):
        model.predict(X, verbose=0)


def test_a_model_of_another_strategy_is_refused():
    model = make_under(two_devices())

    with two_devices().scope(), pytest.raises(RuntimeError, match="model.evaluate"):
        model.evaluate(X, Y, verbose=0)


def test_targets_beside_a_dataset_are_refused():
    with pytest.raises(rx.InputError, match="bring their own targets"):
        make_under(two_devices()).fit(rx.data.from_arrays((X, Y), batch_size=4), Y)


# -- how it gets there


def in_fresh_process(program, **environment):
    environment = os.environ | {"NPROC": "4", "KERAS_BACKEND": "jax"} | environment
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_keras_may_be_imported_inside_the_scope_and_not_by_us():
    in_fresh_process(
        """
        import sys, jax, numpy as np, replicax as rx
        rx.host.configure(cpu_devices=2)
        strategy = rx.MirroredStrategy()
        with strategy.scope():
            assert "keras" not in sys.modules
            import keras
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        assert keras.distribution.distribution() is None
        assert len(model.weights[0].value.devices()) == 2
        assert model.predict(np.ones((3, 2)), batch_size=2, verbose=0).shape == (3, 1)
        """
    )


# -- steps of one's own


def test_an_adopted_model_in_a_step():
    strategy = two_devices()
    x, y = X[:8], Y[:8].astype(np.float32)

    def make():
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        keras.utils.set_random_seed(1)
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
    same(trained(model, x, y, batch_size=4), trained(half, x, y, batch_size=4))
    assert rx.keras.adopt(model) == weights
