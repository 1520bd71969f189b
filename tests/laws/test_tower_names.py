"""The law of one result, through the names of 2018: the same models on towers give the numbers of one device."""

import jax
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower
from tests.laws.models import MODELS, Model
from tests.laws.test_equals_one_device import by_hand, close

STEPS = 5
D = jax.devices()


def central():
    """The front of a strategy of today."""
    with rx.experimental.CentralStorageStrategy(D[1:3], "cpu:0").scope():
        return tower.get_distribution_strategy()


STRATEGIES = {
    "mirrored-2": lambda: tower.MirroredStrategy(D[:2]),
    "mirrored-4": lambda: tower.MirroredStrategy(D[:4], cross_tower_ops=tower.ReductionToOneDeviceCrossTowerOps()),
    "mirrored-2-eager": lambda: tower.MirroredStrategy(D[:2], eager=True),
    "one-device": lambda: tower.OneDeviceStrategy("cpu:0"),
    "central-2": central,
    "tpu-2": lambda: tower.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local"), steps_per_run=1, num_cores=2),
}
CASES = [("mirrored-2", model) for model in MODELS] + [(name, "mlp") for name in STRATEGIES if name != "mirrored-2"]


def train(distribution: tower.DistributionStrategy, model: Model, steps: int):
    """A program of 2018: each tower takes a batch of its own, and a merge call reduces and updates."""
    towers = distribution.num_towers
    parts = [jax.tree.map(lambda x, i=i: np.split(x, towers)[i], model.batch) for i in range(towers)]
    momentum, rate = 0.9, 0.05
    with distribution.scope():
        weights = jax.tree.map(lambda x: rx.Variable(x, name="param"), model.params)
        stats = jax.tree.map(lambda x: rx.Variable(x, name="stat", trainable=False), model.stats)
        flat = jax.tree.leaves(weights)
        velocities = []
        for w in flat:
            with distribution.colocate_vars_with(w):
                velocities.append(rx.Variable(np.zeros(w.shape, w.dtype), name="velocity", trainable=False))

        def update(w, gradient, velocity):
            velocity.assign(momentum * velocity.value + gradient)
            w.assign_sub(rate * velocity.value)

        def merge_fn(distribution, *gradients):
            reduced = distribution.batch_reduce(tower.VariableAggregation.MEAN, list(zip(gradients, flat, strict=True)))
            for w, gradient, velocity in zip(flat, reduced, velocities, strict=True):
                distribution.update(w, update, gradient, velocity)

        def tower_fn(batch):
            def loss():
                values = [jax.tree.map(lambda v: v.value, tree) for tree in (weights, stats)]
                rows, new = model.apply(*values, batch)
                for variable, value in zip(jax.tree.leaves(stats), jax.tree.leaves(new), strict=True):
                    variable.assign(value)
                return rows.mean()

            value, gradients = rx.value_and_grad(loss, flat)()
            tower.get_tower_context().merge_call(merge_fn, *gradients)
            return value

        iterator = distribution.distribute_dataset(lambda: parts * steps).make_one_shot_iterator()
        losses = []
        for _ in range(steps):
            per_tower = distribution.call_for_each_tower(tower_fn, iterator.get_next())
            losses.append(np.mean([float(loss) for loss in distribution.unwrap(per_tower)]))
    return losses, [w.numpy() for w in flat], [s.numpy() for s in jax.tree.leaves(stats)]


@pytest.mark.parametrize(("name", "model"), CASES, ids=lambda case: case)
def test_towers_give_the_numbers_of_one_device(name, model):
    steps = 1 if name.endswith("eager") else STEPS

    ours = train(STRATEGIES[name](), MODELS[model](), steps)

    for got, exact in zip(ours, by_hand(model, steps), strict=True):
        close(got, exact)
