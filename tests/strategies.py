"""Which strategies does every law run over? One dictionary, name → maker.

``@pytest.mark.parametrize("name", STRATEGIES)`` and ``STRATEGIES[name]()`` in the test. `COMPILED` and `EAGER` are its
halves; the strategy `name` runs line by line under the name ``EAGER_TWIN[name]``, if it can.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

import replicax as rx


def _mirrored(replicas: int, eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.MirroredStrategy(jax.devices()[:replicas], eager=eager)


def _one_device(eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.OneDeviceStrategy("cpu:0", eager=eager)


def _central(replicas: int, eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.experimental.CentralStorageStrategy(jax.devices()[1 : 1 + replicas], "cpu:0", eager=eager)


def _fully_sharded(eager: bool) -> Callable[[], rx.Strategy]:
    policy = rx.fully_sharded(min_size=2)
    return lambda: rx.MirroredStrategy(jax.devices()[:2], variables=policy, eager=eager)


def _tpu(eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local"), num_cores=2, eager=eager)


@dataclasses.dataclass(frozen=True)
class LastEvenAxis:
    """A layout for any model: cuts the last axis of each parameter that divides evenly."""

    def layout(self, name, shape, placement):
        even = [axis for axis, size in enumerate(shape) if size and size % placement.mesh.shape["model"] == 0]
        return PartitionSpec(*[None] * even[-1], "model") if even else PartitionSpec()


def _two_by_two() -> rx.Strategy:
    return rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2}, variables=LastEvenAxis())


# There is one default strategy per process and it has no `eager=`. It runs line by line with
# `options=rx.RunOptions(eager=True)`; its twin here is the strategy that gives the same placement a name.
COMPILED: dict[str, Callable[[], rx.Strategy]] = {
    "default": rx.get_strategy,
    "one_device": _one_device(eager=False),
    **{f"mirrored_{n}": _mirrored(n, eager=False) for n in (1, 2, 4)},
    **{f"central_{n}": _central(n, eager=False) for n in (1, 2)},
    "tpu_2": _tpu(eager=False),
    "mirrored_2x2": _two_by_two,
    "fsdp_2": _fully_sharded(eager=False),
}
EAGER: dict[str, Callable[[], rx.Strategy]] = {
    "one_device_eager": _one_device(eager=True),
    **{f"mirrored_{n}_eager": _mirrored(n, eager=True) for n in (1, 2, 4)},
    **{f"central_{n}_eager": _central(n, eager=True) for n in (1, 2)},
    "tpu_2_eager": _tpu(eager=True),
    "fsdp_2_eager": _fully_sharded(eager=True),
}
ONLY_COMPILED = {"mirrored_2x2"}  # a replica of several devices cannot be a thread with a device of its own
EAGER_TWIN = {name: f"{name.replace('default', 'one_device')}_eager" for name in COMPILED if name not in ONLY_COMPILED}

STRATEGIES = COMPILED | EAGER
