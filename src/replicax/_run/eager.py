"""How does a replica function run line by line, replica by replica?"""

from __future__ import annotations

from typing import Any


def run(strategy: Any, fn: Any, args: Any, kwargs: Any, options: Any) -> Any:
    raise NotImplementedError
