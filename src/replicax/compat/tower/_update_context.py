"""Which component of a variable is being updated here? `UpdateContext` and `get_update_device`."""

from __future__ import annotations

import threading
from typing import Any


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: list[Any] = []


_thread = _Thread()


class UpdateContext:
    """Says that the code in its ``with`` block updates what lies on `device`.

    `update` and `update_non_slot` enter it around the function they are given.

    >>> from replicax.compat import tower
    >>> with tower.UpdateContext("cpu:0"):
    ...     tower.get_update_device()
    'cpu:0'
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        _thread.devices.append(self._device)

    def __exit__(self, *exc: object) -> None:
        _thread.devices.pop()


def get_update_device() -> Any:
    """The device of the component that is being updated, or None outside of an update.

    A compiled run updates all components by one program; there it is the first one's.
    """
    return _thread.devices[-1] if _thread.devices else None
