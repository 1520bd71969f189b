"""What replicas get: every row once, in one shape, from any kind of data."""

import functools
import gc
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax import _jax, data, metrics
from replicax._errors import ContextError, InputError, NotADatasetError, NotAvailableError, OutOfRangeError
from replicax._input.distribute import (
    distribute_dataset,
    distribute_from_function,
    explain,
    make_dataset_iterator,
    make_input_fn_iterator,
    make_numpy,
)
from replicax._input.feed import Feed
from replicax._input.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from replicax._input.sources import Pass, as_source
from replicax._input.steps import GlobalSteps, Padding
from replicax._placement import place_grid
from replicax._strategy.base import Strategy

PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


@functools.cache
def mirrored(replicas):
    return rx.MirroredStrategy(jax.devices()[:replicas])


def parts(strategy, value):
    """The valid rows of each replica, as lists."""
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def all_parts(strategy, dataset):
    return [parts(strategy, element) for element in dataset]


def batched(rows, size, **kwargs):
    return data.from_arrays(np.arange(rows), size, **kwargs)


# -- global batches


@pytest.mark.parametrize(
    ("rows", "size", "replicas", "expected"),
    [
        (9, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
        (14, 8, 2, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12, 13]]]),
        (5, 3, 2, [[[0, 1], [2]], [[3], [4]]]),
        (12, 5, 3, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]], [[10], [11], []]]),
        (10, 10, 4, [[[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]]),
    ],
)
def test_a_batch_is_divided_evenly_and_the_last_one_is_not_lost(rows, size, replicas, expected):
    strategy = mirrored(replicas)

    assert all_parts(strategy, distribute_dataset(strategy, batched(rows, size))) == expected


def test_every_element_has_the_shape_of_a_full_one():
    strategy = mirrored(4)

    elements = list(distribute_dataset(strategy, batched(21, 10)))

    assert {element.data.shape for element in elements} == {(12,)}
    assert {element.mask.shape for element in elements} == {(4, 3)}
    assert len({jax.tree.structure(element) for element in elements}) == 1


def test_a_short_batch_that_comes_first_still_gets_the_declared_shape():
    strategy = mirrored(2)
    batches = [np.arange(3), np.arange(8)]

    elements = list(distribute_dataset(strategy, batches))

    assert [element.data.shape for element in elements] == [(8,), (8,)]


def test_the_mask_counts_rows_here_and_everywhere():
    strategy = mirrored(4)

    (element,) = distribute_dataset(strategy, [np.arange(6)])

    assert np.asarray(element.mask)[:, :2].tolist() == [[2, 6], [2, 6], [1, 6], [1, 6]]


def test_padding_repeats_real_rows():
    strategy = mirrored(2)

    *_, last = distribute_dataset(strategy, [np.arange(4.0), np.array([7.0])])

    assert np.asarray(last.data).tolist() == [7.0] * 4


@pytest.mark.parametrize(
    "make",
    [lambda: batched(8, 4), lambda: [np.arange(4)] * 2, lambda: batched(9, 4, drop_remainder=True)],
    ids=["arrays", "list", "drop-remainder"],
)
def test_batches_that_are_known_to_divide_evenly_carry_no_mask(make):
    assert {element.mask for element in distribute_dataset(mirrored(2), make())} == {None}


def test_a_batch_that_breaks_the_promise_is_masked():
    batches = [np.arange(4), np.arange(4)]
    dataset = distribute_dataset(mirrored(2), batches)
    batches[1] = np.arange(3)

    first, second = dataset

    assert first.mask is None
    assert np.asarray(second.mask)[:, 0].tolist() == [2, 1]


def test_a_mask_is_sent_once_and_again_after_it_was_deleted():
    first, second, third = distribute_dataset(mirrored(2), iter([np.arange(4)] * 3))
    assert first.mask is second.mask is third.mask

    iterator = iter(distribute_dataset(mirrored(2), iter([np.arange(4)] * 2)))
    next(iterator).mask.delete()

    assert np.asarray(next(iterator).mask)[:, :2].tolist() == [[2, 4], [2, 4]]


def test_a_tree_keeps_its_structure_and_types():
    strategy = mirrored(2)
    batch = {"image": np.zeros((4, 2), np.uint8), "pair": (np.arange(4), np.arange(4.0))}

    (element,) = distribute_dataset(strategy, [batch])

    assert jax.tree.structure(element, is_leaf=lambda x: isinstance(x, rx.PerReplica)) == jax.tree.structure(batch)
    assert [leaf.data.dtype for leaf in (element["image"], *element["pair"])] == [jnp.uint8, jnp.int32, jnp.float32]


def test_text_stays_on_the_host_and_goes_with_its_rows():
    strategy = mirrored(2)

    *_, last = distribute_dataset(strategy, [{"id": np.array(["a", "b", "c", "d"])}, {"id": np.array(["e"])}])

    assert parts(strategy, last["id"]) == [["e"], []]


def test_a_list_of_words_is_a_column_of_text():
    strategy = mirrored(2)
    batch = {"id": ["a", "b", "c"], "x": np.arange(3)}

    (element,) = distribute_dataset(strategy, [batch])
    *_, last = distribute_dataset(strategy, data.from_arrays(batch, 2, shuffle=0))

    assert parts(strategy, element["id"]) == [["a", "b"], ["c"]]
    assert parts(strategy, last["id"]) == [["abc"[i] for i in part] for part in parts(strategy, last["x"])]


