"""What was saved is what is loaded, bit for bit, or the damage is named."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from replicax.train import _store


def bits(value):
    """Dtype, shape and bytes; of a PRNG key those of its data."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), bits(jax.random.key_data(value))
    host = np.asarray(value)
    return host.dtype.newbyteorder("="), host.shape, host.astype(host.dtype.newbyteorder("=")).tobytes()


def sharding(devices, *axes):
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("x",)), PartitionSpec(*axes))


KINDS = {
    "float32": np.linspace(0, 1, 7, dtype=np.float32),
    "float64 scalar": np.float64(0.1),
    "float16": np.ones(3, np.float16),
    "bfloat16": np.linspace(0, 1, 5).astype(ml_dtypes.bfloat16),
    "float8": np.linspace(0, 1, 5).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(-3, 4).astype(ml_dtypes.int4),
    "uint4, which TensorStore does not know": np.arange(7).astype(ml_dtypes.uint4),
    "large uint4": np.full(_store.PACKED_BELOW + 1, 5, ml_dtypes.uint4),
    "bool": np.array([True, False]),
    "complex64": np.array([1 + 2j], np.complex64),
    "uint64": np.array([2**64 - 1], np.uint64),
    "zeros": np.zeros((400, 800)),
    "nan": np.array([np.nan, -np.nan, -0.0]),
    "no elements": np.zeros((0, 3), np.int8),
    "big endian": np.arange(3, dtype=">f4"),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
    "fortran order": np.asfortranarray(np.arange(600_000.0).reshape(2, -1)),
    "python int": 7,
    "python bool": True,
    "jax": jnp.arange(5),
    "replicated": jax.device_put(np.arange(6.0, dtype=np.float32), sharding(8)),
    "sharded": jax.device_put(np.arange(16.0, dtype=np.float32), sharding(8, "x")),
    "threefry key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3), 4),
    "rbg key": jax.random.key(3, impl="rbg"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_comes_back_bit_for_bit(tmp_path, kind):
    _store.save(tmp_path / "c", {"a/b": KINDS[kind]})

    assert bits(_store.load(tmp_path / "c")["a/b"]) == bits(KINDS[kind])


names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=120)
dtypes = st.sampled_from([np.float32, np.int8, np.uint16, np.complex128, np.bool_, ml_dtypes.bfloat16]).map(np.dtype)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(np.uint8, hnp.array_shapes(min_dims=0, max_side=9)).map(lambda a: a.astype(dtype))
)


@settings(max_examples=40, deadline=None)
@given(tree=st.dictionaries(names, arrays, max_size=8), data=st.data())
def test_any_names_and_shapes_and_any_part_of_them(tmp_path_factory, tree, data):
    path = tmp_path_factory.mktemp("store") / "c"
    part = data.draw(st.lists(st.sampled_from(sorted(tree)), unique=True)) if tree else []

    _store.save(path, tree)

    assert {name: bits(value) for name, value in _store.load(path).items()} == {n: bits(v) for n, v in tree.items()}
    assert {name: bits(value) for name, value in _store.load(path, part).items()} == {n: bits(tree[n]) for n in part}


def test_small_leaves_share_files_and_large_ones_do_not(tmp_path):
    small = {f"small/{i}": np.full(200_000, i, np.float32) for i in range(50)}  # 40 MB: three packs
    large = {"large": np.ones(1 << 18, np.float32)}

    _store.save(tmp_path / "c", small | large)

    places = {name: leaf.place for name, leaf in _store.read_manifest(tmp_path / "c").leaves.items()}
    assert {places[name] for name in small} == {"pack-0000", "pack-0001", "pack-0002"}
    assert places["large"] == "0000-large"
    loaded = _store.load(tmp_path / "c")
    assert all(bits(loaded[name]) == bits(value) for name, value in (small | large).items())


def test_metadata_comes_back(tmp_path):
    metadata = {"step": 12, "loss": 0.1, "names": ["a", None], "nested": {"x": True}}

    _store.save(tmp_path / "c", {"w": 1.0}, metadata)

    assert _store.read_manifest(tmp_path / "c").metadata == metadata


LAYOUTS = {
    "8 replicated": sharding(8),
    "8 sharded": sharding(8, "x"),
    "4 sharded on axis 1": sharding(4, None, "x"),
    "2 sharded": sharding(2, "x"),
    "device 5": jax.sharding.SingleDeviceSharding(jax.devices()[5]),
}


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_any_layout_loads_into_any_other(tmp_path, saved, loaded):
    value = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    target = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=LAYOUTS[loaded])

    _store.save(tmp_path / "c", {"w": jax.device_put(value, LAYOUTS[saved])})
    found = _store.load(tmp_path / "c", targets={"w": target})["w"]

    assert found.sharding == LAYOUTS[loaded]
    assert bits(found) == bits(value)


def test_a_loaded_array_may_be_donated_though_many_devices_got_it(tmp_path):
    value = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    _store.save(tmp_path / "c", {"w": value})
    target = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(8))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)

    found = double(double(_store.load(tmp_path / "c", targets={"w": target})["w"]))

    assert all(bits(shard.data) == bits(value * 4) for shard in found.addressable_shards)


