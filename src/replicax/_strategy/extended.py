"""How do callers of ``strategy.extended`` still find their names? A thin view; nothing inside replicax goes through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy


class StrategyExtended:
    """The second half of tf.distribute's Strategy; see `Strategy.extended`."""

    def __init__(self, container_strategy: Strategy) -> None:
        self._strategy = container_strategy
