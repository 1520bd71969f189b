"""What does a checkpoint hold of a Keras model? The values of its variables, and those of the optimizer it was compiled with.

They are named by their number, `3-kernel` and `optimizer/0`: a model made anew has them in the same order. Their paths are
no names, since Keras numbers models and layers through the whole program.
"""

from __future__ import annotations

from typing import Any

import keras

from replicax.keras._adopt import Adopted


class Saved:
    """A Keras model, layer, optimizer or metric, as a checkpoint sees it."""

    def __init__(self, owner: Any) -> None:
        named = isinstance(owner, keras.Layer)
        self._variables = {f"{i}-{v.name}" if named else str(i): v for i, v in enumerate(owner.variables)}
        optimizer = getattr(owner, "optimizer", None)
        if isinstance(owner, keras.Model):
            owner.jax_state_sync()  # within `fit` the values are elsewhere
        if isinstance(owner, keras.Model) and isinstance(optimizer, keras.optimizers.Optimizer):
            if owner.built and not optimizer.built:
                optimizer.build(owner.trainable_variables)  # as `fit` would, now that values may be waiting
            self._variables |= {f"optimizer/{i}": variable for i, variable in enumerate(optimizer.variables)}

    def checkpoint_items(self) -> dict[str, Any]:
        return {
            name: variable.replicax_variable if isinstance(variable, Adopted) else variable.value
            for name, variable in self._variables.items()
        }

    def checkpoint_replace(self, name: str, value: Any) -> None:
        self._variables[name].assign(value)


def saved(thing: Any) -> Saved | None:
    kinds = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    return Saved(thing) if isinstance(thing, kinds) else None