def test_arrays_of_jax_are_divided_on_their_devices():
    strategy = mirrored(2)
    keys = jax.random.split(jax.random.key(0), 4)

    (element,) = distribute_dataset(strategy, [{"x": jnp.arange(4.0), "key": keys}])

    assert parts(strategy, element["x"]) == [[0.0, 1.0], [2.0, 3.0]]
    assert (jax.random.key_data(element["key"].data) == jax.random.key_data(keys)).all()


@pytest.mark.parametrize("kind", ["bool", "int8", "int32", "int64", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 0)], ids=str)
def test_the_short_way_to_the_devices_leads_where_that_of_jax_does(kind, shape):
    rows = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(kind))[::-1]
    sharding = place_grid(jax.devices(), {"model": 2}).split

    with jax.transfer_guard("disallow"):
        ours, theirs = _jax.put([rows, jnp.arange(4)], sharding), jax.device_put([rows, jnp.arange(4)], sharding)

    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.sharding, a.committed, a.weak_type) == (b.dtype, b.sharding, b.committed, b.weak_type)
        assert [s.index for s in a.addressable_shards] == [s.index for s in b.addressable_shards]
        np.testing.assert_array_equal(a, b)


def test_a_buffer_that_the_source_reuses_does_not_change_what_was_handed_out():
    buffer = np.empty((64, 16), np.float32)

    def reusing():
        for value in range(3):
            buffer[:] = value
            yield buffer

    elements = list(distribute_dataset(mirrored(2), reusing))

    assert [np.unique(np.asarray(element.data)).tolist() for element in elements] == [[0.0], [1.0], [2.0]]


def test_text_reaches_a_step_that_runs_line_by_line_and_no_other():
    strategy = mirrored(2)
    batch = {"id": np.array(["a", "b"]), "x": np.arange(2.0)}
    (element,) = distribute_dataset(strategy, [batch])

    with pytest.raises(InputError, match=r"(?s)\['id'\]  replica 0  <U1\[1\].*batch.pop"):
        strategy.run(lambda batch: rx.mean(batch["x"]), args=(element,))
    with pytest.raises(InputError, match=r"(?s)array that JAX cannot hold.*\['id'\]  <U1\[2\].*batch.pop"):
        strategy.run(lambda batch: batch["x"], args=(batch,))

    seen = strategy.run(lambda batch: batch["id"], args=(element,), options=rx.RunOptions(eager=True))
    assert parts(strategy, seen) == [["a"], ["b"]]


def test_data_in_order_is_copied_too():
    rows = np.zeros((64, 16), np.float32)
    (element,) = distribute_dataset(mirrored(2), data.from_arrays(rows, 64))

    rows[:] = 1

    assert not np.asarray(element.data).any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 12),
    replicas=st.integers(1, 8),
    shuffle=st.just(False) | st.integers(0, 9),
    epochs=st.integers(1, 2),
)
def test_an_epoch_is_the_dataset_whatever_the_sizes(rows, size, replicas, shuffle, epochs):
    strategy = mirrored(replicas)

    elements = all_parts(strategy, distribute_dataset(strategy, batched(rows, size, shuffle=shuffle, epochs=epochs)))

    seen = [row for element in elements for part in element for row in part]
    assert sorted(seen) == sorted(list(range(rows)) * epochs)
    assert seen == [row for batch in batched(rows, size, shuffle=shuffle, epochs=epochs) for row in batch.tolist()]


FEATURES = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
CLASSES = (FEATURES.sum(1) > 0).astype(np.int32)
WEIGHTS = np.array([0.5, -0.3, 0.2], np.float32)


def step(so_far, batch):
    def loss(weights):
        scores = batch["x"] @ weights
        return rx.mean(jax.nn.softplus(scores) - batch["y"] * scores)

    context = rx.get_replica_context()
    here = metrics.Accuracy.empty().update(batch["x"] @ WEIGHTS > 0, batch["y"])
    value, gradient = context.all_reduce("mean", jax.value_and_grad(loss)(WEIGHTS))
    return so_far.merge(context.all_reduce("sum", here)), value, gradient


def by_hand(x, y):
    """The loss of a whole batch and its gradient, in float64."""
    x = x.astype(np.float64)
    scores = x @ WEIGHTS
    return np.mean(np.log1p(np.exp(scores)) - y * scores), (1 / (1 + np.exp(-scores)) - y) @ x / len(x)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 24), replicas=st.integers(1, 8), seed=st.integers(0, 99), short_is_known=st.booleans())
def test_losses_gradients_and_metrics_are_those_of_one_device(rows, replicas, seed, short_is_known):
    strategy, size = mirrored(replicas), 8
    batches = data.from_arrays({"x": FEATURES[:rows], "y": CLASSES[:rows]}, size, shuffle=seed)
    accuracy = metrics.Accuracy.empty()

    for whole, element in zip(
        batches, distribute_dataset(strategy, batches if short_is_known else list(batches)), strict=True
    ):
        accuracy, value, gradient = strategy.run(step, args=(accuracy, element))
        expected_value, expected_gradient = by_hand(whole["x"], whole["y"])
        np.testing.assert_allclose(value, expected_value, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)

    right = (FEATURES[:rows] @ WEIGHTS > 0) == CLASSES[:rows]
    assert float(accuracy.compute()) == pytest.approx(right.mean(), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30),
    size=st.integers(1, 8),
    before=st.integers(1, 8),
    after=st.integers(1, 8),
    shuffle=st.just(False) | st.integers(0, 9),
    pick=st.data(),
)
def test_a_run_resumed_on_other_replicas_goes_on_with_the_same_rows(rows, size, before, after, shuffle, pick):
    def dataset(replicas):
        return distribute_dataset(mirrored(replicas), batched(rows, size, shuffle=shuffle, epochs=2))

    stop = pick.draw(st.integers(0, len(dataset(before))))
    iterator = iter(dataset(before))
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))

    resumed = iter(dataset(after))
    resumed.set_state(state)

    expected = [sum(element, []) for element in all_parts(mirrored(before), iterator)]
    assert [sum(element, []) for element in all_parts(mirrored(after), resumed)] == expected


