"""Each scheduler's word becomes a cluster, and what the program says itself always wins."""

import copy
import inspect
import json
import os
from types import SimpleNamespace as Record

import jax
import pytest

from replicax import cluster_resolver
from replicax._errors import ClusterError, NotAvailableError, SchedulerError, TaskClashError
from replicax.cluster import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    Topology,
    TPUClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from replicax.cluster._resolvers.base import count_accelerators
from replicax.cluster._resolvers.tpu import system_metadata

SPEC = ClusterSpec({"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]})


def workers(*addresses, **jobs):
    """A resolver of some workers, given as a list or, by number, as a dictionary."""
    return SimpleClusterResolver(ClusterSpec({"worker": list(addresses)} if addresses else jobs))


# All of them.


def test_the_module_lists_every_resolver_under_its_old_name():
    import replicax.cluster as cluster

    resolvers = {name for name, it in vars(cluster).items() if inspect.isclass(it) and issubclass(it, ClusterResolver)}
    assert resolvers | {"KubernetesExecutableLocation"} == {name for name in vars(cluster_resolver) if name[0] != "_"}
    assert all(getattr(cluster_resolver, name) is getattr(cluster, name) for name in resolvers)


def test_a_resolver_must_say_who_is_in_the_cluster_and_how_to_reach_a_task():
    with pytest.raises(TypeError, match="abstract.*cluster_spec.*master"):
        ClusterResolver()


def test_a_resolver_that_is_told_nothing_knows_nothing_about_its_task():
    resolver = SimpleClusterResolver(SPEC)

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (None, None, None, "")


def test_devices_that_are_not_cpus_are_counted_by_kind():
    devices = [Record(platform=platform) for platform in ("cpu", "gpu", "tpu", "gpu", "gpu")]

    assert count_accelerators(devices) == {"GPU": 3, "TPU": 1}


def test_cpus_are_no_accelerators(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": SPEC.as_dict(), "task": {"type": "worker", "index": 1}}))
    resolver = TFConfigClusterResolver()

    assert resolver.num_accelerators() == {}
    assert resolver.num_accelerators("worker", 0) == {}
    assert resolver.num_accelerators("ps", 0) == {}


# Simple.


def test_the_master_is_the_task_that_was_asked_for():
    resolver = SimpleClusterResolver(SPEC, master="elsewhere:1")

    assert resolver.master("worker", 0) == "worker0:2222"
    assert resolver.master("worker", 2, rpc_layer="grpc") == "grpc://worker2:2222"
    assert resolver.master("worker") == resolver.master(task_id=0) == resolver.master() == "elsewhere:1"


def test_what_a_simple_resolver_was_told_it_repeats():
    resolver = SimpleClusterResolver(SPEC, "", "ps", 1, "cloud", {"GPU": 8}, "grpc")

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        "ps",
        1,
        "grpc",
        "cloud",
    )
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.cluster_spec() is SPEC


def test_what_a_simple_resolver_was_told_can_be_set():
    resolver = SimpleClusterResolver(SPEC, task_type="ps", task_id=1, rpc_layer="grpc")

    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "http")


def test_nothing_to_reach_has_no_protocol_either():
    assert SimpleClusterResolver(SPEC, rpc_layer="grpc").master() == ""


@pytest.mark.parametrize(("spec", "master"), [(SPEC.as_dict(), ""), (SPEC, 5), (None, "")])
def test_a_simple_resolver_takes_a_spec_and_a_text(spec, master):
    with pytest.raises(TypeError, match=r"`SimpleClusterResolver\((cluster_spec|master)=...\)` got the wrong type"):
        SimpleClusterResolver(spec, master)


# TF_CONFIG.


@pytest.fixture
def tf_config(monkeypatch):
    """Sets `TF_CONFIG` to three workers and two parameter servers, of which this is the first, and what a test adds."""

    def set_config(**more):
        config = {"cluster": SPEC.as_dict(), "task": {"type": "ps", "index": 0}, **more}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    set_config()
    return set_config


def test_tf_config_describes_the_cluster(tf_config):
    assert TFConfigClusterResolver().cluster_spec() == SPEC


def test_the_master_is_this_task_unless_another_is_asked_for(tf_config):
    assert TFConfigClusterResolver().master() == "ps0:2222"
    assert TFConfigClusterResolver().master("worker", 1) == "worker1:2222"
    assert TFConfigClusterResolver().master(task_id=1) == "ps1:2222"


def test_a_session_master_in_tf_config_is_the_master(tf_config):
    tf_config(session_master="sessionmaster:2222")

    assert TFConfigClusterResolver().master() == "sessionmaster:2222"
    assert TFConfigClusterResolver().master("worker", 1) == "worker1:2222"


def test_tf_config_says_who_this_process_is_and_how_to_speak(tf_config):
    tf_config(rpc_layer="grpc", environment="cloud")
    resolver = TFConfigClusterResolver()

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        "ps",
        0,
        "grpc",
        "cloud",
    )
    assert resolver.master() == "grpc://ps0:2222"


