"""How do tests see a replica function the way the engine does? Traced once, inside `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from replicax import _locality

REPLICAS = 4
MESH = Mesh(np.array(jax.devices()[:REPLICAS]), ("replica",), axis_types=(AxisType.Auto,))
GRID = Mesh(
    np.array(jax.devices()[: 2 * REPLICAS]).reshape(REPLICAS, 2), ("replica", "model"), axis_types=(AxisType.Auto,) * 2
)


def sharded(fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh = MESH) -> Callable[..., Any]:
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, axis_names={"replica"})


def trace(fn: Callable[..., Any], mirrored: Sequence[Any], per_replica: Sequence[Any] = (), mesh: Mesh = MESH) -> Jaxpr:
    """The jaxpr of ``fn(*mirrored, *per_replica)`` as one replica runs it; `per_replica` are laid over axis 0."""
    specs = (P(),) * len(mirrored) + (P("replica"),) * len(per_replica)
    closed = jax.make_jaxpr(sharded(fn, specs, P(), mesh))(*mirrored, *per_replica)
    (body,) = (eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
    assert len(body.invars) == len(specs), "the function closes over an array"
    return body


def _reduction(kind: str, collective: Callable[[jax.Array], jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """A reduction as the engine emits it: one jit equation with a telling name, small operands packed into one."""

    def reduce(*values: jax.Array) -> tuple[jax.Array, ...]:
        packed = collective(jnp.concatenate([value.ravel() for value in values]))
        ends = np.cumsum([value.size for value in values])
        return tuple(part.reshape(v.shape) for part, v in zip(jnp.split(packed, ends[:-1]), values, strict=True))

    reduce.__name__ = reduce.__qualname__ = f"rx_reduce_{kind}"
    return jax.jit(reduce)


def _first(value: jax.Array) -> jax.Array:
    return lax.psum(jnp.where(lax.axis_index("replica") == 0, value, jnp.zeros_like(value)), "replica")


def _extreme(collective: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """JAX's pmax and pmin have no gradient. Here it goes to the replicas that hold the extreme, in equal shares."""

    @jax.custom_jvp
    def extreme(x: jax.Array) -> jax.Array:
        return collective(x, "replica")

    @extreme.defjvp
    def rule(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = extreme(*primals)
        holds = (primals[0] == y).astype(y.dtype)
        return y, lax.psum(tangents[0] * holds / lax.psum(holds, "replica"), "replica")

    return extreme


all_reduce = {
    "sum": _reduction("sum", lambda value: lax.psum(value, "replica")),
    "mean": _reduction("mean", lambda value: lax.pmean(value, "replica")),
    "max": _reduction("max", _extreme(lax.pmax)),
    "min": _reduction("min", _extreme(lax.pmin)),
    "first": _reduction("first", _first),
}


def analyse(fn: Callable[..., Any], mirrored: Sequence[Any], per_replica: Sequence[Any] = (), mesh: Mesh = MESH):
    ins = [_locality.MIRRORED] * len(mirrored)
    ins += [_locality.differs(f"argument {i} differs per replica") for i in range(len(per_replica))]
    return _locality.analyse(trace(fn, mirrored, per_replica, mesh), ins, REPLICAS)