class OfOneProcess(Feed):
    """What one of several processes would send to its devices, left on the host."""

    def __init__(self, replicas, readers):
        super().__init__(mirrored(replicas).placement)
        self.readers = readers

    def mask(self, split, short_ahead=False):
        return np.insert(split.mask(), 2, short_ahead, axis=1)[list(self.readers)]

    def _send(self, blocks):
        return blocks


def in_processes(make, replicas, cuts):
    """A pass of each process, whose replicas are those between two cuts."""
    edges = [0, *sorted({cut for cut in cuts if cut < replicas}), replicas]
    feeds = [OfOneProcess(replicas, tuple(range(*edge))) for edge in itertools.pairwise(edges)]
    return [GlobalSteps(Pass(as_source(make())), feed, Padding(3)) for feed in feeds]


def read_together(processes):
    """The rows of each batch, as the processes have them between them; their blocks must be alike."""
    while elements := [element() for steps in processes if (element := steps.read()) is not None]:
        assert len(elements) == len(processes)
        if not isinstance(elements[0], rx.PerReplica):  # a single replica
            yield np.asarray(elements[0]).tolist()
            continue
        counts = [(len(x.mask), len(x.data) // len(x.mask)) for x in elements]
        assert len({block for _, block in counts}) == 1
        blocks = [
            (block, mask) for x in elements for block, mask in zip(np.split(x.data, len(x.mask)), x.mask, strict=True)
        ]
        rows = [row for block, (valid, _, _) in blocks for row in block[:valid].tolist()]
        assert {total for _, (_, total, _) in blocks} == {len(rows)}
        yield rows


SOURCES = {
    "arrays": lambda rows, size, seed: batched(rows, size, shuffle=seed, epochs=2),
    "files": lambda rows, size, seed: data.from_files(
        range(0, rows, 5), lambda start: np.arange(start, min(start + 5, rows)), size, seed, epochs=2
    ),
    "list": lambda rows, size, seed: [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)],
    "function": lambda rows, size, seed: lambda: iter(SOURCES["list"](rows, size, seed)),
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(SOURCES)),
    rows=st.integers(1, 24),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
    replicas=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    cuts=st.tuples(st.sets(st.integers(1, 7)), st.sets(st.integers(1, 7))),
    pick=st.data(),
)
def test_any_processes_have_every_row_once_and_any_others_go_on(kind, rows, size, seed, replicas, cuts, pick):
    def make():
        return SOURCES[kind](rows, size, seed)

    batches = [batch.tolist() for batch in (make()() if kind == "function" else make())]
    (first, second), (cuts_before, cuts_after) = replicas, cuts
    before = in_processes(make, first, cuts_before)
    read = read_together(before)
    stop = pick.draw(st.integers(0, len(batches)))

    seen = list(itertools.islice(read, stop))
    states = [json.loads(json.dumps(steps.get_state())) for steps in before]
    after = in_processes(make, second, cuts_after)
    for steps in after:
        steps.set_state(states[0])

    assert seen + list(read_together(after)) == batches
    assert all(state == states[0] for state in states)


def test_a_resumed_short_batch_has_the_shape_it_would_have_had():
    strategy, batches = mirrored(2), lambda: iter([np.arange(6), np.arange(2)])
    iterator = iter(distribute_dataset(strategy, batches))
    next(iterator)

    resumed = iter(distribute_dataset(strategy, batches))
    resumed.set_state(iterator.get_state())

    assert next(resumed).data.shape == (6,)


# -- one replica


def test_one_replica_gets_plain_arrays_of_their_own_size():
    elements = list(distribute_dataset(mirrored(1), batched(5, 4)))

    assert all(isinstance(element, jax.Array) for element in elements)
    assert [element.tolist() for element in elements] == [[0, 1, 2, 3], [4]]


def test_one_replica_takes_what_has_no_rows():
    assert [int(element) for element in distribute_dataset(mirrored(1), range(3))] == [0, 1, 2]


# -- passes


def test_each_pass_starts_from_the_beginning():
    strategy = mirrored(2)
    dataset = distribute_dataset(strategy, batched(6, 4))

    next(iter(dataset))

    assert all_parts(strategy, dataset) == all_parts(strategy, dataset)


def test_get_next_raises_at_the_end_and_iteration_stops():
    iterator = iter(distribute_dataset(mirrored(2), [np.arange(2)]))
    iterator.get_next()

    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    with pytest.raises(IndexError):
        iterator.get_next("a name")
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_end_stays_the_end_also_of_a_source_that_starts_again():
    class Restarts:
        def __init__(self):
            self.asked = 0

        def __next__(self):
            self.asked += 1
            if self.asked == 2:
                raise StopIteration
            return np.arange(4)

        def __iter__(self):
            return self

    iterator = iter(distribute_dataset(mirrored(2), Restarts()))

    assert len(list(iterator)) == 1
    assert next(iterator, None) is None
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_an_optional_says_whether_there_is_an_element():
    strategy = mirrored(2)
    iterator = iter(distribute_dataset(strategy, [np.arange(2)]))

    some, none = iterator.get_next_as_optional(), iterator.get_next_as_optional()

    assert (some.has_value(), none.has_value()) == (True, False)
    assert parts(strategy, some.get_value()) == [[0], [1]]
    assert (repr(some)[:21], repr(none)) == ("Optional(PerReplica:{", "Optional(no value)")
    with pytest.raises(OutOfRangeError, match="has_value"):
        none.get_value()