def test_arguments_beat_tf_config(tf_config):
    tf_config(task={"type": "worker", "index": 1}, rpc_layer="grpc", environment="cloud")
    resolver = TFConfigClusterResolver(task_type="ps", task_id=0, rpc_layer="http", environment="here")

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == ("ps", 0, "http", "here")
    assert resolver.master() == "http://ps0:2222"


def test_what_is_set_beats_tf_config(tf_config):
    tf_config(rpc_layer="grpc")
    resolver = TFConfigClusterResolver()

    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"

    assert resolver.master() == "test://worker1:2222"


def test_an_empty_protocol_is_something_to_say(tf_config):
    tf_config(rpc_layer="grpc")

    assert TFConfigClusterResolver(rpc_layer="").master() == "ps0:2222"
    assert TFConfigClusterResolver().master(rpc_layer="") == "ps0:2222"


def test_tf_config_is_read_anew_each_time(tf_config):
    resolver = TFConfigClusterResolver()
    tf_config(task={"type": "worker", "index": 2})

    assert resolver.master() == "worker2:2222"


def test_task_types_become_text_and_task_numbers_become_numbers(tf_config):
    tf_config(cluster={"123456": ["a:1", "b:1"]}, task={"type": 123456, "index": "1"})
    resolver = TFConfigClusterResolver()

    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("123456", 1, "b:1")

    resolver.task_id = "0"
    assert resolver.task_id == 0 and TFConfigClusterResolver(123456, "1").master() == "b:1"
    with pytest.raises(ClusterError, match="task_id='one' is not the number of a task"):
        resolver.task_id = "one"


def test_tf_config_may_leave_out_tasks(tf_config):
    tf_config(cluster={"worker": {"3": "a:1"}, "ps": ["b:1"]})

    assert TFConfigClusterResolver().cluster_spec() == ClusterSpec({"worker": {3: "a:1"}, "ps": ["b:1"]})


@pytest.mark.parametrize("config", [None, "{}", '{"cluster": {"worker": ["worker0:2222"]}}'])
def test_a_process_that_is_alone_has_no_master(monkeypatch, config):
    if config is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", config)

    assert TFConfigClusterResolver().master() == ""


def test_without_tf_config_there_is_no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)

    assert TFConfigClusterResolver().cluster_spec() == ClusterSpec({})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{"cluster": ', "Expecting value at line 1, column 13"),
        ("[1]", "it is a list, not an object"),
        ('{"cluster": ["a:1"]}', "'cluster' is a list, not an object"),
        ('{"task": "worker"}', "'task' is a str, not an object"),
        ('{"task": {"type": "worker", "index": "first"}}', "'first' in task.index is not a number"),
        ('{"cluster": {"worker": {"first": "a:1"}}}', "'first' in cluster.worker is not a number"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "does not say which of them this process is"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_refused_as_it_stands(monkeypatch, config, text):
    monkeypatch.setenv("TF_CONFIG", config)

    with pytest.raises(ValueError, match=text) as refused:
        resolver = TFConfigClusterResolver()
        (resolver.task_id, resolver.master())
    assert f"TF_CONFIG={config}" in str(refused.value)


# Union.


def test_jobs_of_different_names_stand_side_by_side():
    union = UnionResolver(workers(ps=["ps0:2222", "ps1:2222"]), workers("worker0:2222", "worker1:2222", "worker2:2222"))

    assert union.cluster_spec() == SPEC
    assert union.master() == ""
    assert union.master("worker", 1) == "worker1:2222"
    assert union.master("worker", 1, rpc_layer="grpc") == "grpc://worker1:2222"


def test_lists_of_one_job_are_put_one_after_the_other():
    union = UnionClusterResolver(workers("w4", "w5"), workers("w0", "w1", "w2"))

    assert union.cluster_spec().job_tasks("worker") == ["w4", "w5", "w0", "w1", "w2"]


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ({5: "e", 9: "i"}, {3: "c", 6: "f"}, {3: "c", 5: "e", 6: "f", 9: "i"}),
        (["a", "b"], {3: "c", 6: "f"}, {0: "a", 1: "b", 3: "c", 6: "f"}),
        ({1: "a", 3: "b", 5: "c"}, [], {1: "a", 3: "b", 5: "c"}),
    ],
)
def test_numbered_tasks_keep_their_numbers(first, second, joined):
    assert UnionResolver(workers(worker=first), workers(worker=second)).cluster_spec() == {"worker": joined}


