"""A model of Flax NNX or Keras, trained by its own library's optimizer, gives what plain Optax gives on one device.

Linen and Equinox, whose models are values, are among the models of the other laws.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before the first import of keras, here or in a plugin

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from tests.laws.models import cross_entropy
from tests.laws.test_equals_one_device import close
from tests.strategies import COMPILED

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2

STEPS = 20
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((10, 6)).astype(np.float32), RANDOM.integers(0, 4, 10)
SHAPES = ((6, 8), (8,), (8, 4), (4,))
WEIGHTS = [0.3 * RANDOM.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.fixture(scope="module")
def expected():
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(weights):
        a, b, c, d = weights
        return cross_entropy(jnp.tanh(X @ a + b) @ c + d, Y).mean()

    @jax.jit
    def step(weights, state):
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    weights, state = WEIGHTS, optimizer.init(WEIGHTS)
    for _ in range(STEPS):
        weights, state = step(weights, state)
    return weights


def with_nnx():
    layers = [nnx.Linear(*shape, rngs=nnx.Rngs(0)) for shape in SHAPES[::2]]
    model = nnx.Sequential(layers[0], jnp.tanh, layers[1])
    weights = [layer_weight for layer in layers for layer_weight in (layer.kernel, layer.bias)]
    for weight, value in zip(weights, WEIGHTS, strict=True):
        weight[...] = jnp.asarray(value)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    rx.nnx.adopt(model)
    rx.nnx.adopt(optimizer)

    def step(x, y):
        gradients = nnx.grad(lambda model: rx.mean(cross_entropy(model(x), y)))(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("mean", gradients))

    return step, lambda: [weight[...] for weight in weights]


def with_keras():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.set_weights(WEIGHTS)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    weights = rx.keras.adopt(model)
    rx.keras.adopt(optimizer)

    def step(x, y):
        gradients = rx.grad(lambda: rx.mean(cross_entropy(model(x), y)), weights)()
        optimizer.apply(rx.get_replica_context().all_reduce("mean", gradients), model.trainable_variables)

    return step, model.get_weights


@pytest.mark.parametrize("framework", [with_nnx, with_keras], ids=["nnx", "keras"])
@pytest.mark.parametrize("name", COMPILED)
def test_twenty_steps_equal_one_device(name, framework, expected):
    strategy = COMPILED[name]()
    with strategy.scope():
        step, weights = framework()
    (batch,) = strategy.distribute_dataset([(X, Y)])

    for _ in range(STEPS):
        strategy.run(step, batch)

    close(weights(), expected)
