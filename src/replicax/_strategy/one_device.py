"""The same promises with one replica: `OneDeviceStrategy`, and the default strategy of a program that names none."""

from __future__ import annotations

from typing import Any

import jax

from replicax import _context
from replicax._devices import resolve
from replicax._placement import place
from replicax._strategy.base import Strategy


class OneDeviceStrategy(Strategy):
    """Everything on one device, with the API of many.

    For debugging, for the small end of a script that also runs on a cluster, and as the yardstick: every other strategy
    must give its numbers.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> float(strategy.run(lambda x: x * 2, (21.0,)))
    42.0
    """

    def __init__(self, device: str | jax.Device, *, eager: bool = False) -> None:
        super().__init__(place([resolve(device)]), eager=eager)


class DefaultStrategy(Strategy):
    """What is in force where no strategy was entered: one replica on JAX's default device."""

    def __init__(self) -> None:
        if _context._default is not None:
            raise RuntimeError("There is one default strategy; rx.get_strategy() returns it where none was entered.")
        super().__init__(place([jax.local_devices()[0]]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("The default strategy cannot be copied; there is one of it.")


_context.register_default(DefaultStrategy)