@pytest.mark.parametrize(
    ("first", "second"), [({7: "a", 9: "b"}, {3: "c", 7: "d"}), (["a", "b"], {1: "c", 2: "d"})], ids=["dicts", "mixed"]
)
def test_a_number_that_is_given_away_twice_is_refused(first, second):
    with pytest.raises(KeyError, match=r"task [17] of job 'worker' is described twice") as refused:
        UnionResolver(workers(worker=first), workers(worker=second)).cluster_spec()
    assert isinstance(refused.value, TaskClashError)
    assert "\n  * give each task a number of its own" in str(refused.value)


def test_what_a_union_says_about_this_process_comes_from_the_first():
    first = SimpleClusterResolver(SPEC, "", "ps", 1, "cloud", {"GPU": 8}, "grpc")
    second = SimpleClusterResolver(SPEC, "", "worker", 2, "local", {"GPU": 16}, "http")
    union = UnionResolver(first, second)

    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("ps", 1, "grpc", "cloud")
    assert union.num_accelerators() == {"GPU": 8}


def test_what_a_union_is_told_wins_also_if_it_is_zero_or_empty():
    first = SimpleClusterResolver(SPEC, task_type="ps", task_id=1, rpc_layer="grpc")
    union = UnionResolver(first, task_type="worker", task_id=0, rpc_layer="")

    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "")
    assert union.master() == "worker0:2222"

    union.task_type, union.task_id, union.rpc_layer = "ps", 0, "http"
    assert union.master() == "http://ps0:2222"


def test_a_union_puts_its_own_protocol_before_every_address():
    first = SimpleClusterResolver(SPEC, master="m:1", rpc_layer="grpc")

    assert UnionResolver(first, rpc_layer="http").master() == "http://m:1"
    assert UnionResolver(first, rpc_layer="http").master("worker", 1) == "http://worker1:2222"
    assert UnionResolver(first).master("worker", 1) == "grpc://worker1:2222"


def test_a_union_is_made_of_resolvers_and_at_least_one():
    with pytest.raises(ValueError, match="needs at least one resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match="(?s)not resolvers.*'worker0:2222' of type str"):
        UnionResolver(workers("a:1"), "worker0:2222")
    for error in (TypeError, ValueError):  # what Python says, and what tf.distribute said
        with pytest.raises(error, match="(?s)does not have.*task_index="):
            UnionResolver(workers("a:1"), task_index=1)


# Slurm.


@pytest.fixture
def step(monkeypatch):
    """Makes this process one task of a Slurm step on three hosts."""
    for name in ("NODEID", "LOCALID", "STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def set_step(**variables):
        variables = {"PROCID": 0, "STEP_NUM_TASKS": 3, "STEP_NODELIST": "t02n13,t02n41,t02n43"} | variables
        for name, value in variables.items():
            monkeypatch.setenv(name if name.startswith("CUDA") else f"SLURM_{name}", str(value))

    set_step()
    return set_step


def test_slurm_says_everything_by_itself(step):
    step(STEP_TASKS_PER_NODE="1(x3)", CUDA_VISIBLE_DEVICES="0")
    resolver = SlurmClusterResolver()

    assert resolver.cluster_spec() == ClusterSpec({"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]})
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert visible_gpus() == "0"


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


ONE_PS_TWO_WORKERS = ClusterSpec({"ps": ["t02n13:8888"], "worker": ["t02n41:8888", "t02n43:8888"]})


def test_arguments_stand_in_for_what_slurm_does_not_say(step):
    resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, 8888, 1, 1, tasks_per_node=1, auto_set_gpu=False)

    assert resolver.cluster_spec() == ONE_PS_TWO_WORKERS
    assert visible_gpus() == ""


def test_slurm_says_how_many_tasks_run_on_each_host(step):
    step(STEP_TASKS_PER_NODE="1(x3)")

    assert SlurmClusterResolver({"ps": 1, "worker": 2}).cluster_spec() == ONE_PS_TWO_WORKERS


def test_arguments_beat_slurm(step):
    step(STEP_NUM_TASKS=4, STEP_NODELIST="a,b", STEP_TASKS_PER_NODE="3,1")

    assert SlurmClusterResolver(tasks_per_node=2).cluster_spec().as_dict() == {
        "worker": ["a:8888", "a:8889", "b:8888", "b:8889"]
    }
    assert SlurmClusterResolver(tasks_per_node={"b": 3, "a": 1}).cluster_spec().as_dict() == {
        "worker": ["a:8888", "b:8888", "b:8889", "b:8890"]
    }


def test_a_slurm_master_is_this_task_unless_told_otherwise(step):
    resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, tasks_per_node=1)
    assert resolver.master() == "grpc://t02n13:8888"

    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://t02n43:8888"

    resolver.rpc_layer = "ab"
    assert resolver.master("ps", 0) == "ab://t02n13:8888"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://t02n13:8888"


@pytest.mark.parametrize(
    ("rank", "task"), [(0, ("ps", 0)), (1, ("worker", 0)), (2, ("worker", 1)), (3, ("worker", 2)), (4, ("worker", 3))]
)
def test_ranks_are_handed_to_the_jobs_in_alphabetical_order(step, rank, task):
    step(PROCID=rank, STEP_NUM_TASKS=5, STEP_TASKS_PER_NODE="2(x2),1")
    resolver = SlurmClusterResolver({"worker": 4, "ps": 1})

    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == task


@pytest.mark.parametrize(("per_node", "per_task", "share"), [(2, 1, "1"), (4, 2, "2,3"), (4, None, "2,3")])
def test_tasks_of_one_host_share_its_gpus(step, per_node, per_task, share):
    step(PROCID=1, STEP_NUM_TASKS=5, STEP_TASKS_PER_NODE="2(x2),1")
    resolver = SlurmClusterResolver({"ps": 1, "worker": 4}, gpus_per_node=per_node, gpus_per_task=per_task)

    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["t02n13:8888"], "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"]}
    )
    assert visible_gpus() == share
    assert resolver.num_accelerators() == {"GPU": len(share.split(","))}


