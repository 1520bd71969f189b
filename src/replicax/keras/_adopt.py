"""How do a Keras model's variables take part in a step of the user's? Each gets an `rx.Variable` to keep its value in.

Keras reads a variable through its attribute ``_value`` and writes it through ``_direct_assign``. An adopted variable answers
both from its `rx.Variable`, which knows whether it is read on the host, in a step, or under `rx.value_and_grad`.
"""

# Why not `keras.StatelessScope`?
#
# It replaces values for the length of a block, so something would have to open one around every step, list all variables
# beforehand, and carry what changed back afterwards. That works (it was the first version), but a model that is only
# mentioned in a closure is found by nobody, and `rx.value_and_grad` sees none of its reads.

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from replicax._variables import storage
from replicax._variables.variable import Variable
from replicax.keras import _errors


class Adopted(keras.Variable):
    """A Keras variable whose value is kept by an `rx.Variable`, in the attribute ``replicax_variable``."""

    @property
    def _value(self) -> Any:
        if in_symbolic_scope():  # Keras works out shapes; no value gets into a program
            return storage.host_value(self.replicax_variable)
        return self.replicax_variable.value

    @_value.setter
    def _value(self, value: Any) -> None:
        if value is not None:  # `fit` drops the values that it is about to replace
            self.replicax_variable.assign(value)

    def _direct_assign(self, value: Any) -> None:
        self.replicax_variable.assign(value)


def adopt(owner: Any) -> list[Variable]:
    for variable in owner.variables:
        _adopt(variable, owner)
    listed = owner.trainable_variables if isinstance(owner, keras.Layer) else owner.variables
    return [variable.replicax_variable for variable in listed]


def _adopt(variable: Any, owner: Any) -> None:
    if isinstance(variable, Adopted):
        return
    if type(variable) is not keras.Variable:
        raise _errors.not_adoptable(owner, variable)
    value = variable.__dict__.pop("_value")
    variable.replicax_variable = Variable(
        value, name=variable.path, trainable=variable.trainable, aggregation=_aggregation(variable)
    )
    variable.__class__ = Adopted


def _aggregation(variable: Any) -> str:
    """What Keras was told; else the mean of what replicas found out each for itself, a batch statistic say."""
    if variable.aggregation != "none":
        return variable.aggregation
    learnt = variable.trainable or not jnp.issubdtype(variable.dtype, jnp.floating)
    return "none" if learnt else "mean"
