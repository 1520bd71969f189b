"""Which rows reach which process? Tried with real processes, since the answer is an agreement between them.

Starting processes takes seconds, so one pair of them goes through all `CASES`; each test looks at what was said in one.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.fresh import SETTINGS

pytestmark = pytest.mark.processes

HEAD = """
import json, os, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
import numpy as np
import replicax as rx
from replicax import data
from replicax._input.distribute import distribute_dataset, distribute_from_function
from replicax._input.options import InputOptions
from replicax._placement import place
from replicax._strategy.base import Strategy

strategy = Strategy(place(jax.devices()))
me = jax.process_index()

def told(dataset):
    elements = []
    for element in dataset:
        mask = element.mask
        rows = [np.asarray(part).tolist() for part in element.values]
        total = None if mask is None else int(np.asarray(mask.addressable_shards[0].data)[0, 1])
        elements.append([rows, total, element.data.shape[0]])
    return elements

def refusal(call):
    try:
        return told(call())
    except ValueError as error:
        return str(error)
"""

CASES = {
    "rows": """
        return told(distribute_dataset(strategy, data.from_arrays(np.arange(11), 8)))
    """,
    "a step": """
        dataset = distribute_dataset(strategy, data.from_arrays(np.arange(11.0), 8))
        return [float(strategy.reduce("mean", strategy.run(rx.mean, args=(x,)), axis=None)) for x in dataset]
    """,
    "shuffled by each": """
        def shuffled():
            yield np.random.default_rng(me).permutation(8)

        return refusal(lambda: distribute_dataset(strategy, shuffled))
    """,
    "each by itself": """
        return told(distribute_dataset(strategy, data.from_arrays(np.arange(8), 8), InputOptions(shard="off")))
    """,
    "files": """
        found = {0: np.arange(8), 1: np.arange(8, 11), 2: np.arange(11, 16)}
        files = data.from_files(found, found.__getitem__, batch_size=8)
        return told(distribute_dataset(strategy, files, InputOptions(shard="files")))
    """,
    "one file": """
        file = data.from_files([0], lambda i: np.arange(4), 4)
        dataset = distribute_dataset(strategy, file, InputOptions(shard="files"))
        return [dataset.explain().shard, dataset.explain().why, told(dataset)]
    """,
    "no files": """
        return refusal(lambda: distribute_dataset(strategy, [np.arange(4)], InputOptions(shard="files")))
    """,
    "a function": """
        def make(context):
            assert context.num_input_pipelines == 2 and context.num_replicas_in_sync == 4
            return [np.array([10 * context.input_pipeline_id + i]) for i in range(2 + 3 * context.input_pipeline_id)]

        return told(distribute_from_function(strategy, make))
    """,
    "an early end": """
        def batches():
            for start in range(0, 8 * (3 - me), 8):
                yield np.arange(start, start + 8)

        return refusal(lambda: distribute_dataset(strategy, batches))
    """,
    "another length": """
        return refusal(lambda: distribute_dataset(strategy, [np.arange(8)] * (1 + me)))
    """,
    "nothing on one": """
        return refusal(lambda: distribute_dataset(strategy, lambda: iter([np.arange(8)] * me)))
    """,
    "a failure": """
        def broken(context=None):
            if me == 1:
                raise OSError("disk gone")
            yield np.arange(8)

        def calls(context):
            return broken()

        return [refusal(lambda: distribute_dataset(strategy, broken)),
                refusal(lambda: distribute_from_function(strategy, calls))]
    """,
    "no data for one": """
        return refusal(lambda: distribute_from_function(strategy, lambda context: [np.arange(2)] * 2 * me))
    """,
    "resumed after the end of one": """
        def make(context):
            return [np.array([10 * context.input_pipeline_id + i]) for i in range(2 + 2 * context.input_pipeline_id)]

        left = iter(distribute_from_function(strategy, make))
        next(left)
        resumed = iter(distribute_from_function(strategy, make))
        resumed.set_state(left.get_state())
        return told(resumed)
    """,
    "a loop that was left": """
        from replicax._input import agreement
        agreement.DEADLINE_SECONDS = 1
        iterator = iter(distribute_from_function(strategy, lambda context: [np.array([i]) for i in range(8)]))
        next(iterator)
        if me == 1:
            return ""
        try:
            next(iterator)
        except TimeoutError as error:
            return str(error)
    """,
}


def run(program, processes=2, deadline=120):
    """Runs `program` in several processes; what each printed, from JSON."""
    with socket.socket() as reserved:  # bound and never listening: nobody else is given the port, and JAX may take it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | {
            "COORDINATOR": f"127.0.0.1:{reserved.getsockname()[1]}",
            "PROCESSES": str(processes),
            "NPROC": "8",
        }
        children = [
            subprocess.Popen(
                [sys.executable, "-c", HEAD + textwrap.dedent(program)],
                env=environment | {"PROCESS": str(process)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(processes)
        ]
        try:
            said = [child.communicate(timeout=deadline) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
    summary = "\n".join(
        f"process {i}: exit code {child.returncode}\n{err}"
        for i, (child, (_, err)) in enumerate(zip(children, said, strict=True))
    )
    assert all(child.returncode == 0 for child in children), summary
    return [json.loads(out.splitlines()[-1]) for out, _ in said]  # before it speaks gloo


@pytest.fixture(scope="module")
def said():
    """What each of two processes said in every case."""
    bodies = [
        f"def case_{i}():{textwrap.indent(textwrap.dedent(body), '    ')}" for i, body in enumerate(CASES.values())
    ]
    calls = ", ".join(f"case_{i}()" for i in range(len(CASES)))
    first, second = run("\n".join([*bodies, f"print(json.dumps([{calls}]))"]))
    return {case: [first[i], second[i]] for i, case in enumerate(CASES)}


def test_processes_keep_the_rows_of_their_replicas(said):
    first, second = said["rows"]

    assert first == [[[[0, 1], [2, 3]], 8, 8], [[[8], [9]], 3, 8]]
    assert second == [[[[4, 5], [6, 7]], 8, 8], [[[10], []], 3, 8]]


def test_a_mean_over_a_short_batch_is_the_same_on_all_processes(said):
    assert said["a step"] == [[3.5, 9.0], [3.5, 9.0]]


def test_processes_that_shuffle_each_in_its_own_way_are_stopped(said):
    first, second = said["shuffled by each"]

    assert "shuffled` is not the same on all processes" in first and "Batch 0 of function" in first
    assert first == second


def test_a_place_saved_on_two_processes_is_found_on_one():
    program = """
    iterator = iter(distribute_dataset(strategy, data.from_arrays(np.arange(23), 5, shuffle=1)))
    next(iterator)
    next(iterator)
    print(json.dumps(iterator.get_state()))
    """
    states = run(program)
    ((rest, whole),) = run(
        f"""
    dataset = distribute_dataset(strategy, data.from_arrays(np.arange(23), 5, shuffle=1))
    iterator = iter(dataset)
    iterator.set_state({states[0]!r})
    print(json.dumps([told(iterator), told(dataset)]))
    """,
        processes=1,
    )

    assert states[0] == states[1]
    assert rest == whole[2:]


def test_each_process_by_itself_goes_through_all_of_the_data(said):
    first, second = said["each by itself"]

    assert first == second == [[[[0, 1], [2, 3]], 8, 8], [[[4, 5], [6, 7]], 8, 8]]


def test_files_are_divided_and_the_process_with_fewer_rows_waits_on_padding(said):
    first, second = said["files"]

    assert [rows for rows, _, _ in first] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[11, 12], [13, 14]], [[15], []]]
    assert [rows for rows, _, _ in second] == [[[8, 9], [10]], [[], []], [[], []], [[], []]]
    assert [total for _, total, _ in first] == [total for _, total, _ in second] == [7, 4, 4, 1]


def test_too_few_files_are_divided_by_rows_and_the_explanation_says_so(said):
    (shard, why, first), (_, _, second) = said["one file"]

    assert shard == "rows"
    assert "1 file(s) are too few for 2 processes" in why
    assert [rows for rows, _, _ in first] == [[[0], [1]]]
    assert [rows for rows, _, _ in second] == [[[2], [3]]]


def test_what_has_no_files_cannot_be_divided_by_them(said):
    assert "a list of 1 batches has no files to divide among 2 processes" in said["no files"][0]


def test_a_function_is_told_its_pipeline_and_an_early_end_is_padding(said):
    first, second = said["a function"]

    assert [rows for rows, _, _ in first] == [[[0], [1]], [[], []], [[], []]]
    assert [rows for rows, _, _ in second] == [[[10], [11]], [[12], [13]], [[14], []]]
    assert [total for _, total, _ in first] == [4, 2, 1]


def test_global_batches_that_end_early_on_one_process_stop_both(said):
    first, second = said["an early end"]

    for message in (first, second):
        assert "batches` does not end at the same step on all processes" in message
    assert "process 1 has 2 batches" in second
    assert "process 0 has batch 2, counted from 0" in second or "process 0 has 3 batches" in second
    assert "process 1 has 2 batches" in first


@pytest.mark.parametrize("process", [0, 1])
def test_sources_of_different_length_are_refused_at_the_first_batch(said, process):
    message = said["another length"][process]

    assert "replica 1: 1 batches" in message and "replica 2: 2 batches" in message


def test_a_process_without_any_data_does_not_keep_the_others_waiting(said):
    assert all("Batch 0 of function" in message and "not the same" in message for message in said["nothing on one"])


@pytest.mark.parametrize("way", [0, 1], ids=["dataset", "function"])
def test_a_source_that_fails_on_one_process_stops_the_others(said, way):
    first, second = said["a failure"]

    assert "Process 1 could not read its part of batch 0" in first[way] and "OSError: disk gone" in first[way]
    assert "failed when it was asked for batch 0" in second[way] and "OSError: disk gone" in second[way]


def test_a_process_that_never_has_data_stops_all(said):
    for message in said["no data for one"]:
        assert "gave some processes no batch at all" in message
        assert "replica 0: nothing" in message and "replica 3: 2 rows" in message


def test_a_process_resumed_after_the_end_of_its_data_goes_on_with_padding(said):
    first, second = said["resumed after the end of one"]

    assert [rows for rows, _, _ in first] == [[[], []]]
    assert [rows for rows, _, _ in second] == [[[12], [13]]]


def test_a_process_that_left_the_loop_is_named_after_the_deadline(said):
    first, second = said["a loop that was left"]

    assert "Process 1 did not ask for batch 1 of a list of 8 batches within 1 s" in first
    assert second == ""
