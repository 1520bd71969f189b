"""Anything that gives global batches, seen as one kind of thing."""

import functools
import importlib.util
import itertools
import json

import grain
import jax
import numpy as np
import pytest

import replicax as rx
from replicax import data
from replicax._errors import InputError, NotADatasetError, OutOfRangeError
from replicax._input.sources import Pass, as_source


@pytest.fixture(scope="module", autouse=True)
def import_tensorflow_first():
    """It sets environment variables when it is imported, and no single test is to blame for that."""
    if importlib.util.find_spec("tensorflow"):
        importlib.import_module("tensorflow")


BATCHES = [np.arange(start, min(start + 4, 10)) for start in range(0, 10, 4)]


def squares(x):
    return {"x": x, "y": x * x}


def grain_map():
    return grain.MapDataset.source(np.arange(10)).map(squares).batch(4)


def grain_iter():
    return grain_map().to_iter_dataset()


def grain_loader():
    sampler = grain.samplers.IndexSampler(10, shuffle=False, num_epochs=1)
    return grain.DataLoader(
        data_source=np.arange(10),
        sampler=sampler,
        operations=[GrainSquares(), grain.transforms.Batch(4)],
    )


class GrainSquares(grain.transforms.Map):
    def map(self, x):
        return squares(x)


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.range(10).batch(4).map(squares)


def torch_loader():
    torch = pytest.importorskip("torch")
    return torch.utils.data.DataLoader([squares(i) for i in range(10)], batch_size=4)


class Indexable:
    """The oldest protocol of iteration: `__getitem__` and an IndexError."""

    def __getitem__(self, index):
        return squares(BATCHES[index])


class Numbered:
    """Batches by number, up to a length; beyond it there is no error, but nothing in them."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return squares(np.arange(10)[4 * index : 4 * index + 4])


def generator():
    for batch in BATCHES:
        yield squares(batch)


AGAIN = {
    "list": lambda: [squares(batch) for batch in BATCHES],
    "tuple": lambda: tuple(squares(batch) for batch in BATCHES),
    "indexable": Indexable,
    "numbered": Numbered,
    "function": lambda: generator,
    "partial": lambda: functools.partial(map, squares, BATCHES),
    "arrays": lambda: data.from_arrays(squares(np.arange(10)), batch_size=4),
    "function-of-arrays": lambda: lambda: data.from_arrays(squares(np.arange(10)), batch_size=4),
    "grain-map": grain_map,
    "grain-iter": grain_iter,
    "grain-loader": grain_loader,
    "tf.data": tf_data,
    "torch": torch_loader,
}
ONCE = {"generator": generator, "map": lambda: map(squares, BATCHES), "grain-iterator": lambda: iter(grain_map())}


def values(batch):
    gathered = jax.tree.unflatten(batch.structure, batch.gather(range(batch.rows)))
    return gathered["x"].tolist(), gathered["y"].tolist()


def read(one_pass):
    batches = iter(one_pass.read, None)
    return [values(batch) for batch in batches]


EXPECTED = [(batch.tolist(), (batch * batch).tolist()) for batch in BATCHES]


@pytest.mark.parametrize("make", (AGAIN | ONCE).values(), ids=(AGAIN | ONCE).keys())
def test_batches_come_as_the_source_gives_them(make):
    assert read(Pass(as_source(make()))) == EXPECTED


@pytest.mark.parametrize("make", AGAIN.values(), ids=AGAIN.keys())
def test_a_second_pass_starts_from_the_beginning(make):
    source = as_source(make())

    first, second = read(Pass(source)), read(Pass(source))

    assert first == second == EXPECTED


@pytest.mark.parametrize("stop", range(4))
@pytest.mark.parametrize("make", AGAIN.values(), ids=AGAIN.keys())
def test_a_pass_resumes_where_another_one_stood(make, stop):
    source = as_source(make())
    left = Pass(source)
    for _ in range(stop):
        left.read()
    state = json.loads(json.dumps(left.get_state()))

    resumed = Pass(source)
    resumed.set_state(state)

    assert resumed.number == stop
    assert read(resumed) == EXPECTED[stop:]


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE.keys())
def test_what_can_be_gone_through_once_says_so_the_second_time(make):
    source = as_source(make())
    Pass(source)

    with pytest.raises(InputError, match="(?s)can be gone through once.*make_batches"):
        Pass(source)


class Counting:
    """An iterator of the user's that knows its place, which is a number and not a dict."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(BATCHES):
            raise StopIteration
        self.place += 1
        return squares(BATCHES[self.place - 1])

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


@pytest.mark.parametrize(
    "make", [generator, Counting, lambda: iter(grain_map())], ids=["generator", "counting", "grain-iterator"]
)
def test_a_fresh_iterator_goes_to_the_place_where_another_one_stood(make):
    left = Pass(as_source(make()))
    left.read()
    state = json.loads(json.dumps(left.get_state()))

    resumed = Pass(as_source(make()))
    resumed.set_state(state)

    assert read(resumed) == EXPECTED[1:]


def test_a_place_in_bytes_is_kept_whatever_the_bytes():
    one_pass = Pass(as_source(Counting()))
    one_pass._iterator.get_state, found = lambda: b"\xff\x00", []
    one_pass._iterator.set_state = found.append

    one_pass.set_state(json.loads(json.dumps(one_pass.get_state())))

    assert found == [b"\xff\x00"]