def test_initialize_starts_again():
    strategy = mirrored(2)
    iterator = iter(distribute_dataset(strategy, batched(4, 2)))
    next(iterator)

    iterator.initialize()
    assert len(all_parts(strategy, iterator)) == 2
    iterator.initializer()
    assert parts(strategy, next(iterator)) == [[0], [1]]


@pytest.mark.parametrize("options", [None, InputOptions(prefetch=2)], ids=["read-when-asked", "ahead"])
def test_threads_that_share_an_iterator_share_out_its_elements(options):
    def batches():
        for start in range(0, 400, 4):
            yield np.arange(start, start + 4)

    iterator, taken = iter(distribute_dataset(mirrored(2), batches, options)), []
    threads = [
        threading.Thread(target=lambda: taken.extend(sum(parts(mirrored(2), x), []) for x in iterator))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert sorted(sum(taken, [])) == list(range(400))


def test_an_empty_dataset_has_no_elements():
    dataset = distribute_dataset(mirrored(2), [])

    assert list(dataset) == []
    assert not iter(dataset).get_next_as_optional().has_value()
    with pytest.raises(InputError, match="element_spec.*without elements"):
        dataset.element_spec  # noqa: B018


def test_length_is_that_of_the_source_where_it_has_one():
    assert len(distribute_dataset(mirrored(2), batched(10, 4))) == 3
    with pytest.raises(TypeError, match="no length"):
        len(distribute_dataset(mirrored(2), iter([])))


def test_element_spec_describes_every_element_and_loses_none():
    strategy = mirrored(2)
    dataset = distribute_dataset(strategy, iter([np.zeros((4, 3)), np.zeros((2, 3))]))

    spec = dataset.element_spec

    assert (spec.data.shape, spec.data.dtype, spec.mask.shape) == ((4, 3), jnp.float32, (2, 3))
    assert spec.data.sharding == strategy.placement.split
    assert [(part.shape, part.dtype) for part in spec.values] == [((2, 3), jnp.float32)] * 2
    assert len(list(dataset)) == 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_elements_of_one_kind_have_equal_specs(replicas):
    strategy = mirrored(replicas)
    dataset, other = (distribute_dataset(strategy, batched(rows, 4)) for rows in (9, 11))

    assert dataset.element_spec == iter(dataset).element_spec == other.element_spec
    assert hash(dataset.element_spec) == hash(other.element_spec)
    assert dataset.element_spec != distribute_dataset(strategy, batched(9, 6)).element_spec


def test_element_spec_of_an_iterator_keeps_its_place():
    iterator = iter(distribute_dataset(mirrored(2), batched(6, 2)))
    next(iterator)
    state = iterator.get_state()

    assert iterator.element_spec.data.shape == (2,)
    assert iterator.get_state() == state
    assert len(list(iterator)) == 2


def test_reduce_folds_the_elements():
    total = distribute_dataset(mirrored(2), batched(6, 4)).reduce(0, lambda state, x: state + x.data.shape[0])

    assert total == 8


def test_a_dataset_in_a_checkpoint_goes_on_where_its_loop_was():
    strategy = mirrored(2)
    dataset = distribute_dataset(strategy, batched(8, 2, shuffle=3))
    loop = iter(dataset)
    next(loop)
    state = dataset.get_state()
    rest = all_parts(strategy, loop)
    assert dataset.get_state() == {}

    restored = distribute_dataset(strategy, batched(8, 2, shuffle=3))
    restored.set_state(state)

    assert restored.get_state() == state
    assert all_parts(strategy, restored) == rest
    assert len(all_parts(strategy, restored)) == 4


def test_next_inside_a_step_is_refused_with_the_call_to_write():
    strategy = mirrored(2)
    iterator = iter(distribute_dataset(strategy, batched(4, 2)))

    with pytest.raises(ValueError, match=r"(?s)outside of the replica function.*strategy.run\(step, args=\(next\(iter"):
        strategy.run(lambda: next(iterator))
    with pytest.raises(ValueError, match="outside of the replica function"):
        strategy.run(lambda: iterator.get_next())


def test_a_dataset_cannot_be_distributed_inside_a_step_or_for_another_strategy():
    with pytest.raises(ValueError, match="outside of the replica function"):
        mirrored(2).run(lambda: distribute_dataset(mirrored(2), []))
    with mirrored(2).scope(), pytest.raises(ContextError):
        distribute_dataset(mirrored(1), [])


# -- what is refused


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        pytest.param(
            range(4), r"(?s)Batch 0 of .*range.*over 2 replicas.*batch  int64\[\]  no rows.*np.stack", id="scalars"
        ),
        pytest.param([{"x": np.zeros(4), "y": np.zeros(3)}], r"(?s)\['x'\]  float64\[4\]  4 rows.*3 rows", id="sizes"),
        pytest.param(
            [np.zeros((0, 2))], r"(?s)it has no rows.*float64\[0,2\]  0 rows.*empty batches out", id="no-rows"
        ),
        pytest.param(
            [list(range(9))],
            r"(?s)batch\[0\]  int64\[\].*\.\.\. and 3 more leaves.*np.asarray\(column\)",
            id="list-of-numbers",
        ),
        pytest.param([{}], "has no leaves", id="no-leaves"),
        pytest.param(
            [{"x": np.zeros(2), "y": object()}],
            r"(?s)batch\['y'\]  object  no rows: it is a Python object.*register_dataclass",
            id="python-object",
        ),
        pytest.param(
            (np.zeros((10, 3)), np.zeros(10)),
            r"(?s)Batch 1 of a tuple of 2 batches.*float64\[10,3\].*float64\[10\].*from_arrays\(\(x, y\)",
            id="x-and-y-are-not-two-batches",
        ),
        pytest.param([np.zeros(4), {"x": np.zeros(4)}], "Batch 1 .* not like the batches before it", id="structure"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_by_number_and_path(batches, text):
    with pytest.raises(InputError, match=text):
        list(distribute_dataset(mirrored(2), batches))


def test_what_is_distributed_already_is_refused():
    dataset = distribute_dataset(mirrored(2), [])

    with pytest.raises(NotADatasetError, match="distributed already"):
        distribute_dataset(mirrored(2), dataset)


def test_a_bare_array_is_refused_with_a_way_out():
    with pytest.raises(TypeError, match="rx.data.from_arrays"):
        distribute_dataset(mirrored(2), np.zeros((8, 2)))


def test_integers_that_jax_would_cut_off_are_refused():
    batches = [{"id": np.array([ids, 1])} for ids in (7, 2**40)]
    text = r"(?s)Batch 1 of .*do not fit int32.*batch\['id'\]  int64, from 1 to 1099511627776.*jax_enable_x64"

    for make in (distribute_dataset, lambda strategy, batches: distribute_from_function(strategy, lambda _: batches)):
        with pytest.raises(InputError, match=text):
            list(make(mirrored(2), batches))
    with pytest.raises(InputError, match=text):
        list(distribute_dataset(mirrored(1), batches))


def test_batches_that_are_divided_already_are_refused():
    dataset = distribute_dataset(mirrored(2), [np.arange(3)])

    with pytest.raises(InputError, match="(?s)Batch 0 of generator .* a value per replica.*strategy.gather"):
        list(distribute_dataset(mirrored(2), ({"x": element} for element in dataset)))


def test_bytes_in_another_order_are_turned_around():
    (element,) = distribute_dataset(mirrored(2), [np.arange(4, dtype=">f4")])

    assert parts(mirrored(2), element) == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    "function", [[np.arange(4)], lambda: [], lambda context, more: []], ids=["list", "none", "two"]
)
@pytest.mark.parametrize("distribute", [distribute_from_function, make_input_fn_iterator])
def test_an_input_function_takes_a_context(distribute, function):
    with pytest.raises(NotADatasetError, match="(?s)cannot be called with an `InputContext`.*def make.context."):
        distribute(mirrored(2), function)


def test_options_are_input_options():
    with pytest.raises(InputError, match="(?s)dict {'prefetch': 2}.*rx.InputOptions"):
        distribute_dataset(mirrored(2), [], {"prefetch": 2})


def test_short_batches_can_be_refused():
    dataset = distribute_dataset(mirrored(2), iter([np.arange(4), np.arange(3)]), InputOptions(short_batches="refuse"))

    with pytest.raises(InputError, match=r"(?s)Batch 1.*3 rows = 2 x 1 \+ 1 left over.*4 rows in a full batch"):
        list(dataset)


# -- functions of one replica's batches


def test_a_function_is_called_once_and_told_about_its_pipeline():
    contexts = []

    distribute_from_function(mirrored(2), lambda context: contexts.append(context) or [])

    assert contexts == [InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)]


