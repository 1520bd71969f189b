"""Making the strategies of 2018, and what each answers about itself."""

import copy
from types import MappingProxyType

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax.cluster_resolver import TPUClusterResolver
from replicax.compat import tower

D0, D1 = jax.devices()[:2]


def test_a_mirrored_strategy_takes_devices_in_order():
    distribution = tower.MirroredStrategy(["/device:CPU:1", "cpu:0"])

    assert distribution.worker_devices == distribution.parameter_devices == [D1, D0]
    assert distribution.non_slot_devices([]) == [D1, D0]
    assert distribution.num_towers == distribution.num_replicas_in_sync == 2
    assert not distribution.is_single_tower
    assert tower.MirroredStrategy([D0]).is_single_tower


def test_lists_of_devices_are_fresh():
    distribution = tower.MirroredStrategy([D0, D1])
    distribution.worker_devices.clear()
    distribution.parameter_devices.clear()

    assert distribution.worker_devices == distribution.parameter_devices == [D0, D1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"devices": [D0], "num_gpus": 1}, ValueError),
        ({"num_gpus": 1, "num_gpus_per_worker": 1}, ValueError),
        (
            {"cross_tower_ops": tower.AllReduceCrossTowerOps(), "cross_device_ops": rx.NcclAllReduce()},
            AssertionError,
        ),
        ({"devices": []}, AssertionError),
        ({"devices": [D0, "cpu:0"]}, AssertionError),
        ({"num_gpus": 1}, ValueError),
    ],
    ids=["devices-and-gpus", "two-counts", "two-ops", "no-device", "a-device-twice", "a-gpu-that-is-not-there"],
)
def test_a_mirrored_strategy_refuses_what_contradicts_itself(options, error):
    with pytest.raises(error):
        tower.MirroredStrategy(**options)


def test_no_gpus_means_the_cpu():
    assert tower.MirroredStrategy(num_gpus=0).worker_devices == [D0]
    assert tower.CollectiveAllReduceStrategy().worker_devices == [D0]
    assert tower.ParameterServerStrategy().worker_devices == [D0]


@pytest.mark.parametrize(
    ("make", "between_graph"),
    [
        (lambda: tower.MirroredStrategy([D0, D1]), False),
        (lambda: tower.OneDeviceStrategy("cpu:0"), False),
        (lambda: tower.ParameterServerStrategy(), True),
        (lambda: tower.CollectiveAllReduceStrategy(), True),
        (lambda: tpu(), False),
    ],
    ids=["mirrored", "one-device", "parameter-server", "collective", "tpu"],
)
def test_what_a_process_is_to_the_others(make, between_graph):
    distribution = make()

    assert distribution.between_graph == between_graph
    assert distribution.should_init and distribution.should_checkpoint and distribution.should_save_summary


def test_the_default_strategy_answers_nothing_about_places():
    default = tower.get_distribution_strategy()
    second, first = rx.Variable(0.0, name="b"), rx.Variable(0.0, name="a")

    for name in ("worker_devices", "parameter_devices", "worker_device_index"):
        with pytest.raises(RuntimeError, match="unsupported by default"):
            getattr(default, name)
    for name in ("between_graph", "should_init", "should_checkpoint", "should_save_summary"):
        with pytest.raises(NotImplementedError):
            getattr(default, name)
    assert default.non_slot_devices([second, first]) is first
    assert default.read_var(first) == 0.0
    assert default.value_container(first) is first


def test_the_base_class_places_nothing():
    base = tower.DistributionStrategy()

    for use in (lambda: base.num_towers, base.scope, lambda: base.reduce("sum", 1.0)):
        with pytest.raises(rx.NotAvailableError, match="MirroredStrategy"):
            use()


def test_a_one_device_strategy_wraps_nothing():
    distribution = tower.OneDeviceStrategy("cpu:1")

    with distribution.scope():
        v = rx.Variable(1.0)
        assert distribution.call_for_each_tower(lambda x: x + v.value, 2.0) == 3.0
        assert distribution.worker_device_index == 0
        assert distribution.broadcast(jnp.ones(2)).devices() == {D1}
        assert distribution.update_non_slot(distribution.non_slot_devices([v]), lambda x: x, 3.0) == 3.0

    assert v.devices == (D1,)
    assert distribution.worker_devices == distribution.non_slot_devices([v]) == [D1]


