"""What a strategy says about itself, and which device holds what."""

import copy
import gc
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import replicax as rx
from tests.strategies import STRATEGIES


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_describes_its_replicas(name):
    strategy = STRATEGIES[name]()

    described = strategy.describe()

    assert [place.replica for place in described.replicas] == list(range(strategy.num_replicas_in_sync))
    assert [place.devices[0] for place in described.replicas] == [
        f"cpu:{device.id}" for device in strategy.placement.devices
    ]
    assert all(place.here and place.process == 0 for place in described.replicas)
    assert type(strategy).__name__ in str(described)


def test_variables_with_their_layout_and_size():
    strategy = rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2})
    with strategy.scope():
        kept = [
            rx.Variable(np.ones((8, 4), np.float32), name="cut", layout=P(None, "model")),
            rx.Variable(np.ones(2, np.float32), name="whole", aggregation="mean"),
            rx.Variable(np.float32(0), name="own", synchronization="on_read", aggregation="sum"),
        ]

    described = strategy.describe().variables

    assert [variable.name for variable in described] == [variable.name for variable in kept]
    assert [variable.kind for variable in described] == ["mirrored", "mirrored, mean", "on read, sum"]
    assert [variable.layout for variable in described] == [
        "cut: P(None, 'model')",
        "copies",
        "one component per replica",
    ]
    assert [variable.bytes_per_device for variable in described] == [64, 8, 4]


def test_variables_that_are_gone_are_not_described():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        rx.Variable(1.0)
        kept = rx.Variable(2.0, name="kept")
    gc.collect()

    assert [variable.name for variable in strategy.describe().variables] == [kept.name]


def test_a_copy_of_a_strategy_has_no_variables_yet():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        kept = rx.Variable(1.0)

    assert copy.deepcopy(strategy).describe().variables == ()
    assert list(strategy.made) == [kept]


@pytest.mark.parametrize(
    ("make", "rest"),
    [
        (lambda: rx.MirroredStrategy(jax.devices()[:2]), "a copy on each device"),
        (lambda: rx.OneDeviceStrategy("cpu:1"), "on the device"),
        (lambda: rx.experimental.CentralStorageStrategy(jax.devices()[:2], "cpu:3"), "once, on cpu:3"),
        (lambda: rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded()), "as FullySharded"),
    ],
)
def test_where_variables_rest(make, rest):
    assert make().describe().rest.startswith(rest)


def held(x):
    (leaf,) = rx.visualize(x).leaves
    return leaf.kind, {piece.index: piece.devices for piece in leaf.pieces}


def test_a_mirrored_array_is_whole_everywhere():
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    assert held(strategy.run(lambda: jnp.ones(3))) == ("mirrored", {((0, 3),): ("cpu:0", "cpu:1")})


def test_a_per_replica_value_has_a_block_on_each_replica():
    strategy = rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2})

    rows = strategy.run(lambda: jnp.ones(3) * rx.get_replica_context().replica_id_in_sync_group)

    assert held(rows) == ("per replica, rows", {((0, 3),): ("cpu:0", "cpu:1"), ((3, 6),): ("cpu:2", "cpu:3")})


def test_a_variable_is_shown_as_it_rests():
    strategy = rx.experimental.CentralStorageStrategy(jax.devices()[:2], "cpu:3")
    with strategy.scope():
        w = rx.Variable(jnp.ones((2, 2)))

    assert held(w) == ("variable", {((0, 2), (0, 2)): ("cpu:3",)})


def test_structures_and_objects_of_the_host():
    picture = rx.visualize({"a": np.ones(3), "b": [4, rx.PerReplica((1, "x"))], "c": jnp.ones(2)})

    assert [(leaf.name, leaf.kind) for leaf in picture.leaves] == [
        ("['a']", "NumPy array"),
        ("['b'][0]", "int"),
        ("['b'][1]", "per replica, parts"),
        ("['c']", "array"),
    ]
    assert "none: an object of this process" in str(picture)


def test_the_drawing_has_a_rectangle_for_each_part(tmp_path):
    strategy = rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2})
    with strategy.scope():
        w = rx.Variable(jnp.ones((4, 8)), name="<w>", layout=P("replica", "model"))

    rx.visualize(w, path=tmp_path / "w.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "w.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box.attrib for box in root.iter(f"{space}rect")]

    assert [text.text for text in root.iter(f"{space}text")][1:] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert len({(box["x"], box["y"]) for box in boxes}) == 4
    assert sum(float(box["width"]) * float(box["height"]) for box in boxes) == 640 * 120