def test_replicas_take_consecutive_batches_of_one_pipeline():
    strategy = mirrored(2)

    dataset = distribute_from_function(strategy, lambda context: batched(9, 2))

    assert all_parts(strategy, dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert {element.data.shape for element in dataset} == {(4,)}
    assert len(dataset) == 3


def test_without_the_remainder_there_are_full_batches_only():
    strategy = mirrored(2)

    dataset = distribute_from_function(strategy, lambda context: batched(9, 2, drop_remainder=True))

    assert all_parts(strategy, dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert {element.mask for element in dataset} == {None}


def test_a_replica_without_data_is_masked_altogether():
    *_, last = distribute_from_function(mirrored(2), lambda context: batched(3, 1))

    assert np.asarray(last.mask)[:, :2].tolist() == [[1, 1], [0, 1]]
    assert np.asarray(last.data).tolist()[0] == 2


def test_per_replica_each_replica_has_a_pipeline_of_its_own():
    strategy = mirrored(2)
    contexts = []

    def make(context):
        contexts.append(context)
        return [np.array([i]) for i in range(3)]

    dataset = distribute_from_function(strategy, make, PER_REPLICA)

    assert all_parts(strategy, dataset) == [[[0], [0]], [[1], [1]], [[2], [2]]]
    assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]


def test_a_pipeline_that_ends_earlier_waits_for_the_others_on_padding():
    strategy = mirrored(2)

    dataset = distribute_from_function(
        strategy, lambda context: [np.array([i]) for i in range(1 + 2 * context.input_pipeline_id)], PER_REPLICA
    )

    assert all_parts(strategy, dataset) == [[[0], [0]], [[], [1]], [[], [2]]]


def test_one_call_per_replica_does_not_change_the_next_call():
    strategy, contexts = mirrored(2), []
    distribute_from_function(strategy, lambda context: [], PER_REPLICA)

    distribute_from_function(strategy, lambda context: contexts.append(context) or [])

    assert [context.num_input_pipelines for context in contexts] == [1]


def test_batches_without_rows_are_passed_over():
    def make(context):
        return [np.arange(size) for size in (2, 0, 0, 1, 0)]

    strategy = mirrored(2)

    assert all_parts(strategy, distribute_from_function(strategy, make)) == [[[0, 1], [0]]]


def test_scalars_are_stacked_and_the_odd_one_is_kept():
    strategy = mirrored(2)
    elements = list(distribute_from_function(strategy, lambda context: range(5)))

    assert [parts(strategy, element) for element in elements] == [[0, 1], [2, 3], [4, []]]
    assert [int(strategy.reduce("sum", element)) for element in elements] == [1, 5, 4]
    assert {element.data.shape for element in elements} == {(2,)}


def test_a_step_on_scalars_that_would_count_padding_says_how_to_make_rows_of_them():
    strategy = mirrored(2)

    with pytest.raises(rx.LocalityError, match=r"(?s)padded batch without asking.*replica 1  0 of 1.*`.batch\(1\)`"):
        for element in distribute_from_function(strategy, lambda context: range(5)):
            strategy.run(lambda x: rx.get_replica_context().all_reduce("sum", x), args=(element,))


def test_a_generator_is_made_anew_for_each_pass():
    strategy = mirrored(2)

    def make(context):
        return (np.array([i]) for i in range(2))

    dataset = distribute_from_function(strategy, make)

    assert all_parts(strategy, dataset) == all_parts(strategy, dataset) == [[[0], [1]]]


def test_batches_of_different_shape_stay_apart():
    strategy = mirrored(2)

    (element,) = distribute_from_function(strategy, lambda context: [np.zeros((2, 3)), np.zeros((2, 4))])

    assert [part.shape for part in strategy.experimental_local_results(element)] == [(2, 3), (2, 4)]


def test_places_of_pipelines_are_saved_and_found_again():
    strategy = mirrored(2)
    dataset = distribute_from_function(strategy, lambda context: batched(9, 2, shuffle=1))
    iterator = iter(dataset)
    next(iterator)

    resumed = iter(dataset)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))

    assert all_parts(strategy, resumed) == all_parts(strategy, iterator)


