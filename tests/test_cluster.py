"""A cluster as data, the roles in it, and the server of one task."""

import json
from types import SimpleNamespace as Record

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._errors import ClusterError, ClusterTypeError, NotAvailableError
from replicax.cluster import (
    ClusterDef,
    ClusterSpec,
    DistributeConfig,
    JobDef,
    Server,
    ServerDef,
    collective_leader,
    coordination_leader,
    global_id_in_cluster,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    serve_from_tf_config,
    validate_cluster,
    worker_count,
)

SPEC = {"ps": ["p0:2222", "p1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]}
SPARSE = ClusterSpec({"w": {3: "d", 1: "b"}})
EVERYONE = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"], "evaluator": ["e:1"]}

addresses = st.text(min_size=1, max_size=8)
tasks = st.lists(addresses, max_size=4) | st.dictionaries(st.integers(0, 9), addresses, max_size=4)
clusters = st.dictionaries(st.text(max_size=8), tasks, max_size=4)


# Specifications.


@given(clusters)
def test_a_cluster_survives_every_form_it_can_take(cluster):
    spec = ClusterSpec(cluster)

    assert ClusterSpec(spec) == ClusterSpec(spec.as_dict()) == ClusterSpec(spec.as_cluster_def()) == spec
    assert hash(ClusterSpec(spec.as_dict())) == hash(spec)


@given(clusters)
def test_addresses_are_the_same_however_one_asks(cluster):
    spec = ClusterSpec(cluster)

    for job in spec.jobs:
        indices = spec.task_indices(job)
        assert indices == sorted(indices)
        assert spec.num_tasks(job) == len(indices)
        assert [spec.job_tasks(job)[index] for index in indices] == [spec.task_address(job, index) for index in indices]


def test_jobs_keep_their_order():
    assert ClusterSpec({"worker": ["w"], "chief": ["c"], "ps": ["p"]}).jobs == ["worker", "chief", "ps"]


def test_lists_and_tuples_number_the_tasks_from_zero():
    assert ClusterSpec({"w": ("a", "b")}) == ClusterSpec({"w": ["a", "b"]}) == {"w": {0: "a", 1: "b"}}


def test_numbers_may_have_holes():
    assert SPARSE.num_tasks("w") == 2
    assert SPARSE.task_indices("w") == [1, 3]
    assert SPARSE.job_tasks("w") == [None, "b", None, "d"]
    assert SPARSE.as_dict() == {"w": {1: "b", 3: "d"}}


def test_a_job_without_tasks_stays_a_job():
    empty = ClusterSpec({"w": []})

    assert empty.as_dict() == {"w": {}}
    assert (empty.num_tasks("w"), empty.task_indices("w"), empty.job_tasks("w")) == (0, [], [])


def test_a_spec_is_true_when_it_has_jobs():
    assert ClusterSpec(SPEC)
    assert not ClusterSpec({})


def test_specs_are_equal_when_their_tasks_are():
    assert ClusterSpec({"a": ["x"], "b": ["y"]}) == ClusterSpec({"b": ["y"], "a": ["x"]})
    assert ClusterSpec({"a": ["x"]}) != ClusterSpec({"a": ["y"]})
    assert ClusterSpec({"a": ["x"]}) != "a"


def test_the_repr_is_sorted_and_can_be_evaluated():
    spec = ClusterSpec({"b": ["x"], "a": ["y"]})

    assert repr(spec) == "ClusterSpec({'a': ['y'], 'b': ['x']})"
    assert eval(repr(spec)) == spec


def test_a_cluster_def_has_its_jobs_in_alphabetical_order():
    assert ClusterSpec({"b": ["x"], "a": {2: "y"}}).as_cluster_def() == ClusterDef(
        (JobDef("a", {2: "y"}), JobDef("b", {0: "x"}))
    )


def test_anything_with_the_fields_of_a_cluster_def_is_one():
    proto = Record(job=[Record(name="worker", tasks={0: "a", 1: "b"})])

    assert ClusterSpec(proto) == ClusterSpec({"worker": ["a", "b"]})


@pytest.mark.parametrize(
    "tasks", [5, "a:1", {"0": "a"}, [1], [b"a:1"], {0: None}, {-1: "a"}, None], ids=lambda tasks: repr(tasks)
)
def test_tasks_are_numbers_and_addresses(tasks):
    with pytest.raises(
        ClusterTypeError, match="The tasks for job 'w' must be a list or a dictionary from integers to strings"
    ):
        ClusterSpec({"w": tasks})


def test_every_wrong_task_is_named():
    with pytest.raises(TypeError, match=r"(?s)task 1: 7.*task 3: None") as refused:
        ClusterSpec({"w": ["a", 7, "c", None]})
    assert "task 0" not in str(refused.value)


@pytest.mark.parametrize("cluster", [5, "worker", ["a:1"], None], ids=repr)
def test_what_is_no_cluster_is_refused_both_as_a_wrong_type_and_as_a_wrong_value(cluster):
    with pytest.raises(TypeError, match="needs a dictionary from job names to addresses"):
        ClusterSpec(cluster)
    with pytest.raises(ValueError, match="needs a dictionary from job names to addresses"):
        normalize_cluster_spec(cluster)


@pytest.mark.parametrize(
    "ask",
    [
        ClusterSpec.num_tasks,
        ClusterSpec.task_indices,
        ClusterSpec.job_tasks,
        lambda spec, job: spec.task_address(job, 0),
    ],
    ids=["num_tasks", "task_indices", "job_tasks", "task_address"],
)
def test_an_unknown_job_is_refused_and_the_known_ones_are_named(ask):
    with pytest.raises(ValueError, match=r"(?s)No such job in cluster: 'x'.*\['ps', 'worker'\]"):
        ask(ClusterSpec(SPEC), "x")


def test_an_unknown_task_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=r"(?s)No task with index 2 in job 'w'.*\[1, 3\]"):
        SPARSE.task_address("w", 2)


# Roles.


def test_the_chief_is_chief_and_then_no_worker_is():
    assert is_chief(EVERYONE, "chief", 0)
    assert not is_chief(EVERYONE, "worker", 0)


def test_without_a_chief_worker_0_is_chief():
    assert [is_chief(SPEC, "worker", i) for i in range(3)] == [True, False, False]


def test_a_parameter_server_is_never_chief():
    assert not is_chief(SPEC, "ps", 0)


def test_an_evaluator_is_chief_of_its_own_world_also_if_it_is_not_listed():
    assert is_chief(EVERYONE, "evaluator", 0)
    assert is_chief(SPEC, "evaluator", 0)


def test_a_process_without_a_cluster_is_chief():
    assert is_chief()
    assert is_chief(ClusterSpec({}), None, None)


def test_tasks_that_train_together_are_numbered_chief_first():
    assert id_in_cluster(EVERYONE, "chief", 0) == 0
    assert [id_in_cluster(EVERYONE, "worker", i) for i in range(2)] == [1, 2]
    assert [id_in_cluster(SPEC, "worker", i) for i in range(3)] == [0, 1, 2]
    assert id_in_cluster(EVERYONE, "evaluator", 0) == 0


def test_a_parameter_server_has_no_number_among_those_that_train():
    with pytest.raises(ValueError, match="There is no id for task_type 'ps'"):
        id_in_cluster(SPEC, "ps", 0)
    with pytest.raises(ValueError, match="task_type 'ps'"):
        worker_count(SPEC, "ps")


def test_workers_are_counted_with_the_chief_and_evaluators_alone():
    assert worker_count(EVERYONE, "worker") == worker_count(EVERYONE, "chief") == 3
    assert worker_count(SPEC, "worker") == 3
    assert worker_count(EVERYONE, "evaluator") == 1


def test_all_tasks_are_numbered_chief_first_and_parameter_servers_last():
    cluster = {"ps": ["p0", "p1"], "worker": ["w0", "w1", "w2"], "evaluator": ["e"], "chief": ["c"]}

    order = [("chief", 0), ("evaluator", 0), *(("worker", i) for i in range(3)), ("ps", 0), ("ps", 1)]
    assert [global_id_in_cluster(cluster, *task) for task in order] == list(range(7))


def test_an_evaluator_that_is_not_listed_has_no_global_number():
    with pytest.raises(ClusterError, match="No such job in cluster: 'evaluator'"):
        global_id_in_cluster(SPEC, "evaluator", 0)


def test_collectives_are_led_by_the_chief_or_else_by_worker_0():
    assert collective_leader(EVERYONE, "worker", 1) == "/job:chief/replica:0/task:0"
    assert collective_leader(SPEC, "ps", 0) == "/job:worker/replica:0/task:0"


def test_nobody_leads_an_evaluator_or_a_process_that_is_alone():
    assert collective_leader(EVERYONE, "evaluator", 0) == ""
    assert collective_leader({}, None, None) == ""


def test_coordination_is_led_by_a_parameter_server_if_there_is_one():
    assert coordination_leader(EVERYONE) == "/job:ps/replica:0/task:0"
    assert coordination_leader({"worker": ["w"], "chief": ["c"]}) == "/job:chief/replica:0/task:0"
    assert coordination_leader({"worker": ["w"]}) == "/job:worker/replica:0/task:0"
    assert coordination_leader({}) == ""


def test_a_cluster_in_which_nobody_can_lead_is_refused():
    with pytest.raises(ClusterError, match="Nobody in this cluster can lead"):
        collective_leader({"ps": ["p"]}, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        pytest.param({"some_job": ["a"], "worker": ["b"]}, (), "Disallowed task type 'some_job'", id="job"),
        pytest.param(SPEC, ("foobar", 0), "Unrecognized task_type 'foobar'", id="task-type"),
        pytest.param(SPEC, ("chief", 0), "`task_type` 'chief' is not in the cluster", id="absent-job"),
        pytest.param({"chief": ["a", "b", "c"]}, (), "at most one chief, and the cluster has 3", id="chiefs"),
        pytest.param({"evaluator": ["a", "b"]}, (), "at most one evaluator", id="evaluators"),
        pytest.param(SPEC, ("worker", 3), "The `task_id` 3 exceeds the maximum id of worker, which is 2", id="task-id"),
        pytest.param({"worker": {1: "a", 3: "b"}}, ("worker", 2), r"`task_id` 2 is not among.*\[1, 3\]", id="hole"),
    ],
)
def test_a_cluster_with_a_wrong_role_is_refused(cluster, task, text):
    with pytest.raises(ValueError, match=text):
        validate_cluster(cluster, *task)