def test_a_share_is_taken_from_the_gpus_that_slurm_gave_to_the_job(step):
    step(PROCID=1, STEP_NUM_TASKS=2, STEP_NODELIST="a", STEP_TASKS_PER_NODE=2, CUDA_VISIBLE_DEVICES="4,5,6,7")
    resolver = SlurmClusterResolver()

    for _ in range(2):  # asking twice does not take a share of the share
        resolver.cluster_spec()
        assert visible_gpus() == "6,7"


def test_hosts_without_gpus_need_no_words(step, monkeypatch, tmp_path):
    step(STEP_TASKS_PER_NODE="1(x3)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    resolver = SlurmClusterResolver()

    assert resolver.cluster_spec().num_tasks("worker") == 3
    assert resolver.num_accelerators() == {}


def nvidia_smi(directory, script):
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_gpus_are_counted_where_nobody_names_them(step, monkeypatch, tmp_path):
    step(STEP_TASKS_PER_NODE="2", STEP_NODELIST="a", STEP_NUM_TASKS=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(tmp_path, r"""printf 'GPU 0: A (UUID: x)\n  MIG 1g Device 0: y\nGPU 1: B (UUID: z)\n'""")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": 1}


def test_a_count_of_gpus_that_fails_is_told(step, monkeypatch, tmp_path):
    step(STEP_TASKS_PER_NODE="1(x3)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvidia_smi(tmp_path, "echo driver gone >&2; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(RuntimeError, match="(?s)could not count the GPUs.*ended with 9: driver gone"):
        SlurmClusterResolver()


def test_hosts_keep_the_order_in_which_slurm_numbers_them(step):
    step(PROCID=1, STEP_NUM_TASKS=2, STEP_NODELIST="n[2,10]", STEP_TASKS_PER_NODE="1(x2)", NODEID=1, LOCALID=0)

    assert SlurmClusterResolver().master() == "grpc://n10:8888"


def test_ranks_that_go_round_the_hosts_are_refused(step):
    step(PROCID=1, STEP_NUM_TASKS=4, STEP_NODELIST="a,b", STEP_TASKS_PER_NODE="2(x2)", NODEID=1, LOCALID=0)

    with pytest.raises(RuntimeError, match="(?s)rank 1 is task 0 of host 1, not task 1 of host 0.*distribution=block"):
        SlurmClusterResolver()


@pytest.mark.parametrize("missing", ["PROCID", "STEP_NODELIST", "STEP_TASKS_PER_NODE"])
def test_outside_of_a_step_slurm_is_not_asked(step, monkeypatch, missing):
    step(STEP_TASKS_PER_NODE="1(x3)")
    monkeypatch.delenv(f"SLURM_{missing}")

    with pytest.raises(
        RuntimeError, match=f"SLURM_{missing} not found in environment. Not running inside a SLURM step"
    ):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"jobs": {"worker": 4}}, "Requested 4 tasks but only 3 were assigned"),
        ({"gpus_per_node": 1, "gpus_per_task": 2}, "(?s)1 tasks x 2 GPUs = 2.*the node has 1"),
        ({"tasks_per_node": 2}, "Slurm started 3 tasks, and `tasks_per_node` makes 6"),
        ({"tasks_per_node": {"t02n13": 3}}, "speaks of other hosts than Slurm"),
    ],
)
def test_arguments_that_do_not_add_up_with_slurm_are_refused(step, arguments, text):
    step(STEP_TASKS_PER_NODE="1(x3)")

    with pytest.raises(RuntimeError, match=text) as refused:
        SlurmClusterResolver(**arguments)
    assert isinstance(refused.value, SchedulerError)