def test_places_of_another_number_of_pipelines_are_refused():
    state = iter(distribute_from_function(mirrored(2), lambda context: [], PER_REPLICA)).get_state()

    with pytest.raises(InputError, match="places of 2 input pipelines, and this iterator has 3"):
        iter(distribute_from_function(mirrored(3), lambda context: [], PER_REPLICA)).set_state(state)


@pytest.mark.parametrize(
    "state", [{"x": 1}, {"batch": 1, "full": 4}, 7, {"pipelines": [{"batch": -1}]}, {"pipelines": ["x"]}]
)
def test_what_is_no_place_is_refused(state):
    here = iter(distribute_from_function(mirrored(2), lambda context: [np.arange(2)]))

    with pytest.raises(InputError, match="(?s)no place in this dataset.*state = "):
        here.set_state(state)


def test_a_place_among_other_rows_is_refused():
    def dataset(rows):
        return distribute_dataset(mirrored(2), batched(rows, 2, shuffle=1))

    with pytest.raises(InputError, match="rows: 6 in the state, 8 in this dataset"):
        iter(dataset(8)).set_state(iter(dataset(6)).get_state())


def test_an_empty_state_is_the_beginning():
    iterator = iter(distribute_dataset(mirrored(2), batched(4, 2)))
    next(iterator)

    iterator.set_state({})

    assert len(list(iterator)) == 2


def test_what_cannot_be_padded_and_ends_unevenly_is_refused():
    dataset = distribute_from_function(mirrored(2), lambda context: [{"x": np.zeros(2), "y": np.zeros(3)}] * 3)

    with pytest.raises(InputError, match=r"(?s)replica 0: float64\[2\], float64\[3\].*replica 1: nothing"):
        list(dataset)


# -- options


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"experimental_place_dataset_on_device": True}, "(?s)PER_WORKER.*add `experimental_replication_mode"),
        (
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": InputReplicationMode.PER_REPLICA,
            },
            "(?s)experimental_fetch_to_device=True.*add `experimental_fetch_to_device=False`",
        ),
    ],
)
def test_a_dataset_on_a_device_needs_one_per_replica_and_no_fetching(arguments, text):
    with pytest.raises(ValueError, match=text):
        distribute_from_function(mirrored(2), lambda context: [], InputOptions(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"prefetch": -1},
        {"prefetch": True},
        {"prefetch_to_host": -1},
        {"prefetch": 2, "prefetch_to_device": 3},
        {"experimental_per_replica_buffer_size": 0},
        {"experimental_fetch_to_device": True, "experimental_prefetch_to_device": False},
        {"experimental_replication_mode": "PER_REPLICA"},
        {"short_batches": "drop"},
        {"shard": "columns"},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_options_that_make_no_sense_are_refused(arguments):
    with pytest.raises(InputError, match=rf"rx.InputOptions\({list(arguments)[0]}="):
        InputOptions(**arguments)


def test_one_dataset_cannot_be_one_per_replica():
    with pytest.raises(NotAvailableError, match="(?s)one for each.*distribute_datasets_from_function"):
        distribute_dataset(mirrored(2), [], PER_REPLICA)


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (AutoShardPolicy.OFF, "off"),
        (AutoShardPolicy.AUTO, "auto"),
        (AutoShardPolicy.FILE, "files"),
        ("DATA", "rows"),
        ("rows", "rows"),
    ],
)
def test_policies_of_tf_data_are_words_here(policy, word):
    assert InputOptions(shard=policy).shard == word


def test_the_policy_hint_says_what_to_write_instead():
    with pytest.raises(NotImplementedError, match="num_input_pipelines"):
        InputOptions(shard=AutoShardPolicy.HINT)


def test_data_can_stay_on_the_host():
    strategy = mirrored(2)

    *_, last = distribute_dataset(strategy, batched(5, 4), InputOptions(experimental_fetch_to_device=False))

    assert [type(part) for part in strategy.experimental_local_results(last)] == [np.ndarray, np.ndarray]
    assert parts(strategy, last) == [[4], []]


