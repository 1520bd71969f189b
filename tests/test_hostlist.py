"""What Slurm folds is unfolded into the same hosts and the same numbers of tasks."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._errors import ClusterError
from replicax.cluster import expand_hostlist, expand_tasks_per_node

names = st.text("abcxyz-.", min_size=1, max_size=4)


@st.composite
def numbers_in_brackets(draw):
    """A bracket and what it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 4))
        first = draw(st.integers(0, 10**width - 1))
        last = first + draw(st.integers(0, 12))
        texts.append(str(first).zfill(width) + (f"-{last}" if last > first or draw(st.booleans()) else ""))
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return f"[{','.join(texts)}]", numbers


@st.composite
def folded_hosts(draw):
    """One item of a host list and the hosts that it stands for."""
    parts = draw(st.lists(names.map(lambda name: (name, [name])) | numbers_in_brackets(), min_size=1, max_size=3))
    return "".join(text for text, _ in parts), ["".join(choice) for choice in itertools.product(*(c for _, c in parts))]


def fold(hosts):
    """Neighbours that differ only in a number that goes up by one, in one bracket."""
    runs = []
    for host in hosts:
        prefix, digits, suffix = re.fullmatch(r"(.*?)(\d*)([^\d]*)", host).groups()
        if runs and digits and runs[-1][0] == (prefix, suffix, len(digits)) and int(digits) == runs[-1][2] + 1:
            runs[-1][2] += 1
        else:
            runs.append([(prefix, suffix, len(digits)), digits, int(digits or 0)])
    return ",".join(
        f"{prefix}[{first}-{str(last).zfill(width)}]{suffix}" if width else f"{prefix}{suffix}"
        for (prefix, suffix, width), first, last in runs
    )


@given(st.lists(folded_hosts(), min_size=1, max_size=4))
def test_every_item_is_unfolded_in_its_place(items):
    text = ",".join(item for item, _ in items)

    assert expand_hostlist(text) == [host for _, hosts in items for host in hosts]


@given(st.lists(st.tuples(names, st.integers(0, 40), st.integers(1, 3), names | st.just("")), min_size=1, max_size=20))
def test_folding_and_unfolding_gives_the_same_hosts(parts):
    hosts = sorted({f"{prefix}{number:0{width}}{suffix}" for prefix, number, width, suffix in parts})

    assert expand_hostlist(fold(hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1,3]", "n1 n3"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[0001-0003],m5,o[009-011]", "n0001 n0002 n0003 m5 o009 o010 o011"),
        ("n[9-11]", "n9 n10 n11"),
        ("rack1-n[3-4]-ib", "rack1-n3-ib rack1-n4-ib"),
        ("r[1-2]n[08-09]", "r1n08 r1n09 r2n08 r2n09"),
    ],
)
def test_examples_from_clusters(text, hosts):
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", ",", "n1,", ",n1", "n1,,n2", "n[1-2", "n1-2]", "n[]", "n[a-b]", "n[2-1]", "n[1-]", "n[1 - 2]", "n1 n2"]
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="Invalid hostlist format") as refused:
        expand_hostlist(text)
    assert repr(text) in str(refused.value)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=6))
def test_task_counts_are_unfolded(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)

    assert expand_tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("13(x10)", [13] * 10),
    ],
)
def test_examples_of_task_counts(text, tasks):
    assert expand_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "x", "2,", "2(x)", "2(3)", "2 (x2)", "-1"])
def test_what_is_no_list_of_task_counts_is_refused(text):
    with pytest.raises(ClusterError, match="Invalid tasks-per-node list format"):
        expand_tasks_per_node(text)