def test_targets_that_do_not_fit_are_all_listed(tmp_path):
    _store.save(tmp_path / "c", {"w": np.ones((2, 3), np.float32), "b": np.ones(3), "k": jax.random.key(0), "ok": 1.0})
    targets = {"w": jnp.ones((3, 2)), "b": jnp.ones(3, jnp.int32), "k": jnp.ones(2), "ok": np.float64(0)}

    with pytest.raises(CheckpointMismatchError) as caught:
        _store.load(tmp_path / "c", targets=targets)

    listed = [line.strip() for line in str(caught.value).splitlines() if "  saved " in line]
    assert listed == [
        "w  saved float32[2,3], wanted float32[3,2]",
        "b  saved float64[3], wanted int32[3]",
        "k  saved key<fry>[], wanted float32[2]",
    ]


def test_a_name_that_was_not_saved_is_refused_with_the_nearest_one(tmp_path):
    _store.save(tmp_path / "c", {"model/weight": 1.0})

    with pytest.raises(CheckpointError, match=r"model/wieght  \(did you mean model/weight\?\)"):
        _store.load(tmp_path / "c", ["model/wieght"])


@pytest.mark.parametrize("value", ["text", object(), np.array("2026", "datetime64[Y]"), np.zeros(2, [("a", "f4")])])
def test_what_is_not_an_array_of_numbers_is_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="not an array of numbers:\n\n  name  "):
        _store.save(tmp_path / "c", {"name": value})


def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="set is not JSON serializable"):
        _store.save(tmp_path / "c", {"w": 1.0}, {"seen": {1, 2}})

    assert not (tmp_path / "c").exists()


# -- asynchronous


