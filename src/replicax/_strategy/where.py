"""Where does this value live: a copy on every replica, another value on each, or beside a variable?"""

from __future__ import annotations

from typing import Any, Literal

import jax

from replicax import _context, _errors, _jax
from replicax._values import DistributedValues
from replicax._variables.variable import Variable


def locality(value: Any) -> Literal["T", "M", "V", "N"]:
    """The locality of a value, which tf.distribute's tables give every argument and result.

    It tells what a value may be passed to: one that differs has to be reduced before it can update a variable.

    Returns:
      ``"T"`` for a value that may differ per replica, ``"M"`` for one that is the same for all, ``"V"`` for a variable
      or an array on the one device that holds the variables of the strategy in force, ``"N"`` for an array on devices
      that hold neither its replicas nor its variables, where state that belongs to no variable may be kept.

    Raises:
      ContextError: Inside a replica. Whether its values equal those of the other replicas is known when the whole
        step has been looked at; `rx.assert_mirrored` states that one does.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    >>> ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    >>> rx.locality(ids), rx.locality(strategy.reduce("sum", ids)), rx.locality(w)
    ('T', 'M', 'V')
    """
    mode = _context.current()
    if mode is not None and mode.replica is not None and mode.strategy.num_replicas_in_sync > 1:
        raise _errors.locality_in_replica()
    if isinstance(value, Variable):
        return "V"
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    if any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return "T"
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer)]
    return _of_devices({device for array in arrays for device in array.devices()})


def _of_devices(devices: set[jax.Device]) -> Literal["M", "V", "N"]:
    placement = _context.get_strategy().placement
    if not devices or devices & set(placement.mesh.devices.flat):
        return "M" if devices != {placement.parameter_device} else "V"
    return "V" if devices == {placement.parameter_device} else "N"
