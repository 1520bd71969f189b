"""Global batches cut from arrays in memory."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax import data
from replicax._errors import InputError


def numbers(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def test_rows_of_all_leaves_stay_together():
    x, y = np.arange(20).reshape(10, 2), np.arange(10)

    for batch in data.from_arrays({"x": x, "y": y}, batch_size=3, shuffle=5):
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])


def test_the_last_batch_is_short_unless_dropped():
    rows = np.arange(7)

    assert numbers(data.from_arrays(rows, batch_size=3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert numbers(data.from_arrays(rows, batch_size=3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]


def test_each_iteration_starts_from_the_beginning():
    batches = data.from_arrays(np.arange(9), batch_size=2, shuffle=1)

    assert numbers(batches) == numbers(batches)


def test_epochs_are_shuffled_differently_and_hold_the_same_rows():
    batches = numbers(data.from_arrays(np.arange(8), batch_size=4, shuffle=1, epochs=2))

    first, second = batches[0] + batches[1], batches[2] + batches[3]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(8))


def test_length_counts_batches_of_all_epochs():
    assert len(data.from_arrays(np.arange(10), batch_size=4, epochs=3)) == 9
    assert len(data.from_arrays(np.arange(10), batch_size=4, epochs=3, drop_remainder=True)) == 6
    assert len(data.from_arrays(np.arange(2), batch_size=4, drop_remainder=True)) == 0


def test_data_without_end_has_no_length_and_goes_on():
    batches = data.from_arrays(np.arange(3), batch_size=2, epochs=None)

    assert numbers(itertools.islice(batches, 5)) == [[0, 1], [2], [0, 1], [2], [0, 1]]
    with pytest.raises(TypeError, match="epochs=None it never ends"):
        len(batches)


def test_element_spec_is_that_of_a_full_batch():
    spec = data.from_arrays((np.zeros((10, 3), np.float32), np.zeros(10, np.int32)), batch_size=4).element_spec

    assert spec == (jax.ShapeDtypeStruct((4, 3), np.float32), jax.ShapeDtypeStruct((4,), np.int32))


def test_a_batch_may_be_written_to_without_changing_the_data():
    rows = np.arange(4)
    batches = data.from_arrays(rows, batch_size=2)

    for batch in batches:
        batch[:] = -1

    assert rows.tolist() == [0, 1, 2, 3]


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    shuffle=st.just(False) | st.integers(0, 5),
    epochs=st.integers(1, 3),
    pick=st.data(),
)
def test_a_saved_place_leads_on_to_the_same_batches(rows, batch_size, shuffle, epochs, pick):
    batches = data.from_arrays(np.arange(rows), batch_size, shuffle, epochs)
    stop = pick.draw(st.integers(0, len(batches)))
    iterator = iter(batches)
    for _ in range(stop):
        next(iterator)

    resumed = iter(batches)
    resumed.set_state(iterator.get_state())

    assert numbers(resumed) == numbers(iterator)


@pytest.mark.parametrize("other", [{"shuffle": 2}, {"shuffle": 1, "batch_size": 4}], ids=["seed", "batch-size"])
def test_a_place_in_another_sequence_is_refused(other):
    state = iter(data.from_arrays(np.arange(9), batch_size=3, shuffle=1)).get_state()

    with pytest.raises(InputError, match="(?s)state of another sequence.*in the state.*batch_size=3, shuffle=1"):
        iter(data.from_arrays(np.arange(9), **{"batch_size": 3, **other})).set_state(state)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        pytest.param({}, "without arrays", id="empty-tree"),
        pytest.param({"x": np.zeros((0, 3))}, r"tree\['x'\]  float64\[0,3\]", id="no-rows"),
        pytest.param({"x": np.zeros(3), "k": 7}, r"tree\['k'\]  int64\[\]", id="scalar-leaf"),
        pytest.param([[1, 2], [3, 4]], r"(?s)tree\[0\]\[0\].*np.asarray\(x\)", id="list-is-a-tree"),
        pytest.param(
            (np.zeros(3), np.zeros((4, 2))), r"(?s)tree\[0\]  float64\[3\].*tree\[1\]  float64\[4,2\]", id="rows"
        ),
        pytest.param(
            {"ids": np.array([np.zeros(2), np.zeros(3)], dtype=object)},
            r"(?s)tree\['ids'\]  object\[2\]  rows of shape \(2,\), shape \(3,\).*pad the rows",
            id="ragged",
        ),
    ],
)
def test_a_tree_that_cannot_be_cut_is_refused_by_path(tree, text):
    with pytest.raises(InputError, match=text):
        data.from_arrays(tree, batch_size=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size=0.*whole number above 0"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": np.arange(4)}, r"(?s)int64\[4\].*`rx\.data\.from_arrays\(\(x, y\), batch_size=256\)`"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 2, "epochs": 0}, "(?s)epochs=0.*epochs=None"),
        ({"batch_size": 2, "shuffle": True}, "(?s)shuffle=True.*choose any integer"),
        ({"batch_size": 2, "shuffle": -1}, "shuffle=-1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments, text):
    with pytest.raises(InputError, match=text):
        data.from_arrays(np.arange(4), **arguments)