def test_the_values_of_an_asynchronous_save_are_those_of_the_call(tmp_path):
    """The training loop donates the device array and overwrites the host array as soon as the call is back."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    device = jax.device_put(np.zeros((512, 512), np.float32), sharding(8))
    host = np.zeros(1000)
    pending = []
    for i in range(20):
        pending.append(_store.save_async(tmp_path / str(i), {"device": device, "host": host, "i": i}))
        device = step(step(device))
        host += 2
    for save in pending:
        save.wait()

    for i in range(20):
        loaded = _store.load(tmp_path / str(i))
        assert loaded["i"] == i
        assert (loaded["device"] == 2 * i).all()
        assert (loaded["host"] == 2 * i).all()


@pytest.fixture
def held_back(tmp_path):
    """A save that cannot end before `go` is set, and `go`."""
    go = threading.Event()
    pending = _store.save_async(tmp_path / "held", {"w": np.arange(4)}, then=go.wait)
    yield pending, go
    go.set()
    pending.wait()


def test_waiting_ends_at_the_deadline_and_says_what_the_save_is_doing(held_back):
    pending, go = held_back

    with pytest.raises(
        TimeoutError, match=r"held is not done after 0 s; it is (waiting|copying|writing|reading|putting)"
    ):
        pending.wait(0)

    assert not pending.done()
    go.set()
    pending.wait()
    assert pending.done()
    assert repr(pending).endswith("held': finished>")


def test_a_second_save_to_the_same_place_is_refused_while_the_first_is_under_way(held_back):
    pending, go = held_back

    with pytest.raises(CheckpointError, match=r"an earlier one is still .*(?s:.*)pending.wait\(\)"):
        _store.save(pending.path, {"w": 1.0})

    go.set()
    pending.wait()
    _store.save(pending.path, {"w": 1.0})


UNWRITABLE = np.longdouble(1)  # a real failure: Orbax has no way to store it


def too_large(value):
    return np.full(_store.PACKED_BELOW, value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_leaves_the_older_checkpoint_whole(tmp_path, asynchronous, caplog):
    path = tmp_path / "c"
    _store.save(path, {"w": too_large(1.0)})

    with pytest.raises(CheckpointError, match="was not written:\n\n  while writing"):
        if asynchronous:
            _store.save_async(path, {"w": too_large(UNWRITABLE)}).wait()
        else:
            _store.save(path, {"w": too_large(UNWRITABLE)})

    assert _store.verify(path)
    assert bits(_store.load(path)["w"]) == bits(too_large(1.0))
    assert any(record.name == "replicax" for record in caplog.records) == asynchronous


def test_a_newer_checkpoint_replaces_the_older_one_and_its_files(tmp_path):
    path = tmp_path / "c"
    _store.save(path, {"old": too_large(1.0), "w": 1})
    _store.save(path, {"w": 2})

    loaded = _store.load(path)
    assert list(loaded) == ["w"]
    assert loaded["w"] == 2
    assert len(list(path.iterdir())) == 2


def test_what_follows_a_save_runs_once_it_is_on_disk(tmp_path):
    seen = []
    _store.save_async(tmp_path / "c", {"w": 1}, then=lambda: seen.append(_store.is_finished(tmp_path / "c"))).wait()

    assert seen == [True]


ENDS_AT_ONCE = """
import sys, threading
import numpy as np
from replicax.train import _store
pending = _store.begin(sys.argv[1], {f"{i}": np.full(1 << 18, i, np.float32) for i in range(20)})
"""
SAVES = {"in its own thread": "pending.start()", "in the user's": "threading.Thread(target=pending.run).start()"}


@pytest.mark.parametrize("how", SAVES)
def test_a_program_that_ends_at_once_still_finishes_its_save(tmp_path, how):
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE + SAVES[how], tmp_path / "c"], check=True, timeout=60)

    loaded = _store.load(tmp_path / "c")
    assert all((loaded[f"{i}"] == i).all() for i in range(20))


# -- damage


@pytest.fixture
def saved(tmp_path):
    """Two large leaves in files of their own and two small ones in a pack."""
    leaves = {"w": np.ones(1 << 18, np.float32), "v": np.ones(1 << 18, np.float32), "b": np.ones(3), "c": np.ones(4)}
    _store.save(tmp_path / "c", leaves)
    return tmp_path / "c"


def file_of(path, name):
    manifest = _store.read_manifest(path)
    (file,) = [f for f in manifest.files if name in manifest.leaves_in(f) and not f.endswith(".zarray")]
    return path / file


def flip(file, byte, bit=0):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


DAMAGES = {
    "a bit flipped": (lambda file: flip(file, 5), "digest [0-9a-f]{8}, was [0-9a-f]{8}"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "1048575 bytes, were 1048576"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "1048577 bytes, were 1048576"),
    "emptied": (lambda file: file.write_bytes(b""), "0 bytes, were 1048576"),
    "removed": (lambda file: file.unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_its_leaf(saved, damage):
    harm, words = DAMAGES[damage]
    file = file_of(saved, "w")
    harm(file)

    expected = rf"is damaged:\n\n  {file.relative_to(saved)}  {words}  \(holds w\)\n"
    with pytest.raises(CheckpointDamagedError, match=expected):
        _store.verify(saved)
    with pytest.raises(CheckpointDamagedError, match=expected):
        _store.load(saved)


def test_all_damaged_files_are_named_at_once(saved):
    flip(file_of(saved, "w"), 0)
    flip(file_of(saved, "b"), 0)

    with pytest.raises(CheckpointDamagedError, match=r"\(holds w\)(?s:.*)\(holds b, c\)"):
        _store.load(saved)


def test_leaves_in_whole_files_can_still_be_loaded(saved):
    flip(file_of(saved, "w"), 0)

    assert set(_store.load(saved, ["v", "b"])) == {"v", "b"}


def test_the_list_of_arrays_is_digested_too(saved):
    flip(next(saved.glob("arrays-*/_METADATA")), 10)

    with pytest.raises(CheckpointDamagedError, match=r"_METADATA  digest .*\(holds the list of arrays\)"):
        _store.load(saved, ["v"])


def test_a_missing_manifest_is_named(saved):
    (saved / _store.MANIFEST).unlink()

    assert not _store.is_finished(saved)
    with pytest.raises(CheckpointDamagedError, match=r"incomplete:\n\n  .*manifest.json  is missing\n"):
        _store.load(saved)


def test_a_place_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointDamagedError, match=f"There is no checkpoint at {tmp_path}/nothing"):
        _store.load(tmp_path / "nothing")


@pytest.mark.parametrize("position", [0, 100, -66, -65, -2, -1])
def test_a_changed_manifest_is_noticed(saved, position):
    flip(saved / _store.MANIFEST, position)

    with pytest.raises(CheckpointDamagedError, match=r"manifest.json\n"):
        _store.load(saved)


def test_another_leaf_s_bytes_are_noticed_even_if_every_file_is_whole(saved):
    """The digest of a leaf is that of its values: a manifest whose two leaves were mixed up does not pass."""
    manifest = json.loads((saved / _store.MANIFEST).read_bytes().split(b"\n")[0])
    manifest["leaves"]["b"]["offset"] = manifest["leaves"]["c"]["offset"]
    manifest["leaves"]["b"]["digest"] = "00000000"
    line = json.dumps(manifest).encode()
    digest = _store.hashlib.sha256(line).hexdigest().encode()
    (saved / _store.MANIFEST).write_bytes(line + b"\n" + digest + b"\n")

    with pytest.raises(CheckpointDamagedError, match="b  digest of its values"):
        _store.load(saved)


def test_another_format_is_refused(saved):
    manifest = json.loads((saved / _store.MANIFEST).read_bytes().split(b"\n")[0]) | {"format": "replicax checkpoint 9"}
    line = json.dumps(manifest).encode()
    digest = _store.hashlib.sha256(line).hexdigest().encode()
    (saved / _store.MANIFEST).write_bytes(line + b"\n" + digest + b"\n")

    with pytest.raises(CheckpointError, match="replicax checkpoint 9(?s:.*)update replicax"):
        _store.load(saved)
