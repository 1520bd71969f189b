"""Which hosts does a Slurm host list name, and how many tasks run on each?

Slurm folds names that differ in a number: ``n[1-2],m5,o[3-4,6]``. Numbers keep their leading zeros, a bracket may stand
anywhere in a name (``rack1-n[3-4]-ib``), and several brackets multiply, the last one counting fastest. Task counts are
folded as well: ``3(x2),2``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from replicax._errors import ClusterError, message

_HOSTS = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")  # one item: anything, with commas only inside brackets
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts that a list names, in its order.

    >>> from replicax.cluster import expand_hostlist
    >>> expand_hostlist("rack1-n[08-10]-ib,login")
    ['rack1-n08-ib', 'rack1-n09-ib', 'rack1-n10-ib', 'login']
    """
    hosts: list[str] = []
    position = 0
    while True:
        item = _HOSTS.match(hostlist, position)
        if item is None:
            raise _bad_hostlist(hostlist, position)
        hosts += _expand_item(hostlist, item.group())
        position = item.end()
        if position == len(hostlist):
            return hosts
        if hostlist[position] != ",":
            raise _bad_hostlist(hostlist, position)
        position += 1


def expand_tasks_per_node(counts: str) -> list[int]:
    """The number of tasks on each node, in the order of the host list.

    >>> from replicax.cluster import expand_tasks_per_node
    >>> expand_tasks_per_node("3(x2),2,1")
    [3, 3, 2, 1]
    """
    tasks: list[int] = []
    for item in counts.split(","):
        count = _TASKS.fullmatch(item)
        if count is None:
            raise _bad_counts(counts, item)
        tasks += [int(count[1])] * int(count[2] or 1)
    return tasks


def _expand_item(hostlist: str, item: str) -> Iterator[str]:
    # Splitting at brackets gives literal, numbers, literal, numbers, ..., literal.
    parts = _BRACKET.split(item)
    choices = [[part] if i % 2 == 0 else list(_numbers(hostlist, part)) for i, part in enumerate(parts)]
    return ("".join(choice) for choice in itertools.product(*choices))


def _numbers(hostlist: str, bracket: str) -> Iterator[str]:
    for item in bracket.split(","):
        numbers = _NUMBERS.fullmatch(item)
        if numbers is None:
            raise _bad_range(hostlist, item)
        first, last = numbers[1], numbers[2] or numbers[1]
        if int(first) > int(last):
            raise _bad_range(hostlist, item)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _bad_hostlist(hostlist: str, position: int) -> ClusterError:
    return ClusterError(
        message(
            "Invalid hostlist format",
            [f"{hostlist!r} cannot be read from {hostlist[position:]!r} on"],
            instead=["n[1-2],m5"],
        )
    )


def _bad_range(hostlist: str, item: str) -> ClusterError:
    return ClusterError(
        message(
            "Invalid hostlist format",
            [f"{hostlist!r}: {item!r} in brackets is neither a number nor a range that goes up"],
            instead=["n[1-2,5]"],
        )
    )


def _bad_counts(counts: str, item: str) -> ClusterError:
    return ClusterError(
        message("Invalid tasks-per-node list format", [f"{counts!r}: {item!r} is not a count"], instead=["3(x2),2,1"])
    )
