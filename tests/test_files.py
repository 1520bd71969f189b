"""Global batches cut out of many files."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax import data
from replicax._errors import InputError
from replicax._input.distribute import distribute_dataset
from replicax._input.files import files_of
from replicax._input.sources import Pass, as_source

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def files(lengths):
    """Rows 0, 1, 2, ... in files of these lengths."""
    ends = np.cumsum(lengths)
    return {
        f"part-{i}": np.arange(end - length, end) for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
    }


def from_lengths(lengths, batch_size, **options):
    found = files(lengths)
    return data.from_files(found, found.__getitem__, batch_size, **options)


def numbers(batches):
    return [batch.tolist() for batch in batches]


def test_batches_run_on_from_one_file_into_the_next():
    assert numbers(from_lengths([3, 1, 4, 0, 2], 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers(from_lengths([3, 4], 4, drop_remainder=True)) == [[0, 1, 2, 3]]


def test_a_batch_does_not_mix_epochs():
    assert numbers(from_lengths([3], 2, epochs=2)) == [[0, 1], [2], [0, 1], [2]]
    endless = iter(from_lengths([3], 2, epochs=None))
    assert numbers(itertools.islice(endless, 5)) == [[0, 1], [2], [0, 1], [2], [0, 1]]


def test_trees_keep_their_leaves_together():
    batches = data.from_files([0, 1, 2], lambda i: {"x": np.full((5, 2), i), "y": np.full(5, i)}, 4, shuffle=1)

    assert all((batch["x"][:, 0] == batch["y"]).all() for batch in batches)


@settings(deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 8), shuffle=st.just(False) | st.integers(0, 5))
def test_an_epoch_holds_every_row_once(lengths, batch_size, shuffle):
    batches = numbers(from_lengths(lengths, batch_size, shuffle=shuffle))

    assert sorted(row for batch in batches for row in batch) == list(range(sum(lengths)))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


@settings(deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 8), processes=st.integers(1, 4), shuffle=st.just(False) | st.just(3))
def test_processes_that_divide_the_files_read_all_rows_between_them(lengths, batch_size, processes, shuffle):
    source = as_source(from_lengths(lengths, batch_size, shuffle=shuffle))

    seen = []
    for index in range(processes):
        part = Pass(source.part_of_files(index, processes, [batch_size, 1]))
        for batch in iter(part.read, None):
            seen += batch.gather(range(batch.rows))[0].tolist()

    assert sorted(seen) == list(range(sum(lengths)))


def test_every_so_many_th_file_is_a_processs_own():
    assert list(files_of(range(10), index=3, count=5)) == [3, 8]
    assert list(files_of(range(10), index=0, count=2)) == [0, 2, 4, 6, 8]


def test_only_one_file_at_a_time_is_read():
    opened = []
    batches = iter(data.from_files(range(5), lambda i: opened.append(i) or np.arange(4), 4))

    next(batches)

    assert opened == [0]


def test_epochs_are_shuffled_differently_and_files_too():
    first, second = numbers(from_lengths([8, 8], 16, shuffle=1, epochs=2))

    assert first != second
    assert [row % 8 for row in sorted(first[:8])] == list(range(8))
    assert [row % 8 for row in first[:8]] != [row % 8 for row in first[8:]]


def test_a_place_is_found_again():
    strategy = functools.partial(rx.MirroredStrategy, jax.devices()[:2])()
    dataset = distribute_dataset(strategy, from_lengths([3, 5, 2], 4, shuffle=1))
    iterator = iter(dataset)
    next(iterator)

    resumed = iter(dataset)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))

    for here, there in zip(iterator, resumed, strict=True):
        np.testing.assert_array_equal(here.data, there.data)


def test_no_files_are_refused():
    with pytest.raises(InputError, match="got no files"):
        data.from_files([], np.load, 4)


def test_a_file_whose_leaves_do_not_match_is_named():
    with pytest.raises(InputError, match=r"(?s)read from b.npz.*float64\[3\].*float64\[2\]"):
        list(data.from_files(["b.npz"], lambda path: (np.zeros(3), np.zeros(2)), 4))


def test_numbers_that_make_no_sense_name_the_call():
    with pytest.raises(InputError, match=r"rx.data.from_files\(batch_size=0\)"):
        data.from_files([1], np.load, 0)
    with pytest.raises(InputError, match=r"rx.data.from_files\(shuffle=True\)"):
        data.from_files([1], np.load, 1, shuffle=True)
