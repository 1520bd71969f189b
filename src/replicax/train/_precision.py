"""How do gradients survive 16 bits? `LossScale`: multiply the loss, divide the gradients, leave out bad steps.

Small gradients are zero in float16. Multiplied by a large number they are not; too large a number makes them infinite.
The right number is found by trying.
"""

# Who decides that a step is left out?
#
# All replicas must decide alike, or their variables part. They do not vote: one infinite or undefined gradient makes
# the reduced gradient of every replica infinite or undefined. So the flag is computed from the reduced gradients, is
# mirrored by proof, and costs no exchange of its own. It also sees a sum of finite gradients that overflows.

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context
from replicax._errors import message
from replicax._options import is_count
from replicax._variables.variable import Variable
from replicax.optim import Optimizer

PyTree = Any


class LossScale:
    """Scales a loss so that its gradients can be computed in float16, and leaves out the steps in which they cannot.

    Make it under the scope of the strategy; the scale is a variable and is saved with the rest. bfloat16 has the range
    of float32 and needs none of this.

    Args:
      initial: The scale to begin with.
      dynamic: Whether to look for the best scale: a step with infinite gradients divides it by `factor`, and
        `growth_interval` steps without any multiply it. A scale that is not dynamic leaves out bad steps too.
      growth_interval: After how many good steps to try a larger scale.
      factor: What the scale is multiplied or divided by.

    >>> import jax.numpy as jnp, optax, replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> with strategy.scope():
    ...     w = rx.Variable(2.0)
    ...     opt = rx.Optimizer(optax.sgd(0.5), gradients="mean")
    ...     scale = rx.train.LossScale(initial=1024.0)
    >>> def step(x):
    ...     def loss():
    ...         return scale.scale(w.value.astype(jnp.float16) * x)
    ...     gradients = rx.grad(loss, [w])()
    ...     scale.apply_gradients(opt, zip(gradients, [w]))
    >>> strategy.run(step, (jnp.float16(1.0),))
    >>> strategy.run(step, (jnp.float16(1e4),))
    >>> print(w.numpy(), float(scale.value))
    1.5 512.0
    """

    def __init__(
        self, initial: float = 2.0**15, *, dynamic: bool = True, growth_interval: int = 2000, factor: float = 2.0
    ) -> None:
        if not (_above(initial, 0) and is_count(growth_interval) and _above(factor, 1)):
            raise ValueError(
                f"rx.train.LossScale(initial={initial!r}, growth_interval={growth_interval!r}, factor={factor!r}): the scale "
                "must be positive, the interval at least 1 and the factor greater than 1."
            )
        self.dynamic = dynamic
        self.growth_interval = growth_interval
        self.factor = factor
        self._scale = Variable(jnp.float32(initial), name="loss_scale", trainable=False)
        self._good_steps = Variable(jnp.int32(0), name="loss_scale/good_steps", trainable=False)

    def checkpoint_items(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    @property
    def value(self) -> jax.Array:
        """The scale."""
        return self._scale.value

    def scale(self, loss: jax.Array) -> jax.Array:
        """The loss to differentiate. It is scaled in float32; the gradients flow back in the type of `loss`."""
        return jnp.asarray(loss, jnp.float32) * self.value

    def unscale(self, gradients: PyTree) -> PyTree:
        """The gradients of the loss that was not scaled, in float32."""
        return jax.tree.map(lambda x: x.astype(jnp.float32) / self.value if _is_inexact(x) else x, gradients)

    def apply_gradients(
        self, optimizer: Optimizer, grads_and_vars: Iterable[tuple[Any, Variable]], **extra: Any
    ) -> jax.Array:
        """Unscales and reduces the gradients and applies them, unless one of them is infinite or not a number.

        Returns:
          Whether they were applied: True or False, the same on every replica.
        """
        if not isinstance(optimizer, Optimizer):
            raise _no_optimizer(optimizer)
        pairs = list(grads_and_vars)
        context = _context.get_replica_context()
        assert context is not None
        gradients = context.all_reduce(optimizer.gradients, self.unscale([gradient for gradient, _ in pairs]))
        finite = _all_finite(gradients)
        variables = [variable for _, variable in pairs]
        optimizer.apply_gradients(zip(gradients, variables, strict=True), aggregate=False, when=finite, **extra)
        if self.dynamic:
            self._adapt(finite)
        return finite

    def _adapt(self, finite: jax.Array) -> None:
        good = jnp.where(finite, self._good_steps.value + 1, 0)
        grow = good >= self.growth_interval
        larger = jnp.where(grow, self.value * self.factor, self.value)
        larger = jnp.where(jnp.isfinite(larger), larger, self.value)
        smaller = jnp.maximum(self.value / self.factor, 1.0)
        self._scale.assign(jnp.where(finite, larger, smaller))
        self._good_steps.assign(jnp.where(grow, 0, good))


def _above(x: Any, limit: float) -> bool:
    return isinstance(x, numbers.Real) and float(x) > limit


def _no_optimizer(given: Any) -> TypeError:
    call = f"`scale.apply_gradients({type(given).__name__}, ...)` was not given an optimizer"
    return TypeError(message(call, instead=['`rx.Optimizer(transform, gradients="mean")`']))


def _all_finite(tree: PyTree) -> jax.Array:
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]
    return jnp.stack(flags).all() if flags else jnp.bool_(True)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
