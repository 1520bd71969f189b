"""A monitor takes the steps it was asked for, ends with the data, and survives errors that pass."""

import numpy as np
import pytest

import replicax as rx


class Counter:
    """A step that adds the next number of its data to `total`; fails when told to."""

    def __init__(self, data=range(1, 100), fail_at=()):
        self.total = rx.Variable(0, name="total")
        self.data = rx.get_strategy().distribute_dataset([np.array([x]) for x in data])
        self.fail_at = list(fail_at)
        self.calls = 0
        self.iterator = iter(self.data)

    def __call__(self):
        self.calls += 1
        number = self.iterator.get_next()
        if self.calls in self.fail_at:
            raise OSError("the file system is away")
        self.total.assign_add(number[0])

    def manager(self, directory):
        checkpoint = rx.Checkpoint(total=self.total, data=self.iterator)
        return rx.CheckpointManager(checkpoint, directory, async_save=False)


def test_takes_as_many_steps_as_asked_for():
    step = Counter()
    monitor = rx.train.Monitor(step)

    assert monitor.run_steps(1) == 1
    assert monitor.run_steps(3) == 3
    with pytest.raises(ValueError, match="a number of steps"):
        monitor.run_steps(-1)
    assert int(step.total) == 10
    assert monitor.steps_done == 4


def test_ends_silently_with_the_data():
    step = Counter(range(1, 4))

    assert rx.train.Monitor(step).run_steps() == 3
    assert int(step.total) == 6


def test_an_iterator_of_python_ends_it_too():
    numbers = iter([1, 2, 3])

    assert rx.train.Monitor(lambda: next(numbers)).run_steps() == 3


@pytest.mark.parametrize("steps", [-1, 1.5, "3"])
def test_a_number_of_steps_is_a_count(steps):
    with pytest.raises(ValueError, match="takes a number of steps"):
        rx.train.Monitor(lambda: None).run_steps(steps)


def test_a_session_is_an_error():
    with pytest.raises(ValueError, match="Should not provide"):
        rx.train.Monitor(lambda: None, session=object())


def test_after_an_error_it_goes_on_from_the_last_checkpoint(tmp_path):
    step = Counter(range(1, 11), fail_at=[6, 9])
    monitor = rx.train.Monitor(step, manager=step.manager(tmp_path), save_every=2, max_restarts=2)

    with pytest.warns(RuntimeWarning) as warned:
        monitor.run_steps()

    assert [str(w.message).split("). ")[1] for w in warned] == [
        "Going on from step 4; restart 1 of 2.",
        "Going on from step 6; restart 2 of 2.",
    ]
    assert int(step.total) == sum(range(1, 11))
    assert monitor.restarts == 2
    assert monitor.steps_done == 10


def test_an_error_before_the_first_checkpoint(tmp_path):
    step = Counter(range(1, 4), fail_at=[2])
    monitor = rx.train.Monitor(step, manager=step.manager(tmp_path), save_every=100, max_restarts=1)

    with pytest.warns(RuntimeWarning, match="from step 0"):
        monitor.run_steps()

    assert int(step.total) == 6


def test_one_error_too_many_is_raised(tmp_path):
    step = Counter(fail_at=[2, 3])
    monitor = rx.train.Monitor(step, manager=step.manager(tmp_path), save_every=1, max_restarts=1)

    with pytest.warns(RuntimeWarning), pytest.raises(OSError, match="away"):
        monitor.run_steps(5)


def test_a_wrong_program_is_not_tried_again(tmp_path):
    step = Counter()
    monitor = rx.train.Monitor(lambda: 1 + "1", manager=step.manager(tmp_path), save_every=1, max_restarts=5)

    with pytest.raises(TypeError):
        monitor.run_steps(1)
    assert monitor.restarts == 0


def test_a_program_started_again_continues(tmp_path):
    first = Counter(range(1, 11))
    rx.train.Monitor(first, manager=first.manager(tmp_path), save_every=3).run_steps(7)

    again = Counter(range(1, 11))
    monitor = rx.train.Monitor(again, manager=again.manager(tmp_path), save_every=3)

    assert monitor.steps_done == 6
    assert monitor.run_steps() == 4
    assert int(again.total) == sum(range(1, 11))


def test_saving_needs_a_place():
    with pytest.raises(ValueError, match="nowhere to save"):
        rx.train.Monitor(lambda: None, max_restarts=1)
