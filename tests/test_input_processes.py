"""Which rows reach which process? Tried with real processes, since the answer is an agreement between them."""

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

def tell(dataset):
    told = []
    for element in dataset:
        mask = element.mask
        rows = [np.asarray(part).tolist() for part in element.values]
        total = None if mask is None else int(np.asarray(mask.addressable_shards[0].data)[0, 1])
        told.append([rows, total, element.data.shape[0]])
    print(json.dumps(told))
"""


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
    return [json.loads(out) for out, _ in said]


def test_processes_keep_the_rows_of_their_replicas():
    first, second = run("tell(distribute_dataset(strategy, data.from_arrays(np.arange(11), 8)))")

    assert first == [[[[0, 1], [2, 3]], 8, 8], [[[8], [9]], 3, 8]]
    assert second == [[[[4, 5], [6, 7]], 8, 8], [[[10], []], 3, 8]]


def test_processes_that_shuffle_each_in_its_own_way_are_stopped():
    first, second = run("""
    def shuffled():
        yield np.random.default_rng(me).permutation(8)

    try:
        tell(distribute_dataset(strategy, shuffled))
    except ValueError as error:
        print(json.dumps(str(error)))
    """)

    assert "Batch 0 of function `shuffled` is not the same on all processes" in first
    assert first == second


def test_a_place_saved_on_two_processes_is_found_on_one():
    program = """
    iterator = iter(distribute_dataset(strategy, data.from_arrays(np.arange(23), 5, shuffle=1)))
    next(iterator)
    next(iterator)
    print(json.dumps(iterator.get_state()))
    """
    states = run(program)
    (rest,) = run(
        f"""
    iterator = iter(distribute_dataset(strategy, data.from_arrays(np.arange(23), 5, shuffle=1)))
    iterator.set_state({states[0]!r})
    tell(iterator)
    """,
        processes=1,
    )
    (whole,) = run("tell(distribute_dataset(strategy, data.from_arrays(np.arange(23), 5, shuffle=1)))", processes=1)

    assert states[0] == states[1]
    assert rest == whole[2:]


def test_each_process_by_itself_goes_through_all_of_the_data():
    first, second = run(
        'tell(distribute_dataset(strategy, data.from_arrays(np.arange(8), 8), InputOptions(shard="off")))'
    )

    assert first == second == [[[[0, 1], [2, 3]], 8, 8], [[[4, 5], [6, 7]], 8, 8]]


def test_files_are_divided_and_the_process_with_fewer_rows_waits_on_padding():
    first, second = run("""
    found = {0: np.arange(8), 1: np.arange(8, 11), 2: np.arange(11, 16)}
    files = data.from_files(found, found.__getitem__, batch_size=8)
    tell(distribute_dataset(strategy, files, InputOptions(shard="files")))
    """)

    assert [rows for rows, _, _ in first] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[11, 12], [13, 14]], [[15], []]]
    assert [rows for rows, _, _ in second] == [[[8, 9], [10]], [[], []], [[], []], [[], []]]
    assert [total for _, total, _ in first] == [total for _, total, _ in second] == [7, 4, 4, 1]


def test_too_few_files_are_divided_by_rows_and_the_explanation_says_so():
    told = run("""
    dataset = distribute_dataset(strategy, data.from_files([0], lambda i: np.arange(4), 4), InputOptions(shard="files"))
    explanation = dataset.explain()
    rows = [np.asarray(part).tolist() for element in dataset for part in element.values]
    print(json.dumps([explanation.shard, explanation.why, rows]))
    """)

    assert [shard for shard, _, _ in told] == ["rows", "rows"]
    assert "1 file(s) are too few for 2 processes" in told[0][1]
    assert [rows for _, _, rows in told] == [[[0], [1]], [[2], [3]]]


def test_what_has_no_files_cannot_be_divided_by_them():
    (first, _) = run("""
    try:
        distribute_dataset(strategy, [np.arange(4)], InputOptions(shard="files"))
    except ValueError as error:
        print(json.dumps(str(error)))
    """)

    assert "a list of 1 batches has no files to divide among 2 processes" in first


def test_a_function_is_told_its_pipeline_and_an_early_end_is_padding():
    first, second = run("""
    def make(context):
        assert context.num_input_pipelines == 2 and context.num_replicas_in_sync == 4
        return [np.array([10 * context.input_pipeline_id + i]) for i in range(2 + 3 * context.input_pipeline_id)]

    tell(distribute_from_function(strategy, make))
    """)

    assert [rows for rows, _, _ in first] == [[[0], [1]], [[], []], [[], []]]
    assert [rows for rows, _, _ in second] == [[[10], [11]], [[12], [13]], [[14], []]]
    assert [total for _, total, _ in first] == [4, 2, 1]


def test_a_process_that_left_the_loop_is_named_after_the_deadline():
    first, second = run("""
    from replicax._input import agreement
    agreement.DEADLINE_SECONDS = 1
    iterator = iter(distribute_from_function(strategy, lambda context: [np.array([i]) for i in range(8)]))
    next(iterator)
    message = ""
    if me == 0:
        try:
            next(iterator)
        except TimeoutError as error:
            message = str(error)
    print(json.dumps(message))
    """)

    assert "Process 1 did not ask for batch 1 of a list of 8 batches within 1 s" in first
    assert second == ""
