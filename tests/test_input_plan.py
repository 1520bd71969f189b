"""The arithmetic of input: which rows make a batch, and which replica gets them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._input.plan import Position, Schedule, balanced, shuffled

SIZES = st.integers(1, 200)
REPLICAS = st.integers(1, 8)


@pytest.mark.parametrize(
    ("rows", "replicas", "sizes"),
    [
        (10, 4, (3, 3, 2, 2)),
        (9, 4, (3, 2, 2, 2)),
        (4, 3, (2, 1, 1)),
        (7, 3, (3, 2, 2)),
        (2, 3, (1, 1, 0)),
        (4, 5, (1, 1, 1, 1, 0)),
        (8, 4, (2, 2, 2, 2)),
        (1, 1, (1,)),
    ],
)
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(rows, replicas, sizes):
    assert balanced(rows, replicas).sizes == sizes


@settings(deadline=None)
@given(rows=SIZES, replicas=REPLICAS, batch_size=SIZES)
def test_every_row_goes_to_exactly_one_replica(rows, replicas, batch_size):
    split = balanced(rows, replicas, batch_size)

    handed_out = list(itertools.chain.from_iterable(split.rows_of(replica) for replica in range(replicas)))

    assert handed_out == list(range(rows))
    assert max(split.sizes) - min(split.sizes) <= 1
    assert list(split.sizes) == sorted(split.sizes, reverse=True)


@settings(deadline=None)
@given(batch_size=SIZES, replicas=REPLICAS, data=st.data())
def test_a_short_batch_has_the_shape_of_a_full_one(batch_size, replicas, data):
    rows = data.draw(st.integers(1, batch_size))

    full, short = balanced(batch_size, replicas, batch_size), balanced(rows, replicas, batch_size)

    assert short.block == full.block == -(-batch_size // replicas)
    assert max(short.sizes) <= short.block


@settings(deadline=None)
@given(rows=SIZES, replicas=REPLICAS, batch_size=SIZES)
def test_valid_rows_stand_first_and_padding_repeats_rows_of_the_batch(rows, replicas, batch_size):
    split = balanced(rows, replicas, batch_size)

    blocks = split.places(range(replicas)).reshape(replicas, split.block)

    for replica, block in enumerate(blocks):
        size = split.sizes[replica]
        assert list(block[:size]) == list(split.rows_of(replica))
        assert all(0 <= place < rows for place in block[size:])
        assert len(set(block[size:])) <= 1


@settings(deadline=None)
@given(rows=SIZES, replicas=REPLICAS, batch_size=SIZES, data=st.data())
def test_processes_read_between_them_what_one_process_reads(rows, replicas, batch_size, data):
    split = balanced(rows, replicas, batch_size)
    cuts = sorted(data.draw(st.sets(st.integers(1, replicas - 1), max_size=3)) if replicas > 1 else [])
    bounds = [0, *cuts, replicas]

    by_process = [split.places(range(start, stop)) for start, stop in itertools.pairwise(bounds)]

    np.testing.assert_array_equal(np.concatenate(by_process), split.places(range(replicas)))


def test_the_mask_holds_valid_rows_of_the_replica_and_of_the_batch():
    np.testing.assert_array_equal(balanced(5, 4, 12).mask(), [[2, 5], [1, 5], [1, 5], [1, 5]])


@settings(deadline=None)
@given(rows=SIZES, batch_size=SIZES, epochs=st.integers(1, 3), seed=st.none() | st.integers(0, 2**64 - 1))
def test_an_epoch_holds_every_row_once(rows, batch_size, epochs, seed):
    schedule = Schedule(rows, batch_size, epochs, seed=seed)

    read = list(walk(schedule, Position()))

    assert len(read) == schedule.length
    for epoch in range(epochs):
        of_epoch = [row for position, batch in read if position.epoch == epoch for row in batch]
        assert sorted(of_epoch) == list(range(rows))


@settings(deadline=None)
@given(rows=SIZES, batch_size=SIZES, seed=st.none() | st.integers(0, 9), data=st.data())
def test_a_walk_resumed_anywhere_goes_on_with_the_same_rows(rows, batch_size, seed, data):
    schedule = Schedule(rows, batch_size, epochs=2, seed=seed)
    whole = list(walk(schedule, Position()))
    stop = data.draw(st.integers(0, len(whole)))
    left_at = Position() if stop == 0 else Position(whole[stop - 1][0].epoch, whole[stop - 1][0].batch + 1)

    resumed = list(walk(schedule, left_at))

    assert [batch for _, batch in resumed] == [batch for _, batch in whole[stop:]]


@settings(deadline=None)
@given(rows=SIZES, batch_size=SIZES)
def test_drop_remainder_leaves_out_the_short_batch_only(rows, batch_size):
    schedule = Schedule(rows, batch_size, drop_remainder=True)

    read = [batch for _, batch in walk(schedule, Position())]

    assert [len(batch) for batch in read] == [batch_size] * (rows // batch_size)
    assert schedule.even


def test_without_epochs_there_is_no_end():
    schedule = Schedule(rows=5, batch_size=2, epochs=None)

    assert schedule.length is None
    assert schedule.settle(Position(epoch=10**6, batch=3)) == Position(10**6 + 1, 0)


def test_an_order_is_fixed_for_good():
    order = [7, 3, 5, 6, 4, 0, 2, 1]  # saved positions in users' checkpoints mean this order

    np.testing.assert_array_equal(shuffled(8, seed=3, epoch=1), order)
    assert not np.array_equal(shuffled(8, seed=3, epoch=2), order)
    assert not np.array_equal(shuffled(8, seed=4, epoch=1), order)


def walk(schedule, position):
    """(position, rows) of every batch from `position` on."""
    while (position := schedule.settle(position)) is not None:
        span, order = schedule.span(position.batch), schedule.order(position.epoch)
        yield position, list(span) if order is None else order[span.start : span.stop].tolist()
        position = Position(position.epoch, position.batch + 1)
