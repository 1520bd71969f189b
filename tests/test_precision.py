"""A scaled loss gives the gradients of the loss; a step with infinite ones is left out on all replicas together."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

STRATEGIES = {
    "one-device": lambda: rx.OneDeviceStrategy("cpu:0"),
    **{f"mirrored-{n}": (lambda n=n: rx.MirroredStrategy(jax.devices()[:n])) for n in (2, 4)},
    "mirrored-2-eager": lambda: rx.MirroredStrategy(jax.devices()[:2], eager=True),
    "central-2": lambda: rx.experimental.CentralStorageStrategy(jax.devices()[:2], jax.devices()[2]),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request):
    return request.param()


class Scaled:
    """``w * x`` in float16, trained by SGD; the gradient of each replica is its own x."""

    def __init__(self, strategy, initial, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = rx.Variable(1.0)
            self.optimizer = rx.Optimizer(optax.sgd(0.5, momentum=0.5), gradients="mean")
            self.scale = rx.train.LossScale(initial, **options)

    def replica_step(self, x):
        def loss():
            return self.scale.scale(self.w.value.astype(jnp.float16) * x)

        gradients = rx.grad(loss, [self.w])()
        return self.scale.apply_gradients(self.optimizer, zip(gradients, [self.w], strict=True))

    def step(self, *each):
        """One step; the last of `each` stands for all further replicas."""
        each = (each + each[-1:] * self.strategy.num_replicas_in_sync)[: self.strategy.num_replicas_in_sync]
        return self.strategy.run(self.replica_step, (rx.PerReplica(tuple(np.float16(x) for x in each)),))


def test_the_update_is_that_of_the_unscaled_loss(strategy):
    model = Scaled(strategy, 1024.0)

    applied = model.step(1e-7, 1e-7)  # in float16 the least positive number is 6e-8

    assert bool(applied)
    assert float(model.w) == pytest.approx(1 - 0.5 * float(np.float16(1e-7)))


def test_one_replica_with_an_infinite_gradient_stops_all(strategy):
    model = Scaled(strategy, 1024.0)
    model.step(1.0)
    before = [model.w.numpy(), *(slot.numpy() for slot in model.optimizer.slots)]

    applied = model.step(6e4, 1.0)

    assert not bool(applied)
    after = [model.w.numpy(), *(slot.numpy() for slot in model.optimizer.slots)]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert len({float(copy) for copy in model.w.values}) == 1
    assert float(model.scale.value) == 512.0


def test_good_steps_make_the_scale_grow_and_a_bad_one_starts_the_count_anew(strategy):
    model = Scaled(strategy, 4.0, growth_interval=3, factor=4.0)
    scales = []
    for x in [1, 1, 1, 1, np.inf, 1, 1, 1]:
        model.step(x)
        scales.append(float(model.scale.value))

    assert scales == [4, 4, 16, 16, 4, 4, 4, 16]


def test_a_scale_that_is_not_dynamic_stays_and_still_leaves_bad_steps_out(strategy):
    model = Scaled(strategy, 8.0, dynamic=False, growth_interval=1)

    assert [bool(model.step(x)) for x in (1, np.nan, 1)] == [True, False, True]
    assert float(model.scale.value) == 8.0
    assert np.isfinite(model.w.numpy())


def test_the_scale_never_falls_below_one():
    model = Scaled(rx.OneDeviceStrategy("cpu:0"), 2.0)
    for _ in range(4):
        model.step(np.inf)

    assert float(model.scale.value) == 1.0


def test_the_flag_costs_no_reduction_of_its_own():
    model = Scaled(rx.MirroredStrategy(jax.devices()[:2]), 8.0)
    text = model.strategy.lower(model.replica_step, (rx.PerReplica((np.float16(1), np.float16(2))),)).as_text()

    assert len(re.findall(r"stablehlo\.all_reduce", text)) == 1


def test_it_is_saved_and_restored(tmp_path):
    strategy = rx.OneDeviceStrategy("cpu:0")
    model, other = Scaled(strategy, 64.0), Scaled(strategy, 8.0)
    model.step(np.inf)

    rx.Checkpoint(scale=model.scale).save(tmp_path / "saved")
    rx.Checkpoint(scale=other.scale).restore(tmp_path / "saved")

    assert float(other.scale.value) == 32.0


@pytest.mark.parametrize("wrong", [{"initial": 0}, {"growth_interval": 0}, {"factor": 1}, {"initial": "a"}])
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="LossScale"):
        rx.train.LossScale(**wrong)


def test_what_has_nothing_to_apply_is_refused():
    v, scale = rx.Variable(1.0), rx.train.LossScale(initial=8.0)
    optimizer = rx.Optimizer(optax.sgd(0.1), gradients="mean")

    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        scale.apply_gradients(optimizer, [(None, v)])
    with pytest.raises(TypeError, match="was not given an optimizer"):
        scale.apply_gradients(optax.sgd(0.1), [(1.0, v)])
    assert float(scale.scale(2)) == 16.0