def test_a_slurm_that_contradicts_itself_is_refused(step):
    step(STEP_TASKS_PER_NODE="1(x2)")
    with pytest.raises(SchedulerError, match="Slurm names 3 hosts and 2 numbers of tasks"):
        SlurmClusterResolver()

    step(STEP_TASKS_PER_NODE="1(x3)", PROCID=3)
    with pytest.raises(SchedulerError, match="Rank 3 has no place in a step of 3 tasks"):
        SlurmClusterResolver()


# Kubernetes. The API server is played by a list of pods.


class Pods:
    """A client that knows pods by namespace and label."""

    def __init__(self, *pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        return Record(items=[pod for pod in self.pods if pod.label == label_selector])

    def list_namespaced_pod(self, namespace, label_selector):
        return Record(items=[pod for pod in self.pods if (pod.namespace, pod.label) == (namespace, label_selector)])


def pod(name, ip, label="job-name=tensorflow", phase="Running", namespace="default", host_ip="192.168.0.1"):
    status = Record(phase=phase, pod_ip=ip, host_ip=host_ip)
    return Record(metadata=Record(name=name), status=status, label=label, namespace=namespace)


def test_pods_are_ordered_by_name():
    client = Pods(pod("tf-abc123", "10.1.2.3"), pod("tf-def456", "10.1.2.4"), pod("tf-999999", "10.1.2.5"))

    cluster = KubernetesClusterResolver(override_client=client).cluster_spec()

    assert cluster.as_dict() == {"worker": ["10.1.2.5:8470", "10.1.2.3:8470", "10.1.2.4:8470"]}


def test_selectors_of_one_job_stand_one_after_the_other():
    client = Pods(
        pod("b", "10.0.0.2", "job-name=worker1"),
        pod("c", "10.0.0.1", "job-name=worker1"),
        pod("a", "10.0.0.3", "job-name=worker2"),
        pod("p", "10.0.0.4", "job-name=ps"),
    )
    jobs = {"worker": ["job-name=worker1", "job-name=worker2"], "ps": ["job-name=ps"]}

    cluster = KubernetesClusterResolver(jobs, tf_server_port=1, override_client=client).cluster_spec()

    assert cluster.as_dict() == {"worker": ["10.0.0.2:1", "10.0.0.1:1", "10.0.0.3:1"], "ps": ["10.0.0.4:1"]}


def test_kubernetes_does_not_say_which_task_this_is():
    client = Pods(*(pod(f"worker-{i}", f"10.1.2.{3 + i}") for i in range(3)))
    resolver = KubernetesClusterResolver(override_client=client)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")

    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.1.2.3:8470"
    assert resolver.master("worker", 2) == "grpc://10.1.2.5:8470"


def test_pods_that_do_not_run_are_named():
    client = Pods(pod("a", "10.0.0.1"), pod("b", None, phase="Failed"), pod("c", None, phase="Pending"))

    with pytest.raises(
        RuntimeError, match='(?s)Pod "b" is not running; phase: "Failed".*Pod "c" .*"Pending"'
    ) as refused:
        KubernetesClusterResolver(override_client=client).cluster_spec()
    assert '"a"' not in str(refused.value)


def test_pods_of_other_namespaces_can_be_left_out():
    client = Pods(pod("a", "10.0.0.1", namespace="mine"), pod("b", "10.0.0.2", namespace="yours"))

    assert KubernetesClusterResolver(override_client=client).cluster_spec().num_tasks("worker") == 2
    assert KubernetesClusterResolver(override_client=client, namespace="mine").cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:8470"]
    }


