"""Which strategies does every law run over? One dictionary, name → maker.

``@pytest.mark.parametrize("name", STRATEGIES)`` and ``STRATEGIES[name]()`` in the test. `COMPILED` and `EAGER` are its
halves; the strategy `name` runs line by line under the name ``EAGER_TWIN[name]``.
"""

from collections.abc import Callable

import jax

import replicax as rx


def _mirrored(replicas: int, eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.MirroredStrategy(jax.devices()[:replicas], eager=eager)


def _one_device(eager: bool) -> Callable[[], rx.Strategy]:
    return lambda: rx.OneDeviceStrategy("cpu:0", eager=eager)


# There is one default strategy per process and it has no `eager=`. It runs line by line with
# `options=rx.RunOptions(eager=True)`; its twin here is the strategy that gives the same placement a name.
COMPILED: dict[str, Callable[[], rx.Strategy]] = {
    "default": rx.get_strategy,
    "one_device": _one_device(eager=False),
    **{f"mirrored_{n}": _mirrored(n, eager=False) for n in (1, 2, 4)},
}
EAGER: dict[str, Callable[[], rx.Strategy]] = {
    "one_device_eager": _one_device(eager=True),
    **{f"mirrored_{n}_eager": _mirrored(n, eager=True) for n in (1, 2, 4)},
}
EAGER_TWIN = {name: f"{name.replace('default', 'one_device')}_eager" for name in COMPILED}

STRATEGIES = COMPILED | EAGER
