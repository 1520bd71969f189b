"""In which order, and over which roads, are the replicas' values added up?"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
from jax import lax

from replicax._cross import in_step
from replicax._placement import AXIS


@dataclasses.dataclass(frozen=True)
class AllReduceAlgorithm:
    """The platform's own all-reduce (in-process, gloo, NCCL, ICI), small arrays packed."""

    def sum(self, arrays: list[jax.Array], replicas: int, bytes_per_pack: int) -> list[jax.Array]:
        return in_step.packed_sum(arrays, bytes_per_pack)


@dataclasses.dataclass(frozen=True)
class OneDeviceAlgorithm:
    """Replica 0's value plus replica 1's plus ..., always in this order, so that results are reproducible bit for bit."""

    def sum(self, arrays: list[jax.Array], replicas: int, bytes_per_pack: int) -> list[jax.Array]:
        gathered = [lax.all_gather(array, AXIS) for array in arrays]
        return [functools.reduce(operator.add, [g[i] for i in range(replicas)]) for g in gathered]
