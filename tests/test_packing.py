"""Whatever travels together, and in whatever pieces, each array comes back as if it had travelled alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._cross import packing
from replicax._cross.packing import Packing

DTYPES = [np.float32, np.int32, np.float16]


def arrays_of(sizes, dtype=np.float32):
    return [np.zeros(size, dtype) for size in sizes]


array_lists = st.lists(
    st.tuples(st.sampled_from([(), (0,), (1,), (3,), (2, 5), (70_000,)]), st.sampled_from(DTYPES)), max_size=8
)
packings = st.one_of(
    st.builds(Packing, st.integers(0, 6)),
    st.builds(Packing, st.just(0), st.integers(1, 64), st.integers(1, 4)),
)


# -- plans


def test_packs_close_once_they_exceed_the_limit():
    assert packing.group_by_size([128, 32, 800, 4], 200) == [[0, 1, 2], [3]]


def test_without_a_limit_all_travel_together():
    assert packing.group_by_size([128, 32, 800, 4], 0) == [[0, 1, 2, 3]]
    assert packing.group_by_size([], 100) == []


def test_a_size_class_keeps_large_arrays_alone_and_dtypes_apart():
    small, large = packing.SMALL_BYTES // 4, packing.SMALL_BYTES // 4 + 1
    arrays = [*arrays_of([small, large, 8]), *arrays_of([4], np.int32), *arrays_of([small, small, small])]

    assert packing.by_size_class(arrays) == [[0, 2, 4, 5], [1], [3], [6]]


@given(st.lists(st.integers(0, 2 * packing.SMALL_BYTES // 4), max_size=20))
def test_size_classes_never_exceed_a_pack(sizes):
    plan = packing.by_size_class(arrays_of(sizes))

    assert sorted(i for pack in plan for i in pack) == list(range(len(sizes)))
    assert all(sum(sizes[i] * 4 for i in pack) <= packing.PACK_BYTES for pack in plan)


def test_the_last_gradients_are_packed_first():
    plan = packing.by_dtype(arrays_of([1, 2, 3]), lambda sizes: packing.group_by_size(sizes, 4))

    assert plan == [[2], [1], [0]]


def test_small_neighbours_come_first_and_isolated_ones_stay_alone():
    small, large = 4, 1000

    assert packing.small_runs(arrays_of([small, small, large, small]), 64, 10) == [[0, 1], [2], [3]]
    assert packing.small_runs(arrays_of([large, small, small]), 64, 10) == [[1, 2], [0]]


def test_a_run_holds_at_most_max_group():
    assert packing.small_runs(arrays_of([1] * 5), 64, 2) == [[0, 1], [2, 3], [4]]


def test_only_float32_is_small():
    assert packing.small_runs(arrays_of([1, 1], np.float16), 64, 10) == [[0], [1]]


@pytest.mark.parametrize(("max_bytes", "max_group"), [(0, 10), (64, 0), (-1, 10), (64, -1)])
def test_small_runs_need_both_limits(max_bytes, max_group):
    with pytest.raises(ValueError, match="must be positive"):
        packing.small_runs(arrays_of([1, 1]), max_bytes, max_group)


@pytest.mark.parametrize(
    ("total", "num_packs", "sizes"), [(10, 4, [2, 2, 2, 4]), (3, 4, [0, 0, 0, 3]), (12, 3, [4, 4, 4]), (5, 1, [5])]
)
def test_the_last_piece_takes_the_remainder(total, num_packs, sizes):
    assert packing.piece_sizes(total, num_packs) == sizes


@pytest.mark.parametrize("num_packs", [0, -1])
def test_everything_cannot_be_cut_into_no_pieces(num_packs):
    with pytest.raises(ValueError, match="fewer than one"):
        packing.piece_sizes(10, num_packs)


# -- carried out


def test_arrays_of_3_4_and_3_elements_travel_in_four_pieces():
    arrays = [jnp.arange(3.0), 10 + jnp.arange(4.0).reshape(2, 2), 20 + jnp.arange(3.0)]
    seen = []

    def double(pieces):
        seen.extend(piece.size for piece in pieces)
        return [2 * piece for piece in pieces]

    results = Packing(num_packs=4).apply(double, arrays)

    assert seen == [2, 2, 2, 4]
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(result, 2 * array)


def test_small_runs_join_what_they_say():
    arrays = [jnp.ones(2), jnp.ones((1, 3)), jnp.ones(100), jnp.ones(4)]
    seen = []

    def double(packs):
        seen.extend(pack.shape for pack in packs)
        return [2 * pack for pack in packs]

    results = Packing(num_packs=0, small_bytes=64).apply(double, arrays)

    assert seen == [(5,), (100,), (4,)]
    assert [result.shape for result in results] == [array.shape for array in arrays]


@settings(max_examples=60, deadline=None)
@given(array_lists, packings, st.sampled_from([0, 0, 8, 100_000]))
def test_every_packing_gives_back_what_came_in(shapes, packing, bytes_per_pack):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.integers(0, 100, shape).astype(dtype)) for shape, dtype in shapes]

    results = packing.apply(lambda packs: [pack + 1 for pack in packs], arrays, bytes_per_pack)

    assert len(results) == len(arrays)
    for array, result in zip(arrays, results, strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array + 1)