def test_all_that_is_wrong_with_a_cluster_is_said_at_once():
    with pytest.raises(ClusterError, match="(?s)Disallowed task type 'x'.*at most one chief.*Unrecognized task_type"):
        validate_cluster({"chief": ["a", "b"], "x": ["c"]}, "y", 0)


def test_an_evaluator_need_not_be_listed():
    assert validate_cluster(SPEC, "evaluator", 0) == ClusterSpec(SPEC)


# What a coordinator tells its workers about themselves: where they listen, how many train, and who is chief.


def places(cluster, *jobs):
    spec = ClusterSpec(cluster)
    return [
        (job, index, spec.task_address(job, index), worker_count(spec, job), is_chief(spec, job, index))
        for job in jobs
        for index in spec.task_indices(job)
    ]


def test_three_workers_train_together_and_the_first_is_chief():
    assert places({"worker": ["a:1", "b:1", "c:1"]}, "worker") == [
        ("worker", 0, "a:1", 3, True),
        ("worker", 1, "b:1", 3, False),
        ("worker", 2, "c:1", 3, False),
    ]


def test_a_chief_and_three_workers_train_together_and_the_chief_is_chief():
    assert places({"chief": ["d:1"], "worker": ["a:1", "b:1", "c:1"]}, "chief", "worker") == [
        ("chief", 0, "d:1", 4, True),
        ("worker", 0, "a:1", 4, False),
        ("worker", 1, "b:1", 4, False),
        ("worker", 2, "c:1", 4, False),
    ]