def test_a_share_of_the_global_batch_must_be_whole():
    assert InputContext(2, 1, 6).get_per_replica_batch_size(12) == 2
    with pytest.raises(
        ValueError, match="The `global_batch_size` 13 is not divisible by `num_replicas_in_sync` 6.*12 or"
    ):
        InputContext(2, 1, 6).get_per_replica_batch_size(13)
    assert "id 1, total: 2" in str(InputContext(2, 1, 6))


# -- reading ahead

AHEAD = InputOptions(prefetch=2)
WAYS = [AHEAD, InputOptions(prefetch_to_host=2), InputOptions(prefetch_to_host=3, prefetch_to_device=1)]


@pytest.mark.parametrize("options", WAYS, ids=["device", "host", "both"])
def test_reading_ahead_gives_the_same_elements(options):
    strategy = mirrored(2)

    ahead = all_parts(strategy, distribute_dataset(strategy, batched(21, 4, shuffle=2), options))

    assert ahead == all_parts(strategy, distribute_dataset(strategy, batched(21, 4, shuffle=2)))


@pytest.mark.parametrize("options", WAYS, ids=["device", "host", "both"])
def test_reading_ahead_saves_the_place_of_what_was_handed_out(options):
    strategy = mirrored(2)
    dataset = distribute_dataset(strategy, batched(20, 2), options)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)

    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())

    assert parts(strategy, next(resumed)) == [[6], [7]]
    iterator.close()
    resumed.close()


@pytest.mark.parametrize("options", WAYS, ids=["device", "host", "both"])
def test_a_buffer_that_is_reused_while_batches_wait_does_not_change_them(options):
    buffer = np.empty((64, 16), np.float32)

    def reusing():
        for value in range(6):
            buffer[:] = value
            yield buffer

    elements = list(distribute_dataset(mirrored(2), reusing, options))

    assert [np.unique(np.asarray(element.data)).tolist() for element in elements] == [[float(i)] for i in range(6)]


@pytest.fixture
def transfers(monkeypatch):
    """Grows by one with each transfer from the host."""
    made, send = [], _jax.put
    monkeypatch.setattr(_jax, "put", lambda arrays, sharding: made.append(1) or send(arrays, sharding))
    return made


def test_a_batch_is_one_transfer_and_the_mask_is_one_more(transfers):
    batches = data.from_arrays((np.arange(16), {"x": np.zeros((16, 2)), "y": np.zeros(16)}), 4)

    list(distribute_dataset(mirrored(2), batches))
    assert len(transfers) == 4

    list(distribute_dataset(mirrored(2), iter(batches)))
    assert len(transfers) == 4 + 4 + 1


def test_batches_wait_on_the_host_until_they_are_asked_for(transfers):
    gathered = threading.Semaphore(0)

    def counting():
        for _ in range(4):
            gathered.release()
            yield np.zeros(2)

    iterator = iter(distribute_dataset(mirrored(2), counting, InputOptions(prefetch_to_host=3)))
    next(iterator)

    assert all(gathered.acquire(timeout=10) for _ in range(4))
    assert len(transfers) == 2  # the first batch and its mask
    iterator.close()


def test_an_error_comes_at_its_batch_and_not_before():
    def breaks():
        yield np.arange(2)
        yield np.arange(2)
        raise OSError("disk gone")

    iterator = iter(distribute_dataset(mirrored(2), breaks, AHEAD))
    next(iterator)
    next(iterator)

    with pytest.raises(InputError, match="(?s)batch 2.*disk gone"):
        next(iterator)
    assert list(iterator) == []


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("replicax-input")]


@pytest.mark.parametrize("options", WAYS, ids=["device", "host", "both"])
def test_the_thread_ends_with_the_data(options):
    list(distribute_dataset(mirrored(2), batched(20, 2), options))

    assert reading_threads() == []


@pytest.mark.parametrize("options", [InputOptions(), InputOptions(prefetch=2)], ids=["as-asked", "ahead"])
def test_a_closed_pass_has_ended_and_knows_its_place(options):
    strategy = mirrored(2)
    iterator = iter(distribute_dataset(strategy, batched(8, 2), options))
    next(iterator)

    iterator.close()
    rest = list(iterator)
    iterator.set_state(iterator.get_state())

    assert rest == []
    assert parts(strategy, next(iterator)) == [[2], [3]]


def test_a_padded_batch_of_several_leaves_may_be_donated():
    strategy = mirrored(2)
    batches = data.from_arrays((np.arange(5.0), {"y": np.ones(5)}), batch_size=4)

    sums, donated = [], []
    for batch in distribute_dataset(strategy, batches):
        out = strategy.run(lambda b: b[0] + b[1]["y"], args=(batch,), options=rx.RunOptions(donate=(0,)))
        sums.append(strategy.gather(out, axis=0).tolist())
        donated.append((batch[0].data.is_deleted(), batch[0].mask.is_deleted()))

    assert sums == [[1.0, 2.0, 3.0, 4.0], [5.0]]
    assert donated == [(True, False)] * 2


@pytest.mark.parametrize("options", WAYS, ids=["device", "host", "both"])
def test_the_thread_ends_when_the_loop_is_left(options):
    for _ in distribute_dataset(mirrored(2), batched(20, 2, epochs=None), options):
        assert reading_threads()
        break

    gc.collect()
    for thread in reading_threads():
        thread.join(10)
    assert reading_threads() == []


def test_the_thread_stays_no_more_than_so_many_batches_ahead():
    read = []

    def counting():
        for i in range(50):
            read.append(i)
            yield np.array([i, i])

    iterator = iter(distribute_dataset(mirrored(2), counting, AHEAD))
    next(iterator)
    iterator.close()

    assert len(read) <= 3


