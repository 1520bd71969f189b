"""Keras 3 on JAX: a model made under ``strategy.scope()`` trains on all replicas, with the results of one device.

Nothing here needs to be called for `fit`, `evaluate` and `predict`. `adopt` is for custom loops. Keras is not imported
by replicax: entering a scope prepares it if it is there, or watches for it to be imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from replicax.keras import _hook
from replicax.train._objects import openers

if TYPE_CHECKING:
    from replicax._variables.variable import Variable

_hook.follow_scopes()


def _parts_of(thing: Any) -> Any:
    """What a checkpoint holds of a Keras object; None for anything else."""
    if "keras" not in sys.modules:
        return None
    from replicax.keras import _saved

    return _saved.saved(thing)


openers.append(_parts_of)


def adopt(owner: Any) -> list[Variable]:
    """Makes the variables of a Keras model or optimizer variables of the strategy, for steps of your own.

    After this the model may be called inside ``strategy.run``: reads and assignments of its variables are then those of
    the step. Batch statistics are averaged over the replicas. `fit` and its relatives go on working.

    Args:
      owner: A built model, layer, metric or optimizer. Adopting it again returns the same variables.

    Returns:
      What `rx.value_and_grad` and `rx.Optimizer` want: the trainable variables of a model or layer, in Keras's order;
      all variables of anything else.

    Example:

        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            weights = rx.keras.adopt(model)
            optimizer = rx.Optimizer(optax.sgd(0.1), gradients="mean")

        def step(x, y):
            def loss():
                return rx.mean((model(x, training=True)[:, 0] - y) ** 2)
            value, gradients = rx.value_and_grad(loss, weights)()
            optimizer.apply_gradients(zip(gradients, weights))
            return value
    """
    from replicax.keras import _adopt

    return _adopt.adopt(owner)