def test_an_evaluator_is_alone_beside_three_workers():
    cluster = {"worker": ["a:1", "b:1", "c:1"], "evaluator": ["e:1"]}

    assert places(cluster, "evaluator") == [("evaluator", 0, "e:1", 1, True)]
    assert places(cluster, "worker")[0] == ("worker", 0, "a:1", 3, True)


# The server of one task.


def test_a_server_of_the_only_task_needs_no_words():
    server = Server({"worker": ["a:2222"]}, start=False)

    assert server.server_def == ServerDef(ClusterSpec({"worker": ["a:2222"]}), "worker", 0, "grpc", None)
    assert server.target == "grpc://a:2222"


def test_a_server_of_one_of_several_jobs_must_be_told_which():
    with pytest.raises(ValueError, match=r"(?s)Must specify an explicit `job_name`.*\['ps', 'worker'\]"):
        Server(SPEC, start=False)


def test_a_server_of_one_of_several_tasks_must_be_told_which():
    with pytest.raises(ValueError, match="Must specify an explicit `task_index`"):
        Server(SPEC, "worker", start=False)


def test_the_only_task_may_have_any_number():
    assert Server({"worker": {7: "a:1"}}, start=False).server_def.task_index == 7


@pytest.mark.parametrize(("job", "index"), [("chief", 0), ("worker", 3)])
def test_a_server_of_a_task_that_is_not_there_is_refused(job, index):
    with pytest.raises(ValueError, match="No such job in cluster|No task with index 3"):
        Server(SPEC, job, index, start=False)