# -- arrays, iterators and names of tf.distribute


def test_a_numpy_dataset_keeps_its_order_over_epochs():
    strategy = mirrored(2)
    iterator = iter(distribute_dataset(strategy, make_numpy(strategy, np.arange(6)).repeat(2).batch(6)))

    assert [sum(parts(strategy, iterator.get_next()), []) for _ in range(2)] == [[0, 1, 2, 3, 4, 5]] * 2
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_a_numpy_dataset_is_a_copy():
    strategy, rows = mirrored(2), np.arange(4)
    dataset = make_numpy(strategy, (rows, rows * 2))

    rows[:] = -1

    assert [(int(a), int(b)) for a, b in dataset] == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_a_numpy_dataset_can_be_shuffled_and_repeated_for_ever():
    dataset = make_numpy(mirrored(2), np.arange(4)).shuffle(1000, seed=3).repeat().batch(4)

    first, second = (next(batches).tolist() for batches in [iter(dataset)] for _ in range(2))

    assert sorted(first) == sorted(second) == [0, 1, 2, 3]
    assert first != second


def test_a_numpy_dataset_that_was_not_batched_is_refused():
    with pytest.raises(InputError, match="no rows in common"):
        list(distribute_dataset(mirrored(2), make_numpy(mirrored(2), np.arange(4))))


def test_a_dataset_iterator_is_a_pass_begun():
    assert parts(mirrored(2), make_dataset_iterator(mirrored(2), batched(4, 4)).get_next()) == [[0, 1], [2, 3]]


def test_an_input_function_may_return_what_to_call_for_each_replica():
    numbers = iter(range(100))
    strategy = mirrored(2)

    iterator = make_input_fn_iterator(strategy, lambda context: lambda: np.array([next(numbers)]))

    assert [parts(strategy, iterator.get_next()) for _ in range(2)] == [[[0], [1]], [[2], [3]]]


def test_an_input_function_may_return_a_dataset():
    strategy = mirrored(2)

    assert all_parts(strategy, make_input_fn_iterator(strategy, lambda context: batched(3, 1))) == [
        [[0], [1]],
        [[2], []],
    ]


def test_an_input_function_must_return_one_of_these():
    with pytest.raises(ValueError, match="input_fn must return a dataset or a callable"):
        make_input_fn_iterator(mirrored(2), lambda context: 7)
    with pytest.raises(ValueError, match="Input replication mode not supported"):
        make_input_fn_iterator(mirrored(2), lambda context: [], InputReplicationMode.PER_REPLICA)


# -- explaining


def test_an_explanation_says_who_reads_which_rows():
    told = explain(mirrored(3), batched(10, 8))

    assert [(reader.replica, reader.full, reader.short) for reader in told.readers] == [
        (0, range(0, 3), range(0, 1)),
        (1, range(3, 6), range(1, 2)),
        (2, range(6, 8), range(2, 2)),
    ]
    assert (told.length, told.batch_size, told.block, told.masked) == (2, 8, 3, True)


def test_an_explanation_can_be_printed():
    text = str(explain(mirrored(3), batched(10, 8)))

    for words in ("from_arrays(10 rows, batch_size=8", "filled up to 3 rows", "3 rows: 3 to 5", "none, only padding"):
        assert words in text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: distribute_dataset(mirrored(2), batched(8, 4)), "every batch divides evenly"),
        (lambda: distribute_dataset(mirrored(1), batched(9, 4)), "one replica takes every batch as it is"),
        (lambda: distribute_dataset(mirrored(2), iter([])), "that of the first batch"),
        (lambda: distribute_dataset(mirrored(2), iter([])), "an equal part, in order"),
        (lambda: distribute_from_function(mirrored(2), lambda context: []), "its own batch"),
        (lambda: distribute_dataset(mirrored(2), [], AHEAD), "2 batches on the devices, by a thread"),
        (
            lambda: distribute_dataset(mirrored(2), [], InputOptions(shard="files")),
            "files: asked for in the options; one",
        ),
        (lambda: distribute_from_function(mirrored(2), lambda context: [], PER_REPLICA), "pipeline 1"),
    ],
    ids=["even", "one-replica", "unknown", "part", "own", "ahead", "files", "function"],
)
def test_an_explanation_gives_reasons(make, text):
    assert text in str(make().explain())


# -- other placements


def test_a_replica_of_several_devices_gets_its_rows_on_each():
    strategy = Strategy(place_grid(jax.devices()[:4], {"model": 2}))

    first, last = distribute_dataset(strategy, batched(7, 4))

    assert [parts(strategy, element) for element in (first, last)] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert {shard.data.shape for shard in last.data.addressable_shards} == {(2,)}
    assert len(last.data.addressable_shards) == 4


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_mean_over_short_batches_is_the_same_compiled_and_eager(eager):
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=eager)

    means = [
        float(strategy.reduce("mean", strategy.run(rx.mean, args=(x,)), axis=None))
        for x in strategy.distribute_dataset(data.from_arrays(np.arange(7.0), 4))
    ]

    assert means == [1.5, 5.0]


def test_a_masked_array_is_refused_since_its_mask_would_be_lost():
    x = np.ma.masked_array(np.arange(6.0), mask=[0, 0, 1, 0, 1, 0])
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    with pytest.raises(rx.InputError, match=r"float64\[6\], 2 of 6 elements masked"):
        next(iter(strategy.distribute_dataset([x])))

    whole = np.ma.masked_array(np.arange(6.0))
    assert len(next(iter(strategy.distribute_dataset([whole]))).values) == 2