def test_the_message_names_the_generator():
    source = as_source(generator())
    Pass(source)

    with pytest.raises(InputError, match="generator `generator`"):
        Pass(source)


@pytest.mark.parametrize(
    ("make", "length", "batch_size", "even"),
    [
        pytest.param(lambda: BATCHES, 3, 4, False, id="list"),
        pytest.param(lambda: BATCHES[:2], 2, 4, True, id="even-list"),
        pytest.param(lambda: [], 0, None, False, id="empty-list"),
        pytest.param(generator, None, None, False, id="generator"),
        pytest.param(lambda: data.from_arrays(np.arange(8), 4), 2, 4, True, id="even-arrays"),
        pytest.param(lambda: data.from_arrays(np.arange(9), 4), 3, 4, False, id="arrays"),
        pytest.param(lambda: data.from_arrays(np.arange(9), 4, epochs=None), None, 4, False, id="endless-arrays"),
        pytest.param(lambda: data.from_arrays(np.arange(3), 4), 1, 3, True, id="arrays-of-one-batch"),
        pytest.param(grain_map, 3, None, False, id="grain"),
        pytest.param(lambda: grain_map().repeat(), None, None, False, id="endless-grain"),
        pytest.param(tf_data, 3, None, False, id="tf.data"),
        pytest.param(torch_loader, 3, 4, False, id="torch"),
    ],
)
def test_a_source_knows_what_can_be_known_before_reading(make, length, batch_size, even):
    source = as_source(make())

    assert (source.length, source.batch_size, source.even) == (length, batch_size, even)


def test_tf_data_promises_even_batches_by_its_static_shapes():
    tf = pytest.importorskip("tensorflow")

    source = as_source(tf.data.Dataset.range(10).batch(4, drop_remainder=True).repeat())

    assert (source.batch_size, source.even, source.endless) == (4, True, True)


def test_tf_data_says_how_it_wants_to_be_divided():
    tf = pytest.importorskip("tensorflow")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    assert as_source(tf.data.Dataset.range(10).batch(4)).shard is None
    assert rx.InputOptions(shard=tf.data.experimental.AutoShardPolicy.DATA).shard == "rows"
    assert as_source(tf.data.Dataset.range(10).batch(4).with_options(options)).shard == "OFF"


def test_a_torch_loader_that_forks_is_warned_about():
    torch = pytest.importorskip("torch")

    with pytest.warns(RuntimeWarning, match="(?s)num_workers=2.*forkserver"):
        as_source(torch.utils.data.DataLoader([1, 2], num_workers=2))


def test_a_source_that_fails_is_named_with_its_batch():
    def broken():
        yield BATCHES[0]
        yield BATCHES[1]
        raise OSError("disk gone")

    one_pass = Pass(as_source(broken))
    one_pass.read()
    one_pass.read()

    with pytest.raises(
        InputError, match="(?s)`.*broken` failed when it was asked for batch 2.*OSError: disk gone"
    ) as caught:
        one_pass.read()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_source_that_cannot_be_opened_is_named():
    class Loader:
        def __iter__(self):
            raise OSError("no such folder")

    with pytest.raises(InputError, match=r"(?s)Loader` failed when it was asked for batch 0.*OSError: no such folder"):
        Pass(as_source(Loader()))


def test_tensors_that_numpy_does_not_take_as_they_are():
    torch = pytest.importorskip("torch")
    rows = torch.arange(4.0)

    one_pass = Pass(as_source([rows.bfloat16(), rows.clone().requires_grad_()]))

    assert [batch.leaves[0].tolist() for batch in iter(one_pass.read, None)] == [rows.tolist()] * 2


def test_out_of_range_ends_the_data():
    def ends():
        yield BATCHES[0]
        raise OutOfRangeError("that was all")

    assert len(list(iter(Pass(as_source(ends)).read, None))) == 1


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        pytest.param(
            np.zeros((8, 2)), r"(?s)got an array.*float64\[8,2\].*rx.data.from_arrays\(tree, batch_size", id="numpy"
        ),
        pytest.param(jax.numpy.zeros(3), r"(?s)got an array.*float32\[3\]", id="jax"),
        pytest.param(squares(np.arange(3)), r"(?s)got a dict.*\['y'\]  int64\[3\].*from_arrays", id="dict"),
        pytest.param("train.csv", r"got str 'train.csv'", id="text"),
        pytest.param(7, r"got int 7, which is no dataset", id="number"),
        pytest.param(lambda context: [], r"(?s)\(context\).*distribute_datasets_from_function", id="input-function"),
    ],
)
def test_what_is_no_dataset_is_refused_with_a_way_out(dataset, text):
    with pytest.raises(NotADatasetError, match=text) as caught:
        as_source(dataset)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


def test_a_jax_tensor_of_another_library_is_an_array_too():
    torch = pytest.importorskip("torch")

    with pytest.raises(NotADatasetError, match="got an array"):
        as_source(torch.zeros(3))


def test_endless_sources_are_read_lazily():
    one_pass = Pass(as_source(squares(np.array([i])) for i in itertools.count()))

    assert values(one_pass.read()) == ([0], [0])
    assert values(one_pass.read()) == ([1], [1])