def test_arguments_replace_the_fields_of_a_server_def():
    given_def = ServerDef(ClusterSpec(SPEC), "worker", 1, "grpc", "config")

    assert Server(given_def, start=False).server_def == given_def
    assert Server(given_def, task_index=0, start=False).target == "grpc://w0:2222"
    assert Server(given_def, "ps", protocol="mpi", start=False).target == "mpi://p1:2222"
    assert Server(given_def, config="other", start=False).server_def.default_session_config == "other"


def test_a_server_of_what_is_no_cluster_is_refused():
    with pytest.raises(TypeError, match="needs a dictionary from job names to addresses"):
        Server(5, start=False)


def test_a_local_server_listens_at_any_free_port():
    assert Server.create_local_server(start=False).server_def.cluster == ClusterSpec({"localhost": ["localhost:0"]})


def test_a_server_that_would_have_to_start_says_that_it_cannot():
    with pytest.raises(NotAvailableError, match=r"`Server.start\(\)` cannot serve grpc://a:1.*runs in one process"):
        Server({"worker": ["a:1"]})
    with pytest.raises(NotAvailableError, match=r"`Server.join\(\)`"):
        Server({"worker": ["a:1"]}, start=False).join()


def test_a_wrong_server_is_refused_for_what_is_wrong_before_anything_starts():
    with pytest.raises(ClusterError, match="Must specify an explicit `job_name`"):
        Server(SPEC)


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ({"cluster": SPEC, "task": {"type": "ps"}}, "grpc://p0:2222"),
        ({"cluster": SPEC, "task": {"type": "worker", "index": 2}, "rpc_layer": "http"}, "http://w2:2222"),
        ({"cluster": {"chief": ["c:1"]}, "task": {"type": "chief", "index": "0"}}, "grpc://c:1"),
    ],
)
def test_tf_config_says_which_server_to_start(monkeypatch, config, target):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    with pytest.raises(NotAvailableError, match=f"cannot serve {target}"):
        serve_from_tf_config()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"task": {"type": "worker"}}, id="no-cluster"),
        pytest.param({"cluster": SPEC}, id="no-task"),
        pytest.param({"cluster": SPEC, "task": {"index": 0}}, id="no-type"),
        pytest.param({"cluster": {"ps": ["p:1"]}, "task": {"type": "ps"}}, id="nobody-trains"),
    ],
)
def test_tf_config_must_say_which_server_to_start(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    with pytest.raises(ValueError, match="TF_CONFIG does not say which server to start"):
        serve_from_tf_config()


# The configuration of 2018.


def test_a_distribute_config_is_three_nones_unless_said_otherwise():
    assert DistributeConfig() == (None, None, None)


def test_a_distribute_config_is_read_by_name_and_never_changed():
    config = DistributeConfig(eval_distribute="mirrored", remote_cluster=SPEC)

    assert (config.train_distribute, config.eval_distribute, config.remote_cluster) == (None, "mirrored", SPEC)
    with pytest.raises(AttributeError):
        config.train_distribute = "mirrored"
