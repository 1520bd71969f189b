"""MultiWorkerMirroredStrategy: alone it works, in a cluster it says what is missing."""

import copy
import json

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver

WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def resolver(cluster, task_type="worker", task_id=0):
    return SimpleClusterResolver(rx.cluster.ClusterSpec(cluster), task_type=task_type, task_id=task_id)


def test_without_a_cluster_it_is_a_strategy_of_this_machine():
    strategy = rx.MultiWorkerMirroredStrategy()

    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == (jax.devices()[0],)
    assert strategy.extended.should_checkpoint and strategy.extended.should_save_summary
    assert strategy.extended.experimental_between_graph
    assert isinstance(strategy.cluster_resolver, TFConfigClusterResolver)
    assert strategy.cluster_resolver.task_type is None and strategy.cluster_resolver.task_id is None
    assert rx.experimental.MultiWorkerMirroredStrategy is rx.MultiWorkerMirroredStrategy


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_step_runs(eager):
    strategy = rx.MultiWorkerMirroredStrategy(eager=eager)
    with strategy.scope():
        w = rx.Variable(1.0, aggregation="mean")

    strategy.run(lambda x: w.assign_add(x), (jnp.asarray(2.0),))

    assert w.numpy() == 3.0
    assert copy.deepcopy(strategy).num_replicas_in_sync == 1


def test_the_only_worker_of_a_cluster_needs_nobody():
    alone = resolver({"worker": ["a:1"], "ps": ["b:1"]})

    assert rx.MultiWorkerMirroredStrategy(alone).cluster_resolver is alone
    assert rx.MultiWorkerMirroredStrategy(resolver({**WORKERS, "evaluator": ["c:1"]}, "evaluator")).is_chief


def test_options_are_those_of_the_strategy_in_either_spelling():
    nccl = rx.CommunicationImplementation.NCCL
    options = rx.CommunicationOptions(implementation="nccl")
    alone = resolver({})

    for strategy in (
        rx.MultiWorkerMirroredStrategy(alone, options),
        rx.MultiWorkerMirroredStrategy(cluster_resolver=alone, communication_options=options),
        rx.experimental.MultiWorkerMirroredStrategy(nccl, alone),
        rx.experimental.MultiWorkerMirroredStrategy(communication=nccl, cluster_resolver=alone),
    ):
        assert strategy.communication_options == options and strategy.cluster_resolver is alone


def test_several_workers_are_not_available_and_the_error_says_what_is_missing(monkeypatch):
    with pytest.raises(rx.NotAvailableError, match="(?s)2 processes train.*What is missing"):
        rx.MultiWorkerMirroredStrategy(resolver(WORKERS))

    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 1}}))
    with pytest.raises(NotImplementedError, match=r"a:1.*b:1"):
        rx.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("worker:1",), "needs a cluster resolver"),
        ((None, "nccl"), "needs an `rx.CommunicationOptions`"),
        ((resolver(WORKERS, None, None),), "you must also specify `task_type` and `task_id`"),
        ((resolver(WORKERS, "worker", 2),), "exceeds the maximum id of worker"),
        ((resolver({**WORKERS, "ps": ["c:1"]}, "ps"),), "and this is 'ps'"),
        ((resolver({**WORKERS, "boss": ["c:1"]}),), "Disallowed task type 'boss'"),
    ],
    ids=["resolver", "options", "no-task", "no-such-task", "ps", "job"],
)
def test_what_makes_no_sense_is_refused_before_anything_is_said_to_be_missing(arguments, text):
    with pytest.raises(ValueError, match=text):
        rx.MultiWorkerMirroredStrategy(*arguments)


def test_one_thing_is_said_once():
    with pytest.raises(ValueError, match="which it says too"):
        rx.MultiWorkerMirroredStrategy(None, rx.CommunicationOptions(), communication="nccl")


def test_parameter_servers_have_a_name_and_say_what_is_missing():
    assert rx.ParameterServerStrategy is rx.experimental.ParameterServerStrategy
    with pytest.raises(rx.NotAvailableError, match="(?s)What is missing.*CentralStorageStrategy"):
        rx.ParameterServerStrategy(resolver({**WORKERS, "ps": ["c:1"]}), variable_partitioner=None)
