"""Whatever happens to a save or to its files, a run goes on from a complete checkpoint or is told which file is bad."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from replicax._errors import CheckpointDamagedError
from replicax.train import Checkpoint, CheckpointManager, _store
from tests.faults.checkpoint_child import Run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed():
    """The digest of the state after each step of a run that nobody kills."""
    run, digests = Run(), {}
    for step in range(60):
        digests[step] = run.digest()
        run.step()
    return digests


def start(directory, steps, *options):
    """Runs one child to its end; returns how it ended, what it said first and what it said last."""
    command = [sys.executable, "-m", "tests.faults.checkpoint_child", str(directory), str(steps), *map(str, options)]
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert lines, child.stderr
    return child, lines[0], lines[-1]


def finished_steps(directory):
    return [int(path.name.removeprefix("ckpt-")) for path in directory.glob("ckpt-*") if _store.is_finished(path)]


# One save is about 30 events: folders made, files opened to write and to read back, the manifest renamed, an old
# checkpoint removed. The plan goes through the events of the first three saves of each process.
PLAN = [1 + 4 * i for i in range(20)]


@pytest.mark.processes
def test_a_run_killed_twenty_times_while_saving_always_goes_on_from_a_complete_checkpoint(tmp_path, undisturbed):
    directory = tmp_path / "checkpoints"
    resumed_at = []
    for number, event in enumerate(PLAN):
        mode = ("--async-save",) if number % 2 else ()
        child, begun, _ = start(directory, 1000, "--kill-at", event, *mode)
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert begun["digest"] == undisturbed[begun["step"]]
        resumed_at.append(begun["step"])

    child, begun, ended = start(directory, 40)
    assert child.returncode == 0, child.stderr
    assert begun["digest"] == undisturbed[begun["step"]]
    assert ended["digest"] == undisturbed[40]
    assert resumed_at == sorted(resumed_at), "a restart went back behind an earlier one"
    assert begun["step"] >= 10, "most processes got far enough to finish a save"


BYTES = [1, 40_000, 1 << 19, (1 << 20) - 1, 1 << 20, (1 << 20) + (1 << 18)]


@pytest.mark.processes
def test_a_run_killed_in_the_middle_of_writing_a_file_goes_on_from_a_complete_checkpoint(tmp_path, undisturbed):
    directory = tmp_path / "checkpoints"
    start(directory, 3)
    for limit in BYTES:
        child, begun, _ = start(directory, 1000, "--kill-at-byte", limit)
        assert child.returncode == -signal.SIGXFSZ, child.stderr
        assert (begun["step"], begun["digest"]) == (3, undisturbed[3])

    _, begun, ended = start(directory, 5)
    assert begun["told"], "the checkpoint that was not finished is mentioned"
    assert (ended["step"], ended["digest"]) == (5, undisturbed[5])


@pytest.mark.processes
@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_full_disk_is_reported_and_costs_no_earlier_checkpoint(tmp_path, undisturbed, mode):
    directory = tmp_path / "checkpoints"
    start(directory, 3)
    child, *_ = start(directory, 1000, "--full-at-byte", 1 << 19, *mode)

    assert child.returncode == 1
    assert f"CheckpointError: The checkpoint {directory}/ckpt-4 was not written" in child.stderr
    assert sorted(finished_steps(directory)) == [2, 3]
    assert start(directory, 3)[1]["digest"] == undisturbed[3]


def test_fifty_flipped_bits_are_fifty_named_files(tmp_path):
    run = Run()
    Checkpoint(run=run).save(tmp_path / "c")
    files = sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file())
    other = Run()
    other.step()
    before = other.digest()

    chance = random.Random(20)
    for number in range(50):
        file = files[number % len(files)]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointDamagedError) as caught:
            Checkpoint(run=other).restore(tmp_path / "c")
        assert str(file.relative_to(tmp_path / "c")) in str(caught.value)
        assert other.digest() == before, "nothing was restored"
        file.write_bytes(content)

    Checkpoint(run=other).restore(tmp_path / "c").assert_consumed()
    assert other.digest() == run.digest()


# -- the manager passes over what is damaged and says so


@pytest.fixture
def managed(tmp_path):
    value = rx.Variable(np.zeros(1 << 18, np.float32))
    manager = CheckpointManager(Checkpoint(value=value), tmp_path / "m", async_save=False)
    for step in (1, 2, 3):
        value.assign(value.value + 1)
        manager.save(step)
    value.assign(value.value * 0)
    return manager, value


def array_file(manager, step):
    return next((Path(manager.directory) / f"ckpt-{step}").glob("arrays-*/0000-*/0"))


HARMS = {
    "a flipped bit": lambda file: file.write_bytes(b"\x01" + file.read_bytes()[1:]),
    "a file cut short": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "a file removed": lambda file: file.unlink(),
    "the manifest removed": lambda file: (file.parents[2] / _store.MANIFEST).unlink(),
    "the manifest cut short": lambda file: (file.parents[2] / _store.MANIFEST).write_bytes(b"{"),
}
NAMED = {"the manifest removed": _store.MANIFEST, "the manifest cut short": _store.MANIFEST}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_restored(managed, harm):
    manager, value = managed
    HARMS[harm](array_file(manager, 3))

    with pytest.warns(RuntimeWarning, match=rf"Passed over(?s:.*)ckpt-3(?s:.*){NAMED.get(harm, '0000-value/0')}"):
        assert manager.restore_latest() == 2

    assert float(value.value[0]) == 2
    assert manager.latest == 2


def test_two_damaged_checkpoints_are_both_named(managed):
    manager, value = managed
    for step in (3, 2):
        HARMS["a flipped bit"](array_file(manager, step))

    with pytest.warns(RuntimeWarning) as caught:
        assert manager.restore_latest() == 1

    assert [word for warning in caught for word in ("ckpt-3", "ckpt-2") if word in str(warning.message)] == [
        "ckpt-3",
        "ckpt-2",
    ]
    assert float(value.value[0]) == 1


def test_if_none_is_whole_the_run_does_not_silently_start_again(managed):
    manager, value = managed
    for step in (1, 2, 3):
        HARMS["a flipped bit"](array_file(manager, step))

    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointDamagedError, match="ckpt-1\n  ckpt-2\n  ckpt-3"):
        manager.restore_latest()


def test_training_goes_on_past_a_damaged_checkpoint_and_replaces_it(managed):
    manager, value = managed
    HARMS["a flipped bit"](array_file(manager, 3))
    with pytest.warns(RuntimeWarning):
        manager.restore_latest()

    value.assign(value.value + 1)
    manager.save(3)

    value.assign(value.value * 0)
    assert manager.restore_latest() == 3
    assert float(value.value[0]) == 3