def test_parameter_servers_of_one_machine_keep_a_variable_once():
    """Several compute devices need GPUs; the strategy that does the work can be given CPUs, and has a front as well."""
    strategy = rx.experimental.CentralStorageStrategy([D0, D1], "cpu:2")

    with strategy.scope():
        distribution = tower.get_distribution_strategy()
        v = rx.Variable(10.0, aggregation="sum", name="x")
        other = rx.Variable(0.0, name="y")
        distribution.call_for_each_tower(lambda: v.assign_add(jnp.asarray(1.0)))
        total = distribution.reduce("sum", tower.PerDevice((1.0, 2.0)), v)

        assert v.numpy() == 12.0
        assert distribution.parameter_devices == [jax.devices()[2]] == list(v.devices) == list(total.devices())
        assert distribution.non_slot_devices([other, v]) is v
        assert distribution.update(v, lambda c, x: c.assign(x).value, total, grouped=False) == [3.0]
        assert distribution.update_non_slot(v, lambda: tower.get_update_device()) is v
        with pytest.raises(ValueError):
            distribution.update(v, lambda c, x: None, tower.PerDevice((1.0, 2.0)))
        with pytest.raises(ValueError):
            distribution.update(5, lambda c: None)
        with pytest.raises(ValueError):
            distribution.reduce("sum", tower.PerDevice((1.0, 2.0)), "/job:worker/task:1")


def tpu(**options):
    return tower.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local"), steps_per_run=10, **options)


def test_a_tpu_strategy_has_a_tower_on_each_core():
    distribution = tpu(num_cores=3)

    assert distribution.num_towers == 3 and distribution.worker_devices == jax.devices()[:3]
    assert distribution.steps_per_run == 10
    assert (distribution.num_hosts, distribution.num_towers_per_host) == (1, len(jax.devices()))
    assert distribution.get_host_cpu_device(3) == "/replica:0/task:0/device:CPU:0"
    assert not distribution.between_graph and distribution.should_init
    assert distribution.initialize() is None and distribution.finalize() is None
    assert tpu().num_towers == len(jax.devices())


def test_a_tpu_strategy_takes_lists_of_the_towers_values():
    distribution = tpu(num_cores=2)

    with distribution.scope():
        v = rx.Variable(0.0, aggregation="mean")
        distribution.call_for_each_tower(lambda: v.assign_add(tower.get_tower_context().tower_id + 1.0))
        assert v.numpy() == 1.5
        assert distribution.unwrap([1, 2]) == [1, 2]
        assert distribution.reduce("sum", [1.0, 2.0], "cpu:0") == 3.0
        assert distribution.reduce("mean", [1.0, 2.0], "cpu:0") == 1.5
        assert distribution.reduce("only_first_tower", [1.0, 2.0], "cpu:0") == 1.0
        assert distribution.reduce("sum", tower.PerDevice((1.0, 2.0))) == 3.0
        assert distribution.batch_reduce("mean", [([1.0, 2.0], "cpu:0"), ([3.0, 5.0], v)]) == [1.5, 4.0]
        for pair in ([[1.0, 2.0], "cpu:0"], ([1.0, 2.0],)):
            with pytest.raises(ValueError, match="should be a tuple"):
                distribution.batch_reduce("mean", [pair])


def test_a_deep_copy_of_a_tpu_strategy_is_whole():
    twin = copy.deepcopy(tpu(num_cores=2))

    assert twin.num_towers == 2 and twin.steps_per_run == 10 and twin._tpu is twin._engine


CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}


@pytest.mark.parametrize("task", [{}, {"task_type": "worker"}, {"task_id": 0}], ids=["no-task", "no-id", "no-type"])
@pytest.mark.parametrize("make", [tower.ParameterServerStrategy, tower.CollectiveAllReduceStrategy])
def test_a_cluster_needs_a_task(make, task):
    with pytest.raises(ValueError, match="you must also specify `task_type` and `task_id`"):
        make().configure(cluster_spec=CLUSTER, **task)


def test_a_cluster_needs_the_jobs_of_its_strategy():
    with pytest.raises(ValueError, match="'ps'"):
        tower.ParameterServerStrategy(0, {"worker": ["a:1"]}, "worker", 0)
    with pytest.raises(ValueError, match="'worker'"):
        tower.CollectiveAllReduceStrategy().configure(None, {"ps": ["a:1"]}, "ps", 0)
    with pytest.raises(ValueError, match="'ps'"):
        tower.CollectiveAllReduceStrategy().configure(None, CLUSTER, "ps", 0)