def test_a_client_that_knows_only_the_hosts_address_is_understood():
    for unknown in (None, object()):
        client = Pods(pod("a", unknown, host_ip="10.1.2.3"))
        spec = KubernetesClusterResolver(override_client=client).cluster_spec()

        assert spec.as_dict() == {"worker": ["10.1.2.3:8470"]}


@pytest.mark.parametrize("location", [None, 0, "WITHIN_CLUSTER"])
def test_a_place_that_is_none_is_refused(location):
    with pytest.raises(ValueError, match="is no such place"):
        KubernetesClusterResolver(executable_location=location)


@pytest.mark.parametrize(
    ("location", "load"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "load_incluster_config"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "load_kube_config"),
    ],
)
def test_without_a_client_kubernetes_says_how_to_make_one(location, load):
    resolver = KubernetesClusterResolver(executable_location=location)

    with pytest.raises(NotAvailableError, match=rf"kubernetes.config.{load}\(\).*override_client=kubernetes.client"):
        resolver.cluster_spec()


# Compute Engine. The API is played by pages of instances.


class ComputeEngine:
    """A client whose instance group comes in pages."""

    def __init__(self, *pages):
        self.pages = pages
        self.ips = dict(instance for page in pages for instance in page)

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, project, zone, instanceGroup, body, orderBy):
        asked = (project, zone, instanceGroup, body, orderBy)
        assert asked == ("a-project", "us-east1-d", "a-group", {"instanceState": "RUNNING"}, "name")
        return self.page(0)

    def listInstances_next(self, previous_request, previous_response):
        return self.page(previous_request.number + 1) if previous_request.number + 1 < len(self.pages) else None

    def page(self, number):
        items = [{"instance": f"https://gce.example.com/res/{name}"} for name, _ in self.pages[number]]
        return Record(number=number, execute=lambda: {"items": items} if items else {})

    def get(self, project, zone, instance):
        assert (project, zone) == ("a-project", "us-east1-d")
        return Record(execute=lambda: {"networkInterfaces": [{"networkIP": self.ips[instance]}]})


def gce(*pages, **more):
    arguments = {"port": 8470, "service": ComputeEngine(*pages)} | more
    return GCEClusterResolver("a-project", "us-east1-d", "a-group", **arguments)


THREE = [("i1", "10.3.4.5"), ("i2", "10.1.2.3"), ("i3", "10.2.3.4")]


def test_instances_are_ordered_by_address():
    assert gce(THREE).cluster_spec().as_dict() == {"worker": ["10.1.2.3:8470", "10.2.3.4:8470", "10.3.4.5:8470"]}


def test_instances_are_read_page_after_page_also_past_an_empty_one():
    assert gce(THREE[:1], [], THREE[1:]).cluster_spec() == gce(THREE).cluster_spec()


def test_a_group_may_be_empty():
    assert gce([]).cluster_spec() == ClusterSpec({"worker": []})


def test_instances_may_have_another_job_and_port():
    assert gce(THREE[:1], task_type="custom", port=2222).cluster_spec().as_dict() == {"custom": ["10.3.4.5:2222"]}


def test_a_gce_master_is_this_task_unless_told_otherwise():
    resolver = gce(THREE)
    assert resolver.master() == "grpc://10.1.2.3:8470"
    assert resolver.master("worker", 2, "test") == "test://10.3.4.5:8470"

    resolver.task_id, resolver.rpc_layer = 1, "test"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "test")
    assert resolver.master() == "test://10.2.3.4:8470"


def test_an_empty_name_and_number_zero_are_something_to_say():
    assert gce(THREE, task_type="", task_id=1).master(task_type="", task_id=0) == "grpc://10.1.2.3:8470"


def test_the_job_of_a_group_cannot_be_changed():
    with pytest.raises(RuntimeError, match="(?s)every instance of the group belongs to one job.*task_type='foobar'"):
        gce(THREE).task_type = "foobar"


def test_groups_are_joined_by_a_union():
    union = UnionResolver(gce(THREE[:2]), gce(THREE[2:]), gce([("p", "10.9.9.9")], task_type="ps", port=2222))

    assert union.cluster_spec().as_dict() == {
        "worker": ["10.1.2.3:8470", "10.3.4.5:8470", "10.2.3.4:8470"],
        "ps": ["10.9.9.9:2222"],
    }


def test_without_a_client_gce_says_how_to_make_one():
    with pytest.raises(NotAvailableError, match=r'service=googleapiclient.discovery.build\("compute", "v1"\)'):
        gce(service=None).cluster_spec()


# SageMaker.


