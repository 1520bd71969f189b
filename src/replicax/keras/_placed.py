"""Where do Keras's variables and batches go under a strategy? Variables to every device, rows split over the replicas.

The step that Keras compiles speaks of the whole global batch, and XLA divides the work according to where the batch lies.
So a loss, a metric or BatchNormalization sees all rows of the batch however they are split.
"""

# How does a short last batch stay exact?
#
# Rows that do not divide by the replicas cannot be split evenly. Padding them would need a mask in every loss, every
# metric and in BatchNormalization, and layers know of no mask over rows. Instead such a batch goes whole to every
# device: the same rows are computed several times, no row is counted twice, and no padding exists that could leak.
# It costs one more compiled program, which a batch of another shape costs in any case.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras.src.distribution.distribution_lib import Distribution

from replicax._cross import host
from replicax._placement import AXIS, Placement
from replicax._strategy.base import Strategy
from replicax._strategy.layout import fitted
from replicax._values import PerReplica


class Placed(Distribution):
    """A strategy's placement in Keras's terms, while a model computes."""

    def __init__(self, strategy: Strategy) -> None:
        placement = strategy.placement
        mesh = keras.distribution.DeviceMesh(
            placement.mesh.devices.shape, list(placement.mesh.axis_names), placement.mesh.devices
        )
        super().__init__(mesh, batch_dim_name=AXIS, auto_shard_dataset=False)
        self.strategy = strategy
        self.placement: Placement = placement

    @property
    def num_model_replicas(self) -> int:
        return self.placement.replicas

    def strategy_has(self, devices: Iterable[jax.Device]) -> bool:
        """Whether a variable on these devices can be of a model of this strategy."""
        here = tuple(devices)
        return here == tuple(self.placement.mesh.devices.flat) or here == (self.placement.parameter_device,)

    def divides(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 0 and shape[0] % self.placement.replicas == 0

    def get_data_layout(self, data_shape: tuple[int, ...]) -> Any:
        axes: list[str | None] = [None] * len(data_shape)
        if self.divides(data_shape):
            axes[0] = AXIS
        return keras.distribution.TensorLayout(axes, self.device_mesh)

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        """The strategy's policy speaks of parameters; slots of an optimizer lie as their parameters do."""
        policy = self.strategy.layouts
        if policy is None or not variable.trainable or self.placement.apart:
            return self.placement.mirrored
        shape, name = tuple(variable.shape), variable.path
        spec = policy.layout(name, shape, self.placement)
        return NamedSharding(self.placement.mesh, fitted(f"variable {name!r}", spec, shape, self.placement))

    def get_tensor_layout(self, path: str) -> None:
        return None

    def feed(self, batch: Any) -> Any:
        """One global batch on the devices; Keras's own way decides by the first batch for all that follow."""

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, PerReplica):  # of a distributed dataset: the valid rows, in their order
                leaf = host.gather(self.placement, leaf, 0) if leaf.mask is not None else leaf.data
            split = self.divides(np.shape(leaf))
            return jax.device_put(leaf, self.placement.split if split else self.placement.mirrored)

        return keras.tree.map_structure(put, batch)


class AtRest(Placed):
    """The same while no model computes: under central storage, variables lie on the parameter device then."""

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        if not self.placement.apart:
            return super().get_variable_layout(variable)
        # Keras asks for a mesh even where there is one device.
        mesh = Mesh(np.array([self.placement.parameter_device]), (AXIS,))
        return NamedSharding(mesh, PartitionSpec())
