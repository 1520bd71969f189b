"""How many gradients, of how many bytes: ``40x16K``. Shared by `allreduce` and its peers; needs nothing but Python."""

from __future__ import annotations

UNITS = {"K": 1 << 10, "M": 1 << 20}


def count_and_bytes(job: str) -> tuple[int, int]:
    """
    >>> count_and_bytes("40x16K")
    (40, 16384)
    """
    count, size = job.split("x")
    return int(count), int(size[:-1]) * UNITS[size[-1]] if size[-1] in UNITS else int(size)


def calls_for(job: str) -> int:
    """How many steps make a round: fewer of what takes longer."""
    count, size = count_and_bytes(job)
    return max(1, min(20, (1 << 25) // (count * size)))