@pytest.fixture
def sagemaker(monkeypatch):
    def set_hosts(hosts, here):
        monkeypatch.setenv("SM_HOSTS", json.dumps(hosts))
        monkeypatch.setenv("SM_CURRENT_HOST", here)

    set_hosts(["algo-2", "algo-1"], "algo-2")
    return set_hosts


def test_sagemaker_hosts_are_workers_in_alphabetical_order(sagemaker):
    resolver = SageMakerClusterResolver()

    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "algo-2:2223")
    assert resolver.master("worker", 0, "grpc") == "grpc://algo-1:2223"


def test_arguments_beat_sagemaker(sagemaker):
    resolver = SageMakerClusterResolver(port=1, task_type="worker", task_id=0, rpc_layer="grpc", environment="cloud")

    assert (resolver.task_id, resolver.environment, resolver.master()) == (0, "cloud", "grpc://algo-1:1")


def test_a_single_sagemaker_host_has_no_master(sagemaker):
    sagemaker(["algo-1"], "algo-1")

    assert SageMakerClusterResolver().master() == ""


def test_a_host_outside_the_job_has_no_cluster(sagemaker):
    sagemaker(["algo-1"], "laptop")
    resolver = SageMakerClusterResolver()

    assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id) == (ClusterSpec({}), None, None)


@pytest.mark.parametrize("missing", ["SM_HOSTS", "SM_CURRENT_HOST"])
def test_outside_of_sagemaker_this_is_said_at_once(sagemaker, monkeypatch, missing):
    monkeypatch.delenv(missing)

    with pytest.raises(RuntimeError, match=f"(?s)Not a SageMaker Environment.*{missing} is not set"):
        SageMakerClusterResolver()


# TPU.


@pytest.fixture
def no_tpu(monkeypatch):
    """An environment that speaks of no TPU."""
    for name in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TPU_NAME", raising=False)
    return monkeypatch


@pytest.mark.parametrize("tpu", ["local", "", None])
def test_the_local_slice_is_the_devices_of_this_process(no_tpu, tpu):
    resolver = TPUClusterResolver(tpu)
    metadata = resolver.get_tpu_system_metadata()

    assert (resolver.cluster_spec(), resolver.master(), resolver.get_master()) == (ClusterSpec({}), "", "")
    assert resolver.get_job_name() is None
    assert resolver.num_accelerators() == {"TPU": 8}
    assert (metadata.num_cores, metadata.num_hosts, metadata.num_of_cores_per_host) == (8, 1, 8)
    assert metadata.devices == tuple(jax.local_devices())
    assert metadata.topology.mesh_shape.tolist() == [2, 2, 1, 2]


def test_a_topology_can_be_planned_for():
    resolver = TPUClusterResolver("local")
    planned = Topology(mesh_shape=(1, 1, 1, 1), device_coordinates=[[(0, 0, 0, 0)]])

    resolver.set_tpu_topology(planned.serialized())

    assert resolver.get_tpu_system_metadata().topology.mesh_shape.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("tpu", "addresses"),
    [
        ("grpc://10.1.2.3:8470", ["10.1.2.3:8470"]),
        ("10.1.2.3:8470", ["10.1.2.3:8470"]),
        (["10.1.2.3:8470", "10.1.2.4:8470"], ["10.1.2.3:8470", "10.1.2.4:8470"]),
        ("grpc://10.1.2.3:8470,grpc://10.1.2.4:8470", ["10.1.2.3:8470", "10.1.2.4:8470"]),
    ],
)
def test_addresses_are_taken_as_they_are(tpu, addresses):
    resolver = TPUClusterResolver(tpu)

    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    assert resolver.master() == f"grpc://{addresses[0]}"
    assert (resolver.task_type, resolver.task_id, resolver.get_job_name()) == ("worker", 0, "worker")


@pytest.mark.parametrize(
    ("variable", "value", "addresses"),
    [
        ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://a:1,grpc://b:1", ["a:1", "b:1"]),
        ("TPU_PROCESS_ADDRESSES", "a:8476,b:8476", ["a:8476", "b:8476"]),
        ("TPU_WORKER_HOSTNAMES", "a,b", ["a:8470", "b:8470"]),
        ("TPU_NAME", "grpc://a:1", ["a:1"]),
    ],
)
def test_the_environment_of_a_tpu_machine_lists_its_hosts(no_tpu, variable, value, addresses):
    no_tpu.setenv(variable, value)

    assert TPUClusterResolver().cluster_spec().as_dict() == {"worker": addresses}
    assert TPUClusterResolver("local").cluster_spec() == ClusterSpec({})