@pytest.mark.parametrize(
    "make", [tower.ParameterServerStrategy, tower.CollectiveAllReduceStrategy, lambda: tower.MirroredStrategy([D0])]
)
def test_clusters_are_not_available_and_say_so(make):
    with pytest.raises(rx.NotAvailableError, match="(?s)configure.*process"):
        make().configure(cluster_spec=CLUSTER, task_type="worker", task_id=0)
    assert make().configure() is None
    assert make().configure(session_config={"any": "thing"}) is None


def test_the_only_worker_of_a_cluster_is_alone():
    distribution = tower.CollectiveAllReduceStrategy()

    assert distribution.configure(cluster_spec={"worker": ["a:1"]}, task_type="worker", task_id=0) is None
    assert distribution.worker_devices == [D0]


def test_gpus_that_are_not_there_are_refused_in_words():
    with pytest.raises(rx.DeviceError, match=r"(?s)num_gpus=2 asks for more GPUs.*devices=\[\"cpu:0\", \"cpu:1\"\]"):
        tower.MirroredStrategy(num_gpus=2)


def test_a_negative_number_of_gpus_is_refused():
    for make in (tower.CollectiveAllReduceStrategy, tower.ParameterServerStrategy):
        with pytest.raises(ValueError, match="num_gpus=-1"):
            make(-1)
    with pytest.raises(ValueError, match="num_gpus='2'"):
        tower.MirroredStrategy(num_gpus="2")


def test_starting_and_ending_do_nothing():
    distribution = tower.MirroredStrategy([D0, D1])

    assert distribution.initialize() is None and distribution.finalize() is None
    assert distribution.experimental_initialize() == distribution.experimental_finalize() == []


class ConfigProto:
    """A configuration that is no mapping."""

    isolate_session_state = False
    cluster_def = None


def one_host():
    """A slice of one host with an address, where this process runs."""
    resolver = TPUClusterResolver("10.0.0.1:8470", job_name="tpu_worker")
    return tower.TPUStrategy(resolver, steps_per_run=1)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: tower.MirroredStrategy([D0, D1]), ["isolate_session_state"]),
        (tower.ParameterServerStrategy, ["isolate_session_state"]),
        (one_host, ["isolate_session_state", "cluster_def"]),
        (lambda: tower.OneDeviceStrategy(D0), []),
        (tower.CollectiveAllReduceStrategy, []),
    ],
    ids=["mirrored", "parameter-server", "tpu", "one-device", "collective"],
)
def test_the_configuration_of_a_session_is_passed_on_with_what_the_strategy_needs(make, settings):
    distribution = make()
    config, proto = {"a": [1]}, ConfigProto()

    for given in (config, MappingProxyType(config)):
        updated = distribution.update_config_proto(given)
        assert list(updated) == ["a", *settings] and updated["a"] == [1] and updated["a"] is not config["a"]
        assert config == {"a": [1]}, "a copy was changed"
    assert distribution.update_config_proto(proto).isolate_session_state == bool(settings)
    assert not proto.isolate_session_state
    assert list(distribution.update_config_proto(None)) == settings
    distribution.configure(config)
    assert list(config) == ["a", *settings]
    for wrong in (5, "allow_soft_placement", [1]):
        with pytest.raises(TypeError, match="configured by a mapping"):
            distribution.update_config_proto(wrong)


def test_a_deep_copy_is_a_strategy_of_its_own():
    distribution = tower.MirroredStrategy([D0, D1])
    twin = copy.deepcopy(distribution)

    assert type(twin) is tower.MirroredStrategy and twin.worker_devices == distribution.worker_devices
    with twin.scope():
        assert tower.get_cross_tower_context() is twin
        with pytest.raises(RuntimeError, match="Mixing"):
            distribution.reduce("sum", 0)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(distribution)


def test_names_of_2019_are_there_too():
    distribution = tower.MirroredStrategy([D0, D1])

    assert isinstance(distribution.extended, rx.StrategyExtended)
    assert distribution.extended.worker_devices == (D0, D1)
    ids = distribution.extended.call_for_each_replica(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(i) for i in distribution.unwrap(ids)] == [0, 1]


def test_messages_show_the_names_that_users_import():
    assert tower.MirroredStrategy.__module__ == "replicax.compat.tower"
    assert repr(tower.OneDeviceStrategy("cpu:0")).startswith("<tower.OneDeviceStrategy")
    assert tower.get_loss_reduction() is tower.VariableAggregation.MEAN
    assert tower.DistributeConfig() == (None, None, None)


def test_the_standard_server_reads_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="TF_CONFIG"):
        tower.run_standard_tensorflow_server()

    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps"}}')
    with pytest.raises(rx.NotAvailableError, match="b:1"):
        tower.run_standard_tensorflow_server(session_config=None)