def test_a_slice_of_one_host_is_local(no_tpu):
    no_tpu.setenv("TPU_WORKER_HOSTNAMES", "localhost")

    assert TPUClusterResolver().is_local


def test_the_environment_says_which_host_this_is(no_tpu):
    no_tpu.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    no_tpu.setenv("TPU_WORKER_ID", "1")
    resolver = TPUClusterResolver(job_name="tpu_worker")

    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("tpu_worker", 1, "grpc://b:8470")
    resolver.task_id = 0
    assert resolver.master() == "grpc://a:8470"


class CloudTPU:
    """A client of the Cloud TPU API that knows one node."""

    def __init__(self, **node):
        self.node = node

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, name):
        assert name == "projects/p/locations/z/nodes/my-tpu"
        return Record(execute=lambda: self.node)


READY = {"state": "READY", "health": "HEALTHY"}
ENDPOINTS = [{"ipAddress": f"10.2.3.{i}", "port": 8470} for i in (4, 5, 6, 7)]


def named(**node):
    return TPUClusterResolver("my-tpu", "z", "p", service=CloudTPU(**node))


def test_a_name_is_looked_up():
    resolver = named(**READY, networkEndpoints=ENDPOINTS)

    assert resolver.cluster_spec().as_dict() == {"worker": [f"10.2.3.{i}:8470" for i in (4, 5, 6, 7)]}
    assert resolver.master() == "grpc://10.2.3.4:8470"
    assert resolver.master("worker", 3) == "grpc://10.2.3.7:8470"


def test_a_node_of_one_host_may_carry_its_address_itself():
    assert named(**READY, ipAddress="10.1.2.3", port="8470").master() == "grpc://10.1.2.3:8470"


@pytest.mark.parametrize("unfit", [{"state": "CREATING"}, {"health": "UNHEALTHY_MAINTENANCE"}])
def test_a_node_that_is_not_ready_is_refused(unfit):
    with pytest.raises(RuntimeError, match="(?s)TPU 'my-tpu' is not yet ready.*(CREATING|UNHEALTHY)"):
        named(**READY | unfit, networkEndpoints=ENDPOINTS).cluster_spec()


def test_a_name_that_cannot_be_looked_up_says_what_is_missing():
    with pytest.raises(NotAvailableError, match="(?s)zone is not given.*service is not given.*TPUClusterResolver"):
        TPUClusterResolver("my-tpu", project="p").cluster_spec()


def test_no_name_at_all_is_refused():
    with pytest.raises(ValueError, match="names no TPU"):
        TPUClusterResolver([])


def test_a_coordinator_is_a_job_of_its_own():
    resolver = TPUClusterResolver("10.1.2.3:8470", coordinator_name="boss", coordinator_address="10.1.2.9:1")

    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.2.3:8470"], "boss": ["10.1.2.9:1"]}
    with pytest.raises(ClusterError, match="needs the address of that coordinator"):
        TPUClusterResolver("10.1.2.3:8470", coordinator_name="boss")


def test_devices_of_hosts_that_are_not_connected_are_not_counted():
    with pytest.raises(RuntimeError, match=r"(?s)has 2 hosts, and JAX sees 1 process.*jax.distributed.initialize\(\)"):
        TPUClusterResolver(["a:1", "b:1"]).num_accelerators()


def core(process, x, number):
    return Record(platform="tpu", process_index=process, coords=[x, 0, 0], core_on_chip=number)


def test_a_slice_of_two_hosts_has_the_cores_of_both():
    metadata = system_metadata([core(process, process, number) for process in (0, 1) for number in (0, 1)])

    assert (metadata.num_cores, metadata.num_hosts, metadata.num_of_cores_per_host) == (4, 2, 2)
    assert metadata.topology.mesh_shape.tolist() == [2, 1, 1, 2]


def test_hosts_with_different_numbers_of_cores_are_refused():
    with pytest.raises(RuntimeError, match="(?s)equally many cores.*process 0: 2 cores.*process 1: 1 cores"):
        system_metadata([core(0, 0, 0), core(0, 0, 1), core(1, 1, 0)])


def test_connecting_to_the_local_slice_has_nothing_to_do():
    assert TPUClusterResolver.connect("local").is_local


def test_connecting_to_a_slice_from_outside_is_refused():
    with pytest.raises(NotAvailableError, match="cannot drive a slice from outside"):
        TPUClusterResolver.connect("grpc://10.1.2.3:8470")


def test_a_resolver_is_a_context_and_its_own_copy():
    with TPUClusterResolver("local") as resolver:
        assert copy.deepcopy({"resolver": resolver})["resolver"] is resolver
